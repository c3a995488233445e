"""Groups whose advantages are 0 at every turn: sampled again, or left out of what a loss is divided by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather
from torch import Tensor

from mt_grpo.credit import without_signal
from mt_grpo.training.rollout_batch import RolloutBatch

TOKENS_OF_ALL = ("cispo", "dapo", "vespo")
"""Losses that TRL divides by `num_items_in_batch`, the tokens that are trained in the whole generation batch."""


def sample_again(
    batch: RolloutBatch,
    limit: int,
    sample: Callable[[RolloutBatch], None],
    score: Callable[[RolloutBatch], Any],
    judge: Callable[[RolloutBatch], None],
) -> None:
    """
    Samples the prompts of groups without signal again, with other seeds, until every group has one. This is a
    collective call: every process makes as many rounds.

    Args:
        batch (`RolloutBatch`): A batch whose conversations are finished. In the end it has the latest conversations of
            each group, and those that they took the place of in `discarded`.
        limit (`int`): Rounds at most.
        sample, score (`Callable`): Run the conversations of a batch, and return their scores.
        judge (`Callable`): Fills in the advantages of a batch, those of all processes.
    """
    first = PartialState().process_index * len(batch.rows)
    judge(batch)
    for attempt in range(1, limit + 1):
        silent = without_signal(batch.advantages, batch.rewards.group_size)
        if not silent.any() or batch.rewards.failed.all():  # what makes all fail is not chance
            return
        asked = silent.repeat_interleave(batch.rewards.group_size)[first : first + len(batch.rows)].tolist()
        again = RolloutBatch(batch.mode, batch.rows, [not each for each in asked], batch.branching, attempt=attempt)
        try:
            sample(again)
            again.scores = score(again)
        except BaseException:  # whatever fails, conversations that were finished before are not lost
            batch.discarded += [[], again.counted]  # none of the attempt before was replaced
            raise
        batch.replace(again)
        batch.sampled_again += int(silent.sum())
        judge(batch)


def has_signal(batch: RolloutBatch) -> Tensor:
    """The rows of this process whose group has a signal, shape (B,), bool."""
    size = batch.rewards.group_size
    first = PartialState().process_index * len(batch.rows)
    silent = without_signal(batch.advantages, size).repeat_interleave(size)
    return ~silent[first : first + len(batch.rows)]


def leave_out(output: dict[str, Any], kept: Tensor) -> None:
    """
    Takes rows out of the loss of the batch that TRL trains on. `share_out` does the rest once it is dealt out to
    micro-batches. This is a collective call.

    Args:
        output (`dict`): The batch.
        kept (`Tensor`): The rows that stay, shape (B,), bool.
    """
    output["kept"] = kept
    output["tool_mask"] = output["tool_mask"] * kept[:, None]
    trained = (output["completion_mask"] * output["tool_mask"]).sum()
    output["num_items_in_batch"] = gather(trained.reshape(1)).sum()


def share_out(batches: list[dict[str, Any]], loss_type: str) -> None:
    """
    Gives each micro-batch the factor by which its loss grows, so that the loss of all is what it would be without the
    rows that were left out. This is a collective call.

    TRL divides by rows (`grpo`, `sapo`, `luspo`, `dr_grpo`), by micro-batches (`bnpo`) or by the tokens that are
    trained, which are counted right already.

    Args:
        batches (`list[dict]`): All micro-batches of a generation batch that `leave_out` has seen.
        loss_type (`str`): The loss.
    """
    if loss_type in TOKENS_OF_ALL:
        return
    if loss_type == "bnpo":
        counts = [bool((batch["completion_mask"] * batch["tool_mask"]).any()) for batch in batches]
        count = torch.tensor([sum(counts), len(counts)])
    else:
        kept = torch.cat([batch["kept"] for batch in batches])
        count = torch.stack([kept.sum(), torch.tensor(len(kept), device=kept.device)])
    counted, total = gather(count.to(batches[0]["kept"].device)[None]).sum(dim=0).tolist()
    for batch in batches:
        batch["loss_factor"] = torch.tensor(total / max(counted, 1), device=batch["kept"].device)
