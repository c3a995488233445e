"""Reward models, as TRL's trainer takes them: sequence classifiers, by the name of a model or as an object."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mt_grpo.options import names_model
from mt_grpo.rewards import FunctionReward, RewardFunc
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.model import resolve_model


class ModelReward(FunctionReward):
    """
    The logit of a sequence classifier with one label for the whole conversation. It reads texts where prompts are
    text, else the conversation in the reward model's own chat template. TRL's trainer loads the model and its
    tokenizer, and places it on the device; `use` takes them from there.

    Args:
        model (`str` or `Module`): A folder, a Hub id, or the model.
        revision (`str`, *optional*): Revision on the Hub, where it is one.

    Raises:
        ConfigError: If there is no such model.
    """

    def __init__(self, model: str | nn.Module, revision: str | None = None) -> None:
        super().__init__(self._judge)
        self.model = resolve_model(model, revision) if isinstance(model, str) else model
        self.name = Path(model if isinstance(model, str) else model.config.name_or_path).name or type(model).__name__
        self._tokenizer: Any = None
        self._template_kwargs: dict[str, Any] = {}

    def use(self, model: nn.Module, tokenizer: Any, template_kwargs: dict[str, Any]) -> None:
        """Takes the model as it was loaded and placed, its tokenizer, and variables for the chat template."""
        self.model, self._tokenizer, self._template_kwargs = model, tokenizer, template_kwargs

    def _judge(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        whole = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        texts = [
            each
            if isinstance(each, str)
            else self._tokenizer.apply_chat_template(each, tokenize=False, **self._template_kwargs)
            for each in whole
        ]
        inputs = self._tokenizer(
            text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        with torch.inference_mode():
            logits = self.model(**inputs.to(next(self.model.parameters()).device)).logits
        return logits[:, 0].float().tolist()


def with_models(entries: Sequence[Any], args: MTGRPOConfig) -> list[Any]:
    """Entries of `outcome_reward_funcs`, with those that are models, or name one, as `ModelReward`."""
    revision = (args.model_init_kwargs or {}).get("revision")
    return [
        ModelReward(entry, revision)
        if isinstance(entry, nn.Module) or (isinstance(entry, str) and names_model(entry))
        else entry
        for entry in entries
    ]


def as_in_trl(reward: RewardFunc) -> Any:
    """What TRL's trainer takes for a reward: the model that it is to load, or something to count and to name."""
    return reward.model if isinstance(reward, ModelReward) else reward.score
