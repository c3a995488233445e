"""Completions as the columns of a TRL batch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from mt_grpo.forward.model import score_packed
from mt_grpo.forward.packing import FlatTree, pack
from mt_grpo.forward.truncation import Truncation
from mt_grpo.rollout import TokenRow
from mt_grpo.trajectory import Trajectory


def leave_out(
    trajectories: list[Trajectory], completions: list[TokenRow], pad_token_id: int, mask_truncated: bool
) -> None:
    """
    Masks the completions that must not be trained on: of conversations that failed, and, with `mask_truncated`, of
    those that were cut off. One that has no token gets a masked one, which keeps shapes valid.
    """
    for trajectory, completion in zip(trajectories, completions, strict=True):
        if not completion.ids:
            completion.ids, completion.logprobs = [pad_token_id], [float("nan")]
            completion.mask, completion.turns, completion.parent = [0], [0], [-1]
        elif trajectory.failed or (mask_truncated and trajectory.stop_reason.is_truncated):
            completion.mask = [0] * len(completion.mask)


def pad_rows(rows: list[list[int]], like: torch.Tensor) -> torch.Tensor:
    """Rows of integers as a tensor of the shape of `like`, `(B, T)`, padded with 0."""
    padded = torch.zeros_like(like)
    for row, values in enumerate(rows):
        padded[row, : len(values)] = torch.tensor(values, device=like.device)
    return padded


def parent_columns(completions: list[TokenRow], like: torch.Tensor) -> torch.Tensor | None:
    """The completion column that each token follows, `(B, T)`; `None` where no history was rewritten."""
    rows = [completion.parent for completion in completions]
    if all(parent == list(range(-1, len(parent) - 1)) for parent in rows):
        return None
    return pad_rows(rows, like)


def scored_columns(
    completions: list[TokenRow], like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Completion mask, turn of each token, and `parent_columns`; each `(B, T)`."""
    masks = pad_rows([completion.mask for completion in completions], like)
    turns = pad_rows([completion.turns for completion in completions], like)
    return masks, turns, parent_columns(completions, like)


def batch_trees(
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    loss_mask: Tensor,
    completion_mask: Tensor,
    parent: Tensor | None = None,
) -> tuple[list[FlatTree], list[int]]:
    """
    The rows of a TRL batch as trees.

    Args:
        prompt_ids, prompt_mask (`Tensor`): `(B, P)`, padded on the left.
        completion_ids, completion_mask (`Tensor`): `(B, T)`, padded on the right.
        loss_mask (`Tensor`): `(B, T)` 1 where a token's log-prob is wanted.
        parent (`Tensor`, *optional*): `(B, T)` completion column of the token each token follows; -1 is the last
            token of the prompt, -2 the one before. `None` where every row is one sequence.

    Returns:
        The trees, and the length of each prompt.
    """
    arrays = (prompt_ids, prompt_mask, completion_ids, completion_mask, loss_mask)
    prompts, prompt_masks, completions, masks, wanted = (array.detach().cpu().numpy() for array in arrays)
    columns = None if parent is None else parent.cpu().numpy()
    trees, lengths = [], []
    for row in range(len(prompts)):
        prompt = prompts[row][prompt_masks[row].astype(bool)]
        size = int(masks[row].sum())
        turns = np.full(len(prompt) + size, -1, dtype=np.int64)
        turns[len(prompt) :] = np.where(wanted[row][:size] > 0, 0, -1)
        tree_parent = None
        if columns is not None:
            tree_parent = np.r_[np.arange(-1, len(prompt) - 1), columns[row][:size] + len(prompt)]
        trees.append(FlatTree(np.concatenate([prompt, completions[row][:size]]), turns, tree_parent))
        lengths.append(len(prompt))
    return trees, lengths


def batch_logps(
    model: nn.Module,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    loss_mask: Tensor,
    parent: Tensor | None = None,
    *,
    attention: str = "auto",
    temperature: float = 1.0,
    truncation: Truncation | None = None,
) -> tuple[Tensor, Tensor]:
    """
    Log-probabilities and entropies of a TRL batch from one packed forward, whatever its rows share computed once.
    Every call is one forward on every rank, also where none is wanted, so ranks that hold different amounts stay in
    step.

    Args:
        As `batch_trees`, and `attention`, `temperature` and `truncation` as `score_packed`.

    Returns:
        Two `(B, T)` tensors, 0 where `loss_mask` is 0.
    """
    trees, lengths = batch_trees(prompt_ids, prompt_mask, completion_ids, loss_mask, completion_mask, parent)
    packed = pack(trees)
    outputs = score_packed(model, packed, attention, temperature, truncation)
    row = torch.from_numpy(packed.tree).to(outputs.logps.device)
    column = torch.from_numpy(packed.column - np.array(lengths)[packed.tree]).to(outputs.logps.device)
    logps, entropies = (
        values.new_zeros(completion_ids.shape).index_put((row, column), values)
        for values in (outputs.logps, outputs.entropies)
    )
    return logps, entropies
