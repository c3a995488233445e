"""Tasks without containers: commands in a sandbox of `bwrap`'s, over the programs of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from mt_grpo.errors import ConfigError
from mt_grpo.integrations.harbor.containers import (
    PROCESSES,
    SHOWN_LOG,
    TaskError,
    Verified,
    is_gone,
    list_changed,
    owner,
    read_task,
)
from mt_grpo.integrations.harbor.shell import GRACE

_USER = 65534  # what a sandbox runs as where the trainer is root, for whom the limit of processes would not hold
_PREFIX = "mt-grpo-bwrap-"
_MACHINE = ("usr", "bin", "sbin", "lib", "lib64", "etc", "proc", "dev", "sys", "logs", "tests", "var", "run")
"""Folders that are this machine's, or the verifier's; a task's files go elsewhere."""
_SEEN_OF_ETC = ("alternatives", "ld.so.cache", "passwd", "group", "localtime")
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}
_UNMET = ("steps", "verifier.env", "verifier.environment", "environment.env", "environment.mcp_servers")
"""What a task's `task.toml` may ask of Harbor's containers alone."""
_LOOP = "while read -r -d '' script; do printf %s \"$script\" | bash; printf '\\0'; done"
"""The first process of a sandbox, which its commands cannot end: it runs a script, and says when it is over."""


@dataclass(frozen=True)
class _Machine:
    """What a task asks for: where its files go, its working directory, variables, and limits."""

    copies: tuple[tuple[Path, str], ...]
    workdir: str
    variables: dict[str, str]
    memory_mb: int
    storage_mb: int
    verifier_seconds: float

    def folders(self) -> set[str]:
        """The folders of the sandbox's root in which its commands may write."""
        paths = (self.workdir, "/tmp", "/root", *(target for _, target in self.copies))
        return {path.split("/")[1] for path in paths} - {""}


def check_usable() -> None:
    """Refuses a machine on which no sandbox can be made; removes the folders that killed runs left."""
    fault: str | None = "needs `bwrap`: install the package bubblewrap, 0.8 or later."
    if shutil.which("bwrap") is not None:
        with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder:
            probe = [*_sandbox(Path(folder), set(), "/"), "true"]
            tried = subprocess.run(probe, capture_output=True, text=True, env={})
        fault = f"cannot be used on this machine: {tried.stderr.strip()}" if tried.returncode else None
    if fault:
        raise ConfigError(f"`sandbox: bubblewrap` {fault}")
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/owner"):
        with contextlib.suppress(OSError, ValueError):  # another process of the run removes it too
            if left.is_file() and not left.is_symlink() and is_gone(left.read_text()):
                _remove(left.parent)


def read_machine(task: Path) -> _Machine:
    """Reads what a task needs, and refuses what a sandbox without an image cannot have."""
    config = read_task(task)
    limits, verifier = config.get("environment", {}), config.get("verifier", {})
    for name in _UNMET:
        section, _, key = name.partition(".")
        if config.get(section, {}).get(key) if key else config.get(section):
            raise _unmet(task, f"`{name}`")
    if composed := list(task.glob("environment/*compose.y*ml")):
        raise _unmet(task, f"`environment/{composed[0].name}`")
    for name in ("environment/Dockerfile", "tests/test.sh"):
        if not (task / name).is_file():
            raise ConfigError(f"The task {task} has no file {name}: write it, or take the task out.")
    workdir = "/"
    copies: list[tuple[Path, str]] = []
    variables: dict[str, str] = {}
    for instruction, words in _instructions(task / "environment" / "Dockerfile"):
        if instruction in ("WORKDIR", "ENV", "COPY") and any("$" in word for word in words):
            raise _unmet(task, f"`{instruction} {shlex.join(words)[:60]}`, which names a variable")
        if instruction == "WORKDIR" and words:
            workdir = _absolute(workdir, words[0])
        elif instruction == "ENV" and words and all("=" in word for word in words):
            variables.update({name: value for name, _, value in (word.partition("=") for word in words)})
        elif instruction == "COPY" and len(words) > 1 and not words[0].startswith("--"):
            many = len(words) > 2 or words[-1].endswith("/")
            for word in words[:-1]:
                source = (task / "environment" / word).resolve()
                if not source.is_relative_to(task.resolve() / "environment") or not source.exists():
                    raise _unmet(task, f"`COPY {word}`, which names no file in its `environment`")
                target = _absolute(workdir, words[-1])
                copies.append((source, _absolute(target, source.name) if many and source.is_file() else target))
        elif instruction not in ("FROM", "CMD", "LABEL"):
            raise _unmet(task, f"`{f'{instruction} {shlex.join(words)}'.strip()[:70]}` in its Dockerfile")
    memory, storage = int(limits.get("memory_mb") or 2048), int(limits.get("storage_mb") or 10240)
    seconds = float(verifier.get("timeout_sec", 600.0))
    machine = _Machine(tuple(copies), workdir, variables, memory, storage, seconds)
    owned = machine.folders().intersection(_MACHINE) | {"" for copy in copies if _is_in_root(*copy)}
    if owned:
        raise _unmet(task, f"files in /{min(owned)}, which is this machine's")
    return machine


