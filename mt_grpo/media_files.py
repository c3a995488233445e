"""Bytes of image and sound files: bounded, behind no links, fetched from nowhere; and bounds of what may be shown."""

from __future__ import annotations

import base64
import binascii
import os
import stat
from collections.abc import Collection
from typing import Any, NamedTuple

from mt_grpo.errors import UserError

MOST_BYTES = 64 << 20
"""Bytes of one file."""


class MediumError(UserError, ValueError):
    """Something that is shown as an image or played as a sound, and is none. The message is one sentence."""


class Bounds(NamedTuple):
    """How much may be shown together, whatever the files' sizes: a few bytes may be an image of any size."""

    where: str
    number: int
    """Images, frames of videos, and sounds."""
    values: int
    """Their pixels and samples."""

    def check(self, sizes: Collection[int]) -> None:
        """Refuses too many, or too large ones."""
        if len(sizes) > self.number:
            raise MediumError(
                f"{self.where} shows {len(sizes):,} images, frames and sounds, and {self.number:,} are the most: show "
                "fewer."
            )
        if sum(sizes) > self.values:
            raise MediumError(
                f"{self.where} shows images and sounds of {sum(sizes):,} pixels and samples, and {self.values:,} are "
                "the most: show smaller ones, or fewer."
            )


IN_MESSAGE = Bounds("A message", 1 << 10, 1 << 26)
IN_CONVERSATION = Bounds("A conversation", 1 << 12, 1 << 28)


def file_of(value: Any, name: str, of_row: bool) -> bytes:
    """The bytes of an image's or sound's file."""
    if isinstance(value, str) and value.startswith("data:"):
        return decoded(value.partition(",")[2], name)
    if isinstance(value, str) and value.startswith(("http://", "https://")):
        raise MediumError(f"{name} is an address, which rollouts do not fetch: give a file or its bytes.")
    if isinstance(value, str) and not of_row:
        raise MediumError(
            f"{name} is text, and only rows of a dataset name files by text: give the bytes, or `pathlib.Path(...)`."
        )
    data = _read(value, name, of_row) if isinstance(value, (str, os.PathLike)) else bytes(value)
    if len(data) > MOST_BYTES:
        raise MediumError(f"{name} has more than {MOST_BYTES:,} bytes, the most of a file: give a smaller one.")
    return data


def file_name(value: object, kind: str) -> str:
    """How errors name the file of an image or a sound."""
    if isinstance(value, dict):
        value = value.get("path") or value.get("bytes") or value
    if isinstance(value, (bytes, bytearray)):
        return f"{'An' if kind == 'image' else 'A'} {kind} of {len(value)} bytes"
    text = str(value)
    return f"The {kind} {text[:60] + '…' if len(text) > 60 else text!r}"


def decoded(text: str, name: str) -> bytes:
    """The bytes of a file in base64; raises `MediumError` as `file_of` does."""
    if len(text) > MOST_BYTES * 4 // 3 + 4:
        raise MediumError(f"{name} has more than {MOST_BYTES:,} bytes, the most of a file: give a smaller one.")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediumError(f"{name} cannot be read: it is no base64.") from error


def _read(path: str | os.PathLike[str], name: str, of_row: bool) -> bytes:
    """At most one byte more of a file than `MOST_BYTES`."""
    try:
        if not stat.S_ISREG(os.stat(path, follow_symlinks=of_row).st_mode):  # to open a device may do something
            raise MediumError(f"{name} is no regular file: give the path of one, behind all links.")
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if of_row else os.O_NOFOLLOW))
        with open(opened, "rb") as file:
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                raise MediumError(f"{name} is no regular file: give the path of one, behind all links.")
            return file.read(MOST_BYTES + 1) or b""
    except OSError as error:
        raise MediumError(f"{name} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:  # a path with a NUL
        if isinstance(error, MediumError):
            raise
        raise MediumError(f"{name} cannot be read: {error}.") from error
