"""Scores a plan, over packed trees or in rows: every sequence a padded row, or every turn a forward of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mt_grpo.forward.media import pretrained, row_inputs
from mt_grpo.forward.model import score_trees
from mt_grpo.forward.plan import ForwardPlan, Scores
from mt_grpo.forward.routes import router_loss


def score(model: nn.Module, plan: ForwardPlan) -> Scores:
    """The log-probs of a plan's trained tokens, differentiable."""
    ways: dict[str, Callable[[nn.Module, ForwardPlan], Scores]] = {
        "tree": score_trees,
        "padded": score_rows,
        "turn_by_turn": score_turns,
    }
    return ways[plan.forward](model, plan)


def score_rows(model: nn.Module, plan: ForwardPlan) -> Scores:
    """
    One forward with a row for each root-to-leaf sequence, padded on the right: what follows a token changes nothing
    for a model that reads from left to right. Each token is scored in the first row that has it. Logits are computed
    where a row has a trained token, if the model can choose.
    """
    trees = plan.all_trees
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
    asked: dict[str, Any] = {"output_router_logits": True} if plan.router_loss else {}
    keeps = inspect.signature(pretrained(model).forward).parameters.get("logits_to_keep")
    if keeps is not None and "Tensor" in str(keeps.annotation):  # else logits of every token of every row
        kept, predictor = np.unique(predictor, return_inverse=True)
        asked["logits_to_keep"] = torch.from_numpy(kept).to(device)
    output = model(**row_inputs(model, ids, plan.media), attention_mask=mask, use_cache=False, **asked)
    chosen = torch.from_numpy(predictor).to(output.logits.device)
    logits = output.logits[at.to(output.logits.device), chosen]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / plan.temperature
    if plan.truncation is not None:
        logits = plan.truncation.apply(logits, label)
    balance = router_loss(pretrained(model).config, output.router_logits, mask) if plan.router_loss else None
    return Scores(number, column, turn, *_at_labels(logits, label), balance)


def score_turns(model: nn.Module, plan: ForwardPlan, keep_logits: bool = True) -> Scores:
    """
    One forward for each turn, in the context that the model had, with nothing shared: the oracle of the tree forward.
    Without `keep_logits` the model computes those logits only that are needed.
    """
    device = next(model.parameters()).device
    places: list[np.ndarray] = []
    found: list[tuple[Tensor, Tensor]] = []
    for number, tree in enumerate(plan.all_trees):
        parent = np.arange(-1, len(tree.tokens) - 1) if tree.parent is None else tree.parent
        for turn in np.unique(tree.turns[tree.turns >= 0]):
            left = np.flatnonzero(tree.turns == turn)
            while len(left):  # where the history was rewritten, what answers a turn is on another branch
                path = [int(left[-1])]
                while parent[path[-1]] >= 0:
                    path.append(int(parent[path[-1]]))
                path = path[::-1]
                action, left = left[np.isin(left, path)], left[~np.isin(left, path)]
                before = np.searchsorted(path, action) - 1 - len(path)  # from the end
                keep = {} if keep_logits else {"logits_to_keep": int(-before[0])}
                ids = torch.from_numpy(tree.tokens[path]).to(device)[None]
                inputs = row_inputs(model, ids, plan.media)
                if plan.media:  # without a mask Qwen's Omni models place images as words
                    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
                logits = model(**inputs, use_cache=False, **keep).logits[0][before.tolist()].float() / plan.temperature
                label = torch.from_numpy(tree.tokens[action]).to(logits.device)
                if plan.truncation is not None:
                    logits = plan.truncation.apply(logits, label)
                found.append(_at_labels(logits, label))
                places.append(np.stack([np.full_like(action, number), action, np.full_like(action, turn)]))
    if not found:  # a backward needs something to flow through
        logits = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False).logits
        nothing = logits.float().flatten()[:0]
        found, places = [(nothing, nothing)], [np.empty((3, 0), dtype=np.int64)]
    logps, entropies = (torch.cat(values) for values in zip(*found, strict=True))
    tree_of, column, turn_of = np.concatenate(places, axis=1)
    return Scores(tree_of, column, turn_of, logps, entropies)


def _at_labels(logits: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of labels `(M,)`, and entropies, from logits `(M, vocab)`."""
    distribution = logits.log_softmax(dim=-1)
    entropies = -(distribution.exp() * distribution).sum(dim=-1)
    return distribution.gather(1, label[:, None])[:, 0], entropies
