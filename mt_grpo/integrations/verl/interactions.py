"""verl's interactions: classes that answer the model's turns and score them, and the environment that asks them."""

from __future__ import annotations

import copy
import inspect
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset

from mt_grpo.concurrency import call
from mt_grpo.envs.dialogue import DialogueEnv
from mt_grpo.envs.env import ConversationEnded, Outcome, Policy, Step, finite
from mt_grpo.envs.registry import environment, tool_arguments
from mt_grpo.envs.source import Prototype, source_of
from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean, import_object
from mt_grpo.rewards.gsm8k import find_number
from mt_grpo.trajectory import Message, Turn

KEYS = ("name", "class_name", "config")
"""Keys of an entry of an interaction file."""


class BaseInteraction(ABC):
    """
    Answers the model's turns. One object serves all conversations: keep state by `instance_id`. Methods that are not
    `async` run in threads. `**kwargs` are the row's `extra_info["interaction_kwargs"]`, with `name`.

    Args:
        config (`dict`): The entry's `config`, and its `name`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Called before the first turn of a conversation."""
        return uuid.uuid4().hex if instance_id is None else instance_id

    @abstractmethod
    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """
        Answers the last of `messages`, the assistant's.

        Returns:
            `(should_terminate, response, score, additional_data)`: whether the conversation ends, the user's words,
            the turn's reward or `None`, and data to keep in the trajectory's `info`.
        """

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        """The reward of the whole conversation, or `None`. Called when it is over."""
        return None

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Releases a conversation. Called after the rewards were computed, however the conversation ended."""
        return None


class Gsm8kInteraction(BaseInteraction):
    """
    Tells the model whether the last number that it wrote is right, and lets it try again until it is. A turn scores
    1.0 if right, else 0.0; the conversation scores as its last turn.

    A row's `interaction_kwargs` have `ground_truth`: a number, or GSM8K's worked solution that ends in `#### number`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._golds: dict[str, Decimal] = {}
        self._scores: dict[str, float] = {}

    async def start_interaction(self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any) -> str:
        instance_id = await super().start_interaction(instance_id)
        gold = find_number(str(ground_truth))
        if gold is None:
            raise ValueError(f"`ground_truth` in the row's `interaction_kwargs` holds no number: {ground_truth!r}.")
        self._golds[instance_id], self._scores[instance_id] = gold, 0.0
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        said = [message["content"] or "" for message in messages if message["role"] == "assistant"]
        right = bool(said) and find_number(said[-1]) == self._golds[instance_id]
        self._scores[instance_id] = float(right)
        if right:
            return True, "That is the right answer.", 1.0, {}
        return False, "That is not the right answer. Go over your steps, find the mistake, and answer again.", 0.0, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        return self._scores[instance_id]

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._golds.pop(instance_id, None)
        self._scores.pop(instance_id, None)


class WeatherInteraction(BaseInteraction):
    """
    Ends the conversation at the first message without a tool call: 1.0 if a tool was called before, else 0.0. The
    conversation scores the same. With `tools`, the tools are what the model is to use first.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._scores: dict[str, float] = {}

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        score = self._scores[instance_id] = float(any(message["role"] == "tool" for message in messages))
        return True, "Thank you." if score else "A tool was needed for that.", score, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        return self._scores.get(instance_id, 0.0)

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._scores.pop(instance_id, None)


BUILT_IN: dict[str, type[BaseInteraction]] = {
    "verl.interactions.gsm8k_interaction.Gsm8kInteraction": Gsm8kInteraction,
    "verl.interactions.weather_interaction.WeatherInteraction": WeatherInteraction,
}
"""Our classes for verl's, by the names in interaction files."""


class InteractionEnv(DialogueEnv):
    """
    A conversation with the interaction that `name` in the row's `extra_info["interaction_kwargs"]` chooses. Scores of
    turns are `Turn.reward`, `calculate_score` is a reward under the interaction's name, and additional data are in
    `info["interaction"]`.
    """

    interaction: BaseInteraction | None = None
    """The interaction of this conversation, once it has begun."""

    def __init__(self, interactions: Mapping[str, BaseInteraction], **options: Any) -> None:
        super().__init__(**options)
        self.interactions = interactions

    async def run(self, policy: Policy, row: dict[str, Any]) -> Outcome:
        """Starts the interaction, runs the loop of `DialogueEnv`, and asks for the score."""
        self.kwargs = find_kwargs(self.interactions, row)
        self.instance_id = uuid.uuid4().hex
        self.data: list[dict[str, Any]] = []
        self.interaction = self.interactions[self.kwargs["name"]]
        await self._call(partial(self.interaction.start_interaction, self.instance_id, **self.kwargs))
        try:
            outcome = await super().run(policy, row)
        except ConversationEnded as ended:
            outcome = Outcome(stop_reason=ended.stop_reason)
        score = await self._call(_bound(self.interaction.calculate_score, self.instance_id, self.kwargs))
        if score is not None:
            what = f"What {type(self.interaction).__name__}.calculate_score returned"
            outcome.rewards = {**outcome.rewards, self.kwargs["name"]: finite(score, what)}
        if self.data:
            outcome.info = {**outcome.info, "interaction": self.data}
        return outcome

    async def respond(self, turn: Turn) -> Step:
        """Asks the interaction for its answer."""
        said = [message for each in self.turns for message in (each.message, *each.replies)]
        messages = copy.deepcopy([*self.opening, *said])
        assert self.interaction is not None  # `run` chose it
        method = self.interaction.generate_response
        answer = await self._call(partial(method, self.instance_id, messages, **self.kwargs))
        if not isinstance(answer, tuple) or len(answer) != 4 or not isinstance(answer[1], str):
            raise TypeError(
                f"{type(self.interaction).__name__}.generate_response returned {answer!r:.200}: return "
                "`(should_terminate, response, score, additional_data)`, the response as text."
            )
        done, text, score, data = answer
        if data:
            self.data.append(data)
        return Step(text, score, bool(done))

    async def close(self) -> None:
        """Ends the interaction and releases the tools."""
        try:
            if self.interaction is not None:
                await self._call(_bound(self.interaction.finalize_interaction, self.instance_id, self.kwargs))
        finally:
            await super().close()

    async def _call(self, bound: partial[Any]) -> Any:
        what = f"{type(self.interaction).__name__}.{bound.func.__name__}"
        return await call(bound, what=what, timeout=self.tool_timeout)


