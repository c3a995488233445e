"""Warns of a reward that never applies, and of batches from which nothing is learnt."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import TrainerCallback

logger = logging.getLogger(__name__)


class RewardWatch(TrainerCallback):
    """
    Warns of rewards that return `None` for every trajectory, and of batches in which no trajectory has an advantage:
    once during the run, and with a count at its end.

    Args:
        names (`Sequence[str]`): Names of the rewards.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._absent = list(names)
        self._names = list(names)
        self._batches = self._flat = 0

    def observe(self, columns: Tensor, advantages: Tensor, speaks: bool) -> None:
        """
        Records a training batch.

        Args:
            columns (`Tensor`): Scores of all processes, shape (B, num_rewards); NaN if a reward does not apply.
            advantages (`Tensor`): Their advantages, shape (B, K).
            speaks (`bool`): Whether this process warns.
        """
        missing = columns.isnan().all(dim=0).tolist()
        if all(missing):  # all conversations failed, or no reward said anything: there is nothing to compare
            return
        self._batches += 1
        silent = [name for name, empty in zip(self._names, missing, strict=True) if empty]
        self._absent = [name for name in self._absent if name in silent]
        if self._batches == 1 and speaks:
            for name in silent:
                logger.warning(
                    "The reward %r applied to none of the %d trajectories of the first batch: it returned `None` for "
                    "each, and has no part in training as long as it does.",
                    name,
                    len(columns),
                )
        if not advantages.any():
            self._flat += 1
            if self._flat == 1 and speaks:
                logger.warning(
                    "The rewards of a batch of %d trajectories teach nothing, since the members of each group earn "
                    "the same (or earn what the credit rule does not use): the questions may be too easy or too hard, "
                    "or the rewards too coarse.",
                    len(columns),
                )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero or self._batches < 2:  # one batch was already spoken of
            return
        for name in self._absent:
            logger.warning(
                "The reward %r applied to no trajectory of this run's %d batches: it returned `None` for each.",
                name,
                self._batches,
            )
        if self._flat:
            logger.warning(
                "%d of %d batches taught nothing: the members of each of their groups earned the same.",
                self._flat,
                self._batches,
            )
