"""
`mt-grpo eval`: one or several models on the held-out rows of a recipe. What a model said is kept in a folder of its
own, as a run's, as soon as it is scored, so that the same command goes on where it was killed.
"""

from __future__ import annotations

import gc
import json
import math
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from itertools import chain, combinations, count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from transformers.trainer_utils import IntervalStrategy
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME
from trl import ModelConfig

from mt_grpo.app.build import Recipe, build_recipe, build_trainer, load_datasets
from mt_grpo.app.recipe_file import CONFIG
from mt_grpo.app.request import Request, check_writable
from mt_grpo.data import fingerprint
from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean, in_home
from mt_grpo.media import media_to_digests
from mt_grpo.options.table import OF_ENVIRONMENT
from mt_grpo.rollout.endpoint import ChatEndpoint
from mt_grpo.runlog import Batch, RunWriter, open_run
from mt_grpo.runlog.files import Silence, to_json, written_whole
from mt_grpo.runlog.findings import FAILED, Estimate, bootstrap, pass_at
from mt_grpo.runlog.index import lines_of
from mt_grpo.runlog.schema import FOLDER, INDEX, Row, session_id, session_number
from mt_grpo.training.checkpoint import latest_checkpoint
from mt_grpo.training.columns import Rows
from mt_grpo.training.config import changed
from mt_grpo.training.model import resolve_base, resolve_model
from mt_grpo.training.rollout_batch import RolloutBatch
from mt_grpo.training.step_log.records import run_line
from mt_grpo.training.trainer import MTGRPOEnvTrainer
from mt_grpo.trajectory import visible

ENDPOINT = re.compile(r"(?:(?!https?://)(?P<model>.+)@)?(?P<url>https?://\S+)")
_DECIDING = (
    *("dataset_name", "dataset_config", "column_mapping", *OF_ENVIRONMENT),
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length", "max_turn_length"),
    *("history", "compact_every", "chat_template_kwargs", "seed", "environments", "generation_kwargs"),
    *("rollout_timeout", "model_revision", "dtype", "load_in_4bit", "load_in_8bit", "model_init_kwargs"),
    *("turn_reward_funcs", "outcome_reward_funcs", "reward_weights"),
)
"""Options that decide what is sampled and how it is scored."""
_OF_HELD_OUT = ("dataset_test_split", "eval_datasets")
"""Options that decide which rows are held out; those of training are compared one by one alone."""
_SET = "eval_dataset"  # the column that says of which of several `eval_datasets` a row is
_MOST_VALUES = 30  # values of a column by which results are split
_MILLION = 1e6
_COUNTS = ("requests", "prompt", "cached", "completion")  # of an endpoint


def say_usage(usage: Row) -> str:
    """What an endpoint was asked, in words."""
    says = "{requests} requests, {prompt:,} tokens in ({cached:,} cached), {completion:,} out".format(**usage)
    uncounted = usage.get("uncounted")
    return f"{says}, and those of {uncounted} requests, which it did not count" if uncounted else says


def _endpoint(name: str) -> re.Match[str] | None:
    """The address in a model's name, and the model there, where it names an endpoint."""
    found = ENDPOINT.fullmatch(name)
    try:
        urlsplit(found["url"] if found else "").port  # noqa: B018, asked for what it raises
    except ValueError as error:
        raise ConfigError(f"The address {name!r} of an endpoint cannot be read ({error}): mend it.") from None
    return found


