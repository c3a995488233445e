"""Every refusal before any work: the machine, the batch sizes, the rows, and the columns that rewards need."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from inspect import Parameter
from typing import Any

from datasets import Dataset, IterableDataset
from huggingface_hub import get_token
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

from mt_grpo.data.loaders import hub_fault
from mt_grpo.errors import ConfigError
from mt_grpo.imports import choose, did_you_mean
from mt_grpo.options.rules import check_batches, check_trainable
from mt_grpo.rewards import FunctionReward, RewardFunc, StateScore, TurnReward
from mt_grpo.rewards.base import NOT_COLUMNS, ReadsAnswer, ScoreFunction
from mt_grpo.training.config import MTGRPOConfig, has_bfloat16

BATCH_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments of a plain TRL reward function besides the columns."""

Rows = Dataset | IterableDataset

logger = logging.getLogger(__name__)


def check_rows_suffice(args: MTGRPOConfig, dataset: Dataset | IterableDataset, dropped: int = 0) -> None:
    """Checks that there are rows for a step."""
    needed = args.generation_batch_size // args.num_generations
    rows = sum(1 for _ in dataset.take(needed)) if isinstance(dataset, IterableDataset) else len(dataset)
    if rows < needed:
        left = f" left ({dropped} were dropped, whose prompts are too long)" if dropped else ""
        raise ConfigError(
            f"The training dataset has {rows} rows{left}, and one batch takes {needed} prompts "
            f"({args.generation_batch_size} completions, {args.num_generations} for each prompt): give it more rows, "
            "or make the batch smaller (`per_device_train_batch_size`, `steps_per_generation` or "
            "`gradient_accumulation_steps`), or raise `num_generations`."
        )


def check_surroundings(args: MTGRPOConfig) -> None:
    """Whether the machine has what the options ask of it: a device, packages, the Hub."""
    _check_device(args)
    check_trackers(args)
    if args.push_to_hub:
        check_push(args)


def check_trackers(args: MTGRPOConfig) -> None:
    """Whether the packages that `report_to` names are installed."""
    available = get_available_reporting_integrations()
    for name in args.report_to:
        # the list never has flyte, nor azure_ml beside mlflow
        choose("report_to", name, sorted(INTEGRATION_TO_CALLBACK))
        if name not in (*available, "flyte", "azure_ml"):
            raise ConfigError(
                f"`report_to: {name}` needs a package that is not installed: `pip install {name}`, or set `report_to: "
                "none`."
            )


def _check_device(args: MTGRPOConfig) -> None:
    if args.torch_compile and args.forward != "padded":
        raise ConfigError(
            f"`torch_compile: true` does not compile `forward: {args.forward}`: leave it out, or set `forward: "
            "padded`."
        )
    if args.bf16 and not args.use_cpu and not has_bfloat16():
        raise ConfigError(
            "`bf16: true` needs a GPU that computes in bfloat16, and there is none here: leave `bf16` out, which "
            "trains in float32, or set `use_cpu: true`."
        )
    if args.fp16 and args.device.type == "cpu":
        raise ConfigError("`fp16: true` needs a GPU, and this run is on a CPU: leave it out.")


def tell_device(args: MTGRPOConfig) -> None:
    """Warns where a run is on the CPU though nobody asked for that."""
    if args.device.type == "cpu" and not args.use_cpu and args.process_index == 0:
        logger.warning("There is no GPU here: this run is on the CPU, in float32.")


def check_push(args: MTGRPOConfig) -> None:
    """Whether the Hub can be pushed to."""
    if not args.hub_token and get_token() is None:
        raise ConfigError(
            "`push_to_hub: true` needs a token: run `hf auth login`, set `HF_TOKEN`, or leave `push_to_hub` out."
        )
    fault = hub_fault()
    if fault is not None:
        raise ConfigError(
            f"`push_to_hub: true` needs the Hugging Face Hub, and {fault}: leave it out, and push `output_dir` "
            "afterwards (`hf upload`)."
        )


def check_batch_sizes(args: MTGRPOConfig) -> None:
    """Whether the processes of this run make whole groups, and the options leave something to train."""
    check_batches(vars(args), args.world_size)
    check_trainable(vars(args))


def check_reward_columns(
    rewards: Sequence[RewardFunc],
    train_dataset: Rows | None,
    eval_dataset: Rows | dict[str, Rows] | None,
) -> None:
    """
    Checks that every reward can be called with the columns of every dataset. If a stream does not name its columns,
    its first row is read.
    """
    evaluated = eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}
    datasets = {"training": train_dataset, **{f"evaluation {name}".strip(): rows for name, rows in evaluated.items()}}
    for name, dataset in datasets.items():
        if dataset is not None:
            columns = dataset.column_names or [column for row in dataset.take(1) for column in row]
            for reward in rewards if columns else ():
                _check(reward, columns, f"{name} dataset")
                if isinstance(reward, ReadsAnswer):
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
    if isinstance(reward, ScoreFunction) and not {"ground_truth", "reward_model"} & set(columns):
        raise ConfigError(
            f"The reward {reward.name!r} takes the right answer from the column `ground_truth`, or `reward_model` as "
            f"in verl's rows, and the {dataset} has neither: its columns are {', '.join(columns)}; name the right one "
            "with `column_mapping: {ground_truth: its name}`."
        )
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


def _check_answers(reward: ReadsAnswer, dataset: Rows, columns: list[str], name: str) -> None:
    label = reward.name  # type: ignore[attr-defined]  # it stands beside a class of rewards
    if reward.column not in columns:
        raise ConfigError(
            f"The reward {label!r} takes the right answer from the column {reward.column!r}, which the {name} "
            f"does not have{did_you_mean(reward.column, columns)}: its columns are {', '.join(columns)}; name one "
            "with the option `column`."
        )
    if isinstance(dataset, Dataset):  # of a stream, each row is looked at when its answer is scored
        for number, value in enumerate(dataset[reward.column]):
            try:
                reward.right_answer(value)
            except ConfigError:
                raise
            except ValueError as error:
                raise ConfigError(
                    f"The reward {label!r} cannot use the column {reward.column!r} of row {number + 1} of the {name}: "
                    f"{error}."
                ) from error


def _needed(parameters: Iterable[Parameter], positional: int) -> list[str]:
    """Names of the parameters without a default that are left when the first `positional` are given."""
    named = [Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY]
    left: list[Any] = [parameter for parameter in parameters if parameter.kind in named]
    while positional and left and left[0].kind is not Parameter.KEYWORD_ONLY:
        del left[0]
        positional -= 1
    return [parameter.name for parameter in left if parameter.default is Parameter.empty]


def check_best(wanted: str | None, metrics: Mapping[str, Any]) -> None:
    """Whether an evaluation measures what the best model is chosen by."""
    names = [name.removeprefix("eval_") for name in metrics]
    if wanted is not None and wanted.removeprefix("eval_") not in names:
        raise ConfigError(
            f"`metric_for_best_model: {wanted}` is nothing that an evaluation measures"
            f"{did_you_mean(wanted.removeprefix('eval_'), names)}: name one of its metrics, such as `reward`."
        )
