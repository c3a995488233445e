"""What a trainer leaves of its conversations: as they are sampled, credited and trained, on every process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback

from mt_grpo.envs.source import tool_names
from mt_grpo.runlog import Batch, RunWriter
from mt_grpo.runlog.files import to_json
from mt_grpo.runlog.schema import VERSION, session_id
from mt_grpo.runlog.writer import end_with_a_line, finite
from mt_grpo.training.processes import everywhere
from mt_grpo.training.rollout_batch import RolloutBatch
from mt_grpo.trajectory import Trajectory

Lines = list[dict[str, Any]]


class RunRecords(TrainerCallback):
    """
    Writes the files of `mt_grpo.runlog`, and what the trainer logs to `metrics.jsonl`. Each process writes its own
    files; the main process writes the index, once all have written theirs.

    Args:
        trainer (`MTGRPOEnvTrainer`): Whose conversations they are. It calls this also as a callback.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._main = trainer.accelerator.is_main_process
        self._writer = RunWriter(trainer.args.output_dir, trainer.accelerator.process_index)
        self.rewards: Lines = [
            {"name": reward.name, "kind": kind, "weight": round(weight, 6), "maximum": reward.maximum}
            for (kind, reward), weight in zip(
                [("turn", reward) for reward in trainer.turn_reward_funcs]
                + [("outcome", reward) for reward in trainer.outcome_reward_funcs],
                trainer.reward_weights.tolist(),
                strict=True,
            )
        ]
        self._begun = False
        self._evaluated = (-1, -1)  # step and number of the latest batch of an evaluation
        self._latest: Batch | None = None
        self._inputs: dict[str, Any] | None = None
        self._outputs: list[Outputs] = []
        self._start = (0.0, 0.0)
        trainer.add_callback(self)

    # Conversations, and their credit

    def write(self, batch: RolloutBatch) -> Lines:
        """
        Writes the conversations of a batch. This is a collective call.

        Returns:
            `list[dict]`: Lines of the index: those of the batch, of all processes.
        """
        self._latest = self._described(batch)
        lines = self._commit(lambda: self._written(batch))
        return [line for line in lines if line["kind"] == "rollout" and line["mode"] == batch.mode]

    def rescue(self, batch: RolloutBatch) -> None:
        """Writes those conversations of a batch that are finished, after this process failed or another did."""
        self._latest = self._described(batch)
        lines = [*self._begin(), *self._written(batch)]
        if lines:
            self._writer.append(lines, self._trainer.accelerator.process_index)

    def credit(self, batch: RolloutBatch, advantages: Tensor, rows: Tensor) -> Tensor:
        """
        Writes the advantages of the batch that was written last. This is a collective call.

        Args:
            batch (`RolloutBatch`): The batch.
            advantages (`Tensor`): Of its rows, per turn, `(B, K)`.
            rows (`Tensor`): Numbers of its rows among those of all processes, `(B,)`.

        Returns:
            `Tensor`: `(B,)`, names the conversations in the batches that are trained on.
        """
        latest = self._latest
        ran = [index for index, each in enumerate(batch.trajectories) if each.stop_reason is not None]
        values = [advantages[index, : len(batch.trajectories[index].turns)].tolist() for index in ran]
        self._commit(lambda: self._writer.write_credit(latest, values))
        return number_rows(latest.step, latest.k, rows)

    def _written(self, batch: RolloutBatch) -> Lines:
        """Writes the conversations, and those whose place they took. Returns their lines."""
        latest, apart = self._latest, self._trainer.args.gradient_accumulation_steps
        discarded = [
            replace(latest, mode="discarded", k=latest.k + apart * attempt, numbers=_numbers(them), trajectories=them)
            for attempt, them in enumerate(batch.discarded)
        ]
        return [line for each in (*discarded, latest) for line in self._writer.write(each)]

    def _described(self, batch: RolloutBatch) -> Batch:
        trainer, step = self._trainer, self._trainer.state.global_step
        if batch.mode == "train":
            k, group_size = trainer._step % trainer.args.gradient_accumulation_steps, trainer.num_generations
        else:
            k = self._evaluated[1] + 1 if self._evaluated[0] == step else 0
            self._evaluated, group_size = (step, k), trainer.num_generations_eval
        counted = list(batch.counted)
        return Batch(batch.mode, step, k, group_size, _numbers(counted), counted, self.rewards)

    def _commit(self, write: Callable[[], Lines]) -> Lines:
        """Every process writes files, then the main process their lines. Returns the lines of all."""
        lines = gather_object(everywhere(write))

        def append() -> None:
            if self._main and lines:
                self._writer.append([*self._begin(), *lines])

        everywhere(append)
        return lines

    def _begin(self) -> Lines:
        """Saves the tokenizer, with which tokens can be shown later, and describes the run; once."""
        if self._begun or not self._main:
            return []
        self._begun = True
        trainer, args = self._trainer, self._trainer.args
        saved = self._writer.save_tokenizer(trainer._tokenizer.save_pretrained)
        return [
            *saved,
            {
                "kind": "run",
                "version": VERSION,
                "started": round(time.time(), 3),
                "group_size": trainer.num_generations,
                "group_size_eval": trainer.num_generations_eval,
                "processes": trainer.accelerator.num_processes,
                "rewards": self.rewards,
                "estimator": args.advantage_estimator,
                "model": str(Path(trainer.model.config.name_or_path)),
                "tools": tool_names(trainer.env),
            },
        ]

    # Optimiser steps

    @contextmanager
    def loss_of(self, inputs: dict[str, Any]) -> Iterator[None]:
        """Forwards in the block compute the loss of a micro-batch."""
        self._inputs = inputs if self._trainer.model.training else None
        try:
            yield
        finally:
            self._inputs = None

    def observed(self, results: tuple[Tensor, Tensor | None, Any]) -> tuple[Tensor, Tensor | None, Any]:
        """Takes note of log-probs and entropies, `(B, T)`, of the micro-batch of `loss_of`. Returns all of it."""
        if self._inputs is not None and "row_ids" in self._inputs:  # a checkpoint may hold rows without a number
            self._outputs.append(Outputs.of(self._inputs, *results[:2], self._trainer))
        return results

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start, self._outputs = (time.time(), time.perf_counter()), []
        self._trainer.activity.seconds.clear()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step - 1
        outputs, self._outputs = self._outputs, []
        rows, summaries = update_rows(outputs)

        def write() -> Lines:
            return self._writer.write_updates(step, rows, summaries) + ([self._step(step)] if self._main else [])

        self._commit(write)

    def _step(self, step: int) -> dict[str, Any]:
        began, start = self._start
        whole, parts = time.perf_counter() - start, self._trainer.activity.seconds
        spent = {
            "sampling": parts.get("sampling", 0.0),
            "rewards": parts.get("rewards", 0.0),
            "sync": parts.get("weight sync", 0.0),
        }
        spent["training"] = whole - sum(spent.values())
        line = {"kind": "step", "step": step, "start": round(began, 3), "seconds": round(whole, 4)}
        return line | {name: round(seconds, 4) for name, seconds in spent.items()}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if self._main:
            path = Path(args.output_dir) / "metrics.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            end_with_a_line(path)
            with path.open("a", encoding="utf-8") as file:
                file.write(to_json({"step": state.global_step, **logs}) + "\n")


