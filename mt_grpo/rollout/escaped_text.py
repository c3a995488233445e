"""
Escaped text and its ids. Text that spells a special token is escaped, so that it is encoded as text. An image, a video
or a sound is written as its id, and becomes tokens, and what the model takes, through the model's own processor.
"""

from __future__ import annotations

import re
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jinja2 import Environment
from tokenizers import AddedToken, Tokenizer

from mt_grpo.forward.media import BLANK, SILENCE, TYPES, MediumInputs, concat_media_inputs
from mt_grpo.media import IMAGE, SOUND, VIDEO, MediumError, Part, digest, kind_of, kind_of_part
from mt_grpo.sounds import Sound
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
    Escapes contents: `ESCAPE` is put after the first character of each special token in contents before the template
    sees them, and removed when the rendered text is encoded. Special are all added tokens by which a template or a
    model structures text, such as `<think>`, and not those that the vocabulary holds as text.
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


_OF_TEXT = ("input_ids", "attention_mask", *TYPES)  # what a processor returns of a text

_BEGIN, _END = _QUOTE + "2", _QUOTE + "3"
"""Around the id of an image in escaped text. Contents cannot spell them, see `SpecialTokens`."""


_A = {IMAGE: "an image", VIDEO: "a video", SOUND: "a sound"}
_NO_PLACE = {
    kind: f"The model is not {what}, as it, its processor or its chat template has no place for one: show {instead}."
    for kind, what, instead in (
        (VIDEO, "shown videos", "frames as images"),
        (SOUND, "played sounds", "a transcript as text"),
    )
}


def _size(images: Sequence[Any]) -> str:
    return ", ".join(f"{image.width} by {image.height}" for image in images)


def _media_inputs(found: Mapping[str, object]) -> dict[str, Any]:
    """What a processor returns of media, without what it returns of the text around them."""
    return {key: value for key, value in found.items() if key not in _OF_TEXT}


def audio_feature_extractor(processor: Any) -> Any:
    """What a processor makes features of sounds with; `None` if it takes none."""
    inside = vars(processor)
    return inside.get("feature_extractor", inside.get("audio_processor"))


@dataclass(eq=False, slots=True, weakref_slot=True)
class EncodedMedium:
    """An image, a video or a sound as a model sees it."""

    id: int
    tokens: list[int]
    inputs: MediumInputs


