"""Cuts a distribution with `top_k`, `top_p` and `min_p`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_EXCLUDED = -1e4  # nats: a probability of 0 without an infinity, whose product with 0 is not a number


@dataclass(frozen=True)
class Truncation:
    """
    Which tokens can be drawn. Names, meaning and order are vLLM's: after temperature come `min_p`, `top_k`, then
    `top_p` over the tokens that are left. Tokens that are as likely as the last one that can be drawn can be drawn
    too.

    Args:
        top_k (`int`, *optional*, defaults to `0`): Keeps this many of the likeliest tokens; 0 or less keeps all.
        top_p (`float`, *optional*, defaults to `1.0`): Keeps the fewest tokens whose probabilities add up to this.
        min_p (`float`, *optional*, defaults to `0.0`): Keeps tokens at least this likely, relative to the likeliest.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def floor(self, logits: Tensor) -> Tensor:
        """
        The smallest logit of a token that can be drawn.

        Args:
            logits (`Tensor`): `(M, vocab)`, after temperature.

        Returns:
            `(M,)`.
        """
        lowest = math.log(self.min_p) if self.min_p > 0 else -math.inf
        floor = logits.amax(dim=1, keepdim=True) + lowest
        ordered = None
        if 0 < self.top_k < logits.size(1):
            ordered = logits.topk(self.top_k, dim=1).values
            floor = floor.maximum(ordered[:, -1:])
        if self.top_p < 1:
            if ordered is None:
                ordered = logits.sort(dim=1, descending=True).values
            total = logits.masked_fill(logits < floor, -math.inf).logsumexp(dim=1, keepdim=True)
            probabilities = (ordered - total).exp()
            before = probabilities.cumsum(dim=1) - probabilities
            last = (before < self.top_p).sum(dim=1, keepdim=True) - 1
            floor = floor.maximum(ordered.gather(1, last))
        return floor.squeeze(1)

    def apply(self, logits: Tensor, labels: Tensor) -> Tensor:
        """
        Logits whose softmax is the distribution that `labels` were drawn from.

        Args:
            logits (`Tensor`): `(M, vocab)`, after temperature.
            labels (`Tensor`): `(M,)` tokens that were drawn. They are always kept.
        """
        whole = logits.detach()
        excluded = excludes(whole, self.floor(whole), labels)
        return torch.where(excluded, whole.amax(dim=1, keepdim=True) + _EXCLUDED, logits)


def excludes(logits: Tensor, floor: Tensor, labels: Tensor) -> Tensor:
    """Tokens that cannot be drawn, `(M, vocab)` bool: those below the floor `(M,)`, except the labels `(M,)`."""
    return (logits < floor[:, None]).scatter_(1, labels[:, None], False)


def exclude(logps: Tensor, excluded: Tensor) -> Tensor:
    """Makes the probability of excluded tokens 0, in place."""
    return logps.masked_fill_(excluded, _EXCLUDED)
