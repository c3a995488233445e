"""
Forms of `mt-grpo export`: conversations as the token ids that were sampled, alone and as pairs of which one is
preferred; and as traces of OpenTelemetry, in OTLP's JSON encoding with the attributes of OpenInference
(https://github.com/Arize-ai/openinference/blob/main/spec).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from mt_grpo.errors import UserError
from mt_grpo.runlog.conversation import added, parents, words
from mt_grpo.runlog.files import to_json, whole
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


INTERNAL, OK, ERROR = 1, 1, 2
"""OTLP's kind of a span, and codes of its status."""


def trace(row: dict[str, Any], record: dict[str, Any], run: Run) -> dict[str, Any]:
    """
    The trace of a conversation: a span of kind `AGENT`, in it one of kind `LLM` per turn and `TOOL` per call. The span
    of a turn has the messages that were added since the turn that it goes on from, which `graph.node.parent_id` names.
    So each message stands in a trace once, and a fork is a node that several go on from.
    """
    spans = _Spans(f"{run.folder.resolve().name}/{row['session']}", record["start"] or 0.0)
    names = ("mode", "step", "k", "group", "member", "reward", "rewards", "turn_rewards", "advantages", "shared_turns")
    known = {**{name: row[name] for name in names}, "branch_of": row["branch_of"], "copy": is_copy(row)}
    agent = spans.add(
        "conversation",
        "AGENT",
        record["start"],
        record["seconds"],
        record["error"],
        {
            "session.id": row["session"],
            "input.value": row["prompt"],
            "output.value": record["answer"],
            "metadata": to_json({**known, "stop_reason": row["stop"], "row": record["row"]}),
        },
    )
    model, before = run.about.get("model"), parents(record["turns"])
    schemas = map(to_json, record.get("tools") or [])
    tools = {f"llm.tools.{number}.tool.json_schema": schema for number, schema in enumerate(schemas)}
    for turn in record["turns"]:
        index, after = turn["index"], before[turn["index"]]
        message = _flat(turn["message"], turn["tool_calls"])
        end = None if turn["start"] is None else turn["start"] + turn["seconds"]
        spans.add(
            _node(index),
            "LLM",
            turn["start"],
            turn["seconds"],
            turn["error"],
            {
                "session.id": row["session"],
                "llm.model_name": model,
                "llm.token_count.prompt": turn["context_length"],
                "llm.token_count.completion": turn["num_tokens"],
                "llm.token_count.total": turn["context_length"] + turn["num_tokens"],
                "metadata": to_json(
                    {
                        "advantage": row["advantages"] and row["advantages"][index],
                        "reward": turn["reward"],
                        "fork_cause": turn.get("fork_cause"),
                    }
                ),
                "graph.node.id": _node(index),
                "graph.node.parent_id": _node(after) if after >= 0 else None,
                **_numbered("llm.input_messages", list(map(_flat, added(record, index)))),
                **_numbered("llm.output_messages", [message]),
                **(tools if after < 0 else {}),
            },
            agent,
        )
        for call in turn["tool_calls"]:
            spans.add(
                call["name"],
                "TOOL",
                call["start"] if call["start"] is not None else end,
                call["seconds"],
                call["error"],
                {
                    "session.id": row["session"],
                    "tool.name": call["name"],
                    "tool.parameters": to_json(call["arguments"]),
                    "input.value": to_json(call["arguments"]),
                    "input.mime_type": "application/json",
                    "output.value": call["result"],
                },
                agent,
            )
    resource = {"attributes": _attributes({"service.name": "mt-grpo", "openinference.project.name": "mt-grpo"})}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {"name": "mt_grpo"}, "spans": spans}]}]}


class _Spans(list[dict[str, Any]]):
    """The spans of one trace."""

    def __init__(self, name: str, start: float) -> None:
        super().__init__()
        self._name, self._start = name, start

    def add(
        self,
        name: str,
        kind: str,
        start: float | None,
        seconds: float,
        error: str | None,
        attributes: dict[str, Any],
        parent: str | None = None,
    ) -> str:
        """Adds a span. Returns its id."""
        start = self._start if start is None else start
        identity = _hash(f"{self._name}/{len(self)}", 8)
        span = {
            "traceId": _hash(self._name, 16),
            "spanId": identity,
            "name": name,
            "kind": INTERNAL,
            "startTimeUnixNano": str(int(start * 1e9)),
            "endTimeUnixNano": str(int((start + seconds) * 1e9)),
            "attributes": _attributes({"openinference.span.kind": kind, **attributes}),
            "status": {"code": OK} if error is None else {"code": ERROR, "message": whole(error)},
        }
        self.append(span if parent is None else {**span, "parentSpanId": parent})
        return identity


def _node(index: int) -> str:
    return f"turn {index + 1}"


def _hash(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


def _flat(message: dict[str, Any], calls: list[dict[str, Any]] | None = None) -> dict[str, str]:
    flat = {"message.role": message["role"], "message.content": words(message)}
    for name in ("tool_call_id", "name"):
        if message.get(name):
            flat[f"message.{name}"] = str(message[name])
    for number, call in enumerate(calls or []):
        prefix = f"message.tool_calls.{number}.tool_call"
        flat[f"{prefix}.function.name"] = call["name"]
        flat[f"{prefix}.function.arguments"] = to_json(call["arguments"])
        if call["id"]:
            flat[f"{prefix}.id"] = call["id"]
    return flat


def _numbered(prefix: str, messages: list[dict[str, str]]) -> dict[str, str]:
    return {
        f"{prefix}.{number}.{key}": value for number, message in enumerate(messages) for key, value in message.items()
    }


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    return {"intValue": str(value)} if isinstance(value, int) else {"stringValue": whole(str(value))}
