"""
The files of a run: conversations as they are sampled, credited and trained, `metrics.jsonl`, `audit.jsonl`, and the
card of the model.
"""

from __future__ import annotations

import logging
import platform
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from accelerate.utils import gather_object
from huggingface_hub import ModelCard, ModelCardData
from torch import Tensor
from trl import GRPOTrainer

from mt_grpo.credit import Audit, Credit, Uncredited, explain, rule_label, rule_says, whole_rule
from mt_grpo.envs.source import tool_names
from mt_grpo.imports import FORMATS, looks_like_path
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
    clipped = (ratios < 1 - low) & (advantages < 0)
    clipped |= (ratios > 1 + high) & (advantages > 0)
    if args.delta is not None:
        clipped |= (ratios > args.delta) & (advantages < 0)
    return clipped


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
                    else [None if isnan(each) else each for each in scales[row][:turns]],
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


# The card of a trained model: what it was made of, where it acts, what it was rewarded for, how it was measured


_About = Mapping[str, Any]

_PAPER = textwrap.dedent("""\
    @article{zeng2025reinforcing,
        title   = {{Reinforcing Multi-Turn Reasoning in LLM Agents via Turn-Level Credit Assignment}},
        author  = {Siliang Zeng and Quan Wei and William Brown and Oana Frunza and Yuriy Nevmyvaka and Mingyi Hong},
        year    = 2025,
        eprint  = {arXiv:2505.11821v1},
    }""")
"""Where MT-GRPO comes from; the second version of the paper has another title and is about other methods."""

_PROTOCOLS = {
    "native": "tool calls in the format of its chat template",
    "tags": "tags in its text (`<tool>`, `<result>`, `<answer>`), which its system prompt explains",
    "learnt_tags": "tags in its text (`<tool>`, `<result>`, `<answer>`), which it has learnt",
    "plain": "text without tools",
}
_TOLD = ("learning_rate", "num_generations", "temperature", "loss_type", "beta", "load_in_4bit", "seed")
"""Options that a reader of the card asks for."""


def write_card(
    to: Path,
    name: str,
    about: _About,
    rewards: Sequence[_About],
    evaluations: Sequence[_About],
    *,
    step: int,
    options: _About | None = None,
    adapter: bool = False,
    tags: Iterable[str] = (),
) -> None:
    """Writes a model's `README.md`, from the run's index, held-out metrics after `step` steps and options."""
    options = {**(about.get("options") or {}), **(options or {})}
    base = str(options.get("model_name_or_path") or about.get("model", ""))
    data = str(options.get("dataset_name") or "")
    of_hub = "/" in base and not looks_like_path(base) and not Path(base).exists()
    shared = "/" in data and not looks_like_path(data) and ":" not in data and Path(data).suffix not in FORMATS
    meta = ModelCardData(
        base_model=base if of_hub else None,
        datasets=data if shared and not Path(data).exists() else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        model_name=name,
        tags=sorted({"mt-grpo", "grpo", "trl", "agent", *tags}),
    )
    named = f"`{Path(base).name}`" if base else "a model that the run does not name"
    link = f"[{base}](https://huggingface.co/{base})" if of_hub else named
    versions = ", ".join(f"{package} {version}" for package, version in (about.get("versions") or {}).items())
    parts = [
        f"# {name}",
        f"{'An adapter of' if adapter else 'Trained from'} {link}: an agent of several turns, trained for {step} "
        "optimiser steps with GRPO that credits each turn, as MT-GRPO does, by mt-grpo and "
        f"[TRL](https://github.com/huggingface/trl){f', on {_code(data)}' if data else ''}.",
        "## Environment",
        *_environment(about, options),
        "## Rewards",
        _table(
            ("reward", "of each", "weight", "at most"),
            [
                (f"`{each['name']}`", _OF[each["kind"]], f"{each['weight']:g}", _number(each.get("maximum")))
                for each in rewards
            ],
        ),
        f"Credit of a turn: `{rule_label(about['rule'])}`. {about.get('rule_says', '')}" if "rule" in about else "",
        "## Evaluation",
        *_evaluation(rewards, evaluations, step, options),
        "## Use",
        "It acts in its environment: `mt-grpo chat FOLDER` is that environment with you as the user, and `mt-grpo "
        "serve FOLDER` an OpenAI-compatible endpoint, FOLDER being a copy of these files with `config.yaml`.",
        "## Training",
        "\n".join(f"- `{option}`: {options[option]}" for option in _TOLD if options.get(option) not in (None, False)),
        *([f"Versions: {versions}."] if versions else []),
        "## Citation",
        f"```bibtex\n{_PAPER}\n```",
    ]
    card = ModelCard(f"---\n{meta.to_yaml()}\n---\n\n" + "\n\n".join(filter(None, parts)) + "\n")
    card.save(to / "README.md")


