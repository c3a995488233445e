"""Tasks of reasoning-gym (0.1.25) as rows; `pip install mt-grpo[reasoning-gym]`."""

from __future__ import annotations

import json
from typing import Any

import yaml

from mt_grpo.data.schemas import DatasetError, Row
from mt_grpo.imports import did_you_mean

REASONING_GYM = "reasoning_gym"
SEEDS = {"train": 0, "validation": 1, "test": 2}
"""Added to the seed, so that splits differ."""


def puzzles(task: str, split: str, config: str | None) -> list[Row]:
    """
    The rows of a task: `prompt`, `answer`, and what the reward `reasoning_gym_reward` needs to judge an answer.

    Args:
        task (`str`): Its name, such as `leg_counting`.
        split (`str`): `train`, `validation` or `test`; other seeds, other puzzles.
        config (`str`, *optional*): Options of the task as a YAML mapping, such as `{size: 2000, max_animals: 5}`; 500
            rows by default.

    Raises:
        DatasetError: If reasoning-gym is not installed, or refuses the task or its options.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DatasetError(
            f"reasoning-gym is not installed ({error}): `pip install mt-grpo[reasoning-gym]`."
        ) from error
    if split not in SEEDS:
        raise DatasetError(f"The tasks of reasoning-gym have no split {split!r}: they have {', '.join(SEEDS)}.")
    if task not in DATASETS:
        raise DatasetError(f"reasoning-gym has no task {task!r}{did_you_mean(task, DATASETS)}.")
    options = _options(config)
    options["seed"] = options.get("seed", 0) * len(SEEDS) + SEEDS[split]
    try:
        dataset = reasoning_gym.create_dataset(task, **{"size": 500, **options})
    except Exception as error:  # whatever the task makes of its options
        raise DatasetError(f"The task {task!r} of reasoning-gym does not take its options ({error}).") from error
    kept = json.dumps({"size": len(dataset), **options})
    return [
        {"prompt": item["question"], "answer": str(item["answer"]), "task": task, "task_options": kept, "index": index}
        for index, item in enumerate(dataset)
    ]


def _options(config: str | None) -> dict[str, Any]:
    options = yaml.safe_load(config) if config else {}
    if not isinstance(options, dict):
        raise DatasetError(
            f"`dataset_config` is {config!r}: give the options of a task of reasoning-gym as a mapping, such as "
            "`{size: 2000}`."
        )
    return options
