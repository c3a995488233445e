"""
Loads dataset rows from any source: a `prompt` of messages, and the columns that rewards read. Tells at once whether
the Hugging Face Hub can be asked.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import datasets
import httpx
from datasets.exceptions import DatasetsError
from huggingface_hub import constants

from mt_grpo.data.images import Rows, decoded_as, undecoded, with_own_opener
from mt_grpo.errors import ConfigError, UserError
from mt_grpo.imports import FORMATS, Registry, check_name, did_you_mean, looks_like_path
from mt_grpo.media import media_to_digests
from mt_grpo.options.values import parse_mapping
from mt_grpo.runlog.files import to_json
from mt_grpo.trajectory import Message, Row

Convert = Callable[[Row], Row]


class DatasetError(UserError, ValueError):
    """A dataset that cannot be used. The message is one sentence fit for the user."""


@dataclass(frozen=True)
class _Schema:
    """A kind of dataset."""

    convert: Convert
    columns: tuple[str, ...]
    dropped: tuple[str, ...] = ()
    hub_id: str = ""
    config: str | None = None


SCHEMAS: Registry[_Schema] = Registry("dataset schema", "mt_grpo.data")
"""The names that `dataset_name` knows, besides `embedded` and sources."""


def dataset_schema(
    name: str, *, columns: tuple[str, ...], dropped: tuple[str, ...] = (), hub_id: str = "", config: str | None = None
) -> Callable[[Convert], Convert]:
    """Registers a function that makes the columns to set from a row, including `prompt`, as `_Schema` has them."""
    check_name(name, "dataset schema")

    def register(convert: Convert) -> Convert:
        SCHEMAS.add(name, _Schema(convert, columns, dropped, hub_id, config), convert.__module__)
        return convert

    return register


ROLES = ("system", "developer", "user", "assistant", "tool")
_OTHER_ROLES = dict.fromkeys(("human", "customer", "prompter"), "user") | {role: role for role in ROLES}
_OTHER_ROLES |= dict.fromkeys(("gpt", "chatgpt", "bot", "ai", "chatbot", "model"), "assistant") | {"function": "tool"}
"""Roles that datasets have, in lower case, by what chat templates call them. Others are a template's own."""


