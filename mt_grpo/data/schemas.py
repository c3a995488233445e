"""The kinds of datasets that a recipe can name: their columns, and how a row becomes a prompt and an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mt_grpo.errors import UserError
from mt_grpo.imports import Registry, check_name

Row = dict[str, Any]
Convert = Callable[[Row], Row]


class DatasetError(UserError, ValueError):
    """A dataset that cannot be used. The message is one sentence fit for the user."""


@dataclass(frozen=True)
class Schema:
    """
    A kind of dataset.

    Args:
        convert (`Callable`): Makes the columns to set from a row.
        columns (`tuple[str, ...]`): Columns that it reads.
        dropped (`tuple[str, ...]`): Columns that no prompt and no reward uses.
        hub_id (`str`): Id on the Hub; empty if a recipe always names a source, as `name:SOURCE`.
        config (`str`, *optional*): Configuration on the Hub.
    """

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


def as_messages(prompt: Any) -> list[dict[str, Any]]:
    """
    A prompt as messages: text as one user message, messages as they are.

    Raises:
        DatasetError: If it is neither, or a message says nothing.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and prompt and all(isinstance(item, dict) and "role" in item for item in prompt):
        for item in prompt:
            if item.get("content") is None and not item.get("tool_calls"):
                raise DatasetError(f"has a message without `content`: {str(item)[:80]!r}.")
        return prompt
    raise DatasetError(f"has a prompt that is neither text nor a list of messages: {str(prompt)[:80]!r}.")


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

    Raises:
        DatasetError: If the answer has another form, or is hidden, as in the test split.
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

    Raises:
        DatasetError: If the answer has no `####`.
    """
    if not isinstance(row["answer"], str) or "####" not in row["answer"]:
        raise DatasetError("has an answer without the `####` that precedes GSM8K's final answers.")
    final = row["answer"].rpartition("####")[2].strip().replace(",", "")
    return {"prompt": as_messages(row["question"]), "answer": row["answer"], "final_answer": final}
