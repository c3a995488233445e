"""What stands in for a vLLM server that a trainer starts: a process that does nothing, and answers from a script."""

from __future__ import annotations

import sys

from support.loopback import Reply, Request, ScriptedServer
from support.replicas import Replica

IDLE = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
"""A process that only lives."""


class Recorded(ScriptedServer):
    """Keeps the paths that it is asked, with their queries."""

    def __init__(self, script, port: int) -> None:
        self.calls: list[str] = []
        super().__init__(script, port)

    def _answer(self, request: Request) -> Reply | None:
        self.calls.append(request.path)
        return super()._answer(request)


class Sleeper(Replica):
    """A scripted server whose weights are lost in its sleep. It listens at a port and holds the model of a folder."""

    def __init__(self, tokenizer, port: int, folder: str) -> None:
        super().__init__(tokenizer)
        self.http.stop()
        self.folder = folder
        self.http = Recorded(self.answer, port)

    def answer(self, method, path, body):
        status, answer = super().answer(method, path, body)
        if path == "/v1/models":
            answer["data"][0] |= {"id": self.folder, "root": self.folder}
        if path == "/sleep" and "level=2" in self.http.calls[-1]:
            for weight in self.model.parameters():
                weight.data.zero_()
        return status, answer
