"""
Images, videos and sounds in messages. A content may be a list of parts: `{"type": "image", "image": ...}` shows an
image of Pillow's, `{"type": "video", "video": [...]}` the list of a video's frames, and `{"type": "audio", "audio":
...}` plays a `Sound`. A file is bounded and of an allowed format before it is opened, and decoded only by `decode`.
"""

from __future__ import annotations

import copyreg
import io
import os
import struct
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextvars import ContextVar
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from mt_grpo import sounds
from mt_grpo.sounds import IN_CONVERSATION, IN_MESSAGE, MediumError, Sound, digest_of, file_name, file_of

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from PIL.ImageFile import ImageFile

Medium: TypeAlias = "Picture | Sound"
Part = dict[str, Any]
"""A part of a message's content."""

IMAGE, VIDEO, SOUND = 1, 2, 3
"""What a token or a part is of, as transformers counts them in `mm_token_type_ids`; 0 is text."""

_KIND_OF_TYPE = {
    **dict.fromkeys(("image", "image_url", "input_image"), IMAGE),
    "video": VIDEO,
    **dict.fromkeys(sounds.TYPES, SOUND),
}
"""By the type of a part: those of chat templates, of OpenAI's two interfaces, and of vLLM's."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Image files that are opened: those of others start programs (EPS), or are read by little tested code."""

IN_TEXT, SOUND_IN_TEXT = "[image]", "[sound]"
"""Placeholders for an image or a video, and for a sound, in text."""


def kind_of(token: int) -> int:
    """The kind of a token: 0 for text; ids of media are below 0, and their two lowest bits say which."""
    return 0 if token >= 0 else IMAGE + (token & 3)


def token_text(token: int) -> str:
    """The placeholder for a token of a medium in text."""
    return SOUND_IN_TEXT if kind_of(token) == SOUND else IN_TEXT


def decoded(tokens: list[int], tokenizer: Any) -> str:
    """The text of tokens, in which an image or a sound is a word."""
    runs = [(token, list(run)) for token, run in groupby(tokens, lambda token: min(token, 0))]
    return "".join(
        token_text(image) if image else tokenizer.decode(run, skip_special_tokens=False) for image, run in runs
    )


def kind_of_part(part: object) -> int:
    """The kind of a content part: `IMAGE`, `VIDEO`, `SOUND`, or 0 for text and everything else."""
    kind = part.get("type") if isinstance(part, dict) else None
    return _KIND_OF_TYPE.get(kind, 0) if isinstance(kind, str) else 0


