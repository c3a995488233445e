"""Python for a model, confined on this machine or run by a server."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from mt_grpo.errors import ConfigError, UserError
from mt_grpo.servers.external import WebClient
from mt_grpo.tools.loading import tool

logger = logging.getLogger(__name__)

SPARE_SECONDS = 10.0  # time for the rest of a run: to start a process, and for its answer to arrive

_PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "TMPDIR")
"""Environment variables for the process that confines the code. The code itself gets none of the trainer's."""

_NOTHING = "The code printed nothing: print what you want to see."

_ALLOWED = """
import os, socket

acts = {
    "it reads other files": lambda: os.listdir("/"),
    "it opens connections": socket.socket,
    "it signals other processes": lambda: os.kill(os.getppid(), 0),
    "it changes modes of files": lambda: os.chmod("main.py", 0o600),
}
for what, act in acts.items():
    try:
        act()
    except OSError:
        continue
    print(what)
print("probed")
"""


class CodeError(RuntimeError):
    """The code failed, or was stopped at a limit. The message holds what it printed before."""


class UnconfinedError(UserError, RuntimeError):
    """Code cannot be confined on this machine. The message is one sentence fit for the user."""


@tool("python")
class PythonSandbox:
    """
    Runs Python code in a confined process on this machine, through sandlock (Landlock and seccomp; Linux 6.7 or
    later). Every call starts afresh: no variable or file outlives it. `docs/python_sandbox.md` lists what is
    contained, and what is not.

    Args:
        time_limit (`float`, *optional*, defaults to `10.0`): Seconds of wall time.
        memory_limit (`int`, *optional*, defaults to `512`): MiB, all processes of a call together.
        disk_limit (`int`, *optional*, defaults to `64`): MiB of files in its temporary folder, the only one it can
            write to. They are held in memory, beside `memory_limit`.
        output_limit (`int`, *optional*, defaults to `20_000`): Bytes kept of each, standard output and standard error.
        readable (`Sequence[str]`, *optional*): Files and folders it may read beside the standard library and the
            packages installed with this Python.

    Raises:
        ConfigError: If a limit is not above 0.
        UnconfinedError: If code cannot be confined on this machine.
    """

    def __init__(
        self,
        time_limit: float = 10.0,
        memory_limit: int = 512,
        disk_limit: int = 64,
        output_limit: int = 20_000,
        readable: Sequence[str] = (),
    ) -> None:
        limits = {"time_limit": time_limit, "memory_limit": memory_limit, "disk_limit": disk_limit}
        for name, value in {**limits, "output_limit": output_limit}.items():
            if value <= 0:
                raise ConfigError(f"`{name}` of the tool `python` is {value}: give more than 0.")
        self._time_limit, self._memory_limit, self._disk_limit = time_limit, memory_limit, disk_limit
        self._request = {
            "time_limit": time_limit,
            "memory_limit": memory_limit << 20,
            "disk_limit": disk_limit << 20,
            "output_limit": output_limit,
            "readable": [os.path.abspath(path) for path in readable],
        }
        _refuse_unconfined()

    @tool(concurrency=os.cpu_count())
    async def python(self, code: str) -> tuple[str, dict[str, Any]]:
        """
        Runs Python code and returns what it prints.

        Args:
            code: The code, a whole program.

        Raises:
            CodeError: If the code raises, or reaches a limit.
        """
        answer = await _ask_host({**self._request, "code": code})
        if "refused" in answer:
            raise UnconfinedError(f"The code was not run, since it could not be confined: {answer['refused']}.")
        if "lost" in answer:
            raise CodeError(f"The code was stopped: the process that confines it failed ({answer['lost']}).")
        reasons = {
            None: None,
            "time": f"The code was stopped: it took longer than {self._time_limit:g} s.",
            "disk": f"The code filled its folder: it may write {self._disk_limit} MiB, in 2,000 files.",
            "killed": f"The code was stopped: it needed more than {self._memory_limit} MiB of memory, or crashed.",
        }
        for name in ("stdout", "stderr"):
            size, kept = answer[f"{name}_bytes"], self._request["output_limit"]
            if size > kept:
                answer[name] += f"\n[{size - kept:,} of {size:,} bytes were cut off.]"
        return _told(answer["stdout"], answer["stderr"], answer["exit_code"], reasons[answer["killed"]])


