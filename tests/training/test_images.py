"""Training of a vision-language model: images in prompts and in results of tools, through the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from support.images import build_processor, build_vision_model, picture
from support.models import CPU_RUN
from transformers import AutoModelForImageTextToText

from mt_grpo import MTGRPOConfig, MTGRPOEnvTrainer
from mt_grpo.envs import Outcome

COLORS = ("red", "green", "blue", "white")
ROWS = Dataset.from_list(
    [
        {"prompt": [{"role": "user", "content": "What is it?"}], "images": [picture(color, (24, 16 + 8 * number))]}
        for number, color in enumerate(COLORS)
    ]
)


class Screen:
    """Shows another image after each turn, whatever the model writes, and at last forgets the first one."""

    async def run(self, policy: Any, row: dict[str, Any]) -> Outcome:
        messages = list(row["prompt"])
        for number in range(3):
            turn = await policy.reply(messages, max_tokens=6)
            parts = [{"type": "text", "text": "Now"}, picture("blue", (16, 16 + 8 * number))]
            messages += [turn.message, {"role": "user", "content": parts}]
            if number == 1:
                del messages[1:3]
        return Outcome()

    async def close(self) -> None:
        pass


def words(completions: list[Any], **columns: Any) -> list[float]:
    return [float(sum(map(ord, str(messages[0]["content"]))) % 7) for messages in completions]


def train(folder: Path, **options: Any) -> MTGRPOEnvTrainer:
    processor = build_processor()
    build_vision_model(processor.tokenizer).save_pretrained(folder / "model")
    limits = {"max_steps": 3, "learning_rate": 1e-3, "beta": 0.1, "seed": 3}
    trainer = MTGRPOEnvTrainer(
        AutoModelForImageTextToText.from_pretrained(folder / "model"),
        Screen,
        args=MTGRPOConfig(str(folder / "run"), **{**CPU_RUN, **limits, **options}),
        reward_funcs=words,
        train_dataset=ROWS,
        processing_class=processor,
    )
    trainer.train(options.get("resume_from_checkpoint"))
    return trainer


def losses(trainer: MTGRPOEnvTrainer) -> list[tuple[float, float, float]]:
    return [(line["loss"], line["grad_norm"], line["kl"]) for line in trainer.state.log_history if "loss" in line]


@pytest.mark.slow
def test_three_steps_are_the_same_however_they_are_computed(tmp_path):
    runs = {forward: train(tmp_path / forward, forward=forward) for forward in ("tree", "turn_by_turn", "padded")}
    assert {trainer.args.forward for trainer in runs.values()} == runs.keys()  # none gave up
    expected = losses(runs["turn_by_turn"])
    assert len(expected) == 3
    for forward in ("tree", "padded"):
        for found, values in zip(losses(runs[forward]), expected, strict=True):
            assert found == pytest.approx(values, rel=1e-4, abs=1e-6)
    trained, whole = runs["tree"], build_vision_model(build_processor().tokenizer)
    moved = trained.model.model.visual.patch_embed.proj.weight - whole.model.visual.patch_embed.proj.weight
    assert moved.abs().max() > 1e-4
    assert {one.tree.num_sequences for one in trained.batch.trajectories} == {2}
