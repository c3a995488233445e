"""
Many token trees in one row, depth first; prefixes that trees share are in it once.

A row may be computed by several processes, as DeepSpeed-Ulysses has it (Jacobs et al. 2023). Each computes embedding,
norms and MLPs for its share of the row's tokens, and the output layer for its share of the labels. For the core of
attention it gets all tokens of a share of the heads, and gives their outputs back. So attention sees the whole tree,
by the same mask and the same kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import gcd, prod
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import init_device_mesh

from mt_grpo.errors import UnsupportedModelError
from mt_grpo.token_tree import NO_ROUTE, TokenTree


def cannot_pack(reason: str) -> UnsupportedModelError:
    """The refusal of a model that cannot run over packed trees."""
    return UnsupportedModelError(f"{reason}, so trees cannot be packed for it; set `forward: padded`.")


@dataclass(frozen=True)
class FlatTree:
    """One trajectory's tree as arrays of its `L` tokens in depth-first order."""

    tokens: np.ndarray
    turns: np.ndarray
    parent: np.ndarray | None = None
    routes: np.ndarray | None = None

    def paths(self) -> list[np.ndarray]:
        """Indices of the tokens on each root-to-leaf path."""
        length = len(self.tokens)
        columns = np.arange(length)
        if self.parent is None or length == 0:
            return [columns] if length else []
        starts = np.flatnonzero(np.r_[True, self.parent[1:] != columns[:-1]])
        parent = self.parent[starts]
        parent_run = np.searchsorted(starts, parent, side="right") - 1
        paths = []
        for run, end in enumerate([*starts[1:], length]):
            pieces = [columns[starts[run] : end]]
            while parent[run] >= 0:
                last, run = parent[run], parent_run[run]
                pieces.append(columns[starts[run] : last + 1])
            paths.append(np.concatenate(pieces[::-1]))
        return paths


