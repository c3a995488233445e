"""
Images, videos and sounds in messages. A message's content may be a list of parts. A part `{"type": "image", "image":
...}` shows an image, a part `{"type": "video", "video": [...]}` a video, which is the list of its frames, and a part
`{"type": "audio", "audio": ...}` plays a sound, see `mt_grpo.sounds`. Imports Pillow only where there is an image to
read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mt_grpo import sounds
from mt_grpo.errors import UserError
from mt_grpo.sounds import Sound

KINDS = ("image", "image_url", "input_image")
"""Types of parts that show an image: of chat templates, and of OpenAI's two interfaces."""

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


class ImageError(UserError, ValueError):
    """Something that is shown as an image, and is none. The message is one sentence fit for the user."""


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
        return isinstance(part.get("video"), list) and bool(part["video"]) and all(map(is_image, part["video"]))
    if sounds.is_sound_part(part):
        return sounds.is_read(part)
    return part["type"] == "image" and is_image(part.get("image"))


def image_parts(messages: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The parts of messages that show images or videos, or play sounds, in order."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from filter(is_shown, content)


def read_parts(content: list[Any]) -> list[Any]:
    """
    The parts of a content in the form that chat templates take: images are `{"type": "image", "image": ...}`, with an
    image of Pillow's, and sounds as `sounds.read_part` has them; and no part has a key without a value, as the rows of
    a `datasets.Dataset` have them.

    Raises:
        ImageError: If a part shows something that is no image or list of images.
        SoundError: If a part plays something that is no sound.
    """
    return [_read_part(part) for part in content]


def _read_part(part: Any) -> Any:
    if is_image(part):
        return {"type": "image", "image": part}
    if isinstance(part, Sound):
        part = {"type": "audio", "audio": part}
    if not isinstance(part, dict):
        return part
    part = {key: value for key, value in part.items() if value is not None}
    if part.get("type") in OTHER_MEDIA:
        raise ImageError(
            f"A message shows a part of type {part['type']!r}, and rollouts hold text, images, videos and sounds: "
            "show a video as the list of its frames."
        )
    if sounds.is_sound_part(part):
        return part if sounds.is_read(part) else sounds.read_part(part)
    if part.get("type") == "video":
        return {**part, "video": _read_frames(part.get("video"))}
    if not is_image_part(part):
        return part
    shown = part.get("image") if part["type"] == "image" else part.get("image_url", part.get("image"))
    if isinstance(shown, dict) and "url" in shown:
        shown = shown["url"]
    if shown is None:
        raise ImageError(
            "A message has a place for an image and no image: give as many images as places in the row's column "
            "`images`, or an image in the part itself."
        )
    rest = {key: value for key, value in part.items() if key not in (*KINDS, "type", "detail")}
    return {"type": "image", "image": read_image(shown), **rest}


def _read_frames(frames: Any) -> list[Any]:
    if not isinstance(frames, (list, tuple)) or not frames:
        given = repr(frames) if isinstance(frames, str) and len(frames) < 80 else f"a value of {type(frames).__name__}"
        raise ImageError(
            f"A video is the list of its frames, which are images, and {given} is none: decode it first, and give "
            "some of its frames (`fps` says how many there are per second)."
        )
    return [read_image(frame) for frame in frames]


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


def read_image(value: Any) -> Any:
    """
    An image of Pillow's, from what datasets, tools and requests have: such an image, a path, bytes of a file, a
    `data:` URL, or a dictionary with `bytes` or `path`.

    Raises:
        ImageError: If it is none of these, or cannot be read.
    """
    if is_image(value):
        return value
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise ImageError("A message shows an image, and Pillow is not installed: `pip install pillow`.") from None
    name = _named(value)
    try:
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, str) and value.startswith("data:"):
            value = base64.b64decode(value.partition(",")[2], validate=True)
        if isinstance(value, str) and value.startswith(("http://", "https://")):
            raise ImageError(
                f"{name} is an address, which rollouts do not fetch: give the image, a file or its bytes."
            )
        if not isinstance(value, (str, Path, bytes)):
            raise ImageError(f"{name} is no image: give an image of Pillow's, a path, or the bytes of a file.")
        with Image.open(io.BytesIO(value) if isinstance(value, bytes) else value) as opened:
            opened.load()
            return opened.copy()
    except (OSError, SyntaxError, binascii.Error, UnidentifiedImageError, Image.DecompressionBombError) as error:
        reason = (
            error.strerror if isinstance(error, OSError) and error.strerror else "it is broken, or of no known kind"
        )
        raise ImageError(f"{name} cannot be read as an image: {reason}.") from error


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


def image_digest(image: Any) -> str:
    """A name for an image of Pillow's by its content: 32 hexadecimal digits, the same on every machine."""
    shape = f"{image.mode}/{image.width}x{image.height}/".encode()
    palette = image.getpalette() if image.mode == "P" else None
    return hashlib.blake2b(shape + bytes(palette or b"") + image.tobytes(), digest_size=16).hexdigest()


def as_png(image: Any) -> bytes:
    """An image of Pillow's as the bytes of a PNG file."""
    kept = image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16") else image.convert("RGB")
    file = io.BytesIO()
    kept.save(file, format="PNG")
    return file.getvalue()
