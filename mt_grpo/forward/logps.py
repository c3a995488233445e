"""Log-probabilities of every turn's action, in the context that the model had when it acted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mt_grpo.errors import ConfigError
from mt_grpo.forward.attention.layout import KERNELS
from mt_grpo.forward.lm_head import Truncation
from mt_grpo.forward.media import Media
from mt_grpo.forward.model import enable_trees, score_packed
from mt_grpo.forward.packing import FlatTree, flatten, pack, split
from mt_grpo.forward.probe import prove
from mt_grpo.forward.reference import turn_by_turn_logps
from mt_grpo.forward.rows import score_rows
from mt_grpo.token_tree import TokenTree

ROW_TOKENS = 65_536
"""Most unique tokens that one forward of `"tree"` packs into its row; a larger tree has a row of its own."""


def token_logps(
    model: PreTrainedModel,
    trees: Sequence[TokenTree],
    *,
    forward: str = "tree",
    attention: str = "auto",
    temperature: float = 1.0,
    truncation: Truncation | None = None,
    images: Media | None = None,
) -> list[list[Tensor]]:
    """
    Log-probabilities of the sampled tokens, differentiable.

    Args:
        model (`PreTrainedModel`): A causal language model, with or without a PEFT adapter.
        trees (`list[TokenTree]`): Trajectories.
        forward (`str`, *optional*, defaults to `"tree"`): `"tree"` computes every token once; `"padded"` makes each
            root-to-leaf sequence a row of a padded batch; `"turn_by_turn"` runs one forward per turn.
        attention (`str`, *optional*, defaults to `"auto"`): Attention of `"tree"`: `"segment"`, `"flex"` or `"dense"`.
        temperature (`float`, *optional*, defaults to `1.0`): Divides the logits.
        truncation (`Truncation`, *optional*): The `top_k`, `top_p` and `min_p` that tokens were sampled with.
        images (`Media`, *optional*): The images of the trees, by the id of their tokens.

    Returns:
        `list[list[Tensor]]`: per tree and turn a float32 tensor with one entry per action token.

    Raises:
        UnsupportedModelError: If the model cannot run over packed trees and `forward` is `"tree"`.
        ValueError: If `forward` or `attention` is unknown, or an action has no context.
    """
    for name, value, known in (("forward", forward, FORWARDS), ("attention", attention, ("auto", *KERNELS))):
        if value not in known:
            raise ConfigError(f"`{name}` is {value!r}; choose one of {', '.join(known)}.")
    flat = [flatten(tree) for tree in trees]
    if any(tree.parent is not None and ((tree.turns >= 0) & (tree.parent < 0)).any() for tree in flat):
        raise ValueError("The first token of a tree is trained, but no token before it predicts it.")
    turns = [tree.num_turns for tree in trees]
    if not any(len(tree.tokens) for tree in flat):
        return [[torch.empty(0)] * count for count in turns]
    if forward == "tree":
        return _tree(model, flat, turns, attention, temperature, truncation, images)
    return (_padded if forward == "padded" else _turn_by_turn)(model, flat, turns, temperature, truncation, images)


def _tree(
    model: PreTrainedModel,
    flat: list[FlatTree],
    num_turns: list[int],
    attention: str,
    temperature: float,
    truncation: Truncation | None,
    images: Media | None,
) -> list[list[Tensor]]:
    enable_trees(model)
    prove(model, max(len(path) for tree in flat for path in tree.paths()), attention=attention)
    found = [[torch.empty(0)] * count for count in num_turns]
    full = [index for index, tree in enumerate(flat) if len(tree.tokens)]
    for part in split([flat[index] for index in full], ROW_TOKENS):
        row = [full[place] for place in part]
        packed = pack([flat[index] for index in row])
        logps = score_packed(model, packed, attention, temperature, truncation, images=images).logps
        order = packed.turn_order
        logps = logps[torch.from_numpy(order).to(logps.device)]
        bases = np.cumsum([0, *(num_turns[index] for index in row)])
        sizes = np.bincount(bases[packed.tree] + packed.turn, minlength=bases[-1])
        pieces = iter(logps.split(sizes.tolist()))
        for index in row:
            found[index] = [next(pieces) for _ in range(num_turns[index])]
    return found


def _padded(
    model: PreTrainedModel,
    flat: list[FlatTree],
    num_turns: list[int],
    temperature: float,
    truncation: Truncation | None,
    images: Media | None,
) -> list[list[Tensor]]:
    scores = score_rows(model, flat, temperature, truncation, images=images)
    order = torch.from_numpy(np.lexsort((scores.column, scores.turn, scores.tree))).to(scores.logps.device)
    bases = np.cumsum([0, *num_turns])
    sizes = np.bincount(bases[scores.tree] + scores.turn, minlength=bases[-1])
    pieces = iter(scores.logps[order].split(sizes.tolist()))
    return [[next(pieces) for _ in range(count)] for count in num_turns]


def _turn_by_turn(
    model: PreTrainedModel,
    flat: list[FlatTree],
    num_turns: list[int],
    temperature: float,
    truncation: Truncation | None,
    images: Media | None,
) -> list[list[Tensor]]:
    device = next(model.parameters()).device
    found = []
    for tree, count in zip(flat, num_turns, strict=True):
        tokens, turns, parent = (
            torch.from_numpy(array).to(device)[None] for array in (tree.tokens, tree.turns, tree.parent)
        )
        prompt = tokens[:, :0]
        logps, _ = turn_by_turn_logps(
            model, prompt, prompt, tokens, turns >= 0, turns, parent, temperature, truncation, images=images
        )
        found.append([logps[0, turns[0] == turn] for turn in range(count)])
    return found


FORWARDS = ("tree", "padded", "turn_by_turn")
