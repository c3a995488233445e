"""Log-probabilities of every turn's action, in the context that the model had when it acted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mt_grpo.errors import ConfigError
from mt_grpo.forward.attention.layout import KERNELS
from mt_grpo.forward.lm_head import Truncation
from mt_grpo.forward.media import Media
from mt_grpo.forward.model import enable_trees
from mt_grpo.forward.packing import flatten, split
from mt_grpo.forward.plan import FORWARDS, ForwardPlan
from mt_grpo.forward.probe import prove
from mt_grpo.forward.rows import score
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
    found = [[torch.empty(0)] * tree.num_turns for tree in trees]
    full = [index for index, tree in enumerate(flat) if len(tree.tokens)]
    if not full:
        return found
    plan = ForwardPlan(flat, (), images or {}, forward, attention, temperature, truncation)
    rows = [list(range(len(full)))]
    if forward == "tree":
        enable_trees(model)
        prove(model, max(len(path) for tree in flat for path in tree.paths()), plan)
        rows = split([flat[index] for index in full], ROW_TOKENS)
    for row in rows:
        indices = [full[place] for place in row]
        scores = score(model, replace(plan, trees=[flat[index] for index in indices]))
        for index, of_turns in zip(indices, scores.by_turn([len(found[index]) for index in indices]), strict=True):
            found[index] = of_turns
    return found
