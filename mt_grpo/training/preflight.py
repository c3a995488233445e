"""
Every refusal before any work: the machine, the batch sizes, the rows, the columns that rewards need, and an output
folder with an earlier run's files, which are neither mixed with another run nor removed unasked.
"""

from __future__ import annotations

import fcntl
import inspect
import logging
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from inspect import Parameter
from pathlib import Path
from typing import IO, Any

from accelerate.utils import broadcast_object_list
from datasets import Dataset, IterableDataset
from huggingface_hub import get_token
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME

from mt_grpo.data.loaders import hub_fault
from mt_grpo.errors import ConfigError
from mt_grpo.imports import choose, did_you_mean
from mt_grpo.options.rules import check_batches, check_trainable
from mt_grpo.rewards import FunctionReward, RewardFunc, StateScore, TurnReward
from mt_grpo.rewards.base import NOT_COLUMNS, ReadsAnswer, ScoreFunction
from mt_grpo.runlog.schema import FOLDER
from mt_grpo.training.checkpoint import is_whole
from mt_grpo.training.config import MTGRPOConfig, has_bfloat16

BATCH_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments of a plain TRL reward function besides the columns."""

RECORDS = ("metrics.jsonl", "trajectories*.jsonl", "summary.json", "learning_curve.png", "audit.jsonl")
MODEL = ("model*.safetensors", "model*.safetensors.index.json", "adapter_model*.safetensors", "adapter_config.json")
ROLLOUTS = ("index*.jsonl", "*.rank*.parquet", "*.rank*.partial")  # what a run leaves in its folder of conversations
LOCK = ".lock"
"""Locked by the run that trains in a folder. The system lets go of it when the process ends, however it ends."""
CHECKPOINT = re.compile(r"checkpoint-\d+")

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


# The output folder


def left_by_runs(output_dir: str) -> list[Path]:
    """Records, checkpoints and models in a folder."""
    folder = Path(output_dir)
    records, models = ([path for name in names for path in sorted(folder.glob(name))] for names in (RECORDS, MODEL))
    conversations = [folder / FOLDER] if _conversations(folder / FOLDER) else []
    checkpoints = [path for path in sorted(folder.glob("checkpoint-*")) if _is_checkpoint(path)]
    return [*records, *conversations, *models, *checkpoints]


def _conversations(folder: Path) -> list[Path]:
    return [path for pattern in ROLLOUTS for path in folder.glob(pattern)]


def _is_checkpoint(path: Path) -> bool:
    """Whether this trainer wrote the checkpoint, wholly or partly."""
    marks = [path / TRAINER_STATE_NAME, *path.glob("rollouts-rank*.pt")]
    return CHECKPOINT.fullmatch(path.name) is not None and any(mark.exists() for mark in marks)


def check_folder(args: MTGRPOConfig, model: str) -> None:
    """Checks that a run can begin in its `output_dir`. This is a collective call, in which the main process looks."""
    refusal = None
    if args.process_index == 0:
        refusal = _in_use(args) if _is_in_use(args) else _earlier_run(args, model)
    _refuse_everywhere(args, refusal)


def _refuse_everywhere(args: MTGRPOConfig, sentence: str | None) -> None:
    message = [sentence]
    if args.world_size > 1:
        broadcast_object_list(message)
    if message[0] is not None:
        raise ConfigError(message[0])


_held: set[Path] = set()
"""
Locks of this process. It must not open one again: the system lets go of a file's locks where any opening is closed.
"""


@contextmanager
def locked(args: MTGRPOConfig, model: str | None = None) -> Iterator[None]:
    """
    Keeps other processes that train out of `output_dir` in the block; blocks may be nested. This is a collective call,
    in which the main process locks.
    """
    lock, refusal, path = None, None, Path(args.output_dir, LOCK).resolve()
    if args.process_index == 0 and path not in _held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = _lock(path)
        except OSError as error:
            refusal = f"`output_dir: {args.output_dir}` cannot be made or written to ({error.strerror}): name another."
        else:
            if lock is None:
                refusal = _in_use(args)
            elif model is not None:
                refusal = _earlier_run(args, model)
    if lock is not None:
        _held.add(path)
    try:
        _refuse_everywhere(args, refusal)
        yield
    finally:
        if lock is not None:
            _held.remove(path)
            path.unlink(missing_ok=True)
            lock.close()


def _lock(path: Path) -> IO[str] | None:
    """The locked file; `None` where another process has it."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # how a lock of another process is told
            file.close()
            return None
        except OSError:  # the file system has no locks
            return file
        if _is(path, file):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            return file
        file.close()  # the run that had it has ended in between, and removed it


def _is(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _in_use(args: MTGRPOConfig) -> str:
    holder = ""
    with suppress(FileNotFoundError):  # it ends just then
        holder = Path(args.output_dir, LOCK).read_text(encoding="utf-8")
    return (
        f"`output_dir: {args.output_dir}` is in use: {holder or 'another process'} is training there. Wait until it "
        "has ended, or choose another `output_dir`."
    )


def _is_in_use(args: MTGRPOConfig) -> bool:
    path = Path(args.output_dir, LOCK).resolve()
    if path in _held or not path.exists():
        return False
    lock = _lock(path)
    if lock is not None:
        path.unlink(missing_ok=True)
        lock.close()
    return lock is None


def _earlier_run(args: MTGRPOConfig, model: str) -> str | None:
    found = [] if _resumes_here(args) else left_by_runs(args.output_dir)
    if not found:
        return None
    if args.overwrite_output_dir:
        if not Path(model).resolve().is_relative_to(Path(args.output_dir).resolve()):
            return None
        return (
            f"The model {model} is in `output_dir: {args.output_dir}`, which `overwrite_output_dir: true` clears: "
            "choose another `output_dir`."
        )
    names = ", ".join(path.name for path in found[:3]) + (", ..." if len(found) > 3 else "")
    resume = "go on with it (`--resume_from_checkpoint true`), " if any(map(is_whole, found)) else ""
    return (
        f"`output_dir: {args.output_dir}` holds an earlier run ({names}): {resume}remove it and begin anew "
        "(`--overwrite_output_dir true`), or choose another `output_dir`."
    )


def _resumes_here(args: MTGRPOConfig) -> bool:
    checkpoint = args.resume_from_checkpoint
    return checkpoint is not None and Path(checkpoint).resolve().parent == Path(args.output_dir).resolve()


def clear_folder(args: MTGRPOConfig) -> None:
    """
    Removes the records and checkpoints of earlier runs, and a model that a trainer saved, unless a run is resumed. All
    other files stay.
    """
    if _resumes_here(args):
        return
    saved = Path(args.output_dir, TRAINING_ARGS_NAME).exists()
    for path in left_by_runs(args.output_dir):
        if path.name == FOLDER:
            for file in _conversations(path):
                file.unlink()
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif saved or not any(path.match(pattern) for pattern in MODEL):
            path.unlink()
