"""Checks before any work that training is possible."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from datasets import Dataset, IterableDataset
from huggingface_hub import get_token
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available

from mt_grpo.data.hub import hub_fault
from mt_grpo.errors import ConfigError
from mt_grpo.imports import choose
from mt_grpo.options import check_batches, check_trainable

if TYPE_CHECKING:
    from mt_grpo.training.config import MTGRPOConfig

logger = logging.getLogger(__name__)


def check_training(args: MTGRPOConfig, dataset: Dataset | IterableDataset, dropped: int = 0) -> None:
    """
    Checks that training can take a step.

    Args:
        args (`MTGRPOConfig`): The options.
        dataset (`Dataset` or `IterableDataset`): Rows to train on. Of a stream, the rows of one batch are read.
        dropped (`int`, *optional*, defaults to `0`): Rows left out because their prompts are too long.

    Raises:
        ConfigError: If it cannot.
    """
    check_batch_sizes(args)
    check_trainable(vars(args))
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


@contextmanager
def left_to_training(args: MTGRPOConfig) -> Iterator[None]:
    """
    Hides from TRL and transformers what `check_batch_sizes` and `check_surroundings` check where
    training starts: a recipe for eight GPUs is also served and read by one process, and on a machine without any.
    """
    bf16, args.bf16 = args.bf16, args.bf16 and (args.use_cpu or has_bfloat16())
    group, eval_group = args.num_generations, args.num_generations_eval or args.num_generations
    args.per_device_train_batch_size *= group  # a batch that every group divides
    args.per_device_eval_batch_size *= eval_group
    if args.generation_batch_size is not None:
        args.generation_batch_size *= group
    try:
        yield
    finally:
        args.bf16 = bf16
        args.per_device_train_batch_size //= group
        args.per_device_eval_batch_size //= eval_group
        if args.generation_batch_size is not None:
            args.generation_batch_size //= group


def has_bfloat16() -> bool:
    """Whether there is a GPU, or the like, that computes in bfloat16."""
    return is_torch_bf16_gpu_available() or is_torch_xla_available()


def check_surroundings(args: MTGRPOConfig) -> None:
    """
    Whether the machine has what the options ask of it: a device, packages, the Hub.

    Raises:
        ConfigError: If it has not.
    """
    _check_device(args)
    check_trackers(args)
    if args.push_to_hub:
        check_push(args)


def check_trackers(args: MTGRPOConfig) -> None:
    """
    Whether the packages that `report_to` names are installed.

    Raises:
        ConfigError: If one is not, or there is no such tracker.
    """
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
    """
    Whether the Hub can be pushed to.

    Raises:
        ConfigError: If there is no token, or no Hub.
    """
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
    """
    Whether the processes of this run make whole groups.

    Raises:
        ConfigError: If they do not; it says which numbers would do.
    """
    check_batches(vars(args), args.world_size)
