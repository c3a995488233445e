"""
Images, videos and sounds in messages. A message's content may be a list of parts. A part `{"type": "image", "image":
...}` shows an image, a part `{"type": "video", "video": [...]}` a video, which is the list of its frames, and a part
`{"type": "audio", "audio": ...}` plays a sound, see `mt_grpo.sounds`. Imports Pillow only where there is an image to
read.
"""

from __future__ import annotations

import copyreg
import hashlib
import io
import os
import struct
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextvars import ContextVar
from typing import Any

from mt_grpo import sounds
from mt_grpo.media import IN_CONVERSATION, IN_MESSAGE, MediumError, file_of
from mt_grpo.sounds import Sound

KINDS = ("image", "image_url", "input_image")
"""Types of parts that show an image: of chat templates, and of OpenAI's two interfaces."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Files that are opened: those of others start programs (EPS), or are read by little tested code."""

OTHER_MEDIA = ("video_url",)
"""Types of parts that show what no rollout can keep."""


IN_TEXT = "[image]"
"""What stands for an image or a video where text is shown."""

SOUND_IN_TEXT = "[sound]"
"""What stands for a sound where tokens are shown as text."""

IMAGE, VIDEO, SOUND = 1, 2, 3
"""What a token is of, as transformers counts them in `mm_token_type_ids`; 0 is text."""


def kind_of(token: int) -> int:
    """What a token is of, by its id, which is below 0 where it is not of text: its two lowest bits say of what."""
    return 0 if token >= 0 else IMAGE + (token & 3)


def token_in_words(token: int) -> str:
    """What stands for the token of an image, a video or a sound where text is shown."""
    return SOUND_IN_TEXT if kind_of(token) == SOUND else IN_TEXT


def is_image(value: Any) -> bool:
    """Whether a value is an image of Pillow's. Where nobody has imported Pillow, nothing is."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def is_image_part(part: Any) -> bool:
    """Whether a part of a message's content shows an image."""
    return isinstance(part, dict) and part.get("type") in KINDS


def is_shown(part: Any) -> bool:
    """Whether a part of a message's content shows an image or a video, or plays a sound."""
    is_video = isinstance(part, dict) and part.get("type") == "video"
    return is_video or is_image_part(part) or sounds.is_sound_part(part)


def kind_of_part(part: dict[str, Any]) -> int:
    """What a part that shows something shows: `IMAGE`, `VIDEO` or `SOUND`."""
    return VIDEO if part["type"] == "video" else SOUND if sounds.is_sound_part(part) else IMAGE


def is_read(part: Any) -> bool:
    """Whether a part that shows something is in the form that `read_parts` gives it."""
    if part["type"] == "video":
        return isinstance(part.get("video"), list) and bool(part["video"]) and all(map(_is_read, part["video"]))
    if sounds.is_sound_part(part):
        return sounds.is_read(part)
    return part["type"] == "image" and _is_read(part.get("image"))


def _is_read(image: Any) -> bool:
    return is_image(image) and not _is_refused(image)


