"""The shape of a model, from its configuration: parameters counted on the meta device, without their memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedConfig


@dataclass(frozen=True)
class Shape:
    """
    Args:
        parameters (`int`): Of the model; tied ones count once.
        trained (`int`): Those that are trained: all, or the adapter's.
        adapter (`int`): Those of the adapter; 0 where the whole model is trained.
        layers, hidden, intermediate, vocabulary, kv_heads, head_size (`int`): As in its configuration.
    """

    parameters: int
    trained: int
    adapter: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    kv_heads: int
    head_size: int

    def kv_bytes(self, size: int) -> int:
        """Bytes of the keys and values of one token, in elements of `size` bytes."""
        return 2 * self.layers * self.kv_heads * self.head_size * size


def read_shape(config: PreTrainedConfig, peft: PeftConfig | None = None, **options: Any) -> Shape:
    """
    The shape of the model that a configuration describes.

    Args:
        config (`PreTrainedConfig`): Of the model.
        peft (`PeftConfig`, *optional*): Of its adapter, where one is trained.
        **options: For `from_config`, e.g. `trust_remote_code`.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **options)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        adapter = 0
        if peft is not None:
            adapted = get_peft_model(model, peft)
            adapter = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    text = config.get_text_config()
    heads = text.num_attention_heads
    return Shape(
        parameters,
        adapter or parameters,
        adapter,
        text.num_hidden_layers,
        text.hidden_size,
        getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        text.vocab_size,
        getattr(text, "num_key_value_heads", None) or heads,
        getattr(text, "head_dim", None) or text.hidden_size // heads,
    )
