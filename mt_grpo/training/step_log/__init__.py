"""
The log of a trainer's batches and steps. One callback hands them to its sinks: records, warnings, metrics and a table
of conversations. The console asks what the trainer waits for. Each has a file, since each answers a question of its
own: what is on disk, what is warned of, what is logged, what is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from mt_grpo.credit import audit_rewards, uncredited_turn_rewards
from mt_grpo.rewards import RewardFunc, StateScore
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.rollout_batch import RolloutBatch
from mt_grpo.training.step_log.metrics import Metrics
from mt_grpo.training.step_log.records import Records, as_record, describe_rewards
from mt_grpo.training.step_log.step import Activity, Outputs, Step, Update
from mt_grpo.training.step_log.table import Table
from mt_grpo.training.step_log.warnings import Warnings

__all__ = ["Outputs", "Step", "StepLog", "Update"]


class StepLog(TrainerCallback):
    """
    Hands each batch, each optimiser step and what is logged to its sinks. The trainer fills in a `Step` per batch,
    from `begin` to `take` or `Records.rescue`, and an `Update` per optimiser step.

    Args:
        args (`MTGRPOConfig`): The run's options.
        turn_rewards, outcome_rewards (`Sequence[RewardFunc]`): The rewards.
        weights (`Tensor`): `(num_rewards,)`, of turn rewards, then of outcome rewards.
        state_scores (`Sequence[StateScore]`): The state score, if there is one.
        about (`dict`): What the index says of the run: `tools`, `model`, `group_size`, ...
        save_tokenizer (`Callable`): Saves the tokenizer in a folder.
        trackers (`list[TrainerCallback]`): The trainer's callbacks, some of which are trackers.
    """

    def __init__(
        self,
        args: MTGRPOConfig,
        turn_rewards: Sequence[RewardFunc],
        outcome_rewards: Sequence[RewardFunc],
        weights: Tensor,
        state_scores: Sequence[StateScore],
        about: dict[str, Any],
        save_tokenizer: Callable[[Path], Any],
        trackers: list[TrainerCallback],
    ) -> None:
        rewards = [*turn_rewards, *outcome_rewards]
        described = describe_rewards(turn_rewards, outcome_rewards, weights.tolist())
        self.activity = Activity()
        self.warnings = Warnings(rewards, args, state_scores, about["tools"])
        self.records = Records(args, about, described, save_tokenizer)
        ahead = args.max_staleness > 0 and args.replay is None
        self.metrics = Metrics(weights, [reward.name for reward in rewards], ahead)
        self.table = Table(args, trackers)
        self._args, self._names = args, [reward.name for reward in rewards]
        self._has_turn_rewards = bool(turn_rewards)
        self._evaluated = (-1, -1)  # step and number of the latest batch of an evaluation
        self.latest = Update()
        """The latest optimiser step, which may not be finished."""
        self._begun = 0.0

    # The trainer calls

    def begin(self, batch: RolloutBatch, number: int, k: int) -> Step:
        """
        The step of a batch that is about to be sampled.

        Args:
            batch (`RolloutBatch`): The batch, which is filled in until `take`.
            number (`int`): Optimiser steps that were taken.
            k (`int`): Number of a training batch within its optimiser step. Those of evaluations are counted here.
        """
        if batch.mode == "eval":
            k = self._evaluated[1] + 1 if self._evaluated[0] == number else 0
            self._evaluated = number, k
        return Step(batch, number, k, self._args.process_index * len(batch.rows))

    def take(self, step: Step) -> None:
        """Hands over a batch that is credited. This is a collective call."""
        step.lines = self.records.take(step)  # first: whatever fails after, the conversations are kept
        if step.mode == "train":
            audit = audit_rewards(step.batch.rewards, step.batch.advantages)
            uncredited = uncredited_turn_rewards(
                self._args.credit_rule(self._has_turn_rewards),
                step.batch.rewards,
                turn_coef=self._args.turn_advantage_coef,
                scale_rewards=self._args.scale_rewards,
            )
            step.audit = as_record(audit, uncredited, self._names, self.warnings.causal)
            self.records.audits.append(step.audit)
        self.warnings.take(step)
        self.metrics.take(step)
        self.table.take(step)

    def trained(self, inputs: dict[str, Any], logps: Tensor, entropies: Tensor) -> None:
        """Takes note of log-probs and entropies, `(B, T)`, of a micro-batch whose loss is computed."""
        if "row_ids" in inputs:  # a checkpoint may hold rows without a number
            self.latest.outputs.append(Outputs.of(inputs, logps, entropies, self._args))

    # TRL calls

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.records.begin(state.global_step)
        self.warnings.begin()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begun = time.perf_counter()
        self.latest = Update(state.global_step, time.time())
        self.activity.seconds.clear()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        update = self.latest
        update.seconds = time.perf_counter() - self._begun
        update.waits = dict(self.activity.seconds)
        self.records.update(update)
        self.warnings.update(update)
        update.outputs = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        self.records.log(logs, state.global_step)
        self.table.log("train" if kwargs["model"].training else "eval", state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.records.write_audit(state.global_step)
        self.warnings.end()
