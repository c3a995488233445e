"""A tiny random model of each vision family, with a processor of its kind that needs no torchvision."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from tokenizers import AddedToken
from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin
from transformers.image_processing_backends import PilBackend
from transformers.models.llama4.processing_llama4 import chat_template as LLAMA4

from support.models import TEMPLATES, build_tokenizer

Family = tuple[ProcessorMixin, PreTrainedModel]

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 1024}
TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.2, **HEADS}
LAYERS = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION = {**LAYERS, "image_size": 16, "patch_size": 4, "initializer_range": 0.2}
PIXTRAL = {**VISION, "model_type": "pixtral", "head_dim": 8, "image_size": 32}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
SQUARE = {"height": 16, "width": 16}

_PARTS = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ 'IMAGE' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}"
)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    + _PARTS
    + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    "<s>{% for message in messages %}{% if message['role'] == 'user' %}[INST]"
    + _PARTS.replace("IMAGE", "[IMG]")
    + "[/INST]{% else %}"
    + _PARTS
    + "</s>{% endif %}{% endfor %}"
)
"""Short templates in the form of those that come with many models, and with Mistral's."""

IDEFICS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
IDEFICS += [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]


def _tokenizer(template: str, special: list[str], end: str, **named: str) -> PreTrainedTokenizerFast:
    tokenizer = build_tokenizer()
    file = TEMPLATES / f"{template}.jinja"
    tokenizer.chat_template = file.read_text() if len(template) < 20 and file.exists() else template
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in [*special, end]])
    tokenizer.eos_token = end
    for name, token in named.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    return tokenizer


def _vocabulary(tokenizer: PreTrainedTokenizerFast, **more: Any) -> dict[str, Any]:
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    return {**TEXT, "vocab_size": len(tokenizer), **special, **more}


def _random(model: Callable[[Any], PreTrainedModel], config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    made = model(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return made


def _model(name: str, text: dict[str, Any], vision: dict[str, Any], **config: Any) -> PreTrainedModel:
    parts = {"text_config": text, "vision_config": vision, "tie_word_embeddings": False}
    return _random(getattr(hf, f"{name}ForConditionalGeneration"), getattr(hf, f"{name}Config")(**{**parts, **config}))


def _without_videos(
    kind: type[ProcessorMixin], images: Any, tokenizer: PreTrainedTokenizerFast, **named: Any
) -> ProcessorMixin:
    """A processor of a kind that makes its part for videos itself; what else it would set has to be named."""

    class Processor(kind):
        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None) -> None:
            vars(self).update(named)
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    return Processor(images, tokenizer, tokenizer.chat_template)


def _idefics(small: bool) -> Family:
    template, begin = ("smolvlm", []) if small else ("idefics3", ["<|begin_of_text|>"])
    tokenizer = _tokenizer(template, [*begin, *IDEFICS], "<end_of_utterance>")
    sizes = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    if small:
        named = ("fake_image_token", "image_token", "end_of_utterance_token", "global_image_token")
        marks = dict(zip(named, IDEFICS[:4], strict=True)) | {"video_token": "<video>", "image_seq_len": 4}
        marks["image_token_id"] = tokenizer.convert_tokens_to_ids("<image>")
        images = hf.SmolVLMImageProcessorPil(**sizes)
        processor = _without_videos(hf.SmolVLMProcessor, images, tokenizer, **marks)
    else:
        images = hf.Idefics3ImageProcessorPil(**sizes)
        processor = hf.Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=tokenizer.chat_template)
    more = {"image_token_id": processor.image_token_id, "scale_factor": 2, "pad_token_id": tokenizer.pad_token_id}
    text = _vocabulary(tokenizer, model_type="llama")
    return processor, _model("SmolVLM" if small else "Idefics3", text, VISION, **more)


def _llava(name: str) -> Family:
    tokenizer = _tokenizer("llava_next", ["<s>", "<image>"], "</s>")
    grid = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]} if name == "LlavaNext" else {}
    images = getattr(hf, f"{name}ImageProcessorPil")(size={"shortest_edge": 16}, crop_size=SQUARE, **grid)
    options = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = getattr(hf, f"{name}Processor")(images, tokenizer, chat_template=tokenizer.chat_template, **options)
    text, vision = (
        _vocabulary(tokenizer, model_type="llama"),
        {"model_type": "clip_vision_model", "projection_dim": 16},
    )
    return processor, _model(name, text, VISION | vision, image_token_index=processor.image_token_id, **grid)


