"""Completions as the columns of a TRL batch."""

from __future__ import annotations

import torch

from mt_grpo.rollout import Completion
from mt_grpo.training.records import UNFINISHED
from mt_grpo.trajectory import Trajectory


def leave_out(
    trajectories: list[Trajectory], completions: list[Completion], pad_token_id: int, mask_truncated: bool
) -> None:
    """
    Masks the completions that must not be trained on: of conversations that failed, and, with `mask_truncated`, of
    those that were cut off. One that has no token gets a masked one, which keeps shapes valid.
    """
    for trajectory, completion in zip(trajectories, completions, strict=True):
        if not completion.ids:
            completion.ids, completion.logprobs = [pad_token_id], [float("nan")]
            completion.mask, completion.turns, completion.parents = [0], [0], [-1]
        elif trajectory.failed or (mask_truncated and trajectory.stop_reason in UNFINISHED):
            completion.mask = [0] * len(completion.mask)


def pad_rows(rows: list[list[int]], like: torch.Tensor) -> torch.Tensor:
    """Rows of integers as a tensor of the shape of `like`, `(B, T)`, padded with 0."""
    padded = torch.zeros_like(like)
    for row, values in enumerate(rows):
        padded[row, : len(values)] = torch.tensor(values, device=like.device)
    return padded


def parent_columns(completions: list[Completion], like: torch.Tensor) -> torch.Tensor | None:
    """The completion column that each token follows, `(B, T)`; `None` where no history was rewritten."""
    rows = [completion.parents for completion in completions]
    if all(parents == list(range(-1, len(parents) - 1)) for parents in rows):
        return None
    return pad_rows(rows, like)


def scored_columns(
    completions: list[Completion], like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Completion mask, turn of each token, and `parent_columns`; each `(B, T)`."""
    masks = pad_rows([completion.mask for completion in completions], like)
    turns = pad_rows([completion.turns for completion in completions], like)
    return masks, turns, parent_columns(completions, like)