def as_messages(prompt: object) -> list[Message]:
    """A prompt as messages: text as one of the user, messages as they are; else raises `DatasetError`."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and prompt and all(isinstance(item, dict) and "role" in item for item in prompt):
        for item in prompt:
            role = str(item["role"])
            if role not in ROLES and (meant := _OTHER_ROLES.get(role.lower())):
                raise DatasetError(f"has a message of role {role!r}: write {meant!r}.")
            if item.get("content") is None and not item.get("tool_calls"):
                raise DatasetError(f"has a message without `content`: {str(item)[:80]!r}.")
        return prompt
    hint = ""
    if isinstance(prompt, list) and prompt and all(isinstance(item, dict) and "from" in item for item in prompt):
        hint = " Write `role` for `from`, `content` for `value`, and the role `user` for `human`."
    raise DatasetError(f"has a prompt that is neither text nor a list of messages: {str(prompt)[:80]!r}.{hint}")


def with_contents_of_one_kind(rows: list[Row]) -> list[Row]:
    """Rows whose messages all have lists of parts where some have: a column of a table is of one type."""
    prompts = [row["prompt"] for row in rows if isinstance(row.get("prompt"), list)]
    messages = [message for prompt in prompts for message in prompt if isinstance(message, dict)]
    if not any(isinstance(message.get("content"), list) for message in messages):
        return rows

    def in_parts(message: object) -> object:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            return message
        return {**message, "content": [{"type": "text", "text": message["content"]}]}

    return [
        {**row, "prompt": list(map(in_parts, row["prompt"]))} if isinstance(row.get("prompt"), list) else row
        for row in rows
    ]


@dataset_schema(
    "triviaqa",
    columns=("question", "question_id", "answer"),
    dropped=("entity_pages", "search_results"),
    hub_id="mandarjoshi/trivia_qa",
    config="rc.nocontext",
)
def _triviaqa_row(row: Row) -> Row:
    """TriviaQA. The question becomes `prompt`, value and aliases of the answer one list, value first."""
    answer = row["answer"]
    if not isinstance(answer, dict) or not {"value", "aliases"} <= answer.keys():
        raise DatasetError("has an answer without the value and aliases of TriviaQA.")
    if answer["value"] == "<unk>":
        raise DatasetError("has a hidden answer, as all of TriviaQA's test split: use `validation`.")
    answers = list(dict.fromkeys([answer["value"], *answer["aliases"]]))
    return {"prompt": as_messages(row["question"]), "answer": answers, "question_id": row["question_id"]}


@dataset_schema("gsm8k", columns=("question", "answer"), hub_id="openai/gsm8k", config="main")
def _gsm8k_row(row: Row) -> Row:
    """GSM8K. The question becomes `prompt`, the number after `####` of the `answer` becomes `final_answer`."""
    if not isinstance(row["answer"], str) or "####" not in row["answer"]:
        raise DatasetError("has an answer without the `####` that precedes GSM8K's final answers.")
    final = row["answer"].rpartition("####")[2].strip().replace(",", "")
    return {"prompt": as_messages(row["question"]), "answer": row["answer"], "final_answer": final}


REASONING_GYM = "reasoning_gym"
SEEDS = {"train": 0, "validation": 1, "test": 2}
"""Added to the seed, so that splits differ."""


def _puzzles(task: str, split: str, config: str | None) -> list[Row]:
    """The rows of a task: `prompt`, `answer`, and what the reward `reasoning_gym_reward` needs to judge an answer."""
    options = parse_mapping(config or {}, "dataset_config")
    if not isinstance(options, dict):
        raise DatasetError(
            f"`dataset_config` is {config!r}: give the options of a task of reasoning-gym as a mapping, such as "
            "`{size: 2000}`."
        )
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DatasetError(
            f"reasoning-gym is not installed ({error}): `pip install mt-grpo[reasoning-gym]`."
        ) from error
    _check_known("The tasks of reasoning-gym have no split", split, SEEDS, f": they have {', '.join(SEEDS)}")
    _check_known("reasoning-gym has no task", task, DATASETS)
    try:
        options["seed"] = options.get("seed", 0) * len(SEEDS) + SEEDS[split]
        dataset = reasoning_gym.create_dataset(task, **{"size": 500, **options})
    except Exception as error:  # whatever the task makes of its options
        raise DatasetError(f"The task {task!r} of reasoning-gym does not take its options ({error}).") from error
    kept = json.dumps({"size": len(dataset), **options})
    return [
        {"prompt": item["question"], "answer": str(item["answer"]), "task": task, "task_options": kept, "index": index}
        for index, item in enumerate(dataset)
    ]


def _check_known(lacks: str, name: str, known: Iterable[str], otherwise: str = "") -> None:
    """Refuses a name that is none of those known, with the nearest of them."""
    if name not in known:
        raise DatasetError(f"{lacks} {name!r}{did_you_mean(name, known)}{otherwise}.")


_TEXT_PROMPTS = "The prompts were text, each of which became one user message."
"""Description of a dataset of which that is true; `datasets` keeps it where rows are chosen or changed."""

_EMBEDDED_SPLITS: dict[str, Literal["train", "validation"]] = {
    "train": "train",
    "validation": "validation",
    "test": "validation",
}
_FILE_SPLITS = ("train", "validation", "test", "dev", "eval")  # names by which the rows of a single file may be called
_NO_ROWS = "BatchSize must be greater than 0, got 0"
_MOST_ROWS = 10**12  # of a split of which nobody knows how many it has
_SLICE = re.compile(r"\[(\d*):(\d*)\]")  # rows of a stream that are counted from the first on


def load_rows(
    name: str,
    split: str,
    *,
    config: str | None = None,
    column_mapping: dict[str, str] | None = None,
    streaming: bool = False,
) -> Rows:
    """
    Loads a dataset whose rows have a `prompt` (a list of messages) next to the columns of the source.

    Args:
        name (`str`): `embedded`, `triviaqa`, `gsm8k`, or a source. A source is a JSONL, JSON, parquet or CSV file, a
            folder with such a file (or its `-00000-of-00002` shards) per split, or the id of a dataset on the Hub. Its
            `prompt` column holds text, which becomes one user message, or a list of messages. `triviaqa:SOURCE` and
            `gsm8k:SOURCE` read a source in that schema.
        split (`str`): Split to load. A slice such as `train[:100]` works for every source; of a stream, one that
            counts rows from the first on. A single file has the same rows as `train`, `validation` and `test`.
        config (`str`, *optional*): Configuration of a dataset on the Hub; options of a task of reasoning-gym.
        column_mapping (`dict[str, str]`, *optional*): Columns to add, each with its source column, such as
            `{"prompt": "question", "answer": "gold"}`.
        streaming (`bool`, *optional*, defaults to `False`): Whether to read rows as they are needed; returns an
            `IterableDataset`.

    Raises:
        DatasetError: If there is no such source or split, it has no rows, a column is missing, or a row has no prompt.
    """
    schema, source, config = _resolve(name, config)
    if schema is _EMBEDDED:
        from mt_grpo.data.embedded.corpus import questions  # builds the corpus, which other datasets do not need

        base, known = split.partition("[")[0], _EMBEDDED_SPLITS
        _check_known("The embedded dataset has no split", base, known, f": it has {', '.join(known)}")
        rows, first = _sliced(questions(known[base]), split, streaming)
    elif schema is _PUZZLES:
        rows, first = _sliced(_puzzles(source, split.partition("[")[0], config), split, streaming)
    else:
        rows, first = _load(source, split, config, streaming)
    if first is None:
        raise DatasetError(f"The split {split!r} of the dataset {name!r} is empty.")

    mapping = column_mapping or {}
    columns = list(first)
    lacks, its = f"The dataset {name!r} has no column", f": its columns are {', '.join(columns)}"
    for target, column in mapping.items():
        turned = f"; write the new name first, `{{{column}: {target}}}`" if target in columns else ""
        _check_known(f"`column_mapping` names a column that {name!r} does not have,", column, columns, its + turned)
    for column in schema.columns:
        mend = f"; name the right one with `column_mapping: {{{column}: its name}}`"
        _check_known(lacks, column, [*columns, *mapping], its + mend)

    def convert(row: Row, index: int) -> Row:
        row = {**row, **{target: row[column] for target, column in mapping.items()}}
        try:
            return {**{target: row[target] for target in mapping}, **schema.convert(row)}
        except DatasetError as error:
            raise DatasetError(f"Row {index} (counted from 0) of the dataset {name!r} {error}") from None

    if schema is _PLAIN and isinstance(first[mapping.get("prompt", "prompt")], str):
        rows.info.description = _TEXT_PROMPTS
    dropped = [column for column in schema.dropped if column in columns and column not in mapping]
    if streaming:
        return rows.map(convert, with_indices=True, remove_columns=dropped)
    # The cache of `datasets` knows an imported function by its name only: it would survive a change of its code.
    made = undecoded(rows).map(
        convert, with_indices=True, remove_columns=dropped, load_from_cache_file=False, keep_in_memory=True
    )
    return decoded_as(made, {**rows.features, **{target: rows.features[column] for target, column in mapping.items()}})


def fingerprint(row: Row) -> tuple[int, str]:
    """What tells the contents of a row from others: a checksum and a digest. An image counts by its own digest."""
    text = to_json(media_to_digests(row)).encode()
    return crc32(text), hashlib.blake2b(text, digest_size=8).hexdigest()


def had_text_prompts(rows: Rows | dict[str, Rows] | None) -> bool:
    """Whether `load_rows` made messages of text: reward functions in TRL's form get text then, as from TRL."""
    several = rows.values() if isinstance(rows, dict) else [rows]
    return any(one is not None and one.info.description == _TEXT_PROMPTS for one in several)


