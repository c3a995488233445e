"""
Anthropic's Messages: translates requests into chat completions, and answers into Anthropic's form. Each dialect has a
file, since it changes when its provider does.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

from mt_grpo.integrations.openai_api.chat import Choice, ended_by, event
from mt_grpo.integrations.openai_api.request import (
    ApiError,
    ParsedRequest,
    Warnings,
    check_output,
    check_tool,
    wrong,
)
from mt_grpo.trajectory import Message

SAME = ("model", "max_tokens", "stream")
READ = frozenset(
    (
        *SAME,
        *"messages system tools tool_choice stop_sequences thread output_config context_management".split(),
    )
)
"""Fields that are honoured, or refused with a sentence of their own."""
TOOL = frozenset(
    "type name description input_schema strict cache_control eager_input_streaming max_characters".split()
)
"""Fields of a tool: those that are shown, and those that change nothing of what is."""
CHOICES: dict[Any, str] = {"auto": "auto", "any": "required", "none": "none"}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@dataclass(frozen=True)
class Thread:
    """What a conversation keeps of an answer that the client may go on from."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None


Threads = dict[str, Thread]
"""The threads of a conversation, by the identifier of their latest answer."""


def as_chat(threads: Threads, warnings: Warnings, body: dict[str, Any]) -> dict[str, Any]:
    """The body of the same request as a chat completion."""
    check_output(body.get("output_config"), "output_config", "effort", warnings)
    _check_edits(body, warnings)
    chat: dict[str, Any] = {name: body.get(name) for name in SAME}
    chat |= {"stop": body.get("stop_sequences"), "messages": []}
    if body.get("system"):
        chat["messages"] = [{"role": "system", "content": body["system"]}]
    if body.get("tools"):
        chat["tools"] = [_tool(tool, index) for index, tool in enumerate(body["tools"])]
    if (before := _thread(body, threads)) is not None:
        chat |= {"messages": list(before.messages), "tools": before.tools}
    given = body.get("messages")
    if not isinstance(given, list):
        raise wrong("messages", "is no list")
    for index, message in enumerate(given):
        chat["messages"] += _read(message, f"messages[{index}]")
    choice = body.get("tool_choice")
    if choice is not None:
        if not isinstance(choice, dict):
            raise wrong("tool_choice", "is no object with a `type`")
        named = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = CHOICES.get(choice.get("type"), named)
        chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
    return chat


def _thread(body: dict[str, Any], threads: Threads) -> Thread | None:
    """What a request goes on from; `None` where it has the whole conversation."""
    thread = body.get("thread")
    if thread is None or thread.get("type") == "create":
        return None
    if thread.get("type") != "continue":
        raise wrong("thread", f"is of the type {thread.get('type')!r}: give create or continue")
    for name in ("system", "tools"):
        if body.get(name):
            raise wrong(name, "is the thread's, and was given where it began: leave it out")
    name = thread.get("previous_message_id")
    if name not in threads:
        message = f"There is no thread that goes on from {name!r}: send the whole conversation."
        raise ApiError(404, message, "not_found", "thread", details={"error_code": "thread_not_found"})
    return threads[name]


def _check_edits(body: dict[str, Any], warnings: Warnings) -> None:
    for edit in (body.get("context_management") or {}).get("edits") or ():
        if not edit["type"].startswith("clear_thinking_"):
            raise wrong("context_management", f"has {edit['type']!r}, and no past is edited here: leave it out")
        warnings.once("context_management", "the run decides what later turns see of the thoughts (`history`)")


