"""The APIs in which agents ask, chat completions, Anthropic's Messages and Responses: all are read as the first."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import orjson

from mt_grpo.integrations.openai_api.request import (
    CHAT_FIELDS,
    TOOL_FIELDS,
    ApiError,
    Fields,
    ParsedRequest,
    Warnings,
    check_output,
    check_tool,
    invalid,
)
from mt_grpo.trajectory import Message, Turn

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message under which response templates put the model's reasoning."""


@dataclass(frozen=True)
class Choice:
    """One answer."""

    message: Message
    finish_reason: str
    turn: Turn
    logprobs: list[Fields] | None = None

    @classmethod
    def of(cls, turn: Turn, parsed: ParsedRequest, logprobs: list[Fields] | None) -> Choice:
        """A turn as an answer, with the reasoning apart and the stop string cut."""
        content = turn.message.get("content") or ""
        reasoning = next((turn.message[name] for name in _REASONING if turn.message.get(name)), None)
        if reasoning is None and "</think>" in content:
            reasoning, _, content = content.partition("</think>")
            reasoning, content = reasoning.removeprefix("<think>").strip("\n"), content.lstrip("\n")
        stops = [text for text in _stops(turn, parsed.stop) if text in content]
        content = content[: min(map(content.find, stops), default=None)]
        message: Message = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        if not (parsed.reads_calls and parsed.tools is not None and turn.tool_calls):
            return cls(message, turn.finish_reason, turn, logprobs)
        message["content"], message["tool_calls"] = content or None, []
        for call in turn.tool_calls:
            function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
            message["tool_calls"].append({"id": call.id, "type": "function", "function": function})
        return cls(message, "tool_calls", turn, logprobs)


def _stops(turn: Turn, stop: Sequence[str]) -> list[str]:
    """The strings of `stop` that are in a turn which one of them may have ended."""
    return [text for text in stop if text in turn.text] if turn.finish_reason == "stop" else []