def _numbers(trajectories: list[Trajectory]) -> list[int]:
    """Rows of conversations in the batch of all processes."""
    return [int(trajectory.session.rsplit("-", 1)[1]) for trajectory in trajectories]


_STEP, _BATCH = 40, 24  # bits: a row of a batch of 16 million, of 65,536 batches of a step


def number_rows(step: int, k: int, rows: Tensor) -> Tensor:
    """A number per row, `(B,)`, that says which conversation it is, wherever the row is trained."""
    return (step << _STEP) + (k << _BATCH) + rows


def _row_of(number: int) -> tuple[int, int, int]:
    """Step, batch and row of what `number_rows` returns."""
    return number >> _STEP, (number >> _BATCH) % (1 << (_STEP - _BATCH)), number % (1 << _BATCH)


@dataclass(frozen=True)
class Outputs:
    """
    One micro-batch, on its device, so that nothing waits for it within the step. All but `row_ids` are `(B, T)`.

    Args:
        row_ids (`Tensor`): `(B,)`, see `number_rows`.
        scored (`Tensor`): Bool, where a token is trained.
        difference, entropies, ratios, clipped (`Tensor`): See `mt_grpo.runlog.schema.UPDATES`.
    """

    row_ids: Tensor
    scored: Tensor
    difference: Tensor
    entropies: Tensor
    ratios: Tensor
    clipped: Tensor

    @classmethod
    def of(cls, inputs: dict[str, Any], logps: Tensor, entropies: Tensor, trainer: Any) -> Outputs:
        """
        Of the micro-batch whose loss TRL computes.

        Args:
            inputs (`dict`): The micro-batch.
            logps, entropies (`Tensor`): `(B, T)`, from its forward.
            trainer (`GRPOTrainer`): Whose loss it is.
        """
        logps = logps.detach()
        scored = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        old = inputs.get("old_per_token_logps", logps)
        ratios = (logps - old).exp()
        return cls(
            inputs["row_ids"],
            scored,
            (logps - inputs["sampling_per_token_logps"]).half(),
            entropies.detach().half(),
            ratios.half(),
            clip_flags(logps - old, inputs["advantages"], scored, trainer),
        )


def clip_flags(log_ratios: Tensor, advantages: Tensor, scored: Tensor, trainer: Any) -> Tensor:
    """
    Where TRL's loss clips the ratio, so that the token has no gradient, or with `cispo` a bounded weight.

    Args:
        log_ratios, advantages, scored (`Tensor`): `(B, T)`.
        trainer (`GRPOTrainer`): With the options of the loss.

    Returns:
        `Tensor`: Bool, `(B, T)`.
    """
    if trainer.importance_sampling_level == "sequence":
        mean = (log_ratios * scored).sum(dim=1, keepdim=True) / scored.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratios = mean.expand_as(log_ratios)
    ratios = log_ratios.exp()
    if trainer.loss_type == "cispo":
        return (ratios > trainer.epsilon_high) & (advantages > 0)
    if trainer.loss_type in ("sapo", "vespo"):  # they weigh ratios smoothly
        return torch.zeros_like(scored)
    clipped = (ratios < 1 - trainer.epsilon_low) & (advantages < 0)
    clipped |= (ratios > 1 + trainer.epsilon_high) & (advantages > 0)
    if trainer.args.delta is not None:
        clipped |= (ratios > trainer.args.delta) & (advantages < 0)
    return clipped


def update_rows(outputs: list[Outputs]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """
    The rows that a step trained.

    Returns:
        Rows with the columns of `UPDATES`, except `updated_step`, and of each the summary for the index.
    """
    rows, summaries = [], []
    for output in outputs:
        row_ids, scored, *values = (
            tensor.cpu().numpy()
            for tensor in (
                output.row_ids,
                output.scored,
                output.difference,
                output.entropies,
                output.ratios,
                output.clipped,
            )
        )
        for number, trained, *of_row in zip(row_ids.tolist(), scored, *values, strict=True):
            columns = np.flatnonzero(trained)
            if not len(columns):  # left out of the loss
                continue
            step, k, row = _row_of(number)
            difference, entropies, ratios, clipped = (value[columns] for value in of_row)
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
