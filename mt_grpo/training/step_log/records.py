"""The files of a run: conversations as they are sampled, credited and trained, `metrics.jsonl` and `audit.jsonl`."""

from __future__ import annotations

import logging
import math
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor
from trl import GRPOTrainer

from mt_grpo.credit import Audit, Credit, Uncredited, explain, rule_says, whole_rule
from mt_grpo.envs.source import tool_names
from mt_grpo.runlog import Batch, RunLogError, RunWriter, files
from mt_grpo.runlog.conversation import SpanSender
from mt_grpo.runlog.files import to_json
from mt_grpo.runlog.schema import VERSION, session_id, session_number
from mt_grpo.runlog.writer import end_with_a_line, finite, trim
from mt_grpo.training.checkpoint import set_aside
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.ranks import everywhere, several_hosts
from mt_grpo.training.rollout_batch import Columns, RolloutBatch
from mt_grpo.trajectory import Trajectory

Line = dict[str, Any]
Lines = list[Line]

_SECRET = ("token", "key", "secret", "password")  # ends of the names of options whose values are written nowhere

_PACKAGES = ("mt-grpo", "trl", "transformers", "accelerate", "torch", "datasets", "peft")

logger = logging.getLogger(__name__)


_STEP, _BATCH = 40, 24  # bits: a row of a batch of 16 million, of 65,536 batches of a step


@dataclass
class Step:
    """One batch of training or of an evaluation."""

    batch: RolloutBatch
    number: int  # optimiser steps that were taken before
    k: int  # tells batches of one step apart
    first: int  # number of this process's first row among those of all processes
    output: Columns = field(default_factory=dict)  # the columns that TRL trains on, most of them (B, T)
    audit: Line = field(default_factory=dict)  # of a training batch, see `as_record`
    lines: Lines = field(default_factory=list)  # of the index, for conversations of all processes

    @property
    def mode(self) -> str:
        return self.batch.mode

    @property
    def rows(self) -> Tensor:
        """Numbers of this process's rows among those of all processes, `(B,)`."""
        return torch.arange(self.first, self.first + len(self.batch.rows), device=self.batch.advantages.device)

    @property
    def row_ids(self) -> Tensor:
        """A number per row, `(B,)`, that says which conversation it is, wherever the row is trained."""
        return _number_rows(self.number, self.k, self.rows)

    @property
    def advantages(self) -> Tensor:
        """Of this process's rows, per turn, `(B, K)`."""
        return self.batch.advantages[self.rows]


@dataclass
class Update:
    """One optimiser step, counted from 0."""

    number: int = 0
    start: float = 0.0  # seconds since 1970
    seconds: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)  # seconds that were waited for each thing, see `Activity`
    outputs: list[Outputs] = field(default_factory=list)  # of its forwards, per micro-batch
    gradient_norm: float | None = None


@dataclass(frozen=True)
class Outputs:
    """What the forward of a micro-batch computed, on its device; `runlog.schema.UPDATES` says what each one is."""

    row_ids: Tensor  # (B,), see `_number_rows`
    trained: Tensor  # bool, where a token is trained
    difference: Tensor
    entropies: Tensor
    ratios: Tensor
    clipped: Tensor

    @classmethod
    def of(cls, inputs: Columns, logps: Tensor, entropies: Tensor, args: MTGRPOConfig) -> Outputs:
        """Of the micro-batch `inputs` whose loss TRL computes, and `(B, T)` log-probs and entropies of its forward."""
        logps = logps.detach()
        trained = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        log_ratios = logps - inputs.get("old_per_token_logps", logps)
        return cls(
            inputs["row_ids"],
            trained,
            (logps - inputs["sampling_per_token_logps"]).half(),
            entropies.detach().half(),
            log_ratios.exp().half(),
            _clip_flags(log_ratios, inputs["advantages"], trained, args),
        )


