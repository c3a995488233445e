"""Scripted conversations to train on, rewards for them, trainers of both, and what is read off a trainer."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback

from mt_grpo.credit import Audit, RewardAudit, Uncredited
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rewards import OutcomeReward, TurnReward
from mt_grpo.rollout import ScriptedEngine
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer
from mt_grpo.training.step_log.records import as_record
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


LETTERS = ((), (Letters(),))
"""That reward only, as `build` is given rewards."""


class Length(OutcomeReward):
    def score(self, trajectory, **row):
        return float(sum(turn.num_tokens for turn in trajectory.turns))


class Same(OutcomeReward):
    """Tells nothing apart."""

    def score(self, trajectory, **row):
        return 0.9


class Never(TurnReward):
    """Applies to no turn."""

    def score(self, turn, trajectory, **row):
        return None


class Share(TurnReward):
    """A turn's part of the turns of the whole trajectory: it depends on later turns."""

    def score(self, turn, trajectory, **row):
        return 1.0 / len(trajectory.turns)


class Spelling(MultiTurnToolEnv):
    """A turn ends with its first letter, so that a model that knows nothing takes several."""

    stop = tuple("abcdefghijklmnopqrstuvwxyz")


def member(session: str) -> int:
    return int(session.rsplit("-", 1)[1])


def attempt(session: str) -> int:
    """How often the conversation was sampled before."""
    parts = session.split("-")
    return int(parts[3]) if len(parts) == 5 else 0


def conversation(session: str, turn: int) -> str:
    """Group member 0 searches twice, 1 once, 2 not at all, 3 writes a malformed call first."""
    script = {
        0: [SEARCH, SEARCH, "<answer>Lima</answer>"],
        1: [SEARCH, "<answer>of Peru</answer>"],
        2: ["<answer>no</answer>"],
        3: ["<tool>{</tool>", SEARCH, "<answer>Lima 3</answer>"],
    }
    return script[member(session) % 4][turn]


def thinking(session: str, turn: int) -> str:
    """The same, with thoughts that a history may be rewritten without."""
    return "<think>well</think>" + conversation(session, turn)


def one_turn(session: str, turn: int) -> str:
    return f"<answer>Lima {'of Peru ' * member(session)}</answer>"


def batch(trainer: MTGRPOEnvTrainer) -> dict[str, torch.Tensor]:
    trainer.current_gradient_accumulation_steps = 1
    return trainer._generate_and_score_completions([trainer.train_dataset[0]] * 4)


def two_groups(trainer: MTGRPOEnvTrainer) -> list[dict[str, torch.Tensor]]:
    """Fills the buffer of a trainer with a batch of two groups, and returns its micro-batches."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer._prepare_inputs([trainer.train_dataset[index // 4] for index in range(8)])
    return trainer._buffered_inputs


def trained_tokens(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return (inputs["completion_mask"] * inputs["tool_mask"]).bool()


def log_probs(trainer: MTGRPOEnvTrainer, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of each token of a batch, by the trainer's forward."""
    return trainer._get_per_token_logps_and_entropies(
        trainer.model,
        torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        inputs["completion_ids"].shape[1],
        **{name: inputs[name] for name in ("parent",) if name in inputs},
    )[0]


def check_log_probs(trainer: MTGRPOEnvTrainer, inputs: dict[str, torch.Tensor], within: float = 1e-4) -> None:
    """Every trained token has the log-probability in training that it was sampled with."""
    logps, mask = log_probs(trainer, inputs), trained_tokens(inputs)
    turns = [turn for trajectory in trainer.batch.trajectories for turn in trajectory.turns]
    assert mask.sum() == sum(turn.num_tokens for turn in turns)
    torch.testing.assert_close(logps[mask], inputs["sampling_per_token_logps"][mask], rtol=0, atol=within)


