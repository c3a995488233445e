"""
Agents as environments: a function or a program that asks the policy over HTTP, with OpenAI's and Anthropic's APIs.
`async` agents run in an event loop beside the server's, so that an agent that blocks still gets its answer.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import numbers
import os
import shlex
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mt_grpo.concurrency import LoopThread, OnePerProcess, abandon, begin, in_thread
from mt_grpo.envs.env import ConversationEnded, Outcome
from mt_grpo.envs.protocols import PROTOCOLS, CallProtocol
from mt_grpo.envs.source import EnvSource, environment
from mt_grpo.errors import ConfigError, defined_at, describe_error, find_standing
from mt_grpo.imports import import_object
from mt_grpo.integrations.openai_api.conversation import Conversation, Endpoint
from mt_grpo.options.table import Values
from mt_grpo.options.values import parse_agent
from mt_grpo.rollout.policy import ConversationPolicy
from mt_grpo.tools.function import finite
from mt_grpo.trajectory import StopReason

if TYPE_CHECKING:
    from openai import AsyncOpenAI


@dataclass
class AgentClient:
    """
    How an agent reaches its conversation, with any client for OpenAI's API.

    Args:
        base_url (`str`): The base URL; it ends in `/v1`.
        api_key (`str`): The key of this conversation alone.
        session (`str`): Name of the conversation.
        add_session (`Callable`): Gives the conversation a further name, which requests may send in `X-Session-ID`.
    """

    base_url: str
    api_key: str = field(repr=False)
    session: str
    add_session: Callable[[str], None] = field(repr=False)
    _opened: list[AsyncOpenAI] = field(default_factory=list, repr=False)

    def openai(self, **options: Any) -> AsyncOpenAI:
        """
        An `openai.AsyncOpenAI` with further arguments, such as `timeout`, which is closed after the conversation.
        """
        import openai

        if "http_client" not in options:  # loopback needs neither a proxy nor certificates, which take long to load
            options["http_client"] = openai.DefaultAsyncHttpxClient(trust_env=False, verify=False)
        self._opened.append(openai.AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, **options))
        return self._opened[-1]

    async def close(self) -> None:
        """Closes the clients that `openai` made."""
        while self._opened:
            await self._opened.pop().close()


class CommandError(Exception):
    """A program ended with an exit code other than 0."""


class RefusedError(Exception):
    """All requests of an agent were refused, and it went on as if nothing were wrong."""


class UnaskedError(Exception):
    """An agent failed with a client of its own, which does not lead to the policy."""


_KEPT = 1 << 20  # number of bytes that are kept of a program's output, from its end
_LEAVING = 0.5  # seconds between SIGTERM and SIGKILL


class Command:
    """
    An agent that is a program in any language; each conversation is a process. It has `OPENAI_BASE_URL` and
    `OPENAI_API_KEY` in its environment, `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY` too, and the row as JSON on
    standard input. Its process group ends with it.

    Args:
        line (`str`): The command line, split as a shell does; no shell is started.
    """

    def __init__(self, line: str) -> None:
        self.arguments = shlex.split(line)

    async def __call__(self, row: Mapping[str, object], client: AgentClient) -> object:
        host, others = urlsplit(client.base_url).hostname, os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
        hosts = ",".join(filter(None, [others, host]))
        variables = {
            **{name: value for name, value in os.environ.items() if name != "ANTHROPIC_AUTH_TOKEN"},  # would go first
            "OPENAI_BASE_URL": client.base_url,
            "OPENAI_API_KEY": client.api_key,
            "ANTHROPIC_BASE_URL": client.base_url.removesuffix("/v1"),  # its clients add it
            "ANTHROPIC_API_KEY": client.api_key,
            **dict.fromkeys(("no_proxy", "NO_PROXY"), hosts),
        }
        start = asyncio.get_running_loop().subprocess_exec
        starting = asyncio.ensure_future(start(_Process, *self.arguments, env=variables, start_new_session=True))
        try:
            # asyncio ends a start that is cancelled without the processes that the program has begun by then
            _, process = await asyncio.shield(starting)
            await process.run(json.dumps(row, default=str).encode())
        finally:
            _, process = await starting
            await process.end()
        code = process.transport.get_returncode() or 0
        output, errors = (process.written[fd].decode(errors="replace") for fd in (1, 2))
        if code != 0:
            names = {number.value: number.name for number in signal.Signals}  # a real-time signal has none
            ended = f"was ended by {names.get(-code, f'signal {-code}')}"
            how, said = f"ended with exit code {code}" if code > 0 else ended, errors.strip()[-2000:]
            raise CommandError(f"{self.arguments[0]} {how}{f': {said}' if said else ', and wrote nothing of why'}")
        return _result(output)


class _Process(asyncio.SubprocessProtocol):
    """A program and the processes that it begins; keeps the end of its output."""

    transport: asyncio.SubprocessTransport

    def __init__(self) -> None:
        self._exited, self._closed = asyncio.Event(), asyncio.Event()
        self.written = {1: b"", 2: b""}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self.transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.written[fd] = (self.written[fd] + data)[-_KEPT:]

    def process_exited(self) -> None:
        self._exited.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._closed.set()

    async def run(self, given: bytes) -> None:
        """Writes to the program's standard input and waits for its end."""
        stdin = self.transport.get_pipe_transport(0)
        assert isinstance(stdin, asyncio.WriteTransport)
        stdin.write(given)
        stdin.close()
        await self._exited.wait()
        self._kill(signal.SIGKILL)  # processes that it left
        await _within(self._closed)

    async def end(self) -> None:
        """Ends the program and what it has begun, and waits until it has ended, so that it is no process any more."""
        try:
            if not self._exited.is_set():
                self._kill(signal.SIGTERM)
                await _within(self._exited)
        finally:  # even where this is cancelled once more
            self._kill(signal.SIGKILL)
            try:
                await self._exited.wait()
            finally:
                self.transport.close()

    def _kill(self, how: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.transport.get_pid(), how)


