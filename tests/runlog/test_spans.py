"""Spans of conversations at a real receiver of OTLP over HTTP."""

import gzip
import json
import logging
import sys

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from support.loopback import Loopback, Reply
from support.runs import REWARDS

from mt_grpo.runlog import Batch
from mt_grpo.runlog.conversation import SpanSender
from mt_grpo.trajectory import StopReason, ToolCall, Trajectory, Turn


@pytest.fixture
def collector(monkeypatch):
    """A receiver of OTLP, which the variable names; returns the spans that it received."""
    received = []

    def receive(request):
        headers = {name.lower(): value for name, value in request.headers.items()}
        assert (request.path, headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
        zipped = headers.get("content-encoding") == "gzip"
        body = gzip.decompress(request.content) if zipped else request.content
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            received.extend(span for scope in resource.scope_spans for span in scope.spans)
        return Reply(200, b"", 0)

    server = Loopback(receive)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
    yield received
    server.stop()


def conversation() -> Trajectory:
    made = Trajectory([{"role": "user", "content": "Capital of Peru?"}], session="s", start=100.0, seconds=3.0)
    call = ToolCall("search", {"query": "Peru"}, result="Lima", start=101.0, seconds=0.5)
    failed = ToolCall("search", {"query": "x"}, error="no route", start=101.5, seconds=0.25)
    turns = [
        Turn(0, {"role": "assistant", "content": "I look."}, [call, failed], start=100.0, seconds=1.0, num_tokens=3),
        Turn(1, {"role": "assistant", "content": "Lima"}, start=102.0, seconds=1.0, num_tokens=1),
    ]
    made.turns, made.answer, made.stop_reason = turns, "Lima", StopReason.ANSWERED
    return made


def test_a_collector_gets_conversations_turns_and_calls(collector):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs mt-grpo[otel]")
    sender = SpanSender.wanted("org/small")
    sender.send(Batch("train", 4, 0, 2, [0, 1], [conversation(), conversation()], REWARDS), 0, [[0.5, -0.5]] * 2)
    sender.flush()
    agents = [span for span in collector if not span.parent_span_id]
    assert [span.name for span in agents] == ["conversation"] * 2 and len({span.trace_id for span in collector}) == 2
    inside = [span for span in collector if span.parent_span_id == agents[0].span_id]
    assert [span.name for span in inside] == ["turn 1", "search", "search", "turn 2"]
    times = [(span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9) for span in inside]
    assert times == [(100, 101), (101, 101.5), (101.5, 101.75), (102, 103)]
    assert [span.status.code for span in inside] == [0, 0, 2, 0] and inside[2].status.message == "no route"
    values = {each.key: each.value for each in inside[0].attributes}
    assert values["openinference.span.kind"].string_value == "LLM"
    assert values["llm.model_name"].string_value == "org/small"
    assert json.loads(values["metadata"].string_value)["advantage"] == 0.5
    assert values["llm.input_messages.0.message.content"].string_value == "Capital of Peru?"


def test_nothing_is_sent_where_nobody_asks(monkeypatch, caplog):
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert SpanSender.wanted("m") is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with caplog.at_level(logging.WARNING):
        assert SpanSender.wanted("m") is None
    assert "pip install 'mt-grpo[otel]'" in caplog.text