class SampledModel:
    """A model that has conversations, and the folder with what it said; `trained_on` are training rows."""

    def __init__(self, name: str, folder: Path, api_key_env: str | None, trained_on: bool = False) -> None:
        self.name, self.folder, self.trained_on = name, folder, trained_on
        if folder.resolve() == in_home(name).resolve():
            raise ConfigError(f"`--save` would write into the model's own folder {name}: name another one.")
        found = _endpoint(name)
        if found and (urlsplit(found["url"]).username or urlsplit(found["url"]).query):
            raise ConfigError(
                "The address of an endpoint has a user or a query, which would be written to disk: leave them out, "
                "and give a key by `--api_key_env`."
            )
        self.endpoint = ChatEndpoint(found["url"], found["model"], None, api_key_env) if found else None
        self.path = name
        if self.endpoint is None:
            path = in_home(name)
            if path.is_dir() and not any((path / file).is_file() for file in (CONFIG_NAME, ADAPTER_CONFIG_NAME)):
                self.path = str(latest_checkpoint(name) or name)  # a run that has not ended
            resolve_base(resolve_model(self.path))

    def served(self) -> str | None:
        """The model that an endpoint has, which is asked for it."""
        return None if self.endpoint is None else self.endpoint.model

    def weights(self) -> list[Any]:
        """What is another once other weights are in a model's folder."""
        found = [Path(self.path).glob(form) for form in ("*.safetensors", "*model*.bin")]
        files = sorted(chain(*found)) if self.endpoint is None else []
        return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]

    def recipe(self, request: Request, generations: int) -> Recipe:
        """The recipe with this model."""
        recipe = build_recipe(request)
        if self.endpoint is None:
            if self.name != recipe.model.model_name_or_path:  # whose revision it is
                recipe.model.model_revision = ModelConfig().model_revision
            recipe.model.model_name_or_path, recipe.model.use_peft = self.path, False
        args = recipe.training
        at_once = args.max_concurrent_rollouts or args.per_device_eval_batch_size * generations
        off = {"beta": 0.0, "sync_ref_model": False}  # a reference is for a loss
        recipe.training = changed(args, do_eval=not self.trained_on, max_concurrent_rollouts=at_once, **off)
        if self.trained_on:  # nothing is evaluated
            off = {"eval_strategy": IntervalStrategy.NO, "load_best_model_at_end": False}
            recipe.training = changed(recipe.training, **off, early_stopping_patience=None)
        return recipe


def evaluate(request: Request) -> int:
    """Samples and scores what is missing, writes and prints results; 1 where all conversations of a model failed."""
    own = request.own
    console = Console(soft_wrap=True, stderr=own["json"])
    generations = own["num_generations"] or request.values.get("num_generations_eval") or 1
    prices = read_prices(own["prices"])
    save = Path(own["save"] or Path("evals", Path(request.path or "evaluation").stem))
    check_writable(str(save), f"`--save {save}`")
    names = list(dict.fromkeys(own["model"] or [request.values["model_name_or_path"]]))
    hosts = {urlsplit(found["url"]).netloc for name in names if (found := _endpoint(name))}
    if own["api_key_env"] and len(hosts) > 1:
        raise ConfigError(
            f"`--api_key_env {own['api_key_env']}` would be sent to {', '.join(sorted(hosts))}: evaluate them one "
            "after the other, with the same `--save`."
        )
    folders = {name: save / (re.sub(r"[^\w.-]+", "-", name).strip("-.") or "model") for name in names}
    models = [SampledModel(name, folder, own["api_key_env"]) for name, folder in folders.items()]
    own_server = request.values.get("use_vllm") and request.values.get("vllm_mode") != "colocate"
    if own_server and sum(model.endpoint is None for model in models) > 1:
        raise ConfigError(
            "With `use_vllm: true` a server has one model, and `--model` names several: evaluate one after the other, "
            "with the same `--save` and a server of each (`mt-grpo serve`)."
        )
    datasets.disable_progress_bars()
    for model in models:  # before any of them samples
        model.served()
    asked = None
    for model in models:
        asked = sample(model, request, asked, generations, console)
    assert asked is not None  # there is a model
    rows = asked.rows
    results = [Results(model, generations, len(rows), prices) for model in models]
    line = {"recipe": request.path, "rows": len(rows), "num_generations": generations, "confidence": 0.95}
    line |= _summary(results, rows, own["by"] or [])
    _write_table(save / "results.parquet", results, rows, own["by"] or [])
    with written_whole(save / "results.jsonl") as partial:
        partial.write_text(to_json(line) + "\n", encoding="utf-8")
    if own["json"]:
        print(to_json(line))
    else:
        _show(line, console)
        console.print(f"Written to {save}: `mt-grpo view {save}` shows the conversations.", markup=False)
    return int(any(len(each.counted) == 0 for each in results))


def read_prices(given: Sequence[float] | None) -> list[float] | None:
    if given is None:
        return None
    if len(given) not in (2, 3) or not all(0 <= price < math.inf for price in given):
        raise ConfigError(
            "`--prices` takes two or three numbers, in any currency: the prices of a million tokens of prompts, of "
            "answers, and of prompts from the cache, as `--prices 0.25 2 0.025`."
        )
    return [*given, given[0]][:3]


# Sampling


