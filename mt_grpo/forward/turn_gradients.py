"""
The gradient of each turn's log-prob, projected at random, so that gradients of many turns can be kept and compared.

A turn's log-prob depends on the tokens before it only. So each turn has a forward and a backward of its own, over the
path that leads to it: a backward over the whole conversation would separate turns no better, and take longer.

The projection is a count sketch (Charikar et al. 2002): entry i of the gradient is multiplied by a random sign and
added to number i mod 521. Over random signs, inner products of projected gradients are those of the gradients in the
mean, with an error of about 1 / √521 of the product of their lengths. 521 is a prime, so that the entries of a row or
a column of a weight matrix are spread over all numbers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mt_grpo.forward.lm_head import Truncation
from mt_grpo.forward.logps import token_logps
from mt_grpo.token_tree import TokenTree

SIZE = 521
"""Numbers of a projected gradient."""
PERIOD = 2048 * SIZE
"""Signs that are kept; longer gradients begin at other places in them."""


class Projection:
    """Projects gradients. Every instance of the same seed and shapes does it in the same way."""

    def __init__(self, parameters: Sequence[Tensor], seed: int = 0) -> None:
        signs = torch.randint(2, (PERIOD,), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1.0
        self._signs = torch.cat([signs, signs]).to(parameters[0].device)
        draw = random.Random(seed)
        self._begins = [[draw.randrange(PERIOD) for _ in range(0, each.numel(), PERIOD)] for each in parameters]

    def __call__(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Projects gradients of all parameters, `None` for 0, to shape (521,), float32, on the CPU."""
        found = torch.zeros(SIZE, device=self._signs.device)
        for gradient, begins in zip(gradients, self._begins, strict=True):
            if gradient is None:
                continue
            for part, begin in zip(gradient.reshape(-1).split(PERIOD), begins, strict=True):
                signed = part.to(found.device, torch.float32) * self._signs[begin : begin + len(part)]
                whole = len(part) // SIZE * SIZE
                found += signed[:whole].view(-1, SIZE).sum(dim=0)
                found[: len(part) - whole] += signed[whole:]
        return found.cpu()


class TurnGradients:
    """Computes projected gradients of log-probs. The model is put into evaluation mode."""

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
        self._project = Projection(self._parameters)

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
