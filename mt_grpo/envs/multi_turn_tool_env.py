"""The rules of a conversation: its first messages, how turns are read and answered, and when it ends."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mt_grpo.envs.env import ConversationEnded, Outcome, Policy, Step, StepEnv
from mt_grpo.envs.execution import execute_calls
from mt_grpo.envs.protocols import PROTOCOLS, CallProtocol
from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean
from mt_grpo.tools import Tool, ToolSession, load_tools
from mt_grpo.tools.stateful import StatefulTool, ToolStateError
from mt_grpo.trajectory import Message, StopReason, ToolCall, Turn

if TYPE_CHECKING:
    from mt_grpo.rollout import Engine, SamplingParams


class MultiTurnToolEnv(StepEnv):
    """
    A conversation in which the model may call tools until it answers. One that a trainer or runner is given is the
    model of all conversations: each has a shallow copy, whose attributes are its own. Subclass it and override
    `start`, `reset` or `step` for other rules.

    Args:
        tools (`Sequence[Callable | str | Tool]`): Functions with type hints and docstrings, names or dotted paths.
        system_prompt (`str`, *optional*): Replaces the protocol's instructions. An empty string means none. A prompt
            that brings a system message of its own keeps it.
        max_steps (`int`, *optional*, defaults to `5`): Replies the environment gives at most, replies to malformed
            calls included; after the last one the model has one more turn to answer.
        protocol (`str`, *optional*, defaults to `"tags"`): `"tags"` or `"native"`, see `protocols.py`.
        env_mask (`int`, *optional*, defaults to `0`): Completion mask of tokens the environment wrote.
        tool_timeout (`float`, *optional*, defaults to `60.0`): Seconds one tool call may take; `None` is no limit.

    Raises:
        ConfigError: For an unknown protocol, a negative limit, a mask other than 0 or 1, a tool named as a tag of the
            protocol.
        ToolDefinitionError: For a tool whose schema cannot be inferred.
    """

    made_from: Any = None
    """The options of a run that it was made from; `None` for one that was made by hand."""
    step_timeout = None  # calls have a limit of their own
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
        if protocol not in PROTOCOLS:
            raise ConfigError(
                f"The call protocol {protocol!r} is unknown{did_you_mean(protocol, PROTOCOLS)}: choose one of "
                f"{', '.join(PROTOCOLS)}."
            )
        if max_steps < 0:
            raise ConfigError(f"`max_steps` is {max_steps}; it counts replies of the environment, so set 0 or more.")
        if env_mask not in (0, 1):
            raise ConfigError(f"`env_mask` is {env_mask}; set 0 (tool results are not trained) or 1 (they are).")
        if tool_timeout is not None and tool_timeout <= 0:
            raise ConfigError(f"`tool_timeout` is {tool_timeout}; set seconds above 0, or `None` for no limit.")
        self.tools = {tool.name: tool for tool in load_tools(list(tools))}
        self.max_steps = max_steps
        self.protocol: CallProtocol = PROTOCOLS[protocol]()
        tags = {tag.strip("</>") for tag in self.protocol.tags}
        for name in self.tools:
            if name in tags:
                raise ConfigError(
                    f"The tool {name!r} has the name of a tag of `call_protocol: {protocol}`, and <{name}> means "
                    "something else in a message: give it another name."
                )
        if protocol == "plain" and self.tools:
            raise ConfigError("`call_protocol: plain` has no calls, and there are tools: choose `native` or `tags`.")
        self.env_mask = env_mask
        self.tool_timeout = tool_timeout
        if system_prompt is None:
            system_prompt = self.protocol.default_system_prompt(list(self.tools.values()))
        self.system_prompt = system_prompt

    @property
    def stop(self) -> tuple[str, ...]:  # type: ignore[override]  # the protocol's, which nobody sets here
        """Strings that end a turn."""
        return self.protocol.stop

    @property
    def tool_schemas(self) -> list[dict[str, Any]] | None:  # type: ignore[override]  # those of its tools
        """Schemas the chat template shows to the model; `None` where the system prompt does."""
        schemas = [tool.schema for tool in self.tools.values()]
        return schemas if self.protocol.native_tools and schemas else None

    def start(self, prompt: str | list[Message]) -> list[Message]:
        """The messages a conversation begins with."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if self.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return messages

    async def reset(self, row: dict[str, Any]) -> list[Message]:
        """The messages a conversation begins with, from the row's `prompt`."""
        return self.start(row["prompt"])

    async def step(self, turn: Turn) -> Step:
        """
        Runs the calls of the turn the model just took, and replies.

        Args:
            turn (`Turn`): As the call protocol read it; results and errors are written into its calls.
        """
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

    def fork(self) -> MultiTurnToolEnv:
        """See `StepEnv.fork`; raises `ToolStateError` where a tool keeps a state."""
        for tool in self.tools.values():
            if tool.keeps_state:
                raise ToolStateError(f"The tool {tool.name!r} keeps a state, so the conversation cannot be forked.")
        return copy.copy(self)

    async def execute(self, calls: list[ToolCall]) -> None:
        """Runs the calls of a turn and writes what became of them into each."""
        await execute_calls(calls, self.tools, self.tool_timeout)

    async def run(self, policy: Policy, row: dict[str, Any]) -> Outcome:
        """The loop of `StepEnv`, with states for the tools that need them, whose rewards are asked for at the end."""
        if not any(isinstance(tool, StatefulTool) for tool in self.tools.values()):
            return await super().run(policy, row)
        session = self._tool_session = ToolSession(self.tools.values(), row, self.tool_timeout)
        self.tools = session.tools
        try:
            outcome = await super().run(policy, row)
        except ConversationEnded as ended:
            outcome = Outcome(stop_reason=ended.stop_reason)
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

    def generate(
        self, prompts: Sequence[str | list[Message]], llm: Engine, sampling_params: SamplingParams | None = None
    ) -> dict[str, list[Any]]:
        """
        Runs whole conversations and waits for them: a convenience over the rollout runner, without training. It works
        in a running event loop (a notebook) too.

        Args:
            prompts (`Sequence[str | list[dict]]`): User messages or message lists, one per conversation.
            llm (`Engine`): Samples the turns.
            sampling_params (`SamplingParams`, *optional*): Temperature, top-p and the like; `max_tokens` bounds one
                turn.

        Returns:
            `dict` of lists, with one entry per prompt: `ids`, the tokens after the prompt; `mask`, 1 for tokens that
            the model sampled and `env_mask` for those of the environment; `messages`, the same as messages.
        """
        from mt_grpo.rollout.generate import generate

        return generate(self, prompts, llm, sampling_params)
