"""
A conversation as a trace of OpenTelemetry, in OTLP's JSON encoding with the attributes of OpenInference
(https://github.com/Arize-ai/openinference/blob/main/spec).
"""

from __future__ import annotations

import hashlib
from typing import Any

from mt_grpo.runlog.conversation import words
from mt_grpo.runlog.files import to_json, whole
from mt_grpo.runlog.messages import added, parents
from mt_grpo.runlog.reader import Run
from mt_grpo.runlog.table import is_copy

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