_PLAIN = _Schema(lambda row: {"prompt": as_messages(row["prompt"])}, ("prompt",))
_PUZZLES = _Schema(lambda row: {"prompt": as_messages(row["prompt"])}, ("prompt",))
_EMBEDDED = _Schema(lambda row: {"prompt": as_messages(row["question"])}, ("question",))


def _resolve(name: str, config: str | None) -> tuple[_Schema, str, str | None]:
    """Schema, source and configuration of a dataset name."""
    head, _, source = name.partition(":")
    if name == "embedded":
        return _EMBEDDED, name, config
    if head == REASONING_GYM:
        return _PUZZLES, source, config
    if head not in SCHEMAS:
        return _PLAIN, name, config
    schema = SCHEMAS[head]
    if not source and not schema.hub_id:
        raise DatasetError(f"The dataset {name!r} is published nowhere: name a source of it, as `{head}:rows.jsonl`.")
    return (schema, source, config) if source else (schema, schema.hub_id, config or schema.config)


def slice_rows(rows: datasets.Dataset, split: str) -> datasets.Dataset:
    """The rows of a split, as far as its slice goes."""
    base = split.partition("[")[0]
    try:
        wanted = datasets.ReadInstruction.from_spec(split).to_absolute({base: len(rows)})
    except ValueError as error:
        raise DatasetError(
            f"The split {split!r} is not read ({error}): give slices of one split, as `{base}[:10]+{base}[20:30]`."
        ) from error
    ends = [(one.from_ or 0, len(rows) if one.to is None else one.to) for one in wanted]
    return rows.select([number for begin, end in ends for number in range(begin, end)])


