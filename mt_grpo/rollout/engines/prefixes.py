"""Keys and values that a batch of conversations has computed, from which their next batch goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

MOST_PADDING = 2
"""Times the longest context that rows with the padding between their turns may be; then they are computed again."""


@dataclass
class Padded:
    """Rows of one width, as `generate` takes them."""

    ids: list[list[int]]
    mask: list[list[int]]
    cache: DynamicCache | None = None


@dataclass
class Prefixes:
    """What is computed of each conversation of the last batch."""

    cache: DynamicCache
    places: dict[str, int]
    known: list[list[int]]
    rows: Padded
    weights: object

    def continued(self, sessions: Sequence[str], contexts: Sequence[list[int]], weights: object) -> Padded | None:
        """
        The rows of a batch that goes on from here, which uses the cache up; `None` if it has another conversation, one
        whose context is none that goes on, other weights, or too much padding between turns.
        """
        if weights != self.weights or not set(sessions) <= set(self.places):
            return None
        chosen = [self.places[session] for session in sessions]
        added = []
        for row, context in zip(chosen, contexts, strict=True):
            length = len(self.known[row])
            if length >= len(context) or context[:length] != self.known[row]:
                return None
            added.append(context[length:])
        widest = max(map(len, added))
        if len(self.rows.ids[0]) + widest > MOST_PADDING * max(map(len, contexts)):
            return None
        self.cache.batch_select_indices(torch.tensor(chosen))
        behind = left_padded(added)
        return Padded(
            [self.rows.ids[row] + ids for row, ids in zip(chosen, behind.ids, strict=True)],
            [self.rows.mask[row] + mask for row, mask in zip(chosen, behind.mask, strict=True)],
            self.cache,
        )


def left_padded(contexts: Sequence[list[int]]) -> Padded:
    """
    Contexts as rows of one width. What is padded is masked, but a repetition penalty reads it: so it is a token of the
    row itself, and the largest, which is none of an image.
    """
    width = max(map(len, contexts))
    return Padded(
        [[max(context)] * (width - len(context)) + context for context in contexts],
        [[0] * (width - len(context)) + [1] * len(context) for context in contexts],
    )


def is_of_tokens_alone(cache: Any) -> bool:
    """Whether a cache is a list of keys and values by place, of which padding in the middle can be masked."""
    return (
        type(cache) is DynamicCache
        and not getattr(cache, "offloading", False)
        and all(type(layer) is DynamicLayer for layer in cache.layers)
    )


def weights_of(model: Any, version: int | None) -> object:
    """Changes whenever the weights of a model are changed in place."""
    changes = sum(0 if parameter.is_inference() else parameter._version for parameter in model.parameters())
    return id(model), version, changes


def keep(
    cache: DynamicCache,
    rows: Padded,
    sessions: Sequence[str],
    contexts: Sequence[list[int]],
    samples: Sequence[list[int]],
    weights: object,
) -> Prefixes:
    """What a batch leaves."""
    steps = cache.get_seq_length() - len(rows.ids[0])
    sampled = [ids[:steps] for ids in samples]
    return Prefixes(
        cache,
        {session: row for row, session in enumerate(sessions)},
        [context + ids for context, ids in zip(contexts, sampled, strict=True)],
        Padded(
            # what a row sampled after its end is no token of it
            [row + ids + ids[-1:] * (steps - len(ids)) for row, ids in zip(rows.ids, sampled, strict=True)],
            [row + [1] * len(ids) + [0] * (steps - len(ids)) for row, ids in zip(rows.mask, sampled, strict=True)],
        ),
        weights,
    )
