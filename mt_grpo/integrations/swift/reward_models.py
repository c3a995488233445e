"""ms-swift's plugins for reward models: what a trained model says of conversations is an outcome reward."""

from __future__ import annotations

from typing import Any

from mt_grpo.errors import ConfigError
from mt_grpo.integrations.swift.orm import ORM
from mt_grpo.rewards import REWARDS
from mt_grpo.trajectory import Message


class DefaultRMPlugin:
    """
    Scores conversations by the first logit of a classifier.

    Args:
        model: A `transformers` model for sequence classification.
        template (`RewardTemplate`): Makes its inputs.
    """

    def __init__(self, model: Any, template: Any) -> None:
        self.model, self.template = model, template

    def __call__(self, inputs: list[dict[str, Any]], **kwargs: Any) -> Any:
        """
        The rewards of a batch, `(B,)`.

        Args:
            inputs (`list[dict]`): The columns of each row, with `messages`, the whole conversation.
        """
        import torch

        encoded = self.template.data_collator([self.template.encode(one) for one in inputs])
        with torch.inference_mode():
            return self.model(**to_device(encoded, self.model.device)).logits[:, 0]


class RewardTemplate:
    """
    Makes the inputs of a reward model from conversations, by its own chat template.

    Args:
        tokenizer: The reward model's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def encode(self, inputs: dict[str, Any]) -> dict[str, list[int]]:
        """The ids of one conversation."""
        return dict(self.tokenizer.apply_chat_template(inputs["messages"], return_dict=True))

    def data_collator(self, batch: list[dict[str, list[int]]]) -> dict[str, Any]:
        """A padded batch, `(B, T)`."""
        return dict(self.tokenizer.pad(batch, return_tensors="pt"))


class PluginReward(ORM):
    """
    What a plugin says. Recipes name it by the plugin's name and give it a model, as
    `outcome_reward_funcs: [{name: my_plugin, model: path/or/id}]`.

    Args:
        model (`str`): A model for sequence classification, with a chat template: a folder or an id of the Hub.
    """

    plugin_class: type = DefaultRMPlugin

    def __init__(self, model: str) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        super().__init__()
        try:
            loaded = AutoModelForSequenceClassification.from_pretrained(model).eval()
            tokenizer = AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"The reward model {model!r} of {self.name!r} cannot be loaded: {str(error).splitlines()[0]}"
            ) from error
        self.plugin = self.plugin_class(loaded, RewardTemplate(tokenizer))

    def __call__(self, completions: list[str], messages: list[list[Message]], **kwargs: Any) -> list[float]:
        """The rewards of a batch."""
        inputs = kwargs.pop("trajectory_inputs")
        last = [inputs[session][-1] for session in kwargs["request_id"]]
        return [float(reward) for reward in self.plugin(inputs=last, **kwargs)]


def register_plugin(name: str, plugin: type) -> None:
    """Lets recipes name a plugin in `outcome_reward_funcs`."""
    if plugin is DefaultRMPlugin:  # which `PluginReward` is for, by its path
        return
    reward = type(plugin.__name__, (PluginReward,), {"plugin_class": plugin, "name": name, "__doc__": plugin.__doc__})
    REWARDS.add(name, reward, plugin.__module__)


def to_device(inputs: dict[str, Any], device: Any) -> dict[str, Any]:
    """Tensors on a device."""
    return {name: value.to(device) for name, value in inputs.items()}


class TransformersEngine:
    """A name that ms-swift's files import for reward models that write; none is run here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            "A reward model that writes is not run in the trainer: serve it, and ask it in an `AsyncORM` over HTTP."
        )