def _clip_flags(log_ratios: Tensor, advantages: Tensor, trained: Tensor, args: MTGRPOConfig) -> Tensor:
    """Where TRL's loss clips the ratio, so that the token has no gradient, or with `cispo` a bounded weight."""
    low, high = args.epsilon, args.epsilon if args.epsilon_high is None else args.epsilon_high
    if args.importance_sampling_level == "sequence":
        mean = (log_ratios * trained).sum(dim=1, keepdim=True) / trained.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratios = mean.expand_as(log_ratios)
    ratios = log_ratios.exp()
    if args.loss_type == "cispo":
        return (ratios > high) & (advantages > 0)
    if args.loss_type in ("sapo", "vespo"):  # they weigh ratios smoothly
        return torch.zeros_like(trained)
    most = math.inf if args.delta is None else args.delta
    down = (ratios < 1 - low) | (ratios > max(most, 1 + high))
    return torch.where(advantages > 0, ratios > min(most, 1 + high), down & (advantages < 0))


def _number_rows(step: int, k: int, rows: Tensor) -> Tensor:
    """One number for step, batch and row, `(B,)`."""
    return (step << _STEP) + (k << _BATCH) + rows


def _split_number(number: int) -> tuple[int, int, int]:
    """Step, batch and row of what `_number_rows` returns."""
    return number >> _STEP, (number >> _BATCH) % (1 << (_STEP - _BATCH)), number % (1 << _BATCH)


def _about(trainer: GRPOTrainer) -> Line:
    """What the index says of a run beside its version, start and rewards."""
    rule = trainer.credit_rule
    return {
        "group_size": trainer.num_generations,
        "group_size_eval": trainer.num_generations_eval,
        "processes": trainer.accelerator.num_processes,
        "estimator": rule,
        "rule": whole_rule(rule, **trainer.args.rule_options),
        "rule_says": rule_says(rule),
        "model": str(Path(trainer.model.config.name_or_path)),
        "tools": tool_names(trainer.env),
        "chat_template_kwargs": trainer.chat_template_kwargs,
        "options": trainer.args.given,
    }


