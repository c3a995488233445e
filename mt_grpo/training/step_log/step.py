"""
What one batch and one optimiser step were, as the trainer hands them to the sinks of the step log, and what the
trainer waits for inside a step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mt_grpo.runlog.rows import question_of
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.rollout_batch import RolloutBatch
from mt_grpo.trajectory import Trajectory

_STEP, _BATCH = 40, 24  # bits: a row of a batch of 16 million, of 65,536 batches of a step


@dataclass
class Step:
    """
    One batch of training or of an evaluation.

    Args:
        batch (`RolloutBatch`): Its conversations; once they are judged, their rewards and advantages.
        number (`int`): Optimiser steps that were taken before.
        k (`int`): Tells batches of one step apart.
        first (`int`): Number of this process's first row among those of all processes.
        output (`dict`): The columns that TRL trains on, most of them `(B, T)`.
        audit (`dict`): What the rewards of all processes say within their groups, in training; see `as_record`.
        lines (`list[dict]`): The index's lines of its conversations, of all processes.
    """

    batch: RolloutBatch
    number: int
    k: int
    first: int
    output: dict[str, Any] = field(default_factory=dict)
    audit: dict[str, Any] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def mode(self) -> str:
        return self.batch.mode

    @property
    def rows(self) -> Tensor:
        """Numbers of this process's rows among those of all processes, `(B,)`."""
        return torch.arange(self.first, self.first + len(self.batch.rows), device=self.batch.advantages.device)

    @property
    def row_ids(self) -> Tensor:
        """A number per row, `(B,)`, that says which conversation it is, wherever the row is trained."""
        return number_rows(self.number, self.k, self.rows)

    @property
    def advantages(self) -> Tensor:
        """Of this process's rows, per turn, `(B, K)`."""
        return self.batch.advantages[self.rows]


@dataclass
class Update:
    """
    One optimiser step.

    Args:
        number (`int`): The step, from 0.
        start (`float`): When it began, in seconds since 1970.
        seconds (`float`): How long it took.
        waits (`dict[str, float]`): Seconds of it that were waited for each thing, see `Activity`.
        outputs (`list[Outputs]`): What its forwards computed, per micro-batch.
        gradient_norm (`float`, *optional*): `None` where it is not known.
    """

    number: int = 0
    start: float = 0.0
    seconds: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)
    outputs: list[Outputs] = field(default_factory=list)
    gradient_norm: float | None = None


@dataclass(frozen=True)
class Outputs:
    """
    What the forward of one micro-batch computed, on its device, so that nothing waits for it within the step. All but
    `row_ids` are `(B, T)`.

    Args:
        row_ids (`Tensor`): `(B,)`, see `number_rows`.
        trained (`Tensor`): Bool, where a token is trained.
        difference, entropies, ratios, clipped (`Tensor`): See `mt_grpo.runlog.schema.UPDATES`.
    """

    row_ids: Tensor
    trained: Tensor
    difference: Tensor
    entropies: Tensor
    ratios: Tensor
    clipped: Tensor

    @classmethod
    def of(cls, inputs: dict[str, Any], logps: Tensor, entropies: Tensor, args: MTGRPOConfig) -> Outputs:
        """
        Of the micro-batch whose loss TRL computes.

        Args:
            inputs (`dict`): The micro-batch.
            logps, entropies (`Tensor`): `(B, T)`, from its forward.
            args (`MTGRPOConfig`): With the options of the loss.
        """
        logps = logps.detach()
        trained = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        log_ratios = logps - inputs.get("old_per_token_logps", logps)
        return cls(
            inputs["row_ids"],
            trained,
            (logps - inputs["sampling_per_token_logps"]).half(),
            entropies.detach().half(),
            log_ratios.exp().half(),
            clip_flags(log_ratios, inputs["advantages"], trained, args),
        )


def clip_flags(log_ratios: Tensor, advantages: Tensor, trained: Tensor, args: MTGRPOConfig) -> Tensor:
    """Where TRL's loss clips the ratio, so that the token has no gradient, or with `cispo` a bounded weight."""
    low, high = args.epsilon, args.epsilon if args.epsilon_high is None else args.epsilon_high
    if args.importance_sampling_level == "sequence":
        mean = (log_ratios * trained).sum(dim=1, keepdim=True) / trained.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratios = mean.expand_as(log_ratios)
    ratios = log_ratios.exp()
    if args.loss_type == "cispo":
        return (ratios > high) & (advantages > 0)
    if args.loss_type in ("sapo", "vespo"):  # they weigh ratios smoothly
        return torch.zeros_like(trained)
    clipped = (ratios < 1 - low) & (advantages < 0)
    clipped |= (ratios > 1 + high) & (advantages > 0)
    if args.delta is not None:
        clipped |= (ratios > args.delta) & (advantages < 0)
    return clipped


def number_rows(step: int, k: int, rows: Tensor) -> Tensor:
    """One number for step, batch and row, `(B,)`."""
    return (step << _STEP) + (k << _BATCH) + rows


def split_number(number: int) -> tuple[int, int, int]:
    """Step, batch and row of what `number_rows` returns."""
    return number >> _STEP, (number >> _BATCH) % (1 << (_STEP - _BATCH)), number % (1 << _BATCH)


class Activity:
    """
    What the trainer waits for: `forward and backward` unless it says otherwise.

    Attributes:
        waits_for (`str`): What is waited for.
        seconds (`dict[str, float]`): Time that was waited for each thing since somebody cleared it.
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
        Conversations are sampled in the block.

        Args:
            batch (`RolloutBatch`): Gets the conversations that are finished.
            under_way (`dict`): Those that are not, by session; those of other batches too.
            sessions (`Container[str]`, *optional*): Those of the batch; all by default.
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
