"""Scripted conversations to train on, rewards for them, and one batch of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rewards import OutcomeReward, TurnReward
from mt_grpo.rollout import ScriptedEngine
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer
from support.models import CPU_RUN, build_model, lookup

SEARCH = '<tool>{"name": "lookup", "args": {"query": "Lima"}}</tool>'
LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]


class Calls(TurnReward):
    """1 for a turn whose call succeeded."""

    def score(self, turn, trajectory, **row):
        return float(turn.num_failures == 0) if turn.num_attempts else None


class Answered(OutcomeReward):
    """1 for a trajectory that gave an answer, more for a longer one."""

    def score(self, trajectory, **row):
        return 1.0 + len(trajectory.answer) / 10 if trajectory.answer else 0.0


class Letters(OutcomeReward):
    """How many a's the model wrote: differs between samples of a model that knows nothing."""

    def score(self, trajectory, **row):
        return float(sum(turn.text.count("a") for turn in trajectory.turns))


def member(session: str) -> int:
    return int(session.rsplit("-", 1)[1])


def conversation(session: str, turn: int) -> str:
    """Group member 0 searches twice, 1 once, 2 not at all, 3 writes a malformed call first."""
    script = {
        0: [SEARCH, SEARCH, "<answer>Lima</answer>"],
        1: [SEARCH, "<answer>of Peru</answer>"],
        2: ["<answer>no</answer>"],
        3: ["<tool>{</tool>", SEARCH, "<answer>Lima 3</answer>"],
    }
    return script[member(session) % 4][turn]


def batch(trainer: MTGRPOEnvTrainer) -> dict[str, torch.Tensor]:
    trainer.current_gradient_accumulation_steps = 1
    return trainer._generate_and_score_completions([trainer.train_dataset[0]] * 4)


def check_log_probs(trainer, inputs):
    """Every trained token has the log-probability in training that it was sampled with."""
    logps, _, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model,
        torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        inputs["completion_ids"].shape[1],
        **{name: inputs[name] for name in ("parent",) if name in inputs},
    )
    mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    turns = [turn for trajectory in trainer.batch.trajectories for turn in trajectory.turns]
    assert mask.sum() == sum(turn.num_tokens for turn in turns)
    torch.testing.assert_close(logps[mask], inputs["sampling_per_token_logps"][mask], rtol=0, atol=1e-4)


class Spelling(MultiTurnToolEnv):
    """A turn ends with its first letter, so that a model that knows nothing takes several."""

    stop = tuple("abcdefghijklmnopqrstuvwxyz")


class Length(OutcomeReward):
    def score(self, trajectory, **row):
        return float(sum(turn.num_tokens for turn in trajectory.turns))


def trainer_builder(folder: Path, tokenizer: Any, questions: Dataset) -> Callable[..., MTGRPOEnvTrainer]:
    """Makes trainers of a tiny model, on scripted conversations where a script is given."""

    def build(script=conversation, model=None, rewards=None, peft_config=None, **options):
        options = {
            "output_dir": str(folder),
            **CPU_RUN,
            "max_completion_length": 400,
            "advantage_estimator": "mt_grpo",
            "learning_rate": 1e-2,
            "max_steps": 2,
            **options,
        }
        return MTGRPOEnvTrainer(
            build_model(tokenizer) if model is None else model,
            MultiTurnToolEnv([lookup], protocol="learnt_tags", max_steps=3),
            *(rewards or ((Calls(),), (Answered(),))),
            MTGRPOConfig(**options),
            train_dataset=questions,
            eval_dataset=questions,
            engine=ScriptedEngine(tokenizer, script) if script else None,
            processing_class=tokenizer,
            peft_config=peft_config,
        )

    return build
