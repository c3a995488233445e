"""A model's chat template: what it expects of messages, how it ends a turn, and what it writes around replies."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Sequence
from itertools import product
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError as TemplateFailure

from mt_grpo.errors import UserError
from mt_grpo.media import Part
from mt_grpo.rollout.escaped_text import template_constants, unescape
from mt_grpo.trajectory import Message, ToolSchema

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# An assistant turn to hang replies on, and what its last call is given. Only what is written after it is used.
_ASSISTANT = "An assistant turn."
_ARGUMENT = "an_argument_it_gives"
_CALLED = "a_tool_it_calls"
_ANOTHER = "another_one"
_ASKED = "A question to it."
_THOUGHT = "A thought of it."
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Keys under which templates take an assistant's thinking."""
_MOST_ROLES = 1024
# What the code of a template raises: by its own word, and where it is given what it does not expect.
_REFUSALS = (TemplateFailure, TypeError, ValueError, LookupError, AttributeError)


class TemplateError(UserError, ValueError):
    """The tokenizer's chat template cannot render the conversation. The message is one sentence fit for the user."""


class _ThoughtFrame(NamedTuple):
    """What stands around an assistant's thinking, and the key under which the template takes it."""

    field: str
    opening: str
    """Empty where the header has it."""
    closing: str

    def read(self, text: str) -> dict[str, str] | None:
        """Thinking and content of a text that is framed like this; `None` for another."""
        if not text.lstrip().startswith(self.opening):
            return None
        thought, closed, content = text.lstrip()[len(self.opening) :].rpartition(self.closing)
        if not closed:  # all of it is the thought, if it is one
            return {self.field: content.strip(), "content": ""} if self.opening else None
        if self.opening:  # of several thoughts the last: templates take one
            thought = thought.rpartition(self.opening)[2]
        return {self.field: thought.strip(), "content": content.lstrip()}


