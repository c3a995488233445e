"""The forward that shares nothing: each turn alone, in the context the model had. The oracle of the tree forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def turn_by_turn_logps(
    model: Any,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    loss_mask: Tensor,
    turn_ids: Tensor,
    parents: Tensor | None,
    temperature: float,
    logits_to_keep: bool = False,
) -> tuple[Tensor, Tensor]:
    """
    Log-probabilities and entropies of a TRL batch, one forward for each turn of each row.

    Args:
        model: A causal language model.
        prompt_ids, prompt_mask (`Tensor`): `(B, P)`, padded on the left.
        completion_ids, loss_mask, turn_ids (`Tensor`): `(B, T)`, padded on the right.
        parents (`Tensor`, *optional*): `(B, T)` column of the token each one follows, -1 for the prompt's last; `None`
            where every row is one sequence.
        temperature (`float`): Divides the logits.
        logits_to_keep (`bool`, *optional*, defaults to `False`): Has the model compute no other logits than from the
            turn on, which its forward must know how to.

    Returns:
        Two `(B, T)` float32 tensors, 0 where `loss_mask` is 0.
    """
    rows, columns, logps, entropies = [], [], [], []
    for row in range(len(prompt_ids)):
        prompt = prompt_ids[row][prompt_mask[row].bool()]
        above = range(-1, completion_ids.shape[1] - 1) if parents is None else parents[row].tolist()
        trained = loss_mask[row].bool()
        for turn in turn_ids[row][trained].unique().tolist():
            action = (trained & (turn_ids[row] == turn)).nonzero()[:, 0].tolist()
            path = _path(above, action[-1])
            kept = prompt[: len(prompt) + 1 + path.pop(0)]
            ids = torch.cat([kept, completion_ids[row, path]])
            places = [path.index(column) - 1 - len(path) for column in action]  # from the end
            keep = {"logits_to_keep": -places[0]} if logits_to_keep else {}
            logits = model(input_ids=ids[None], use_cache=False, **keep).logits[0]
            distribution = torch.log_softmax(logits[places].float() / temperature, dim=-1)
            logps.append(distribution.gather(1, completion_ids[row, action][:, None])[:, 0])
            entropies.append(-(distribution.exp() * distribution).sum(dim=-1))
            rows += [row] * len(action)
            columns += action
    index = (torch.tensor(rows), torch.tensor(columns))
    empty = torch.zeros(completion_ids.shape, device=completion_ids.device)
    if not logps:  # a backward needs something to go through all the same
        if completion_ids.numel():
            empty = empty + 0.0 * model(input_ids=completion_ids[:1, :1], use_cache=False).logits.sum()
        return empty, empty.clone()
    return empty.index_put(index, torch.cat(logps)), empty.index_put(index, torch.cat(entropies))


def _path(above: Any, column: int) -> list[int]:
    """Columns from the prompt to `column`; the first entry is where the path leaves the prompt, -1 for its end."""
    path = [column]
    while path[-1] >= 0:
        path.append(above[path[-1]])
    return path[::-1]
