"""A scripted endpoint that speaks OpenAI's chat completions."""

import json
import threading
from itertools import count

import pytest

from support.loopback import ScriptedServer

USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": 40}}


def streamed(text, cut=False, reason="stop"):
    """An answer as a stream of parts of five characters, which may break off in its middle."""
    parts = [text[begin : begin + 5] for begin in range(0, len(text), 5)]
    events = [{"choices": [{"index": 0, "delta": {"content": part}}]} for part in parts]
    events += [{"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}, {"choices": [], "usage": USAGE}]
    said = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    return 200, said[: len(said) // 2] if cut else said, {"Content-Type": "text/event-stream"}


def whole(message, reason="stop"):
    """An answer that is not streamed; its message is text, or has calls too."""
    message = {"role": "assistant", "content": message} if isinstance(message, str) else message
    return 200, {"choices": [{"message": message, "finish_reason": reason}], "usage": USAGE}


def refusal(status, message, headers=None, **more):
    return status, {"error": {"message": message, **more}}, headers or {}


@pytest.fixture
def endpoint():
    """Starts an endpoint whose completions come from `complete(number, body)`: text to stream, or an answer."""
    servers = []

    def begin(complete, models=("big",), port=0):
        numbers, lock = count(), threading.Lock()

        def script(method, path, body):
            if path == "/v1/models":
                return 200, {"data": [{"id": name} for name in models]}
            with lock:
                number = next(numbers)
            answer = complete(number, body)
            return streamed(answer) if isinstance(answer, str) else answer

        servers.append(ScriptedServer(script, port))
        return servers[-1]

    yield begin
    for server in servers:
        server.stop()