class ChatTemplate:
    """Renders messages through a tokenizer's chat template, in the form that probes show it to expect."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, variables: dict[str, Any], calls: bool) -> None:
        if tokenizer.chat_template is None:
            raise TemplateError("The tokenizer has no chat template: use a chat model, or set `chat_template_path`.")
        self._tokenizer, self._variables, self._calls = tokenizer, variables, calls
        source = tokenizer.get_chat_template()
        constants = [value for kind, value in template_constants(source) if kind == "string"]
        self._own_words = {word for constant in constants for word in _words(constant)}
        added = tokenizer.added_tokens_decoder.values()
        self._special = _any_token(token.content for token in added if token.special)
        self._added = _any_token(token.content for token in added if token.content.strip())
        self._proven: set[tuple[str, ...]] = set()
        self._parts = self._takes_none = self._json_arguments = self._many_calls = False
        self._takes_parts = True
        self._content = _ASSISTANT  # of a turn with calls
        self._anchor = _ASSISTANT  # the last that it shows of that
        self.calls_shown = 2
        self._header = ""
        self._find_form()
        self._find_ends()
        self._find_frame()
        self.end_of_calls = self.end_of_turn
        self._find_calls(required=calls)

    # Rendering

    def render(self, messages: list[Message], tools: list[ToolSchema] | None = None, header: bool = True) -> str:
        """A conversation's text, up to the assistant's first token if `header`; else `TemplateError`."""
        try:
            text = self._render(messages, tools, header)
        except _REFUSALS as error:
            raise TemplateError(f"The chat template refuses these messages: {_reason(error)}.") from error
        if header and not text.endswith(self._header) and text.rstrip().endswith((self.end_of_turn, self.past_end)):
            # Gemma 4 begins no turn behind results with words beside their calls, which end the turn there
            text += self._header
        return text

    def prompt(self, messages: list[Message], tools: list[ToolSchema] | None = None) -> str:
        """As `render`; raises `TemplateError` also where the text of a message is not in the result."""
        text = self.render(messages, tools)
        for message in messages:
            if message["role"] != "assistant":  # the thinking of the past may be left out
                self._require(message, text, 0, "the prompt")
        return text

    def past_message(self, message: Message, text: str) -> Message:
        """A sampled turn in the form in which the template writes it again."""
        if message.get("tool_calls") and not self.calls_shown:  # so the text shows them
            message = {"role": "assistant", "content": text}
        if message.keys() != {"role", "content"} or message["content"] != text:
            return message
        if self._frame is not None and (read := self._frame.read(text)) is not None:
            return {"role": "assistant", **read}
        return {"role": "assistant", "content": text.removeprefix(self._lead)}

    def suffix(self, replies: list[Message], called: Sequence[str] = (), shown: Sequence[Part] = ()) -> str:
        """What follows an assistant's turn: its end, the replies, and the assistant's next header."""
        roles = tuple(reply["role"] for reply in replies)
        if roles not in self._proven:
            # words that stand nowhere else: a result such as "5" may be found in what is written around it
            probes = [{**reply, "content": f"What reply {number} says."} for number, reply in enumerate(replies)]
            self._shown(probes, called)
            if len(self._proven) < _MOST_ROLES:
                self._proven.add(roles)
        return self._shown(replies, called, shown)

    def _shown(self, replies: list[Message], called: Sequence[str], shown: Sequence[Part] = ()) -> str:
        by_tool = replies[0]["role"] == "tool"
        turn = self._calling(replies, called) if by_tool else {"role": "assistant", "content": _ASSISTANT}
        asked = [*shown, {"type": "text", "text": _ASKED}] if shown else _ASKED
        text = self.render([{"role": "user", "content": asked}, turn, *replies])
        end = self.end_of_calls if by_tool else self.past_end
        said = text.find(self._anchor if by_tool else _ASSISTANT)
        begin = text.find(end, max(said, 0))
        if begin < 0:
            raise TemplateError(f"The chat template does not end a turn before a reply of {replies[0]['role']!r}.")
        position = begin
        for reply in replies:
            position = self._require(reply, text, position, "the reply")
        return text[begin:]

    def _calling(self, replies: list[Message], called: Sequence[str]) -> Message:
        """The assistant's turn before results: a call for each result, or one if the template takes no more."""
        calls = []
        for number, reply in enumerate(replies):
            if reply["role"] != "tool":
                break
            name = called[number] if number < len(called) else reply.get("name") or _CALLED
            call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": {}}}
            if reply.get("tool_call_id") is not None:
                call["id"] = reply["tool_call_id"]
            calls.append(call)
        if not self._many_calls:
            del calls[1:]
        calls[-1]["function"]["arguments"] = {"argument": _ARGUMENT}
        return {"role": "assistant", "content": self._content, "tool_calls": calls}

    def _require(self, message: Message, text: str, position: int, what: str) -> int:
        """Where a message's text ends in a rendered text, looked for from `position` on; refuses a text without it."""
        for content in _texts(message.get("content")):
            found = self._find(content.strip(), text, position)
            if found is None:
                raise _cannot(
                    f"does not show the model {what} of role {message['role']!r}: {unescape(content).strip()[:60]!r} "
                    "is not in what it renders"
                )
            position = found if what == "the reply" else 0
        return position

    def _find(self, content: str, text: str, position: int) -> int | None:
        """The end of a content in a rendered text, as it is or as templates escape it; `None` if it is not there."""
        place = text.find(content, position)
        if place >= 0:
            return place + len(content)
        for ascii_only in (False, True):
            escaped = json.dumps(content, ensure_ascii=ascii_only)[1:-1]
            if (place := text.find(escaped, position)) >= 0:
                return place + len(escaped)
        if (place := text.find(html.escape(content), position)) >= 0:
            return place + len(html.escape(content))
        # a template may change a content: take switches such as /no_think out of it, trim lines, change case
        lowered = text.lower()
        for word in _words(content):
            if word not in self._own_words:
                if (place := lowered.find(word.lower(), position)) < 0:
                    return None
                position = place + len(word)
        return position

    def _render(self, messages: list[Message], tools: list[ToolSchema] | None = None, header: bool = True) -> str:
        return self._tokenizer.apply_chat_template(
            [self._fitted(message) for message in self.arranged(messages)],
            tools=tools,
            add_generation_prompt=header,
            tokenize=False,
            **self._variables,
        )

    def arranged(self, messages: list[Message]) -> list[Message]:
        """Messages in which the template shows every call, each followed by its result."""
        if not self._calls or self.calls_shown > 1 or not any(message.get("tool_calls") for message in messages):
            return messages
        arranged: list[Message] = []
        index = 0
        while index < len(messages):
            message, index = messages[index], index + 1
            calls = message.get("tool_calls") or ()
            if calls and not self.calls_shown:
                arranged.append(_with_calls_as_text(message))
            elif len(calls) > 1:
                begin = index
                while index < len(messages) and messages[index]["role"] == "tool":
                    index += 1
                arranged += _one_call_each(message, messages[begin:index])
            else:
                arranged.append(message)
        return arranged

    def _fitted(self, message: Message) -> Message:
        """A message in the form that the template expects."""
        content, calls = message.get("content"), message.get("tool_calls")
        if content is None and not (self._takes_none and message["role"] == "assistant"):
            content = ""
        if isinstance(content, list) and not self._takes_parts:
            texts = list(_texts(content))
            if len(texts) < len(content):
                raise ValueError(f"a message of role {message['role']!r} has a part that is no text")
            content = "\n".join(texts)  # as vLLM joins them
        if isinstance(content, str) and self._parts:
            content = [{"type": "text", "text": content}]
        fitted = message if content is message.get("content") else {**message, "content": content}
        if self._json_arguments and calls:
            fitted = {**fitted, "tool_calls": [_with_json_arguments(call) for call in calls]}
        return fitted

    def with_arguments(self, message: Message) -> Message:
        """A message whose calls have their arguments as JSON objects, where the template takes objects."""
        if self._json_arguments or not message.get("tool_calls"):
            return message
        return {**message, "tool_calls": [_with_parsed_arguments(call) for call in message["tool_calls"]]}

    # Finding out what the template expects

    def _find_form(self) -> None:
        """Whether contents are text or lists of parts."""
        messages = [{"role": "user", "content": _ASKED}, {"role": "assistant", "content": _ASSISTANT}]
        refusal: Exception | None = None
        for self._parts in (False, True):
            try:
                text = self._render(messages, header=False)
            except _REFUSALS as error:
                refusal = refusal or error
                continue
            if _ASKED in text and _ASSISTANT in text:
                two = [{"type": "text", "text": text} for text in (_ASKED, _ASSISTANT)]
                self._takes_parts = self._takes([{"role": "user", "content": two}], _ASKED, _ASSISTANT)
                return
        if refusal is not None:
            raise _cannot(f"refuses a question and an answer: {_reason(refusal)}") from refusal
        which = "assistant" if _ASSISTANT not in text else "user"
        raise _cannot(f"does not show {which} messages, so it holds no conversation")

    def _find_ends(self) -> None:
        """The special tokens that the template writes after an assistant's words, at the end and in the past."""
        messages = [{"role": "user", "content": _ASKED}, {"role": "assistant", "content": _ASSISTANT}]
        text = self._render(messages, header=False)  # the header of the next turn is not the end of this one
        own = self._special.search(text, text.index(_ASSISTANT))
        reply = "What a reply says."
        try:
            text = self._render([*messages, {"role": "user", "content": reply}])
        except _REFUSALS as error:
            raise _cannot(f"refuses a reply of the user's to an answer: {_reason(error)}") from error
        said, replied = text.find(_ASSISTANT), text.find(reply)
        if not 0 <= said < replied:
            raise _cannot("does not show the model a reply to its answer")
        between = text[said:replied]
        past = self._special.search(between)
        self._ends_itself = own is not None
        if past is None:
            raise _cannot("ends assistant turns without a special token, which is unsupported")
        # a template that writes no end leaves it to the token with which the next message begins
        self.end_of_turn = own.group() if own else past.group()
        self.past_end = self.end_of_turn if self.end_of_turn in between else past.group()

    def _find_frame(self) -> None:
        """
        What a model writes itself of what the template writes before an assistant's words, and around thinking. It is
        taken off a sampled text where the template would else write it twice, or refuse it.
        """
        asked, answer = {"role": "user", "content": _ASKED}, {"role": "assistant", "content": _ASSISTANT}
        begun, unbegun = self._render([asked]), self._render([asked], header=False)
        self._header = begun[len(unbegun) :] if begun.startswith(unbegun) else ""
        before, _, _ = self._render([asked, answer], header=False).partition(_ASSISTANT)
        lead = before[len(begun) :] if before.startswith(begun) else ""
        self._lead = lead if lead.isspace() or self._special.search(lead) else ""
        self._frame: _ThoughtFrame | None = None
        for field in THOUGHTS:
            try:
                text = self._render([asked, {**answer, field: _THOUGHT}], header=False)
            except _REFUSALS:
                continue
            before, _, rest = text.partition(_THOUGHT)
            between, said, _ = rest.partition(_ASSISTANT)
            if not said or not between.strip():
                continue
            if before.rstrip() == begun.rstrip():
                self._frame = _ThoughtFrame(field, "", between.strip())
                return
            if before.startswith(begun) and self._special.search(before, len(begun)):
                self._frame = _ThoughtFrame(field, before[len(begun) :].strip(), between.strip())
                return

    def _frame_beside(self, asked: Message, turn: Message) -> _ThoughtFrame | None:
        """The same where the template shows thinking beside calls only, as Gemma 4 does."""
        try:
            begun, without = self._render([asked]), self._render([asked, turn], header=False)
            shown = {field: self._render([asked, {**turn, field: _THOUGHT}], header=False) for field in THOUGHTS}
        except _REFUSALS:  # it takes no calls without words
            return None
        for field, text in shown.items():
            before, _, rest = text.partition(_THOUGHT)
            between = rest[: len(rest) - len(commonprefix([rest[::-1], without[::-1]]))]
            if rest and before.startswith(begun) and self._special.search(between):
                return _ThoughtFrame(field, before[len(begun) :].strip(), between.strip())
        return None

    def _find_calls(self, required: bool) -> None:
        """How the template takes calls, how many it shows, and how it ends a turn with calls."""
        result = {"role": "tool", "name": _CALLED, "content": "What a tool says.", "tool_call_id": "call_0"}
        problem = "it does not show the model what a tool answers"
        for shown, self._content, self._json_arguments in product((1, 0), (_ASSISTANT, ""), (False, True)):
            turn = self._calling([result], [])
            asked = [{"role": "user", "content": _ASKED}, turn]
            try:
                finished, text = self._render(asked, header=False), self._render([*asked, result])
            except _REFUSALS as error:
                problem = f"it refuses a call and its result ({_reason(error)})"
                continue
            self._anchor = max((_ASSISTANT, _ARGUMENT), key=text.find)
            said, replied = text.find(self._anchor), text.find(result["content"])
            if not 0 <= said < replied:  # in some, what is said beside calls stands behind their results
                continue
            if shown and not (_CALLED in text[:replied] and _ARGUMENT in text[:replied]):
                continue
            end = self._end_of_calls(finished, text[:replied], said)
            if end is not None:
                self.end_of_calls = end
                break
            problem = "it ends a turn with calls without a token of its own"
        else:
            self._content, self._json_arguments = _ASSISTANT, False
            self.calls_shown = 0
            if required:
                raise TemplateError(
                    f"The chat template cannot hold tool calls: {problem}. Choose `call_protocol: tags`, or a model "
                    "whose template shows results of tools (`chat_template_path`)."
                )
            return
        self._takes_none = True
        self._takes_none = self._takes([asked[0], {**turn, "content": None}, result])
        self._many_calls = True
        results = [result, {**result, "content": "What another says.", "tool_call_id": "call_1"}]
        two = [asked[0], self._calling(results, [_CALLED, _ANOTHER]), *results]
        self._many_calls = self._takes(two)
        if self._frame is None:
            self._frame = self._frame_beside(asked[0], {**turn, "content": ""})
        self.calls_shown = 2 if shown and self._takes(two, _CALLED, _ANOTHER) else shown

    def _end_of_calls(self, finished: str, text: str, said: int) -> str | None:
        """The token that ends a turn with calls, from the rendered turn and the text up to its result."""
        if self.end_of_turn in text[said:]:
            return self.end_of_turn
        common = len(commonprefix([finished, text]))
        if self._ends_itself:
            found = [match.group() for match in self._added.finditer(text, said, common)]
            return found[-1] if found else None
        begun = self._special.search(text, common)
        return begun.group() if begun else None

    def _takes(self, messages: list[Message], *shown: str) -> bool:
        """Whether the template renders messages with the text `shown`, and without Python values in place of text."""
        try:
            text = self._render(messages)
        except _REFUSALS:
            return False
        return "None" not in text and "'text'" not in text and all(words in text for words in shown)