def _internvl() -> Family:
    tokens = ["<img>", "</img>", "<IMG_CONTEXT>"]
    tokenizer = _tokenizer(CHATML.replace("IMAGE", "<IMG_CONTEXT>\\n"), tokens, "<|im_end|>")
    marks = dict(zip(("start_image_token", "end_image_token", "image_token"), tokens, strict=True))
    marks |= {"image_token_id": tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"), "image_seq_length": 4}
    marks |= {"video_token": "<video>", "multimodal_pattern": re.compile("(?P<image><IMG_CONTEXT>)")}
    images = hf.GotOcr2ImageProcessorPil(size=SQUARE, min_patches=1, max_patches=3, crop_to_patches=True)
    processor = _without_videos(hf.InternVLProcessor, images, tokenizer, **marks)
    text, vision = _vocabulary(tokenizer, model_type="qwen2"), {"image_size": [16, 16], "patch_size": [4, 4]}
    return processor, _model("InternVL", text, VISION | vision, image_token_id=processor.image_token_id)


class _Pixtral(ProcessorMixin):
    """As Pixtral's, whose file needs torchvision: rows of tokens with a break between them."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, stride: int = 8, chat_template: str | None = None
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.stride, self.image_token = stride, "[IMG]"
        self.image_token_id = tokenizer.convert_tokens_to_ids("[IMG]")

    def _process_images(self, images: Any, **options: Any) -> Any:
        return super()._process_images(images, **{**options, "patch_size": self.stride})

    def replace_image_token(self, image_inputs: Any, image_idx: int, **options: Any) -> str:
        height, width = (int(size) // self.stride for size in image_inputs["image_sizes"][image_idx])
        return "[IMG_BREAK]".join(["[IMG]" * width] * height) + "[IMG_END]"

    @property
    def model_input_names(self) -> list[str]:
        return [*super().model_input_names, "image_sizes"]


def _pixtral(name: str, patch: int, **config: Any) -> Family:
    tokenizer = _tokenizer(MISTRAL, ["<s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"], "</s>")
    images = hf.PixtralImageProcessorPil(size={"longest_edge": 32}, patch_size={"height": patch, "width": patch})
    processor = _Pixtral(images, tokenizer, chat_template=tokenizer.chat_template)
    text, vision = _vocabulary(tokenizer, model_type="mistral"), PIXTRAL | {"patch_size": patch}
    return processor, _model(name, text, vision, image_token_index=processor.image_token_id, **config)


def _gemma3() -> Family:
    marks = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer = _tokenizer("gemma3", ["<bos>", "<start_of_turn>", *marks.values()], "<end_of_turn>", **marks)
    tokenizer.bos_token = "<bos>"
    images = hf.Gemma3ImageProcessorPil(size=SQUARE)
    processor = hf.Gemma3Processor(images, tokenizer, image_seq_length=4, chat_template=tokenizer.chat_template)
    text = _vocabulary(tokenizer, query_pre_attn_scalar=8, **SLIDING)
    vision = VISION | {"model_type": "siglip_vision_model", "vision_use_head": False}
    tokens = {"image_token_index": tokenizer.image_token_id, "mm_tokens_per_image": 4}
    return processor, _model("Gemma3", text, vision, tie_word_embeddings=True, **tokens)


def gemma4_layers(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """What a decoder of Gemma 4 has of its own."""
    keys = {"global_head_dim": 8, "num_global_key_value_heads": 2, "num_kv_shared_layers": 0}
    return keys | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": len(tokenizer)}


def _gemma4(both_ways: bool) -> Family:
    marks = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
    others = ["<bos>", "<|turn>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>", "<|channel>", "<channel|>"]
    tokenizer = _tokenizer("gemma4_v5", [*others, *marks.values()], "<turn|>", **marks)
    tokenizer.bos_token = "<bos>"
    marks |= {"video_token": "<|video|>", "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image", "video", "audio")}
    images = hf.Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    processor = _without_videos(hf.Gemma4Processor, images, tokenizer, **marks, **ids)
    attention = {"use_bidirectional_attention": "vision" if both_ways else None}
    pooling = {"pooling_kernel_size": 2, "position_embedding_size": 64, "default_output_length": 70}
    vision = VISION | {"head_dim": 8, "num_key_value_heads": 2, **pooling}
    del vision["image_size"]
    text = _vocabulary(tokenizer, **SLIDING, **gemma4_layers(tokenizer), **attention)
    return processor, _model("Gemma4", text, vision, tie_word_embeddings=True, audio_config=None, **ids)


class _Tiles(PilBackend):
    """A wide image as two tiles and the whole, as Llama 4's image processor, which needs torchvision."""

    model_input_names = ["pixel_values"]  # noqa: RUF012

    def preprocess(self, images: Any, **options: Any) -> hf.BatchFeature:
        tiles, ratios = [], []
        for image in images:
            count = 2 if image.width > 1.2 * image.height else 1
            wide = image.convert("RGB").resize((16 * count, 16))
            parts = [wide.crop((16 * number, 0, 16 * number + 16, 16)) for number in range(count)]
            tiles += [*parts, image.convert("RGB").resize((16, 16))] if count > 1 else parts
            ratios.append([1, count])
        pixels = np.stack([np.asarray(tile, dtype=np.float32).transpose(2, 0, 1) / 127.5 - 1 for tile in tiles])
        return hf.BatchFeature({"pixel_values": torch.from_numpy(pixels), "aspect_ratios": torch.tensor(ratios)})

    __call__ = preprocess

    def fetch_images(self, images: list[Image.Image]) -> list[Image.Image]:
        return images


def _llama4() -> Family:
    special = ["begin_of_text", "header_start", "header_end", "tile_x_separator", "tile_y_separator"]
    special += ["image", "image_start", "image_end", "patch"]
    tokenizer = _tokenizer(LLAMA4, [f"<|{token}|>" for token in special], "<|eot|>")
    tokenizer.bos_token = "<|begin_of_text|>"
    processor = hf.Llama4Processor(_Tiles(), tokenizer, patch_size=4, chat_template=tokenizer.chat_template)
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 32}
    text = _vocabulary(tokenizer, num_hidden_layers=4, attention_chunk_size=24, **experts)
    outputs = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    vision = VISION | {"intermediate_size": 64, **outputs}
    return processor, _model("Llama4", text, vision, image_token_index=tokenizer.convert_tokens_to_ids("<|patch|>"))


