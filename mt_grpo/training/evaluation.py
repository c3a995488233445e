"""Finds the rows of an evaluation that count: accelerate repeats rows to fill up the last batch of processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from datasets import Dataset, IterableDataset

from mt_grpo.rewards import Scores
from mt_grpo.trajectory import Trajectory


class EvaluationRows:
    """
    Tells the rows of a dataset from those that only fill up the last batch of an evaluation.

    Args:
        dataset (`Dataset` or `IterableDataset`): What is evaluated.
        generations (`int`): How often each row is evaluated.
        accelerator (`Accelerator`): The run's.
    """

    def __init__(self, dataset: Dataset | IterableDataset, generations: int, accelerator: Accelerator) -> None:
        self.dataset = dataset
        """What to load: counts its rows as they are read, where their number is not known."""
        self._generations, self._accelerator = generations, accelerator
        self._batches = 0
        streams = isinstance(dataset, IterableDataset)
        # accelerate gives each process shards of its own where there are enough: they are not filled up
        self._filled = accelerator.num_processes > 1 and not (
            streams and dataset.num_shards >= accelerator.num_processes and not accelerator.split_batches
        )
        self._rows = 0 if streams else len(dataset)
        if streams and self._filled:
            self.dataset = dataset.map(self._count, with_indices=True)

    def _count(self, row: dict[str, Any], index: int) -> dict[str, Any]:
        self._rows = index + 1
        return row

    def fills(self, size: int) -> list[bool]:
        """For each row of this process's next batch, of `size` rows, whether it only fills it up."""
        first = (self._batches * self._accelerator.num_processes + self._accelerator.process_index) * size
        self._batches += 1
        return [self._filled and first + index >= self._rows * self._generations for index in range(size)]


def counted(trajectories: list[Trajectory]) -> list[Trajectory]:
    """The trajectories that were run. What stands for a row that only fills up a batch has no stop reason."""
    return [trajectory for trajectory in trajectories if trajectory.stop_reason is not None]


def fill_up(values: list[Any], fills: list[bool], absent: Callable[[int], Any] = lambda index: None) -> list[Any]:
    """Adds to the values of the rows that count `absent(index)` for each row that only fills up."""
    rest = iter(values)
    return [absent(index) if fill else next(rest) for index, fill in enumerate(fills)]


def fill_up_scores(scores: Scores, fills: list[bool]) -> Scores:
    """Adds to the scores of the rows that count `None` for the others."""
    return Scores(
        [fill_up(values, fills, lambda index: []) for values in scores.turn],
        [fill_up(values, fills) for values in scores.outcome],
        [fill_up(values, fills, lambda index: []) for values in scores.state],
    )
