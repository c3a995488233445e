"""ms-swift's reward classes and its plugins for reward models, as outcome rewards: one value per trajectory."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from functools import partialmethod
from typing import TYPE_CHECKING, Any

from mt_grpo.envs.env import RecordedEnv
from mt_grpo.errors import ConfigError
from mt_grpo.integrations.swift.scheduler import Names
from mt_grpo.rewards import REWARDS, FunctionReward
from mt_grpo.rewards.builtin import find_number, normalize_answer
from mt_grpo.trajectory import Message, Row, Trajectory

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Record = dict[str, Any]
"""A record of a trajectory: the columns of its row, `messages`, `rollout_infos` and `request_id`."""


class ORM(FunctionReward):
    """
    An outcome reward in ms-swift's form: subclass it with `__call__(self, completions, **kwargs) -> list[float]`,
    which may be `async`. It is called once per batch, with these keyword arguments, one entry per trajectory:

    - `completions`: the assistant's last message in the trajectory's last record.
    - the columns of the rows; `prompts` and `completion_ids` as in TRL.
    - `messages` and `rollout_infos` of the last record.
    - `request_id`: an identifier. `trajectory_inputs[request_id]` is the list of the trajectory's records, each a
      dictionary of the row's columns, `messages`, `rollout_infos` and `request_id`.
    """

    brings = ("messages", "rollout_infos", "request_id", "trajectory_inputs")
    takes_environments = False

    def __init__(self, args: object = None, **kwargs: object) -> None:
        self.args = args

    @property
    def function(self) -> Any:  # type: ignore[override]  # subclasses need not call `__init__`
        return self.__call__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} defines no `__call__`.")

    def arguments(self, trajectories: list[Trajectory], rows: list[Row]) -> dict[str, object]:
        inputs = {trajectory.session: _records(trajectory) for trajectory in trajectories}
        last = [inputs[trajectory.session][-1] for trajectory in trajectories]
        said = [[each for each in record["messages"] if each["role"] == "assistant"] for record in last]
        return {
            **super().arguments(trajectories, rows),
            "completions": [(messages[-1].get("content") or "") if messages else "" for messages in said],
            "messages": [record["messages"] for record in last],
            "rollout_infos": [record["rollout_infos"] for record in last],
            "request_id": [trajectory.session for trajectory in trajectories],
            "trajectory_inputs": inputs,
        }


class AsyncORM(ORM):
    """An `ORM` whose `__call__` is `async`. It is called once per batch too."""


def _records(trajectory: Trajectory) -> list[Record]:
    environment = trajectory.environment
    whole = [(trajectory.messages, trajectory.info)]
    records = environment.records if isinstance(environment, RecordedEnv) and environment.records else whole
    columns = {**trajectory.row, "request_id": trajectory.session}
    return [{**columns, "messages": messages, "rollout_infos": infos} for messages, infos in records]


def _register_orm(name: str, orm: type[ORM]) -> None:
    """Lets recipes name a reward class of a plugin in `outcome_reward_funcs`."""
    if orm is not Accuracy:  # recipes name it by its path: plugins register rewards of their own as "accuracy"
        args = inspect.signature(orm).parameters.get("args")
        if args is not None and args.default is args.empty:  # ms-swift's trainer passes its own arguments here
            orm.__init__ = partialmethod(orm.__init__, None)  # type: ignore[assignment, method-assign]
        orm.name = name
        REWARDS.add(name, orm, orm.__module__)


_MARKED = re.compile(r"<answer>(.*?)</answer>|\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", re.DOTALL)


class Accuracy(ORM):
    r"""
    1.0 if the last answer equals the column `solution`, else 0.0. The answer is what `<answer>` or `\boxed{}` holds,
    or else the last number. Numbers are compared by value, other answers as text without case and punctuation.
    Expressions are not evaluated.
    """

    def __call__(self, completions: list[str], solution: list[object], **kwargs: object) -> list[float]:
        return [float(is_right(said, str(right))) for said, right in zip(completions, solution, strict=True)]


def is_right(said: str, right: str) -> bool:
    """Whether two texts have the same final answer; see `Accuracy`."""
    given, wanted = _final(said), _final(right)
    if given is None or wanted is None:
        return False
    numbers = find_number(given), find_number(wanted)
    if None not in numbers and not re.search(r"[^\W\d_]", given + wanted):
        return numbers[0] == numbers[1]
    return normalize_answer(given) == normalize_answer(wanted)


def _final(text: str) -> str | None:
    marked = _MARKED.findall(text)
    if marked:
        return "".join(marked[-1]).strip() or None  # one of the two groups matched
    number = find_number(text)
    if number is not None:
        return str(number)
    return text if len(text.split()) <= 5 else None


class DefaultRMPlugin:
    """Scores conversations by the first logit of a `transformers` model for sequence classification."""

    def __init__(self, model: PreTrainedModel, template: _RewardTemplate) -> None:
        self.model, self.template = model, template

    def __call__(self, inputs: list[Record], **kwargs: object) -> torch.Tensor:
        """The rewards of a batch, `(B,)`."""
        import torch

        encoded = self.template.data_collator([self.template.encode(one) for one in inputs])
        with torch.inference_mode():
            return self.model(**to_device(encoded, self.model.device)).logits[:, 0]


class _RewardTemplate:
    """Encodes conversations for a reward model, with its own chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def encode(self, inputs: Record) -> dict[str, list[int]]:
        return dict(self.tokenizer.apply_chat_template(inputs["messages"], return_dict=True))

    def data_collator(self, batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        """A padded batch, `(B, T)`."""
        return dict(self.tokenizer.pad(batch, return_tensors="pt"))


class PluginReward(ORM):
    """The reward of a plugin for reward models: `outcome_reward_funcs: [{name: my_plugin, model: path/or/id}]`."""

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
        self.plugin = self.plugin_class(loaded, _RewardTemplate(tokenizer))

    def __call__(self, completions: list[str], messages: list[list[Message]], **kwargs: Any) -> list[float]:
        inputs = kwargs.pop("trajectory_inputs")
        last = [inputs[session][-1] for session in kwargs["request_id"]]
        return [float(reward) for reward in self.plugin(inputs=last, **kwargs)]


def _register_plugin(name: str, plugin: type) -> None:
    """Lets recipes name a plugin in `outcome_reward_funcs`."""
    if plugin is DefaultRMPlugin:  # recipes name `PluginReward` by its path
        return
    reward = type(plugin.__name__, (PluginReward,), {"plugin_class": plugin, "name": name, "__doc__": plugin.__doc__})
    REWARDS.add(name, reward, plugin.__module__)


def to_device(inputs: Mapping[str, torch.Tensor], device: torch.device | str) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in inputs.items()}


class TransformersEngine:
    """The name that ms-swift's files import for generative reward models, which are refused."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise ConfigError(
            "A reward model that writes is not run in the trainer: serve it, and ask it in an `AsyncORM` over HTTP."
        )


orms = Names("reward", ORM, _register_orm)
orms["accuracy"] = Accuracy
rm_plugins = Names("plugin of reward models", object, _register_plugin)
rm_plugins["default"] = DefaultRMPlugin
