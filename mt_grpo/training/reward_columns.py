"""Checks reward functions against the columns of the datasets, before any work."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from inspect import Parameter
from typing import Any

from datasets import Dataset, IterableDataset

from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean
from mt_grpo.rewards import FunctionReward, InformationGain, RewardFunc, StateScore, TurnReward
from mt_grpo.rewards.base import NOT_COLUMNS

BATCH_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments of a plain TRL reward function besides the columns."""

Rows = Dataset | IterableDataset


def check_reward_columns(
    rewards: Sequence[RewardFunc],
    train_dataset: Rows | None,
    eval_dataset: Rows | dict[str, Rows] | None,
) -> None:
    """
    Checks that every reward can be called with the columns of every dataset. If a stream does not name its columns,
    its first row is read.

    Raises:
        ConfigError: If a reward needs an argument that is no column, does not take a column, or finds no right answer
            in a row.
    """
    evaluated = eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}
    datasets = {"training": train_dataset, **{f"evaluation {name}".strip(): rows for name, rows in evaluated.items()}}
    for name, dataset in datasets.items():
        if dataset is not None:
            columns = dataset.column_names or [column for row in dataset.take(1) for column in row]
            for reward in rewards if columns else ():
                _check(reward, columns, f"{name} dataset")
                if isinstance(reward, InformationGain):
                    _check_answers(reward, dataset, columns, f"{name} dataset")


def _check(reward: RewardFunc, columns: list[str], dataset: str) -> None:
    if isinstance(reward, FunctionReward):
        function, positional = reward.function, 0
        given = [
            *BATCH_ARGUMENTS,
            *reward.brings,
            *["environments"][: reward.takes_environments],
            *(column for column in columns if column not in (*NOT_COLUMNS, *reward.brings)),
        ]
    else:
        function, positional = reward.score, 1 + isinstance(reward, TurnReward | StateScore)
        given = [column for column in columns if column != "prompt"]
    try:
        # a wrapper takes what it takes itself, whatever it wraps
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # a function written in C may not say what it takes
        return
    for parameter in _needed(signature.parameters.values(), positional):
        if parameter not in given:
            raise ConfigError(
                f"The reward {reward.name!r} needs `{parameter}`, which is no column of the {dataset}"
                f"{did_you_mean(parameter, columns)}: its columns are {', '.join(columns)}; name the right one with "
                f"`column_mapping: {{{parameter}: its name}}`, or give the parameter a default."
            )
    try:
        signature.bind(*[None] * positional, **dict.fromkeys(given))
    except TypeError as error:
        raise ConfigError(
            f"The reward {reward.name!r} cannot be called with the columns of the {dataset} ({error}): let it take "
            "the rest with `**row`, or rename the column."
        ) from error


def _check_answers(reward: InformationGain, dataset: Rows, columns: list[str], name: str) -> None:
    if reward.column not in columns:
        raise ConfigError(
            f"The reward {reward.name!r} takes the right answer from the column {reward.column!r}, which the {name} "
            f"does not have{did_you_mean(reward.column, columns)}: its columns are {', '.join(columns)}; name one "
            "with the option `column`."
        )
    if isinstance(dataset, Dataset):  # of a stream, each row is looked at when its answer is scored
        for value in dataset[reward.column]:
            reward.right_answer(value)


def _needed(parameters: Iterable[Parameter], positional: int) -> list[str]:
    """Names of the parameters without a default that are left when the first `positional` are given."""
    named = [Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY]
    left: list[Any] = [parameter for parameter in parameters if parameter.kind in named]
    while positional and left and left[0].kind is not Parameter.KEYWORD_ONLY:
        del left[0]
        positional -= 1
    return [parameter.name for parameter in left if parameter.default is Parameter.empty]
