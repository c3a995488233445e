"""Completions as columns of a TRL batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mt_grpo.forward.lm_head import Truncation
from mt_grpo.forward.media import Media, MediumInputs, with_blank
from mt_grpo.forward.model import score_own, score_packed
from mt_grpo.forward.packing import FlatTree, Packed, flatten, pack
from mt_grpo.forward.routes import NO_ROUTE
from mt_grpo.forward.rows import score_rows
from mt_grpo.forward.sequence_parallel import SequenceGroup
from mt_grpo.rollout import TokenRow
from mt_grpo.token_tree import TokenTree


def pad_rows(rows: list[list[int]], like: torch.Tensor) -> torch.Tensor:
    """Rows of integers as a tensor of the shape of `like`, `(B, T)`, padded with 0."""
    padded = torch.zeros_like(like)
    for row, values in enumerate(rows):
        padded[row, : len(values)] = torch.tensor(values, device=like.device)
    return padded


def pad_routes(
    rows: list[TokenRow], prompt_width: int, width: int, device: torch.device
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """The routes of prompts, padded on the left, and of completions, padded on the right; see `TokenColumns`."""
    sizes = {len(row.routes) // len(row.ids) for row in rows if row.routes}
    if not sizes:
        return None, None
    size = sizes.pop()
    prompts, completions = (
        np.full((len(rows), columns, size), NO_ROUTE, dtype=np.uint8) for columns in (prompt_width, width)
    )
    for number, row in enumerate(rows):
        if row.routes:
            prompt, completion = (
                np.frombuffer(part, np.uint8).reshape(-1, size) for part in (row.prompt_routes, row.routes)
            )
            prompts[number, prompt_width - len(prompt) :] = prompt
            completions[number, : len(completion)] = completion
    return torch.from_numpy(prompts).to(device), torch.from_numpy(completions).to(device)


IMAGES = "row_images"
"""The column of a batch with the images of each row, where a row has some: dictionaries as `image_column` has them."""


def image_column(rows: list[TokenRow]) -> list[dict[int, tuple[int, dict[str, Tensor]]]] | None:
    """The images of rows by id, as a checkpoint can hold them: size and inputs; `None` where no row has any."""
    column = [{number: (image.size, image.inputs) for number, image in row.images.items()} for row in rows]
    return column if any(column) else None


def images_of(column: Sequence[dict[int, tuple[int, dict[str, Tensor]]]] | None) -> Media:
    """The images of all rows of an `image_column`."""
    return {number: MediumInputs(*image) for row in column or () for number, image in row.items()}


def with_images(ids: Tensor, rows: list[list[int]], left: bool) -> Tensor:
    """
    Ids that TRL padded, `(B, P)` on the left or `(B, T)` on the right, with those of images in place of the model's
    image token.
    """
    ids = ids.clone()
    for number, row in enumerate(rows):
        if row and min(row) < 0:
            place = slice(ids.size(1) - len(row), None) if left else slice(len(row))
            ids[number, place] = torch.tensor(row, device=ids.device)
    return ids


OPTIONAL = ("parent", "prompt_routes", "routes")
"""Columns of a batch, and fields of `TokenColumns`, that not every batch has."""


@dataclass(frozen=True)
class TokenColumns:
    """What a forward needs of the completions of a TRL batch besides their ids."""

    scored: Tensor
    turn_ids: Tensor
    parent: Tensor | None
    prompt_routes: Tensor | None = None
    routes: Tensor | None = None

    @classmethod
    def of_rollouts(cls, rows: list[TokenRow], like: Tensor, prompt_width: int) -> TokenColumns:
        """The columns of rollouts that TRL padded to the shape of `like`, and their prompts to `prompt_width`."""
        parent = [row.parent for row in rows]
        chains = all(row == list(range(-1, len(row) - 1)) for row in parent)
        scored, turn_ids = pad_rows([row.mask for row in rows], like), pad_rows([row.turns for row in rows], like)
        routes = pad_routes(rows, prompt_width, like.size(1), like.device)
        return cls(scored, turn_ids, None if chains else pad_rows(parent, like), *routes)

    @classmethod
    def of_inputs(cls, inputs: dict[str, Any]) -> TokenColumns:
        """The columns of a micro-batch whose loss is computed."""
        return cls(inputs["completion_mask"] * inputs["tool_mask"], inputs["turn_ids"], *map(inputs.get, OPTIONAL))


def flat_tree(row: TokenRow) -> FlatTree:
    """A row as a tree."""
    before, size = len(row.prompt_ids), len(row.ids)
    turns = np.full(before + size, -1, dtype=np.int64)
    turns[before:] = np.where(np.array(row.mask) > 0, row.turns, -1)
    parent = np.r_[np.arange(-1, before - 1), np.array(row.parent, dtype=np.int64) + before]
    return FlatTree(np.array(row.prompt_ids + row.ids, dtype=np.int64), turns, parent)


def batch_trees(
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    loss_mask: Tensor,
    completion_mask: Tensor,
    parent: Tensor | None = None,
    prompt_routes: Tensor | None = None,
    routes: Tensor | None = None,
) -> tuple[list[FlatTree], list[int]]:
    """The rows of a TRL batch as trees."""
    arrays = (prompt_ids, prompt_mask, completion_ids, completion_mask, loss_mask)
    prompts, prompt_masks, completions, masks, wanted = (array.detach().cpu().numpy() for array in arrays)
    columns = None if parent is None else parent.cpu().numpy()
    paths = None if routes is None else (prompt_routes.cpu().numpy(), routes.cpu().numpy())
    trees, lengths = [], []
    for row in range(len(prompts)):
        prompt = prompts[row][prompt_masks[row].astype(bool)]
        size = int(masks[row].sum())
        turns = np.full(len(prompt) + size, -1, dtype=np.int64)
        turns[len(prompt) :] = np.where(wanted[row][:size] > 0, 0, -1)
        tree_parent = None
        if columns is not None:
            tree_parent = np.r_[np.arange(-1, len(prompt) - 1), columns[row][:size] + len(prompt)]
        tree_routes = None
        if paths is not None:
            before, after = (part[row] for part in paths)
            tree_routes = np.concatenate([before[len(before) - len(prompt) :], after[:size]])
        trees.append(FlatTree(np.concatenate([prompt, completions[row][:size]]), turns, tree_parent, tree_routes))
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
    prompt_routes: Tensor | None = None,
    routes: Tensor | None = None,
    *,
    leaves: Sequence[TokenTree] = (),
    router_losses: list[Tensor] | None = None,
    attention: str = "auto",
    temperature: float = 1.0,
    truncation: Truncation | None = None,
    images: Media | None = None,
    sequence: SequenceGroup | None = None,
    shared: bool = False,
) -> tuple[Tensor, Tensor, list[list[float]]]:
    """
    Log-probabilities and entropies of a TRL batch from one packed forward, in which shared prefixes are computed once.
    Every call makes one forward on every rank, also if no log-prob is wanted, so ranks with different rows stay in
    step.
    """
    trees, lengths = batch_trees(
        prompt_ids, prompt_mask, completion_ids, loss_mask, completion_mask, parent, prompt_routes, routes
    )
    packed = pack(with_blank([*trees, *leaves], images or {}))
    plain = packed.tree >= len(trees)
    score = score_packed if shared else score_own
    outputs = score(
        model,
        packed,
        attention=attention,
        temperature=temperature,
        truncation=truncation,
        plain=plain if leaves else None,
        router_loss=router_losses is not None,
        images=images,
        sequence=sequence,
    )
    if router_losses is not None and outputs.router_loss is not None:
        router_losses.append(outputs.router_loss)
    device = outputs.logps.device
    row, column = packed.tree[~plain], packed.column[~plain]
    place = torch.from_numpy(row).to(device), torch.from_numpy(column - np.array(lengths)[row]).to(device)
    of_rows = torch.from_numpy(~plain).to(device)
    logps, entropies = (
        values.new_zeros(completion_ids.shape).index_put(place, values[of_rows] if leaves else values)
        for values in (outputs.logps, outputs.entropies)
    )
    return logps, entropies, leaf_means(packed, outputs.logps, leaves, len(trees))


def rows_logps(
    model: nn.Module,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    loss_mask: Tensor,
    parent: Tensor | None = None,
    *,
    temperature: float = 1.0,
    truncation: Truncation | None = None,
    images: Media | None = None,
    router_losses: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """
    As `batch_logps`, with each sequence of a trajectory in a row of its own: one where its history was kept, else one
    for each branch. A trained token is scored in the first of them that has it.
    """
    trees, lengths = batch_trees(prompt_ids, prompt_mask, completion_ids, loss_mask, completion_mask, parent)
    rows = [flatten(tree) if isinstance(tree, TokenTree) else tree for tree in with_blank(trees, images or {})]
    scores = score_rows(model, rows, temperature, truncation, router_losses is not None, images)
    if router_losses is not None and scores.router_loss is not None:
        router_losses.append(scores.router_loss)
    device = scores.logps.device
    place = (scores.tree, scores.column - np.array(lengths)[scores.tree])
    index = tuple(torch.from_numpy(array).to(device) for array in place)
    logps, entropies = (
        values.new_zeros(completion_ids.shape).index_put(index, values) for values in (scores.logps, scores.entropies)
    )
    return logps, entropies


def leaf_means(packed: Packed, logps: Tensor, leaves: Sequence[TokenTree], first: int = 0) -> list[list[float]]:
    """For each tree the mean log-prob, per token, of each turn's action; 0 for a turn without one."""
    if not leaves:
        return []
    wanted = np.flatnonzero(packed.tree >= first)
    values = logps.detach()[torch.from_numpy(wanted).to(logps.device)].double().cpu().numpy()
    firsts = np.cumsum([0, *(tree.num_turns for tree in leaves)])
    number = firsts[packed.tree[wanted] - first] + packed.turn[wanted]
    counts = np.bincount(number, minlength=firsts[-1]).clip(min=1)
    means = (np.bincount(number, values, minlength=firsts[-1]) / counts).tolist()
    return [means[begin:end] for begin, end in pairwise(firsts)]