class InteractionSource(Prototype):
    """Interactions, one of which each row names."""

    env: InteractionEnv

    def check(self, rows: Dataset, name: str) -> None:
        for row in rows.select_columns("extra_info") if "extra_info" in rows.column_names else [{}]:
            find_kwargs(self.env.interactions, row)


source_of.register(InteractionEnv, InteractionSource)


@environment("interactions")
def interactions_of_options(options: Mapping[str, Any]) -> InteractionEnv:
    """The environment of a run's option `interaction_config_file`."""
    return InteractionEnv(load_interactions(options["interaction_config_file"]), **tool_arguments(options))


def find_kwargs(interactions: Mapping[str, BaseInteraction], row: dict[str, Any]) -> dict[str, Any]:
    """The row's `interaction_kwargs`, with `name`, without keys that are `None`: a table has all keys in every row."""
    given = (row.get("extra_info") or {}).get("interaction_kwargs") or {}
    name = given.get("name")
    if name is None:
        raise ConfigError(
            "A row does not say who answers it: set `name` in its `extra_info.interaction_kwargs` to one of "
            f"{', '.join(interactions)}."
        )
    if name not in interactions:
        raise ConfigError(
            f"A row names the interaction {name!r}{did_you_mean(name, interactions)}: the interactions are "
            f"{', '.join(interactions)}."
        )
    return {key: value for key, value in given.items() if value is not None}


def _bound(method: Callable[..., Any], instance_id: str, kwargs: dict[str, Any]) -> partial[Any]:
    """A method with the arguments that it takes: in verl, which never calls it, it may be declared without any."""
    for args, keywords in (((instance_id,), kwargs), ((instance_id,), {})):
        try:
            inspect.signature(method).bind(*args, **keywords)
        except TypeError:
            continue
        return partial(method, *args, **keywords)
    return partial(method)


def load_interactions(path: str) -> dict[str, BaseInteraction]:
    """
    Loads the interactions of a YAML file, by name:

        interaction:
          - name: gsm8k
            class_name: mt_grpo.integrations.verl.Gsm8kInteraction
            config: {}

    The default `name` is the class name in lower case without `Interaction` at its end.

    Raises:
        ConfigError: If the file or an entry is wrong.
        ImportPathError: If a `class_name` does not lead to an object.
    """
    try:
        listed = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"`interaction_config_file: {path}` cannot be read: {reason}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"`interaction_config_file: {path}` is not YAML: {' '.join(str(error).split())}.") from error
    entries = listed.get("interaction") if isinstance(listed, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(
            f"`interaction_config_file: {path}` has no list `interaction`: give it one, of `class_name` and `config`."
        )
    interactions: dict[str, BaseInteraction] = {}
    for entry in entries:
        name, interaction = _load(entry, path)
        if name in interactions:
            raise ConfigError(f"Two interactions of {path} are named {name!r}: give each a `name` of its own.")
        interactions[name] = interaction
    return interactions


def _load(entry: Any, path: str) -> tuple[str, BaseInteraction]:
    if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str) or not entry["class_name"]:
        raise ConfigError(f"An entry of `interaction` in {path} has no `class_name`: give the dotted path of a class.")
    for key in entry:
        if key not in KEYS:
            hint = did_you_mean(key, KEYS)
            raise ConfigError(f"An entry of `interaction` in {path} has an unknown key {key!r}{hint}.")
    class_name, config = entry["class_name"], entry.get("config") or {}
    found = BUILT_IN.get(class_name) or import_object(class_name, what="interaction")
    if not (isinstance(found, type) and issubclass(found, BaseInteraction)):
        raise ConfigError(
            f"The interaction {class_name!r} of {path} is no subclass of `BaseInteraction`: import that from "
            "`mt_grpo.integrations.verl`, and subclass it."
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"The interaction {class_name!r} of {path} lacks {missing}: define it.")
    if not isinstance(config, dict):
        raise ConfigError(f"`config` of the interaction {class_name!r} in {path} is {config!r}: give a mapping.")
    name = entry.get("name") or found.__name__.removesuffix("Interaction").lower() or found.__name__
    try:
        return str(name), found({**config, "name": str(name)})
    except Exception as error:  # whatever the user's class raises
        raise ConfigError(
            f"The interaction {class_name!r} of {path} does not start: {type(error).__name__}: {error}."
        ) from error