def _with_calls_as_text(message: Message) -> Message:
    """An assistant's message with its calls in its content, in the form that most models write."""
    calls = []
    for call in message["tool_calls"]:
        parsed = _with_parsed_arguments(call)
        function = parsed.get("function", parsed)
        written = {"name": function.get("name"), "arguments": function.get("arguments") or {}}
        calls.append(f"<tool_call>\n{json.dumps(written, ensure_ascii=False)}\n</tool_call>")
    said = "\n".join(_texts(message.get("content")))
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join([said, *calls] if said else calls)}


def _one_call_each(message: Message, results: list[Message]) -> list[Message]:
    """A message with several calls, and its results, as messages with one call each."""
    calls = message["tool_calls"]
    ids = [call.get("id") for call in calls]
    answers: list[list[Message]] = [[] for _ in calls]
    for number, result in enumerate(results):
        answered = result.get("tool_call_id")
        known = answered is not None and answered in ids
        answers[ids.index(answered) if known else min(number, len(calls) - 1)].append(result)
    names = [call.get("function", call).get("name") for call in calls]
    arranged: list[Message] = []
    held: list[Message] = []
    for number, call in enumerate(calls):
        first = message if number == 0 else {"role": "assistant", "content": ""}
        arranged.append({**first, "tool_calls": [call]})
        held += answers[number]
        if names[number : number + 2] != [names[number]] * 2:  # the next call is of another function
            arranged, held = arranged + held, []
    return arranged


def _with_json_arguments(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call.get("function", call).get("arguments")
    return call if isinstance(arguments, str) else _given(call, json.dumps(arguments or {}, ensure_ascii=False))


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    try:
        arguments = json.loads(call.get("function", call)["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):  # none, an object already, or no JSON
        return call
    return _given(call, arguments) if isinstance(arguments, dict) else call


def _given(call: dict[str, Any], arguments: object) -> dict[str, Any]:
    function = {**call.get("function", call), "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _texts(content: object) -> Iterator[str]:
    """The texts of a content: itself, or those of its parts."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield text


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _any_token(contents: Iterator[str]) -> re.Pattern[str]:
    longest_first = sorted(contents, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _cannot(fault: str) -> TemplateError:
    return TemplateError(
        f"The chat template {fault}. Use a chat model whose template can, or name another template by "
        "`chat_template_path`."
    )


def _reason(error: Exception) -> str:
    """A template's error message, in one line without its full stop."""
    return " ".join(str(error).split()).rstrip(".!") or type(error).__name__
