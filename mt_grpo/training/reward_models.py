"""Reward models, as TRL's trainer takes them: sequence classifiers, by the name of a model or as an object."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from mt_grpo.errors import ConfigError
from mt_grpo.options.values import names_model
from mt_grpo.rewards import FunctionReward, RewardFunc
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.model import resolve_model, source_options


class ModelReward(FunctionReward):
    """
    The logit of a sequence classifier with one label for the whole conversation. It reads texts where prompts are
    text, else the conversation in the reward model's own chat template. TRL's trainer loads the model and its
    tokenizer, and places it on the device; `use` takes them from there.
    """

    collective = True

    def __init__(self, model: str | nn.Module, **where: Any) -> None:
        super().__init__(self._judge)
        self.model = _resolved(model, where) if isinstance(model, str) else model
        self.name = Path(model if isinstance(model, str) else model.config.name_or_path).name or type(model).__name__
        self._tokenizer: Any = None
        self._template_kwargs: dict[str, Any] = {}

    def use(self, model: nn.Module, tokenizer: Any, template_kwargs: dict[str, Any]) -> None:
        """Takes the model as it was loaded and placed, its tokenizer, and variables for the chat template."""
        self.model, self._tokenizer, self._template_kwargs = model, tokenizer, template_kwargs

    def score_nothing(self) -> None:
        """
        A forward of a single token. Where the model's weights are sharded, the other processes wait for it in theirs.
        """
        self._logits({name: torch.ones(1, 1, dtype=torch.int64) for name in ("input_ids", "attention_mask")})

    def _judge(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        whole = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        try:
            inputs = self._encoded(whole)
        except Exception:  # its template refuses what the conversations of other processes may not have
            self.score_nothing()
            raise
        return self._logits(inputs)[:, 0].float().tolist()

    def _encoded(self, whole: list[Any]) -> dict[str, torch.Tensor]:
        texts = [
            each
            if isinstance(each, str)
            else self._tokenizer.apply_chat_template(each, tokenize=False, **self._template_kwargs)
            for each in whole
        ]
        return self._tokenizer(
            text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )

    def _logits(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        device = next(self.model.parameters()).device
        with torch.inference_mode():
            return self.model(**{name: tensor.to(device) for name, tensor in inputs.items()}).logits


def _resolved(name: str, where: dict[str, Any]) -> str:
    """
    The model that a name stands for. TRL's trainer gives one without a layer for a number a random one, and says
    nothing.
    """
    model = resolve_model(name, where.get("revision"))
    try:
        config, _ = PreTrainedConfig.get_config_dict(model, **where)
    except OSError:  # an adapter has none
        return model
    kind = (config.get("architectures") or [""])[0]
    if kind.endswith(("ForCausalLM", "ForConditionalGeneration", "ForMaskedLM")):
        raise ConfigError(
            f"The reward model {name!r} is a {kind}, which gives words and no number: name a sequence classifier with "
            "one label."
        )
    labels = len(config.get("id2label", "01"))  # it is left out of the file where there are two
    if kind.endswith("ForSequenceClassification") and labels != 1:
        raise ConfigError(
            f"The reward model {name!r} is a classifier with {labels} labels: name one with one label, whose logit is "
            "the reward."
        )
    return model


def with_models(entries: Sequence[Any], args: MTGRPOConfig) -> list[Any]:
    """Entries of `outcome_reward_funcs`, with those that are models, or name one, as `ModelReward`."""
    where = source_options(args)
    return [
        ModelReward(entry, **where)
        if isinstance(entry, nn.Module) or (isinstance(entry, str) and names_model(entry))
        else entry
        for entry in entries
    ]


def as_in_trl(reward: RewardFunc) -> Any:
    """What TRL's trainer takes for a reward: the model that it is to load, or something to count and to name."""
    return reward.model if isinstance(reward, ModelReward) else reward.score
