"""The conversation rules: what the model is told, how its turns are read, what it is answered, when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mt_grpo.envs.execution import execute_calls
from mt_grpo.envs.protocols import PROTOCOLS, CallProtocol
from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean
from mt_grpo.tools import Tool, load_tools
from mt_grpo.trajectory import Message, StopReason, Trajectory, Turn

if TYPE_CHECKING:
    from mt_grpo.rollout import Engine, SamplingParams

HEADER_TOKENS = 32
"""Upper bound of the tokens of an assistant's header, which a response parser reads to know where a turn begins."""


class MultiTurnToolEnv:
    """
    A conversation in which the model may call tools until it answers. Subclass it and override `start` or `step` for
    other rules.

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
        ValueError: For an unknown protocol, a negative limit, a mask other than 0 or 1.
        ToolDefinitionError: For a tool whose schema cannot be inferred.
    """

    made_from: Any = None
    """The options of a run that it was made from; `None` for one that was made by hand."""

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
        self.env_mask = env_mask
        self.tool_timeout = tool_timeout
        if system_prompt is None:
            system_prompt = self.protocol.default_system_prompt(list(self.tools.values()))
        self.system_prompt = system_prompt

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a turn."""
        return self.protocol.stop

    @property
    def tool_schemas(self) -> list[dict[str, Any]] | None:
        """Schemas the chat template shows to the model; `None` where the system prompt does."""
        schemas = [tool.schema for tool in self.tools.values()]
        return schemas if self.protocol.native_tools and schemas else None

    def start(self, prompt: str | list[Message]) -> list[Message]:
        """The messages a conversation begins with."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if self.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return messages

    async def step(self, turn: Turn, trajectory: Trajectory, text: str, tokenizer: Any) -> StopReason | None:
        """
        Reads the turn the model just took, runs its calls and replies.

        Args:
            turn (`Turn`): The turn, already the last of `trajectory.turns`; filled in here.
            trajectory (`Trajectory`): The conversation so far.
            text (`str`): What the model sampled, special tokens kept except the one that ended the turn.
            tokenizer: The model's tokenizer.

        Returns:
            `StopReason` that ends the conversation, or `None` when `turn.replies` are to be answered.
        """
        # the assistant's header is in there, and with it the `<think>` that some templates open themselves
        context = trajectory.tree.tail(turn.num_tokens + HEADER_TOKENS)[: -turn.num_tokens]
        parsed = self.protocol.parse(text, tokenizer, context)
        turn.message, turn.tool_calls, turn.error = parsed.message, parsed.calls, parsed.error
        if parsed.answer is not None:
            trajectory.answer = parsed.answer
            return StopReason.ANSWERED
        if turn.index >= self.max_steps:
            for call in turn.tool_calls:
                call.error = f"the limit of {self.max_steps} steps is reached."
            return StopReason.MAX_STEPS
        await execute_calls(turn.tool_calls, self.tools, self.tool_timeout)
        turn.replies = self.protocol.replies(turn)
        ends = any(call.executed and not call.error and self.tools[call.name].ends_episode for call in turn.tool_calls)
        return StopReason.ENV_DONE if ends else None

    def generate(
        self, prompts: Sequence[str | list[Message]], llm: Engine, sampling_params: SamplingParams | None = None
    ) -> dict[str, list[Any]]:
        """
        Runs whole conversations and waits for them: a convenience over the rollout runner, without training. It works
        in a running event loop (a notebook) too.

        Args:
            prompts (`Sequence[str | list[dict]]`): User messages or message lists, one a conversation.
            llm (`Engine`): Samples the turns.
            sampling_params (`SamplingParams`, *optional*): Temperature, top-p and the like; `max_tokens` bounds one
                turn.

        Returns:
            `dict` of lists, one entry a prompt: `ids`, the tokens after the prompt; `mask`, 1 where the model sampled
            them and `env_mask` where the environment wrote them; `messages`, the same as messages.
        """
        from mt_grpo.rollout.generate import generate

        return generate(self, prompts, llm, sampling_params)
