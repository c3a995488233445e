"""Images and videos of messages as tokens, and as what the model takes: through the model's own processor."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch

from mt_grpo.forward.images import TYPES, ImageInputs, joined
from mt_grpo.images import ImageError, image_digest

OF_TEXT = ("input_ids", "attention_mask", *TYPES)
"""What a processor returns of a text."""

_BEGIN, _END = "\U0001f76b2", "\U0001f76b3"
"""Around the id of an image in escaped text. Contents cannot spell them, see `SpecialTokens`."""


def _of_images(found: Mapping[str, Any]) -> dict[str, Any]:
    """What a processor returns of images."""
    return {key: value for key, value in found.items() if key not in OF_TEXT}


class EncodedImage:
    """
    An image as a model sees it.

    Args:
        id (`int`): Of its tokens, below 0, odd for a video; made of its content, and of what its part asks of the
            processor.
        tokens (`list[int]`): What the processor writes for it: its tokens, and others around them.
        inputs (`ImageInputs`): What the model takes.
    """

    __slots__ = ("__weakref__", "id", "inputs", "tokens")

    def __init__(self, id: int, tokens: list[int], inputs: ImageInputs) -> None:
        self.id, self.tokens, self.inputs = id, tokens, inputs


class ImageEncoder:
    """
    Encodes the images of conversations. An image is encoded once for as long as a conversation shows it.

    In escaped text an image is the text that the chat template writes for it, followed by its id between two marks.

    Args:
        processor: Of a model that takes images, with a tokenizer.
        token (`int`, *optional*): By which the model knows the tokens of images. Unset, it is the processor's, which
            may be of another token: Gemma 3's and Llama 4's is of one that stands beside them.
        video (`int`, *optional*): By which it knows those of videos, if it takes any.

    Raises:
        ImageError: If the chat template has no place for images, or the processor makes something else of several
            images than of each alone.
    """

    def __init__(self, processor: Any, token: int | None = None, video: int | None = None) -> None:
        self._processor = processor
        self.token_id = int(processor.image_token_id) if token is None else token
        marker = self._find_marker("image", (processor.image_token, vars(processor).get("boi_token")))
        if marker is None:
            raise ImageError(
                "The chat template has no place for an image, so the model cannot be shown one: use a model whose "
                "template has (`chat_template_path`)."
            )
        self.marker = marker
        self._check_batches()
        self._video_id = video
        self._video_marker = None
        if video is not None and "video_processor" in vars(processor):
            self._video_marker = self._find_marker("video", (processor.video_token,))
        self._markers = re.compile("|".join(map(re.escape, filter(None, (self.marker, self._video_marker)))))
        self._place = re.compile(f"(?:{self._markers.pattern}){_BEGIN}([0-9]+){_END}")
        self._of_object: dict[tuple[int, str], tuple[weakref.ref[Any], EncodedImage]] = {}
        self._known: weakref.WeakValueDictionary[str, EncodedImage] = weakref.WeakValueDictionary()
        self._by_id: weakref.WeakValueDictionary[int, EncodedImage] = weakref.WeakValueDictionary()

    def __getitem__(self, image: int) -> EncodedImage:
        """An image that a conversation shows, by its id."""
        return self._by_id[image]

    def blank(self) -> ImageInputs:
        """A small image that no conversation shows."""
        from PIL import Image

        return self.encode({"type": "image", "image": Image.new("RGB", (32, 32))}).inputs

    def _find_marker(self, kind: str, known: Sequence[str | None]) -> str | None:
        words = "A question about it."
        parts = [{"type": kind}, {"type": "text", "text": words}]
        tokenizer = self._processor.tokenizer
        text = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
        # Gemma 3 writes another token than the one that it repeats
        return next((str(each) for each in known if each and text.count(each) == 1 and words in text), None)

    def _check_batches(self) -> None:
        """Holds what `joined` makes of images of several sizes against what the processor makes of them together."""
        from PIL import Image

        shown = [Image.linear_gradient("L").resize(size).convert("RGB") for size in ((96, 64), (64, 160), (128, 128))]
        apart = {number: ImageInputs(0, _of_images(self._process([image]))) for number, image in enumerate(shown)}
        together, ours = _of_images(self._process(shown)), joined(list(apart), apart, torch.device("cpu"))
        for name, theirs in together.items():
            if name not in ours or not torch.equal(theirs, ours[name]):
                raise ImageError(
                    f"{type(self._processor).__name__} makes another `{name}` of several images than of each alone, "
                    "so conversations cannot be batched: use a model with another processor, or pass the tokenizer "
                    "alone as `processing_class` to train on text."
                )

    def _process(self, images: Sequence[Any], options: dict[str, Any] | None = None) -> Any:
        """
        What the processor makes of a batch of texts that show one image each.

        Raises:
            ImageError: If it does not take an image.
        """
        given = {"images_kwargs": options} if options else {}
        try:
            return self._processor(
                text=[self.marker] * len(images),
                images=[[image] for image in images],
                padding=True,
                return_tensors="pt",
                add_special_tokens=False,
                **given,
            )
        except (ValueError, TypeError, KeyError) as error:
            reason, sizes = (
                " ".join(str(error).split()).rstrip("."),
                [f"{image.width} by {image.height}" for image in images],
            )
            raise ImageError(f"The processor refuses an image of {', '.join(sizes)}: {reason}.") from error

    def encode(self, part: dict[str, Any]) -> EncodedImage:
        """
        The image or video of a part of a message. What else is in the part is an option of the processor for it, such
        as `max_pixels`; of a video `fps` is how many of its frames there are per second.

        Raises:
            ImageError: If the processor does not take it.
        """
        options = {name: value for name, value in part.items() if name not in ("type", part["type"], "alt")}
        chosen = repr(sorted(options.items()))
        if part["type"] == "video":  # as long as its first frame
            shown, name = part["video"][0], f"video {[*map(image_digest, part['video'])]} {chosen}"
            key = id(shown), name
        else:
            shown, name = part["image"], ""
            key = id(shown), chosen
        kept = self._of_object.get(key)
        if kept is not None and kept[0]() is shown:
            return kept[1]
        name = name or f"{image_digest(shown)} {chosen}"
        encoded = self._known.get(name)
        if encoded is None:
            encoded = self._known[name] = self._encoded(name, part, options)
            self._by_id[encoded.id] = encoded
        self._of_object[key] = weakref.ref(shown, lambda _: self._of_object.pop(key, None)), encoded
        return encoded

    def _encoded(self, name: str, part: dict[str, Any], options: dict[str, Any]) -> EncodedImage:
        is_video = part["type"] == "video"
        found = self._process_video(part["video"], options) if is_video else self._process([part["image"]], options)
        # an even number, for a video an odd one, see `kinds`
        number = -2 - 2 * (int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "big") >> 2) + is_video
        while number in self._by_id:  # another image of these 30 bits
            number = number - 2 if number > -(2**31) + 1 else -2 + is_video
        tokens = found["input_ids"][0].tolist()
        token = self._video_id if is_video else self.token_id
        size = tokens.count(token)
        if not size:
            shown = part["video"][0] if is_video else part["image"]
            raise ImageError(
                f"The processor gives {'a video' if is_video else 'an image'} of {shown.width} by {shown.height} no "
                "tokens."
            )
        tokens = [number if each == token else each for each in tokens]
        return EncodedImage(number, tokens, ImageInputs(size, _of_images(found)))

    def _process_video(self, frames: Sequence[Any], options: dict[str, Any]) -> Any:
        if self._video_marker is None:
            raise ImageError(
                "The model is not shown videos, as it, its processor or its chat template has no place for one: show "
                "frames as images."
            )
        others = {name: value for name, value in options.items() if name != "fps"}
        metadata = {"total_num_frames": len(frames), "frames_indices": list(range(len(frames)))}
        if "fps" in options:
            metadata["fps"] = options["fps"]
        try:
            return self._processor(
                text=[self._video_marker],
                videos=[list(frames)],
                return_tensors="pt",
                add_special_tokens=False,
                videos_kwargs={"video_metadata": [metadata], "do_sample_frames": False, **others},
            )
        except (ValueError, TypeError, KeyError) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise ImageError(
                f"The processor refuses a video of {len(frames)} frames of {frames[0].width} by {frames[0].height}: "
                f"{reason}."
            ) from error

    # Escaped text

    def place(self, text: str, parts: Sequence[dict[str, Any]]) -> str | None:
        """Rendered text with the ids of its images, in order; `None` if it shows more or fewer."""
        places = list(self._markers.finditer(text))
        wanted = [self._video_marker if part["type"] == "video" else self.marker for part in parts]
        for part, marker in zip(parts, wanted, strict=True):
            if marker is None:
                self.encode(part)  # says why it cannot be shown
        if [place.group() for place in places] != wanted:
            return None
        found, begin = "", 0
        for place, part in zip(places, parts, strict=True):
            found += f"{text[begin : place.end()]}{_BEGIN}{-self.encode(part).id}{_END}"
            begin = place.end()
        return found + text[begin:]

    def sections(self, text: str) -> Iterable[str | EncodedImage]:
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
            marker = self._video_marker if image.id & 1 else self.marker
            yield f"{marker}{_BEGIN}{-image.id}{_END}"
            begin = index = first + len(image.tokens)
        yield ids[begin:]
