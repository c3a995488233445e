"""One forward per turn, in the context that the model had, with nothing shared: the oracle of the tree forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mt_grpo.forward.lm_head import Truncation
from mt_grpo.forward.media import Media, row_inputs


def turn_by_turn_logps(
    model: Any,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    loss_mask: Tensor,
    turn_ids: Tensor,
    parent: Tensor | None,
    temperature: float,
    truncation: Truncation | None = None,
    logits_to_keep: bool = False,
    images: Media | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of a TRL batch, with one forward per turn of each row."""
    rows, columns, logps, entropies = [], [], [], []
    for row in range(len(prompt_ids)):
        prompt = prompt_ids[row][prompt_mask[row].bool()]
        row_parent = range(-1, completion_ids.shape[1] - 1) if parent is None else parent[row].tolist()
        trained = loss_mask[row].bool()
        for turn in turn_ids[row][trained].unique().tolist():
            left = (trained & (turn_ids[row] == turn)).nonzero()[:, 0].tolist()
            while left:  # where the history was rewritten, what answers a turn is on another branch
                path = _path(row_parent, left[-1])
                action = [column for column in left if column in path]
                left = [column for column in left if column not in path]
                kept = prompt[: len(prompt) + 1 + path.pop(0)]
                ids = torch.cat([kept, completion_ids[row, path]])
                places = [path.index(column) - 1 - len(path) for column in action]  # from the end
                keep = {"logits_to_keep": -places[0]} if logits_to_keep else {}
                inputs = row_inputs(model, ids[None], images or {})
                if images:  # without a mask Qwen's Omni models place images as words
                    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
                logits = model(**inputs, use_cache=False, **keep).logits[0]
                labels = completion_ids[row, action]
                logits = logits[places].float() / temperature
                if truncation is not None:
                    logits = truncation.apply(logits, labels)
                distribution = torch.log_softmax(logits, dim=-1)
                logps.append(distribution.gather(1, labels[:, None])[:, 0])
                entropies.append(-(distribution.exp() * distribution).sum(dim=-1))
                rows += [row] * len(action)
                columns += action
    index = (torch.tensor(rows), torch.tensor(columns))
    empty = torch.zeros(completion_ids.shape, device=completion_ids.device)
    if not logps:  # a backward needs something to flow through
        if completion_ids.numel():
            empty = empty + 0.0 * model(input_ids=completion_ids[:1, :1], use_cache=False).logits.sum()
        return empty, empty.clone()
    return empty.index_put(index, torch.cat(logps)), empty.index_put(index, torch.cat(entropies))


def _path(parent: Any, column: int) -> list[int]:
    """Columns from the prompt to `column`. The first entry says where the path leaves the prompt; -1 is its end."""
    path = [column]
    while path[-1] >= 0:
        path.append(parent[path[-1]])
    return path[::-1]
