"""Conversations with a partner: tools answer the calls of a turn, the partner answers turns without calls."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from mt_grpo.envs.env import Outcome, Policy, Step
from mt_grpo.envs.protocols import LearntTagProtocol, ParsedTurn, TagProtocol
from mt_grpo.envs.tool_env import MultiTurnToolEnv
from mt_grpo.tools import Tool
from mt_grpo.trajectory import Message, StopReason, Turn

THOUGHT_ENDS = ("</think>", "</reasoning>")
"""Ends of a thought: the other side is told only what follows the last."""


class DialogueEnv(MultiTurnToolEnv):
    """
    A conversation in which a turn without a tool call is said to somebody, who answers it. Subclass it with `respond`.
    """

    opening: list[Message]
    dialogue: list[Message]

    def __init__(
        self,
        tools: Sequence[Callable[..., Any] | str | Tool] = (),
        system_prompt: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(tools, system_prompt, **options)
        if not self.tools:
            self.protocol = PlainTextProtocol()
        elif type(self.protocol) in (TagProtocol, LearntTagProtocol):
            self.protocol = SpokenTags(learnt=type(self.protocol) is LearntTagProtocol)

    @abstractmethod
    async def respond(self, turn: Turn) -> Step:
        """What the other side answers, as text, to the last message of `dialogue`."""

    async def run(self, policy: Policy, row: dict[str, Any]) -> Outcome:
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
        for end in THOUGHT_ENDS:
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


class PlainTextProtocol:
    """For a model without tools: all that it writes is said to the other side."""

    stop: tuple[str, ...] = ()
    native_tools = False
    tags: tuple[str, ...] = ()

    def instructions(self, tools: list[Tool]) -> str | None:
        return None

    def parse(self, text: str, tokenizer: Any, context: Sequence[int] = ()) -> ParsedTurn:
        return ParsedTurn({"role": "assistant", "content": text})

    def replies(self, turn: Turn) -> list[Message]:
        return []


class SpokenTags(TagProtocol):
    """Calls between tags, as in `TagProtocol`. A turn without a call is said, with or without `<answer>` tags."""

    def __init__(self, learnt: bool = False) -> None:
        self.learnt = learnt

    def instructions(self, tools: list[Tool]) -> str | None:
        if self.learnt:
            return None
        lines = [
            "You talk with a user, and you can call tools. A message is either words to the user or a call: "
            '<tool>{"name": "tool_name", "args": {"argument": "value"}}</tool>. The result of a call comes back '
            "inside <result> tags, which the user does not see.",
            "",
            "Tools:",
        ]
        return "\n".join(lines + [json.dumps(tool.schema["function"], ensure_ascii=False) for tool in tools])

    def parse(self, text: str, tokenizer: Any, context: Sequence[int] = ()) -> ParsedTurn:
        parsed = super().parse(text, tokenizer, context)
        if "<tool>" not in text:
            parsed.error = None
        return parsed
