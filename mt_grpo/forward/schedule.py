"""In which order a recurrence runs over the chains of a packed row, and which of them run side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SHORT = 64
"""Chains of up to this many tokens may be in one batch. Longer ones are in one batch if none is twice as long."""

Step = Callable[[list[Tensor], Tensor | None, bool], tuple[Tensor, Tensor | None]]
"""
`(inputs, states, continued) -> (outputs, final states)`: inputs and outputs `(B, L, ...)`, states `(B, ...)` or `None`
for zeros. Final states are needed if the chains are `continued`.
"""


@dataclass(frozen=True, eq=False)
class _Batch:
    """Chains that run side by side, padded on the right."""

    chains: list[int]
    parents: list[int]
    shape: tuple[int, int]
    tokens: int
    padded: np.ndarray
    kept: np.ndarray


class Schedule:
    """
    The order of a row's `C` chains: a chain runs after the one that it continues. Chains that others continue run
    level by level, from the roots. Chains that none continues run last, side by side.
    """

    def __init__(self, starts: np.ndarray, sizes: np.ndarray, parents: list[int], parent: np.ndarray) -> None:
        self._starts, self._sizes, self._parent = starts, sizes, parent
        self._continued = set(parents)
        levels: list[int] = []
        for above in parents:  # a chain stands before those that continue it
            levels.append(levels[above] + 1 if above >= 0 else 0)
        last = len(parents)
        groups: dict[tuple[int, bool, int], list[int]] = defaultdict(list)
        for chain, size in enumerate(sizes.tolist()):
            level = levels[chain] if chain in self._continued else last
            groups[level, parents[chain] >= 0, (max(size, SHORT) - 1).bit_length()].append(chain)
        self._batches = [_batch(groups[key], parents, sizes) for key in sorted(groups)]
        order = [chain for batch in self._batches for chain in batch.chains]
        self._order = np.concatenate([np.arange(starts[chain], starts[chain] + sizes[chain]) for chain in order])
        self._inverse = np.argsort(self._order)
        self._rows: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._tensors: dict[tuple[torch.device, int], Tensor] = {}

    def run(self, inputs: Sequence[Tensor], step: Step, padding: Sequence[float] = ()) -> Tensor:
        """Runs a recurrence over the tree."""
        device, counts = inputs[0].device, [batch.tokens for batch in self._batches]
        order = self._on(device, self._order)
        # split and cat, not slices: the backward of a slice would write a zero gradient of the whole row per batch
        pieces = [tensor.index_select(0, order).split(counts) for tensor in inputs]
        states: dict[int, Tensor] = {}
        outputs = []
        for number, batch in enumerate(self._batches):
            own = [tensors[number] for tensors in pieces]
            even = batch.tokens == batch.shape[0] * batch.shape[1]
            if not even:
                own = [
                    _with_last(tensor, 0, last).index_select(0, self._on(device, batch.padded))
                    for tensor, last in zip(own, padding or [0.0] * len(own), strict=True)
                ]
            state = None if batch.parents[0] < 0 else torch.stack([states[chain] for chain in batch.parents])
            continued = batch.chains[0] in self._continued
            output, final = step([tensor.unflatten(0, batch.shape) for tensor in own], state, continued)
            if continued and final is not None:
                states.update(zip(batch.chains, final.unbind(), strict=True))
            output = output.flatten(0, 1)
            if not even:
                output = output.index_select(0, self._on(device, batch.kept))
            outputs.append(output)
        return torch.cat(outputs).index_select(0, self._on(device, self._inverse))

    def convolve(self, inputs: Tensor, width: int, convolution: Callable[[Tensor], Tensor]) -> Tensor:
        """
        Runs a causal convolution over the tree, once, over a row in which each chain stands behind the last tokens
        before it.
        """
        if width not in self._rows:
            self._rows[width] = self._row(width)
        row, own = (self._on(inputs.device, array) for array in self._rows[width])
        return convolution(_with_last(inputs, 2, 0.0).index_select(2, row)).index_select(2, own)

    def _row(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Token at each place of the row that is convolved, `N` where there is none, and place of each token."""
        history = np.empty((len(self._starts), width - 1), dtype=np.int64)
        token = self._parent[self._starts]
        for column in reversed(range(width - 1)):
            history[:, column] = token
            token = np.where(token >= 0, self._parent[token], -1)
        size = len(self._parent)
        own = np.arange(size) + np.arange(1, len(history) + 1).repeat(self._sizes) * (width - 1)
        row = np.empty(size + history.size, dtype=np.int64)
        row[own] = np.arange(size)
        before = np.ones(len(row), dtype=bool)
        before[own] = False
        row[before] = np.where(history >= 0, history, size).reshape(-1)
        return row, own

    def _on(self, device: torch.device, index: np.ndarray) -> Tensor:
        key = (device, id(index))
        if key not in self._tensors:
            self._tensors[key] = torch.from_numpy(index).to(device)
        return self._tensors[key]


def _batch(chains: list[int], parents: list[int], sizes: np.ndarray) -> _Batch:
    own = sizes[chains]
    longest, total = int(own.max()), int(own.sum())
    kept = np.concatenate([row * longest + np.arange(size) for row, size in enumerate(own.tolist())])
    padded = np.full(len(chains) * longest, total, dtype=np.int64)
    padded[kept] = np.arange(total)
    return _Batch(chains, [parents[chain] for chain in chains], (len(chains), longest), total, padded, kept)


def _with_last(tensor: Tensor, dim: int, value: float) -> Tensor:
    """The tensor with one more entry in dimension `dim`, which is `value` everywhere."""
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1 - dim) + (0, 1), value=value)
