"""
Turns messages into token ids: the prompt once, then each reply. Sampled ids are never encoded again. `History` makes
the context of each turn: all of the past, without thinking, compacted, or as the template renders it. `Transcript`
tells which messages of a request the policy has seen or sampled before.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from mt_grpo.media import SOUND, Part, digest_at_hand, is_medium, is_same, kind_of_part, media_parts, part_text
from mt_grpo.rollout.chat_template import THOUGHTS, ChatTemplate, TemplateError
from mt_grpo.rollout.escaped_text import EncodedMedium, MediaEncoder, SpecialTokens, template_constants
from mt_grpo.trajectory import Message, ToolSchema, Trajectory, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROMPTS_KEPT = 64
_MOST_PATTERNS = 1024
_FIELDS = {"role", "content", "name", "tool_call_id"}  # of a reply that can have a pattern
# Whatever a template escapes, cuts or folds, it does so to something in here.
_HARD = "\"double\" 'single' \\back\\ <b>&amp;</b> {curly} UPPER lower\n\n\ttab Perú 北京 🙂 " + "long " * 400
_CHARACTERS = 8
"""Characters per token of room above which a reply counts as too long; ordinary text has three or four per token."""


class ChatRenderer:
    """
    Renders one model's conversations. Contents are always text, but for added tokens in `tags`, such as a call
    protocol's own: only the template writes special tokens. *Escaped* text tells the two apart; see `SpecialTokens`.

    `end_ids` are all tokens that end a turn: `end_id`, and one of its own for turns with calls. `calls_shown` is how
    many calls of one message the template shows: 0, 1, or 2 for any number. A tokenizer without a template, or with
    one that does not show the model what it is told, is refused: `TemplateError`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: list[ToolSchema] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        tags: tuple[str, ...] = (),
        media: MediaEncoder | None = None,
    ) -> None:
        self._template = ChatTemplate(tokenizer, template_kwargs or {}, calls=bool(tools))
        self.media = media
        self.tokenizer = tokenizer
        self.tools = tools
        source = tokenizer.get_chat_template()
        self.special_tokens = SpecialTokens(tokenizer, source, tags)
        self._escaped_tools = self.special_tokens.escape_all(tools)
        added = tokenizer.added_tokens_decoder
        self.special_ids = {token for token, content in added.items() if content.special}
        self.calls_shown = self._template.calls_shown
        self.end_of_turn = self._template.end_of_turn
        ends = dict.fromkeys((self.end_of_turn, self._template.end_of_calls))
        self.end_ids = tuple(tokenizer.convert_tokens_to_ids(end) for end in ends)
        self.end_id = self.end_ids[0]
        self._past_end_id = tokenizer.convert_tokens_to_ids(self._template.past_end)
        self._text_ids = lru_cache(_PROMPTS_KEPT)(self.encode)
        self._plain_prompt_ids = lru_cache(_PROMPTS_KEPT)(self._encoded_prompt)
        self._suffixes = _SuffixCache(source, self._template.suffix)

    def prompt_ids(self, messages: list[Message]) -> list[int]:
        """Ids of a conversation up to the assistant's first token. A group shares the list, so do not change it."""
        if all(isinstance(value, str) for message in messages for value in message.values()):
            # members of a group have equal messages: known before anything is rendered
            return self._plain_prompt_ids(tuple(tuple(message.items()) for message in messages))
        return self._encoded_prompt(messages)

    def prompt_ids_within(self, messages: list[Message], room: int) -> list[int] | None:
        """As `prompt_ids`; `None` if the messages far exceed `room` tokens: only their start is encoded then."""
        exceed = self._exceed(messages, room, lambda cut: self.encode(self.prompt_text(cut)))
        return None if exceed else self.prompt_ids(messages)

    def _encoded_prompt(self, messages: Sequence[Any]) -> list[int]:
        return self._text_ids(self.prompt_text([dict(message) for message in messages]))

    def prompt_text(self, messages: list[Message]) -> str:
        """The prompt as escaped text. Raises `TemplateError` where the text or an image of a message is not in it."""
        text = self.special_tokens.tidy(self._template.prompt(self.escaped(messages), self._escaped_tools))
        return self._with_images(text, messages)

    def escaped(self, messages: list[Message]) -> list[Message]:
        """Messages with escaped contents, for the template, with the `alt` of what the model is not shown."""
        messages = list(map(self._in_words, messages))
        return [self.special_tokens.escape(self._template.with_arguments(message)) for message in messages]

    def _in_words(self, message: Message) -> Message:
        content = message.get("content")
        if not isinstance(content, list):
            return message
        left = [part for part in content if self._is_left_out(part)]
        if not left:
            return message
        missing = next((part for part in left if "alt" not in part), None)
        if missing is not None and self.media is None:
            shows, what = (
                ("plays a sound", "sounds") if kind_of_part(missing) == SOUND else ("shows an image", "images")
            )
            raise TemplateError(
                f"A message of {message['role']!r} {shows}, and this run gives its model text only: use a model that "
                f"takes {what}, with its processor, and sample with `use_vllm: false`."
            )
        if missing is not None and self.media is not None:
            self.media.encode(missing)  # says why it cannot be shown
        words = [{"type": "text", "text": part_text(part)} if self._is_left_out(part) else part for part in content]
        return {**message, "content": words}

    def _is_left_out(self, part: Any) -> bool:
        """Whether a part shows something that this model is not shown."""
        return kind_of_part(part) > 0 and (self.media is None or not self.media.takes(part))

    def past_message(self, message: Message, ids: list[int]) -> Message:
        """A sampled turn and its ids as an escaped message, in the form in which the template writes it again."""
        past = self._template.past_message(message, self.text(ids))
        return self.special_tokens.escape_sampled(past, ids)

    def shown_text(self, messages: list[Message], header: bool = True) -> str:
        """Renders escaped messages to escaped text. Without `header` the conversation is finished."""
        text = self.special_tokens.tidy(self._template.render(messages, self._escaped_tools, header))
        return self._with_images(text, messages)

    def _with_images(self, text: str, messages: Sequence[Message]) -> str:
        """Rendered text with the images of its messages."""
        if self.media is None:
            return text
        parts = [part for part in media_parts(self._template.arranged(list(messages))) if self.media.takes(part)]
        placed = self.media.place(text, parts)
        if placed is None:
            raise TemplateError(
                f"The chat template does not show the model {len(parts)} images of these messages, as it leaves some "
                "out: use a model whose template shows images of every role that has some."
            )
        return placed

    def reply_ids(
        self,
        replies: list[Message],
        last_id: int,
        calls: Sequence[dict[str, Any]] = (),
        shown: Sequence[Part] = (),
    ) -> list[int]:
        """
        Ids that follow a sampled turn: its end, unless `last_id` is that already, the environment's messages (results
        named after `calls`), and the assistant's header. `shown` has what `shown_parts` found before.
        """
        ids = self._reply_ids(replies, _called(replies, calls), shown)
        ended = ids[0] == last_id or (ids[0] == self._past_end_id and last_id == self.end_id)
        return ids[1:] if ended else ids

    def reply_ids_within(
        self,
        replies: list[Message],
        room: int,
        calls: Sequence[dict[str, Any]] = (),
        shown: Sequence[Part] = (),
    ) -> list[int] | None:
        """As `reply_ids` without a last id; `None` if they far exceed `room` tokens: only a start is encoded then."""
        called = _called(replies, calls)
        exceed = self._exceed(replies, room, lambda cut: self._reply_ids(cut, called))
        return None if exceed else self.reply_ids(replies, -1, calls, shown)

    def shown_parts(self, messages: Sequence[Message]) -> list[Part]:
        """Parts for the images, videos and sounds that messages show the model, for a template to count."""
        parts = media_parts(messages) if self.media is not None else ()
        return [{"type": part["type"]} for part in parts if not self._is_left_out(part)]

    def _reply_ids(self, replies: list[Message], called: tuple[str, ...], shown: Sequence[Part] = ()) -> list[int]:
        escaped, names = self.escaped(replies), self.special_tokens.escape_all(called)
        if shown and self.shown_parts(replies):
            text = self._template.suffix(escaped, names, shown)
        else:
            text = self._suffixes.text(escaped, names)
        return self.encode(self._with_images(self.special_tokens.tidy(text), replies))

    def _exceed(self, messages: list[Message], room: int, encode: Callable[[list[Message]], list[int]]) -> bool:
        """Whether messages have more than twice `room` tokens; encodes no more of them than is needed to know."""
        if any(isinstance(message.get("content"), list) for message in messages):
            return False  # parts are not cut
        longest = max(len(message.get("content") or "") for message in messages)
        size = _CHARACTERS * (room + 100) // len(messages)
        while size < longest:
            # a cut changes tokens beside it only; and what the template does with contents it does with these too
            cut = [{**message, "content": (message.get("content") or "")[:size]} for message in messages]
            if len(encode(cut)) > 2 * room:
                return True
            size *= 2
        return False

    def text(self, ids: list[int]) -> str:
        """The text that the model wrote, with special tokens except the one that ended the turn."""
        return self.decode(ids[:-1] if self._is_ended(ids) else ids)

    def end_of(self, ids: list[int]) -> str:
        """The token that ended a sampled turn; empty where it was cut off."""
        return self.decode(ids[-1:]) if self._is_ended(ids) else ""

    def _is_ended(self, ids: list[int]) -> bool:
        return bool(ids) and ids[-1] in (self.tokenizer.eos_token_id, *self.end_ids)

    def encode(self, text: str) -> list[int]:
        """Ids of escaped text."""
        if self.media is None:
            return self.special_tokens.encode(text)
        ids: list[int] = []
        for section in self.media.sections(text):
            ids += section.tokens if isinstance(section, EncodedMedium) else self.special_tokens.encode(section)
        return ids

    def escaped_text(self, ids: list[int]) -> str:
        """The escaped text of ids: `encode` makes it ids again."""
        if self.media is None:
            return self.special_tokens.decode(ids)
        runs = self.media.runs(ids)
        return "".join(run if isinstance(run, str) else self.special_tokens.decode(run) for run in runs)

    def decode(self, ids: list[int]) -> str:
        """Text of ids, with special tokens and without images."""
        return self.tokenizer.decode([token for token in ids if token >= 0], skip_special_tokens=False)