def _sliced(made: list[Row], split: str, streaming: bool) -> tuple[Rows, Row | None]:
    """Rows that were made here, as far as the split's slice goes, and the first of them."""
    rows = slice_rows(datasets.Dataset.from_list(made), split)
    first = next(iter(rows), None)
    return rows.to_iterable_dataset() if streaming and first is not None else rows, first


def _load(source: str, split: str, config: str | None, streaming: bool) -> tuple[Rows, Row | None]:
    """The rows of files or of a dataset on the Hub, and the first of them, if any."""
    path = Path(source).expanduser()
    base, bracket, _ = split.partition("[")
    if path.exists():
        files = _files(path, base)
        arguments: dict[str, Any] = {
            "path": FORMATS[files[0].suffix],
            "data_files": {base: [str(file) for file in files]},
        }
        for file in files if arguments["path"] == "json" else ():  # which ends the process in `datasets`
            with suppress(OSError), file.open("rb") as opened:  # one that cannot be read, `datasets` refuses
                if opened.read(2**16).lstrip(b"\xef\xbb\xbf \t\r\n[").startswith(b"null"):
                    raise DatasetError(f"The file {str(file)!r} begins with `null`, which is no row: remove it.")
    elif path.suffix in FORMATS or looks_like_path(source):
        raise DatasetError(f"There is no file or folder {source!r} (the current folder is {Path.cwd()}).")
    else:
        arguments = {"path": source, "name": config}
        fetched = Path(constants.HF_HUB_CACHE, f"datasets--{source.replace('/', '--')}")
        # of what was fetched before `datasets` says what is not there
        cached = fetched.exists() or Path(datasets.config.HF_DATASETS_CACHE, source.replace("/", "___")).exists()
        if not constants.HF_HUB_OFFLINE and not cached and (fault := hub_fault()):
            raise DatasetError(
                f"The dataset {source!r} is neither a file or folder here nor in the cache"
                f"{did_you_mean(source, ['embedded', *SCHEMAS])}: it cannot be fetched, since {fault}."
            )
    try:
        rows = datasets.load_dataset(**arguments, split=base if streaming else split, streaming=streaming)
        if streaming and bracket:
            rows = _sliced_stream(rows, split)
        # a stream is not read, and fails, before this
        return with_own_opener(rows), next(iter(undecoded(rows)), None)
    except (DatasetsError, OSError, ValueError, TypeError, StopIteration, RecursionError) as error:
        reason = " ".join(str(error.__cause__ or error).split()).rstrip(".")
        # How `datasets` reports JSON files without a line, other splits without a row, and such Parquet files.
        if isinstance(error, StopIteration) or reason.endswith(_NO_ROWS) or "corresponds to no data" in str(error):
            raise DatasetError(f"The split {split!r} of the dataset {source!r} is empty.") from error
        if isinstance(error.__cause__ or error, UnicodeDecodeError):
            reason += ": save the file in UTF-8"
        if isinstance(error.__cause__ or error, OSError) and not _can_cache():
            reason += ": set `HF_HOME` to a folder that can be written"
        known = "" if path.exists() else did_you_mean(source, ["embedded", *SCHEMAS])
        raise DatasetError(f"The split {split!r} of the dataset {source!r} does not load{known}: {reason}.") from error


def _can_cache() -> bool:
    """Whether the folder can be made, or written, in which `datasets` keeps what it has read."""
    try:
        Path(datasets.config.HF_DATASETS_CACHE).mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(datasets.config.HF_DATASETS_CACHE, os.W_OK)


def _sliced_stream(rows: datasets.IterableDataset, split: str) -> datasets.IterableDataset:
    found = _SLICE.search(split)
    if found is None or not split.endswith(found[0]):
        raise DatasetError(
            f"The split {split!r} of a stream cannot be told before its end: count rows from the first on, as "
            "`train[:100]` or `train[100:]`, or leave `dataset_streaming` out."
        )
    first, end = int(found[1] or 0), found[2]
    rows = rows.skip(first)
    return rows.take(max(0, int(end) - first)) if end else rows