def flatten(tree: TokenTree) -> FlatTree:
    """The arrays of a `TokenTree`; every sampled token is trained at the node where it was sampled."""
    order, ends, first_parent, length = [], {-1: 0}, [], 0
    for index in tree.depth_first():
        order.append(node := tree.nodes[index])
        first_parent.append(ends[node.parent] - 1)
        length += len(node.tokens)
        ends[index] = length
    sizes = np.array([len(node.tokens) for node in order], dtype=np.int64)
    tokens = np.fromiter((token for node in order for token in node.tokens), np.int64, length)
    parent = np.arange(-1, length - 1)
    parent[np.cumsum(sizes) - sizes] = first_parent
    turns = np.repeat([node.turn for node in order], sizes).astype(np.int64)
    width = max((len(node.routes) // len(node.tokens) for node in order), default=0)
    if not width:
        return FlatTree(tokens, turns, parent)
    routes = b"".join(node.routes or NO_ROUTE * width * len(node.tokens) for node in order)
    return FlatTree(tokens, turns, parent, np.frombuffer(routes, np.uint8).reshape(length, width))


@dataclass(frozen=True)
class Packed:
    """
    `N` unique tokens of many trees in depth-first order, and the `M` labels: the tokens whose log-probs are wanted.

    Token `q` sees token `k` if and only if `k <= q <= subtree_end[k]`.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    parent: np.ndarray
    subtree_end: np.ndarray
    predictor: np.ndarray
    label: np.ndarray
    tree: np.ndarray
    column: np.ndarray
    turn: np.ndarray
    routes: np.ndarray | None = None
    shared_routes: tuple[int, int] = (0, 0)
    ends: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @cached_property
    def copies(self) -> np.ndarray:
        """`(N,)` in how many root-to-leaf sequences of the trees each token stands."""
        ends = np.sort(self.ends)
        found: np.ndarray = ends.searchsorted(self.subtree_end, "right") - ends.searchsorted(
            np.arange(len(self.input_ids))
        )
        return found

    def at_least(self, size: int) -> Packed:
        """The row, with tokens that nothing sees at its end, where it has fewer than `size`."""
        length = len(self.input_ids)
        if length >= size:
            return self
        more = np.arange(length, size)
        routes = self.routes
        if routes is not None:
            routes = np.concatenate([routes, np.full((len(more), routes.shape[1]), NO_ROUTE[0], dtype=np.uint8)])
        return replace(
            self,
            input_ids=np.concatenate([self.input_ids, 0 * more]),
            position_ids=np.concatenate([self.position_ids, 0 * more]),
            parent=np.concatenate([self.parent, 0 * more - 1]),
            subtree_end=np.concatenate([self.subtree_end, more]),
            routes=routes,
        )


def pack(trees: Sequence[FlatTree | TokenTree]) -> Packed:
    """
    Lays trees out in one row, depth first: of the sorted root-to-leaf sequences each adds what follows its longest
    common prefix with the one before it. Python loops over sequences, and numpy handles their tokens.
    """
    sequences = _sequences(trees)
    order, shared = _sort_by_prefix([sequence.tokens for sequence in sequences])
    sequences = [sequences[index] for index in order]
    sizes = [len(sequence.tokens) for sequence in sequences]
    shifts, parent_sequence, subtree_end = _lay_out(sizes, shared)
    forks = {
        shift + common: shifts[fork] + common - 1 if common else -1
        for shift, fork, common, size in zip(shifts, parent_sequence, shared, sizes, strict=True)
        if common < size
    }
    indices = np.arange(len(subtree_end))
    parent = indices - 1
    parent[list(forks)] = list(forks.values())
    added = np.array(sizes, dtype=np.int64) - np.array(shared, dtype=np.int64)
    input_ids = _join([sequence.tokens[common:] for sequence, common in zip(sequences, shared, strict=True)])

    turns = _join([sequence.turns for sequence in sequences])
    trained = (turns >= 0).nonzero()[0]
    firsts, rows = [0], []
    for sequence, size, shift, common in zip(sequences, sizes, shifts, shared, strict=True):
        skipped = size - len(sequence.turns) - firsts[-1]  # from an index of `turns` to a depth
        rows.append((shift + skipped, sequence.lead + skipped, sequence.tree, shift + common))
        firsts.append(firsts[-1] + len(sequence.turns))
    bounds = trained.searchsorted(firsts)
    counts = bounds[1:] - bounds[:-1]
    place, column, tree, start = np.array(rows, dtype=np.int64).reshape(-1, 4).T.repeat(counts, axis=1)
    place += trained
    column += trained
    early = (place < start).nonzero()[0]
    if len(early):  # in the common prefix, so an earlier sequence added them
        number = np.arange(len(sequences)).repeat(counts)[early]
        place[early] = _locate(place[early] - np.array(shifts)[number], number, shifts, parent_sequence, shared)
    predictor = parent[place]
    if len(predictor) and predictor.min() < 0:
        raise ValueError("The first token of a tree is trained, but no token before it predicts it.")
    return Packed(
        input_ids,
        indices - np.array(shifts, dtype=np.int64).repeat(added),
        parent,
        subtree_end,
        predictor,
        input_ids[place],
        tree,
        column,
        turns[trained],
        *_pack_routes(sequences, shifts, parent_sequence, shared),
        _locate(np.array(sizes) - 1, np.arange(len(sizes)), shifts, parent_sequence, shared) if sizes else indices,
    )


def _pack_routes(
    sequences: list[_Sequence], shifts: list[int], parent: list[int], shared: list[int]
) -> tuple[np.ndarray | None, tuple[int, int]]:
    """`routes` and `shared_routes` of a `Packed`, for sorted sequences that `_lay_out` has laid out."""
    width = max((sequence.routes.shape[1] for sequence in sequences if sequence.routes is not None), default=0)
    if not width:
        return None, (0, 0)
    total = sum(len(sequence.tokens) for sequence in sequences) - sum(shared)
    routes = np.full((total, width), NO_ROUTE[0], dtype=np.uint8)
    owner = np.full(total, -1)
    seen = differing = 0
    for number in sorted(range(len(sequences)), key=lambda number: sequences[number].tree):
        tokens, turns, tree, _, own = sequences[number]
        if own is None:
            continue
        depth = np.arange(len(tokens) - len(turns), len(tokens))
        place = _locate(depth, np.full(len(depth), number), shifts, parent, shared)
        known = (own != NO_ROUTE[0]).any(axis=1)
        again = known & (owner[place] >= 0) & (owner[place] != tree)
        seen += int(again.sum())
        differing += int((own[again] != routes[place[again]]).any(axis=1).sum())
        added = known & (owner[place] < 0)
        routes[place[added]], owner[place[added]] = own[added], tree
    return routes, (seen, differing)


class _Sequence(NamedTuple):
    """A root-to-leaf sequence."""

    tokens: np.ndarray
    turns: np.ndarray
    tree: int
    lead: int
    routes: np.ndarray | None = None


def _sequences(trees: Sequence[FlatTree | TokenTree]) -> list[_Sequence]:
    sequences = []
    for number, tree in enumerate(trees):
        flat = flatten(tree) if isinstance(tree, TokenTree) else tree
        if flat.parent is None:
            if len(flat.tokens):
                sequences.append(_Sequence(flat.tokens, flat.turns, number, 0, flat.routes))
            continue
        begin = 0
        for path in flat.paths():
            end = int(path[-1]) + 1
            routes = None if flat.routes is None else flat.routes[begin:end]
            sequences.append(_Sequence(flat.tokens[path], flat.turns[begin:end], number, end - len(path), routes))
            begin = end
    return sequences


def _join(pieces: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)


def unique_tokens(trees: Sequence[FlatTree | TokenTree]) -> int:
    """Number of tokens that `pack` would forward."""
    tokens = [sequence.tokens for sequence in _sequences(trees)]
    return sum(map(len, tokens)) - sum(_sort_by_prefix(tokens)[1])


def split(trees: Sequence[FlatTree], budget: int) -> list[list[int]]:
    """Distributes trees over rows of at most `budget` unique tokens, those that begin alike next to each other."""
    rows: list[list[int]] = []
    size = 0
    for index in sorted(range(len(trees)), key=lambda index: trees[index].tokens.tolist()):
        own = unique_tokens([trees[index]])
        previous = [trees[rows[-1][-1]]] if rows else []
        grown = size + unique_tokens([*previous, trees[index]]) - unique_tokens(previous)
        if rows and grown <= budget:
            rows[-1].append(index)
            size = grown
        else:
            rows.append([index])
            size = own
    return rows


def _sort_by_prefix(sequences: list[np.ndarray]) -> tuple[list[int], list[int]]:
    """An order that puts common prefixes side by side, and the length each sequence shares with the one before it."""
    # bytes do not compare as the ids do, but any total order of the ids puts common prefixes side by side
    keys = [sequence.tobytes() for sequence in sequences]
    order = sorted(range(len(sequences)), key=keys.__getitem__)
    if not order:
        return [], []
    everywhere = _common(sequences[order[0]], sequences[order[-1]], 0)
    return order, [0, *(_common(sequences[one], sequences[next], everywhere) for one, next in pairwise(order))]


def _common(one: np.ndarray, other: np.ndarray, known: int) -> int:
    """Length of the longest common prefix of two sequences whose first `known` tokens are equal."""
    end = min(len(one), len(other))
    # on bytes `find` costs a fraction of numpy's `argmax`, and says where there is none
    first = (one[known:end] != other[known:end]).tobytes().find(1)
    return end if first < 0 else known + first


def _lay_out(sizes: list[int], shared: list[int]) -> tuple[list[int], list[int], np.ndarray]:
    """Lays out sorted sequences depth first: each adds what follows its common prefix with the one before."""
    total = sum(sizes) - sum(shared)
    subtree_end = np.full(total, total - 1)
    shifts: list[int] = []
    parent: list[int] = []
    path: list[int] = []  # the sequences that added the tokens from the root to the last one
    start = depth = 0
    for number, (size, common) in enumerate(zip(sizes, shared, strict=True)):
        while depth > common:  # closes the subtrees that this sequence leaves, from the leaf up
            last = path[-1]
            cut = max(common, shared[last])
            shift = shifts[last]
            subtree_end[shift + cut : shift + depth] = start - 1
            depth = cut
            if cut == shared[last]:
                path.pop()
        shifts.append(start - common)
        parent.append(path[-1] if path else -1)
        if size > common:
            path.append(number)
        start += size - common
        depth = size
    return shifts, parent, subtree_end


def _locate(
    depth: np.ndarray, sequence: np.ndarray, shifts: list[int], parent: list[int], shared: list[int]
) -> np.ndarray:
    """Indices, in the layout of `_lay_out`, of the tokens at given depths of given sequences."""
    parent_of, common = np.array(parent), np.array(shared)
    while (higher := depth < common[sequence]).any():
        sequence = np.where(higher, parent_of[sequence], sequence)
    found: np.ndarray = depth + np.array(shifts)[sequence]
    return found


# A row over several processes


class SequenceGroup:
    """The processes that compute a row together."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    @classmethod
    def of_neighbours(cls, size: int, device: torch.device) -> SequenceGroup:
        """The group of `size` ranks in a row, as accelerate's `sp_size` makes it. This is a collective call."""
        mesh = init_device_mesh(device.type, (dist.get_world_size() // size, size), mesh_dim_names=("dp", "sp"))
        return cls(mesh.get_group("sp"))

    def gather(self, thing: object) -> list[Any]:
        """What each process of the group brings, by rank. This is a collective call of the group."""
        things: list[Any] = [None] * self.size
        dist.all_gather_object(things, thing, self.group)
        return things


@dataclass(frozen=True, eq=False)
class Share:
    """A packed row's tokens that this process computes: those in a row, as many as other processes have."""

    group: SequenceGroup
    length: int

    @cached_property
    def sizes(self) -> list[int]:
        """How many tokens each process computes."""
        return _evenly(self.length, self.group.size)

    @property
    def tokens(self) -> slice:
        """Where in the row the tokens of this process are."""
        ends = list(accumulate(self.sizes))
        return slice(ends[self.group.rank] - self.sizes[self.group.rank], ends[self.group.rank])

    def labels(self, predictor: np.ndarray) -> Labels:
        """Which processes have and score labels that are predicted by given tokens, `(M,)`, of the row."""
        process = np.searchsorted(np.cumsum(self.sizes), predictor, side="right")
        had = np.bincount(process, minlength=self.group.size).tolist()
        return Labels(self.group, np.argsort(process, kind="stable"), had, _evenly(len(predictor), self.group.size))

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From all heads of this process's tokens to all tokens of its heads; too few key-value heads are repeated."""
        heads, size = query.size(1), self.group.size
        if heads % size:
            raise UnsupportedModelError(
                f"A layer has {heads} attention heads, which {size} processes cannot share equally: leave `sp_size` "
                "out."
            )
        copies = size // gcd(key.size(1), size)
        if copies > 1:
            key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
        query, key, value = self._move(True, query, key, value)
        return query, key, value

    def to_tokens(self, output: Tensor) -> Tensor:
        """`(1, heads of this process, N, head_dim)` of all tokens to `(1, heads, n, head_dim)` of this process's."""
        return self._move(False, output)[0]

    def _move(self, to_heads: bool, *tensors: Tensor) -> list[Tensor]:
        """By one exchange for several tensors, so that all processes make them in one order."""
        leaving: list[Sequence[Tensor]] = []  # per tensor and process
        arriving: list[list[tuple[int, int, int]]] = []
        for (rows,) in tensors:
            heads, _, width = rows.shape
            if to_heads:
                heads //= self.group.size
                leaving.append(rows.split(heads))
                arriving.append([(heads, size, width) for size in self.sizes])
            else:
                leaving.append(rows.split(self.sizes, dim=1))
                arriving.append([(heads, self.sizes[self.group.rank], width)] * self.group.size)
        sent = [torch.cat([part.reshape(-1) for part in parts]) for parts in zip(*leaving, strict=True)]
        shapes = [shape for of_process in zip(*arriving, strict=True) for shape in of_process]
        sizes = [prod(shape) for shape in shapes]
        counts = [sum(sizes[start : start + len(tensors)]) for start in range(0, len(sizes), len(tensors))]
        pieces = _exchanged(self.group, list(map(len, sent)), counts, torch.cat(sent)).split(sizes)
        parts = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        dim = 1 if to_heads else 0
        return [torch.cat(parts[number :: len(tensors)], dim=dim)[None] for number in range(len(tensors))]

    def of_heads(self, values: Tensor) -> Tensor:
        """Of `(heads,)` those of this process's heads."""
        mine: Tensor = values.chunk(self.group.size)[self.group.rank]
        return mine


@dataclass(frozen=True, eq=False)
class Labels:
    """The `M` labels of a row: states are sent on, so that every process scores as many."""

    group: SequenceGroup
    order: np.ndarray
    had: list[int]
    scored: list[int]

    def of(self, counts: list[int]) -> np.ndarray:
        """Those of this process, by `had` or `scored`."""
        end = sum(counts[: self.group.rank + 1])
        return self.order[end - counts[self.group.rank] : end]

    def deal(self, states: Tensor) -> Tensor:
        """Redistributes hidden states, `(m, hidden)`, from the ranks that predict labels to those that score them."""
        rank = self.group.rank
        leaving, coming = _overlaps(self.had, self.scored)[rank], _overlaps(self.scored, self.had)[rank]
        return _exchanged(self.group, leaving, coming, states)

    def join(self, scores: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """All scores, `(M,)`, on every process; the gradient is that of a loss that each computes."""
        mine, stacked = self.of(self.scored), torch.stack(list(scores))
        joined: Tensor = _Join.apply(self.group, len(self.order), mine, stacked)  # type: ignore[no-untyped-call]
        return tuple(each.clone() for each in joined)  # FSDP warns of views


def _evenly(number: int, parts: int) -> list[int]:
    """Sizes of as equal parts as there can be."""
    least, more = divmod(number, parts)
    return [least + (part < more) for part in range(parts)]


def _overlaps(one: list[int], other: list[int]) -> list[list[int]]:
    """How much each part of one partition has of each part of another."""
    ends, others = list(accumulate(one)), list(accumulate(other))
    return [
        [max(0, min(end, stop) - max(end - size, stop - width)) for stop, width in zip(others, other, strict=True)]
        for end, size in zip(ends, one, strict=True)
    ]


def _exchanged(group: SequenceGroup, leaving: list[int], coming: list[int], rows: Tensor) -> Tensor:
    """The rows that other processes send, for those that this one sends to each; gradients go the way back."""
    exchanged: Tensor = _Exchange.apply(group, leaving, coming, rows)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: SequenceGroup, leaving: list[int], coming: list[int], rows: Tensor) -> Tensor:
        ctx.group, ctx.leaving, ctx.coming = group, leaving, coming
        arrived = rows.new_empty(sum(coming), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), coming, leaving, group.group)
        return arrived

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, None, None, _exchanged(ctx.group, ctx.coming, ctx.leaving, gradient)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: SequenceGroup, number: int, mine: np.ndarray, scores: Tensor) -> Tensor:
        ctx.mine = torch.from_numpy(mine).to(scores.device)
        joined = scores.new_zeros(len(scores), number)
        joined[:, ctx.mine] = scores
        dist.all_reduce(joined, group=group.group)
        return joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, None, None, gradient[:, ctx.mine]
