"""
Arguments in the forms that TRL's `GRPOTrainer` takes, as those of `MTGRPOEnvTrainer`. Apart from the trainer, which
knows one form of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import Any

import pyarrow as pa
from datasets import Dataset, IterableDataset
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner
from torch.nn import Module
from trl import GRPOConfig

from mt_grpo.data import DatasetError, as_messages, with_contents_of_one_kind
from mt_grpo.errors import ConfigError
from mt_grpo.rewards import RewardFunc
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.media import check_decoding

REFERENCE = "ref"
"""The adapter in which TRL's trainer keeps the reference of a model that comes with an adapter."""


def as_mtgrpo_config(args: object) -> MTGRPOConfig:
    """Options as a `MTGRPOConfig`: a `GRPOConfig` with the defaults of all else, and every value that it has."""
    if isinstance(args, MTGRPOConfig):
        args.check()  # scripts set values after they made it
        return args
    if not isinstance(args, GRPOConfig):
        raise ConfigError(
            f"`args` is a {type(args).__name__}: give a `MTGRPOConfig`, or the `GRPOConfig` of a script for TRL's "
            "trainer."
        )
    # made without `__init__`: TRL has filled in fields that it would not take a second time
    whole = object.__new__(MTGRPOConfig)
    for field in fields(MTGRPOConfig):
        setattr(whole, field.name, field.default if field.default_factory is MISSING else field.default_factory())
    vars(whole).update(vars(args))
    if not args.use_vllm:
        whole.vllm_mode = "server"  # TRL's default says nothing where no server is used
    whole.check()
    return whole


def as_rows(data: object, name: str) -> Any:
    """A dataset as it is, and a list of rows as a dataset; `name` is that of the argument."""
    if isinstance(data, dict):
        return {split: as_rows(rows, f"{name}[{split!r}]") for split, rows in data.items()}
    if data is None or isinstance(data, (Dataset, IterableDataset)):
        check_decoding(data)
        return data
    if not isinstance(data, (list, tuple)):
        raise ConfigError(
            f"`{name}` is a {type(data).__name__}: give a `datasets.Dataset`, or a list of rows such as "
            '`{"prompt": ...}`.'
        )
    for number, row in enumerate(data):
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"`{name}` is a list whose element {number} is {str(row)[:80]!r}: give a `datasets.Dataset`, or a "
                'list of rows such as `{"prompt": ...}`.'
            )
    try:
        return Dataset.from_list(with_contents_of_one_kind([dict(row) for row in data]))
    except (pa.ArrowException, UnicodeEncodeError) as error:
        raise ConfigError(
            f"The rows of `{name}` do not make a table ({error}): give each column values of one type."
        ) from error


def refuse_several_datasets(train: object) -> None:
    """Refuses several datasets to train on."""
    if isinstance(train, dict):
        raise ConfigError(
            f"`train_dataset` is several datasets ({', '.join(map(str, train))}): give one of them, as "
            f"`train_dataset[{next(iter(train), 'train')!r}]`."
        )


def check_prompts(train: object, evaluated: object, written: bool) -> None:
    """
    Refuses datasets whose prompts are neither text nor messages. A column has one type, so the first row tells; the
    rows of a stream are not read.
    """
    several = evaluated.values() if isinstance(evaluated, dict) else [evaluated]
    for name, rows in [("train_dataset", train), *(("eval_dataset", rows) for rows in several)]:
        if written or not isinstance(rows, Dataset) or not len(rows):
            continue
        prompt = rows[0]["prompt"]
        messages = isinstance(prompt, list) and prompt and all(isinstance(each, Mapping) for each in prompt)
        if not isinstance(prompt, str) and not messages:
            raise ConfigError(
                f"The first row of `{name}` has the prompt {str(prompt)[:80]!r}: give text, or a list of messages, "
                'such as `{"role": "user", "content": ...}`.'
            )
        try:
            as_messages(prompt)
        except DatasetError as error:
            raise ConfigError(f"The first row of `{name}` {error}") from None


def outcomes_of(reward_funcs: object, outcome_reward_funcs: object, listed: list[Any] | None) -> list[Any]:
    """The outcome rewards: those that the trainer was given, under TRL's name or ours, else those of the options."""
    if reward_funcs is not None and outcome_reward_funcs is not None:
        raise ConfigError(
            "The trainer was given `reward_funcs` and `outcome_reward_funcs`, which are the same: give one list."
        )
    given = outcome_reward_funcs if reward_funcs is None else reward_funcs
    return as_list(listed if given is None else given)


def as_list(given: object) -> list[Any]:
    """One thing as a list of it, and nothing as an empty list."""
    return [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]


def tokenizers_of(
    given: object, listed: list[Any], rewards: list[RewardFunc], turn_rewards: list[RewardFunc]
) -> list[Any]:
    """TRL's `reward_processing_classes`, with one for each reward."""
    tokenizers = [None] * len(listed) if given is None else as_list(given)
    if len(tokenizers) != len(listed):
        raise ConfigError(
            f"The number of reward processing classes ({len(tokenizers)}) must match that of the reward "
            f"functions ({len(listed)}): give one for each, and `None` for a function."
        )
    before = [None] * len(turn_rewards)
    return [*before, *tokenizers, *[None] * (len(rewards) - len(before) - len(tokenizers))]


def check_rollout_func(rollout_func: Callable[..., Any] | None) -> None:
    """Refuses TRL's `rollout_func`, which knows neither turns nor the columns of rows."""
    if rollout_func is not None:
        raise ConfigError(
            "`rollout_func` returns tokens without turns, so there is nothing to credit: write its loop as an "
            "environment (docs/environments.md) or as an agent (docs/any_agent.md)."
        )


@contextmanager
def no_adapter_left(model: object, trainer: object) -> Iterator[None]:
    """
    If the trainer is refused in the block, removes what TRL added to the model: the reference of a model with an
    adapter, and the adapter that `peft_config` describes.
    """
    had_reference = isinstance(model, PeftModel) and REFERENCE in model.peft_config
    trained = {id(each) for each in model.parameters() if each.requires_grad} if isinstance(model, Module) else set()
    try:
        yield
    except BaseException:
        made = vars(trainer).get("model")
        if isinstance(model, PeftModel):
            if REFERENCE in model.peft_config and not had_reference:
                model.delete_adapter(REFERENCE)
        elif isinstance(model, Module) and isinstance(made, PeftModel) and isinstance(made.base_model, BaseTuner):
            made.base_model.unload()
            for each in model.parameters():
                each.requires_grad_(id(each) in trained)
        raise