def image_parts(messages: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """The parts of messages that show images or videos, or play sounds, in order."""
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            yield from filter(is_shown, content)


def read_parts(content: list[Any], of_row: bool = False, known: Files | None = None) -> list[Any]:
    """
    The parts of a content in the form that chat templates take: images are `{"type": "image", "image": ...}`, with an
    image of Pillow's, and sounds as `sounds.read_part` has them; and no part has a key without a value, as the rows of
    a `datasets.Dataset` have them. Files are opened and not decoded, see `decode`.
    """
    IN_MESSAGE.check([0 for part in content for _ in _media_in(part)])  # before the first is opened
    read = [_read_part(part, of_row, known) for part in content]
    IN_MESSAGE.check([size_of(medium) for part in read for medium in _media_in(part)])
    return read


def _media_in(part: Any) -> list[Any]:
    """What a part shows or plays, read or not: the frames of a video."""
    if is_kept(part):
        return [part]
    if not is_shown(part):
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


def _is_unread(message: Any) -> bool:
    """Whether a message has parts that are not in the form that templates take."""
    content = message.get("content") if isinstance(message, dict) else None
    return isinstance(content, list) and any(map(_is_unread_part, content))


def _is_unread_part(part: Any) -> bool:
    if is_kept(part) or not isinstance(part, dict):
        return is_kept(part)
    return any(value is None for value in part.values()) or (is_shown(part) and not is_read(part))


def own_parts(content: list[Any]) -> list[Any]:
    """
    The parts of a content with images that nobody else can draw on: copies, or files opened again where they are not
    decoded. A tool or an environment may draw on one image turn after turn, and each turn shows what it was then.
    """
    return [_own_part(part) for part in content]


def _own_part(part: Any) -> Any:
    if is_image(part):
        return _own(part)
    if isinstance(part, dict) and is_image(part.get("image")):
        return {**part, "image": _own(part["image"])}
    if isinstance(part, dict) and isinstance(part.get("video"), (list, tuple)):
        return {**part, "video": [_own(frame) if is_image(frame) else frame for frame in part["video"]]}
    return part


def _own(image: Any) -> Any:
    if _owned.get(id(image)) is image or _is_refused(image):
        return image
    if _is_lazy(image) and (image.fp is None or image.fp.closed):
        return image  # `decode` says that its file was closed
    if _is_lazy(image):
        place = image.fp.tell()  # some formats are decoded from where they were left
        image.fp.seek(0)
        copied = _open(image.fp.read(), "An image")
        image.fp.seek(place)
    else:
        copied = image.copy()
        _owned[id(copied)] = copied
    return copied


def media_of(parts: Iterable[dict[str, Any]]) -> list[Any]:
    """The images, frames of videos, and sounds of parts that are read, in order."""
    return [medium for part in parts for medium in _media_in(part)]


def size_of(medium: Any) -> int:
    """The number of pixels or samples of an image or a sound, which need not be decoded."""
    return medium.length if isinstance(medium, Sound) else medium.width * medium.height


def _read_part(part: Any, of_row: bool, known: Files | None) -> Any:
    if is_image(part):
        part = {"type": "image", "image": part}
    if isinstance(part, Sound):
        part = {"type": "audio", "audio": part}
    if not isinstance(part, dict):
        return part
    part = {key: value for key, value in part.items() if value is not None}
    if part.get("type") in OTHER_MEDIA:
        raise MediumError(
            f"A message shows a part of type {part['type']!r}, and rollouts hold text, images, videos and sounds: "
            "show a video as the list of its frames."
        )
    if sounds.is_sound_part(part):
        return part if sounds.is_read(part) else sounds.read_part(part, of_row)
    if part.get("type") == "video":
        _check_options(part, part.get("video"), of_row)
        return {**part, "video": _read_frames(part.get("video"), of_row, known)}
    if not is_image_part(part):
        return part
    shown = part.get("image") if part["type"] == "image" else part.get("image_url", part.get("image"))
    if isinstance(shown, dict) and "url" in shown:
        shown = shown["url"]
    if shown is None:
        raise MediumError(
            "A message has a place for an image and no image: give as many images as places in the row's column "
            "`images`, or an image in the part itself."
        )
    rest = {key: value for key, value in part.items() if key not in (*KINDS, "type", "detail")}
    _check_options(rest, [shown], of_row)
    return {"type": "image", "image": read_image(shown, of_row, known), **rest}


def _check_options(part: dict[str, Any], shown: Any, of_row: bool) -> None:
    """
    Refuses options for the processor, which may enlarge an image to any size, beside images that are text: a tool may
    have passed on the whole part.
    """
    if of_row or not (isinstance(shown, (list, tuple)) and any(isinstance(each, str) for each in shown)):
        return
    for name in part.keys() - {"type", "video", "fps", "alt"}:
        raise MediumError(
            f"A part whose image is text has {name!r} beside it, which would go to the processor: give the image as "
            "bytes, or leave that out."
        )


def _read_frames(frames: Any, of_row: bool, known: Files | None) -> list[Any]:
    if not isinstance(frames, (list, tuple)) or not frames:
        given = repr(frames) if isinstance(frames, str) and len(frames) < 80 else f"a value of {type(frames).__name__}"
        raise MediumError(
            f"A video is the list of its frames, which are images, and {given} is none: decode it first, and give "
            "some of its frames (`fps` says how many there are per second)."
        )
    return [read_image(frame, of_row, known) for frame in frames]


def shows_images(value: Any) -> bool:
    """Whether what a tool returned is an image or a sound, or a list of parts with one."""
    if not isinstance(value, list):
        return is_kept(value)
    parts = all(is_kept(part) or (isinstance(part, dict) and "type" in part) for part in value)
    return parts and any(is_kept(part) or is_shown(part) for part in value)


def in_words(part: Any) -> str:
    """The text of a part of a content; of an image, a video or a sound its `alt`, or what it is."""
    if sounds.is_sound_part(part):
        seconds = part.get("seconds")
        return str(part.get("alt") or (f"[sound of {seconds:.1f} s]" if isinstance(seconds, float) else SOUND_IN_TEXT))
    if is_shown(part):
        return str(part.get("alt") or IN_TEXT)
    return str(part.get("text") or "") if isinstance(part, dict) else str(part)


Files = MutableMapping[str, Any]
"""Images that were opened, by digests of their files."""

MODEL_TAKES: ContextVar[Callable[[dict[str, Any]], bool]] = ContextVar("whether the model is shown a part")
"""Of the conversation that this code runs in."""


class _Opened:
    """What is known of an image that was opened or decoded here."""

    def __init__(self, image: Any, file: bytes | None) -> None:
        key = id(image)
        self.image = weakref.ref(image, lambda _: _opened.pop(key, None))
        self.file = file
        self.digest = _pixel_digest(image) if file is None else _digest(file)


_opened: dict[int, _Opened] = {}
_owned: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Images that were opened or copied here."""
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, IndexError, KeyError, TypeError)
"""What Pillow raises for files that are none."""


def read_image(value: Any, of_row: bool = False, known: Files | None = None) -> Any:
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
    name = _named(value)
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if not isinstance(value, (str, os.PathLike, bytes, bytearray)):
        raise MediumError(f"{name} is no image: give an image of Pillow's, a path, or the bytes of a file.")
    file = file_of(value, name, of_row)
    if known is None:
        return _open(file, name)
    digest = _digest(file)
    image = known.get(digest)
    if image is None:
        image = known[digest] = _open(file, name)
    return image


def _open(file: bytes, name: str) -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise MediumError("A message shows an image, and Pillow is not installed: `pip install pillow`.") from None
    try:
        image = Image.open(io.BytesIO(file), formats=FORMATS)
    except (*_BROKEN, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        if isinstance(error, (Image.DecompressionBombError, Image.DecompressionBombWarning)):
            raise MediumError(f"{name} has more than {IN_MESSAGE.values:,} pixels: give a smaller one.") from error
        raise MediumError(
            f"{name} cannot be read as an image: it is broken, or of no known kind ({', '.join(FORMATS)})."
        ) from error
    if size_of(image) > IN_MESSAGE.values:
        raise MediumError(
            f"{name} has {size_of(image):,} pixels, and {IN_MESSAGE.values:,} are the most: make it smaller."
        )
    _opened[id(image)] = _Opened(image, file)
    _owned[id(image)] = image
    copyreg.pickle(type(image), _reduced)
    return image


def _reduced(image: Any) -> Any:
    """How an image is pickled and copied: one that is not decoded stays so."""
    opened = _opened.get(id(image))
    if opened is None or opened.file is None:
        return image.__reduce_ex__(2)
    return _open, (opened.file, "An image")


def is_decoded(medium: Any) -> bool:
    """Whether an image or a sound has been given to `decode`, so that its pixels or samples and its name are known."""
    if isinstance(medium, Sound):
        return medium.file is None and medium.digest is not None
    opened = _opened.get(id(medium))
    return opened is not None and opened.file is None


def _is_lazy(image: Any) -> bool:
    """Whether an image that somebody else opened is to be decoded."""
    files = sys.modules.get("PIL.ImageFile")
    return files is not None and isinstance(image, files.ImageFile) and bool(image.tile)


def _is_refused(image: Any) -> bool:
    """Whether an image that somebody else opened is of a kind that is not decoded here."""
    return _is_lazy(image) and image.format not in (*FORMATS, "MPO")  # the last is a JPEG with several images


def decode(medium: Any) -> None:
    """
    Decodes an image or a sound, and names it by its content. That takes seconds and hundreds of megabytes for large
    ones: do it in a thread, one after another, and only to what is looked at.
    """
    if isinstance(medium, Sound):
        _ = medium.samples
        medium.digest = sounds.sound_digest(medium)
        return
    from PIL import Image

    opened = _opened.get(id(medium))
    try:
        medium.load()
    except (*_BROKEN, Image.DecompressionBombError) as error:  # a frame may be larger than the header says
        size = f"{medium.width} by {medium.height} pixels"
        raise MediumError(f"An image of {size} cannot be read as an image: it is broken.") from error
    if opened is None:
        _opened[id(medium)] = _Opened(medium, None)
    elif opened.file is not None:
        opened.digest, opened.file = _pixel_digest(medium), None


def decode_shown(parts: Iterable[Any]) -> None:
    """
    Decodes what parts show to the model of the conversation that this code runs in, if there is one: so that a tool
    is told of a broken file.
    """
    takes = MODEL_TAKES.get(None)
    if takes is not None:
        for medium in media_of(part for part in parts if is_shown(part) and takes(part)):
            decode(medium)


class Shown:
    """The images, frames and sounds that one conversation shows: each file is opened once, and all are bounded."""

    def __init__(self) -> None:
        self.files: Files = weakref.WeakValueDictionary()
        self._media: dict[int, Any] = {}

    def fork(self) -> Shown:
        """A copy for a branch of the conversation; the two change apart."""
        twin = Shown()
        twin.files, twin._media = self.files, dict(self._media)
        return twin

    def add(self, media: Iterable[Any]) -> None:
        """Adds media; raises `MediumError`, and adds none, if they are too many or too large together."""
        both = self._media | {id(medium): medium for medium in media}
        IN_CONVERSATION.check([*map(size_of, both.values())])
        self._media = both


def _named(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("path") or value.get("bytes") or value
    if isinstance(value, (bytes, bytearray)):
        return f"An image of {len(value)} bytes"
    text = str(value)
    return f"The image {text[:60] + '…' if len(text) > 60 else text!r}"


def is_kept(value: Any) -> bool:
    """Whether a value is an image of Pillow's, or a sound: what a run keeps in a file of its own."""
    return is_image(value) or isinstance(value, Sound)


def named(value: Any) -> Any:
    """A copy of nested lists and dictionaries in which images and sounds are replaced by names of their content."""
    if isinstance(value, dict):
        return {key: named(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [named(item) for item in value]
    if is_image(value):
        return image_digest(value)
    return sounds.name_of(value) or value


def digest(value: Any) -> str:
    """A name for an image of Pillow's, or a sound, by its content: 32 hexadecimal digits, everywhere the same."""
    return sounds.sound_digest(value) if isinstance(value, Sound) else image_digest(value)


def name_at_hand(medium: Any) -> str:
    """
    What an image or a sound is told apart by without looking at it: its digest, where `decode` or an opener of files
    has made it. What else there is, is shown to no model, so that its kind and size are enough.
    """
    digest = medium.digest if isinstance(medium, Sound) else (known := _opened.get(id(medium))) and known.digest
    return digest or _kind_and_size(medium)


def _kind_and_size(medium: Any) -> str:
    return repr(medium) if isinstance(medium, Sound) else f"{medium.mode}/{medium.width}x{medium.height}"


def is_same(medium: Any, known: Any, looks: bool = False) -> bool:
    """Whether two images or sounds are the same, by their names."""
    if looks and is_decoded(known) and not is_decoded(medium) and _kind_and_size(medium) == _kind_and_size(known):
        decode(medium)
    return name_at_hand(medium) == name_at_hand(known)


def image_digest(image: Any) -> str:
    """
    A name for an image of Pillow's by its content: 32 hexadecimal digits, the same on every machine. One that was
    opened and not decoded is named by its file.
    """
    opened = _opened.get(id(image))
    return _pixel_digest(image) if opened is None else opened.digest


def _pixel_digest(image: Any) -> str:
    shape = f"{image.mode}/{image.width}x{image.height}/".encode()
    palette = image.getpalette() if image.mode == "P" else None
    return _digest(shape + bytes(palette or b""), image.tobytes())


def _digest(*contents: bytes) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for content in contents:
        digest.update(content)
    return digest.hexdigest()


def as_png(image: Any) -> bytes:
    """
    An image of Pillow's as the bytes of a PNG file. One that was opened and not decoded is the file that it came in,
    whatever its kind.
    """
    opened = _opened.get(id(image))
    if opened is not None and opened.file is not None:
        return opened.file
    kept = image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16") else image.convert("RGB")
    file = io.BytesIO()
    kept.save(file, format="PNG")
    return file.getvalue()
