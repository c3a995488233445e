"""
What a token sees, and how a query scores a key beyond their product: windows and chunks; caps, sinks, biases, dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """Chunked attention: a token sees its own chunk only (Llama 4)."""

    size: int


Window = int | Chunk | None
"""What a layer sees of a token's ancestors: the last `int` tokens, itself included, those of its chunk, or all."""


def oldest(depth: np.ndarray, window: Window) -> np.ndarray:
    """The smallest depth that tokens at given depths see. It never falls where depth rises."""
    if window is None:
        return np.zeros_like(depth)
    if isinstance(window, Chunk):
        begins: np.ndarray = depth // window.size * window.size
        return begins
    first: np.ndarray = np.maximum(0, depth - window + 1)
    return first


@dataclass(frozen=True, eq=False)
class Score:
    """What becomes of the scaled product of a query and a key."""

    cap: float | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0
    eager: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None

    @property
    def plain(self) -> bool:
        """Whether PyTorch's call computes it."""
        return self.cap is None and self.bias is None and self.sinks is None


PLAIN = Score()


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, score: Score, first: int | Tensor
) -> Tensor:
    """Attention written out, as transformers' eager attention has it."""
    if score.eager is not None:
        return score.eager(query, key, value, mask)
    groups = query.size(1) // key.size(1)
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if score.cap is not None:
        scores = score.cap * torch.tanh(scores / score.cap)
    if score.bias is not None:
        depths = slice(first, first + key.size(2)) if isinstance(first, int) else first
        scores = scores + score.bias[:, depths].unsqueeze(1)
    scores = scores + mask
    if score.sinks is not None:
        sinks = score.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(1, -1, scores.size(2), 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    if score.sinks is not None:
        weights = weights[..., :-1]
    weights = torch.nn.functional.dropout(weights.to(value.dtype), score.dropout)
    return weights @ value
