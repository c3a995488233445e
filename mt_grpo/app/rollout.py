"""
What `mt-grpo rollout` says of conversations and their rewards, the folder that `--save` leaves, as a run's, and the
data for other trainings that it makes of a model's conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mt_grpo.app.build import build_recipe
from mt_grpo.app.evaluate import Asked, Results, SampledModel, read_prices, sample, say_usage
from mt_grpo.app.recipe_file import CONFIG
from mt_grpo.app.request import Request, check_new, check_writable
from mt_grpo.credit import RewardBatch, audit_rewards, estimate, estimate_parts, uncredited_turn_rewards
from mt_grpo.envs.source import tool_names
from mt_grpo.errors import ConfigError, UserError
from mt_grpo.rollout.policy import Again
from mt_grpo.runlog import Batch, Run, RunWriter, open_run
from mt_grpo.runlog.export import LINES, left_out
from mt_grpo.runlog.files import to_json, written_whole
from mt_grpo.runlog.findings import FAILED, Counts, find
from mt_grpo.runlog.index import Table as Conversations
from mt_grpo.runlog.schema import FOLDER, INDEX, Row, session_number
from mt_grpo.runlog.writer import question_of, rollout_lines
from mt_grpo.training.reward_batch import gather_rewards
from mt_grpo.training.step_log.records import as_record, part_rows, run_line
from mt_grpo.training.step_log.warnings import says_uncredited
from mt_grpo.training.trainer import MTGRPOEnvTrainer
from mt_grpo.trajectory import Trajectory, visible
from mt_grpo.viewer import render_trajectory
from mt_grpo.viewer.columns import REWARD, Columns, FilterError, parse_filter
from mt_grpo.viewer.queries import BadQuestion, selected

_FORMS = {"sft": "tokens", "messages": "messages", "dpo": "preferences"}
"""Folders of data, each with a file of a form, which TRL's commands take as a dataset."""


_SHOWN_PROMPTS = 4  # prompts that are answered without another number


def show(
    trainer: MTGRPOEnvTrainer,
    resolved: dict[str, Any],
    own: dict[str, Any],
    console: Console,
    recorded: Trajectory | None = None,
) -> int:
    """Runs and shows conversations, with `--audit` what rewards tell apart, and saves them; 1 where all failed."""
    audits, folder = own["audit"], own["save"]
    again = None if recorded is None else Again(_row_of(recorded, trainer), recorded, own["turn"] - 1)
    shown_alone = folder is None and not audits and again is None
    generations = 1 if shown_alone else own["num_generations"] or trainer.num_generations
    trajectories = trainer.rollout(own["num_prompts"] or _SHOWN_PROMPTS, generations, again)
    if again is not None:
        for trajectory in trajectories:
            trajectory.info |= {name: own[name] for name in ("again", "conversation", "turn")}
    shown = generations if again is None else 1  # of a group, its first member stands for all
    for number, trajectory in enumerate(trajectories[::shown]):
        console.rule(f"conversation {number + 1}")
        console.print(render_trajectory(trajectory, trainer.processing_class, console.is_terminal))
    facts = {"tools": tool_names(trainer.env)}
    for finding in find(Counts().add(rollout_lines(_batch(trainer), 0)), facts):
        console.print(finding.sentence, highlight=False, markup=False)
    if audits:
        _show_audit(_audit(trainer), console)
    if folder is not None:
        _save(trainer, {**resolved, "num_generations": generations}, folder)
        console.print(f"{len(trajectories)} conversations in {folder}", highlight=False, markup=False)
    return int(all(trajectory.failed for trajectory in trajectories))


def read_recorded(folder: str, session: str, turn: int) -> Trajectory:
    """A conversation of a run that has such a turn, from 1."""
    run = open_run(folder)
    (record,) = run.trajectories([run.row(session)])
    recorded = Trajectory.from_dict(record)
    if turn > len(recorded.turns):
        raise ConfigError(f"The conversation {session} has {len(recorded.turns)} turns: give one of them as `--turn`.")
    return recorded