BASH = {
    "command": {"type": "string", "description": "The command to run."},
    "restart": {"type": "boolean", "description": "Set to true to restart the shell."},
}
PATH = {"path": {"type": "string", "description": "Absolute path of a file or folder."}}
EDITS = {
    **PATH,
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
MOVES = {
    "old_path": {"type": "string", "description": "For `rename`: the path."},
    "new_path": {"type": "string", "description": "For `rename`: the path in its place."},
}


def _commands(description: str, commands: str, arguments: dict[str, Any], required: list[str]) -> dict[str, Any]:
    """A tool whose first argument is one of several commands."""
    command = {"type": "string", "enum": commands.split(), "description": "What to do."}
    properties = {"command": command, **arguments}
    schema = {"type": "object", "properties": properties, "required": ["command", *required]}
    return {"description": description, "parameters": schema}


EDITOR = "Views, creates and edits text files."
VIEWS = "view create str_replace insert"
CLIENTS: dict[str, dict[str, Any]] = {
    "bash_2": {"description": "Runs commands in a shell.", "parameters": {"type": "object", "properties": BASH}},
    "text_editor_2024": _commands(EDITOR, f"{VIEWS} undo_edit", EDITS, ["path"]),
    "text_editor_20250124": _commands(EDITOR, f"{VIEWS} undo_edit", EDITS, ["path"]),
    "text_editor_2": _commands(EDITOR, VIEWS, EDITS, ["path"]),
    "memory_2": _commands("Keeps notes in files under /memories.", f"{VIEWS} delete rename", EDITS | MOVES, []),
}
"""What Anthropic's models know of the tools that the client runs, by the beginning of their type; the first counts."""


def _tool(tool: Any, index: int) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise wrong(f"tools[{index}]", "is no tool of the client's with a name")
    check_tool(tool, TOOL, f"tools[{index}]")
    kind = tool.get("type") or "custom"
    if kind == "custom":
        shown = {"description": tool.get("description"), "parameters": tool.get("input_schema")}
    else:
        known = [shown for name, shown in CLIENTS.items() if str(kind).startswith(name)]
        if not known:
            raise wrong(f"tools[{index}]", f"is {kind!r}, which the client does not run, or answers with images")
        shown = known[0]
    return {"type": "function", "function": {"name": tool["name"], **shown}}


def _read(message: Any, place: str) -> list[dict[str, Any]]:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return [message]
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
            texts.append(block)
        elif kind == "image":
            texts.append({"type": "image_url", "image_url": _data_url(block.get("source"))})
        elif kind != "redacted_thinking":
            raise wrong(place, f"has a block {kind!r}, and the policy reads text and images")
    said = {"role": message.get("role"), "content": texts, "tool_calls": calls, "reasoning_content": "".join(thoughts)}
    return results + ([said] if texts or calls or not results else [])


def _data_url(source: Any) -> str | None:
    """An image that comes with the request; nothing for another."""
    if not isinstance(source, dict) or source.get("type") != "base64":
        return None
    return f"data:{source.get('media_type')};base64,{source.get('data')}"


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    message, blocks = choice.message, []
    if "reasoning_content" in message:
        thought = message["reasoning_content"]
        # clients give back what is signed only; nothing is verified with it
        signature = blake2b(thought.encode("utf-8", "replace"), digest_size=32).hexdigest()
        blocks.append({"type": "thinking", "thinking": thought, "signature": signature})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        made = {"id": call["id"], "name": function["name"], "input": json.loads(function["arguments"])}
        blocks.append({"type": "tool_use", **made})
    return blocks


def answer(parsed: ParsedRequest, choices: Sequence[Choice], threads: Threads) -> Iterator[bytes]:
    """The answer: one JSON object, or the events of a stream. It is kept, for a thread that goes on from it."""
    (choice,) = choices
    name = f"msg_{uuid.uuid4().hex}"
    threads[name] = Thread([*parsed.messages, choice.message], parsed.tools)
    usage = {"input_tokens": choice.turn.context_length, "output_tokens": choice.turn.num_tokens}
    stop = ended_by(choice.turn, parsed.stop)
    whole: dict[str, Any] = {
        "id": name,
        "type": "message",
        "role": "assistant",
        "model": parsed.model,
        "content": _blocks(choice),
        "stop_reason": REASONS[choice.finish_reason] if stop is None else "stop_sequence",
        "stop_sequence": stop,
        "usage": usage,
    }
    if not parsed.stream:
        yield orjson.dumps(whole)
        return
    begun = whole | {"content": [], "stop_reason": None, "usage": usage | {"output_tokens": 0}}
    yield event({"type": "message_start", "message": begun}, "message_start")
    for index, block in enumerate(whole["content"]):
        for kind, data in _deltas(block):
            yield event({"type": kind, "index": index, **data}, kind)
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": stop}
    yield event({"type": "message_delta", "delta": ended, "usage": usage}, "message_delta")
    yield event({"type": "message_stop"}, "message_stop")


def _deltas(block: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of one block: its start without the content, the content, and its end."""
    empty: dict[str, Any]
    if block["type"] == "tool_use":
        empty, deltas = {"input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
    else:
        names = [name for name in block if name != "type"]  # its text, and the signature of a thought
        empty, deltas = dict.fromkeys(names, ""), [{"type": f"{name}_delta", name: block[name]} for name in names]
    yield "content_block_start", {"content_block": block | empty}
    for delta in deltas:
        yield "content_block_delta", {"delta": delta}
    yield "content_block_stop", {}
