"""Images, videos and sounds of messages as tokens, and as what the model takes: through the model's own processor."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from mt_grpo.forward.media import BLANK, SILENCE, TYPES, MediumInputs, concat_media_inputs
from mt_grpo.media import IMAGE, SOUND, VIDEO, MediumError, Part, digest, kind_of, kind_of_part
from mt_grpo.sounds import Sound

_OF_TEXT = ("input_ids", "attention_mask", *TYPES)  # what a processor returns of a text

_BEGIN, _END = "\U0001f76b2", "\U0001f76b3"
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


class EncodedMedium:
    """An image, a video or a sound as a model sees it."""

    __slots__ = ("__weakref__", "id", "inputs", "tokens")

    def __init__(self, id: int, tokens: list[int], inputs: MediumInputs) -> None:
        self.id, self.tokens, self.inputs = id, tokens, inputs


class MediaEncoder:
    """
    Encodes the images, videos and sounds of conversations. Each is encoded once, for as long as a conversation has it.

    In escaped text it is the text that the chat template writes for it, followed by its id between two marks.
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