def _count_usage(choices: Sequence[Choice]) -> dict[str, int]:
    prompt, sampled = choices[0].turn.context_length, sum(choice.turn.num_tokens for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _event(data: Fields, kind: str | None = None) -> bytes:
    return (b"" if kind is None else b"event: %s\n" % kind.encode()) + b"data: %s\n\n" % orjson.dumps(data)


def _named(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _read_tools(body: Fields, read: Callable[[object, str], Fields]) -> Fields:
    """The field `tools` of the chat completion; none where there are none."""
    tools = body.get("tools")
    return {"tools": [read(tool, f"tools[{index}]") for index, tool in enumerate(tools)]} if tools else {}


class Dialect(ABC):
    """An API: how its requests are read as chat completions and answered, and what requests may go on from."""

    path: str
    fields: frozenset[str]  # fields that are honoured, or refused with a sentence of their own
    counted: Mapping[str, str] = {}  # what a count of tokens says beside the number

    @abstractmethod
    def as_chat(self, body: Fields, warnings: Warnings) -> Fields:
        """The body of the same request as a chat completion."""

    @abstractmethod
    def answer(self, parsed: ParsedRequest, choices: Sequence[Choice]) -> Iterator[bytes]:
        """The answer: one JSON object, or the events of a stream. It is kept where a request may go on from it."""


class _ChatCompletions(Dialect):
    """OpenAI's chat completions."""

    path, fields = "chat/completions", CHAT_FIELDS

    def as_chat(self, body: Fields, warnings: Warnings) -> Fields:
        return body

    def answer(self, parsed: ParsedRequest, choices: Sequence[Choice]) -> Iterator[bytes]:
        head: Fields = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion", "created": int(time.time())}
        head["model"] = parsed.model
        if not parsed.stream:
            listed = []
            for index, choice in enumerate(choices):
                answered = {"index": index, "message": choice.message, "finish_reason": choice.finish_reason}
                listed.append({**answered, "logprobs": self._logprobs(choice)})
            yield orjson.dumps(head | {"choices": listed, "usage": _count_usage(choices)})
            return
        head["object"] = "chat.completion.chunk"
        if parsed.usage:
            head["usage"] = None
        for index, choice in enumerate(choices):
            for delta, logprobs, reason in self._deltas(choice):
                part = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
                yield _event(head | {"choices": [part]})
        if parsed.usage:
            yield _event(head | {"choices": [], "usage": _count_usage(choices)})
        yield b"data: [DONE]\n\n"

    def _deltas(self, choice: Choice) -> Iterator[tuple[Fields, Fields | None, str | None]]:
        yield {"role": "assistant", "content": ""}, None, None
        if "reasoning_content" in choice.message:
            yield {"reasoning_content": choice.message["reasoning_content"]}, None, None
        if choice.message["content"] or choice.logprobs:
            yield {"content": choice.message["content"] or ""}, self._logprobs(choice), None
        for number, call in enumerate(choice.message.get("tool_calls") or ()):
            yield {"tool_calls": [{"index": number, **call}]}, None, None
        yield {}, None, choice.finish_reason

    def _logprobs(self, choice: Choice) -> Fields | None:
        return None if choice.logprobs is None else {"content": choice.logprobs, "refusal": None}


class Responses(Dialect):
    """OpenAI's Responses; a request may name the response that it goes on from, and items of responses."""

    path, counted = "responses", {"object": "response.input_tokens"}
    same = ("model", "tool_choice", "parallel_tool_calls", "top_logprobs", "stream")
    fields = frozenset(
        (
            *same,
            *"""input instructions tools max_output_tokens previous_response_id text include truncation stream_options
            background conversation prompt""".split(),
        )
    )

    def __init__(self) -> None:
        self._conversations: dict[str, list[Message]] = {}  # with the response of this name at the end
        self._items: dict[str, Fields] = {}

    def as_chat(self, body: Fields, warnings: Warnings) -> Fields:
        for name in ("background", "conversation"):
            if body.get(name):
                raise invalid(name, "is nothing that this server keeps: send the whole conversation as `input`")
        if body.get("prompt"):
            raise invalid("prompt", "is kept by OpenAI, and nothing is fetched: send `instructions` and `input`")
        previous = body.get("previous_response_id")
        if previous is not None and previous not in self._conversations:
            raise ApiError(404, f"There is no response {previous!r}.", "not_found", "previous_response_id")
        before = [] if previous is None else self._conversations[previous]
        instructed = bool(body.get("instructions"))
        if instructed:  # those of the previous response are not its
            before = [{"role": "system", "content": body["instructions"]}, *before]
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if not isinstance(items, list):
            raise invalid("input", "is neither text nor a list of items")
        check_output(body.get("text"), "text", "verbosity", warnings)
        chat = {name: body.get(name) for name in self.same} | _read_tools(body, self._read_tool)
        chat |= {"messages": [*before, *self._read_items(items)], "max_tokens": body.get("max_output_tokens")}
        logprobs = "message.output_text.logprobs" in (body.get("include") or ())
        return chat | {"logprobs": logprobs, "instructed": instructed}

    def _read_tool(self, tool: object, place: str) -> Fields:
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise invalid(place, "is no function of the client's")
        check_tool(tool, TOOL_FIELDS, place)
        return {"type": "function", "function": tool}

    def _read_items(self, items: list[object]) -> list[Message]:
        """Items as messages. What the assistant says in a row is one message."""
        messages: list[Message] = []
        latest: Message | None = None  # the assistant's, which may have more calls
        for index, item in enumerate(items):
            place = f"input[{index}]"
            if not isinstance(item, dict):
                raise invalid(place, "is no item")
            kind = item.get("type") or ("message" if "role" in item else "item_reference")
            if kind == "item_reference":
                if item.get("id") not in self._items:
                    raise ApiError(404, f"There is no item {item.get('id')!r}.", "not_found", place)
                item = self._items[item["id"]]
                kind = item["type"]
            if kind == "reasoning":
                continue
            if kind == "function_call_output":
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
                latest = None
            elif kind == "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                if latest is None:
                    messages.append(latest := {"role": "assistant", "content": "", "tool_calls": []})
                latest["tool_calls"].append({"type": "function", "id": item.get("call_id"), "function": function})
            elif kind == "message":
                own = item.get("role") == "assistant"
                if not own or latest is None or latest["content"]:  # else these words come after their calls
                    messages.append(latest := {"tool_calls": []})
                latest |= {"role": item.get("role"), "content": item.get("content")}
                latest = latest if own else None
            else:
                raise invalid(place, f"is of the type {kind!r}, which the policy does not read")
        return messages

    def answer(self, parsed: ParsedRequest, choices: Sequence[Choice]) -> Iterator[bytes]:
        (choice,) = choices
        name, items = _named("resp"), self._write_items(choice)
        self._conversations[name] = [*parsed.messages[parsed.instructed :], choice.message]
        self._items.update((item["id"], item) for item in items)
        usage, cut = _count_usage(choices), choice.finish_reason == "length"
        tools = [{**tool["function"], "type": "function", "strict": False} for tool in parsed.tools or ()]
        whole: Fields = {"id": name, "object": "response", "created_at": int(time.time())}
        whole |= {"status": "incomplete" if cut else "completed", "error": None}
        whole["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        whole |= {"model": parsed.model, "output": items, "parallel_tool_calls": True, "tool_choice": "auto"}
        whole |= {"tools": tools, "metadata": {}}
        whole["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        if not parsed.stream:
            yield orjson.dumps(whole)
            return
        for number, (kind, data) in enumerate(self._events(whole)):
            yield _event({"type": kind, "sequence_number": number, **data}, kind)

    def _write_items(self, choice: Choice) -> list[Fields]:
        message, items = choice.message, []
        if "reasoning_content" in message:
            thought = {"type": "reasoning_text", "text": message["reasoning_content"]}
            items.append({"type": "reasoning", "id": _named("rs"), "summary": [], "content": [thought]})
        done = {"status": "completed"}
        if message["content"] or not message.get("tool_calls"):
            text: Fields = {"type": "output_text", "text": message["content"] or "", "annotations": []}
            if choice.logprobs is not None:
                text["logprobs"] = choice.logprobs
            items.append({"type": "message", "id": _named("msg"), **done, "role": "assistant", "content": [text]})
        for call in message.get("tool_calls", ()):
            made = {"id": _named("fc"), "call_id": call["id"], **done, **call["function"]}
            items.append({"type": "function_call", **made})
        return items

    def _events(self, whole: Fields) -> Iterator[tuple[str, Fields]]:
        begun = whole | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        yield "response.created", {"response": begun}
        yield "response.in_progress", {"response": begun}
        for index, item in enumerate(whole["output"]):
            place = {"output_index": index, "item_id": item["id"]}
            empty = {"message": {"content": []}, "function_call": {"arguments": ""}, "reasoning": {"content": []}}
            begun = item | empty[item["type"]] | ({} if item["type"] == "reasoning" else {"status": "in_progress"})
            yield "response.output_item.added", {"output_index": index, "item": begun}
            if item["type"] == "message":
                (part,) = item["content"]
                place = place | {"content_index": 0}
                yield "response.content_part.added", place | {"part": part | {"text": ""}}
                logprobs = part.get("logprobs", [])
                yield "response.output_text.delta", place | {"delta": part["text"], "logprobs": logprobs}
                yield "response.output_text.done", place | {"text": part["text"], "logprobs": logprobs}
                yield "response.content_part.done", place | {"part": part}
            elif item["type"] == "function_call":
                yield "response.function_call_arguments.delta", place | {"delta": item["arguments"]}
                done = {"arguments": item["arguments"], "name": item["name"]}
                yield "response.function_call_arguments.done", place | done
            yield "response.output_item.done", {"output_index": index, "item": item}
        yield f"response.{whole['status']}", {"response": whole}


def _commands(description: str, commands: str, arguments: Mapping[str, object], required: list[str]) -> Fields:
    """A tool whose first argument is one of several commands."""
    command = {"type": "string", "enum": commands.split(), "description": "What to do."}
    properties = {"command": command, **arguments}
    schema = {"type": "object", "properties": properties, "required": ["command", *required]}
    return {"description": description, "parameters": schema}


_BASH = {
    "command": {"type": "string", "description": "The command to run."},
    "restart": {"type": "boolean", "description": "Set to true to restart the shell."},
}
_EDITS = {
    "path": {"type": "string", "description": "Absolute path of a file or folder."},
    "file_text": {"type": "string", "description": "For `create`: the content of the file."},
    "old_str": {"type": "string", "description": "For `str_replace`: the text to replace, which occurs once."},
    "new_str": {"type": "string", "description": "For `str_replace`: the text in its place."},
    "insert_line": {"type": "integer", "description": "For `insert`: the line after which to insert."},
    "insert_text": {"type": "string", "description": "For `insert`: the text to insert."},
    "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "description": "For `view`: the first and the last line to show; -1 is the end of the file.",
    },
}
_MOVES = {
    "old_path": {"type": "string", "description": "For `rename`: the path."},
    "new_path": {"type": "string", "description": "For `rename`: the path in its place."},
}
_EDITOR, _VIEWS = "Views, creates and edits text files.", "view create str_replace insert"
_CLIENT_TOOLS = {
    "bash_2": {"description": "Runs commands in a shell.", "parameters": {"type": "object", "properties": _BASH}},
    "text_editor_2024": _commands(_EDITOR, f"{_VIEWS} undo_edit", _EDITS, ["path"]),
    "text_editor_20250124": _commands(_EDITOR, f"{_VIEWS} undo_edit", _EDITS, ["path"]),
    "text_editor_2": _commands(_EDITOR, _VIEWS, _EDITS, ["path"]),
    "memory_2": _commands("Keeps notes in files under /memories.", f"{_VIEWS} delete rename", _EDITS | _MOVES, []),
}
"""What Anthropic's models know of the tools that the client runs, by the beginning of their type; the first counts."""


class Messages(Dialect):
    """Anthropic's Messages; a request may name the answer that its thread goes on from."""

    path = "messages"
    same = ("model", "max_tokens", "stream")
    fields = frozenset(
        (*same, *"messages system tools tool_choice stop_sequences thread output_config context_management".split())
    )
    tool_fields = frozenset(
        "type name description input_schema strict cache_control eager_input_streaming max_characters".split()
    )
    """Fields of a tool: those that are shown, and those that change nothing of what is."""
    thread_fields = frozenset(("type", "previous_message_id"))
    text_fields = frozenset(("type", "text", "cache_control"))
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

    def __init__(self) -> None:
        self._threads: dict[str, tuple[list[Message], list[Fields] | None]] = {}  # messages and tools, by answer

    def as_chat(self, body: Fields, warnings: Warnings) -> Fields:
        check_output(body.get("output_config"), "output_config", "effort", warnings)
        for edit in (body.get("context_management") or {}).get("edits") or ():
            if not edit["type"].startswith("clear_thinking_"):
                raise invalid("context_management", f"has {edit['type']!r}, and no past is edited here: leave it out")
            warnings.once("context_management", "the run decides what later turns see of the thoughts (`history`)")
        chat: Fields = {name: body.get(name) for name in self.same}
        chat |= {"stop": body.get("stop_sequences"), "messages": []} | _read_tools(body, self._read_tool)
        if body.get("system"):
            chat["messages"] = [{"role": "system", "content": body["system"]}]
        thread = body.get("thread")
        check_tool(thread or {}, self.thread_fields, "thread")
        if thread is not None and thread.get("type") != "create":
            messages, tools = self._continued(thread, body)
            chat |= {"messages": list(messages), "tools": tools}
        given = body.get("messages")
        if not isinstance(given, list):
            raise invalid("messages", "is no list")
        for index, message in enumerate(given):
            chat["messages"] += self._read_message(message, f"messages[{index}]")
        choice = body.get("tool_choice")
        if choice is not None:
            if not isinstance(choice, dict):
                raise invalid("tool_choice", "is no object with a `type`")
            named = {"type": "function", "function": {"name": choice.get("name")}}
            choices: dict[object, str] = {"auto": "auto", "any": "required", "none": "none"}
            chat["tool_choice"] = choices.get(choice.get("type"), named)
            chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
        return chat

    def _continued(self, thread: Fields, body: Fields) -> tuple[list[Message], list[Fields] | None]:
        """The messages and tools of the thread that a request goes on from."""
        if thread.get("type") != "continue":
            raise invalid("thread", f"is of the type {thread.get('type')!r}: give create or continue")
        for name in ("system", "tools"):
            if body.get(name):
                raise invalid(name, "is the thread's, and was given where it began: leave it out")
        previous = thread.get("previous_message_id")
        if previous not in self._threads:
            message = f"There is no thread that goes on from {previous!r}: send the whole conversation."
            raise ApiError(404, message, "not_found", "thread", details={"error_code": "thread_not_found"})
        return self._threads[previous]

    def _read_tool(self, tool: object, place: str) -> Fields:
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
            raise invalid(place, "is no tool of the client's with a name")
        check_tool(tool, self.tool_fields, place)
        kind = tool.get("type") or "custom"
        shown = {"description": tool.get("description"), "parameters": tool.get("input_schema")}
        if kind != "custom":
            known = [shown for name, shown in _CLIENT_TOOLS.items() if str(kind).startswith(name)]
            if not known:
                raise invalid(place, f"is {kind!r}, which the client does not run, or answers with images")
            shown = known[0]
        return {"type": "function", "function": {"name": tool["name"], **shown}}

    def _read_message(self, message: object, place: str) -> list[Message]:
        """A message as one of the assistant or the user, after the results of tools that it has."""
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(message, dict) or not isinstance(content, list):
            return [message]  # type: ignore[list-item]  # it is checked as a message of a chat completion
        results, texts, calls, thoughts = [], [], [], []
        for block in content:
            kind = block.get("type") if isinstance(block, dict) else None
            if kind == "tool_result":
                named = {"tool_call_id": block.get("tool_use_id"), "is_error": block.get("is_error")}
                results.append({"role": "tool", "content": block.get("content"), **named})
            elif kind == "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input")}
                calls.append({"type": "function", "id": block.get("id"), "function": function})
            elif kind == "thinking":
                thoughts.append(block.get("thinking", ""))
            elif kind == "text":
                check_tool(block, self.text_fields, f"{place}.content")
                texts.append(block)
            elif kind == "image":
                source, url = block.get("source"), None
                if isinstance(source, dict) and source.get("type") == "base64":  # no other comes with the request
                    url = f"data:{source.get('media_type')};base64,{source.get('data')}"
                texts.append({"type": "image_url", "image_url": url})
            elif kind != "redacted_thinking":
                raise invalid(place, f"has a block {kind!r}, and the policy reads text and images")
        said = {"role": message.get("role"), "content": texts, "tool_calls": calls}
        said["reasoning_content"] = "".join(thoughts)
        return results + ([said] if texts or calls or not results else [])

    def answer(self, parsed: ParsedRequest, choices: Sequence[Choice]) -> Iterator[bytes]:
        (choice,) = choices
        name = _named("msg")
        self._threads[name] = [*parsed.messages, choice.message], parsed.tools
        usage = {"input_tokens": choice.turn.context_length, "output_tokens": choice.turn.num_tokens}
        stop = min(_stops(choice.turn, parsed.stop), key=choice.turn.text.find, default=None)
        whole: Fields = {
            "id": name,
            "type": "message",
            "role": "assistant",
            "model": parsed.model,
            "content": self._write_blocks(choice.message),
            "stop_reason": self.reasons[choice.finish_reason] if stop is None else "stop_sequence",
            "stop_sequence": stop,
            "usage": usage,
        }
        if not parsed.stream:
            yield orjson.dumps(whole)
            return
        begun = whole | {"content": [], "stop_reason": None, "usage": usage | {"output_tokens": 0}}
        yield _event({"type": "message_start", "message": begun}, "message_start")
        for index, block in enumerate(whole["content"]):
            for kind, data in self._deltas(block):
                yield _event({"type": kind, "index": index, **data}, kind)
        ended = {"stop_reason": whole["stop_reason"], "stop_sequence": stop}
        yield _event({"type": "message_delta", "delta": ended, "usage": usage}, "message_delta")
        yield _event({"type": "message_stop"}, "message_stop")

    def _write_blocks(self, message: Message) -> list[Fields]:
        blocks = []
        if "reasoning_content" in message:
            thought = message["reasoning_content"]
            # clients give back what is signed only; nothing is verified with it
            signature = blake2b(thought.encode("utf-8", "replace"), digest_size=32).hexdigest()
            blocks.append({"type": "thinking", "thinking": thought, "signature": signature})
        if message["content"]:
            blocks.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls", ()):
            # an object as the policy wrote it: orjson writes no integers of more than 64 bits, and JSON has no NaN
            given = json.loads(call["function"]["arguments"], parse_constant=lambda name: None)
            made = {"id": call["id"], "name": call["function"]["name"], "input": orjson.Fragment(json.dumps(given))}
            blocks.append({"type": "tool_use", **made})
        return blocks

    def _deltas(self, block: Fields) -> Iterator[tuple[str, Fields]]:
        """The events of one block: its start without the content, the content, and its end."""
        empty: Fields
        if block["type"] == "tool_use":
            given = orjson.dumps(block["input"]).decode()
            empty, deltas = {"input": {}}, [{"type": "input_json_delta", "partial_json": given}]
        else:
            names = [name for name in block if name != "type"]  # its text, and the signature of a thought
            empty, deltas = dict.fromkeys(names, ""), [{"type": f"{name}_delta", name: block[name]} for name in names]
        yield "content_block_start", {"content_block": block | empty}
        for delta in deltas:
            yield "content_block_delta", {"delta": delta}
        yield "content_block_stop", {}


DIALECTS: tuple[type[Dialect], ...] = (_ChatCompletions, Messages, Responses)