def is_image(value: object) -> TypeGuard[Picture]:
    """Whether a value is a Pillow image; False if Pillow was never imported."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def is_medium(value: object) -> TypeGuard[Medium]:
    """Whether a value is a Pillow image or a `Sound`; a run writes each to its own file."""
    return is_image(value) or isinstance(value, Sound)


def is_read(part: Part) -> bool:
    """Whether a media part is in the form that `read_parts` returns."""
    shown = part.get(part["type"])
    if part["type"] == "audio":
        return isinstance(shown, Sound) and "seconds" in part
    frames = shown if part["type"] == "video" else [shown] if part["type"] == "image" else None
    return (
        isinstance(frames, list) and bool(frames) and all(is_image(each) and not _is_refused(each) for each in frames)
    )


def media_parts(messages: Iterable[object]) -> Iterator[Part]:
    """The image, video and sound parts of messages, in order."""
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            yield from filter(kind_of_part, content)


def read_parts(content: list[Any], of_row: bool = False, known: Files | None = None) -> list[Any]:
    """
    The parts of a content in the form that chat templates take: images are `{"type": "image", "image": ...}`, with an
    image of Pillow's, and sounds as `sounds.read_part` has them; and no part has a key without a value, as the rows of
    a `datasets.Dataset` have them. Files are opened and not decoded, see `decode`.
    """
    IN_MESSAGE.check([0 for part in content for _ in _media_in(part)])  # before the first is opened
    read = [_read_part(part, of_row, known) for part in content]
    IN_MESSAGE.check([_size_of(medium) for part in read for medium in _media_in(part)])
    return read


def _media_in(part: Any) -> list[Any]:
    """The media in a part: one image or sound, or the frames of a video."""
    if is_medium(part):
        return [part]
    if not kind_of_part(part):
        return []
    shown = part.get(part["type"])
    return list(shown) if part["type"] == "video" and isinstance(shown, (list, tuple)) else [shown]


def read_messages(messages: Sequence[Any], of_row: bool = False, known: Files | None = None) -> Sequence[Any]:
    """The messages with their contents as `read_parts` has them; they themselves where all are read."""
    if not any(map(_is_unread, messages)):
        return messages
    return [
        {**message, "content": read_parts(message["content"], of_row, known)} if _is_unread(message) else message
        for message in messages
    ]


def _is_unread(message: object) -> bool:
    """Whether a message has parts that are not in the form that templates take."""
    content = message.get("content") if isinstance(message, dict) else None
    return isinstance(content, list) and any(map(_is_unread_part, content))


def _is_unread_part(part: object) -> bool:
    if not isinstance(part, dict):
        return is_medium(part)
    return any(value is None for value in part.values()) or (kind_of_part(part) > 0 and not is_read(part))


def snapshot_parts(content: list[Any]) -> list[Any]:
    """The parts of a content with copies of images, on which a tool or an environment may draw turn after turn."""
    return [
        {**part, **{key: _snapshot(part[key]) for key in ("image", "video") if key in part}}
        if isinstance(part, dict)
        else _snapshot(part)
        for part in content
    ]


def _snapshot(value: object) -> Any:
    if isinstance(value, (list, tuple)):
        return [*map(_snapshot, value)]
    if not is_image(value) or _own.get(id(value)) is value or _is_refused(value):
        return value
    if _is_lazy(value):
        return _reopened(value)
    copied = value.copy()
    _own[id(copied)] = copied
    return copied


def _reopened(image: ImageFile) -> Picture:
    if image.fp is None or image.fp.closed:
        return image  # `decode` says that its file was closed
    place = image.fp.tell()  # some formats are decoded from where they were left
    image.fp.seek(0)
    copied = _open(image.fp.read(), "An image")
    image.fp.seek(place)
    _own[id(copied)] = copied
    return copied


def media_of(parts: Iterable[Part]) -> list[Medium]:
    """The images, video frames and sounds in read parts, in order."""
    return [medium for part in parts for medium in _media_in(part)]


def _size_of(medium: Medium) -> int:
    """Number of pixels or samples, from the header if the file is not decoded."""
    return medium.length if isinstance(medium, Sound) else medium.width * medium.height


def _read_part(part: object, of_row: bool, known: Files | None) -> Any:
    if is_medium(part):
        part = {"type": "image", "image": part} if is_image(part) else {"type": "audio", "audio": part}
    if not isinstance(part, dict):
        return part
    part = {key: value for key, value in part.items() if value is not None}
    if part.get("type") == "video_url":
        raise MediumError(
            "A message shows a part of type 'video_url', and rollouts hold text, images, videos and sounds: show a "
            "video as the list of its frames."
        )
    kind = kind_of_part(part)
    if kind == SOUND:
        return part if is_read(part) else sounds.read_part(part, of_row)
    if kind == VIDEO:
        _check_options(part, part.get("video"), of_row)
        return {**part, "video": _read_frames(part.get("video"), of_row, known)}
    if kind != IMAGE:
        return part
    shown = part.get("image") if part["type"] == "image" else part.get("image_url", part.get("image"))
    if isinstance(shown, dict) and "url" in shown:
        shown = shown["url"]
    if shown is None:
        raise MediumError(
            "A message has a place for an image and no image: give as many images as places in the row's column "
            "`images`, or an image in the part itself."
        )
    rest = {
        key: value for key, value in part.items() if _KIND_OF_TYPE.get(key) != IMAGE and key not in ("type", "detail")
    }
    _check_options(rest, [shown], of_row)
    return {"type": "image", "image": read_image(shown, of_row, known), **rest}


def _check_options(part: Part, shown: object, of_row: bool) -> None:
    """Refuses options for the processor, which may enlarge an image to any size, where images come as text."""
    if of_row or not (isinstance(shown, (list, tuple)) and any(isinstance(each, str) for each in shown)):
        return
    for name in part.keys() - {"type", "video", "fps", "alt"}:
        raise MediumError(
            f"A part whose image is text has {name!r} beside it, which would go to the processor: give the image as "
            "bytes, or leave that out."
        )


def _read_frames(frames: object, of_row: bool, known: Files | None) -> list[Picture]:
    if not isinstance(frames, (list, tuple)) or not frames:
        given = repr(frames) if isinstance(frames, str) and len(frames) < 80 else f"a value of {type(frames).__name__}"
        raise MediumError(
            f"Give a video as a list of images; got {given}: decode it first, and give some of its frames (`fps` says "
            "how many there are per second)."
        )
    return [read_image(frame, of_row, known) for frame in frames]


def has_media(value: object) -> bool:
    """Whether what a tool returned is an image or a sound, or a list of parts and texts with one."""
    if not isinstance(value, list):
        return is_medium(value)
    parts = all(
        is_medium(part) or isinstance(part, str) or (isinstance(part, dict) and "type" in part) for part in value
    )
    return parts and any(is_medium(part) or kind_of_part(part) for part in value)


def returned_parts(value: object) -> list[object]:
    """The parts of what has media, with its texts as parts."""
    parts = value if isinstance(value, list) else [value]
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def part_text(part: Any) -> str:
    """The text of a part of a content; of an image, a video or a sound its `alt`, or what it is."""
    kind = kind_of_part(part)
    if not kind:
        return str(part.get("text") or "") if isinstance(part, dict) else str(part)
    seconds = part.get("seconds")
    if kind == SOUND and isinstance(seconds, float):
        return str(part.get("alt") or f"[sound of {seconds:.1f} s]")
    return str(part.get("alt") or (SOUND_IN_TEXT if kind == SOUND else IN_TEXT))


Files: TypeAlias = "MutableMapping[str, Picture]"
"""Images that were opened, by digests of their files."""

MODEL_TAKES: ContextVar[Callable[[Part], bool]] = ContextVar("whether the model is shown a part")
"""Of the conversation that this code runs in."""


class _Opened:
    """What is known of an image that was opened or decoded here."""

    def __init__(self, image: Picture, file: bytes | None) -> None:
        key = id(image)
        self.image = weakref.ref(image, lambda _: _opened.pop(key, None))
        self.file = file
        self.digest = _pixel_digest(image) if file is None else digest_of(file)


_opened: dict[int, _Opened] = {}
_own: weakref.WeakValueDictionary[int, Picture] = weakref.WeakValueDictionary()
"""Images that were opened or copied here, and that no code of the user's has: rows' are in its hands too."""
BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, IndexError, KeyError, TypeError)
"""What Pillow raises for files that are none."""


def read_image(value: object, of_row: bool = False, known: Files | None = None) -> Picture:
    """
    An image of Pillow's, from what datasets, tools and requests have: such an image, a path, bytes of a file, a
    `data:` URL, or a dictionary with `bytes` or `path`. A file is opened and not decoded, see `decode`. For `of_row`
    and `known` see `read_parts`.
    """
    if is_image(value):
        if _is_refused(value):
            raise MediumError(
                f"An image of the format {value.format} is not decoded, as only {', '.join(FORMATS)} are: load it "
                "first (`image.load()`), if its origin is trusted."
            )
        return value
    name = file_name(value, "image")
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if not isinstance(value, (str, os.PathLike, bytes, bytearray)):
        raise MediumError(f"{name} is no image: give an image of Pillow's, a path, or the bytes of a file.")
    file = file_of(value, name, of_row)
    digest = "" if known is None else digest_of(file)
    image = None if known is None else known.get(digest)
    if image is None:
        image = _open(file, name)
        if not of_row:
            _own[id(image)] = image
        if known is not None:
            known[digest] = image
    return image


def _open(file: bytes, name: str) -> Picture:
    try:
        from PIL import Image
    except ImportError:
        raise MediumError("A message shows an image, and Pillow is not installed: `pip install pillow`.") from None
    file = _without_words(file)
    try:
        image = Image.open(io.BytesIO(file), formats=FORMATS)
    except (*BROKEN, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        if isinstance(error, (Image.DecompressionBombError, Image.DecompressionBombWarning)):
            raise MediumError(f"{name} has more than {IN_MESSAGE.values:,} pixels: give a smaller one.") from error
        raise MediumError(
            f"{name} cannot be read as an image: it is broken, or of no known kind ({', '.join(FORMATS)}); save it as "
            "one of these."
        ) from error
    if _size_of(image) > IN_MESSAGE.values:
        raise MediumError(
            f"{name} has {_size_of(image):,} pixels, and {IN_MESSAGE.values:,} are the most: make it smaller."
        )
    _opened[id(image)] = _Opened(image, file)
    copyreg.pickle(type(image), _reduced)
    return image


def _without_words(file: bytes) -> bytes:
    """A PNG file without compressed texts and profiles, of which Pillow keeps a thousand times their size."""
    kept, place = [file[:8]], 8
    while file.startswith(b"\x89PNG\r\n\x1a\n") and place < len(file):
        end = place + 12 + int.from_bytes(file[place : place + 4], "big")
        if file[place + 4 : place + 8] not in (b"zTXt", b"iTXt", b"iCCP"):
            kept.append(file[place:end])
        place = end
    return b"".join(kept) if len(kept) > 1 else file


def _reduced(image: Picture) -> Any:
    """How an image is pickled and copied: one that is not decoded stays so."""
    opened = _opened.get(id(image))
    if opened is None or opened.file is None:
        return image.__reduce_ex__(2)
    return _open, (opened.file, "An image")


def _known(medium: Medium) -> _Opened | Sound | None:
    """What holds a medium's file, which is `None` once it is decoded, and its digest."""
    return medium if isinstance(medium, Sound) else _opened.get(id(medium))


