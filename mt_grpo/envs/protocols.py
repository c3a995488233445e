"""How a model calls tools and answers in text: the tag protocol and the chat template's native tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Protocol

from mt_grpo.imports import Registry
from mt_grpo.media import Part
from mt_grpo.tools import Tool
from mt_grpo.tools.function import too_deep
from mt_grpo.trajectory import Message, ToolCall, ToolSchema, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class ParsedTurn:
    """The meaning of one turn's text."""

    message: Message
    calls: list[ToolCall] = field(default_factory=list)
    answer: str | None = None
    error: str | None = None


class CallProtocol(Protocol):
    """A convention for tool calls and final answers."""

    stop: tuple[str, ...] = ()
    """Strings that end a turn; they stay part of it."""
    native_tools: bool = False
    """Whether the chat template itself shows the tools to the model."""
    tags: tuple[str, ...] = ()
    """Tags in its contents. If a tokenizer has tokens for them, they stay tokens in contents."""

    def instructions(self, tools: list[Tool]) -> str | None:
        """What the model is told in its system prompt; `None` if the chat template tells it, or it knows."""
        return None

    def parse(self, text: str, tokenizer: PreTrainedTokenizerBase, context: Sequence[int] = ()) -> ParsedTurn:
        """
        Reads one turn. `text` keeps special tokens, except the one that ended the turn; `context` are the ids before
        it, whose end may already open a block of the turn, as in templates that write `<think>` themselves.
        """
        ...

    def replies(self, turn: Turn) -> list[Message]:
        """The environment's messages after a turn: its results in call order, or its error."""
        ...


PROTOCOLS: Registry[type[CallProtocol]] = Registry("call protocol", "mt_grpo.envs.protocols")
"""What `call_protocol` can name."""

SYSTEM_ROLES = ("system", "developer")  # roles of a first message that tells the model what it is to do


def call_protocol(name: str) -> Callable[[type[CallProtocol]], type[CallProtocol]]:
    """Registers a class with the members of `CallProtocol`, made without arguments, under a name."""
    return PROTOCOLS.register(name)


def instruct(messages: list[Message], instructions: str | None) -> list[Message]:
    """Messages with a protocol's instructions in their system message, unless they have them already."""
    before = list(takewhile(lambda message: message["role"] != "assistant", messages))
    if (
        not messages
        or not instructions
        or any(" ".join(instructions.split()) in _words(message) for message in before)
    ):
        return messages
    if messages[0]["role"] not in SYSTEM_ROLES:
        return [{"role": "system", "content": instructions}, *messages]
    content: Any = messages[0].get("content")
    if isinstance(content, list):
        content = [*content, _text_part(f"\n\n{instructions}")]
    else:
        content = f"{content}\n\n{instructions}" if content else instructions
    return [{**messages[0], "content": content}, *messages[1:]]


def _words(message: Message) -> str:
    content: Any = message.get("content") or ""
    parts = [{"text": content}] if isinstance(content, str) else content
    texts = [part["text"] for part in parts if isinstance(part, dict) and part.get("text")]
    return " ".join(" ".join(texts).split())


@call_protocol("tags")
class TagProtocol(CallProtocol):
    """
    Reasoning, calls and answers between tags:

        <reasoning>why</reasoning>
        <tool>{"name": "search", "args": {"query": "Lima"}}</tool>      answered with <result>...</result>
        <answer>Peru</answer>                                           ends the conversation
    """

    stop = ("</tool>", "</answer>")
    tags = tuple(f"<{end}{name}>" for name in ("reasoning", "tool", "result", "answer") for end in ("", "/"))
    _tool = re.compile(r"<tool>(.*?)</tool>", re.DOTALL)
    _answer = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

    spoken = False
    """Whether a turn without a call is said to somebody, with or without `<answer>` tags."""

    def instructions(self, tools: list[Tool]) -> str | None:
        if self.spoken:
            lines = [
                "You talk with a user, and you can call tools. A message is either words to the user or a call: "
                '<tool>{"name": "tool_name", "args": {"argument": "value"}}</tool>. The result of a call comes back '
                "inside <result> tags, which the user does not see.",
            ]
            return _with_tools(lines, tools)
        lines = [
            "Solve the task step by step. In every message, first think inside <reasoning> tags, then do one of two "
            "things.",
        ]
        if tools:
            lines += [
                'Call a tool: <tool>{"name": "tool_name", "args": {"argument": "value"}}</tool>. Its result '
                "comes back inside <result> tags.",
            ]
        lines += ["Give the final answer, as short as it can be: <answer>your answer</answer>."]
        return _with_tools(lines, tools) if tools else "\n".join(lines)

    def parse(self, text: str, tokenizer: PreTrainedTokenizerBase, context: Sequence[int] = ()) -> ParsedTurn:
        parsed = ParsedTurn({"role": "assistant", "content": text})
        # up to the last end alone: each of many beginnings without an end would be searched to the end of the text
        blocks = self._tool.findall(text, 0, text.rfind("</tool>") + len("</tool>"))
        answers = self._answer.findall(text, 0, text.rfind("</answer>") + len("</answer>"))
        if blocks:
            for block in blocks:
                call, error = _json_call(block, arguments_key="args")
                if call is None:
                    return ParsedTurn(parsed.message, error=f"{error} {_TAG_CALL}")
                parsed.calls.append(call)
        elif answers:
            parsed.answer = answers[-1].strip()
        elif "<tool>" in text:
            parsed.error = f"the tool call is not closed with </tool>. {_TAG_CALL}"
        elif not self.spoken:
            parsed.error = "the message has neither a tool call in <tool> tags nor an answer in <answer> tags."
        return parsed

    def replies(self, turn: Turn) -> list[Message]:
        if turn.error:
            return [{"role": "user", "content": f"<result>Error: {turn.error}</result>"}]
        if all(call.parts is None for call in turn.tool_calls):
            results = "\n".join(f"<result>{call.result}</result>" for call in turn.tool_calls)
            return [{"role": "user", "content": results}]
        parts: list[Any] = []
        for number, call in enumerate(turn.tool_calls):
            before = "\n<result>" if number else "<result>"
            shown = [_text_part(call.result)] if call.parts is None else call.parts
            parts += [_text_part(before), *shown, _text_part("</result>")]
        return [{"role": "user", "content": parts}]


