"""The shell of a container that the model works in."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

from mt_grpo.errors import describe_error
from mt_grpo.tools import tool


class _ExecResult(Protocol):
    """What a command in a container came to."""

    stdout: str | None
    stderr: str | None
    return_code: int


Execute = Callable[[str, float], Awaitable[_ExecResult]]
"""Runs a command in the container within so many seconds, as Harbor's environments do."""


@runtime_checkable
class Restartable(Protocol):
    """A container that can be begun again."""

    async def begin_again(self) -> None:
        """Ends all that runs in the container and keeps its files; raises where not the agent has ended it."""


class ShellError(Exception):
    """The container does not run commands any more."""


SHOWN = 16_000
"""Most bytes of a command's output that the model is shown: half of them from its beginning, half from its end."""
GRACE = 15.0  # seconds beyond a command's own in which its container has to answer
MARK = "mt-grpo-shell"  # begins the line with what a command came to; runtimes write messages of their own before it
TIMED_OUT = 124  # the exit code of a command that took too long, as `timeout` has it
KILLED = 137  # the exit code of a command that ended its own shell
_SPOILT = "The shell runs no commands any more, also after it was begun again."

SCRIPT = r"""
set -o pipefail
for d in ${TMPDIR:-/tmp}/.shell /dev/shm/.shell; do
    { mkdir -p $d && rm -f $d/{head,tail,size,busy,pipe} && mkfifo $d/pipe &&
      printf %s COMMAND | base64 -d > $d/command && cat > $d/inner; } 2> /dev/null <<'INNER' && break
__shell=${0%/*}
[ -f $__shell/cwd ] && cd "$(cat $__shell/cwd)" 2> /dev/null && unset OLDPWD
[ -f $__shell/state ] && . $__shell/state 2> /dev/null
trap '__code=$?; pwd > $__shell/cwd; { declare -p; declare -f; alias; } > $__shell/state 2> /dev/null
      [ -z "$(jobs -p)" ] || : > $__shell/busy; exit $__code' EXIT
shopt -s expand_aliases
. $__shell/command
INNER
    d=
done
if [ -z "$d" ]; then
    printf '\n%s:1::%s:\n' MARK "$(echo 'The shell can write neither to /tmp nor to /dev/shm.' | base64 -w 0)"; exit
fi
{ dd bs=1 count=HALF of=$d/head; tee >(wc -c > $d/size) | tail -c HALF > $d/tail
  for i in $(seq 200); do [ -s $d/size ] && break; sleep .01; done; } < $d/pipe > /dev/null 2>&1 &
reader=$!
timeout -k 2 SECONDS bash $d/inner < /dev/null > $d/pipe 2>&1; code=$?
[ -e $d/busy ] && patience=4 || patience=40
for i in $(seq $patience); do kill -0 $reader 2> /dev/null || break; sleep .05; done
printf '\n%s:%s:%s:%s:%s\n' MARK $code "$(head -c 20 $d/size 2> /dev/null)" \
    "$(head -c HALF $d/head | base64 -w 0)" "$(head -c HALF $d/tail | base64 -w 0)"
"""
"""
A command's frame: the shell's state before and after it, its time, and its output through a pipe that keeps both ends
(`dd` writes each byte at once; bash alone does not wait for `wc`). What it leaves in the background goes on, and may
hold the pipe open. Its files are in memory where the disk has no room for them: half of a command is never run.
"""


class Shell:
    """
    A shell that remembers its directory, variables, functions and background processes from call to call. One without
    `execute` is only described.

    A command may end the shell that runs it, or leave nothing of it to run another. The container is then begun again
    and, if it answers, the conversation goes on. Where it does not, `spoilt` is true if it ran commands before: that
    is the agent's doing. `failure` says why else its container runs none: that is the machine's.
    """

    def __init__(
        self,
        execute: Execute | None = None,
        seconds: float = 60.0,
        begin_again: Callable[[], Awaitable[None]] | None = None,
        worked: bool = False,
    ) -> None:
        self._execute, self._seconds, self._begin_again, self.worked = execute, seconds, begin_again, worked
        self.failure: str | None = None
        self.spoilt = False
        self._one_at_a_time = asyncio.Lock()

    async def bash(self, command: str) -> tuple[str, dict[str, Any]]:
        """
        Runs a command in the shell. The directory, variables and background processes stay from call to call.

        Args:
            command: The command, of one line or several.
        """
        async with self._one_at_a_time:  # calls of one turn run in their order
            return await self._run(command)

    async def _run(self, command: str) -> tuple[str, dict[str, Any]]:
        begun = time.monotonic()
        if self.spoilt or self.failure is not None:  # another call of the same turn
            raise ShellError(self.failure or _SPOILT)
        if not self.worked:  # whatever comes after the agent's first command may be its doing
            with suppress(ShellError):
                await self._framed(":", GRACE)
        try:
            output, exit_code = await self._framed(command, self._seconds)
        except ShellError as error:
            await self._recover(str(error))
            output, exit_code = "[The command ended the shell. It was begun again.]", KILLED
        seconds = time.monotonic() - begun
        text = output.rstrip("\n")
        if exit_code == TIMED_OUT:
            text += f"\n[The command was ended after {self._seconds:g} s.]"
        elif exit_code != 0:
            text += f"\n[exit code {exit_code}]"
        data = {"exit_code": exit_code, "seconds": round(seconds, 3), "bytes": len(output)}
        return text.strip("\n") or "[no output]", data

    async def _framed(self, command: str, seconds: float) -> tuple[str, int]:
        """The output and the exit code of a command; `ShellError` where the container says neither."""
        assert self._execute is not None
        script = SCRIPT.replace("HALF", str(SHOWN // 2)).replace("SECONDS", f"{seconds:g}")
        script = script.replace("MARK", MARK).replace("COMMAND", base64.b64encode(command.encode()).decode())
        said = ""
        try:
            said = (await self._execute(script, seconds + GRACE)).stdout or ""
            code, size, head, tail = said.rpartition(f"\n{MARK}:")[2].strip().split(":")
            output, exit_code = _joined(base64.b64decode(head), base64.b64decode(tail), int(size or 0)), int(code)
        except Exception as error:  # whatever the runtime raises, or says in place of the last line
            raise ShellError(said.strip()[-500:] or describe_error(error)) from error
        self.worked = True
        return output, exit_code

    async def _recover(self, why: str) -> None:
        """Begins the container again after a command that it did not answer; raises `ShellError` if that fails."""
        try:
            if self._begin_again is not None:
                await self._begin_again()
        except Exception as error:  # whatever the runtime raises
            self.failure = f"The container runs no commands any more: {why}: {describe_error(error)}"
            raise ShellError(self.failure) from error
        try:
            await self._framed(":", GRACE)
        except ShellError as error:
            if self._begin_again is None or not self.worked:
                self.failure = f"The container runs no commands any more: {why}"
                raise ShellError(self.failure) from error
            self.spoilt = True
            raise ShellError(_SPOILT) from error

    @tool(ends_episode=True)
    async def submit(self) -> str:
        """Says that the task is done. It is then checked, and nothing more can be done."""
        return "submitted"


def _joined(head: bytes, tail: bytes, rest: int) -> str:
    """The output of a command: what was kept from both ends, and how much between them is left out."""
    left_out = rest - len(tail)
    middle = f"\n[{left_out:,} bytes left out]\n" if left_out > 0 else ""
    return head.decode(errors="replace") + middle + tail.decode(errors="replace")
