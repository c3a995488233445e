"""
The log of a trainer's batches and steps. One callback hands them to its sinks: records, warnings, metrics and a table
of conversations. The console asks what the trainer waits for. Each has a file, since each answers a question of its
own: what is on disk, what is warned of, what is logged, what is shown.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOTrainer

from mt_grpo.credit import audit_rewards, uncredited_turn_rewards
from mt_grpo.runlog.rows import question_of
from mt_grpo.training.rollout_batch import RolloutBatch
from mt_grpo.training.step_log.display import Table
from mt_grpo.training.step_log.metrics import Metrics
from mt_grpo.training.step_log.records import Outputs, Records, Step, Update, about_run, as_record, describe_rewards
from mt_grpo.training.step_log.warnings import Warnings
from mt_grpo.trajectory import Trajectory

__all__ = ["Activity", "Outputs", "Step", "StepLog", "Update"]


class Activity:
    """
    What the trainer waits for (`waits_for`), `forward and backward` unless it says otherwise, and for how long it has
    waited for each thing (`seconds`), since somebody cleared that.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.waits_for = "forward and backward"
        self._batch: RolloutBatch | None = None
        self._under_way: Mapping[str, Trajectory] = {}
        self._sessions: Container[str] | None = None

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """`what` is waited for in the block."""
        before, self.waits_for = self.waits_for, what
        start = time.perf_counter()
        try:
            yield
        finally:
            self.waits_for = before
            self.seconds[what] += time.perf_counter() - start

    @contextmanager
    def sampling(
        self, batch: RolloutBatch, under_way: Mapping[str, Trajectory], sessions: Container[str] | None = None
    ) -> Iterator[None]:
        """
        Conversations are sampled in the block: `batch` gets those that are finished, `under_way` has those that are
        not, by session, of other batches too; `sessions` are the batch's, all by default.
        """
        self._batch, self._under_way, self._sessions = batch, under_way, sessions
        try:
            with self.of("sampling"):
                yield
        finally:
            self._batch, self._under_way, self._sessions = None, {}, None

    def conversations(self) -> list[dict[str, Any]]:
        """Those under way on this process, the oldest first, as `state.json` has them."""
        under_way = list(self._under_way.values())  # a copy, since another thread goes on
        shown = [
            {
                "session": trajectory.session,
                "prompt": question_of(trajectory),
                "turns": len(trajectory.turns),
                "tokens": sum(turn.num_tokens for turn in trajectory.turns),
                "start": trajectory.start,
                "waits_for": "tools" if _waits_for_tools(trajectory) else "sampling",
            }
            for trajectory in under_way
        ]
        return sorted(shown, key=lambda each: each["start"] or 0.0)

    def describe(self) -> str:
        """What is waited for, and while conversations are sampled, how many are finished and their turns so far."""
        batch, sessions = self._batch, self._sessions
        # a copy, since another thread goes on
        items = list(self._under_way.items())
        under_way = [each for session, each in items if sessions is None or session in sessions]
        if batch is None:
            return f"waiting for {self.waits_for}"
        finished = list(batch.trajectories)
        asked = batch.fills.count(False)
        turns = sum(len(trajectory.turns) for trajectory in (*finished, *under_way))
        in_tools = sum(_waits_for_tools(trajectory) for trajectory in under_way)
        return (
            f"{len(finished)} of {asked} conversations, {turns} turns; waiting for sampling "
            f"({len(under_way) - in_tools}) and tools ({in_tools})"
        )


def _waits_for_tools(trajectory: Trajectory) -> bool:
    """Whether the latest turn of a conversation that is under way has no reply yet."""
    return bool(trajectory.turns) and not trajectory.turns[-1].replies


class StepLog(TrainerCallback):
    """
    Hands each batch, each optimiser step and what is logged to its sinks. The trainer fills in a `Step` per batch,
    from `begin` to `take` or `Records.rescue`, and an `Update` per optimiser step.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        args = self._args = trainer.args
        rewards = [*trainer.turn_reward_funcs, *trainer.outcome_reward_funcs]
        names = self._names = [reward.name for reward in rewards]
        described = describe_rewards(
            trainer.turn_reward_funcs, trainer.outcome_reward_funcs, trainer.reward_weights.tolist()
        )
        about = about_run(trainer)
        self.activity = Activity()
        self.warnings = Warnings(rewards, args, trainer.state_scores, about["tools"])
        self.records = Records(args, about, described, trainer._tokenizer.save_pretrained)
        self.metrics = Metrics(trainer.reward_weights, names, args.max_staleness > 0 and args.replay is None)
        self.table = Table(args, trainer.callback_handler.callbacks)
        self._has_turn_rewards = bool(trainer.turn_reward_funcs)
        self._evaluated = (-1, -1)  # step and number of the latest batch of an evaluation
        self.latest = Update()  # the latest optimiser step, which may not be finished
        self._begun = 0.0

    # The trainer calls

    def begin(self, batch: RolloutBatch, number: int, k: int) -> Step:
        """
        A batch that is about to be sampled, after `number` optimiser steps. `k` is the number of a training batch
        within its optimiser step; batches of evaluations are counted here.
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
