"""
What the log-probs of right answers cost (`information_gain`, `answer_logprob`), by the number of turns: a training
step with them against the same step without.

    python benchmarks/answers.py [--quick]

Conversations are sampled once, outside the clock: a step is old log-probs, rewards, credit, and the loss with its
gradient. "In the old forward" is what the trainer does where there is one; "a forward of its own" is what it does
elsewhere. Last a whole step, which samples too, of a run that samples with the model itself and has no old log-probs.
Asked at 8 turns: at most 1.15 of the step without, in the old forward, and of the whole step.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from common import build_tokenizer, write
from datasets import Dataset
from measure import interleave
from transformers import Qwen3Config, Qwen3ForCausalLM

from mt_grpo import MTGRPOConfig, MTGRPOEnvTrainer
from mt_grpo.envs.env import Step, StepEnv
from mt_grpo.rewards import InformationGain, OutcomeReward
from mt_grpo.rollout.engines import Sample
from mt_grpo.rollout.engines.transformers import TransformersEngine

GROUP, PROMPT, ACTION, RESULT = 8, 250, 56, 28
"""Conversations, and words of what is said in them; an action is of tokens."""
WORDS = ("Lima", "Peru", "search", "the", "capital", "river", "author", "language")
BOUND = 1e-5
"""Difference of log-probs above which a ratio is void."""
GAIN = InformationGain(prefix="Answer:")


def said(number: int, seed: str) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=number))


class Talk(StepEnv):
    """So many turns, each answered with some words."""

    length: int

    def reset(self, row: dict[str, Any]) -> str:
        return row["prompt"]

    def step(self, turn: Any) -> Step:
        if len(self.turns) == self.length:
            return Step(done=True)
        return Step(said(RESULT, f"{self.session} {len(self.turns)}"))


class Scripted(TransformersEngine):
    """Samples as long as it is told, for the time that takes, and answers with random tokens."""

    samples = True

    async def generate(self, context: list[int], sampling: Any, session: str) -> Sample:
        ids = random.Random(f"{session} {len(context)}").choices(range(300, 800), k=ACTION - 1)
        if self.samples:
            await super().generate(context, replace(sampling, max_tokens=ACTION), session)
        return Sample([*ids, self.tokenizer.eos_token_id], [-1.0] * ACTION, "stop")


class Random(OutcomeReward):
    def score(self, trajectory: Any, **row: Any) -> float:
        return random.Random(trajectory.session).random()


class Replayed(MTGRPOEnvTrainer):
    """Samples its first batch, and takes those conversations again later."""

    kept: list[Any] | None = None

    def _rollout(self, batch: Any) -> None:
        if self.kept is None:
            super()._rollout(batch)
            self.kept = batch.trajectories
        batch.trajectories = [replace(each, rewards={}, answer_logprobs={}) for each in self.kept]


def build(
    model: Qwen3ForCausalLM, folder: str, turns: int, rewards: list[Any], samples: bool, group: int = GROUP
) -> MTGRPOEnvTrainer:
    """A trainer; one that replays its conversations has old log-probs."""
    tokenizer, model, env = build_tokenizer(), copy.deepcopy(model), Talk()
    env.length = turns
    engine = Scripted(model, tokenizer)
    engine.samples = samples
    trainer = (MTGRPOEnvTrainer if samples else Replayed)(
        model,
        env,
        rewards,
        [Random()],
        MTGRPOConfig(
            folder,
            use_vllm=not samples,  # an engine of its own, and a loss that corrects for it
            use_cpu=True,
            bf16=False,
            report_to=[],
            per_device_train_batch_size=group,
            num_generations=group,
            max_completion_length=turns * 256,
            max_turn_length=ACTION,
            gradient_checkpointing=False,
            disable_tqdm=True,
            tokenization_sanity_check_mode="disable",
        ),
        train_dataset=Dataset.from_list([{"prompt": said(PROMPT, "prompt"), "answer": "the river of Lima"}]),
        engine=engine,
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def step(trainer: MTGRPOEnvTrainer) -> dict[str, Any]:
    inputs = trainer._generate_and_score_completions([trainer.train_dataset[0]] * trainer.num_generations)
    trainer.model.zero_grad()
    trainer.compute_loss(trainer.model, inputs).backward()
    return inputs


def apart(trainer: MTGRPOEnvTrainer) -> dict[str, Any]:
    """A step whose answers have a forward of their own."""
    with patch("mt_grpo.training.forward_plan.Forwards.has_old_forward", False):
        return step(trainer)


def values(trainer: MTGRPOEnvTrainer) -> torch.Tensor:
    return torch.tensor([each.answer_logprobs[GAIN.name] for each in trainer.batch.trajectories])


def check(without: MTGRPOEnvTrainer, trainer: MTGRPOEnvTrainer) -> float:
    """The difference between the two ways, and between old log-probs with answers in their forward and without."""
    old = step(without)["old_per_token_logps"]
    ours = step(trainer)["old_per_token_logps"]
    shared = values(trainer)
    apart(trainer)
    gap = max(float((shared - values(trainer)).abs().max()), float((ours - old).abs().max()))
    if gap > BOUND:
        raise SystemExit(f"The two ways differ by {gap:.1e}; a ratio would be void.")
    return gap


def quotients(seconds: dict[str, list[float]], way: str) -> list[float]:
    """Of each repetition: the step with answers over the step without."""
    return [ours / theirs for ours, theirs in zip(seconds[way], seconds["without"], strict=True)]


def row(label: str, turns: int, found: list[float], target: str | None, **more: Any) -> dict[str, Any]:
    median, least = statistics.median(found), min(found)
    print(f"| {label} | {turns} | {median:.3f} | {least:.3f} | {target or ''} |".replace("|  |", "| |"), flush=True)
    asked = {"target": target} if target else {}
    return {"label": f"{label}, {turns} turns", "values": found, **asked, **more}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small, to see that it runs; nothing is written")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lengths, repeats = ((2,), 1) if options.quick else ((4, 8), options.repeats)
    size, group = (32, 2) if options.quick else (128, GROUP)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(build_tokenizer()),
            hidden_size=size,
            intermediate_size=3 * size,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=size // 4,
            max_position_embeddings=8192,
        )
    )
    rows = []
    print("| answers | turns | time with / without, median | least | asked |\n| --- | --- | --- | --- | --- |")
    for samples, turns in itertools.product((False, True), lengths):
        if samples and turns != 8 and not options.quick:
            continue
        with tempfile.TemporaryDirectory() as folder:
            without, trainer = (build(model, folder, turns, rewards, samples, group) for rewards in ([], [GAIN]))
            ways: dict[str, Callable[[], Any]] = {"without": lambda w=without: step(w)}
            if samples:
                ways["a whole step, a forward of its own"] = lambda t=trainer: step(t)
            else:
                ways["in the old forward"] = lambda t=trainer: step(t)
                ways["a forward of its own"] = lambda t=trainer: apart(t)
            for way in ways.values():
                way()
            more = {} if samples else {"difference": check(without, trainer)}
            # the processor's time: cores may be shared with other work
            seconds = interleave(ways, 3 if samples and not options.quick else repeats, time.process_time)
            for way in list(ways)[1:]:
                target = "<= 1.15" if turns == 8 and (samples or way == "in the old forward") else None
                rows.append(row(way, turns, quotients(seconds, way), target, seconds=seconds[way], **more))
            if not options.quick:
                write("answers", {"seed": 0, "repeats": repeats, "threads": 1, "hidden": size}, rows)


if __name__ == "__main__":
    main()
