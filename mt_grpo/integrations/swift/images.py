"""
Images of ms-swift's conversations: a list beside the messages, for which `<image>` stands in their words. Apart from
both files that import it, since neither does without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mt_grpo.media import IMAGE, kind_of_part
from mt_grpo.trajectory import Message

PLACE = "<image>"


def without_images(messages: list[Message]) -> tuple[list[Message], list[Any]]:
    """
    Messages whose images are places, and the images in order. A message that shows a video too, or plays a sound,
    stays as it is.
    """
    images: list[Any] = []
    written = []
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        kinds = [*map(kind_of_part, parts)]
        if set(kinds) - {0} == {IMAGE}:
            images += [part["image"] for part, kind in zip(parts, kinds, strict=True) if kind]
            words = [PLACE if kind else part.get("text", "") for part, kind in zip(parts, kinds, strict=True)]
            message = {**message, "content": "".join(words)}
        written.append(message)
    return written, images


def with_images(messages: list[Message], images: list[Any]) -> list[Message]:
    """Messages whose places show images. Images without a place come before the user's first words."""
    if not images:
        return messages
    places = sum(str(message.get("content")).count(PLACE) for message in messages)
    if places > len(images):
        raise ValueError(f"The messages have {places} times {PLACE}, and the request has {len(images)} images.")
    left = iter([{"type": "image", "image": image} for image in images])
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), 0)
    shown = []
    for index, message in enumerate(messages):
        before = [next(left) for _ in range(len(images) - places)] if index == first else []
        content = message.get("content")
        if before or (isinstance(content, str) and PLACE in content):
            message = {**message, "content": [*before, *_parts(content or "", left)]}
        shown.append(message)
    return shown


def _parts(text: str, images: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for number, words in enumerate(text.split(PLACE)):
        if number:
            yield next(images)
        if words:
            yield {"type": "text", "text": words}
