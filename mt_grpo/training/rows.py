"""Completions as the columns of a TRL batch."""

from __future__ import annotations

import torch

from mt_grpo.rollout import Completion


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