_OF = {"turn": "turn", "outcome": "conversation"}


def _environment(about: _About, options: _About) -> list[str]:
    tools = ", ".join(f"`{tool}`" for tool in about.get("tools", ())) or "none"
    lines = [f"- Tools: {tools}"] if "tools" in about else []
    env = options.get("env") or options.get("environment_factory") or options.get("agent")
    if env or options.get("environments"):
        lines.append(f"- Environment: {_code(env or ', '.join(map(str, options['environments'])))}")
    protocol = options.get("call_protocol")
    if protocol is not None:
        lines.append(f"- It calls tools by `call_protocol: {protocol}`: {_PROTOCOLS.get(protocol, 'its own')}")
    limits = {
        "max_env_steps": "replies of the environment",
        "max_turn_length": "tokens in a turn",
        "max_completion_length": "tokens in a conversation after the prompt",
    }
    said = [f"{options[option]} {what}" for option, what in limits.items() if options.get(option)]
    lines += [f"- Trained with at most {', '.join(said)}"] if said else []
    if about.get("chat_template_kwargs"):
        lines.append(f"- Variables of the chat template: {_code(about['chat_template_kwargs'])}")
    prompt = options.get("system_prompt")
    return [
        "\n".join(lines),
        *([f"System prompt:\n\n{textwrap.indent(prompt, '> ', lambda line: True)}"] if prompt else []),
    ]


def _evaluation(rewards: Sequence[_About], rows: Sequence[_About], step: int, options: _About) -> list[str]:
    """The first evaluation, and that of the model which was kept, as a table for each set of questions."""
    text = []
    rows = [row for row in rows if row["step"] <= step]
    best = str(options.get("metric_for_best_model") or "eval_loss") if options.get("load_best_model_at_end") else None
    best = best if best is None or best.startswith("eval_") else f"eval_{best}"
    means = {key for row in rows for key in row if key.startswith("eval_") and key.endswith("reward")}
    for prefix in sorted(key.removesuffix("reward") for key in means if "/" not in key):
        found = {row["step"]: row for row in rows if f"{prefix}reward" in row}
        last = max(found)
        if best is not None:
            kept = [at for at, row in found.items() if row.get(best) is not None]
            sign = -1 if options.get("greater_is_better") is False or best.endswith("loss") else 1
            last = max(kept, key=lambda at: sign * found[at][best]) if kept else last
        steps = sorted({min(found), last})
        names = {f"{prefix}reward": "all, weighted"}
        names |= {f"{prefix}rewards/{each['name']}/mean": f"`{each['name']}`" for each in rewards}
        names |= {f"{prefix}turns/mean": "turns"}
        cells = [(name, *(_number(found[at].get(key)) for at in steps)) for key, name in names.items()]
        label = prefix.removeprefix("eval_").rstrip("_")
        split = options.get("dataset_test_split") if options.get("dataset_name") else None
        what = f"the set `{label}`" if label else f"the split `{split}`" if split else "held-out questions"
        late = f" The model was kept after step {step}." if last < step and best is None else ""
        text.append(f"Means over {what}, measured by the run itself.{late}")
        text.append(_table(("", *(f"step {at}" for at in steps)), cells))
    return text or ["The run measured nothing on held-out questions."]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _code(value: object) -> str:
    text = value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()
    return f"`{text}`"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
