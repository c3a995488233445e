"""Training of a model that hears: sounds in prompts and in results of tools, through the trainer."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Audio, Dataset
from support.audio import RATE, SOUND_FAMILIES, tone
from support.images import build_processor, build_vision_model, picture
from support.models import CPU_RUN, build_model
from support.trainers import batch, check_log_probs
from transformers import AutoProcessor, Qwen2AudioForConditionalGeneration

from mt_grpo import MTGRPOConfig, MTGRPOEnvTrainer
from mt_grpo.envs import Outcome
from mt_grpo.errors import ConfigError, UnsupportedModelError
from mt_grpo.images import image_parts
from mt_grpo.rollout.engines.scripted import ScriptedEngine
from mt_grpo.runlog.reader import open_run
from mt_grpo.sounds import Sound, as_wav, read_part, read_sound
from mt_grpo.training.images import with_its_images

ROWS = [
    {"prompt": [{"role": "user", "content": "What is it?"}], "audio": {"array": tone(pitch), "sampling_rate": RATE}}
    for pitch in (30.0, 60.0, 90.0, 120.0)
]


class Player:
    """Plays another sound after each turn, whatever the model writes, and at last forgets the first one."""

    async def run(self, policy: Any, row: dict[str, Any]) -> Outcome:
        messages = list(row["prompt"])
        for number in range(3):
            turn = await policy.reply(messages, max_tokens=6)
            parts = [{"type": "text", "text": "Now"}, {"type": "audio", "audio": tone(50.0, 0.5 + number)}]
            messages += [turn.message, {"role": "user", "content": parts}]
            if number == 1:
                del messages[1:3]
        return Outcome()

    async def close(self) -> None:
        pass


def words(completions: list[Any], **columns: Any) -> list[float]:
    return [float(sum(map(ord, str(messages[0]["content"]))) % 7) for messages in completions]


@cache
def hearing() -> Any:
    return SOUND_FAMILIES["qwen2-audio"][0]()[0]


def trainer_of(folder: Path, env: Any = Player, rows: Any = ROWS, **options: Any) -> MTGRPOEnvTrainer:
    if not (folder / "model").exists():
        SOUND_FAMILIES["qwen2-audio"][0]()[1].save_pretrained(folder / "model")
    limits = {"max_steps": 3, "learning_rate": 1e-3, "seed": 3, "max_turn_length": 6}
    return MTGRPOEnvTrainer(
        Qwen2AudioForConditionalGeneration.from_pretrained(folder / "model"),
        env,
        args=MTGRPOConfig(str(folder / "run"), **{**CPU_RUN, **limits, **options}),
        reward_funcs=words,
        train_dataset=rows,
        processing_class=hearing(),
    )


def trained(folder: Path, resume: str | None = None, **options: Any) -> MTGRPOEnvTrainer:
    trainer = trainer_of(folder, **options)
    trainer.train(resume)
    return trainer


def losses(trainer: MTGRPOEnvTrainer) -> list[tuple[float, ...]]:
    keys = ("loss", "grad_norm", "kl")
    return [tuple(line.get(key, 0.0) for key in keys) for line in trainer.state.log_history if "loss" in line]


@pytest.mark.slow
def test_three_steps_are_the_same_however_they_are_computed(tmp_path):
    runs = {
        forward: trained(tmp_path / forward, forward=forward, beta=0.1)
        for forward in ("tree", "turn_by_turn", "padded")
    }
    assert {trainer.args.forward for trainer in runs.values()} == runs.keys()  # none gave up
    expected = losses(runs["turn_by_turn"])
    assert len(expected) == 3
    for forward in ("tree", "padded"):
        for found, values in zip(losses(runs[forward]), expected, strict=True):
            assert found == pytest.approx(values, rel=1e-4, abs=1e-6)
    tree = runs["tree"]
    fresh = Qwen2AudioForConditionalGeneration.from_pretrained(tmp_path / "tree" / "model")
    moved = tree.model.model.audio_tower.conv1.weight - fresh.model.audio_tower.conv1.weight
    assert moved.abs().max() > 1e-4
    assert {one.tree.num_sequences for one in tree.batch.trajectories} == {2}
