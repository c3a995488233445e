"""
A conversation in which the model may call tools until it answers, one in which somebody answers the turns without
calls, and how the calls of a turn are run.
"""

from __future__ import annotations

import asyncio
import copy
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from mt_grpo.concurrency import (
    CallClock,
    ConcurrencyLimit,
    Future,
    abandon,
    begin,
    consume_exception,
    ended_within,
    in_thread,
)
from mt_grpo.envs.env import Outcome, Policy, Step, StepEnv, outcome_at_end
from mt_grpo.envs.protocols import (
    PROTOCOLS,
    SYSTEM_ROLES,
    CallProtocol,
    LearntTagProtocol,
    PlainTextProtocol,
    TagProtocol,
    instruct,
)
from mt_grpo.errors import find_fault, refuse_first
from mt_grpo.imports import did_you_mean
from mt_grpo.media import has_media
from mt_grpo.servers.external import ServerLost
from mt_grpo.tools import Tool, ToolSession, load_tools
from mt_grpo.tools.function import cut, render
from mt_grpo.tools.loading import StatefulTool, ToolStateError
from mt_grpo.trajectory import Arguments, Message, Row, StopReason, ToolCall, ToolSchema, Turn


class MultiTurnToolEnv(StepEnv):
    """
    A conversation in which the model may call tools until it answers. One that a trainer or runner is given is the
    model of all conversations: each has a shallow copy, whose attributes are its own. Subclass it and override
    `start`, `reset` or `step` for other rules, such as a reward for turns whose calls all ran, and a countdown:

        class Countdown(MultiTurnToolEnv):
            async def step(self, turn):
                step = await super().step(turn)
                if not step.done:
                    step.reward = float(not turn.error and all(not call.error for call in turn.tool_calls))
                    step.replies[-1]["content"] += f"\\n{self.max_steps - turn.index - 1} replies left."
                return step

    Args:
        tools (`Sequence[Callable | str | Tool]`): Functions with type hints and docstrings, names or dotted paths.
        system_prompt (`str`, *optional*): The system message of prompts that bring none. The protocol's instructions
            follow it, or the prompt's own; `learnt_tags` is the protocol that has none.
        max_steps (`int`, *optional*, defaults to `5`): Replies the environment gives at most, replies to malformed
            calls included; after the last one the model has one more turn to answer.
        protocol (`str`, *optional*, defaults to `"tags"`): How calls are written, see `call_protocol`.
        env_mask (`int`, *optional*, defaults to `0`): Completion mask of tokens the environment wrote.
        tool_timeout (`float`, *optional*, defaults to `60.0`): Seconds one tool call may take; `None` is no
            limit.

    Raises:
        ConfigError: For an unknown protocol, a negative limit, a mask other than 0 or 1, a tool named as a tag of the
            protocol.
        ToolDefinitionError: For a tool whose schema cannot be inferred.
    """

    step_timeout = None  # calls have a limit of their own
    generate: ClassVar[Callable[..., dict[str, list[Any]]]]
    """Whole conversations without training: `mt_grpo.rollout.generate`, which that room sets here."""
    _tool_session: ToolSession | None = None  # of a conversation that has begun

    def __init__(
        self,
        tools: Sequence[Callable[..., Any] | str | Tool] = (),
        system_prompt: str | None = None,
        max_steps: int = 5,
        protocol: str = "tags",
        env_mask: int = 0,
        tool_timeout: float | None = 60.0,
    ) -> None:
        refuse_first(
            (
                protocol not in PROTOCOLS,
                f"The call protocol {protocol!r} is unknown{did_you_mean(protocol, PROTOCOLS)}: choose one of "
                f"{', '.join(PROTOCOLS)}.",
            ),
            (max_steps < 0, f"`max_steps` is {max_steps}; it counts replies of the environment, so set 0 or more."),
            (
                env_mask not in (0, 1),
                f"`env_mask` is {env_mask}; set 0 (tool results are not trained) or 1 (they are).",
            ),
            (
                tool_timeout is not None and not tool_timeout > 0,
                f"`tool_timeout` is {tool_timeout}; set seconds above 0, or `None` for no limit.",
            ),
        )
        self.tools = {tool.name: tool for tool in load_tools(list(tools))}
        self.max_steps = max_steps
        self.protocol: CallProtocol = PROTOCOLS[protocol]()
        tags = {tag.strip("</>") for tag in self.protocol.tags}
        refuse_first(
            *(
                (
                    name in tags,
                    f"The tool {name!r} has the name of a tag of `call_protocol: {protocol}`, and <{name}> means "
                    "something else in a message: give it another name.",
                )
                for name in self.tools
            ),
            (
                protocol == "plain" and self.tools,
                "`call_protocol: plain` has no calls, and there are tools: choose `native` or `tags`.",
            ),
        )
        self.env_mask = env_mask
        self.tool_timeout = tool_timeout
        self.system_prompt = system_prompt

    @property
    def stop(self) -> tuple[str, ...]:  # type: ignore[override]  # the protocol's, which nobody sets here
        """Strings that end a turn."""
        return self.protocol.stop

    @property
    def tool_schemas(self) -> list[ToolSchema] | None:  # type: ignore[override]  # those of its tools
        """Schemas the chat template shows to the model; `None` where the system prompt does."""
        schemas = [tool.schema for tool in self.tools.values()]
        return schemas if self.protocol.native_tools and schemas else None

    def start(self, prompt: str | list[Message]) -> list[Message]:
        """The messages a conversation begins with: the prompt's own, a system message, the protocol's instructions."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if messages and self.system_prompt and messages[0]["role"] not in SYSTEM_ROLES:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return instruct(messages, self.protocol.instructions(list(self.tools.values())))

    async def reset(self, row: Row) -> list[Message]:
        """The messages a conversation begins with, from the row's `prompt`."""
        return self.start(row["prompt"])

    async def step(self, turn: Turn) -> Step:
        """Runs the calls of the turn the model just took, and replies."""
        if turn.answer is not None:
            return Step(done=StopReason.ANSWERED, answer=turn.answer)
        if turn.index >= self.max_steps:
            for call in turn.tool_calls:
                call.error = f"the limit of {self.max_steps} steps is reached."
            return Step(done=StopReason.MAX_STEPS)
        await self.execute(turn.tool_calls)
        reward = None if self._tool_session is None else self._tool_session.take_reward()
        ends = any(call.executed and not call.error and self.tools[call.name].ends_episode for call in turn.tool_calls)
        return Step(self.protocol.replies(turn), reward, done=StopReason.ENV_DONE if ends else False)

    @property
    def unforkable(self) -> str | None:
        """See `StepEnv.unforkable`."""
        stateful = [tool.name for tool in self.tools.values() if tool.keeps_state]
        if not stateful:
            return None
        return f"the tool {stateful[0]!r} keeps a state of which a branch has no copy: leave that tool out"

    def fork(self) -> MultiTurnToolEnv | Awaitable[MultiTurnToolEnv]:
        """See `StepEnv.fork`; raises `ToolStateError` where a tool keeps a state."""
        if self.unforkable:
            raise ToolStateError(f"The conversation cannot be forked: {self.unforkable}.")
        return copy.copy(self)

    async def execute(self, calls: list[ToolCall]) -> None:
        """Runs the calls of a turn and writes what became of them into each."""
        await execute_calls(calls, self.tools, self.tool_timeout)

    async def run(self, policy: Policy, row: Row) -> Outcome:
        """The loop of `StepEnv`, with states for the tools that need them, whose rewards are asked for at the end."""
        if not any(isinstance(tool, StatefulTool) for tool in self.tools.values()):
            return await super().run(policy, row)
        session = self._tool_session = ToolSession(self.tools.values(), row, self.tool_timeout)
        self.tools = session.tools
        outcome = await outcome_at_end(super().run(policy, row))
        outcome.rewards = {**await session.rewards(), **outcome.rewards}
        if session.metrics:
            outcome.info = {"tool_metrics": session.metrics, **outcome.info}
        return outcome

    async def close(self) -> None:
        """Releases the states of the tools; raises `ToolStateError` if a tool's `calc_reward` or `release` failed."""
        if self._tool_session is not None:
            await self._tool_session.release()
            if self._tool_session.failures:
                raise ToolStateError(" ".join(self._tool_session.failures))


