"""Images that rows show, as TRL takes them, and whether a run can show them to its model."""

from __future__ import annotations

from typing import Any

from datasets import Dataset, Image, IterableDataset, List
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin
from trl.data_utils import prepare_multimodal_messages

from mt_grpo.errors import ConfigError
from mt_grpo.forward.images import image_token, video_token
from mt_grpo.images import ImageError, read_image, read_parts
from mt_grpo.rollout import Engine
from mt_grpo.rollout.engine import ImageEngine
from mt_grpo.rollout.images import ImageEncoder

IMAGE_COLUMNS = ("image", "images")
"""Columns with the images of a prompt."""


def tokenizer_in(processing_class: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a processor, with the processor's chat template, or a tokenizer itself."""
    if not isinstance(processing_class, ProcessorMixin):
        return processing_class
    tokenizer = processing_class.tokenizer
    if processing_class.chat_template is not None:
        tokenizer.chat_template = processing_class.chat_template
    return tokenizer


def with_its_images(row: dict[str, Any]) -> dict[str, Any]:
    """
    A row whose prompt shows the images of its columns. As in TRL they stand before the words of the first message of
    the user, or where the prompt has places for them, `{"type": "image"}`.

    Raises:
        ConfigError: If there are more or fewer images than places, or one cannot be read.
    """
    images = row.get("images") if row.get("images") is not None else row.get("image")
    if images is None:
        return row
    images = images if isinstance(images, (list, tuple)) else [images]
    prompt = row["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        messages = [
            {**message, "content": _places(message["content"])}
            if isinstance(message.get("content"), list)
            else message
            for message in messages
        ]
        messages = prepare_multimodal_messages(messages, images=[read_image(image) for image in images])
        return {**row, "prompt": [_with_text(message) for message in messages]}
    except ImageError as error:
        raise ConfigError(f"The images of a row cannot be shown: {error}") from error
    except ValueError as error:  # TRL counts them
        raise ConfigError(f"The images of a row cannot be shown: {str(error).rstrip('.')}.") from error


def _places(content: list[Any]) -> list[Any]:
    """A content's parts without the empty keys of a table; those for images may be places without one."""
    parts = [{key: value for key, value in part.items() if value is not None} for part in content]
    return [part if part == {"type": "image"} else read_parts([part])[0] for part in parts]


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message of one text as text, which environments may look at."""
    content = message.get("content")
    if isinstance(content, list) and len(content) == 1 and content[0]["type"] == "text":
        return {**message, "content": content[0]["text"]}
    return message


def image_encoder(processor: Any, config: PreTrainedConfig, engine: Engine) -> ImageEncoder | None:
    """What encodes the images of a run; `None` where model, processor or engine take none."""
    takes, token = isinstance(processor, ProcessorMixin) and "image_processor" in vars(processor), image_token(config)
    if takes and token is not None and isinstance(engine, ImageEngine):
        return ImageEncoder(processor, token, video_token(config))
    return None


def check_images(encoder: ImageEncoder | None, config: PreTrainedConfig, engine: Engine, *data: Any) -> None:
    """
    Refuses datasets with images where the model cannot be shown them.

    Raises:
        ConfigError: If one has a column `image` or `images` of images, and there is no encoder.
    """
    every = [rows for one in data for rows in (one.values() if isinstance(one, dict) else [one])]
    column = next((name for rows in every for name in IMAGE_COLUMNS if _holds_images(rows, name)), None)
    if encoder is not None or column is None:
        return
    if image_token(config) is None:
        problem, mend = "the model takes text only", "use a model that takes images"
    elif not isinstance(engine, ImageEngine):
        problem = f"{type(engine).__name__} is given tokens of text only"
        mend = "sample with the model itself (`use_vllm: false`)"
    else:
        problem, mend = "there is no processor of images", "pass the model's processor as `processing_class`"
    raise ConfigError(
        f"The column {column!r} of the dataset holds images, and {problem}: {mend}, or remove the column "
        f"(`remove_columns({column!r})`)."
    )


def _holds_images(rows: Dataset | IterableDataset | None, name: str) -> bool:
    feature = ((None if rows is None else rows.features) or {}).get(name)
    return isinstance(feature, Image) or (isinstance(feature, List) and isinstance(feature.feature, Image))