def is_decoded(medium: Medium) -> bool:
    """Whether an image or a sound was decoded, so that its content and digest are known."""
    known = _known(medium)
    return known is not None and known.file is None and known.digest is not None


def _is_lazy(image: Picture) -> TypeGuard[ImageFile]:
    """Whether an image that somebody else opened is to be decoded."""
    files = sys.modules.get("PIL.ImageFile")
    return files is not None and isinstance(image, files.ImageFile) and bool(image.tile)


def _is_refused(image: Picture) -> bool:
    """Whether an image that somebody else opened is of a kind that is not decoded here."""
    return _is_lazy(image) and image.format not in (*FORMATS, "MPO")  # the last is a JPEG with several images


def decode(medium: Medium) -> None:
    """Decodes an image or a sound and names it by content; slow for large ones, so do it in a thread."""
    if isinstance(medium, Sound):
        _ = medium.samples
        medium.digest = medium.content_digest()
        return
    from PIL import Image

    opened = _opened.get(id(medium))
    try:
        medium.load()
    except (*BROKEN, Image.DecompressionBombError) as error:  # a frame may be larger than the header says
        size = f"{medium.width} by {medium.height} pixels"
        raise MediumError(f"An image of {size} cannot be read as an image: it is broken.") from error
    if opened is None:
        _opened[id(medium)] = _Opened(medium, None)
    elif opened.file is not None:
        opened.digest, opened.file = _pixel_digest(medium), None