def _row_of(recorded: Trajectory, trainer: MTGRPOEnvTrainer) -> Row:
    """The row of a recipe that a recorded conversation answers."""
    datasets = trainer.train_dataset, trainer.eval_dataset
    whole = [each for one in datasets for each in (one.values() if isinstance(one, dict) else [one]) if each]
    of_row = to_json(recorded.row)
    found = [
        row
        for rows in whole
        for row in rows
        if to_json({name: value for name, value in row.items() if name != "prompt"}) == of_row
    ]
    asked = question_of(recorded)
    found = [row for row in found if question_of(Trajectory(row["prompt"])) == asked] or found
    if not found or any(row["prompt"] != found[0]["prompt"] for row in found):
        raise ConfigError(
            f"The recipe has {'several rows' if found else 'no row'} with the columns of the conversation "
            f"{recorded.session}, which was asked {asked!r}: give the dataset that it was sampled from."
        )
    return found[0]


def _batch(trainer: MTGRPOEnvTrainer) -> Batch:
    """The conversations that a trainer ran and scored last."""
    judged, rewards = trainer.batch, trainer.step_log.records.rewards
    return Batch("eval", 0, 0, judged.group_size, list(range(len(judged.trajectories))), judged.trajectories, rewards)


def _save(trainer: MTGRPOEnvTrainer, resolved: dict[str, Any], folder: str) -> None:
    """Writes these conversations, their credit, `config.yaml` and `audit.jsonl`."""
    judged, records, batch = trainer.batch, trainer.step_log.records, _batch(trainer)
    rewards, options = _rewards(trainer)
    credit = estimate_parts(trainer.credit_rule, rewards, **options)
    writer = RunWriter(folder)
    about = {**records.about, "group_size": judged.group_size, "group_size_eval": judged.group_size}
    lines = [*writer.save_tokenizer(records.save_tokenizer), run_line(about, records.rewards), *writer.write(batch)]
    pairs = zip(judged.trajectories, credit.advantages.tolist(), strict=True)
    advantages = [values[: len(each.turns)] for each, values in pairs]
    writer.append([*lines, *writer.write_credit(batch, advantages, part_rows(credit, judged.trajectories))])
    Path(folder, CONFIG).write_text(yaml.safe_dump(resolved, sort_keys=True), encoding="utf-8")
    audit = {name: each for name, each in _audit(trainer).items() if name not in ("conversations", "failed", "advice")}
    Path(folder, "audit.jsonl").write_text(to_json({"step": 0, **audit}) + "\n", encoding="utf-8")


def _rewards(trainer: MTGRPOEnvTrainer) -> tuple[RewardBatch, dict[str, Any]]:
    """The rewards of the latest conversations, and the options of their credit rule."""
    judged, weights = trainer.batch, trainer.reward_weights.to(trainer.args.device)
    names = trainer.reward_func_names
    rewards, _ = gather_rewards(judged.trajectories, judged.scores, weights, judged.group_size, names=names)
    return rewards, {"turn_coef": trainer.args.turn_advantage_coef, "scale_rewards": trainer.scale_rewards}


def _audit(trainer: MTGRPOEnvTrainer) -> dict[str, Any]:
    """What the rewards of these conversations tell apart."""
    rule, conversations = trainer.credit_rule, trainer.batch.trajectories
    batch, options = _rewards(trainer)
    audit = audit_rewards(batch, estimate(rule, batch, **options))
    names = [reward["name"] for reward in trainer.step_log.records.rewards]
    uncredited = uncredited_turn_rewards(rule, batch, **options)
    record = as_record(audit, uncredited, names, trainer.step_log.warnings.causal)
    count, failed = len(conversations), sum(each.failed for each in conversations)
    return {**record, "conversations": count, "failed": failed, "advice": says_uncredited(record, rule, trainer.args)}


_WIDTH = 80  # least columns of the table: a narrower terminal breaks its lines, where rich would cut names and numbers


def _show_audit(record: dict[str, Any], console: Console) -> None:
    """Prints the table, and below it what stands out."""
    groups = record["groups"]
    title = f"audit: {groups} prompts × {record['conversations'] // groups} conversations"
    table = Table(title=Text(title, style="table.title"), box=None, padding=(0, 1, 0, 0))
    table.add_column("reward", overflow="fold")
    columns = ("applies", "mean", "var. in\ngroups", "equal\ngroups", "follows\noutcome", "signs\nagree", "causal")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name, each in record["rewards"].items():
        table.add_row(
            Text(visible(name)),
            _share(each["applies"]),
            _number(each["mean"]),
            _number(each["group_variance"]),
            _share(each["equal_groups"]),
            _number(each["group_correlation"], "+.2f"),
            _share(each["sign_agreement"]),
            {None: "-", True: "yes", False: "no"}[each["causal"]],
        )
    console.width = max(console.width, _WIDTH)
    console.print(table)
    for line in _findings(record):
        console.print(f"- {line}", highlight=False, markup=False)