async def _within(event: asyncio.Event) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), _LEAVING)


def _result(output: str) -> object:
    """The value of the last line: its JSON if that is an object, a number or a string, or else the line."""
    lines = output.strip().splitlines()
    if not lines:
        return None
    with suppress(ValueError, RecursionError):
        if isinstance(value := json.loads(lines[-1]), (dict, int, float, str)):
            return value
    return lines[-1].strip()


_STUCK = 2.0  # seconds without an answer after which a loop counts as blocked, and further agents get another one


class _AgentLoop(LoopThread):
    """The event loop of `async` agents. It is not the server's, which answers while an agent blocks its loop."""

    def __init__(self) -> None:
        super().__init__("mt-grpo-agents")
        self._asked: float | None = None  # since when `ask` waits for `_answer`

    @property
    def lives(self) -> bool:
        return self._asked is None or time.monotonic() - self._asked <= _STUCK

    def ask(self) -> None:
        if self._asked is None:
            self._asked = time.monotonic()
            self.loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._asked = None


_agents = OnePerProcess(_AgentLoop)


Agent = Callable[..., Any] | Command  # `solve(row, client)`, `async` or not, or a program


class AgentSource(EnvSource):
    """
    Makes the environments of an agent.

    Args:
        agent (`Callable` or `Command`): `solve(row, client)`, `async` or not, see docs/any_agent.md.
        protocol (`CallProtocol`, *optional*): A text protocol for tool calls, for models whose chat template has none
            that they were trained on.
        host (`str`, *optional*, defaults to `"127.0.0.1"`): Address of the server.
    """

    def __init__(self, agent: Agent, protocol: CallProtocol | None = None, host: str = "127.0.0.1") -> None:
        self.agent, self.protocol, self.endpoint = agent, protocol, Endpoint(host)

    @property
    def name(self) -> str:
        agent = self.agent
        return agent.arguments[0] if isinstance(agent, Command) else getattr(agent, "__name__", type(agent).__name__)

    @property
    def needs_template_calls(self) -> bool | None:
        """It is not known whether an agent will ask for tools; a text protocol writes its calls itself."""
        return None if self.protocol is None or self.protocol.native_tools else False

    async def make(self, row: Mapping[str, object]) -> Any:  # its `run` asks for the runner's own policy
        return AgentEnv(self)


@environment("agent")
def _agent_of_options(options: Values) -> AgentSource:
    """The agent of a run's option `agent`."""
    given = parse_agent(options["agent"])
    if "command" in given:
        agent: Agent = Command(given["command"])
    else:
        agent = import_object(given["function"], what="agent")
        try:
            inspect.signature(agent).bind({}, None)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"`agent: {given['function']}` leads to {agent!r}{defined_at(agent)}: give a function that is called "
                "with the row and the client."
            ) from error
    host = given.get("host", "127.0.0.1")
    try:
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        raise ConfigError(
            f"`agent: {{host: {host}}}` cannot be listened at ({error.strerror}): give an address of this machine by "
            "which the agent reaches it; `ip address` lists them."
        ) from error
    return AgentSource(agent, protocol_of(options), host)


def protocol_of(options: Values) -> CallProtocol | None:
    """The protocol of `call_protocol`; `None` where it is unset."""
    return None if options["call_protocol"] is None else PROTOCOLS[options["call_protocol"]]()