def check_apart(name: str, train: str, test: str, rows: Rows | None = None) -> None:
    """Refuses to evaluate on rows that are trained on; `rows` may know how many rows their whole split has."""
    schema, source, _ = _resolve(name, None)
    base = train.partition("[")[0]
    known = None if rows is None or rows.info.splits is None else rows.info.splits.get(base)
    size = known.num_examples if known and known.num_examples else _MOST_ROWS

    def parts(split: str) -> list[tuple[str, int, int]]:
        """The rows of a split: where they come from, the first, and the one after the last."""
        sizes = {part.partition("[")[0]: size for part in split.split("+")}
        try:
            found = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
        except ValueError:  # which is refused where it is read
            return []
        return [(origin(one.splitname), one.from_ or 0, size if one.to is None else one.to) for one in found]

    def origin(name: str) -> str:
        if schema is _EMBEDDED:
            return _EMBEDDED_SPLITS.get(name, name)
        return source if Path(source).expanduser().is_file() else name

    if not any(
        one == other and max(begin, other_begin) < min(end, other_end)
        for one, begin, end in parts(train)
        for other, other_begin, other_end in parts(test)
    ):
        return
    raise DatasetError(
        f"`do_eval: true` would measure on rows that are trained on: `dataset_train_split: {train}` and "
        f"`dataset_test_split: {test}` take the same rows of {name!r}. Keep rows apart, as `dataset_train_split: "
        f"{base}[20:]` and `dataset_test_split: {base}[:20]`, or name another split."
    )


def _files(path: Path, split: str) -> list[Path]:
    """The files of a split: the path itself, or what the folder holds under the name of the split."""
    formats = ", ".join(FORMATS)
    if path.is_file():
        if path.suffix not in FORMATS:
            raise DatasetError(f"The file {str(path)!r} is none of the formats {formats}.")
        mend = ": name `train`, or a slice of it, as `train[20:]`"
        _check_known(f"The file {str(path)!r} has no split", split, _FILE_SPLITS, mend)
        return [path]
    found = [*sorted(path.glob("*")), *sorted(path.glob("data/*"))]  # where the Hub has them
    present = [file for file in found if file.suffix in FORMATS]
    pattern = re.compile(re.escape(split) + r"(-\d+-of-\d+)?")
    files = [file for file in present if pattern.fullmatch(file.stem)]
    files = [file for file in files if file.parent == files[0].parent]
    if not files:
        holds = ", ".join(file.name for file in present) or f"no {formats} file"
        near = did_you_mean(split, sorted({file.stem.split("-")[0] for file in present}))
        raise DatasetError(f"The folder {str(path)!r} has no file for the split {split!r}{near}: it holds {holds}.")
    if len({file.suffix for file in files}) > 1:
        names = ", ".join(file.name for file in files)
        raise DatasetError(f"The folder {str(path)!r} has the split {split!r} in several formats: {names}; keep one.")
    return files


_HUB_SECONDS = 10.0


class HubUnreachable(ConfigError):
    """Something is not cached, and the Hub cannot be asked for it."""


def hub_fault() -> str | None:
    """Why the Hub cannot be asked, as the end of a sentence, or `None`; its own client tries for half a minute."""
    if constants.HF_HUB_OFFLINE:
        return "`HF_HUB_OFFLINE` is set"
    try:
        httpx.head(constants.ENDPOINT, timeout=_HUB_SECONDS)
    except httpx.TransportError as error:
        return f"{constants.ENDPOINT} cannot be reached ({error})"
    return None


def check_hub(what: str) -> None:
    """Makes sure that something which is not in the cache can be fetched."""
    fault = hub_fault()
    if fault is not None:
        raise HubUnreachable(
            f"{what} is neither a folder here nor in the cache ({constants.HF_HUB_CACHE}), and cannot be fetched, "
            f"since {fault}: name a folder, or fetch it where the Hugging Face Hub can be reached (`hf download`)."
        )


def lacks_column(
    what: str, column: str, dataset: str, columns: Sequence[str], or_else: str = ", or give the parameter a default"
) -> ConfigError:
    """The error that something takes an argument from a column that a dataset lacks."""
    return ConfigError(
        f"{what} needs `{column}`, which is no column of the {dataset}{did_you_mean(column, columns)}: its columns "
        f"are {', '.join(columns)}; name the right one with `column_mapping: {{{column}: its name}}`{or_else}."
    )