def weights(trainer: MTGRPOEnvTrainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether all weights are equal, bit for bit."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def gradient(trainer: MTGRPOEnvTrainer, *batches: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of some batches, or of a new one, and its gradient in one row."""
    trainer.model.zero_grad()
    loss = sum(trainer.compute_loss(trainer.model, each) for each in batches or [batch(trainer)])
    loss.backward()
    learnt = [parameter.grad for parameter in trainer.model.parameters() if parameter.requires_grad]
    return loss.detach(), torch.cat([each.flatten() for each in learnt if each is not None])


def assert_near(gradient: torch.Tensor, expected: torch.Tensor, within: float = 1e-5) -> None:
    assert (gradient - expected).norm() <= within * expected.norm() > 0


def logged(trainer: MTGRPOEnvTrainer, *names: str) -> list[list[float]]:
    """What was logged under some names, in each step of training that has all of them."""
    return [[row[name] for name in names] for row in trainer.state.log_history if all(name in row for name in names)]


def assert_learnt_alike(trainers: list[MTGRPOEnvTrainer], *names: str, weights: bool = False) -> None:
    """Trains some trainers, and compares what they logged in each step with the first, and their weights."""
    learnt = []
    for trainer in trainers:
        torch.manual_seed(0)
        trainer.train()
        learnt.append(torch.tensor(logged(trainer, *names)))
        assert len(learnt[-1]) == trainer.args.max_steps
        torch.testing.assert_close(learnt[-1], learnt[0], rtol=1e-4, atol=1e-6)
        for one, other in zip(trainer.model.parameters(), trainers[0].model.parameters(), strict=True):
            if weights:
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def at(event: str, action: Callable[..., Any], step: int | None = None) -> TrainerCallback:
    """A callback that acts at an event, once it comes with so many steps taken."""

    def act(args, state, control, **kwargs):
        if step in (None, state.global_step):
            action(control=control, state=state, **kwargs)

    setattr(callback := TrainerCallback(), event, act)
    return callback


_ARGUMENTS = inspect.signature(MTGRPOEnvTrainer.__init__).parameters.keys()
_OPTIONS = {field.name for field in fields(MTGRPOConfig)}


def _is_argument(name: str, value: Any) -> bool:
    """Whether the trainer is given it, and not its options: those are plain."""
    try:
        json.dumps(value)
    except TypeError:
        return name in _ARGUMENTS
    return name in _ARGUMENTS - _OPTIONS or (name == "env" and value is None)


def trainer_builder(folder: Path, tokenizer: Any, questions: Dataset) -> Callable[..., MTGRPOEnvTrainer]:
    """Makes trainers of a tiny model, on a script if given; other arguments and options go by their names."""

    def build(script=conversation, model=None, rewards=None, **given):
        arguments = {name: value for name, value in given.items() if _is_argument(name, value)}
        options = {"output_dir": str(folder), **CPU_RUN, "max_completion_length": 400, "max_steps": 2}
        options |= {"advantage_estimator": "mt_grpo", "learning_rate": 1e-2}
        options |= {name: value for name, value in given.items() if name not in arguments}
        if "reward_funcs" not in arguments:
            turns, outcomes = rewards or ((Calls(),), (Answered(),))
            arguments = {"turn_reward_funcs": turns, "outcome_reward_funcs": outcomes} | arguments
        return MTGRPOEnvTrainer(
            build_model(tokenizer) if model is None else model,
            **{
                "env": MultiTurnToolEnv([lookup], protocol="learnt_tags", max_steps=3),
                "args": MTGRPOConfig(**options),
                "train_dataset": questions,
                "eval_dataset": questions,
                "engine": ScriptedEngine(tokenizer, script) if script else None,
                "processing_class": tokenizer,
                **arguments,
            },
        )

    return build


def audited(silent=1.0, **rewards):
    """The record of an audit of two groups, with rewards that are all .5 but for what is given."""
    half = dict.fromkeys(RewardAudit.__dataclass_fields__, 0.5)
    audits = tuple(RewardAudit(**{**half, **changes}) for changes in rewards.values())
    return as_record(Audit(2, silent, None, audits), Uncredited(None, None), list(rewards), {})