class AgentEnv:
    """One conversation of an agent."""

    def __init__(self, source: AgentSource) -> None:
        self._source = source
        self._at: tuple[int, object] = (0, None)  # the agent's thread, and its coroutine

    async def run(self, policy: ConversationPolicy, row: Mapping[str, object]) -> Outcome:
        """Runs the agent on a row. A limit that ended the conversation is its stop reason."""
        source = self._source
        async with source.endpoint.conversation(policy, source.protocol) as conversation:
            client = AgentClient(
                conversation.base_url,
                conversation.api_key,
                policy.session,
                partial(source.endpoint.add_session, conversation),
            )
            try:
                result = await self.work(conversation, row, client)
                outcome = _read_result(result, f"{source.name}{defined_at(source.agent)}")
            except Exception as error:  # whatever the user's agent raises; if it got no turn, that is the cause
                if conversation.failure is None:
                    if conversation.limit is not None:
                        raise ConversationEnded(conversation.limit) from None
                    if conversation.refusal is not None and isinstance(error, CommandError):
                        raise CommandError(f"{error}; its request was refused: {conversation.refusal}") from error
                    client_failed = type(error).__module__.partition(".")[0] in ("openai", "anthropic")
                    client_failed = client_failed or "api_key" in str(error).lower()
                    if client_failed and not conversation.asked and not isinstance(error, CommandError):
                        raise UnaskedError(
                            f"{describe_error(error)} No request reached the policy: in an agent, take "
                            "`client.openai()`, or give another client `client.base_url` and `client.api_key`. A key "
                            "in the environment would send requests to the provider."
                        ) from error
                    raise
            else:
                if conversation.refusal is not None and not conversation.sampled:
                    raise RefusedError(f"The agent got no turn, since its request was refused: {conversation.refusal}")
            if conversation.failure is not None:  # whatever the agent returned: it says nothing about the policy
                raise conversation.failure
            outcome.stop_reason = conversation.limit or outcome.stop_reason
            return outcome

    async def work(self, conversation: Conversation, row: Mapping[str, object], client: AgentClient) -> object:
        """The agent's result; `None` if it does not stop asking."""
        working = asyncio.ensure_future(self._call(row, client))
        asking = asyncio.ensure_future(conversation.over.wait())
        try:
            await asyncio.wait([working, asking], return_when=asyncio.FIRST_COMPLETED)
            return await working if working.done() else None
        finally:
            asking.cancel()
            if not working.done():
                conversation.policy.stands = find_standing(*self._at)
                if isinstance(self._source.agent, Command):  # end its processes
                    working.cancel()
                    await asyncio.wait([working])
            abandon(working)

    async def _call(self, row: Mapping[str, object], client: AgentClient) -> object:
        agent, name = self._source.agent, self._source.name
        if isinstance(agent, Command):
            return await agent(row, client)
        waiting: Awaitable[object] | None = None

        def blocking() -> object:
            self._at = threading.get_ident(), None
            return agent(row, client)

        if not inspect.iscoroutinefunction(agent):
            result = await in_thread(blocking, name)
            if not inspect.isawaitable(result):
                return result
            waiting = result

        async def work() -> object:
            try:
                return await (agent(row, client) if waiting is None else waiting)
            finally:
                await client.close()

        async def named() -> object:
            self._at = self._at[0], (working := work())
            return await begin(working, name)

        agents = _agents.get(fit=lambda loop: loop.lives)  # of all agents: they may share clients and locks
        agents.ask()
        self._at = agents.thread.ident or 0, None
        return await agents.run(named())

    async def close(self) -> None:
        """There is nothing to close."""


def _read_result(result: object, name: str) -> Outcome:
    """An agent's result as an outcome."""
    if isinstance(result, Outcome):
        return result
    if result is None or isinstance(result, str):
        result = {"answer": result}
    elif isinstance(result, numbers.Real):
        result = {"reward": result}
    if not isinstance(result, dict):
        right = "a reward, a mapping from names of rewards to numbers, the answer as text, or nothing"
        raise TypeError(f"{name} returned {type(result).__name__}: return {right}.")
    answer = result.get("answer")
    if not isinstance(answer, (str, type(None))):
        raise TypeError(f"{name} returned {type(answer).__name__} as `answer`: return text.")
    given = {key: value for key, value in result.items() if key != "answer"}
    rewards = {key: finite(value, f"{name}: the reward {key!r}") for key, value in given.items()}
    return Outcome(rewards, None if answer is None else StopReason.ANSWERED, answer)