class Asked:
    """Rows with what tells them apart, which is taken at once: images that were decoded have other digests."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        prints = list(map(fingerprint, rows))
        self.sums, self.digests = [checksum for checksum, _ in prints], [digest for _, digest in prints]


def sample(
    model: SampledModel,
    request: Request,
    asked: Asked | None,
    generations: int,
    console: Console,
    check: Callable[[list[Row]], object] | None = None,
) -> Asked:
    """Has a model say what it has not said yet; returns the rows. `check` gets the rewards before that."""
    recipe, trainer = model.recipe(request, generations), None
    resolved = recipe.resolved()
    if asked is None:
        found = load_datasets(recipe)[not model.trained_on]
        if found is None:
            trainer = build_trainer(recipe, trains=False, writes=False, endpoint=model.endpoint)
            found = trainer.train_dataset if model.trained_on else trainer.eval_dataset
        asked = Asked(_rows(found, request.own))
    deciding = _DECIDING if model.trained_on else (*_OF_HELD_OUT, *_DECIDING)
    about = {name: resolved[name] for name in deciding if name in resolved}
    about |= {"num_generations": generations, "model": model.name, "weights": model.weights()}
    about = json.loads(to_json(about))
    done = _done(model.folder, about, asked.sums, generations)
    if not all(done):
        about["served"] = model.served()
        done = _done(model.folder, about, asked.sums, generations)
        trainer = trainer or build_trainer(recipe, trains=False, writes=False, endpoint=model.endpoint)
        if check is not None:
            check(trainer.step_log.records.rewards)
        model.folder.mkdir(parents=True, exist_ok=True)
        (model.folder / CONFIG).write_text(yaml.safe_dump(resolved, sort_keys=True), encoding="utf-8")
        try:
            _converse(model, trainer, asked, done, {"evaluation": about}, console)
        except KeyboardInterrupt as error:
            kept = f"What has ended is in {model.folder}, and the same command goes on from there."
            raise KeyboardInterrupt(*error.args[:1] or [signal.SIGINT], kept) from None
    if trainer is not None:
        if trainer.weight_sync is not None:
            trainer.weight_sync.close()
        trainer.accelerator.free_memory()
        del trainer
        gc.collect()
        torch.cuda.empty_cache()
    return asked


def _rows(found: Rows | dict[str, Rows], own: Row) -> list[Row]:
    """The rows to answer, of several sets with the name of theirs."""
    several = found if isinstance(found, dict) else {"": found}
    most = own["num_prompts"]
    rows = [
        {**row, **({_SET: name} if name else {})}
        for name, one in several.items()
        for row in (one if most is None else one.take(most))
    ]
    if len(several) > 1:
        own["by"] = list(dict.fromkeys([_SET, *(own["by"] or [])]))
    for column in own.get("by") or []:
        _check_column(column, rows)
    return rows


def _converse(
    model: SampledModel, trainer: MTGRPOEnvTrainer, asked: Asked, done: list[bool], about: Row, console: Console
) -> None:
    """Samples what is not done; each conversation is written with its scores as soon as it has some."""
    generations, records, writer = len(done) // len(asked.rows), trainer.step_log.records, RunWriter(model.folder)
    about = {**records.about, "group_size": generations, "group_size_eval": generations, "model": model.name, **about}
    writer.append([*writer.save_tokenizer(records.save_tokenizer), run_line(about, records.rewards)])
    parts = count(len(list((model.folder / FOLDER).glob("eval-*.parquet"))))
    progress = _Shown(model.name, len(done), sum(done), console)
    usage = {} if model.endpoint is None else model.endpoint.usage

    def evaluated(number: int, used: Row) -> Row:
        place = asked.sums[number // generations]
        return {"kind": "evaluated", "session": session_id("eval", 0, 0, number), "row": place, **used}

    def take(ended: RolloutBatch) -> None:
        them = ended.trajectories
        numbers = [session_number(each.session) for each in them]
        batch = Batch("eval", 0, 0, generations, numbers, them, records.rewards, next(parts))
        lines = writer.write(batch)
        lines += [evaluated(number, usage.pop(each.session, {})) for number, each in zip(numbers, them, strict=True)]
        writer.append(lines)
        progress.advance(len(them))

    try:
        with progress.shown():
            trainer.converse([row for row in asked.rows for _ in range(generations)], done, generations, take)
    finally:  # conversations that broke off were paid too
        if usage:
            writer.append([evaluated(session_number(session), used) for session, used in usage.items()])


def _done(folder: Path, about: Row, sums: list[int], generations: int) -> list[bool]:
    """Which conversations are there. Refuses a folder with those of other options, rows or weights."""
    number = len(sums) * generations
    if not (folder / FOLDER / INDEX).is_file() or not (run := open_run(folder)).rows:
        return [False] * number
    before = run.about.get("evaluation") or {}
    for name, value in about.items():
        if before.get(name) != value:
            shown = f" (there {visible(str(before.get(name)))[:60]}, here {str(value)[:60]})"
            what = "weights" if name == "weights" else f"`{name}`{shown}"
            raise ConfigError(
                f"{folder} has conversations that were sampled with other {what}: give another `--save`, or remove "
                "that folder."
            )
    for line in lines_of(folder, b'{"kind":"evaluated"'):
        place = session_number(line["session"]) // generations
        if place < len(sums) and sums[place] != line["row"]:
            raise ConfigError(
                f"Row {place} (counted from 0) of the dataset is another than the one of which {folder} has "
                "conversations: give another `--save`, or remove that folder."
            )
    there = {row["session"] for row in run.rows if row["stop"] not in FAILED}
    return [session_id("eval", 0, 0, place) in there for place in range(number)]


class _Shown:
    """How far a model is, and the time that is left: a bar in a terminal, now and then a line in a log."""

    def __init__(self, name: str, total: int, done: int, console: Console) -> None:
        self._name, self._total, self._first, self._done = name, total, done, done
        self._console, self._begun = console, time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console)
        self._task = self._bar.add_task(Text(name).plain, total=total, completed=done)

    def advance(self, number: int) -> None:
        self._done += number
        self._bar.advance(self._task, number)

    @contextmanager
    def shown(self) -> Iterator[None]:
        with self._bar if self._console.is_terminal else Silence(self._say):
            yield

    def _say(self) -> None:
        said = f"{self._name}: {self._done} of {self._total} conversations"
        if (here := self._done - self._first) and self._done < self._total:
            seconds = (time.monotonic() - self._begun) / here * (self._total - self._done)
            said += f", {timedelta(seconds=round(seconds))} left"
        self._console.print(said, highlight=False, markup=False)


# Results


class Results:
    """What a model's conversations came to: arrays of shape (rows, num_generations), NaN where one failed."""

    def __init__(self, model: SampledModel, generations: int, rows: int, prices: Sequence[float] | None) -> None:
        self.name, self.folder, self.generations = model.name, model.folder, generations
        run = open_run(model.folder)
        number = rows * generations
        every = [row for row in run.rows if session_number(row["session"]) < number]
        self.lines = sorted(every, key=lambda row: row["session"])
        self.counted = [row for row in self.lines if row["stop"] not in FAILED]
        self.failed = len(self.lines) - len(self.counted)
        self._shape = rows, generations
        self.reward = self._grid(lambda row: row["reward"])
        self.right = self._grid(lambda row: row["right"])
        names = [reward["name"] for reward in run.about.get("rewards") or []]
        self.rewards = {name: self._grid(lambda row, name=name: row["rewards"].get(name)) for name in names}
        used: Counter[str] = Counter()
        self.used: dict[str, Row] = {}
        for line in lines_of(model.folder, b'{"kind":"evaluated"'):
            if "requests" in line and session_number(line["session"]) < number:
                self.used[line["session"]] = line
                used.update({name: line[name] for name in (*_COUNTS, "uncounted") if name in line})
        self.usage = dict(used)
        self.prices = prices if used else None

    def _grid(self, value: Any) -> np.ndarray:
        grid = np.full(self._shape[0] * self._shape[1], np.nan)
        for row in self.counted:
            found = value(row)
            grid[session_number(row["session"])] = np.nan if found is None else float(found)
        return grid.reshape(self._shape)

    def cost(self, usage: Row) -> float | None:
        """The price of tokens, where prices are given."""
        if self.prices is None or not usage or usage.get("uncounted"):
            return None
        fresh, answers, cached = self.prices
        prompt = usage["prompt"] - usage["cached"]
        return (prompt * fresh + usage["cached"] * cached + usage["completion"] * answers) / _MILLION

    def passes(self) -> tuple[dict[str, Estimate], dict[str, Estimate]]:
        """pass@k and pass^k, for each k; nothing without a reward that says what is right."""
        attempts = (~np.isnan(self.right)).sum(axis=1)
        if not attempts.any():
            return {}, {}
        right = np.nansum(self.right, axis=1)
        pairs = {str(k): pass_at(right, attempts, k) for k in range(1, self.generations + 1)}
        at, power = ({k: bootstrap(pair[which]) for k, pair in pairs.items()} for which in (0, 1))
        return at, power

    def describe(self) -> Row:
        """The line of `results.jsonl` about this model."""
        at, power = self.passes()
        counted = self.counted
        calls, errors = (
            sum(map(total, counted)) for total in (lambda row: row["calls"], lambda row: sum(row["errors"]))
        )
        count = max(1, len(counted))
        return {
            "conversations": len(counted),
            "failed": self.failed,
            "first_failure": next((row["error"] for row in self.lines if row["stop"] in FAILED), None),
            "reward": asdict(bootstrap(_mean(self.reward))),
            "rewards": {name: asdict(bootstrap(_mean(grid))) for name, grid in self.rewards.items()},
            "pass@k": {k: asdict(each) for k, each in at.items()},
            "pass^k": {k: asdict(each) for k, each in power.items()},
            "turns": sum(row["turns"] for row in counted) / count,
            "tokens": sum(sum(row["tokens"]) for row in counted) / count,
            "seconds": sum(row["seconds"] for row in counted) / count,
            "stop_reasons": dict(Counter(row["stop"] for row in counted).most_common()),
            "calls": calls,
            "failed_calls": errors,
            "usage": self.usage or None,
            "cost": self.cost(self.usage),
        }


