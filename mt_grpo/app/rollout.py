"""What `mt-grpo rollout` says of conversations and their rewards, and the folder that `--save` leaves, as a run's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mt_grpo.credit import audit_rewards, estimate, estimate_parts, uncredited_turn_rewards
from mt_grpo.envs.source import tool_names
from mt_grpo.runlog import Batch, RunWriter
from mt_grpo.runlog.files import to_json
from mt_grpo.runlog.findings import Counts, Finding, find
from mt_grpo.runlog.writer import rollout_lines
from mt_grpo.training.reward_batch import gather_rewards
from mt_grpo.training.step_log.metrics import says_uncredited
from mt_grpo.training.step_log.records import as_record, part_rows, run_line
from mt_grpo.training.trainer import MTGRPOEnvTrainer
from mt_grpo.trajectory import visible


def save_conversations(trainer: MTGRPOEnvTrainer, resolved: dict[str, Any], folder: str) -> str:
    """Writes the conversations that a trainer ran and scored last, their credit, `config.yaml` and `audit.jsonl`."""
    args, judged, records = trainer.args, trainer.batch, trainer.step_log.records
    size = judged.group_size
    batch = Batch("eval", 0, 0, size, list(range(len(judged.trajectories))), judged.trajectories, records.rewards)
    weights = trainer.reward_weights.to(args.device)
    rewards, _ = gather_rewards(judged.trajectories, judged.scores, weights, size, names=trainer.reward_func_names)
    credit = estimate_parts(
        trainer.credit_rule, rewards, turn_coef=args.turn_advantage_coef, scale_rewards=trainer.scale_rewards
    )
    writer = RunWriter(folder)
    about = {**records.about, "group_size": size, "group_size_eval": size}
    lines = [*writer.save_tokenizer(records.save_tokenizer), run_line(about, records.rewards), *writer.write(batch)]
    pairs = zip(judged.trajectories, credit.advantages.tolist(), strict=True)
    advantages = [values[: len(each.turns)] for each, values in pairs]
    writer.append([*lines, *writer.write_credit(batch, advantages, part_rows(credit, judged.trajectories))])
    config = yaml.safe_dump(resolved, sort_keys=True)
    Path(folder, "config.yaml").write_text(config, encoding="utf-8")
    audit = audit_conversations(trainer)
    line = {name: value for name, value in audit.items() if name not in ("conversations", "failed", "advice")}
    Path(folder, "audit.jsonl").write_text(to_json({"step": 0, **line}) + "\n", encoding="utf-8")
    return f"{len(judged.trajectories)} conversations in {folder}"


def audit_conversations(trainer: MTGRPOEnvTrainer) -> dict[str, Any]:
    """Audits the rewards of the conversations that a trainer ran and scored last."""
    args, judged = trainer.args, trainer.batch
    weights = trainer.reward_weights.to(args.device)
    batch, _ = gather_rewards(judged.trajectories, judged.scores, weights, judged.group_size)
    rule, options = trainer.credit_rule, {"turn_coef": args.turn_advantage_coef}
    options["scale_rewards"] = trainer.scale_rewards
    audit = audit_rewards(batch, estimate(rule, batch, **options))
    uncredited = uncredited_turn_rewards(rule, batch, **options)
    names = [reward["name"] for reward in trainer.step_log.records.rewards]
    record = as_record(audit, uncredited, names, trainer.step_log.warnings.causal)
    count, failed = len(judged.trajectories), sum(each.failed for each in judged.trajectories)
    return {**record, "conversations": count, "failed": failed, "advice": says_uncredited(record, rule, args)}


def find_in_conversations(trainer: MTGRPOEnvTrainer) -> list[Finding]:
    """What stands out in the conversations that a trainer ran and scored last."""
    judged = trainer.batch
    numbers, rewards = list(range(len(judged.trajectories))), trainer.step_log.records.rewards
    batch = Batch("eval", 0, 0, judged.group_size, numbers, judged.trajectories, rewards)
    return find(Counts().add(rollout_lines(batch, 0)), {"tools": tool_names(trainer.env)})


def show_audit(record: dict[str, Any], console: Console) -> None:
    """Prints the table, and below it what stands out."""
    groups = record["groups"]
    title = f"audit: {groups} prompts × {record['conversations'] // groups} conversations"
    table = Table(title=Text(title, style="table.title"), box=None, padding=(0, 1, 0, 0))
    table.add_column("reward", overflow="fold")
    for column in (
        "applies",
        "mean",
        "var. in\ngroups",
        "equal\ngroups",
        "follows\noutcome",
        "signs\nagree",
        "causal",
    ):
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
    console.print(table)
    for line in findings(record):
        console.print(f"- {line}", highlight=False, markup=False)


def findings(record: dict[str, Any]) -> list[str]:
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


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)
