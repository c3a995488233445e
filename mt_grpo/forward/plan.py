"""What one forward is given, and what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise

import numpy as np
import torch
from torch import Tensor

from mt_grpo.forward.lm_head import Truncation
from mt_grpo.forward.media import Media, with_blank
from mt_grpo.forward.packing import FlatTree, flatten
from mt_grpo.forward.sequence_parallel import SequenceGroup
from mt_grpo.token_tree import TokenTree

FORWARDS = ("tree", "padded", "turn_by_turn")
"""Every token once; a padded row for each root-to-leaf sequence; one forward per turn."""


@dataclass(frozen=True, eq=False)
class ForwardPlan:
    """
    The tokens to score, and how.

    Args:
        trees (`Sequence`): Trajectories, with the routes of their tokens.
        leaves (`Sequence[Sequence[TokenTree]]`, *optional*): For each tree, more trees for `"tree"` to score, at
            temperature 1 and without truncation. What they share with others is computed once.
        media (`Media`, *optional*): The images, videos and sounds of the trees, by the id of their tokens.
        forward (`str`, *optional*, defaults to `"tree"`): One of `FORWARDS`.
        attention (`str`, *optional*, defaults to `"auto"`): The attention kernel of `"tree"`.
        temperature (`float`, *optional*, defaults to `1.0`): Divides the logits.
        truncation (`Truncation`, *optional*): Which tokens could be drawn.
        router_loss (`bool`, *optional*, defaults to `False`): Whether the loss that balances experts is wanted too.
        group (`SequenceGroup`, *optional*): The processes that compute a row of `"tree"` together.
        shared (`bool`, *optional*, defaults to `False`): Whether every process of the group has this same plan. If
            not, they compute the plans of all one after the other, which is for forwards without a gradient.
    """

    trees: Sequence[FlatTree | TokenTree] = ()
    leaves: Sequence[Sequence[TokenTree]] = ()
    media: Media = field(default_factory=dict)
    forward: str = "tree"
    attention: str = "auto"
    temperature: float = 1.0
    truncation: Truncation | None = None
    router_loss: bool = False
    group: SequenceGroup | None = None
    shared: bool = False

    @cached_property
    def all_trees(self) -> list[FlatTree]:
        """The trees, then the leaves, then what only keeps processes in step."""
        trees = with_blank([*self.trees, *chain.from_iterable(self.leaves)], self.media)
        return [flatten(tree) if isinstance(tree, TokenTree) else tree for tree in trees]

    def split(self, size: int) -> list[ForwardPlan]:
        """Plans of up to `size` trees each; one of none where there are none."""
        return [
            replace(self, trees=self.trees[start : start + size], leaves=self.leaves[start : start + size])
            for start in range(0, len(self.trees) or 1, size)
        ]


DEFAULT_PLAN = ForwardPlan()


@dataclass(frozen=True, eq=False)
class Scores:
    """
    Scores of the `M` trained tokens of a plan's trees; its leaves are numbered after its trees.

    Args:
        tree, column, turn (`np.ndarray`): `(M,)` the tree of each token, its index there, and its turn.
        logps, entropies (`Tensor`): `(M,)`.
        router_loss (`Tensor`, *optional*): The loss that balances experts, if the plan asks for it.
    """

    tree: np.ndarray
    column: np.ndarray
    turn: np.ndarray
    logps: Tensor
    entropies: Tensor
    router_loss: Tensor | None = None

    def by_turn(self, num_turns: Sequence[int]) -> list[list[Tensor]]:
        """The log-probs of each turn of trees with so many turns."""
        order = torch.from_numpy(np.lexsort((self.column, self.turn, self.tree))).to(self.logps.device)
        bases = np.cumsum([0, *num_turns])
        sizes = np.bincount(bases[self.tree] + self.turn, minlength=bases[-1])
        pieces = iter(self.logps[order].split(sizes.tolist()))
        return [[next(pieces) for _ in range(count)] for count in num_turns]

    def turn_means(self, num_turns: Sequence[int], first: int = 0) -> list[list[float]]:
        """The mean log-prob per token of each turn of the trees from number `first` on; 0 for a turn without any."""
        if not num_turns:
            return []
        wanted = np.flatnonzero(self.tree >= first)
        values = self.logps.detach()[torch.from_numpy(wanted).to(self.logps.device)].double().cpu().numpy()
        bases = np.cumsum([0, *num_turns])
        number = bases[self.tree[wanted] - first] + self.turn[wanted]
        counts = np.bincount(number, minlength=bases[-1]).clip(min=1)
        means = (np.bincount(number, values, minlength=bases[-1]) / counts).tolist()
        return [means[begin:end] for begin, end in pairwise(bases)]