def _mean(grid: np.ndarray) -> np.ndarray:
    """The mean of each row over the conversations that count; NaN where none does."""
    number = (~np.isnan(grid)).sum(axis=1)
    return np.where(number > 0, np.nansum(grid, axis=1) / np.maximum(number, 1), np.nan)


def _summary(results: Sequence[Results], rows: Sequence[Row], by: Sequence[str]) -> Row:
    """Each model, each pair of models row by row, and each value of the columns `by`."""
    pairs = []
    for first, second in combinations(results, 2):
        difference = _mean(second.reward) - _mean(first.reward)
        pairs.append(
            {
                "model": second.name,
                "minus": first.name,
                "reward": asdict(bootstrap(difference)),
                "right": asdict(bootstrap(_mean(second.right) - _mean(first.right))),
                "wins": int((difference > 0).sum()),
                "losses": int((difference < 0).sum()),
                "ties": int((difference == 0).sum()),
            }
        )
    split: Row = {}
    for column in by:
        values = [_value(row.get(column)) for row in rows]
        split[column] = {}
        for value in sorted(set(values), key=lambda each: (values.count(each) == 0, each)):
            chosen = np.array([each == value for each in values])
            split[column][value] = {
                each.name: {
                    "reward": asdict(bootstrap(_mean(each.reward)[chosen])),
                    "right": asdict(bootstrap(_mean(each.right)[chosen])),
                }
                for each in results
            }
    return {"models": {each.name: each.describe() for each in results}, "differences": pairs, "by": split}


