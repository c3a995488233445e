"""What a run leaves behind: trajectories and metrics, one JSON object a line, written as soon as they exist."""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather, gather_object
from transformers import TrainerCallback

from mt_grpo.credit import RewardBatch
from mt_grpo.trajectory import StopReason, Trajectory

UNFINISHED = {StopReason.LENGTH, StopReason.TOKEN_BUDGET, StopReason.CONTEXT_FULL, StopReason.TIMEOUT}
"""Stop reasons of a completion that was cut off rather than ended."""


class TrajectoryWriter:
    """
    Appends trajectories to `trajectories.jsonl` in a folder; the ranks of a distributed run write a file each.

    Args:
        folder (`str`): Output folder.
        rank (`int`): Process index.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self.path = Path(folder) / ("trajectories.jsonl" if rank == 0 else f"trajectories.rank{rank}.jsonl")

    def write(self, trajectories: list[Trajectory], mode: str, step: int) -> None:
        """Appends trajectories with the mode (`"train"` or `"eval"`) and the optimiser step they belong to."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            json.dumps({"step": step, "mode": mode, **trajectory.to_dict()}, ensure_ascii=False, default=str)
            for trajectory in trajectories
        ]
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(line + "\n" for line in lines))


class MetricsCallback(TrainerCallback):
    """Appends what the trainer logs to `metrics.jsonl` in its output folder."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if state.is_world_process_zero:
            path = Path(args.output_dir) / "metrics.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **logs}, default=str) + "\n")


def rollout_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """
    Metrics of the conversations of all ranks; a collective call.

    Returns:
        `dict`: `turns/mean`; `tools/call_frequency` (a trajectory) and `tools/failure_frequency` (a call) as TRL
        names them; `sequences/mean`, `tokens/unique` and `tokens/turn_by_turn`, what a forward a turn would compute (a
        trajectory); `turn_K/length` and `turn_K/context_length` (tokens), `turn_K/tool_calls` and `turn_K/failures` (a
        trajectory that has the turn), K from 1; `stop/REASON`, shares that sum to 1; `forks/CAUSE` and
        `tokenization/CAUSE` (a trajectory), where there are any; `rollouts/failed`, the share that the engine or the
        environment ended, which is left out of loss, baseline and rewards.
    """
    records = gather_object([_record(trajectory) for trajectory in trajectories])
    count = len(records)
    turns = [turn for record in records for turn in record["turns"]]
    attempts = sum(turn["tool_calls"] for turn in turns)
    metrics = {
        "turns/mean": len(turns) / count,
        "rollouts/failed": sum(record["failed"] for record in records) / count,
        "tools/call_frequency": attempts / count,
        "tools/failure_frequency": sum(turn["failures"] for turn in turns) / attempts if attempts else 0.0,
        "sequences/mean": sum(record["sequences"] for record in records) / count,
        "tokens/unique": sum(record["unique"] for record in records) / count,
        "tokens/turn_by_turn": sum(turn["context_length"] + turn["length"] for turn in turns) / count,
    }
    for index in range(max(len(record["turns"]) for record in records)):
        rows = [record["turns"][index] for record in records if index < len(record["turns"])]
        for name in TURN_METRICS:
            metrics[f"turn_{index + 1}/{name}"] = sum(row[name] for row in rows) / len(rows)
    for name, values in (
        ("stop", [record["stop"] for record in records]),
        ("tokenization", [record["tokenization"] for record in records]),
        ("forks", [turn["rewritten"] for turn in turns]),
    ):
        for value, number in sorted(Counter(filter(None, values)).items()):
            metrics[f"{name}/{value.replace(' ', '_')}"] = number / count
    return metrics


TURN_METRICS = ("length", "context_length", "tool_calls", "failures")


def _record(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "stop": trajectory.stop_reason.value,
        "failed": trajectory.failed,
        "tokenization": trajectory.tokenization,
        "sequences": trajectory.tree.num_sequences,
        "unique": trajectory.tree.num_tokens,
        "turns": [
            {
                "length": turn.num_tokens,
                "context_length": turn.context_length,
                "tool_calls": turn.num_attempts,
                "failures": turn.num_failures,
                "rewritten": turn.rewritten,
            }
            for turn in trajectory.turns
        ],
    }


def credit_metrics(batch: RewardBatch, advantages: torch.Tensor) -> dict[str, float]:
    """
    Mean reward and advantage of each turn.

    Args:
        batch (`RewardBatch`): Rewards of all ranks.
        advantages (`torch.Tensor` of shape `(B, K)`): Their advantages.
    """
    metrics = {}
    for index in range(advantages.shape[1]):
        reward = batch.turn_rewards[:, index].nanmean().item()
        if not math.isnan(reward):
            metrics[f"turn_{index + 1}/reward"] = reward
        exists = batch.turn_mask[:, index]
        if exists.any():
            metrics[f"turn_{index + 1}/advantage"] = advantages[exists, index].mean().item()
    return metrics


def show_advantages(shown: deque[float], batch: RewardBatch, advantages: torch.Tensor) -> None:
    """
    Puts the advantages that are trained, `(B, K)`, as means over turns, in the place of TRL's in its table of
    completions.
    """
    means = advantages.sum(dim=1) / batch.turn_mask.sum(dim=1).clamp(min=1)
    for _ in range(min(len(means), len(shown))):
        shown.pop()
    shown.extend(means.tolist())


def mismatch_metrics(batch: dict[str, torch.Tensor], num_turns: int) -> dict[str, float]:
    """
    How far the engine's log-probs are from the trainer's, turn by turn; a collective call.

    Args:
        batch (`dict`): This process's batch: `old_per_token_logps`, `sampling_per_token_logps`, `completion_mask`,
            `tool_mask` and `turn_ids`, each `(B, T)`.
        num_turns (`int`): Turns of the longest trajectory of all processes.

    Returns:
        `turn_K/sampling_logp_difference/mean` and `.../max`, in nats a token, K from 1.
    """
    trained = (batch["completion_mask"] * batch["tool_mask"]).bool()
    trained &= ~batch["sampling_per_token_logps"].isnan()  # trained tokens of the environment, which no engine scored
    turns = batch["turn_ids"][trained]
    difference = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).abs()[trained].float()
    zeros = difference.new_zeros(num_turns)
    largest = zeros.scatter_reduce(0, turns, difference, "amax")
    totals = torch.stack(
        [zeros.scatter_add(0, turns, difference), torch.bincount(turns, minlength=num_turns), largest]
    )
    total, count, largest = gather(totals.unsqueeze(0)).unbind(dim=1)
    total, count, largest = total.sum(dim=0), count.sum(dim=0), largest.amax(dim=0)
    metrics = {}
    for index in range(num_turns):
        if count[index]:
            name = f"turn_{index + 1}/sampling_logp_difference"
            metrics[f"{name}/mean"] = (total[index] / count[index]).item()
            metrics[f"{name}/max"] = largest[index].item()
    return metrics


def completion_metrics(lengths: torch.Tensor, truncated: torch.Tensor) -> dict[str, float]:
    """
    TRL's `completions/*` metrics.

    Args:
        lengths (`torch.Tensor` of shape `(B,)`): Sampled tokens of each completion of all ranks.
        truncated (`torch.Tensor` of shape `(B,)`, bool): Whether it was cut off.
    """
    ended = lengths[~truncated].float()
    ended = ended if len(ended) else torch.zeros(1)
    lengths = lengths.float()
    return {
        "completions/mean_length": lengths.mean().item(),
        "completions/min_length": lengths.min().item(),
        "completions/max_length": lengths.max().item(),
        "completions/clipped_ratio": truncated.float().mean().item(),
        "completions/mean_terminated_length": ended.mean().item(),
        "completions/min_terminated_length": ended.min().item(),
        "completions/max_terminated_length": ended.max().item(),
    }
