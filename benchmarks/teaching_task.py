"""
The twelve decisions of `success_task.py`, for a model that can read a hint; see reports/teaching.md.

The model is warm-started to call with names at random where nothing is said of the calls. Where the last message ends
with the calls of an attempt, it makes the one of them that is about the question at hand: as a large model does that
was shown an answer.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from horizon_task import HABITS, SEARCHES, TOOLS, build_model, question
from success_task import FIND, RIGHT, TURNS, WRONG, Attempt, build_tokenizer, marked, rows
from torch import Tensor
from transformers import PreTrainedTokenizerBase

__all__ = ["Attempt", "hinted_rows", "warm_start"]

HINTS = ("The right answer is", "An attempt that was successful:")
"""How hints begin."""


def hinted_rows(number: int, seed: int, wrong: float = 0.0) -> Dataset:
    """The rows of `success_task`, and as `answer` their right calls; the calls of others in a share of the rows."""
    rng = random.Random(seed)

    def add(row: dict[str, Any]) -> dict[str, Any]:
        misled = rng.random() < wrong
        calls = [
            _habit(rng, asked) if misled else right
            for asked, right in zip(row["questions"], row["right"], strict=True)
        ]
        return {"answer": " ".join(calls)}

    return rows(number, seed).map(add)


def warm_start(folder: Path, steps: int = 2500) -> None:
    """Trains the model and saves it, in minutes of one core."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 50) * (1 - step / steps))
    for step in range(steps):
        plain = 1 if step < 400 else rng.choice((1, 4, 12))
        shown = 1 if step < 400 else rng.randrange(1, TURNS + 1)
        loss = _loss(model, tokenizer, [_attempt(rng, plain, False) for _ in range({1: 96, 4: 24, 12: 8}[plain])])
        loss = loss + _loss(model, tokenizer, [_attempt(rng, shown, True) for _ in range(32)], last=True)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _attempt(rng: random.Random, turns: int, hinted: bool) -> str:
    """An attempt of so many turns; the last of them is made with a hint, if any."""
    asked = [question(rng, FIND) for _ in range(TURNS)]
    skill = rng.random()
    others = [right if rng.random() < skill else _habit(rng, text) for text, right in asked]
    text, result = "", ""
    for turn, (words, right) in enumerate(asked[:turns]):
        shown = hinted and turn == turns - 1
        hint = f" {rng.choice(HINTS)} {' '.join(others)}" if shown else ""
        made = others[turn] if shown else _habit(rng, words)
        text += f"<|im_start|> user {result}{marked(words, turn)}{hint} <|im_end|> <|im_start|> assistant "
        text += f"{made} <|im_end|> "
        result = f"{RIGHT if made == right else WRONG} . "
    return text.strip()


def _habit(rng: random.Random, asked: str) -> str:
    """A call with a name at random."""
    marker = rng.choices(list(HABITS), list(HABITS.values()))[0]
    words = asked.split()
    return f"{TOOLS[rng.random() >= SEARCHES[FIND.asks]]} {words[words.index(marker) + 1]}"


def _loss(model: Any, tokenizer: PreTrainedTokenizerBase, texts: list[str], last: bool = False) -> Tensor:
    """The mean of −log p over the tokens of calls; with `last` over those of each text's last call."""
    rows = [tokenizer.encode(text) for text in texts]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows])
    logps = model(ids[:, :-1]).logits.log_softmax(dim=-1)
    begins = (ids[:, :-3] == torch.tensor(tokenizer.encode("assistant"))).nonzero()
    if last:
        begins = torch.tensor(list(dict(begins.tolist()).items()))
    places = torch.cat([begins + torch.tensor([0, more]) for more in (1, 2, 3)])
    return -logps[places[:, 0], places[:, 1] - 1, ids[places[:, 0], places[:, 1]]].mean()