_THOUGHT_ENDS = ("</think>", "</reasoning>")  # ends of a thought: the other side is told only what follows the last


class DialogueEnv(MultiTurnToolEnv):
    """
    A conversation in which a turn without a tool call is said to somebody, who answers it. Subclass it with `respond`.
    """

    opening: list[Message]
    dialogue: list[Message]

    def __init__(
        self, tools: Sequence[Callable[..., Any] | str | Tool] = (), system_prompt: str | None = None, **options: Any
    ) -> None:
        super().__init__(tools, system_prompt, **options)
        if not self.tools:
            self.protocol = PlainTextProtocol()
        elif isinstance(self.protocol, TagProtocol) and type(self.protocol) in (TagProtocol, LearntTagProtocol):
            self.protocol.spoken = True

    @abstractmethod
    async def respond(self, turn: Turn) -> Step:
        """What the other side answers, as text, to the last message of `dialogue`."""

    async def run(self, policy: Policy, row: Row) -> Outcome:
        """The loop of `MultiTurnToolEnv`."""
        self.opening = self.start(row["prompt"])
        self.dialogue = [
            {"role": message["role"], "content": message["content"]}
            for message in self.opening
            if message["role"] in ("user", "assistant")
        ]
        return await super().run(policy, row)

    async def step(self, turn: Turn) -> Step:
        """Runs the calls of a turn; a turn without calls is answered by `respond`."""
        if turn.tool_calls or turn.error:
            return await super().step(turn)
        said = turn.text if turn.answer is None else turn.answer
        for end in _THOUGHT_ENDS:
            said = said.rpartition(end)[2]
        said = said.strip()
        self.dialogue.append({"role": "assistant", "content": said})
        step = await self.respond(turn)
        if step.replies:
            self.dialogue.append({"role": "user", "content": step.replies})
        if step.done is False and turn.index >= self.max_steps:
            step.done = StopReason.MAX_STEPS
        if step.done is not False:
            step.answer = said
        return step


