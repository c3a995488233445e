"""
Log-probabilities with every token computed once: of every turn's action, in the context that the model had when it
acted, through decoders of transformers; and their gradients.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mt_grpo.errors import ConfigError
from mt_grpo.forward.attention import KERNELS
from mt_grpo.forward.lm_head import Truncation
from mt_grpo.forward.media import Media
from mt_grpo.forward.model import FORWARDS, ForwardPlan, enable_trees, score
from mt_grpo.forward.packing import flatten, split
from mt_grpo.forward.probe import prove, table_length
from mt_grpo.token_tree import TokenTree

__all__ = ["Truncation", "token_logps"]

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
        ValueError: If an option or a token is none that there is, an action has no context, or a path has more tokens
            than a table of positions.
    """
    for name, value, known in (("forward", forward, FORWARDS), ("attention", attention, ("auto", *KERNELS))):
        if value not in known:
            raise ConfigError(f"`{name}` is {value!r}; choose one of {', '.join(known)}.")
    if not temperature > 0:
        raise ConfigError(f"`temperature` is {temperature}; set a number above 0.")
    flat = [flatten(tree) for tree in trees]
    if any(tree.parent is not None and ((tree.turns >= 0) & (tree.parent < 0)).any() for tree in flat):
        raise ValueError("The first token of a tree is trained, but no token before it predicts it.")
    vocabulary = model.config.get_text_config().vocab_size
    for tree in flat:  # on a GPU a forward over such a token ends the process
        unknown = (tree.tokens >= vocabulary) | (tree.tokens < 0) & ~np.isin(tree.tokens, list(images or ()))
        if unknown.any():
            raise ValueError(
                f"A tree has the token {tree.tokens[unknown][0]}, and the model's are 0 to {vocabulary - 1} and those "
                "of `images`."
            )
    deepest = max((len(path) for tree in flat for path in tree.paths()), default=0)
    if deepest > (most := table_length(model.config)):
        raise ValueError(f"A tree has a path of {deepest} tokens, and the model has {most} positions: shorten it.")
    found = [[torch.empty(0)] * tree.num_turns for tree in trees]
    full = [index for index, tree in enumerate(flat) if len(tree.tokens)]
    if not full:
        return found
    plan = ForwardPlan(flat, (), images or {}, forward, attention, temperature, truncation)
    rows = [list(range(len(full)))]
    if forward == "tree":
        enable_trees(model)
        prove(model, deepest, plan)
        rows = split([flat[index] for index in full], ROW_TOKENS)
    for row in rows:
        indices = [full[place] for place in row]
        scores = score(model, replace(plan, trees=[flat[index] for index in indices]))
        for index, of_turns in zip(indices, scores.by_turn([len(found[index]) for index in indices]), strict=True):
            found[index] = of_turns
    return found


SIZE = 521
"""Numbers of a projected gradient: a prime, so that the rows and columns of a matrix are spread over all of them."""
_PERIOD = 2048 * SIZE  # signs that are kept; longer gradients begin at other places in them


class _Projection:
    """
    Projects gradients by a count sketch (Charikar et al. 2002), the same for one seed and shapes: entry i, with a
    random sign, is added to number i mod 521. Inner products are right in the mean, with an error of about 1 / √521.
    """

    def __init__(self, parameters: Sequence[Tensor], seed: int = 0) -> None:
        signs = torch.randint(2, (_PERIOD,), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1.0
        self._signs = torch.cat([signs, signs]).to(parameters[0].device)
        draw = random.Random(seed)
        self._begins = [[draw.randrange(_PERIOD) for _ in range(0, each.numel(), _PERIOD)] for each in parameters]

    def __call__(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Projects gradients of all parameters, `None` for 0, to shape (521,), float32, on the CPU."""
        found = torch.zeros(SIZE, device=self._signs.device)
        for gradient, begins in zip(gradients, self._begins, strict=True):
            if gradient is None:
                continue
            for part, begin in zip(gradient.reshape(-1).split(_PERIOD), begins, strict=True):
                signed = part.to(found.device, torch.float32) * self._signs[begin : begin + len(part)]
                whole = len(part) // SIZE * SIZE
                found += signed[:whole].view(-1, SIZE).sum(dim=0)
                found[: len(part) - whole] += signed[whole:]
        return found.cpu()


class TurnGradients:
    """The projected gradient of each turn's log-prob, by a forward over its path; sets evaluation mode."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        forward: str = "tree",
        temperature: float = 1.0,
        truncation: Truncation | None = None,
    ) -> None:
        self._model = model.eval()
        self._options = {"forward": forward, "temperature": temperature, "truncation": truncation}
        self._parameters: list[nn.Parameter] = [each for each in model.parameters() if each.requires_grad]
        self._project = _Projection(self._parameters)

    def of_turn(self, tree: TokenTree, turn: int, mask: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """The gradient of the summed log-probs of a turn's tokens."""
        path, size = tree.path_of_turn(turn), len(tree.actions()[turn])
        if not size:
            return torch.zeros(SIZE), torch.empty(0)
        alone = TokenTree()
        alone.add_turn(path[: len(path) - size], path[len(path) - size :], [0.0] * size)
        logps = token_logps(self._model, [alone], **self._options)[0][0]  # type: ignore[arg-type]
        counted = logps if mask is None else logps * torch.tensor(mask, device=logps.device)
        gradients = torch.autograd.grad(counted.sum(), self._parameters, allow_unused=True)
        return self._project(gradients), logps.detach().cpu()
