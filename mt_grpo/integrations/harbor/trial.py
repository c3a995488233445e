"""One task in its container, which Harbor starts: what works there is an agent of Harbor's, or the policy itself."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import re
import shlex
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from harbor.agents.base import BaseAgent
from harbor.constants import MAIN_SERVICE_NAME
from harbor.environments.base import BaseEnvironment, ExecResult, HealthcheckError
from harbor.environments.docker.docker import DockerEnvironment
from harbor.environments.podman import PodmanEnvironment
from harbor.models.agent.context import AgentContext
from harbor.models.environment_type import EnvironmentType
from harbor.models.task.config import EnvironmentConfig as EnvironmentOfTask
from harbor.models.task.task import Task
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig, VerifierConfig
from harbor.models.trial.paths import EnvironmentPaths
from harbor.trial.trial import Trial
from harbor.verifier.factory import VerifierFactory

from mt_grpo.concurrency import ConcurrencyLimit, abandon, consume_exception, in_thread
from mt_grpo.errors import describe_error
from mt_grpo.integrations.harbor.containers import (
    ENGINE_SECONDS,
    OWNER,
    REPOSITORY,
    SHOWN_LOG,
    TaskError,
    Verified,
    image_of,
    list_changed,
    owner,
    write_overlay,
)
from mt_grpo.integrations.harbor.shell import GRACE, KILLED
from mt_grpo.integrations.openai_api.conversation import Conversation

_DOWN_AGAIN = (2.0, 5.0, 10.0, 20.0)  # seconds between attempts to take a container down
_POLL = 0.5  # seconds between two looks at whether an agent works or waits, or a service is there again
_RUNNING = """
for p in /proc/[0-9]*; do
    read -r s < $p/stat && set -- ${s##*) } && [ $1 != Z ] && [ $p != /proc/$$ ] && echo runs ${p#/proc/} $2
done 2> /dev/null
cat /proc/net/tcp /proc/net/tcp6 2> /dev/null |
    while read -r n port peer state q t r u o inode more; do [ $state != 0A ] || echo serves $port $inode; done
ls -l /proc/[0-9]*/fd 2> /dev/null | grep -oE '^/proc/[0-9]+|socket:.[0-9]+'
echo over
"""
_ROUNDS = 3  # of ending what an agent left running, which may begin more meanwhile
_SESSION = r"""
exec 2> /dev/null
printf '%s:%s:%s\n' $0 $$ $(id -u)
place=$PWD
cd /
while read -r mark shell script; do
    (cd "$place" && unset OLDPWD && exec $shell -c "$(printf %b "$script")") < /dev/null 2>&1
    printf '%s:%s\n' $mark $?
done
"""
_KILL = """
tree=' PID '
for round in 1 2 3 4 5 6 7 8; do
    for p in /proc/[0-9]*; do
        read -r s < $p/stat && set -- ${s##*) } &&
            case $tree in *" ${p#/proc/} "*) ;; *" $2 "*) tree="$tree${p#/proc/} " ;; esac
    done
