"""
A conversation as spans of OpenTelemetry, with attributes of OpenInference: for `mt-grpo export`, and sent while a run
goes on where the variables of OpenTelemetry say where to.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mt_grpo.runlog.conversation import added, parents, words
from mt_grpo.runlog.files import to_json
from mt_grpo.runlog.index import is_copy
from mt_grpo.runlog.schema import Row
from mt_grpo.runlog.writer import Batch, record_of, rollout_lines

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_MOST_WAITING = 2**17
"""Spans that wait to be sent: a batch comes at once, and what is more than that is lost."""
_SECONDS = 10_000
"""Milliseconds that the end of a run waits for what is still to be sent."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Span:
    """One span. Its times are nanoseconds since 1970."""

    name: str
    start: int
    end: int
    error: str | None
    attributes: Row

    @classmethod
    def of(cls, name: str, kind: str, start: float, seconds: float, error: str | None, attributes: Row) -> Span:
        known = {name: value for name, value in attributes.items() if value is not None}
        times = int(start * 1e9), int((start + seconds) * 1e9)
        return cls(name, *times, error, {"openinference.span.kind": kind, **known})


def spans_of(row: Row, record: Row, model: str | None) -> list[Span]:
    """
    The spans of a conversation: its own (`AGENT`), one per turn (`LLM`) and per call (`TOOL`). A turn's has the
    messages since the turn that it goes on from, which `graph.node.parent_id` names, so each message stands in a trace
    once.
    """
    names = ("mode", "step", "k", "group", "member", "reward", "rewards", "turn_rewards", "advantages", "shared_turns")
    known = {**{name: row[name] for name in names}, "branch_of": row["branch_of"], "copy": is_copy(row)}
    begin, session = record["start"] or 0.0, {"session.id": row["session"]}
    about = {
        **session,
        "input.value": row["prompt"],
        "output.value": record["answer"],
        "metadata": to_json({**known, "stop_reason": row["stop"], "row": record["row"]}),
    }
    spans = [Span.of("conversation", "AGENT", begin, record["seconds"], record["error"], about)]
    before = parents(record["turns"])
    schemas = map(to_json, record.get("tools") or [])
    tools = {f"llm.tools.{number}.tool.json_schema": schema for number, schema in enumerate(schemas)}
    for turn in record["turns"]:
        index, after = turn["index"], before[turn["index"]]
        start = begin if turn["start"] is None else turn["start"]
        metadata = {
            "advantage": known["advantages"] and known["advantages"][index],
            "reward": turn["reward"],
            "fork_cause": turn.get("fork_cause"),
        }
        about = {
            **session,
            "llm.model_name": model,
            "llm.token_count.prompt": turn["context_length"],
            "llm.token_count.completion": turn["num_tokens"],
            "llm.token_count.total": turn["context_length"] + turn["num_tokens"],
            "metadata": to_json(metadata),
            "graph.node.id": _node(index),
            "graph.node.parent_id": _node(after) if after >= 0 else None,
            **_numbered("llm.input_messages", list(map(_flat, added(record, index)))),
            **_numbered("llm.output_messages", [_flat(turn["message"], turn["tool_calls"])]),
            **(tools if after < 0 else {}),
        }
        spans.append(Span.of(_node(index), "LLM", start, turn["seconds"], turn["error"], about))
        end = begin if turn["start"] is None else turn["start"] + turn["seconds"]
        for call in turn["tool_calls"]:
            about = {
                **session,
                "tool.name": call["name"],
                "tool.parameters": to_json(call["arguments"]),
                "input.value": to_json(call["arguments"]),
                "input.mime_type": "application/json",
                "output.value": call["result"],
            }
            start = end if call["start"] is None else call["start"]
            spans.append(Span.of(call["name"], "TOOL", start, call["seconds"], call["error"], about))
    return spans


def _node(index: int) -> str:
    return f"turn {index + 1}"


def _flat(message: Row, calls: list[Row] | None = None) -> dict[str, str]:
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


class SpanSender:
    """
    Sends the spans of each batch to a collector, by OpenTelemetry's SDK, whose variables say where to and how. What
    cannot be sent is lost, and no run waits for it.
    """

    def __init__(self, provider: TracerProvider, model: str | None) -> None:
        self._provider, self._model = provider, model
        self._tracer = provider.get_tracer("mt_grpo")

    @classmethod
    def wanted(cls, model: str | None) -> SpanSender | None:
        """One where a variable names a collector; the SDK is imported there alone."""
        if not any(map(os.environ.get, _ENDPOINTS)):
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            logger.warning("No spans are sent to the collector (%s): `pip install 'mt-grpo[otel]'`.", error)
            return None
        name = os.environ.get("OTEL_SERVICE_NAME", "mt-grpo")
        provider = TracerProvider(resource=Resource.create({"service.name": name, "openinference.project.name": name}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(), max_queue_size=_MOST_WAITING))
        return cls(provider, model)

    def send(self, batch: Batch, rank: int, advantages: Sequence[Sequence[float]]) -> None:
        """Queues the spans of a batch's conversations, with the advantage of each turn."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        rows = rollout_lines(batch, rank)
        for row, trajectory, values in zip(rows, batch.trajectories, advantages, strict=True):
            record = json.loads(record_of(trajectory, lambda medium: "[medium]"))
            context = None
            row = {"branch_of": None, "shared_turns": 0, **row, "advantages": list(values)}
            for span in spans_of(row, record, self._model):
                sent = self._tracer.start_span(span.name, context, attributes=span.attributes, start_time=span.start)
                if span.error is not None:
                    sent.set_status(Status(StatusCode.ERROR, span.error))
                context = context or set_span_in_context(sent)
                sent.end(span.end)

    def flush(self) -> None:
        """Waits for what is still to be sent, for a while."""
        self._provider.force_flush(_SECONDS)