def _check_column(column: str, rows: Sequence[Row]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if column not in columns:
        raise ConfigError(
            f"`--by {column}` names no column of the evaluation set{did_you_mean(column, columns)}: its columns "
            f"are {', '.join(columns)}."
        )
    number = len({_value(row.get(column)) for row in rows})
    if number > _MOST_VALUES:
        raise ConfigError(
            f"`--by {column}` would split the rows by {number} values: name a column with {_MOST_VALUES} at most."
        )


def _value(value: object) -> str:
    return value if isinstance(value, str) else to_json(media_to_digests(value))


def _write_table(path: Path, results: Sequence[Results], rows: Sequence[Row], by: Sequence[str]) -> None:
    """A row per conversation of each model."""
    table = []
    for each in results:
        for line in each.lines:
            number = session_number(line["session"])
            used = each.used.get(line["session"], {})
            table.append(
                {
                    "model": each.name,
                    "row": number // each.generations,
                    "sample": number % each.generations,
                    **{
                        name: line[name]
                        for name in ("session", "prompt", "answer", "stop", "error", "reward", "right")
                    },
                    **{f"rewards/{name}": line["rewards"].get(name) for name in each.rewards},
                    **{name: line[name] for name in ("turns", "calls", "seconds", "start")},
                    "tokens": sum(line["tokens"]),
                    "failed_calls": sum(line["errors"]),
                    **{f"usage/{name}": used.get(name) for name in _COUNTS},
                    "cost": each.cost(used),
                    **{f"by/{column}": _value(rows[number // each.generations].get(column)) for column in by},
                }
            )
    with written_whole(path) as partial, partial.open("wb") as file:  # a path may look like an address to pyarrow
        pq.write_table(pa.Table.from_pylist(table), file, compression="zstd")


def _show(line: Row, console: Console) -> None:
    models = line["models"]
    labels = _labels(list(models))

    def grid(title: str, *first: str) -> Table:
        made = Table(title=Text(visible(title), style="table.title"), box=None, padding=(0, 1, 0, 0))
        for column in (*first, *labels.values()):
            made.add_column(Text(visible(column)), overflow="fold")
        return made

    def add(name: str, cells: Sequence[object]) -> None:
        if any(cell is not None for cell in cells):
            table.add_row(Text(visible(name)), *("-" if cell is None else Text(visible(str(cell))) for cell in cells))

    table = grid(f"{line['rows']} rows × {line['num_generations']}, mean [95% interval over rows]", "")
    add("reward", [_said(each["reward"]) for each in models.values()])
    for kind, number in (("rewards", ""), ("pass@k", "pass@"), ("pass^k", "pass^")):
        for name in dict.fromkeys(name for each in models.values() for name in each[kind]):
            if number + name != "pass^1":  # the same as pass@1
                shown = name.removesuffix("_func").removesuffix("_reward").replace("_", " ")
                add(number + shown, [_said(each[kind].get(name)) for each in models.values()])
    for name in ("turns", "tokens", "seconds"):
        add(name, [f"{each[name]:.2f}" for each in models.values()])
    add("failed calls", [f"{each['failed_calls']} of {each['calls']}" for each in models.values()])
    stops = [each["stop_reasons"] for each in models.values()]
    add("ended by", [", ".join(f"{name} {number}" for name, number in each.items()) for each in stops])
    add("failed", [each["failed"] or None for each in models.values()])
    usages = [each["usage"] for each in models.values()]
    add("endpoint", [each and say_usage(each) for each in usages])
    add("cost", [None if each["cost"] is None else f"{each['cost']:.4f}" for each in models.values()])
    console.print(table)
    plain: dict[str, Any] = {"highlight": False, "markup": False}
    for each in line["differences"]:
        right = "" if each["right"]["mean"] is None else f", right {_said(each['right'], '+')}"
        console.print(
            f"{labels[each['model']]} minus {labels[each['minus']]}: reward {_said(each['reward'], '+')}{right}; "
            f"better in {each['wins']} rows, worse in {each['losses']}, equal in {each['ties']}",
            **plain,
        )
    for column, values in line["by"].items():
        table = grid(f"reward by {column}", column, "rows")
        for value, cells in values.items():
            number = max(cell["reward"]["rows"] for cell in cells.values())
            add(value, [number, *(_said(cell["reward"]) for cell in cells.values())])
        console.print(table)
    for name, each in models.items():
        if each["failed"]:
            console.print(
                f"{labels[name]}: {each['failed']} conversations failed and are left out, the first with: "
                f"{visible(each['first_failure'])} The same command samples them again.",
                **plain,
            )


def _labels(names: list[str]) -> dict[str, str]:
    """The ends of names, as long as they need to be to tell the models apart."""
    named = {name: re.sub(r"^https?://([^/]+).*", r"\1", name.split("@http")[0]) for name in names}
    parts = {name: shown.rstrip("/").split("/") for name, shown in named.items()}
    for size in range(1, max(map(len, parts.values())) + 1):
        labels = {name: "/".join(each[-size:]) for name, each in parts.items()}
        if len(set(labels.values())) == len(names):
            return labels
    return {name: name for name in names}


def _said(estimate: Row | None, sign: str = "") -> str | None:
    """A mean and its interval."""
    if estimate is None or estimate["mean"] is None:
        return None
    if estimate["low"] is None:
        return f"{estimate['mean']:{sign}.3f}"
    return f"{estimate['mean']:{sign}.3f} [{estimate['low']:{sign}.2f}, {estimate['high']:{sign}.2f}]"
