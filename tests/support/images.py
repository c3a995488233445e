"""Tiny vision-language models, and a processor that needs no torchvision."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from PIL import Image
from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin

from mt_grpo.rollout.engines import ScriptedEngine
from support.models import build_tokenizer
from support.vision import _vocabulary

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PATCH, MERGE = 4, 2


class ImageTextProcessor(ProcessorMixin):
    """Qwen2.5-VL's processor without its part for videos, which needs torchvision."""

    image_token = "<|image_pad|>"

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def replace_image_token(self, image_inputs: dict, image_idx: int, **kwargs: object) -> str:
        return self.image_token * int(image_inputs["image_grid_thw"][image_idx].prod() // MERGE**2)

    @property
    def model_input_names(self) -> list[str]:
        return [*super().model_input_names, "mm_token_type_ids"]


class VideoTextProcessor(ImageTextProcessor):
    """With videos too, which are given as frames: two frames are one of the video's patches in time."""

    video_token = "<|video_pad|>"
    timed = True
    """Whether positions follow the time, as those of Qwen2.5-VL do."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        super().__init__(image_processor, tokenizer, chat_template)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        self.video_processor = self._frames

    def _frames(self, videos: list[list[Image.Image]], video_metadata: list[dict], **options: object) -> dict:
        pixels, grids = [], []
        for frames in videos:
            found = [self.image_processor(images=[frame], return_tensors="pt") for frame in frames]
            patches = [each["pixel_values"].unflatten(1, (3, 2, -1)) for each in found]
            for first, second in zip(patches[::2], patches[1::2], strict=True):
                pixels.append(torch.cat([first[:, :, :1], second[:, :, 1:]], dim=2).flatten(1))
            grids.append([len(frames) // 2, *found[0]["image_grid_thw"][0, 1:].tolist()])
        found = {"pixel_values_videos": torch.cat(pixels), "video_grid_thw": torch.tensor(grids)}
        seconds = {"second_per_grid_ts": torch.tensor([2 / float(each.get("fps", 24)) for each in video_metadata])}
        return {**found, **(seconds if self.timed else {})}

    def replace_video_token(self, video_inputs: dict, video_idx: int, **kwargs: object) -> str:
        return self.video_token * int(video_inputs["video_grid_thw"][video_idx].prod() // MERGE**2)

    @property
    def model_input_names(self) -> list[str]:
        return [*super().model_input_names, "pixel_values_videos", "video_grid_thw", "second_per_grid_ts"]


class UntimedVideoProcessor(VideoTextProcessor):
    """As Qwen3-VL's, which writes the time before each two frames."""

    timed = False

    def replace_video_token(self, video_inputs: dict, video_idx: int, **kwargs: object) -> str:
        pairs, height, width = video_inputs["video_grid_thw"][video_idx].tolist()
        frames = self.video_token * (height * width // MERGE**2)
        return "".join(f"<{pair} seconds><|vision_start|>{frames}<|vision_end|>" for pair in range(pairs))


def build_processor(
    template: str = "qwen2_5_vl", kind: type[ImageTextProcessor] = ImageTextProcessor, **options: object
) -> ImageTextProcessor:
    """A tokenizer with vision tokens, and Qwen2-VL's image processor for small images; one token is 8 by 8 pixels."""
    tokenizer = build_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)})
    sizes = {"min_pixels": 64, "max_pixels": 4096, "merge_size": MERGE, **_SIZES}
    images = hf.Qwen2VLImageProcessorPil(**{**sizes, **options})
    return kind(images, tokenizer, tokenizer.chat_template)


_ROPE = {"rope_type": "default", "rope_theta": 1000.0}
_SIZES = {"patch_size": PATCH, "temporal_patch_size": 2}
_LAYERS = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "initializer_range": 0.2}
_VISION = {**_LAYERS, **_SIZES, "spatial_merge_size": MERGE}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2},
    "head_dim": 16,
    "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 0], "mrope_interleaved": True, "partial_rotary_factor": 0.25},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_EXPERTS |= {"shared_expert_intermediate_size": 16}
_PLACES = {"num_position_embeddings": 64, "deepstack_visual_indexes": []}
FAMILIES: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "qwen2_5_vl": ("Qwen2_5_VL", {}, {"window_size": 16, "fullatt_block_indexes": [1]}),
    "qwen3_vl": ("Qwen3VL", {}, {**_PLACES, "deepstack_visual_indexes": [0]}),
    "qwen3_5": ("Qwen3_5", _LINEAR, _PLACES),
    "qwen2_vl": ("Qwen2VL", {}, {"hidden_size": 32, "embed_dim": 16}),
    "qwen3_5_moe": ("Qwen3_5Moe", {**_LINEAR, **_EXPERTS}, _PLACES),
}
"""How the classes of models begin, and what their decoders and vision towers have of their own."""


_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
SERVED = {"hidden_size": 64, "rope_parameters": {**_ROPE, "mrope_section": [8, 4, 4]}, **_HEADS}
"""A decoder of Qwen2.5-VL with heads that vLLM's CPU build takes."""


def save_for_server(model: PreTrainedModel, processor: ImageTextProcessor, folder: Path) -> None:
    """Saves a Qwen2.5-VL with all that vLLM reads, also of videos."""
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    for name in ("processor_config.json", "tokenizer_config.json"):
        written = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(written | {"processor_class": "Qwen2_5_VLProcessor"}))
    videos = {"video_processor_type": "Qwen2VLVideoProcessor", "size": {"shortest_edge": 64, "longest_edge": 4096}}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos | _SIZES | {"merge_size": MERGE}))


def build_vision_model(
    tokenizer: PreTrainedTokenizerFast, seed: int = 0, family: str = "qwen2_5_vl", tied: bool = False, **decoder: Any
) -> PreTrainedModel:
    """A model of a few thousand parameters with random weights, which looks at its images."""
    torch.manual_seed(seed)
    name, text, vision = FAMILIES[family]
    ids = tokenizer.convert_tokens_to_ids(list(VISION_TOKENS))
    named = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    text = {**_vocabulary(tokenizer, rope_parameters=_ROPE | {"mrope_section": [2, 1, 1]}), **text, **decoder}
    config = getattr(hf, f"{name}Config")(
        text_config=text,
        vision_config={**_VISION, **vision, "out_hidden_size": text["hidden_size"]},
        tie_word_embeddings=tied,
        **dict(zip(named, ids, strict=True)),
    )
    return getattr(hf, f"{name}ForConditionalGeneration")(config)


def picture(color: tuple[int, int, int] | str = "red", size: tuple[int, int] = (24, 16)) -> Image.Image:
    """An image with a gradient over a color, so that its patches differ."""
    image = Image.new("RGB", size, color)
    image.paste(Image.linear_gradient("L").resize((size[0] // 2, size[1])).convert("RGB"), (0, 0))
    return image


class ScriptedSight(ScriptedEngine):
    """A scripted engine that is given images."""

    async def generate_with_media(self, context: list[int], images: Any, *others: Any) -> Any:
        return await self.generate(context, *others)
