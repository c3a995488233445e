"""
Images in requests to vLLM's `/inference/v1/generate`, which takes token ids, and images as the model takes them. So a
server looks at what the trainer's processor made. An image is named by its content, and sent to a server once.
"""

from __future__ import annotations

import base64
import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from mt_grpo.errors import ServerSetupError
from mt_grpo.forward.media import Media, MediumInputs
from mt_grpo.media import SOUND, VIDEO, kind_of, to_file

GENERATE = "/inference/v1/generate"
RENDER = "/v1/chat/completions/render"
_SIDE = 64  # pixels of the image by which a server is asked how it takes images
_RAW = 3  # vLLM's number for bytes of a tensor in msgpack
_names: weakref.WeakKeyDictionary[MediumInputs, str] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Field:
    """How vLLM takes one input of an image."""

    dtype: str
    kind: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Shown:
    """An image in a context: its name, its place, and what the model takes."""

    name: str
    offset: int
    image: MediumInputs


class Layout:
    """How a server takes images, as its own rendering of one shows."""

    def __init__(self, fields: dict[str, Field]) -> None:
        self.fields = fields

    @classmethod
    def read(cls, answer: Any) -> Layout:
        """The layout in a server's rendering of a message with one image."""
        msgpack = _msgpack()
        (content,) = answer["features"]["kwargs_data"]["image"]
        item = msgpack.decode(base64.b64decode(content), ext_hook=lambda code, data: None)
        return cls({name: Field(each["data"][0], *each["field"]) for name, each in item.items()})

    def write(self, image: MediumInputs) -> str:
        """An image as vLLM reads it."""
        msgpack = _msgpack()
        if image.inputs.keys() != self.fields.keys():
            raise ServerSetupError(
                f"vLLM takes {', '.join(sorted(self.fields))} of an image, and the trainer's processor returns "
                f"{', '.join(sorted(image.inputs))}: sample with the model itself (`use_vllm: false`)."
            )
        item = {}
        for name, field in self.fields.items():
            dtype, tensor = getattr(torch, field.dtype), image.inputs[name]
            if tensor.is_floating_point() and not dtype.is_floating_point:
                raise ServerSetupError(
                    f"vLLM takes `{name}` of an image as {field.dtype}, before they are normalized: start it with "
                    "`mt-grpo serve`, or with `--no-mm-device-do-normalize`."
                )
            tensor = tensor.to(dtype)
            if field.kind == "batched":
                (tensor,) = tensor
            data = field.dtype, tuple(tensor.shape), msgpack.Ext(_RAW, _bytes_of(tensor))
            item[name] = {"data": data, "field": (field.kind, field.options)}
        return base64.b64encode(msgpack.encode(item)).decode()


def _msgpack() -> Any:
    """The library of vLLM's own format."""
    try:
        import msgspec
    except ImportError:
        raise ServerSetupError(
            "Images for a vLLM server are written with msgspec, which is not installed: `pip install "
            "'mt-grpo[images]'`."
        ) from None
    return msgspec.msgpack


def layout_request(model: str) -> dict[str, Any]:
    """The body that asks a server to render an image. It is another one each time: one that it knows comes empty."""
    from PIL import Image

    image = Image.frombytes("RGB", (_SIDE, _SIDE), os.urandom(3 * _SIDE**2))
    url = f"data:image/png;base64,{base64.b64encode(to_file(image)).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": content}], **({"model": model} if model else {})}


def shown_in(context: list[int], images: Media) -> list[Shown]:
    """The images whose tokens, of ids below 0, stand in a context, in order."""
    found, index = list[Shown](), 0
    while index < len(context):
        token = context[index]
        if token >= 0:
            index += 1
            continue
        if kind_of(token) == VIDEO:
            raise ServerSetupError(
                "Videos are not sent to a vLLM server: sample with the model itself (`use_vllm: false`), or show "
                "frames as images."
            )
        if kind_of(token) == SOUND:
            raise ServerSetupError(
                "Sounds are not sent to a vLLM server: sample with the model itself (`use_vllm: false`), or show a "
                "transcript as text."
            )
        image = images[token]
        if context[index : index + image.size] != [token] * image.size:
            raise ServerSetupError(
                "vLLM's endpoint for token ids takes images whose tokens stand together, and those of this model have "
                "others between them: sample with the model itself (`use_vllm: false`)."
            )
        found.append(Shown(name_of(image), index, image))
        index += image.size
    return found


def name_of(image: MediumInputs) -> str:
    """The name of an image by what the model takes of it: 32 hexadecimal digits."""
    name = _names.get(image)
    if name is None:
        content = blake2b(digest_size=16)
        for key, tensor in sorted(image.inputs.items()):
            content.update(f"{key} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            content.update(_bytes_of(tensor))
        name = _names[image] = content.hexdigest()
    return name


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def features_of(shown: Iterable[Shown], layout: Layout | None = None) -> dict[str, Any]:
    """The images of a request, with a layout in full, and else by their names."""
    shown = list(shown)
    return {
        "mm_hashes": {"image": [each.name for each in shown]},
        "mm_placeholders": {"image": [{"offset": each.offset, "length": each.image.size} for each in shown]},
        "kwargs_data": {"image": [None if layout is None else layout.write(each.image) for each in shown]},
    }