def decode_for_model(parts: Iterable[Part]) -> None:
    """Decodes what parts show to the model of this conversation, so that a tool is told of a broken file."""
    takes = MODEL_TAKES.get(None)
    if takes is not None:
        for medium in media_of(part for part in parts if kind_of_part(part) and takes(part)):
            decode(medium)


class ConversationMedia:
    """The media of one conversation: each file is opened once, and their number and size are bounded."""

    def __init__(self) -> None:
        self.files: Files = weakref.WeakValueDictionary()
        self._media: dict[int, Medium] = {}

    def fork(self) -> ConversationMedia:
        """A copy for a branch of the conversation; the two change apart."""
        twin = ConversationMedia()
        twin.files, twin._media = self.files, dict(self._media)
        return twin

    def add(self, media: Iterable[Medium]) -> None:
        """Adds media; raises `MediumError`, and adds none, if all together exceed `IN_CONVERSATION`."""
        both = self._media | {id(medium): medium for medium in media}
        IN_CONVERSATION.check([*map(_size_of, both.values())])
        self._media = both


def media_to_digests(value: object) -> Any:
    """A copy of nested lists and dictionaries in which images, sounds and arrays are replaced by their digests."""
    if isinstance(value, dict):
        return {key: media_to_digests(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [media_to_digests(item) for item in value]
    if value is None or isinstance(value, (str, int, float)):  # of most rows it is all that there is
        return value
    return digest(value) if is_image(value) else sounds.name_of(value) or value


def digest(medium: Medium) -> str:
    """A name for an image or a sound by its content (or file, if not decoded): 32 hexadecimal digits."""
    if isinstance(medium, Sound):
        return medium.content_digest()
    opened = _opened.get(id(medium))
    return _pixel_digest(medium) if opened is None else opened.digest


def digest_at_hand(medium: Medium) -> str:
    """The digest of an image or sound, if it has one; what no model is shown is told by kind and size."""
    known = _known(medium)
    return (known and known.digest) or _kind_and_size(medium)


def _kind_and_size(medium: Medium) -> str:
    return repr(medium) if isinstance(medium, Sound) else f"{medium.mode}/{medium.width}x{medium.height}"


def is_same(medium: Medium, known: Medium, looks: bool = False) -> bool:
    """Whether two images or sounds are the same, by their digests; `looks`: the first may be decoded for it."""
    if looks and is_decoded(known) and not is_decoded(medium) and _kind_and_size(medium) == _kind_and_size(known):
        decode(medium)
    return digest_at_hand(medium) == digest_at_hand(known)


def _pixel_digest(image: Picture) -> str:
    shape = f"{image.mode}/{image.width}x{image.height}/".encode()
    palette = image.getpalette() if image.mode == "P" else None
    return digest_of(shape + bytes(palette or b""), image.tobytes())


def to_file(medium: Medium) -> bytes:
    """The bytes of a PNG or WAV file of an image or a sound; if not decoded, the file that it came in."""
    known = _known(medium)
    if known is not None and known.file is not None:
        return known.file
    if isinstance(medium, Sound):
        return medium.to_wav()
    written = medium.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
    kept = medium if written else medium.convert({"I": "I;16", "La": "LA"}.get(medium.mode, "RGB"))
    file = io.BytesIO()
    kept.save(file, format="PNG")
    return file.getvalue()
