"""
A conversation as an OpenTelemetry trace with attributes of the OpenInference semantic conventions
(https://github.com/Arize-ai/openinference/blob/main/spec), in OTLP's JSON encoding.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from mt_grpo.runlog.conversation import words
from mt_grpo.runlog.jsonl import to_json, whole

if TYPE_CHECKING:
    from mt_grpo.runlog.reader import Run

INTERNAL, OK, ERROR = 1, 1, 2
"""OTLP's kind of a span, and codes of its status."""


def trace(row: dict[str, Any], record: dict[str, Any], run: Run) -> dict[str, Any]:
    """
    The trace of a conversation: a span of kind `AGENT`, in it one of kind `LLM` per turn and `TOOL` per call.

    Args:
        row (`dict`): Its row of the index.
        record (`dict`): Its `record`.
        run (`Run`): Its run.

    Returns:
        `dict`: OTLP's `TracesData`; a trace's id depends on the run's folder name and the session alone.
    """
    spans = _Spans(f"{run.folder.resolve().name}/{row['session']}", record["start"] or 0.0)
    known = {name: row[name] for name in ("mode", "step", "k", "group", "member", "reward", "rewards", "turn_rewards")}
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
            "metadata": to_json(
                {**known, "stop_reason": row["stop"], "advantages": row["advantages"], "row": record["row"]}
            ),
        },
    )
    model = run.about.get("model")
    past = [_flat(message) for message in record["prompt"]]
    for turn in record["turns"]:
        said = _flat(turn["message"], turn["tool_calls"])
        end = None if turn["start"] is None else turn["start"] + turn["seconds"]
        spans.add(
            f"turn {turn['index'] + 1}",
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
                    {"advantage": row["advantages"] and row["advantages"][turn["index"]], "reward": turn["reward"]}
                ),
                **_numbered("llm.input_messages", past),
                **_numbered("llm.output_messages", [said]),
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
        past += [said, *map(_flat, turn["replies"])]
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


def _hash(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


def _flat(message: dict[str, Any], calls: list[dict[str, Any]] | None = None) -> dict[str, str]:
    flat = {"message.role": message["role"], "message.content": words(message)}
    if message.get("tool_call_id"):
        flat["message.tool_call_id"] = message["tool_call_id"]
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
