"""Knows what the trainer waits for inside a step. The thread that draws the progress bar may ask at any time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from mt_grpo.training.rollout_batch import RolloutBatch
from mt_grpo.trajectory import Trajectory


class Activity:
    """
    What the trainer waits for: `forward and backward` unless it says otherwise.

    Attributes:
        seconds (`dict[str, float]`): Time that was waited for each thing since somebody cleared it.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._waits_for = "forward and backward"
        self._batch: RolloutBatch | None = None
        self._under_way: Mapping[str, Trajectory] = {}

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """`what` is waited for in the block."""
        before, self._waits_for = self._waits_for, what
        start = time.perf_counter()
        try:
            yield
        finally:
            self._waits_for = before
            self.seconds[what] += time.perf_counter() - start

    @contextmanager
    def sampling(self, batch: RolloutBatch, under_way: Mapping[str, Trajectory]) -> Iterator[None]:
        """
        Conversations are sampled in the block.

        Args:
            batch (`RolloutBatch`): Gets the conversations that are finished.
            under_way (`dict`): Those that are not, by session.
        """
        self._batch, self._under_way = batch, under_way
        try:
            with self.of("sampling"):
                yield
        finally:
            self._batch, self._under_way = None, {}

    def describe(self) -> str:
        """What is waited for, and while conversations are sampled, how many are finished and their turns so far."""
        batch, under_way = self._batch, list(self._under_way.values())  # copies, since another thread goes on
        if batch is None:
            return f"waiting for {self._waits_for}"
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
