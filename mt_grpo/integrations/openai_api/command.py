"""An agent that is a program: a process for each conversation, in any language."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
from contextlib import suppress
from typing import Any

from mt_grpo.integrations.openai_api.client import AgentClient

KEPT = 1 << 20
"""Bytes at the end of what a program writes that are kept."""
LEAVING = 0.5
"""Seconds that a program may take to end once it is asked to; then it is killed."""


class CommandError(Exception):
    """A program ended with an exit code that tells of a failure."""


class Command:
    """
    A command line. The program finds `OPENAI_BASE_URL` and `OPENAI_API_KEY` in its environment and the row as JSON on
    its standard input. Whatever it starts in its process group ends with it.

    Args:
        line (`str`): As in a shell, though none is started.
    """

    def __init__(self, line: str) -> None:
        self.arguments = shlex.split(line)

    async def __call__(self, row: dict[str, Any], client: AgentClient) -> Any:
        """
        Runs it for one row.

        Returns:
            What the last line of its output says: a JSON number or object, else text; `None` where there is none.

        Raises:
            CommandError: If its exit code is not 0, with the end of what it wrote to standard error.
            OSError: If it cannot be started.
        """
        hosts = ",".join(filter(None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), client.host]))
        variables = {"OPENAI_BASE_URL": client.base_url, "OPENAI_API_KEY": client.api_key}
        transport, process = await asyncio.get_running_loop().subprocess_exec(
            _Process,
            *self.arguments,
            env={**os.environ, **variables, "no_proxy": hosts, "NO_PROXY": hosts},
            start_new_session=True,
        )
        try:
            stdin = transport.get_pipe_transport(0)
            stdin.write(json.dumps(row, default=str).encode())
            stdin.close()
            await process.exited.wait()
            _kill(transport, signal.SIGKILL)  # what it left behind
            await _within(process.closed)
        finally:
            try:
                if not process.exited.is_set():
                    _kill(transport, signal.SIGTERM)
                    await _within(process.exited)
            finally:  # even where this is cancelled once more
                _kill(transport, signal.SIGKILL)
                transport.close()
        if transport.get_returncode() != 0:
            said = process.written[2].decode(errors="replace").strip()[-2000:]
            raise CommandError(f"{self.arguments[0]} ended with exit code {transport.get_returncode()}: {said}")
        return _result(process.written[1].decode(errors="replace"))


class _Process(asyncio.SubprocessProtocol):
    """Keeps the end of what a program writes."""

    def __init__(self) -> None:
        self.exited, self.closed = asyncio.Event(), asyncio.Event()
        self.written = {1: b"", 2: b""}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.written[fd] = (self.written[fd] + data)[-KEPT:]

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set()


async def _within(event: asyncio.Event) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), LEAVING)


def _kill(transport: asyncio.SubprocessTransport, how: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(transport.get_pid(), how)


def _result(output: str) -> Any:
    lines = output.strip().splitlines()
    if not lines:
        return None
    try:
        value = json.loads(lines[-1])
    except (ValueError, RecursionError):
        return lines[-1].strip()
    return value if isinstance(value, (dict, int, float, str)) else lines[-1].strip()
