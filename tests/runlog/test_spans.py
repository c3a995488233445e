"""Spans of conversations at a real receiver of OTLP over HTTP."""

from __future__ import annotations

import gzip
import json
import logging
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from support.runs import REWARDS, write_conversations

from mt_grpo.runlog import Batch, open_run
from mt_grpo.runlog.conversation import SpanSender, spans_of
from mt_grpo.trajectory import StopReason, ToolCall, Trajectory, Turn


class _Receiver(BaseHTTPRequestHandler):
    received: list[ExportTraceServiceRequest] = []

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        self.received.append(ExportTraceServiceRequest.FromString(body))
        assert self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
        self.send_response(200)
        self.end_headers()

    def log_message(self, *words):
        pass


@pytest.fixture
def collector(monkeypatch):
    """A receiver of OTLP, which the variable names; returns what it received."""
    _Receiver.received = []
    with ThreadingHTTPServer(("127.0.0.1", 0), _Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield lambda: [
            span
            for request in _Receiver.received
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        server.shutdown()


def conversation(number: int) -> Trajectory:
    made = Trajectory(
        [{"role": "user", "content": "Capital of Peru?"}], session=f"s-{number}", start=100.0, seconds=3.0
    )
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
    sender.send(Batch("train", 4, 0, 2, [0, 1], [conversation(0), conversation(1)], REWARDS), 0, [[0.5, -0.5]] * 2)
    sender.flush()
    spans = collector()
    agents = [span for span in spans if not span.parent_span_id]
    assert [span.name for span in agents] == ["conversation"] * 2 and len({span.trace_id for span in spans}) == 2
    inside = [span for span in spans if span.parent_span_id == agents[0].span_id]
    assert [span.name for span in inside] == ["turn 1", "search", "search", "turn 2"]
    times = [(span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9) for span in inside]
    assert times == [(100, 101), (101, 101.5), (101.5, 101.75), (102, 103)]
    assert [span.status.code for span in inside] == [0, 0, 2, 0] and inside[2].status.message == "no route"
    values = {each.key: each.value for each in inside[0].attributes}
    assert values["openinference.span.kind"].string_value == "LLM"
    assert values["llm.model_name"].string_value == "org/small"
    assert json.loads(values["metadata"].string_value)["advantage"] == 0.5
    assert values["llm.input_messages.0.message.content"].string_value == "Capital of Peru?"


def test_sent_spans_are_those_of_an_export(tmp_path):
    run = open_run(write_conversations(tmp_path / "run", [conversation(0)]))
    ((row, record),) = run.records(run.rows)
    spans = spans_of(row, record, None)
    assert [span.name for span in spans] == ["conversation", "turn 1", "search", "search", "turn 2"]
    assert all(value is not None for span in spans for value in span.attributes.values())


def test_nothing_is_sent_where_nobody_asks(monkeypatch, caplog):
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert SpanSender.wanted("m") is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with caplog.at_level(logging.WARNING):
        assert SpanSender.wanted("m") is None
    assert "pip install 'mt-grpo[otel]'" in caplog.text
