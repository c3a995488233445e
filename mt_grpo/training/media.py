"""Images that rows show, as TRL takes them, and sounds in the same way; and whether a run can show them."""

from __future__ import annotations

import importlib.util
from typing import Any

from datasets import Audio, Dataset, Image, IterableDataset, List
from transformers import AutoProcessor, PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin
from trl.data_utils import prepare_multimodal_messages

from mt_grpo.data.images import ImageOfRowError
from mt_grpo.errors import ConfigError
from mt_grpo.forward.media import media_tokens
from mt_grpo.media import IMAGE, SOUND, MediumError, Part, decode, is_decoded, is_image, media_of, read_parts, to_file
from mt_grpo.rollout import Engine
from mt_grpo.rollout.engine import MediaEngine
from mt_grpo.rollout.media import MediaEncoder, audio_feature_extractor
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.model import source_options
from mt_grpo.trajectory import Message

IMAGE_COLUMNS = ("image", "images")
"""Columns with the images of a prompt."""

SOUND_COLUMNS = ("audio", "audios")
"""Columns with the sounds of a prompt."""

MEDIA_COLUMNS = (*IMAGE_COLUMNS, *SOUND_COLUMNS)


def tokenizer_in(processing_class: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a processor, with the processor's chat template, or a tokenizer itself."""
    if not isinstance(processing_class, ProcessorMixin):
        return processing_class
    tokenizer = processing_class.tokenizer
    if processing_class.chat_template is not None:
        tokenizer.chat_template = processing_class.chat_template
    return tokenizer


def processing_of(model: Any, given: Any, args: MTGRPOConfig) -> Any:
    """
    The processor or tokenizer of a run: what is given, or else that of the model. TRL would look for it without a
    token and in no subfolder, and cannot take one of sounds alone.
    """
    if given is not None:
        return given
    name = model if isinstance(model, str) else model.config.name_or_path
    return AutoProcessor.from_pretrained(name, truncation_side="left", padding_side="left", **source_options(args))


def for_trl(processing_class: Any) -> Any:
    """
    What TRL's trainer is given for it: of a processor of sounds alone the tokenizer. TRL takes every processor for one
    of images, and asks the model's configuration for their token.
    """
    shows = not isinstance(processing_class, ProcessorMixin) or "image_processor" in vars(processing_class)
    return processing_class if shows else tokenizer_in(processing_class)


def with_column_media(row: dict[str, Any]) -> dict[str, Any]:
    """
    A row whose prompt shows the images of its columns, and plays the sounds. As in TRL images stand before the words
    of the first message of the user, or where the prompt has places for them, `{"type": "image"}`. Sounds do too:
    their places are `{"type": "audio"}`.
    """
    images, sounds = (_listed(row, columns) for columns in (IMAGE_COLUMNS, SOUND_COLUMNS))
    if images is None and sounds is None:
        return row
    prompt = row["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    what = "sounds" if images is None else "images" if sounds is None else "images and sounds"
    try:
        messages = [
            {**message, "content": _places(message["content"])}
            if isinstance(message.get("content"), list)
            else message
            for message in messages
        ]
        if images is not None:
            shown = [_shown(image, row) for image in images]
            messages = prepare_multimodal_messages(messages, images=shown)
        if sounds is not None:
            messages = _with_sounds(messages, _decoded([{"type": "audio", "audio": sound} for sound in sounds]))
        return {**row, "prompt": [_with_text(message) for message in messages]}
    except ImageOfRowError:
        raise
    except ValueError as error:  # TRL counts images
        done = "played" if images is None else "shown"
        raise ConfigError(f"The {what} of a row cannot be {done}: {str(error).rstrip('.')}.") from error


def _shown(image: Any, row: dict[str, Any]) -> Any:
    """An image of a row's column, decoded."""
    try:
        return _decoded([{"type": "image", "image": image}])[0]["image"]
    except MediumError as error:
        one, several = IMAGE_COLUMNS
        value = {"bytes": to_file(image)} if is_image(image) and not is_decoded(image) else image
        raise ImageOfRowError(error, one if row.get(several) is None else several, value) from error


def _decoded(parts: list[Part]) -> list[Part]:
    """Parts of a row, read; decoded at once, so that the conversations of a batch begin together."""
    read = read_parts(parts, of_row=True)
    for medium in media_of(read):
        decode(medium)
    return read


def _listed(row: dict[str, Any], columns: tuple[str, str]) -> list[Any] | None:
    """What the second of two columns has, or else the first, as a list; `None` where neither has any."""
    one, several = columns
    given = row.get(several) if row.get(several) is not None else row.get(one)
    if isinstance(given, (list, tuple)) and given and isinstance(given[0], (int, float)):
        return [given]  # samples: a table has arrays as lists
    return list(given) if isinstance(given, (list, tuple)) else None if given is None else [given]


def _with_sounds(messages: list[Message], sounds: list[Part]) -> list[Message]:
    """Messages with sounds in their places, or before the words of the first message of the user."""
    places = sum(part == PLACE for message in messages for part in _parts(message))
    if not places:
        first = next((number for number, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            raise MediumError("no message of the user is there to play them with.")
        said = messages[first]["content"]
        words = said if isinstance(said, list) else [{"type": "text", "text": said}]
        return [*messages[:first], {**messages[first], "content": [*sounds, *words]}, *messages[first + 1 :]]
    if places != len(sounds):
        raise MediumError(f"the prompt has {places} places for sounds, and the row has {len(sounds)} sounds.")
    left = iter(sounds)
    return [
        {**message, "content": [next(left) if part == PLACE else part for part in parts]}
        if (parts := _parts(message))
        else message
        for message in messages
    ]


PLACE = {"type": "audio"}
"""The part of a prompt where a sound of the row's column stands."""


def _parts(message: Message) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _places(content: list[Any]) -> list[Any]:
    """A content's parts without the empty keys of a table; those for images and sounds may be places without one."""
    parts = [{key: value for key, value in part.items() if value is not None} for part in content]
    return [part if part in ({"type": "image"}, PLACE) else read_parts([part], of_row=True)[0] for part in parts]


def _with_text(message: Message) -> Message:
    """A message of one text as text, which environments may look at."""
    content = message.get("content")
    if isinstance(content, list) and len(content) == 1 and content[0]["type"] == "text":
        return {**message, "content": content[0]["text"]}
    return message


def media_encoder(processor: Any, config: PreTrainedConfig, engine: Engine) -> MediaEncoder | None:
    """What encodes the images and sounds of a run; `None` where model, processor or engine take none."""
    inside = vars(processor) if isinstance(processor, ProcessorMixin) else {}
    tokens = media_tokens(config)
    sees = IMAGE in tokens and "image_processor" in inside
    hears = SOUND in tokens and bool(inside) and audio_feature_extractor(processor) is not None
    return MediaEncoder(processor, tokens) if (sees or hears) and isinstance(engine, MediaEngine) else None


def _is_server(engine: Engine) -> bool:
    from mt_grpo.rollout.engines.vllm.client import VLLMServerClient  # loaded for runs that have servers

    return isinstance(engine, VLLMServerClient)


def check_media(encoder: MediaEncoder | None, config: PreTrainedConfig, engine: Engine, *data: Any) -> None:
    """Refuses datasets with images or sounds where the model cannot be shown them."""
    every = [rows for one in data for rows in (one.values() if isinstance(one, dict) else [one])]
    for columns, feature, part, token, what in (
        (IMAGE_COLUMNS, Image, {"type": "image"}, media_tokens(config).get(IMAGE), "images"),
        (SOUND_COLUMNS, Audio, PLACE, media_tokens(config).get(SOUND), "sounds"),
    ):
        column = next((name for rows in every for name in columns if _holds(rows, name, feature)), None)
        if column is not None and feature is Audio and _is_server(engine):
            raise ConfigError(
                f"The column {column!r} of the dataset holds sounds, which are not sent to a vLLM server: set "
                f"`use_vllm: false`, or remove the column (`remove_columns({column!r})`)."
            )
        if column is None or (encoder is not None and encoder.takes(part)):
            continue
        if token is None:
            problem = "the model takes text only" if encoder is None else f"the model takes no {what}"
            mend = f"use a model that takes {what}"
        elif not isinstance(engine, MediaEngine):
            problem = f"{type(engine).__name__} is given tokens of text only"
            mend = "sample with the model itself (`use_vllm: false`)"
        else:
            problem, mend = f"there is no processor of {what}", "pass the model's processor as `processing_class`"
        raise ConfigError(
            f"The column {column!r} of the dataset holds {what}, and {problem}: {mend}, or remove the column "
            f"(`remove_columns({column!r})`)."
        )


def check_decoding(rows: Dataset | IterableDataset | None) -> None:
    """Refuses a dataset with a column of sounds that nothing here decodes, before a row is looked at."""
    for column, feature in ((None if rows is None else rows.features) or {}).items():
        inner = feature.feature if isinstance(feature, List) else feature
        if isinstance(inner, Audio) and inner.decode and importlib.util.find_spec("torchcodec") is None:
            raise ConfigError(
                f"The column {column!r} of the dataset is decoded with torchcodec, which is not installed: `pip "
                f"install torchcodec`, or give files as they are (`cast_column({column!r}, datasets.Audio(decode="
                "False))`)."
            )


def _holds(rows: Dataset | IterableDataset | None, name: str, kind: type) -> bool:
    feature = ((None if rows is None else rows.features) or {}).get(name)
    return isinstance(feature, kind) or (isinstance(feature, List) and isinstance(feature.feature, kind))