class MediaEncoder:
    """
    Encodes the images, videos and sounds of conversations, each once. In escaped text it is what the chat template
    writes for it, followed by its id between two marks.
    """

    def __init__(self, processor: Any, tokens: Mapping[int, int] | None = None) -> None:
        known = tokens or {}
        self._processor = processor
        inside = vars(processor)
        self._tokens: dict[int, int] = {}  # by which the model knows those of a kind
        self._markers: dict[int, str] = {}  # what the template writes for one of a kind
        if "image_processor" in inside:
            marker = self._find_marker("image", (processor.image_token, inside.get("boi_token")))
            if marker is None:
                raise MediumError(
                    "The chat template has no place for an image, so the model cannot be shown one: use a model whose "
                    "template has (`chat_template_path`)."
                )
            self._know(IMAGE, known.get(IMAGE, processor.image_token_id), marker)
            self._check_batches()
        if VIDEO in known and "video_processor" in inside:
            self._know(VIDEO, known[VIDEO], self._find_marker("video", (processor.video_token,)))
        if SOUND in known and audio_feature_extractor(processor) is not None:
            self._know(SOUND, known[SOUND], self._find_marker("audio", (inside.get("audio_token"),)))
        if not self._markers:
            raise MediumError(
                "The chat template has no place for a sound, so the model cannot be played one: use a model whose "
                "template has (`chat_template_path`)."
            )
        self._kinds = {marker: kind for kind, marker in self._markers.items()}
        self._anywhere = re.compile("|".join(map(re.escape, self._kinds)))
        self._place = re.compile(f"(?:{self._anywhere.pattern}){_BEGIN}([0-9]+){_END}")
        self._of_object: dict[tuple[int, str], tuple[weakref.ref[Any], EncodedMedium]] = {}
        self._known: weakref.WeakValueDictionary[str, EncodedMedium] = weakref.WeakValueDictionary()
        self._by_id: weakref.WeakValueDictionary[int, EncodedMedium] = weakref.WeakValueDictionary()

    def _know(self, kind: int, token: int, marker: str | None) -> None:
        if marker is not None:
            self._tokens[kind], self._markers[kind] = token, marker

    def __getitem__(self, image: int) -> EncodedMedium:
        """An image that a conversation shows, by its id."""
        return self._by_id[image]

    def takes(self, part: Part) -> bool:
        """Whether the model is shown what a part shows, or plays."""
        return kind_of_part(part) in self._markers

    def blanks(self) -> dict[int, MediumInputs]:
        """A small image and a short sound that no conversation shows, by their ids, where the model takes such."""
        found = {}
        if IMAGE in self._markers:
            from PIL import Image

            found[BLANK] = self.encode({"type": "image", "image": Image.new("RGB", (32, 32))}).inputs
        if SOUND in self._markers:
            samples = np.zeros(audio_feature_extractor(self._processor).sampling_rate, dtype=np.float32)
            found[SILENCE] = self.encode({"type": "audio", "audio": Sound(samples)}).inputs
        return found

    def _find_marker(self, kind: str, known: Sequence[str | None]) -> str | None:
        words = "A question about it."
        parts = [{"type": kind}, {"type": "text", "text": words}]
        tokenizer = self._processor.tokenizer
        text = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
        # Gemma 3 writes another token than the one that it repeats
        return next((str(each) for each in known if each and text.count(each) == 1 and words in text), None)

    def _check_batches(self) -> None:
        """Holds `concat_media_inputs` of images of several sizes against what the processor makes of them together."""
        from PIL import Image

        shown = [Image.linear_gradient("L").resize(size).convert("RGB") for size in ((96, 64), (64, 160), (128, 128))]
        apart = {
            number: MediumInputs(0, _media_inputs(self._process_images([image]))) for number, image in enumerate(shown)
        }
        together, ours = (
            _media_inputs(self._process_images(shown)),
            concat_media_inputs(list(apart), apart, torch.device("cpu")),
        )
        for name, theirs in together.items():
            if name not in ours or not torch.equal(theirs, ours[name]):
                raise MediumError(
                    f"{type(self._processor).__name__} makes another `{name}` of several images than of each alone, "
                    "so conversations cannot be batched: use a model with another processor, or pass the tokenizer "
                    "alone as `processing_class` to train on text."
                )

    def _process(self, what: str, kinds: Sequence[int], **media: Any) -> Any:
        """What the processor makes of texts that show a medium each."""
        errors = (ValueError, TypeError, KeyError, *([RuntimeError] if SOUND in kinds else []))
        try:
            text = [self._markers[kind] for kind in kinds]
            return self._processor(text=text, return_tensors="pt", add_special_tokens=False, **media)
        except errors as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise MediumError(f"The processor refuses {what}: {reason}.") from error

    def _process_images(self, images: Sequence[object], options: dict[str, Any] | None = None) -> Any:
        given = {"images_kwargs": options} if options else {}
        shown = [[image] for image in images]
        return self._process(
            f"an image of {_size(images)}", [IMAGE] * len(images), images=shown, padding=True, **given
        )

    def encode(self, part: Part) -> EncodedMedium:
        """
        The image, video or sound of a part of a message. What else is in the part of an image or a video is an option
        of the processor for it, such as `max_pixels`; of a video `fps` is how many of its frames there are per second.
        """
        kind = kind_of_part(part)
        options = {name: value for name, value in part.items() if name not in ("type", part["type"], "alt")}
        if kind == SOUND:  # processors of sounds take unknown options without a word
            options = {}
        chosen = repr(sorted(options.items()))
        if kind == VIDEO:  # as long as its first frame
            shown, name = part["video"][0], f"video {[*map(digest, part['video'])]} {chosen}"
            key = id(shown), name
        else:
            shown, name = part[part["type"]], ""
            key = id(shown), chosen
        kept = self._of_object.get(key)
        if kept is not None and kept[0]() is shown:
            return kept[1]
        name = name or f"{digest(shown)} {chosen}"
        encoded = self._known.get(name)
        if encoded is None:
            encoded = self._known[name] = self._encoded(name, part, options)
            self._by_id[encoded.id] = encoded
        self._of_object[key] = weakref.ref(shown, lambda _: self._of_object.pop(key, None)), encoded
        return encoded

    def _encoded(self, name: str, part: Part, options: dict[str, Any]) -> EncodedMedium:
        kind = kind_of_part(part)
        if kind not in self._markers and kind in _NO_PLACE:
            raise MediumError(_NO_PLACE[kind])
        if kind == IMAGE:
            shown, found = _size([part["image"]]), self._process_images([part["image"]], options)
        elif kind == VIDEO:
            shown, found = _size(part["video"][:1]), self._process_video(part["video"], options)
        else:
            shown, found = f"{part['audio'].seconds:.2f} s", self._process_sound(part["audio"])
        # the two lowest bits are of the kind, see `kind_of`
        number = -4 - 4 * (int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "big") >> 3) + kind - IMAGE
        while number in self._by_id:  # another image of these 29 bits
            number = number - 4 if number > -(2**31) + 3 else -4 + kind - IMAGE
        tokens = found["input_ids"][0].tolist()
        size = tokens.count(self._tokens[kind])
        if not size:
            raise MediumError(f"The processor gives {_A[kind]} of {shown} no tokens.")
        tokens = [number if each == self._tokens[kind] else each for each in tokens]
        return EncodedMedium(number, tokens, MediumInputs(size, _media_inputs(found)))

    def _process_video(self, frames: Sequence[object], options: dict[str, Any]) -> Any:
        others = {name: value for name, value in options.items() if name != "fps"}
        metadata = {"total_num_frames": len(frames), "frames_indices": list(range(len(frames)))}
        if "fps" in options:
            metadata["fps"] = options["fps"]
        return self._process(
            f"a video of {len(frames)} frames of {_size(frames[:1])}",
            [VIDEO],
            videos=[list(frames)],
            videos_kwargs={"video_metadata": [metadata], "do_sample_frames": False, **others},
        )

    def _process_sound(self, sound: Sound) -> Any:
        rate = audio_feature_extractor(self._processor).sampling_rate
        if sound.rate not in (None, rate):
            raise MediumError(
                f"A sound has {sound.rate} samples per second, and the model's processor takes {rate}: resample it, "
                f'for example with `dataset.cast_column("audio", datasets.Audio(sampling_rate={rate}))`.'
            )
        options = {"audio_kwargs": {"sampling_rate": rate}}
        return self._process(f"a sound of {sound.seconds:.2f} s", [SOUND], audio=[np.array(sound.samples)], **options)

    # Escaped text

    def place(self, text: str, parts: Sequence[Part]) -> str | None:
        """Rendered text with the ids of its images, in order; `None` if it shows more or fewer."""
        places = list(self._anywhere.finditer(text))
        if [self._kinds[place.group()] for place in places] != [*map(kind_of_part, parts)]:
            return None
        found, begin = "", 0
        for place, part in zip(places, parts, strict=True):
            found += f"{text[begin : place.end()]}{_BEGIN}{-self.encode(part).id}{_END}"
            begin = place.end()
        return found + text[begin:]

    def sections(self, text: str) -> Iterable[str | EncodedMedium]:
        """Escaped text as text and images in turn."""
        begin = 0
        for match in self._place.finditer(text):
            yield text[begin : match.start()]
            yield self[-int(match.group(1))]
            begin = match.end()
        yield text[begin:]

    def runs(self, ids: list[int]) -> Iterable[list[int] | str]:
        """Ids as ids without images, and the escaped text of images, in turn."""
        begin = index = 0
        while index < len(ids):
            if ids[index] >= 0:
                index += 1
                continue
            image = self[ids[index]]
            first = index - image.tokens.index(image.id)
            yield ids[begin:first]
            yield f"{self._markers[kind_of(image.id)]}{_BEGIN}{-image.id}{_END}"
            begin = index = first + len(image.tokens)
        yield ids[begin:]
