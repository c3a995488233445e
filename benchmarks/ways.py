"""Ways to compute the log-probs of a multi-turn rollout whose past thinking is stripped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from mt_grpo.forward.attention import TreeLayout
from mt_grpo.forward.interface import packed_row
from mt_grpo.forward.lm_head import chunked_logps
from mt_grpo.forward.model import enable_trees
from mt_grpo.forward.packing import pack
from mt_grpo.token_tree import TokenTree, common_prefix

VOCABULARY = 4096


@dataclass(frozen=True)
class Turn:
    """What the model was given, what of it is new after the previous action, and what it sampled."""

    context: list[int]
    added: list[int]
    action: list[int]


Batch = list[list[Turn]]


def build_batch(
    size: int, turns: int, seed: int, prompt: int = 64, thinking: int = 32, answer: int = 8, result: int = 8
) -> Batch:
    """Conversations of random tokens that share a prompt; a context holds the earlier answers, not their thinking."""
    rng = np.random.default_rng(seed)

    def draw(mean: int) -> list[int]:
        return rng.integers(0, VOCABULARY, rng.integers(mean * 3 // 4, mean * 5 // 4 + 1)).tolist()

    shared, batch = draw(prompt), []
    for _ in range(size):
        context, added, conversation = shared, shared, []
        for _ in range(turns):
            thought, said = draw(thinking), draw(answer)
            conversation.append(Turn(context, added, thought + said))
            added = draw(result)
            context = context + said + added
        batch.append(conversation)
    return batch


def build_model() -> Qwen3ForCausalLM:
    """A random Qwen3 in float32, its weights wide enough for peaked distributions (logits of deviation 3)."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCABULARY,
        max_position_embeddings=32768,
        initializer_range=0.25,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config).eval()
    enable_trees(model)
    return model


# Each way returns the hidden states `(M, hidden)` that predict the action tokens, by conversation, turn and place


def _forward(model: Qwen3ForCausalLM, ids: list[int], **kwargs: Any) -> Tensor:
    kwargs.setdefault("use_cache", False)
    return model.base_model(input_ids=torch.tensor([ids]), **kwargs).last_hidden_state[0]


def turn_by_turn(model: Qwen3ForCausalLM, batch: Batch) -> Tensor:
    turns = (turn for conversation in batch for turn in conversation)
    return torch.cat([_forward(model, t.context + t.action)[len(t.context) - 1 : -1] for t in turns])


def padded(side: str, extra: int = 0) -> Callable[[Qwen3ForCausalLM, Batch], Tensor]:
    """Each turn is a row of one batch, padded on a side to the longest and by `extra` columns more."""

    def method(model: Qwen3ForCausalLM, batch: Batch) -> Tensor:
        turns = [turn for conversation in batch for turn in conversation]
        rows = [torch.tensor(turn.context + turn.action) for turn in turns]
        width = max(map(len, rows)) + extra
        ids, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
        starts = [0 if side == "right" else width - len(row) for row in rows]
        for number, (start, row) in enumerate(zip(starts, rows, strict=True)):
            ids[number, start : start + len(row)] = row
            mask[number, start : start + len(row)] = 1
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        hidden = model.base_model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
        ).last_hidden_state
        pieces = zip(hidden, starts, turns, strict=True)
        return torch.cat([row[start + len(t.context) - 1 :][: len(t.action)] for row, start, t in pieces])

    return method


def kv_cache(model: Qwen3ForCausalLM, batch: Batch) -> Tensor:
    """
    Keys and values of the prefix that a turn shares with the one before are kept; no gradient can go through. The
    stripped answer and what follows it are computed with the next turn.
    """
    states = []
    for conversation in batch:
        cache, cached = DynamicCache(config=model.config), []
        for turn in conversation:
            ids = turn.context + turn.action
            kept = min(common_prefix(cached, ids, 0), len(turn.context) - 1)
            if kept < len(cached):
                cache.crop(kept - len(cached))
            hidden = _forward(model, ids[kept:], past_key_values=cache, use_cache=True)
            states.append(hidden[len(turn.context) - 1 - kept : -1])
            cached = ids
    return torch.cat(states)


def naive_packing(model: Qwen3ForCausalLM, batch: Batch) -> Tensor:
    """One causal row per conversation, in which all turns see all earlier thinking, unlike in sampling."""
    states = []
    for conversation in batch:
        hidden = _forward(model, [token for turn in conversation for token in turn.added + turn.action])
        end = 0
        for turn in conversation:
            begin, end = end + len(turn.added), end + len(turn.added) + len(turn.action)
            states.append(hidden[begin - 1 : end - 1])
    return torch.cat(states)


def tree(kind: str) -> Callable[[Qwen3ForCausalLM, Batch], Tensor]:
    """The packed tree of the whole batch, with attention `kind`."""

    def method(model: Qwen3ForCausalLM, batch: Batch) -> Tensor:
        trees = []
        for conversation in batch:
            trees.append(TokenTree())
            for turn in conversation:
                trees[-1].add_turn(turn.context, turn.action, [0.0] * len(turn.action))
        packed = pack(trees)
        layout, ids = TreeLayout(packed, kind), packed.input_ids.tolist()
        with packed_row(layout):
            hidden = _forward(
                model,
                ids,
                position_ids=torch.from_numpy(packed.position_ids)[None],
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                tree_layout=layout,
            )
        by_turn = np.lexsort((packed.position_ids[packed.predictor], packed.turn, packed.tree))
        return hidden[torch.from_numpy(packed.predictor[by_turn])]

    return method


METHODS: dict[str, Callable[[Qwen3ForCausalLM, Batch], Tensor]] = {
    "turn by turn": turn_by_turn,
    "padded right": padded("right"),
    "padded left": padded("left"),
    "padded left + 37": padded("left", 37),
    "KV cache": kv_cache,
    "tree, dense": tree("dense"),
    "tree, segment": tree("segment"),
    "tree, flex": tree("flex"),
    "naive packing": naive_packing,
}


def labels_of(batch: Batch) -> Tensor:
    return torch.tensor([token for conversation in batch for turn in conversation for token in turn.action])


def run(model: Qwen3ForCausalLM, name: str, batch: Batch) -> tuple[Tensor, Tensor]:
    """Hidden states, and the log-probs of the sampled tokens. The head is the same for all methods."""
    hidden = METHODS[name](model, batch)
    return hidden, chunked_logps(hidden, model.lm_head.weight, None, labels_of(batch))[0]