def _findings(record: dict[str, Any]) -> list[str]:
    """What of an audit stands out, in sentences."""
    silent = round(record["groups_without_signal"] * record["groups"])
    lines = [f"{silent} of {record['groups']} groups have no signal: their advantages are 0 at every turn."]
    if record["failed"]:
        lines.append(f"{record['failed']} of {record['conversations']} conversations failed, and are left out.")
    if record["sign_agreement"] is not None:
        lines.append(
            f"Turn and outcome advantages point the same way at {_share(record['sign_agreement'])} of the turns that "
            "have both."
        )
    for name, each in record["rewards"].items():
        reward = f"The reward {visible(name)!r}"
        if each["applies"] == 0:
            lines.append(f"{reward} never applied: it returned `None` for every conversation.")
        elif each["equal_groups"] == 1:
            lines.append(f"{reward} teaches nothing here: all members of each group earn the same.")
        if each["causal"] is False:
            lines.append(f"{reward} depends on later turns, which biases rules that credit single turns.")
    return [*lines, *([record["advice"]] if record["advice"] else [])]


# Data for other trainings


def make_data(request: Request) -> int:
    """Has a model answer the training rows, and writes what passes for TRL, and how often; 1 if there is nothing."""
    own, console, keep = request.own, Console(soft_wrap=True), request.own["keep"]
    if own["audit"]:
        raise ConfigError("`--audit` is for a few conversations that make no data: leave it out.")
    if keep is not None:
        _check_keep(keep, parse_filter)
    prices = read_prices(own["prices"])
    folder = Path(own["save"] or Path("rollouts", Path(request.path or "data").stem))
    # what is there is overwritten, so it has to be what an earlier such command left
    (check_writable if (folder / FOLDER / INDEX).is_file() else check_new)(str(folder))
    if own["difficulty"] and request.values.get("dataset_name") is None:
        raise ConfigError(
            "`--difficulty` is for `dataset_filter`, which chooses rows of a dataset: set `dataset_name`, or leave it "
            "out."
        )
    if own["difficulty"]:  # of all rows
        request.recipe.pop("dataset_filter", None)
    generations = own["num_generations"] or build_recipe(request).training.num_generations
    name = own["model"] or request.values["model_name_or_path"]
    model = SampledModel(name, folder, own["api_key_env"], trained_on=True)
    datasets.disable_progress_bars()

    def check(rewards: list[Row]) -> None:
        if keep is not None:
            _check_keep(keep, _Expected(rewards).find)
        elif own["difficulty"] and not any(reward["kind"] == "outcome" for reward in rewards):
            raise ConfigError(
                "`--difficulty` takes the first outcome reward, and there is none: say what `--keep` is."
            )

    asked = sample(model, request, None, generations, console, check)
    results = Results(model, generations, len(asked.rows), prices)
    run = open_run(folder)
    counted = {row["session"] for row in results.counted}
    try:
        passed = counted if keep is None else counted.intersection(row["session"] for row in selected(run, keep))
    except BadQuestion:  # nothing passes
        passed = set()
    _say_sampled(results, len(asked.rows), len(passed), keep, console)
    if own["model"] or keep is not None:
        for place, form in _FORMS.items():
            _write_form(folder / place / "train.jsonl", run, form, results.counted, passed, console)
    if own["difficulty"]:
        unjudged = set() if keep is None else _unjudged(run, keep)
        right = {row["session"]: row["right"] if keep is None else row["session"] in passed for row in results.counted}
        right |= dict.fromkeys(unjudged & right.keys())
        _write_difficulty(folder / "difficulty.jsonl", right, asked, generations, console)
    return int(not (counted if own["difficulty"] else passed))


class _Expected(Columns):
    """The columns of a run that has no conversation so far."""

    def __init__(self, rewards: Sequence[Row]) -> None:
        super().__init__(Conversations())
        self._names = [reward["name"] for reward in rewards]

    @property
    def rewards(self) -> list[str]:
        """Names of the rewards."""
        return self._names

    def find(self, text: str) -> object:
        """Raises `FilterError` where a filter cannot be used."""
        return self.where(parse_filter(text))