class RemotePython:
    """
    Runs Python code on a server that speaks Sandbox Fusion's protocol: `POST {"code", "language", "run_timeout",
    "memory_limit_MB"}`, answered with `{"status", "message", "run_result": {"status", "return_code", "stdout",
    "stderr"}}`. That server confines the code.

    Args:
        url (`str`): Address of the endpoint, such as `http://sandbox:8080/run_code`.
        time_limit (`float`, *optional*, defaults to `10.0`): Seconds the code may run.
        memory_limit (`int`, *optional*, defaults to `512`): MiB.
        headers (`Mapping[str, str]`, *optional*): Sent with every request, such as a key.
    """

    def __init__(
        self, url: str, time_limit: float = 10.0, memory_limit: int = 512, headers: Mapping[str, str] | None = None
    ) -> None:
        self._url, self._time_limit = url, time_limit
        self._limits = {"memory_limit_MB": memory_limit}
        self._client = WebClient(headers)

    def python(self, code: str) -> tuple[str, dict[str, Any]]:
        """
        Runs Python code and returns what it prints.

        Args:
            code: The code, a whole program.

        Raises:
            CodeError: If the code raises, or reaches a limit.
            RuntimeError: If the server cannot be reached, or could not run the code.
        """
        return self.run(code)

    def run(self, code: str, language: str = "python", time_limit: float | None = None) -> tuple[str, dict[str, Any]]:
        """
        Runs code in any language of the server's, as `python` does, with a time limit of its own if one is given.
        """
        seconds = self._time_limit if time_limit is None else time_limit
        request = {"code": code, "language": language, **self._limits, "run_timeout": seconds}
        try:
            answered = self._client.ask("POST", self._url, seconds + SPARE_SECONDS, json=request)
            answered.response.raise_for_status()
            answer = answered.json()
            run, status, message = answer["run_result"], answer["status"], answer.get("message")
            compiled = answer.get("compile_result") or {}
        except (httpx.HTTPError, ValueError, TypeError, KeyError) as error:
            raise RuntimeError(f"The sandbox at {self._url} failed: {type(error).__name__}: {error}") from error
        if run is None and status == "Failed" and compiled.get("stderr"):
            raise CodeError(compiled["stderr"].rstrip("\n"))
        if run is None or status == "SandboxError":
            raise RuntimeError(f"The sandbox at {self._url} did not run the code: {message or status}")
        reasons = {"Finished": None, "TimeLimitExceeded": f"The code was stopped: it took longer than {seconds:g} s."}
        reason = reasons.get(run["status"], f"The code was stopped: {run['status']}.")
        return _told(run.get("stdout") or "", run.get("stderr") or "", run.get("return_code"), reason)


@functools.cache
def _refuse_unconfined() -> None:
    """Runs code that tries to leave the sandbox, once in a process."""
    request = {"code": _ALLOWED, "time_limit": 20.0, "memory_limit": 512 << 20, "disk_limit": 1 << 20}
    request |= {"output_limit": 1000, "readable": []}
    with ThreadPoolExecutor(1) as thread:  # an event loop may run in this one
        answer = thread.submit(asyncio.run, _ask_host(request)).result()
    if answer.get("stdout") == "probed\n" and answer["exit_code"] == 0:
        if not answer["writes"]:
            logger.warning(
                "Code of the tool `python` can write no file, since this machine allows no mount namespace: allow "
                "user namespaces, or give the container the capability SYS_ADMIN."
            )
        return
    found = answer.get("refused") or answer.get("lost") or f"{answer['stderr']}{answer['stdout']}" or answer["killed"]
    raise UnconfinedError(
        f"The tool `python` cannot confine code on this machine ({' '.join(found.split())}): install "
        "`mt-grpo[sandbox]` on Linux 6.7 or later, or use `RemotePython`."
    )


async def _ask_host(request: dict[str, Any]) -> dict[str, Any]:
    """Runs code through a process of its own; see `sandbox_host.py`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        str(Path(__file__).with_name("sandbox_host.py")),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
        start_new_session=True,  # a Ctrl-C is the trainer's
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None  # all are pipes
    try:
        async with asyncio.timeout(request["time_limit"] + SPARE_SECONDS):
            process.stdin.write(json.dumps(request).encode() + b"\n")
            line, complaint = await asyncio.gather(process.stdout.read(), process.stderr.read())
    except TimeoutError:
        return {"lost": "no answer came"}
    finally:
        await _end(process)
    if line:
        return json.loads(line)
    reason = " ".join(complaint.decode("utf-8", "replace").split())
    return {"refused": reason} if reason else {"lost": "it was killed"}


async def _end(process: asyncio.subprocess.Process) -> None:
    """Makes the process kill what still runs, and waits for its end, even if the caller is cancelled."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None  # all are pipes
    process.stdin.close()
    killing = asyncio.get_running_loop().call_later(SPARE_SECONDS, process.kill)
    while process.returncode is None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(process.stdout.read(), process.stderr.read(), process.wait())
    killing.cancel()


def _told(stdout: str, stderr: str, exit_code: int | None, reason: str | None) -> tuple[str, dict[str, Any]]:
    """The text for the model and the data for rewards. Raises `CodeError` with the text if the code failed."""
    if not reason and exit_code:
        reason = None if stderr else f"The code ended with exit code {exit_code}."
    text = "\n".join(part.rstrip("\n") for part in (stdout, stderr, reason) if part)
    if reason or exit_code:
        raise CodeError(text)
    return text or _NOTHING, {"stdout": stdout, "stderr": stderr}