def _called(replies: list[Message], calls: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Names of the functions that results of tools answer; empty where one is not known."""
    names = [(call.get("id"), call.get("function", call).get("name")) for call in calls]
    by_id = {identifier: name for identifier, name in names if identifier is not None}
    called: list[Any] = []
    for number, reply in enumerate(replies):
        if reply["role"] != "tool":
            break
        in_order = names[number][1] if number < len(names) else None
        called.append(by_id.get(reply.get("tool_call_id")) or reply.get("name") or in_order)
    return tuple(called) if all(isinstance(name, str) for name in called) else ()


class _SuffixCache:
    """
    Renders the environment's replies of a turn, most of them without running the template: the first of a kind are
    rendered, and a longer probe of all that they contain or templates escape. If that comes out unchanged in the same
    surroundings, these are the kind's pattern.
    """

    def __init__(self, template: str, render: Callable[[list[Message], Sequence[str]], str]) -> None:
        constants = template_constants(template)
        self._constants = sorted({""} | {value for kind, value in constants if kind == "string"})
        self._render = render
        self._patterns: dict[tuple, list[str] | None] = {}

    def text(self, replies: list[Message], called: Sequence[str] = ()) -> str:
        """The text that the template writes for replies, letter for letter."""
        kinds = tuple(map(self._kind, replies))
        if None in kinds:
            return self._render(replies, called)
        kind = (tuple(called), *kinds)
        if kind not in self._patterns:
            return self._learn(kind, replies, called)
        pattern = self._patterns[kind]
        return self._render(replies, called) if pattern is None else _fill(pattern, replies)

    def _kind(self, reply: Message) -> tuple | None:
        content = reply.get("content")
        if not isinstance(content, str) or content != content.strip() or reply.keys() - _FIELDS:
            return None
        if content in self._constants:
            return None
        found = [constant for constant in self._constants if constant in content]
        edges = ((constant, content.startswith(constant), content.endswith(constant)) for constant in found)
        return (reply["role"], reply.get("name"), reply.get("tool_call_id"), len(content).bit_length(), *edges)

    def _learn(self, kind: tuple, replies: list[Message], called: Sequence[str]) -> str:
        text = self._render(replies, called)
        if len(self._patterns) < _MOST_PATTERNS:  # names and ids may differ without end
            probes = [
                {**reply, "content": f"{reply['content']}{_HARD}{number}{reply['content']}"}
                for number, reply in enumerate(replies)
            ]
            try:
                pattern = _cut(self._render(probes, called), probes)
            except TemplateError:
                pattern = None
            self._patterns[kind] = pattern if pattern and _fill(pattern, replies) == text else None
        return text


def _cut(text: str, replies: list[Message]) -> list[str] | None:
    """The text before, between and after the contents; `None` if they are not all found in order."""
    pattern = []
    for reply in replies:
        piece, found, text = text.partition(reply["content"])
        if not found:
            return None
        pattern.append(piece)
    return [*pattern, text]


def _fill(pattern: list[str], replies: list[Message]) -> str:
    return pattern[0] + "".join(reply["content"] + piece for reply, piece in zip(replies, pattern[1:], strict=True))


_THINKING = re.compile(r"^.*?</think>\s*", re.DOTALL)


class Context(NamedTuple):
    """The context of a turn that follows another."""

    added: list[int]
    """Ids that were added to what the model saw and sampled before."""
    whole: list[int] | None = None
    """All its ids, where the past was rewritten; `None` where ids were only added."""


class History:
    """
    The context of each turn. `"keep"`: as sampled, so each extends the one before. `"strip_thinking"`: without the
    reasoning of earlier turns. `"compact"`: that of all earlier turns is removed every `compact_every` turns.
    `"template"`: the model's template renders all anew. A rendered history keeps the ids that the model has seen as
    far as their text is the same, so one that changes nothing makes no fork. Where a past turn ends in another token,
    as in gpt-oss, every context has that.
    """

    def __init__(self, renderer: ChatRenderer, policy: str, compact_every: int | None) -> None:
        self._renderer, self._policy = renderer, policy
        self._compact_every = compact_every if policy == "compact" else None
        self._pieces: list[tuple[str, list[int]]] = []  # the context as text, and the ids of each piece
        self._messages: list[Message] = []  # the same as messages, escaped
        self._shown: list[Part] = []  # see `ChatRenderer.shown_parts`

    def fork(self) -> History:
        """A copy for a branch of the conversation; the two change apart."""
        twin = copy.copy(self)
        twin._pieces, twin._messages, twin._shown = list(self._pieces), list(self._messages), list(self._shown)
        return twin

    def begin(self, messages: list[Message], most: int) -> list[int] | None:
        """The first context: the prompt; `None` if it is far longer than `most` tokens."""
        ids = self._renderer.prompt_ids_within(messages, most)
        if ids is None:
            return None
        self._shown = self._renderer.shown_parts(messages)
        if self._policy != "keep":
            self._pieces = [(self._renderer.escaped_text(ids), ids)]
            self._messages = self._renderer.escaped(messages)
        return ids

    def extend(self, trajectory: Trajectory, action: list[int], most: int) -> Context | None:
        """The context after the latest turn and its replies; `None` if these alone are far above `most` tokens."""
        renderer, turn = self._renderer, trajectory.turns[-1]
        seen = turn.context_length + turn.num_tokens if self._policy == "keep" else 0
        calls = turn.message.get("tool_calls") or ()
        suffix = renderer.reply_ids_within(turn.replies, max(0, most - seen), calls, self._shown)
        if suffix is None:
            return None
        self._shown += renderer.shown_parts(turn.replies)
        last, kept_action, whole = action[-1] if action else -1, action, None  # a turn may be empty
        if suffix[0] == last:
            suffix = suffix[1:]
        elif last in renderer.end_ids:  # gpt-oss samples <|return|>, and reads <|end|> in the past
            kept_action, whole = action[:-1], trajectory.tree.path()[:-1] + suffix
        appended = Context(suffix, whole)
        if self._policy == "keep":
            return appended
        self._pieces += [(renderer.escaped_text(ids), ids) for ids in (kept_action, suffix)]
        self._messages += [renderer.past_message(turn.message, action), *renderer.escaped(turn.replies)]
        if self._compact_every is not None and len(trajectory.turns) % self._compact_every:
            return appended
        messages = self._messages
        if self._policy != "template":
            messages = [_strip_thinking(message) for message in messages]
            if messages == self._messages:
                return appended
        text = renderer.shown_text(messages)
        kept, position = 0, 0
        while kept < len(self._pieces) and text.startswith(self._pieces[kept][0], position):
            position += len(self._pieces[kept][0])
            kept += 1
        if kept == len(self._pieces) and position == len(text):
            return appended
        self._pieces[kept:] = [(text[position:], renderer.encode(text[position:]))]
        return Context(suffix, [token for _, ids in self._pieces for token in ids])


def _strip_thinking(message: Message) -> Message:
    """An assistant message without its reasoning; any other message as it is."""
    content: Any = message.get("content")
    if message["role"] != "assistant" or (message.keys().isdisjoint(THOUGHTS) and "</think>" not in (content or "")):
        return message
    stripped = {key: value for key, value in message.items() if key not in THOUGHTS}
    if content:
        stripped["content"] = _THINKING.sub("", content)
    return stripped


class _Noted(NamedTuple):
    """A turn that is not hashed yet."""

    goes_on: bool
    """Whether it follows the turn before."""
    added: list[Message]
    """The messages between the two, or all before it."""
    turn: Turn
    message: Message | None
    """The assistant's message, where the turn is a part of it."""


class Transcript:
    """The messages seen and sampled in a conversation; a request that begins with them continues their ids."""

    def __init__(self) -> None:
        self._before: list[Message] = []  # what the latest turn was sampled after
        self._latest: _Noted | None = None
        self._noted: list[_Noted] = []  # turns that `_ends` lacks: most conversations never need it
        self._ends: dict[int, int] = {}  # hash of all messages up to a turn's own -> index of the turn
        self._end = 0  # the latest hash

    def fork(self) -> Transcript:
        """A copy for a branch of the conversation; the two change apart."""
        twin = copy.copy(self)
        twin._before, twin._noted, twin._ends = list(self._before), list(self._noted), dict(self._ends)
        return twin

    def seen_length(self, messages: Sequence[Message], looks: bool = False) -> int:
        """How many messages came before the latest turn, if `messages` begin with them, else 0; see `is_same`."""
        before = self._before[:]
        return len(before) if _alike(messages[: len(before)], before, looks) else 0

    def known_length(self, messages: Sequence[Message]) -> int:
        """How many messages there are up to the latest turn's own, if `messages` go on from them, else 0."""
        size = len(self._before)
        if self._latest is None or len(messages) <= size or not _alike(messages[:size], self._before):
            return 0
        own = _message(self._latest)
        return size + 1 if messages[size] is own or identity(messages[size]) == identity(own) else 0

    def begun_text(self, messages: list[Message]) -> str | None:
        """The text of the assistant's message after `messages`, where the latest turn wrote it; else `None`."""
        if self._latest is None or not _alike(messages, self._before):
            return None
        return _text(_message(self._latest).get("content"))

    def add(self, messages: list[Message], known: int, turn: Turn, whole: Message | None = None) -> None:
        """Notes a turn."""
        self._latest = _Noted(known > 0, messages[known:], turn, whole)
        self._noted.append(self._latest)
        unchanged = max(known - 1, 0)  # all but the turn's own message
        self._before[unchanged:] = messages[unchanged:]

    def longest(self, messages: Sequence[Message]) -> tuple[int, int]:
        """The turn that ends the longest known beginning of `messages`, and its length; `(-1, 0)` if there is none."""
        for noted in self._noted:
            key = self._end if noted.goes_on else 0
            for message in (*noted.added, _message(noted)):
                key = hash((key, identity(message)))
            self._ends[key], self._end = noted.turn.index, key
        self._noted.clear()
        key, found = 0, (-1, 0)
        for index, message in enumerate(messages):
            key = hash((key, identity(message)))
            if key in self._ends:
                found = self._ends[key], index + 1
        return found


def _alike(one: object, other: object, looks: bool = False, depth: int = 5) -> bool:
    """Whether messages are equal, media by digest, which stand at most `depth` deep."""
    if one is other:
        return True
    if is_medium(one) or is_medium(other):
        return is_medium(one) and is_medium(other) and is_same(one, other, looks)
    if depth and isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_alike(*pair, looks, depth - 1) for pair in zip(one, other, strict=True))
    if depth and isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key], looks, depth - 1) for key in one)
    return bool(one == other)


def _message(noted: _Noted) -> Message:
    return noted.turn.message if noted.message is None else noted.message


def identity(message: Message) -> Hashable:
    """A key equal for equal messages: role, content, calls with parsed arguments; reasoning is left out."""
    calls = [
        (call.get("function", call)["name"], _parsed(call.get("function", call).get("arguments")))
        for call in message.get("tool_calls") or ()
    ]
    return message["role"], _text(message.get("content")), message.get("tool_call_id"), _text(calls or None)


def _parsed(arguments: object) -> Any:
    """Arguments in which numbers are as JavaScript has them: it writes 2.0 as 2, and rounds large integers."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, default=_named)
    try:
        return json.loads(text, parse_int=float, parse_constant=lambda name: None) or {}
    except (ValueError, RecursionError):
        return text


def _text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=_named)


def _named(value: object) -> str:
    return digest_at_hand(value) if is_medium(value) else str(value)