class Records:
    """Writes the files of `mt_grpo.runlog`: each process its own, the main one also index, metrics and audits."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        args = self._args = trainer.args
        weights = trainer.reward_weights.tolist()
        kinds = [*(("turn", reward) for reward in trainer.turn_reward_funcs)]
        kinds += [("outcome", reward) for reward in trainer.outcome_reward_funcs]
        self.rewards = [
            {"name": reward.name, "kind": kind, "weight": round(weight, 6), "maximum": reward.maximum}
            for (kind, reward), weight in zip(kinds, weights, strict=True)
        ]
        about = self.about = _about(trainer)
        self.save_tokenizer = trainer._tokenizer.save_pretrained
        self.writer = RunWriter(args.output_dir, args.process_index)
        self._spans = SpanSender.wanted(about["model"])
        self._main = args.process_index == 0
        self._described = False
        self.resumes = False  # whether the run goes on from a checkpoint in its folder
        self.audits: Lines = []  # of the batches since the latest line of `audit.jsonl`

    # Conversations, and their credit

    def take(self, step: Step) -> Lines:
        """Writes conversations, then advantages. Returns the conversations' lines, of all processes. Collective."""
        batch = self._batch(step)
        lines = self._commit(lambda: self._write(step, batch))
        advantages = [
            values[: len(trajectory.turns)]
            for trajectory, values in zip(step.batch.trajectories, step.advantages.tolist(), strict=True)
            if trajectory.stop_reason is not None
        ]
        rule = self._args.credit_rule(any(reward["kind"] == "turn" for reward in self.rewards))
        credit = explain(step.batch.credit, rule, step.batch.rewards, **self._args.rule_options)
        parts = part_rows(credit, step.batch.trajectories, step.rows)
        self._commit(lambda: self.writer.write_credit(batch, advantages, parts))
        if self._spans is not None:
            self._spans.send(batch, self._args.process_index, advantages)
        return [line for line in lines if line["kind"] == "rollout" and line["mode"] == step.mode]

    def rescue(self, step: Step) -> None:
        """Writes those conversations of a batch that are finished, after this process failed or another did."""
        lines = [*self._describe(), *self._write(step, self._batch(step))]
        if lines:
            self.writer.append(lines, self._args.process_index)

    def _batch(self, step: Step) -> Batch:
        ran = list(step.batch.counted)
        return Batch(step.mode, step.number, step.k, step.batch.group_size, _numbers(ran), ran, self.rewards)

    def _write(self, step: Step, batch: Batch) -> Lines:
        """Writes the conversations, and those whose place they took. Returns their lines."""
        apart = self._args.gradient_accumulation_steps
        discarded = [
            replace(batch, mode="discarded", k=batch.k + apart * attempt, numbers=_numbers(them), trajectories=them)
            for attempt, them in enumerate(step.batch.discarded)
        ]
        return [line for each in (*discarded, batch) for line in self.writer.write(each)]

    def _commit(self, write: Callable[[], Lines]) -> Lines:
        """Every process writes files, then the main process their lines. Returns the lines of all."""
        lines = gather_object(everywhere(write))

        def append() -> None:
            if self._main and lines:
                self.writer.append([*self._describe(), *lines])

        everywhere(append)
        return lines

    def _describe(self) -> Lines:
        """Saves the tokenizer and describes the run, once."""
        if self._described or not self._main:
            return []
        self._described = True
        saved = self.writer.save_tokenizer(self.save_tokenizer)
        return [*saved, run_line(self.about, self.rewards)]

    # Optimiser steps and logs

    def begin(self, number: int = 0) -> None:
        """Training begins; a run that goes on after `number` steps loses the records of later ones. Collective."""
        self.audits = []
        if not self.resumes:
            return
        folder = Path(self._args.output_dir)
        last = everywhere(lambda: trim(folder, number) if self._main else number)
        if several_hosts(self._args):  # each has those of its processes; a shared folder is trimmed already
            everywhere(lambda: trim(folder, number) if self._args.local_process_index == 0 else number)
        here = self._args.local_process_index == 0  # each host has those of its processes
        left = everywhere(lambda: set_aside(folder, number) if here else [])
        if self._main and left:
            logger.warning(
                "The run goes on from step %d, and the records of steps up to %d were removed, since they are taken "
                "again. Checkpoints of such steps are kept under other names (%s).",
                number,
                last,
                ", ".join(left),
            )

    def update(self, update: Update) -> None:
        """Writes what an optimiser step computed and how long it took. Collective."""
        rows, summaries = _update_rows(update.outputs)

        def write() -> Lines:
            lines = self.writer.write_updates(update.number, rows, summaries)
            return [*lines, *([_step_line(update)] if self._main else [])]

        self._commit(write)

    def log(self, logs: Line, number: int) -> None:
        """Writes what is logged after `number` optimiser steps."""
        if self._main:
            self._append("metrics.jsonl", {"step": number, **logs})
        if "loss" in logs:  # else they are of an evaluation, or of the whole run
            self.write_audit(number)

    def end(self) -> None:
        """Training ends."""
        if self._spans is not None:
            self._spans.flush()

    def write_audit(self, number: int) -> None:
        """Writes the mean audit of the batches since the last one."""
        audits, self.audits = self.audits, []
        if audits and self._main:
            self._append("audit.jsonl", {"step": number, **mean_record(audits)})

    def _append(self, name: str, record: Line) -> None:
        path = Path(self._args.output_dir, name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            end_with_a_line(path)
            with path.open("a", encoding="utf-8") as file:
                file.write(to_json(record) + "\n")
        except OSError as error:
            raise RunLogError(
                f"{path} cannot be written ({error.strerror or error}): free space or mend the folder, or choose "
                "another `output_dir`."
            ) from error


def run_line(about: Line, rewards: Lines) -> Line:
    """The index's line of kind `run`."""
    return {
        "kind": "run",
        "version": VERSION,
        "started": round(time.time(), 3),
        "command": _command(),
        "versions": versions(),
        **about,
        "rewards": rewards,
    }


def _command() -> str:
    """What was called, with stars for what is secret."""
    words = list(sys.argv)
    for place, word in enumerate(words):
        name, equals, _ = word.partition("=")
        if name.startswith("--") and name.endswith(_SECRET):
            if equals:
                words[place] = f"{name}=***"
            elif place + 1 < len(words):
                words[place + 1] = "***"
    return shlex.join(words)


def versions() -> dict[str, str]:
    """Versions of the packages that the numbers depend on."""
    return {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}


def _numbers(trajectories: list[Trajectory]) -> list[int]:
    """Rows of conversations in the batch of all processes."""
    return [session_number(trajectory.session) for trajectory in trajectories]


def part_rows(credit: Credit, trajectories: Sequence[Trajectory], rows: Tensor | slice = slice(None)) -> list[Lines]:
    """The parts of the advantages of each conversation that was run, as `write_credit` takes them."""
    columns = [
        (name, part[rows].tolist(), credit.scales[name][rows].tolist() if name in credit.scales else None)
        for name, part in credit.parts.items()
    ]
    parts = []
    for row, trajectory in enumerate(trajectories):
        if trajectory.stop_reason is None:
            continue
        turns = len(trajectory.turns)
        parts.append(
            [
                {
                    "name": name,
                    "values": values[row][:turns],
                    "scales": None
                    if scales is None
                    else [None if math.isnan(each) else each for each in scales[row][:turns]],
                }
                for name, values, scales in columns
            ]
        )
    return parts


def _step_line(update: Update) -> Line:
    waits = update.waits
    kinds = {"sampling": "sampling", "rewards": "rewards", "sync": "weight sync"}
    parts = {name: waits.get(kind, 0.0) for name, kind in kinds.items()}
    parts["training"] = update.seconds - sum(parts.values())
    rounded = {name: round(seconds, 4) for name, seconds in {"seconds": update.seconds, **parts}.items()}
    return {"kind": "step", "step": update.number, "start": round(update.start, 3), **rounded}


def _update_rows(outputs: list[Outputs]) -> tuple[Lines, Lines]:
    """The rows that a step trained."""
    rows, summaries = [], []
    for output in outputs:
        row_ids, trained, *values = (tensor.cpu().numpy() for tensor in vars(output).values())
        for number, of_row, *row_values in zip(row_ids.tolist(), trained, *values, strict=True):
            columns = np.flatnonzero(of_row)
            if not len(columns):  # left out of the loss
                continue
            step, k, row = _split_number(number)
            difference, entropies, ratios, clipped = (value[columns] for value in row_values)
            rows.append(
                {
                    "session": session_id("train", step, k, row),
                    "mode": "train",
                    "step": step,
                    "k": k,
                    "columns": columns.astype(np.int32),
                    "difference": difference,
                    "entropies": entropies,
                    "ratios": ratios,
                    "clipped": clipped.astype(np.int8),
                }
            )
            compared = difference[~np.isnan(difference)]  # the environment's tokens have no log-prob of the engine
            summaries.append(
                {
                    "mismatch": finite(float(np.abs(compared).max(initial=0.0))),
                    "entropy": finite(float(entropies.mean(dtype=np.float64))),
                    "clipped": finite(float(clipped.mean())),
                }
            )
    return rows, summaries


# Audits


def as_record(audit: Audit, uncredited: Uncredited, names: Sequence[str], causal: Mapping[str, bool]) -> Line:
    """An audit as JSON has it, with its rewards by name, and the turn rewards that do not reach their turns."""
    rewards = {
        name: {**asdict(reward), "causal": causal.get(name)} for name, reward in zip(names, audit.rewards, strict=True)
    }
    shares = {f"uncredited_{name}": share for name, share in asdict(uncredited).items()}
    return {**asdict(audit), **shares, "rewards": rewards}


def mean_record(records: Sequence[Line]) -> Line:
    """The mean of each number over records that have it, for the last one's rewards; groups are summed."""
    mean: Line = {}
    for name, last in records[-1].items():
        values = [record[name] for record in records if record.get(name) is not None]
        if isinstance(last, dict):
            mean[name] = mean_record(values)
        elif name == "groups":
            mean[name] = sum(values)
        elif name == "causal":
            mean[name] = all(values) if values else None
        else:
            mean[name] = sum(values) / len(values) if values else None
    return mean


def read_audits(folder: str | Path) -> Lines:
    """The lines of a run's `audit.jsonl`, without those that are no audits: a killed run may have left half of one."""
    lines = (files.read(Path(folder), "audit.jsonl") or b"").splitlines()
    return [audit for audit, wrong in (files.parse(line, "audit") for line in lines) if wrong is None]


def read_audit(folder: str | Path) -> Line | None:
    """The mean audit of a run, of steps as taken last; `None` without one."""
    by_step = {audit.pop("step"): audit for audit in read_audits(folder)}
    return mean_record(list(by_step.values())) if by_step else None
