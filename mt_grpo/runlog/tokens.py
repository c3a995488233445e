"""Conversations as the token ids that were sampled, for training: alone, and as pairs of which one is preferred."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from mt_grpo.errors import UserError
from mt_grpo.runlog.reader import Run
from mt_grpo.runlog.table import Row, is_copy
from mt_grpo.token_tree import TokenTree
from mt_grpo.trajectory import StopReason

FAILED = (StopReason.ENGINE_ERROR, StopReason.ENV_ERROR)
"""Conversations that say nothing of the policy."""

EQUAL = 1e-9
"""Rewards that differ by less are the same."""


@dataclass(frozen=True)
class Tokens:
    """A root-to-leaf sequence of a conversation's token tree."""

    ids: list[int]
    own: list[int]
    trained: list[int]
    turns: list[int]

    def after(self, turn: int) -> tuple[list[int], list[int], list[int]]:
        """The tokens before a turn, those from it on to the last of the model's own, and which of them are its own."""
        begin, end = self.turns.index(turn), len(self.own) - [*self.own[::-1], 1].index(1)
        return self.ids[:begin], self.ids[begin:end], self.own[begin:end]


def sequences(tree: TokenTree, record: Row, session: str) -> list[Tokens]:
    """The sequences of a conversation in which the model sampled something."""
    masks = {turn["index"]: turn["mask"] for turn in record["turns"] if turn.get("mask") is not None}
    found = []
    for sequence in tree.sequences():
        if min(sequence.tokens, default=0) < 0:
            raise UserError(
                f"{session} has an image or a sound, which has no token ids of its own: export `messages`, or choose "
                "others with `--filter`."
            )
        places = {turn: count() for turn in masks}
        left = [masks[turn][next(places[turn])] if turn in masks else int(turn >= 0) for turn in sequence.turns]
        trained = [a * b for a, b in zip(left, sequence.mask, strict=True)]
        if any(sequence.mask):
            found.append(Tokens(sequence.tokens, left, trained, sequence.turns))
    return found


def pairs(run: Run, rows: Sequence[Row]) -> Iterator[Row]:
    """
    Pairs of a group's conversations: the best with the worst, the second best with the second worst, and so on, while
    their rewards differ. Both have the same tokens up to the first turn in which they differ, where `prompt` ends;
    a pair that was given other contexts before it differed is left out, and so are failed conversations and copies.
    """
    if run.tokenizer is None:
        raise UserError(f"{run.folder} has no tokenizer, so that pairs have no text: export `tokens`.")
    begins = run.tokenizer.encode("").ids  # what TRL puts before every text
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["reward"] is not None and row["stop"] not in FAILED and not is_copy(row):
            groups.setdefault(tuple(row[name] for name in ("mode", "step", "k", "group")), []).append(row)
    none = True
    for members in groups.values():
        if max(each["reward"] for each in members) - min(each["reward"] for each in members) <= EQUAL:
            continue
        found = {row["session"]: sequences(tree, record, row["session"]) for row, record, tree in run.trees(members)}
        ranked = sorted(members, key=lambda row: row["reward"], reverse=True)
        for chosen, rejected in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False):
            at = _difference(found[chosen["session"]], found[rejected["session"]])
            if chosen["reward"] - rejected["reward"] <= EQUAL or at is None:
                continue
            none = False
            yield _pair(run, chosen, rejected, *at, begins)
    if none:
        raise UserError(
            "There is no pair: it takes two conversations of a group that earned different rewards, and that sampled "
            "different tokens after the same context."
        )


def _difference(one: list[Tokens], other: list[Tokens]) -> tuple[int, Tokens, Tokens] | None:
    """The first turn in which two conversations differ, and the sequence of each that has it."""
    for turn in count():
        ways = [[each for each in ways if turn in each.turns] for ways in (one, other)]
        if not all(ways):
            return None
        a, b = (max(found, key=lambda each: each.turns.count(turn)) for found in ways)
        if a.after(turn)[0] != b.after(turn)[0]:
            return None
        if _of_turn(a, turn) != _of_turn(b, turn):
            return (turn, a, b) if any(a.after(turn)[2]) and any(b.after(turn)[2]) else None
    raise AssertionError


def _of_turn(tokens: Tokens, turn: int) -> list[int]:
    return [token for token, of in zip(tokens.ids, tokens.turns, strict=True) if of == turn]


def _pair(run: Run, chosen: Row, rejected: Row, turn: int, a: Tokens, b: Tokens, begins: list[int]) -> Row:
    def text(ids: list[int]) -> str:
        return run.tokenizer.decode(ids, skip_special_tokens=False)  # type: ignore[union-attr]

    prompt, ids, own = a.after(turn)
    _, other_ids, other_own = b.after(turn)
    skipped = len(begins) if prompt[: len(begins)] == begins else 0
    return {
        "prompt": text(prompt[skipped:]),
        "chosen": text(ids),
        "rejected": text(other_ids),
        "prompt_tokens": prompt,
        "chosen_tokens": ids,
        "chosen_mask": own,
        "rejected_tokens": other_ids,
        "rejected_mask": other_own,
        "score_chosen": chosen["reward"],
        "score_rejected": rejected["reward"],
        "chosen_session": chosen["session"],
        "rejected_session": rejected["session"],
        "turn": turn,
        **{name: chosen[name] for name in ("mode", "step")},
        "group": f"{chosen['mode']}-{chosen['step']}-{chosen['k']}-{chosen['group']}",
    }