@call_protocol("learnt_tags")
class LearntTagProtocol(TagProtocol):
    """As `TagProtocol`, for a model that has learnt its tools and tags: nothing is added to the prompt."""

    def instructions(self, tools: list[Tool]) -> str | None:
        return None


def _with_tools(lines: list[str], tools: list[Tool]) -> str:
    schemas = [json.dumps(tool.schema["function"], ensure_ascii=False) for tool in tools]
    return "\n".join([*lines, "", "Tools:", *schemas])


def _text_part(text: str) -> Part:
    return {"type": "text", "text": text}


_TAG_CALL = 'Write <tool>{"name": ..., "args": {...}}</tool>.'


def _json_call(block: str, arguments_key: str) -> tuple[ToolCall | None, str | None]:
    """Reads a call written as a JSON object: (call, None) or (None, what is wrong with it)."""
    try:
        value = with_valid_text(json.loads(block))
    except json.JSONDecodeError as error:
        return None, f"the tool call is not valid JSON ({error.msg} at character {error.pos})."
    except (ValueError, RecursionError):
        return None, "the tool call has a number too long or brackets too deep to read."
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None, "the tool call is not a JSON object with a name."
    arguments = value.get(arguments_key, {})
    if not isinstance(arguments, dict):
        return None, f"the {arguments_key} of the tool call are not a JSON object."
    return ToolCall(value["name"], arguments), None


def with_valid_text(value: object) -> Any:
    """Replaces lone surrogates, which JSON of a model may hold as escapes: tokenizers and files refuse them."""
    if too_deep(value):
        raise ValueError("its brackets are too deep to read")
    return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


@call_protocol("native")
class NativeProtocol(CallProtocol):
    """
    Tool calls in the model's own format, rendered by its chat template and read by its tokenizer's response template.
    A turn without a call is the final answer.
    """

    native_tools = True

    def parse(
        self,
        text: str,
        tokenizer: PreTrainedTokenizerBase,
        context: Sequence[int] = (),
        tools: list[ToolSchema] | None = None,
        end: str = "",
    ) -> ParsedTurn:
        """As `CallProtocol.parse`."""
        header = _begun(tokenizer.response_template, tokenizer.decode(list(context)))
        try:
            try:
                read = tokenizer.parse_response(text, prefix=header, tools=tools)
            except ValueError:
                if not end:
                    raise
                read = tokenizer.parse_response(text + end, prefix=header, tools=tools)
            message = with_valid_text({"content": "", **read})
        except (ValueError, RecursionError) as error:
            return ParsedTurn({"role": "assistant", "content": text}, error=f"the tool call cannot be read: {error}.")
        calls = []
        for number, entry in enumerate(message.get("tool_calls") or []):
            function = entry.get("function", entry)
            if (
                not isinstance(function, dict)
                or not isinstance(function.get("name"), str)
                or not isinstance(function.get("arguments", {}), dict)
            ):
                message = {"role": "assistant", "content": text}
                return ParsedTurn(message, error="a tool call needs a name and a JSON object of arguments.")
            function.setdefault("arguments", {})  # templates show them
            calls.append(ToolCall(function["name"], function["arguments"], id=entry.get("id", f"call_{number}")))
        return ParsedTurn(message, calls, None if calls else (message.get("content") or "").strip())

    def replies(self, turn: Turn) -> list[Message]:
        if turn.error:
            return [{"role": "user", "content": f"Error: {turn.error}"}]
        return [
            {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": call.parts or call.result}
            for call in turn.tool_calls
        ]


def _begun(response_template: dict[str, Any], header: str) -> str:
    """A header, where a turn begins in it by its response template; else nothing, as it would be read as the turn."""
    literals = response_template.get("start_anchor") or []
    literals = [literals] if isinstance(literals, str) else literals
    pattern = response_template.get("start_anchor_pattern") or "|".join(map(re.escape, literals))
    return header if re.search(pattern, header) else ""


class PlainTextProtocol(CallProtocol):
    """For a model without tools: all that it writes is said to the other side."""

    def parse(self, text: str, tokenizer: PreTrainedTokenizerBase, context: Sequence[int] = ()) -> ParsedTurn:
        return ParsedTurn({"role": "assistant", "content": text})

    def replies(self, turn: Turn) -> list[Message]:
        return []


@call_protocol("plain")
class _PlainProtocol(PlainTextProtocol):
    """No calls: each turn is the final answer, and nothing is added to the prompt. It takes no tools."""

    def parse(self, text: str, tokenizer: PreTrainedTokenizerBase, context: Sequence[int] = ()) -> ParsedTurn:
        return ParsedTurn({"role": "assistant", "content": text}, answer=text.strip())
