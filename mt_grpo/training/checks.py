"""Checks before any work that training is possible."""

from __future__ import annotations

from datasets import Dataset, IterableDataset

from mt_grpo.errors import ConfigError
from mt_grpo.options import check_trainable
from mt_grpo.training.config import MTGRPOConfig


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