_BOTH_WAYS = "attends among the tokens of an image in both directions"
_LAST = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
VISION_FAMILIES: dict[str, tuple[Callable[[], Family], str]] = {
    "idefics 3": (partial(_idefics, small=False), "tree"),
    "smolvlm": (partial(_idefics, small=True), "tree"),
    "llava": (partial(_llava, "Llava"), "tree"),
    "llava-next": (partial(_llava, "LlavaNext"), "tree"),
    "internvl": (_internvl, "tree"),
    "pixtral": (partial(_pixtral, "Llava", 8, **_LAST), "tree"),
    "mistral 3": (partial(_pixtral, "Mistral3", 4, spatial_merge_size=2), "tree"),
    "gemma 4 e2b": (partial(_gemma4, both_ways=False), "tree"),
    "gemma 4": (partial(_gemma4, both_ways=True), _BOTH_WAYS),
    "gemma 3": (_gemma3, _BOTH_WAYS),
    "llama 4": (_llama4, "has no linear output layer apart from the rest"),
}
"""What makes a processor and a model of each family; and `"tree"`, or why trees cannot be packed for it."""

BROKEN = "transformers 5.24.0's Llama 4 with images fails in its own forward: runs with any other version"
RUNNABLE = [
    pytest.param(name, marks=pytest.mark.skipif(name == "llama 4" and hf.__version__ == "5.24.0", reason=BROKEN))
    for name in VISION_FAMILIES
]
"""The families whose model has a forward that runs."""
