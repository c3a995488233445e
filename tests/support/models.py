"""Tiny models and tokenizers, and what a trainer needs to train one on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
WORDS = "reasoning tool name search args query result answer capital of Peru Lima What is the add number user".split()
CPU_RUN = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": [],
    "disable_tqdm": True,
    "logging_steps": 1,
    "save_strategy": "no",
    "per_device_train_batch_size": 4,
    "num_generations": 4,
}
"""Options of a trainer that does its few small steps in float32 on a CPU and leaves no checkpoints."""
DEEPSPEED_RUN = {"use_cpu": False, "ddp_backend": "gloo"}
"""Further options under DeepSpeed, which accelerate leaves out where it is told to use a CPU."""


def build_tokenizer(template: str = "qwen3") -> PreTrainedTokenizerFast:
    """A byte-level BPE with ChatML tokens and one of TRL's bundled chat templates."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 8, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<|endoftext|>", "<|im_start|>")])
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in ("<think>", "</think>", "<tool_call>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0, **overrides: object) -> Qwen3ForCausalLM:
    """A Qwen3 of a few thousand parameters with random weights, large enough to have opinions."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        **{
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "tie_word_embeddings": True,
            "initializer_range": 0.2,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
            **overrides,
        }
    )
    return Qwen3ForCausalLM(config)


def lookup(query: str) -> str:
    """
    Looks a query up.

    Args:
        query: What to look for.
    """
    return f"about {query}"


REMOTE = """
from transformers import Qwen3Config, Qwen3ForCausalLM


class RemoteConfig(Qwen3Config):
    model_type = "remote"


class RemoteForCausalLM(Qwen3ForCausalLM):
    config_class = RemoteConfig
"""


def bring_code(folder):
    """Gives the model in a folder code of its own, which loads where it is trusted."""
    classes = {"AutoConfig": "remote.RemoteConfig", "AutoModelForCausalLM": "remote.RemoteForCausalLM"}
    named = {"model_type": "remote", "architectures": ["RemoteForCausalLM"], "auto_map": classes}
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | named))
    (folder / "remote.py").write_text(REMOTE)