def _check_keep(keep: str, find: Callable[[str], object]) -> None:
    try:
        find(keep)
        words = [each.value for each in parse_filter(keep) if not each.sign]
    except FilterError as error:
        raise ConfigError(f"`--keep` is {keep!r}: {str(error)[0].lower()}{str(error)[1:]}") from None
    if words or not keep.strip():
        raise ConfigError(f"`--keep` is {keep!r}, which compares nothing: write a condition, as `exact_match>=1`.")


def _unjudged(run: Run, keep: str) -> set[str]:
    """The conversations of which a reward that `--keep` names says nothing."""
    columns = Columns(run.rows)
    names = (columns.resolve(condition.name) for condition in parse_filter(keep))
    return {
        run.rows.sessions[place]
        for name in names
        if name.startswith(REWARD)
        for place in np.flatnonzero(np.isnan(columns.numbers(name)))
    }


def _say_sampled(results: Results, rows: int, passed: int, keep: str | None, console: Console) -> None:
    failed = f", {results.failed} failed" if results.failed else ""
    passes = "" if keep is None else f", {passed} pass {keep}"
    lines = [f"{len(results.lines)} conversations of {rows} rows{passes}{failed}"]
    if results.usage:
        says, cost = say_usage(results.usage), results.cost(results.usage)
        lines.append(says if cost is None else f"{says}, cost {cost:.4f}")
    if keep is not None and not passed and results.counted:
        earned = {name: grid[~np.isnan(grid)] for name, grid in results.rewards.items()}
        ranges = [f"{name} {each.min():g} to {each.max():g}" for name, each in earned.items() if each.size]
        lines.append(f"The rewards were: {', '.join(ranges)}.")
    if results.failed:
        first = next(row["error"] for row in results.lines if row["stop"] in FAILED)
        lines.append(f"The first failed with: {visible(first)} The same command samples what failed again.")
    for line in lines:
        console.print(line, highlight=False, markup=False)


def _write_form(path: Path, run: Run, form: str, rows: list[Row], passed: set[str], console: Console) -> None:
    """The conversations that pass, or the pairs whose better one does, as lines; no file where there are none."""
    pairs, sessions = form == "preferences", set()
    rows = rows if pairs else [row for row in rows if row["session"] in passed]

    def kept() -> Iterator[Row]:
        for line in LINES[form](run, rows):
            session = line["chosen_session" if pairs else "session"]
            if session in passed:
                sessions.add(session)
                yield line

    try:
        number = _write(path, kept())
    except UserError as error:  # of some conversations there are no pairs, or no ids
        path.unlink(missing_ok=True)
        console.print(f"No {path}: {error}", highlight=False, markup=False)
        return
    what = "pairs" if pairs else "sequences" if form == "tokens" else "conversations"
    without = "of no pair the better one passes" if pairs else "nothing passes"
    left = left_out(rows, sessions) if form == "tokens" else ""
    says = f"{path}: {number} {what}{left}" if number else f"No {path}: {without}."
    console.print(says, highlight=False, markup=False)


def _write(path: Path, lines: Iterable[Row]) -> int:
    """Writes lines of JSON, and returns how many; removes the file where there are none."""
    path.parent.mkdir(exist_ok=True)
    number = 0
    with written_whole(path) as partial:
        # half a character, which an environment may write, as the escape that JSON has for it
        with partial.open("w", encoding="utf-8", errors="backslashreplace") as file:
            for line in lines:
                file.write(to_json(line) + "\n")
                number += 1
    if not number:
        path.unlink()
    return number


def _write_difficulty(
    path: Path, right: dict[str, bool | None], asked: Asked, generations: int, console: Console
) -> None:
    """For each row how often it was passed; `right` is by session, `None` where no reward tells."""
    rows = asked.rows
    attempts: list[list[bool]] = [[] for _ in rows]
    for session, passes in right.items():
        if passes is not None:
            attempts[session_number(session) // generations].append(passes)
    rates = [sum(of_row) / len(of_row) if of_row else None for of_row in attempts]
    _write(
        path,
        (
            {"row": place, "rate": rate, "attempts": len(attempts[place]), "digest": digest, "prompt": said}
            for place, (rate, row, digest) in enumerate(zip(rates, rows, asked.digests, strict=True))
            for said in [question_of(Trajectory(row.get("prompt") or ""))]
        ),
    )
    says = f"{path}: {len(rows)} rows, {rates.count(0.0)} never passed, {rates.count(1.0)} always"
    console.print(says, highlight=False, markup=False)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)
