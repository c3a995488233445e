"""The kinds of datasets that a recipe can name: their columns, and how a row becomes a prompt and an answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from mt_grpo.errors import UserError
from mt_grpo.imports import Registry, check_name, did_you_mean

Row = dict[str, Any]
Convert = Callable[[Row], Row]


class DatasetError(UserError, ValueError):
    """A dataset that cannot be used. The message is one sentence fit for the user."""


@dataclass(frozen=True)
class Schema:
    """A kind of dataset."""

    convert: Convert
    columns: tuple[str, ...]
    dropped: tuple[str, ...] = ()
    hub_id: str = ""
    config: str | None = None


SCHEMAS: Registry[Schema] = Registry("dataset schema", "mt_grpo.data")
"""The names that `dataset_name` knows, besides `embedded` and sources."""


def dataset_schema(
    name: str, *, columns: tuple[str, ...], dropped: tuple[str, ...] = (), hub_id: str = "", config: str | None = None
) -> Callable[[Convert], Convert]:
    """
    Registers a function that makes the columns to set from a row, including `prompt`. For the rest see `Schema`.

    Raises:
        RegistrationError: If the name is no word, or another file has registered it.
    """
    check_name(name, "dataset schema")

    def register(convert: Convert) -> Convert:
        SCHEMAS.add(name, Schema(convert, columns, dropped, hub_id, config), convert.__module__)
        return convert

    return register


ROLES = ("system", "developer", "user", "assistant", "tool")
OTHER_ROLES = dict.fromkeys(("human", "customer", "prompter"), "user") | {role: role for role in ROLES}
OTHER_ROLES |= dict.fromkeys(("gpt", "chatgpt", "bot", "ai", "chatbot", "model"), "assistant") | {"function": "tool"}
"""Roles that datasets have, in lower case, by what chat templates call them. Others are a template's own."""


def as_messages(prompt: Any) -> list[dict[str, Any]]:
    """
    A prompt as messages: text as one user message, messages as they are.

    Raises:
        DatasetError: If it is neither, or a message says nothing, or its role has another name in chat templates.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and prompt and all(isinstance(item, dict) and "role" in item for item in prompt):
        for item in prompt:
            role = str(item["role"])
            if role not in ROLES and (meant := OTHER_ROLES.get(role.lower())):
                raise DatasetError(f"has a message of role {role!r}: write {meant!r}.")
            if item.get("content") is None and not item.get("tool_calls"):
                raise DatasetError(f"has a message without `content`: {str(item)[:80]!r}.")
        return prompt
    hint = ""
    if isinstance(prompt, list) and prompt and all(isinstance(item, dict) and "from" in item for item in prompt):
        hint = " Write `role` for `from`, `content` for `value`, and the role `user` for `human`."
    raise DatasetError(f"has a prompt that is neither text nor a list of messages: {str(prompt)[:80]!r}.{hint}")


def with_contents_of_one_kind(rows: list[Row]) -> list[Row]:
    """
    Rows whose messages, where some contents are lists of parts, all have such lists: a column of a table is of one
    type, and text is a part too.
    """
    prompts = [row["prompt"] for row in rows if isinstance(row.get("prompt"), list)]
    messages = [message for prompt in prompts for message in prompt if isinstance(message, dict)]
    if not any(isinstance(message.get("content"), list) for message in messages):
        return rows
    return [
        {**row, "prompt": list(map(_in_parts, row["prompt"]))} if isinstance(row.get("prompt"), list) else row
        for row in rows
    ]


def _in_parts(message: Any) -> Any:
    if not isinstance(message, dict) or not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


@dataset_schema(
    "triviaqa",
    columns=("question", "question_id", "answer"),
    dropped=("entity_pages", "search_results"),
    hub_id="mandarjoshi/trivia_qa",
    config="rc.nocontext",
)
def triviaqa_row(row: Row) -> Row:
    """
    TriviaQA. The question becomes `prompt`. Value and aliases of the answer become one list of strings, value first.
    """
    answer = row["answer"]
    if not isinstance(answer, dict) or not {"value", "aliases"} <= answer.keys():
        raise DatasetError("has an answer without the value and aliases of TriviaQA.")
    if answer["value"] == "<unk>":
        raise DatasetError("has a hidden answer, as all of TriviaQA's test split: use `validation`.")
    answers = list(dict.fromkeys([answer["value"], *answer["aliases"]]))
    return {"prompt": as_messages(row["question"]), "answer": answers, "question_id": row["question_id"]}


@dataset_schema("gsm8k", columns=("question", "answer"), hub_id="openai/gsm8k", config="main")
def gsm8k_row(row: Row) -> Row:
    """
    GSM8K. The question becomes `prompt`. The worked `answer` stays as it is. The number after `####` becomes
    `final_answer`, a string without thousands separators.
    """
    if not isinstance(row["answer"], str) or "####" not in row["answer"]:
        raise DatasetError("has an answer without the `####` that precedes GSM8K's final answers.")
    final = row["answer"].rpartition("####")[2].strip().replace(",", "")
    return {"prompt": as_messages(row["question"]), "answer": row["answer"], "final_answer": final}


REASONING_GYM = "reasoning_gym"
SEEDS = {"train": 0, "validation": 1, "test": 2}
"""Added to the seed, so that splits differ."""


def puzzles(task: str, split: str, config: str | None) -> list[Row]:
    """The rows of a task: `prompt`, `answer`, and what the reward `reasoning_gym_reward` needs to judge an answer."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DatasetError(
            f"reasoning-gym is not installed ({error}): `pip install mt-grpo[reasoning-gym]`."
        ) from error
    if split not in SEEDS:
        near = did_you_mean(split, SEEDS)
        raise DatasetError(f"The tasks of reasoning-gym have no split {split!r}{near}: they have {', '.join(SEEDS)}.")
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
