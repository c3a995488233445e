"""Each root-to-leaf sequence a row of its own, padded on the right: for models that cannot run over packed trees."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mt_grpo.forward.lm_head import Truncation
from mt_grpo.forward.media import Media, pretrained, row_inputs
from mt_grpo.forward.packing import FlatTree
from mt_grpo.forward.routes import router_loss as loss_of_routers


@dataclass(frozen=True, eq=False)
class RowScores:
    """Scores of the `M` trained tokens of trees. Each is scored in the first sequence that has it."""

    tree: np.ndarray
    column: np.ndarray
    turn: np.ndarray
    logps: Tensor
    entropies: Tensor
    router_loss: Tensor | None = None


def score_rows(
    model: nn.Module,
    trees: Sequence[FlatTree],
    temperature: float = 1.0,
    truncation: Truncation | None = None,
    router_loss: bool = False,
    images: Media | None = None,
) -> RowScores:
    """
    One forward over all sequences of some trees. What follows a token changes nothing for a model that reads from left
    to right, so padding on the right needs no position of its own. Logits are computed where a row has a trained
    token, if the model can choose.
    """
    paths = [(number, path) for number, tree in enumerate(trees) for path in tree.paths()]
    device = next(model.parameters()).device
    rows = [torch.from_numpy(trees[number].tokens[path]) for number, path in paths]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
    lengths = torch.tensor([len(path) for _, path in paths])
    mask = (torch.arange(ids.size(1)) < lengths[:, None]).long().to(device)
    seen = [np.zeros(len(tree.tokens), dtype=bool) for tree in trees]
    places: list[np.ndarray] = []
    for row, (number, path) in enumerate(paths):
        tree = trees[number]
        depth = np.flatnonzero((tree.turns[path] >= 0) & ~seen[number][path])
        seen[number][path] = True
        column, same = path[depth], np.ones_like(depth)
        places.append(np.stack([row * same, depth, number * same, column, tree.turns[column]]))
    row, depth, number, column, turn = np.concatenate(places, axis=1)
    at = torch.from_numpy(row).to(device)
    label = ids[at, torch.from_numpy(depth).to(device)]
    predictor = depth - 1 - ids.size(1)  # from the end, since an adapter may put tokens before every row
    asked: dict[str, Any] = {"output_router_logits": True} if router_loss else {}
    keeps = inspect.signature(pretrained(model).forward).parameters.get("logits_to_keep")
    if keeps is not None and "Tensor" in str(keeps.annotation):  # else logits of every token of every row
        kept, predictor = np.unique(predictor, return_inverse=True)
        asked["logits_to_keep"] = torch.from_numpy(kept).to(device)
    output = model(**row_inputs(model, ids, images or {}), attention_mask=mask, use_cache=False, **asked)
    chosen = torch.from_numpy(predictor).to(output.logits.device)
    logits = output.logits[at.to(output.logits.device), chosen]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if truncation is not None:
        logits = truncation.apply(logits, label)
    distribution = logits.log_softmax(dim=-1)
    entropies = -(distribution.exp() * distribution).sum(dim=-1)
    logps = distribution.gather(1, label[:, None])[:, 0]
    balance = loss_of_routers(pretrained(model).config, output.router_logits, mask) if router_loss else None
    return RowScores(number, column, turn, logps, entropies, balance)
