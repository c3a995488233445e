"""Conversations as messages that a chat template takes, so that rendering them gives what the model saw."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from mt_grpo.runlog.conversation import token_tree, words

Message = dict[str, Any]


@dataclass(frozen=True)
class Said:
    """
    What was said on one way through a conversation. One that goes straight on has one such way; where an agent began
    anew, rewrote the past or asked a sub-agent, each way ends with a turn that nothing follows.
    """

    messages: list[Message]
    prompt: int
    tools: list[dict[str, Any]] | None
    turns: list[int]


def parents(turns: list[dict[str, Any]]) -> list[int]:
    """For each turn of a record the turn that its context goes on from; -1 for none."""
    follows = [turn.get("follows") for turn in turns]
    return [index - 1 if after is None or after >= index else after for index, after in enumerate(follows)]


def added(record: dict[str, Any], index: int) -> list[Message]:
    """The messages that turn `index` was given after the message of the turn that it goes on from."""
    turn = record["turns"][index]
    given = turn.get("given") or []
    if turn.get("follows") is not None:
        return given
    return [*(record["turns"][index - 1]["replies"] if index else record["prompt"]), *given]


def ways(record: dict[str, Any], texts: list[str] | None = None) -> Iterator[Said]:
    """Each way through a conversation, in the order of their last turns; none where the model said nothing."""
    turns, before = record["turns"], parents(record["turns"])
    for leaf in sorted(set(range(len(turns))) - set(before)):
        way = [leaf]
        while before[way[-1]] >= 0:
            way.append(before[way[-1]])
        way.reverse()
        messages = list(map(as_template_takes, added(record, way[0])))
        prompt = len(messages)
        for index in way:
            said = turns[index]["message"]
            if texts is not None and said.get("tool_calls"):
                said = {"role": "assistant", "content": texts[index]}
            for message in (*(added(record, index) if index != way[0] else ()), said):
                _add(messages, as_template_takes(message))
        tools = turns[leaf].get("tools")
        shown = record.get("tools") if tools is None else tools
        yield Said(messages, min(prompt, len(messages) - 1), shown or None, way)


def as_template_takes(message: Message) -> Message:
    """A message with text for a content that is null, and calls whose arguments are objects."""
    taken = {name: value for name, value in message.items() if value is not None}
    taken.setdefault("content", "")
    if taken.get("tool_calls"):
        taken["tool_calls"] = [_with_object(call) for call in taken["tool_calls"]]
    else:
        taken.pop("tool_calls", None)
    return taken


def _with_object(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    function = call["function"] if isinstance(call.get("function"), dict) else call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments)
        except (ValueError, RecursionError):
            return call
        function = {**function, "arguments": read} if isinstance(read, dict) else function
    return {"type": "function", **call, "function": function} if function is not call.get("function") else call


def _add(messages: list[Message], message: Message) -> None:
    """Adds a message, or what the model went on writing (`continue_last`) to its own before."""
    if messages and message["role"] == messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        messages[-1] = {**messages[-1], **message, "content": words(messages[-1]) + words(message)}
    else:
        messages.append(message)


def turn_texts(rollout: dict[str, Any], tokenizer: Tokenizer) -> list[str]:
    """What the model wrote in each turn, without the special token that ended it."""
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    actions = token_tree(rollout).actions()
    return [
        tokenizer.decode(ids[:-1] if ids and ids[-1] in special else ids, skip_special_tokens=False) for ids in actions
    ]