done 2> /dev/null
kill -9 $tree
"""
_EMPTY = 'cd FOLDER && for f in * .[!.]* ..?*; do [ ! -e "$f" ] && [ ! -L "$f" ] || exit; done && printf empty'
_AS_ROOT = ("--user", "0")
_END_SECONDS = 5  # in which a session has to end


class _Running(NamedTuple):
    """Processes of a container, the ports that they serve, and those of them that serve, with what these began."""

    processes: set[str]
    ports: set[str]
    serving: set[str]

    @classmethod
    def read(cls, said: str) -> _Running | None:
        """Reads what `_RUNNING` printed; nothing where it did not come to its end."""
        lines = [line.split() for line in said.splitlines()]
        if lines[-1:] != [["over"]]:
            return None
        parents = {words[1]: words[2] for words in lines if words[0] == "runs" and len(words) == 3}
        ports = {words[2]: words[1] for words in lines if words[0] == "serves" and len(words) == 3}  # by socket
        serving, process = set(), ""
        for (word,) in (words for words in lines if len(words) == 1):
            if word.startswith("/proc/"):
                process = word.removeprefix("/proc/")
            elif word[8:] in ports:
                serving.add(process)
        while begun := {one for one, parent in parents.items() if parent in serving} - serving:
            serving |= begun
        return cls(set(parents), set(ports.values()), serving)


class _Session:
    """
    A process in a container that runs scripts there, one after another: it costs the engine fifty times what a script
    in it does. Over the engine's socket podman would keep two processes of each script for five minutes.
    """

    def __init__(self, words: tuple[str, ...], mark: str, process: asyncio.subprocess.Process) -> None:
        self.words, self.pid, self.user, self.busy = words, "", "", False
        self._mark, self._process = mark, process

    @classmethod
    async def begin(cls, words: tuple[str, ...], *command: str) -> _Session:
        pipe, mark = asyncio.subprocess.PIPE, uuid4().hex
        process = await asyncio.create_subprocess_exec(
            *command, "sh", "-c", _SESSION, mark, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
        return cls(words, mark, process)

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    def serves(self, words: tuple[str, ...]) -> bool:
        """Whether it is idle, and runs scripts with these options of the engine's."""
        return not self.busy and (words == self.words or (words, self.words, self.user) == (_AS_ROOT, (), "0"))

    async def run(self, shell: str, script: str) -> ExecResult:
        """What a script prints and its exit code; those of the session where that ends first."""
        assert self._process.stdin is not None
        self.busy = True
        if not self.pid:
            said, told = await self._answer(self._mark)
            if not told:
                return ExecResult(stdout=said or None, return_code=await self._process.wait() or KILLED)
            self.pid, self.user = told
        mark = uuid4().hex
        self._process.stdin.write(f"{mark} {shell} ".encode() + _escaped(script) + b"\n")
        said, told = await self._answer(mark)
        code = int(told[0]) if told else await self._process.wait() or KILLED
        self.busy = False
        return ExecResult(stdout=said or None, return_code=code)

    async def _answer(self, mark: str) -> tuple[str, list[str]]:
        """What is printed until the line that begins with a mark, and the words there; none where it never comes."""
        assert self._process.stdout is not None
        said, begins, read, words = bytearray(), f"{mark}:".encode(), 0, list[str]()
        while chunk := await self._process.stdout.read(2**16):
            said += chunk
            if (at := said.find(begins, read)) < 0:
                read = max(0, len(said) - len(begins))
            elif (end := said.find(b"\n", at)) >= 0:
                words = said[at:end].decode().split(":")[1:]
                del said[at:]
                break
        return said.decode(errors="replace"), words

    async def end(self) -> None:
        """Lets it end, as it does where it runs no script."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_END_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


def _escaped(script: str) -> bytes:
    """A script in one line, for `printf %b`."""
    return re.sub(rb"[^!-~]|\\", lambda found: b"\\0%03o" % ord(found[0]), os.fsencode(script))


class _Prepared(DockerEnvironment):
    """Starts from an image that is there, and adds the overlay of `write_overlay`."""

    def __init__(self, *, reaches_host: bool = False, copy: str | None = None, **options: Any) -> None:
        config: EnvironmentOfTask = options["task_env_config"]
        self._copy, image = copy, copy or config.docker_image
        self._image = image_of(options["environment_dir"], image, config.build_timeout_sec)
        if self._image is not None:
            options["task_env_config"] = config.model_copy(update={"docker_image": self._image.name})
        self._container: str | None = None
        self._before: _Running | None = None
        self._sessions: list[_Session] = []
        self.spoilt = False  # whether the agent removed what the container begins with
        self.since, self.files_changed = math.inf, ""  # when an agent began, and what was written since
        place = options["trial_paths"].trial_dir / f"{options['session_id']}.json"
        overlay = write_overlay(place, through=None, storage_mb=config.storage_mb)
        options["extra_docker_compose"] = [*(options.get("extra_docker_compose") or ()), overlay]
        super().__init__(**options)
        if reaches_host:  # where a task bounds its network, that is of a service of Harbor's
            through = self._EGRESS_CONTROL_SERVICE_NAME if self._enable_egress_control else MAIN_SERVICE_NAME
            write_overlay(place, through=through, storage_mb=config.storage_mb)

    async def start(self, force_build: bool) -> None:
        if self._image is not None and self._copy is None:  # which is here, and leaves no lock
            await in_thread(partial(self._image.get, self.type().value), "mt-grpo-image")
        await super().start(force_build)

    async def stop(self, delete: bool) -> None:
        try:
            await self._end(*self._sessions)  # podman waits ten seconds for them
            await super().stop(delete)
        finally:
            if self._copy is not None:
                await self._ask("image", "rm", "--force", self._copy)

    async def fork(self) -> tuple[BegunTrial, int]:
        """A trial in a copy of the container, and the number of processes that it has no copy of."""
        if self._image is None:
            raise TaskError("The containers of a task with a `docker-compose.yaml` cannot be copied")
        if volumes := await in_thread(partial(self._image.volumes, self.type().value), "mt-grpo-image"):
            raise TaskError(f"The image {self._image.name} has volumes ({', '.join(volumes)}), which cannot be copied")
        copy, running = f"{REPOSITORY}:copy-{uuid4().hex}", await self._running()
        label, seconds = f"LABEL {OWNER}={owner()}", int(self.task_env_config.build_timeout_sec)
        made = await self._ask("commit", "--change", label, await self._main(), copy, seconds=seconds)
        if made.return_code:
            raise TaskError(f"The container cannot be copied: {(made.stdout or '').strip()[-500:]}")
        lost = running.processes - self._before.processes if running and self._before else ()
        try:
            begun = await begin_trial(self.type().value, str(self.environment_dir.parent), copy=copy)
            begun.trial.agent_environment.since = self.since
            return begun, len(lost)
        except BaseException:
            await self._ask("image", "rm", "--force", copy)
            raise

    async def _run_docker_compose_command(self, command: list[str], *arguments: Any, **options: Any) -> ExecResult:
        """Takes containers down again where that fails: the engine's service may be restarting."""
        if command == ["down", "--remove-orphans"]:  # before a start, whose project is new
            return ExecResult(return_code=0)
        for seconds in (*_DOWN_AGAIN, None):
            try:
                return await super()._run_docker_compose_command(command, *arguments, **options)
            except RuntimeError:
                if command[0] != "down" or seconds is None:
                    raise
                await asyncio.sleep(seconds)
        raise AssertionError("the last of them raises")

    async def _compose_exec(self, command: str, *, service: str, **options: Any) -> ExecResult:
        """Asks the container itself: compose takes long, and leaves processes behind over podman."""
        if service != MAIN_SERVICE_NAME:
            return await super()._compose_exec(command, service=service, **options)
        folder, variables, user = options["cwd"], options["env"] or {}, options["user"]
        words = [] if folder is None else ["--workdir", folder]
        words += [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
        # a name is looked up in files
        words += [] if user is None else ["--user", "0" if user == "root" else str(user)]
        return await self._in_session(tuple(words), "bash", command, options["timeout_sec"])

    async def _in_session(self, words: tuple[str, ...], shell: str, script: str, seconds: float | None) -> ExecResult:
        """Runs a script in an idle session with those options, or in a new one; both end where it takes too long."""
        self._sessions = [each for each in self._sessions if not each.ended]
        session = next((each for each in self._sessions if each.serves(words)), None)
        try:
            async with asyncio.timeout(seconds or None):
                if session is None:
                    command = self._engine_cmd("exec", "--interactive", *words, await self._main())
                    session = await _Session.begin(words, *command)
                    self._sessions.append(session)
                return await session.run(shell, script)
        except BaseException as error:
            if session is not None:
                await self._end(session)
            if isinstance(error, TimeoutError):
                raise RuntimeError(f"Command timed out after {seconds} seconds") from None  # as Harbor says it
            raise

    async def _end(self, *sessions: _Session) -> None:
        """Ends sessions, and what they still run."""
        self._sessions = [each for each in self._sessions if each not in sessions]
        for each in sessions:
            if each.busy and each.pid and not each.ended:
                command = *_AS_ROOT, await self._main(), "sh", "-c", _KILL.replace("PID", each.pid)
                with suppress(RuntimeError):
                    await self._ask("exec", *command, seconds=_END_SECONDS)
            await each.end()

    async def begin_again(self) -> None:
        """Starts the container again; raises where it was ended by others than its own limit of memory."""
        name = await self._main()
        state = await self._ask("inspect", "--format", "{{.State.Running}} {{.State.OOMKilled}}", name)
        if "true" not in (state.stdout or ""):  # nothing in it can kill its first process
            raise TaskError(f"The container was ended from outside of it, or is gone: {(state.stdout or '').strip()}")
        sessions, self._sessions = self._sessions, []
        try:  # as it was started
            await self._run_docker_compose_command(["restart", "--timeout", "0", MAIN_SERVICE_NAME])
        except RuntimeError:
            begun = await self._ask("start", name)  # which says why
            if begun.return_code and "exec:" not in (said := begun.stdout or "") and "executable file" not in said:
                raise
            self.spoilt = begun.return_code != 0
        for each in sessions:
            await each.end()

    async def work(self, run: Callable[..., Awaitable[None]], **arguments: Any) -> None:
        """
        Lets an agent work, and ends what it left running, which could disturb the tests; if other ports are served
        than before, since a task may ask for that, all but what serves.
        """
        before = self._before = await self._running()
        self.since = min(self.since, time.time())
        (raised,) = await asyncio.gather(run(**arguments), return_exceptions=True)
        await self._end(*self._sessions)  # root can get into them
        ports = before.ports if before else set()
        if not before or not await self._ended(before):
            await self.begin_again()
            with suppress(TimeoutError, HealthcheckError):  # where the agent broke a service, that is verified
                async with asyncio.timeout(ENGINE_SECONDS):
                    while ports and not ((now := await self._running()) and ports <= now.ports):
                        await asyncio.sleep(_POLL)
                    await self.run_healthcheck()
        self.files_changed = await self._as_root(list_changed(["/"], self.since))
        paths = EnvironmentPaths.for_os(self.task_env_config.os)
        # what the agent put in place of the numbers of the tests, and of their folder
        tests = f"t={paths.tests_dir}; [ -d $t ] && [ ! -L $t ] || rm -rf $t"
        await self._as_root(f"rm -rf {paths.verifier_dir}/*; {tests}")
        if raised is not None:
            raise raised

    async def _ended(self, before: _Running) -> bool:
        """Whether nothing runs that did not before, but for what serves other ports; ends the rest where they are."""
        for _ in range(_ROUNDS):
            if (left := await self._running()) is None:
                break
            others = left.processes - before.processes
            if not others:
                return True
            if left.ports == before.ports:
                break
            if not (others := others - left.serving):
                return True
            await self._as_root(f"kill -9 {' '.join(others)}")
        return False

    async def _running(self) -> _Running | None:
        """What runs in the container but for our own; nothing where it does not say."""
        found = _Running.read(await self._as_root(_RUNNING))
        return found and found._replace(processes=found.processes - {each.pid for each in self._sessions})

    async def _as_root(self, script: str) -> str:
        """What a script prints in the container; nothing where it takes too long."""
        with suppress(RuntimeError):
            return (await self._in_session(_AS_ROOT, "sh", script, GRACE)).stdout or ""
        return ""

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        if any(Path(source_dir).iterdir()):
            await super().upload_dir(source_dir, target_dir)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copies nothing of an empty folder, as those of logs and of what a task asks for mostly are."""
        if await self._as_root(_EMPTY.replace("FOLDER", shlex.quote(source_dir))) != "empty":
            await super().download_dir(source_dir, target_dir)

    @classmethod
    @functools.cache
    def _detect_daemon_os(cls) -> str | None:
        """Asks once: all conversations of the process wait meanwhile."""
        return super()._detect_daemon_os()

    async def _main(self) -> str:
        if self._container is None:
            self._container = await self._platform._resolve_service_container(MAIN_SERVICE_NAME)
        return self._container

    async def _ask(self, *command: str, seconds: int = int(ENGINE_SECONDS)) -> ExecResult:
        process = await asyncio.create_subprocess_exec(
            *self._engine_cmd(*command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        return await self._collect_buffered_output(process, timeout_sec=seconds)


class Docker(_Prepared):
    """Of the sandbox `docker`."""


class Podman(_Prepared, PodmanEnvironment):
    """Of the sandbox `podman`."""


ENVIRONMENTS = {"docker": Docker, "podman": Podman}


logger = logging.getLogger(__name__)

AGENT_SECONDS = 1e7  # the time that Harbor gives the agent. Sampling counts in it, so it is measured here

_Talk = Callable[[BaseEnvironment], Awaitable[None]]
_STARTS = ConcurrencyLimit(max(2, os.cpu_count() or 1))
"""Containers that start at once in this process: more of them only wait for each other."""
_BUILD_TIMEOUT_FACTOR = 1e4
"""By how much Harbor multiplies the time of a start, which is measured here: waiting for `_STARTS` is none of it."""


class AgentTooSlowError(Exception):
    """An agent took all of the time that its task allows. What it did until then is verified."""


class AgentFailedError(Exception):
    """An agent failed. What it did until then is verified: by the names of some errors Harbor would not do so."""


class _PolicyAgent(BaseAgent):
    """The policy as an agent of Harbor's, whose `talk` holds the conversation in the started container."""

    talk: _Talk

    @staticmethod
    def name() -> str:
        return "mt-grpo"

    def version(self) -> str:
        return metadata.version("mt-grpo")

    async def setup(self, environment: BaseEnvironment) -> None:
        """Nothing is installed: commands come from outside."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        await self.talk(environment)


POLICY = AgentConfig(import_path=f"{_PolicyAgent.__module__}:{_PolicyAgent.__name__}")


class BegunTrial:
    """A trial whose container starts already, with the seconds that it took, and when it had started."""

    def __init__(self, trial: Trial, folder: tempfile.TemporaryDirectory[str]) -> None:
        self.trial, self.folder = trial, folder
        self.start_seconds = self.started = 0.0
        self._start, self._dropped, self._begun = trial.agent_environment.start, False, False
        trial.agent_environment.start = self._until_started  # which `trial.run` calls
        self._starting = asyncio.ensure_future(self._limited())
        self._starting.add_done_callback(consume_exception)

    async def drop(self) -> None:
        """Removes the container, which nobody needs."""
        self._dropped = True
        with self.folder:
            await self.trial.run()

    async def talk_in(self, talk: _Talk) -> Verified:
        self.trial.agent.talk = talk
        return await self.finish()

    async def finish(self, asked: Conversation | None = None) -> Verified:
        """The second half of `run_trial`: the agent works, and what it did is verified."""
        trial = self.trial
        with self.folder:
            if asked is not None:
                trial.agent.run = partial(_work, trial.agent.run, asked, trial.task.config.agent.timeout_sec)
            if isinstance(trial.agent_environment, _Prepared):
                trial.agent.run = partial(trial.agent_environment.work, trial.agent.run)
            result = await trial.run()
            raised, verified = result.exception_info, result.verifier_result
            error = None if raised is None else f"{raised.exception_type}: {raised.exception_message}"
            if verified is None or verified.rewards is None:
                if isinstance(trial.agent_environment, _Prepared) and trial.agent_environment.spoilt:
                    return Verified({"reward": 0.0, "*": 0.0}, str(error))  # as where it spoils its shell
                raise TaskError(f"The task {trial.task.task_dir} was not verified: {error or 'it gave no reward'}")
            logs = sorted(trial.paths.agent_dir.glob("*.txt")) if trial.paths.agent_dir.is_dir() else []
            return Verified(
                {name: float(value) for name, value in verified.rewards.items()},
                _end_of(trial.paths.test_stdout_path),
                "".join(_end_of(path) for path in logs)[-SHOWN_LOG:],
                error,
                self.start_seconds,
                self.started,
                getattr(trial.agent_environment, "files_changed", ""),
            )

    async def _limited(self) -> None:
        async with _STARTS:
            self._begun, begun = True, time.monotonic()
            async with asyncio.timeout(self.trial.task.config.environment.build_timeout_sec):
                await self._start(force_build=False)
            self.started = time.monotonic()
            self.start_seconds = self.started - begun

    async def _until_started(self, force_build: bool) -> None:
        if self._dropped and not self._begun:
            self._starting.cancel()
        try:
            await asyncio.shield(self._starting)
        except asyncio.CancelledError:
            if self._begun:  # what is half up cannot be taken down
                await asyncio.wait([self._starting])
            else:
                self._starting.cancel()
            if not self._dropped:
                raise
        if self._dropped:
            raise TaskError("No conversation came for the container.")


async def run_trial(sandbox: str, task: str, agent: AgentConfig, asked: Conversation | None = None) -> Verified:
    """
    Starts a task's container, lets an agent work there as long as the task allows, not counting its waits for the
    policy, and has it verified. `TaskError` if there is no reward.
    """
    begun = await begin_trial(sandbox, task, agent, reaches_host=asked is not None)
    return await begun.finish(asked)


async def begin_trial(
    sandbox: str, task: str, agent: AgentConfig = POLICY, *, reaches_host: bool = False, copy: str | None = None
) -> BegunTrial:
    """The first half of `run_trial`: the container starts, from the task's image or that `copy` of a container."""
    agent = agent.model_copy(update={"override_timeout_sec": AGENT_SECONDS})
    folder = tempfile.TemporaryDirectory(prefix="mt-grpo-harbor-", ignore_cleanup_errors=True)
    environment = EnvironmentConfig(type=EnvironmentType(sandbox))
    if (ours := ENVIRONMENTS.get(sandbox)) is not None:
        path = f"{ours.__module__}:{ours.__name__}"
        environment = EnvironmentConfig(import_path=path, kwargs={"reaches_host": reaches_host, "copy": copy})
    config = TrialConfig(
        task=TaskConfig(path=Path(task)),
        trials_dir=Path(folder.name),
        agent=agent,
        environment=environment,
        environment_build_timeout_multiplier=_BUILD_TIMEOUT_FACTOR,
    )
    trial = await Trial.create(config)
    trial.config.environment.kwargs.pop("copy", None)  # of the agent's container: that of the tests may be another
    return BegunTrial(trial, folder)


async def verify(container: BaseEnvironment, task: str) -> float | None:
    """The sum of the verifier's numbers while the agent still works, or nothing; its traces are removed."""
    made = Task(Path(task))
    settings, paths = made.config.verifier, EnvironmentPaths.for_os(made.config.environment.os)
    verifier = VerifierFactory.create_verifier_from_config(
        VerifierConfig(), task=made, trial_paths=container.trial_paths, environment=container
    )
    try:
        with container.with_default_user(settings.user):
            async with asyncio.timeout(settings.timeout_sec):
                rewards = (await verifier.verify()).rewards
    except Exception as error:  # of unfinished work too: tests may need what is not there yet
        logger.debug("The task %s was not verified after a turn: %s", task, describe_error(error))
        return None
    finally:
        await container.empty_dirs([paths.verifier_dir], chmod=True)
        await container.empty_dirs([paths.tests_dir], chmod=False)
    return None if rewards is None else float(sum(rewards.values()))


def _end_of(log: Path) -> str:
    if log.is_symlink() or not log.is_file():  # a container may have made it
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4 * SHOWN_LOG))
        return file.read(4 * SHOWN_LOG).decode(errors="replace")[-SHOWN_LOG:]


async def _work(
    run: Callable[..., Awaitable[None]], asked: Conversation, seconds: float | None, **arguments: Any
) -> None:
    """Runs an agent until it ends, the conversation is over, or it has worked so long, not counting its waits."""
    left = math.inf if seconds is None else seconds
    working, over = asyncio.ensure_future(run(**arguments)), asyncio.ensure_future(asked.over.wait())
    try:
        while left > 0:
            begun, waits = time.monotonic(), asked.retries.waiting
            done, _ = await asyncio.wait([working, over], timeout=_POLL, return_when=asyncio.FIRST_COMPLETED)
            if working in done:
                try:
                    return await working
                except Exception as error:  # whatever the agent raises, or Harbor reads from what it printed
                    raise AgentFailedError(describe_error(error)) from error
            if over in done:
                return None
            left -= 0.0 if waits else time.monotonic() - begun
        raise AgentTooSlowError(f"The agent worked for more than the task's {seconds:g} s")
    finally:
        over.cancel()
        abandon(working)
