"""TRL's `environment_factory`: what the options or the trainer were given, as environments and their rewards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from datasets import Dataset, IterableDataset

from mt_grpo.envs import EnvSource
from mt_grpo.envs.source import prototypes
from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean, import_object
from mt_grpo.integrations.trl import TRLEnv
from mt_grpo.integrations.verifiers import VerifiersSource
from mt_grpo.rewards import EnvReward, RewardFunc
from mt_grpo.training.config import MTGRPOConfig

logger = logging.getLogger(__name__)

Factory = Callable[[], Any] | dict[str, Callable[[], Any]]
"""What TRL's trainer takes: something that makes an environment, or a dictionary by the column `environment`."""

NO_PROMPT = [{"role": "user", "content": ""}]
"""The prompt of a row that has none: the environment's `reset` writes it."""


def import_factory(path: Any, key: str) -> Any:
    """What a recipe names as a factory: a dotted path, or a mapping of dotted paths by name."""
    if isinstance(path, dict) and path:
        return {name: import_factory(one, f"{key}: {name}") for name, one in path.items()}
    if not isinstance(path, str):
        raise ConfigError(f"`{key}` is {path!r}: give a dotted path, or a mapping from names to dotted paths.")
    return import_object(path, what="environment factory")


def environments_of(factory: Factory, options: dict[str, Any], args: MTGRPOConfig) -> EnvSource:
    """
    Environments of a factory, or of several by name.

    Args:
        factory (`Factory`): As TRL's trainer takes it.
        options (`dict`): The keyword arguments of `TRLEnv`.
        args (`MTGRPOConfig`): The run's options, which they are made from.
    """
    if isinstance(factory, dict):
        if not factory:
            raise ConfigError("`environment_factory` is an empty dictionary: give factories by name.")
        return {name: _environment(one, options, args, named=True) for name, one in factory.items()}
    return _environment(factory, options, args, named=False)


def _environment(factory: Any, options: dict[str, Any], args: MTGRPOConfig, named: bool) -> TRLEnv:
    env = TRLEnv(factory, **options)
    env.made_from, env.named = args, named
    if not env.tools:
        logger.warning(
            "The environment %s has no tools: it has no public method but `reset`, `get_reward` and `close`, so each "
            "conversation has one turn.",
            env.pool.name,
        )
    return env


def own_rewards(listed: Sequence[RewardFunc], env: EnvSource) -> list[RewardFunc]:
    """
    The outcome rewards that classes of factories give beside those that are listed: one for each class, in TRL's
    order.

    Raises:
        ConfigError: If one has the name of a listed reward, or there is no reward at all.
    """
    own: dict[str, RewardFunc] = {}
    for one in prototypes(env):
        if isinstance(one, TRLEnv) and one.reward_name is not None:
            reward = own[one.reward_name] = EnvReward(one.reward_name)
            reward.name = one.reward_name
    for name in own:
        if name in [one.name for one in listed]:
            raise ConfigError(
                f"The reward {name!r} has the name of an environment class that gives its own reward (`get_reward`): "
                "rename one of the two."
            )
    if not listed and not own:
        raise ConfigError("There is no reward: name one in `outcome_reward_funcs` or `turn_reward_funcs`.")
    return list(own.values())


def weights_of(args: MTGRPOConfig, listed: Sequence[RewardFunc], own: Sequence[RewardFunc]) -> list[float] | None:
    """`reward_weights`: where they count the listed rewards only, each of the environments' own has 1, as in TRL."""
    given = args.reward_weights
    return [*given, *[1.0] * len(own)] if given is not None and len(given) == len(listed) else given


def rows_of(
    dataset: Dataset | IterableDataset | None, env: EnvSource, args: MTGRPOConfig
) -> Dataset | IterableDataset | None:
    """
    The rows to train on: those of an environment of verifiers where none are given. As in TRL, a single factory needs
    none, and rows of factories need no prompt: the environment's `reset` writes it.

    Raises:
        ConfigError: If there are no rows, and either several environments or no `max_steps`; if `reset` of a class
            needs a column that there is not.
    """
    if dataset is None and isinstance(env, VerifiersSource):
        return env.rows("train")
    factories = all(isinstance(one, TRLEnv) for one in prototypes(env)) and any(prototypes(env))
    if dataset is None and factories:
        if isinstance(env, dict):
            raise ConfigError(
                f"Several environments ({', '.join(env)}) need a dataset whose column `environment` says which one a "
                "row is for: give `train_dataset`, or a single factory."
            )
        if args.max_steps <= 0:
            raise ConfigError(
                "There is no dataset, so `reset` of the environment gives the prompts, and nothing says how long to "
                "train: set `max_steps`."
            )
        dataset = Dataset.from_dict({"prompt": [NO_PROMPT] * (args.generation_batch_size // args.num_generations)})
    if factories and isinstance(dataset, Dataset) and "prompt" not in dataset.column_names:
        dataset = dataset.add_column("prompt", [NO_PROMPT] * len(dataset))
    if isinstance(dataset, Dataset):  # the columns of a stream may not be known
        _check_columns(env, dataset.column_names)
    return dataset


def evaluation_rows(dataset: Dataset | None, env: EnvSource, args: MTGRPOConfig) -> Dataset | None:
    """The rows to evaluate on: those of an environment of verifiers where the run evaluates and none are given."""
    if dataset is None and args.do_eval and isinstance(env, VerifiersSource):
        return env.rows("eval")
    return dataset


def _check_columns(env: EnvSource, columns: list[str]) -> None:
    for one in prototypes(env):
        for column in one.needed_columns if isinstance(one, TRLEnv) else ():
            if column not in columns:
                raise ConfigError(
                    f"`reset` of the environment {one.pool.name} needs `{column}`, which is no column of the training "
                    f"dataset{did_you_mean(column, columns)}: its columns are {', '.join(columns)}; name the right "
                    f"one with `column_mapping: {{{column}: its name}}`, or give the parameter a default."
                )


def warn_of_unused(env: EnvSource, names: set[str]) -> None:
    """Warns of environments that no row names, where all rows are known."""
    if isinstance(env, dict) and (unused := [name for name in env if name not in names]):
        logger.warning(
            "No row of the dataset names the environment%s %s in its column `environment`.",
            "s" if len(unused) > 1 else "",
            ", ".join(map(repr, unused)),
        )