async def execute_calls(calls: list[ToolCall], tools: dict[str, Tool], timeout: float | None = None) -> None:
    """
    Runs calls concurrently, and writes into each what became of it; one that did not finish failed, whatever ended the
    wait.
    """

    async def run_in_limit(limit: ConcurrencyLimit, tool: Tool, call: ToolCall) -> None:
        async with limit:
            await _run([(tool, call)], timeout)

    free: list[tuple[Tool, ToolCall]] = []
    waiting: list[asyncio.Future[None]] = []
    for call in calls:
        tool = tools.get(call.name)
        if tool is None:
            form = next(map(type, tools.values()), Tool)
            _fail(call, f"unknown tool {call.name!r}; the tools are: {', '.join(tools) or 'none'}.", form)
        elif problem := tool.check(call.arguments):
            _fail(call, problem, tool)
        elif tool.limit is not None:
            waiting.append(asyncio.ensure_future(run_in_limit(tool.limit, tool, call)))
        else:
            free.append((tool, call))
    try:
        if free:
            await _run(free, timeout)
        if waiting:
            await asyncio.wait(waiting)
    finally:
        if unfinished := [task for task in waiting if not task.done()]:
            for task in unfinished:
                task.cancel()
            await asyncio.wait(unfinished)  # they write what became of their calls
        for task in waiting:
            consume_exception(task)
    for task in waiting:
        task.result()


async def _run(calls: list[tuple[Tool, ToolCall]], timeout: float | None) -> None:
    """Runs calls that begin together."""
    running: dict[Future, tuple[Tool, ToolCall]] = {}
    clocks: dict[Future, CallClock] = {}
    ended: set[Future] = set()
    try:
        for tool, call in calls:
            call.executed, call.start = True, time.time()
            with CallClock.running() as clock:
                if tool.is_async:
                    future: Future = begin(_awaited(tool, call.arguments), f"tool {tool.name!r}")
                else:
                    future = in_thread(partial(_called, tool, call.arguments), f"tool-{tool.name}")
            future.add_done_callback(lambda done, clock=clock: clock.end())  # type: ignore[misc]
            running[future], clocks[future] = (tool, call), clock
        ended = await ended_within(clocks, timeout)
        for future in ended:
            if not future.cancelled() and isinstance(error := future.exception(), ServerLost):
                raise error
    finally:
        finished = {future for future in running if future.done()}
        for future in running:
            abandon(future)
        for future, (tool, call) in running.items():
            call.seconds = clocks[future].seconds
            if timeout is not None and call.seconds >= timeout and future not in ended:
                _fail(call, f"{call.name} took longer than {timeout:g} s.", tool)
            elif future in finished:
                _read(tool, call, future)
            else:
                _fail(call, f"{call.name} did not finish before the conversation ended.", tool)


def fail_unanswered(turn: Turn) -> None:
    """Fails the calls of a turn that were never begun, since the conversation ended before."""
    for call in turn.tool_calls:
        if not (turn.replies or call.executed or call.error):
            _fail(call, f"{call.name} was not run: the conversation ended before.")


def _read(tool: Tool, call: ToolCall, future: Future) -> None:
    """Writes what became of a call into it."""
    if future.cancelled():
        _fail(call, f"{call.name} was cancelled.", tool)
    else:
        try:
            call.result, call.data, call.parts, call.returned = future.result()
        except Exception as error:  # whatever a user's tool raises is the model's to read
            _fail(call, cut(tool.describe(error), tool.max_result_size), tool)
            call.where = find_fault(error).where


def _fail(call: ToolCall, error: str, tool: Tool | type[Tool] = Tool) -> None:
    call.error = render(error)
    call.result = tool.failure(call.error)


def _called(tool: Tool, arguments: Arguments) -> Any:
    return tool.read(tool.function(**arguments))


async def _awaited(tool: Tool, arguments: Arguments) -> Any:
    result = await tool.function(**arguments)
    if has_media(result[0] if type(result) is tuple and result else result):
        return await in_thread(partial(tool.read, result), f"tool-{tool.name}")
    return tool.read(result)
