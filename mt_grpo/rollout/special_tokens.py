"""Escapes text that spells a special token, so that it is encoded as text."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import Environment
from tokenizers import AddedToken, Tokenizer

from mt_grpo.trajectory import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Rare, and yet printable, so that templates leave them as they are: alchemical symbols. The second quotes both.
ESCAPE = "\U0001f76a"
_QUOTE = "\U0001f76b"
_QUOTED = {ESCAPE: _QUOTE + "0", _QUOTE: _QUOTE + "1"}
_LITERAL = {written: character for character, written in _QUOTED.items()}
_SAMPLED = ("content", "reasoning_content", "thinking", "reasoning")


@lru_cache(maxsize=64)
def template_constants(template: str) -> tuple[tuple[str, str], ...]:
    """The parts of a chat template that are the same in every rendering: type (`string`, `data`, `name`) and text."""
    tokens = Environment().lexer.tokenize(template)
    return tuple((token.type, token.value) for token in tokens if token.type in ("string", "data", "name"))


class SpecialTokens:
    """
    Escapes contents, so that text that spells a special token is encoded as text: `ESCAPE` is put after the first
    character of each special token in contents before the template sees them, and removed when the rendered text is
    encoded, piece by piece between special tokens. Special are all added tokens by which a template or a model
    structures text, such as `<think>`, and not those that the vocabulary holds as text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str, kept: Iterable[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._backend = backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        constants = template_constants(template)
        written = "\0".join(value for kind, value in constants if kind in ("string", "data"))
        self.ids: dict[int, str] = {}
        self._tokens: dict[str, AddedToken] = {}
        others: dict[int, AddedToken] = {}
        for token_id, token in tokenizer.added_tokens_decoder.items():
            text = token.content
            beyond = backend is None or backend.model.token_to_id(text) is None or text in written
            if text not in kept and (token.special or (beyond and text.strip())):
                self.ids[token_id], self._tokens[text] = text, token
            else:
                others[token_id] = token
        self._spelling = re.compile(_any_of(self._tokens) or "(?!)")
        self._unsafe = re.compile("|".join(filter(None, (f"[{ESCAPE}{_QUOTE}]", _any_of(self._tokens, cut=True)))))
        self._names = {value for kind, value in constants if kind in ("name", "string")}
        self._joined = self._completing(value for kind, value in constants if kind in ("string", "data"))
        self._plain = self._slow if backend is None else _PlainText(backend, others)
        normalizer = None if backend is None else backend.normalizer
        self._normalize: Callable[[str], str] | None = None
        if normalizer is not None and any(token.normalized for token in self._tokens.values()):
            self._normalize = normalizer.normalize_str

    def _completing(self, constants: Iterable[str]) -> re.Pattern[str] | None:
        """Beginnings of a content that would complete a special token which a constant of the template begins."""
        rests = {
            token[size:]
            for constant in set(constants)
            for token in self._tokens
            for size in range(1, len(token))
            if constant.endswith(token[:size]) and not constant.endswith(token)
        }
        return re.compile(rf"\s*(?:{_any_of(rests, cut=True)})") if rests else None

    # Escaping

    def escape(self, message: Message) -> Message:
        """A message with its contents escaped; an assistant's text may hold tokens such as `<think>`."""
        escaped = {key: value if key == "role" else self.escape_all(value) for key, value in message.items()}
        if message.get("role") == "assistant":
            words = {key: message[key] for key in _SAMPLED if key in message}
            escaped |= _each(
                words, lambda text: self._escape_unless(lambda m: not self._tokens[m.group()].special, text)
            )
        return escaped

    def escape_all(self, value: object) -> Any:
        """The same for every text in nested lists and dictionaries."""
        return _each(value, lambda text: self._escape_unless(lambda match: False, text))

    def _escape_unless(self, is_token: Callable[[re.Match[str]], bool], text: str) -> str:
        """Escapes what spells a special token, or part of one at an edge of the text, unless it is one."""

        def escaped(match: re.Match[str]) -> str:
            found = match.group()
            if found in _QUOTED:
                return _QUOTED[found]
            if found in self._tokens and is_token(match):
                return found
            return found[0] + ESCAPE + found[1:]

        text = self._unsafe.sub(escaped, text)
        if self._joined and text not in self._names and self._joined.match(text):
            return text[0] + ESCAPE + text[1:]
        return text

    def escape_sampled(self, message: Message, ids: list[int]) -> Message:
        """An assistant's message with what it spelt escaped; special tokens that were sampled stay."""
        sampled = self._tokenizer.decode(ids, skip_special_tokens=False)
        places = self._places(sampled, ids)
        spelt = {match.group() for match in self._spelling.finditer(sampled) if match.start() not in places}
        real = {match.group() for match in self._spelling.finditer(sampled)} - spelt

        def cover(text: str) -> str:
            begin = sampled.find(text)
            if begin < 0:
                return self._escape_unless(lambda match: match.group() in real, text)
            return self._escape_unless(lambda match: begin + match.start() in places, text)

        return {key: value if key == "role" else _each(value, cover) for key, value in message.items()}

    # Escaped text and ids

    def tidy(self, rendered: str) -> str:
        """Rendered text without the escapes that it does not need, since they stand in no special token's text."""
        if ESCAPE not in rendered:
            return rendered
        pieces = rendered.split(ESCAPE)
        escapes, length = set(), 0
        for piece in pieces[:-1]:
            length += len(piece)
            escapes.add(length)
        return self._spelling.sub(
            lambda match: (
                match.group()[0] + ESCAPE + match.group()[1:]
                if escapes.intersection(range(match.start() + 1, match.end()))
                else match.group()
            ),
            "".join(pieces),
        )

    def decode(self, ids: list[int]) -> str:
        """The text of ids, escaped where they spell a special token without being one."""
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        places = self._places(text, ids)
        return self.tidy(self._escape_unless(lambda match: match.start() in places, text))

    def _places(self, text: str, ids: list[int]) -> set[int]:
        """Positions in the text of `ids` at which special tokens begin."""
        begins = [match.start() for match in self._spelling.finditer(text)]
        sampled = sum(token in self.ids for token in ids)
        if len(begins) == sampled:
            return set(begins)
        are_tokens: list[bool] = []
        for run in self._runs(ids):
            if run[0] in self.ids:
                are_tokens += [True] * len(run)
            else:
                words = self._tokenizer.decode(run, skip_special_tokens=False)
                are_tokens += [False] * len(self._spelling.findall(words))
        return {begin for begin, real in zip(begins, are_tokens, strict=False) if real}

    def _runs(self, ids: list[int]) -> Iterator[list[int]]:
        begin = 0
        for end in range(1, len(ids) + 1):
            if end == len(ids) or (ids[end] in self.ids) != (ids[begin] in self.ids):
                yield ids[begin:end]
                begin = end

    def encode(self, text: str) -> list[int]:
        """Ids of escaped text."""
        if ESCAPE not in text and _QUOTE not in text and self._normalize is None:
            return self._encoded(text)
        ids, begin = [], 0
        for start, end in self._sections(text):
            if self._spells(text[start:end]):
                ids += self._encoded(text[begin:start])
                ids += self._as_text(text[start:end], leads=start == 0)
                begin = end
        return ids + self._encoded(text[begin:])

    def _encoded(self, text: str) -> list[int]:
        backend = self._backend
        if backend is None or backend.truncation is not None or backend.padding is not None:
            return self._tokenizer.encode(text, add_special_tokens=False)
        # of the backend's ways this one lets other threads run, and leaves out what nobody asks for
        return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _sections(self, text: str) -> Iterator[tuple[int, int]]:
        """Begin and end of each piece of text between special tokens. Some take the white space around them too."""
        begin = 0
        for match in self._spelling.finditer(text):
            token, start, end = self._tokens[match.group()], match.start(), match.end()
            if token.single_word and re.search(r"\w", text[max(0, start - 1) : start] + text[end : end + 1]):
                continue
            if token.lstrip:
                start = begin + len(text[begin:start].rstrip())
            yield begin, start
            begin = end + (len(text[end:]) - len(text[end:].lstrip()) if token.rstrip else 0)
        yield begin, len(text)

    def _spells(self, section: str) -> bool:
        """Whether the text has an escape, or the tokenizer would find a special token in it."""
        if ESCAPE in section or _QUOTE in section:
            return True
        return self._normalize is not None and self._spelling.search(self._normalize(section)) is not None

    def _as_text(self, section: str, leads: bool) -> list[int]:
        ids = self._plain(unescape(section), leads)
        if self.ids.keys().isdisjoint(ids):
            return ids
        # the vocabulary itself holds the special token's text, so that only its halves are text
        first, *rest = section.split(ESCAPE)
        ids = self._plain(unescape(first), leads)
        for piece in rest:
            ids += self._plain(unescape(piece), False)
        return ids

    def _slow(self, text: str, leads: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)


class _PlainText:
    """A tokenizer without special tokens, and one before all but the first section, for their spaces."""

    def __init__(self, backend: Tokenizer, others: dict[int, AddedToken]) -> None:
        self._lead = ESCAPE + secrets.token_hex(16)
        self._tokenizer = Tokenizer(backend.model)
        if backend.normalizer is not None:
            self._tokenizer.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._tokenizer.pre_tokenizer = backend.pre_tokenizer
        self._tokenizer.add_tokens([AddedToken(self._lead, normalized=False), *others.values()])
        self._ids = {self._tokenizer.token_to_id(token.content): token_id for token_id, token in others.items()}

    def __call__(self, text: str, leads: bool) -> list[int]:
        if leads:
            ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        else:
            ids = self._tokenizer.encode_batch_fast([self._lead + text], add_special_tokens=False)[0].ids[1:]
        return [self._ids.get(token, token) for token in ids]


def unescape(escaped: str) -> str:
    """Escaped text without its escapes."""
    text = escaped.replace(ESCAPE, "")
    return re.sub(f"{_QUOTE}[01]", lambda match: _LITERAL[match.group()], text) if _QUOTE in text else text


def _each(value: object, change: Callable[[str], str]) -> Any:
    """A copy of nested lists and dictionaries in which every text is changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_each(key, change): _each(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_each(item, change) for item in value]
    return value


def _any_of(words: Iterable[str], cut: bool = False) -> str:
    """A pattern for the longest word at a place; with `cut` also for a word that the end of the text cuts off."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return "|".join(re.escape(first) + _rest(node, cut) for first, node in tree.items())


def _rest(node: dict[str, Any], cut: bool) -> str:
    """Factors out the common beginnings of words, so that most places fail at their first character."""
    branches = [re.escape(character) + _rest(below, cut) for character, below in node.items() if character]
    if not branches:
        return ""
    if "" in node:
        return f"(?:{'|'.join(branches)})?"
    if cut:
        branches.append(r"\s*\Z")  # templates trim
    return f"(?:{'|'.join(branches)})"