def _is_in_root(source: Path, target: str) -> bool:
    """Whether a copy adds to `/` itself; a file that is copied to `/srv` goes into that folder, as far as is known."""
    path = Path(target)
    return (
        target == "/"
        or str(path.parent) == "/"
        and source.is_file()
        and (path.name == source.name or path.suffix != "")
    )


def _unmet(task: Path, what: str) -> ConfigError:
    return ConfigError(
        f"The task {task.name} needs {what}, and `sandbox: bubblewrap` builds no images: it takes FROM, of which "
        "nothing is used, WORKDIR, COPY of files beside the Dockerfile, and ENV. Use `sandbox: podman` or `docker`."
    )


def _instructions(dockerfile: Path) -> list[tuple[str, list[str]]]:
    """The instructions of a Dockerfile, each with its words."""
    found = []
    try:
        lines = [line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#")]
        for line in "\n".join(lines).replace("\\\n", " ").splitlines():
            if words := line.split(None, 1):
                name = words[0].upper()
                found.append((name, shlex.split(" ".join(words[1:])) if name in ("COPY", "ENV") else words[1:]))
    except ValueError as error:  # no text, or a quotation without an end
        raise ConfigError(f"{dockerfile} cannot be read ({error}): mend it, or take the task out.") from error
    return found


def _absolute(workdir: str, path: str) -> str:
    return os.path.normpath(os.path.join(workdir, path.strip()))


def _sandbox(folder: Path, writable: set[str], workdir: str, *more: str) -> list[str]:
    """The command that begins a sandbox: this machine's programs, and the folders of a conversation."""
    command = ["setpriv", f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups"] if os.geteuid() == 0 else []
    if command:
        os.chown(folder, _USER, _USER)
    command += "bwrap --unshare-all --unshare-user --uid 0 --gid 0 --disable-userns --die-with-parent".split()
    command += "--new-session --hostname sandbox --proc /proc --dev /dev --ro-bind /usr /usr".split()
    command += "--size 67108864 --tmpfs /dev/shm --remount-ro /dev".split()
    for name in ("bin", "sbin", "lib", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            command += ["--symlink", os.readlink(path), str(path)]
        elif path.exists():
            command += ["--ro-bind", str(path), str(path)]
    for name in _SEEN_OF_ETC:
        command += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for name in sorted(writable):
        command += ["--bind", str(folder / "root" / name), f"/{name}"]
    return [*command, *more, "--remount-ro", "/", "--chdir", workdir]


class Sandbox:
    """The sandbox of one conversation: a folder of its own, and processes that see no others and no network."""

    def __init__(self, task: Path) -> None:
        self._task, self._machine = task, read_machine(task)
        self._process: asyncio.subprocess.Process | None = None
        self.since = 0.0  # when the agent began
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        (self._folder / "owner").write_text(owner())

    def fill(self) -> None:
        """Puts the task's files into it."""
        for name in self._machine.folders():
            (self._folder / "root" / name).mkdir(parents=True, exist_ok=True)
        (self._folder / "root" / self._machine.workdir.lstrip("/")).mkdir(parents=True, exist_ok=True)
        root = (self._folder / "root").resolve()
        for source, target in self._machine.copies:
            place = root / target.lstrip("/")
            if not place.resolve().is_relative_to(root):  # through a link that was copied before
                raise TaskError(f"The task {self._task} copies files to {target}, through a link")
            place.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, place, symlinks=True, dirs_exist_ok=True)
            else:
                shutil.copy2(source, place)
        _give(self._folder / "root")
        self.since = time.time()

    async def fork(self) -> tuple[Sandbox, int]:
        """Another with a copy of its files, and the number of processes that it has no copy of."""
        twin, running = Sandbox(self._task), self._background()
        twin.since = self.since
        source, target = self._folder / "root", twin._folder / "root"
        try:
            _send(running, signal.SIGSTOP)  # files stand still while they are copied
            target.mkdir()
            _give(twin._folder)
            # in a sandbox, where links lead nowhere: one that was not stopped may put them in place of folders
            binds = "--ro-bind", str(source), "/from", "--bind", str(target), "/to"
            sandbox = _sandbox(self._folder, set(), "/", "--cap-add", "CAP_DAC_OVERRIDE", *binds)
            copying = await asyncio.create_subprocess_exec(
                *(*sandbox, "cp", "--archive", "--reflink=auto", "/from/.", "/to"),
                stderr=asyncio.subprocess.PIPE,
                env=_ENVIRONMENT,
            )
            try:
                _, said = await copying.communicate()
            finally:
                if copying.returncode is None:
                    await _end(copying)
            if copying.returncode:
                raise TaskError(f"The sandbox cannot be copied: {said.decode(errors='replace').strip()[-500:]}")
        except BaseException:
            await twin.drop()
            raise
        finally:
            _send(running, signal.SIGCONT)
        return twin, len(running)

    def _background(self) -> list[psutil.Process]:
        """What commands left running."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._process is not None:
                firsts = psutil.Process(self._process.pid).children()
                return [below for first in firsts for below in first.children(recursive=True)]
        return []

    async def exec(self, script: str, timeout_sec: float) -> SimpleNamespace:
        """Runs a script beside what earlier ones left running; what it printed is `stdout`."""
        if self._process is None:
            self._process = await self._begin(self._machine.workdir, ("--as-pid-1",), _LOOP)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(script.encode() + b"\0")
        await self._process.stdin.drain()
        try:
            said = await asyncio.wait_for(self._process.stdout.readuntil(b"\0"), timeout_sec)
        except asyncio.IncompleteReadError as error:  # its last words
            said = error.partial
        return SimpleNamespace(stdout=said.decode(errors="replace").rstrip("\0"))

    async def begin_again(self) -> None:
        """Ends all that runs in the sandbox; the next script begins another over the same folder."""
        process, self._process = self._process, None
        if process is not None:
            if process.stdout is not None and process.stdout.at_eof():  # nothing in it can kill its first process
                killed = await process.wait() in (-signal.SIGKILL, 128 + signal.SIGKILL)
                if killed:
                    raise TaskError("The sandbox was killed from outside of it")
            await _end(process)

    async def _begin(
        self, workdir: str, options: tuple[str, ...], script: str, **variables: str
    ) -> asyncio.subprocess.Process:
        machine = self._machine
        # in the sandbox alone: they are a stranger's
        options += tuple(word for pair in (machine.variables | variables).items() for word in ("--setenv", *pair))
        memory, storage = machine.memory_mb * 1024, machine.storage_mb * 1024
        limits = f'ulimit -u {PROCESSES} -d {memory} -f {storage} -c 0; exec "$@"'
        return await asyncio.create_subprocess_exec(
            *_sandbox(self._folder, machine.folders(), workdir, *options),
            *("bash", "-c", limits, "bash", "bash", "-c", script),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=_ENVIRONMENT,
            limit=1 << 20,
        )

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await _end(process)

    async def talk_in(self, talk: Callable[[Any], Awaitable[None]]) -> Verified:
        """As `BegunTrial.talk_in`, in a sandbox."""
        try:
            await talk(self)
            await self.close()
            changed = await self._changed()
            return Verified(*await self.verify(), files_changed=changed)
        finally:
            await self.drop()

    async def _changed(self) -> str:
        """The files that were written in it, a line each."""
        folders = sorted(f"/{name}" for name in self._machine.folders())
        process = await self._begin("/", (), list_changed(folders, self.since))
        assert process.stdout is not None
        said = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE):
                said = await process.stdout.read()
        await _end(process)
        return said.decode(errors="replace")

    async def drop(self) -> None:
        await self.close()
        _remove(self._folder)

    async def verify(self) -> tuple[dict[str, float], str]:
        """
        Runs the tests in a sandbox of their own over the same folders. Returns the verifier's numbers by name and what
        it printed; raises `TaskError` if there are none, or they take too long.
        """
        with _folder(self._folder) as place:
            results, tests = place / "verifier", place / "tests"
            results.mkdir()
            shutil.copytree(self._task / "tests", tests, symlinks=True)
            if (tests / "test.sh").is_symlink():
                raise TaskError(f"The task {self._task} has a link in place of tests/test.sh")
            (tests / "test.sh").chmod(0o755)
            _give(place)
            binds = ("--bind", str(tests), "/tests", "--bind", str(results), "/logs/verifier")
            # what the agent left in its home or in place of its folder says nothing of how the tests run
            script = f"cd {shlex.quote(self._machine.workdir)} 2> /dev/null; /tests/test.sh < /dev/null"
            process = await self._begin("/", binds, script, HOME="/logs", PYTHONNOUSERSITE="1")
            assert process.stdout is not None
            log = b""
            try:
                async with asyncio.timeout(self._machine.verifier_seconds):
                    while said := await process.stdout.read(1 << 16):
                        log = (log + said)[-SHOWN_LOG:]
            except TimeoutError:
                seconds = f"{self._machine.verifier_seconds:g} s"
                raise TaskError(
                    f"The task {self._task} was not verified: its tests took more than {seconds}"
                ) from None
            finally:
                await _end(process)
            text = log.decode(errors="replace")
            try:
                return _rewards(results), text
            except (OSError, ValueError) as error:
                why = f"{error}: {text.strip()[-500:] or 'its tests printed nothing'}"
                raise TaskError(f"The task {self._task} was not verified: {why}") from error


def _rewards(results: Path) -> dict[str, float]:
    """What the tests wrote: several numbers by name, or one."""
    for name in ("reward.json", "reward.txt"):
        path = results / name
        if path.is_file() and not path.is_symlink():
            try:
                with path.open("rb") as file:
                    found = json.loads(file.read(1 << 16))  # a number is JSON too
                found = found if name.endswith("json") else {"reward": found}
                rewards = {key: float(one) for key, one in found.items()}
            except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
                rewards = {}
            if not rewards or not all(map(math.isfinite, rewards.values())):
                raise ValueError(f"{name} holds no numbers")
            return rewards
    raise ValueError("it gave no reward")


def _give(folder: Path) -> None:
    """Gives a folder and all in it to the user of sandboxes."""
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, _USER, _USER, follow_symlinks=False)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends a sandbox: its first process has all others ended before `bwrap`, which waits for it, ends too."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for first in children or [str(process.pid)]:
            os.kill(int(first), signal.SIGKILL)
    await process.wait()


def _remove(folder: Path) -> None:
    """Removes a folder in which an agent worked: `shutil.rmtree` gives up where folders are in each other too deep."""
    for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf", "--one-file-system"]):
        subprocess.run([*command, "--", str(folder)], stderr=subprocess.DEVNULL, check=False)


@contextlib.contextmanager
def _folder(parent: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        yield folder
    finally:
        _remove(folder)


def _send(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


async def begin_trial(sandbox: str, task: str) -> Sandbox:
    """As `trial.begin_trial`, in a sandbox."""
    made = Sandbox(Path(task))
    try:
        made.fill()
    except BaseException:
        await made.drop()
        raise
    return made


async def verify(container: Sandbox, task: str) -> float | None:
    """Runs the tests in a sandbox of their own over the same folders; the numbers by name, and what was printed."""
    try:
        rewards, _ = await container.verify()
    except TaskError:  # of unfinished work too: tests may need what is not there yet
        return None
    return float(sum(rewards.values()))
