"""What batches say: metrics of rollouts, rewards and credit, as means over a log window (docs/runs.md lists them)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import torch
from accelerate import PartialState
from accelerate.utils import gather, gather_object
from torch import nn

from mt_grpo.credit import RewardBatch
from mt_grpo.training.rollout_batch import Staleness
from mt_grpo.training.step_log.records import Line, Step
from mt_grpo.trajectory import StopReason, Trajectory


class _Tally:
    """
    Sums by name, each per unit (trajectory, call, turn K), and the number of each unit. A name that a batch lacks
    counts as 0 there. The weight of a batch is its number of units.

        tally.count("trajectory", 8)
        tally.add("stop/answered", 6, per="trajectory")   # logged as 0.75, and as 6 / 16 with another 8 that have none
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._per: dict[str, str] = {}
        self._counts: dict[str, float] = defaultdict(float)
        self._largest: dict[str, float] = {}

    def count(self, unit: str, number: float) -> None:
        """Adds `number` to the count of a unit."""
        self._counts[unit] += number

    def add(self, name: str, total: float, per: str) -> None:
        """Adds `total` to the sum that is logged as `name`, divided by the number of the unit `per`."""
        self._sums[name] += total
        self._per[name] = per

    def mean(self, name: str, values: torch.Tensor) -> None:
        """Adds values to a name whose mean is logged; a window without any lacks the name."""
        if len(values):
            self.count(name, len(values))
            self.add(name, values.sum().item(), per=name)

    def one(self, name: str, value: float) -> None:
        """Adds one value to a name whose mean is logged."""
        self.count(name, 1)
        self.add(name, value, per=name)

    def largest(self, name: str, value: float) -> None:
        """Adds a value to a name whose largest value is logged."""
        self._largest[name] = max(value, self._largest.get(name, value))

    def merge(self, other: _Tally) -> None:
        """Adds what another tally has."""
        self._per |= other._per
        for name, total in other._sums.items():
            self._sums[name] += total
        for unit, number in other._counts.items():
            self._counts[unit] += number
        for name, value in other._largest.items():
            self.largest(name, value)

    def means(self) -> dict[str, float]:
        """The values to log; 0 if there is nothing to divide by."""
        means = {name: total / (self._counts[self._per[name]] or 1) for name, total in self._sums.items()}
        return means | self._largest


class Metrics:
    """Metrics of the batches of a log window; `weights` and `names` are the rewards'."""

    def __init__(self, weights: torch.Tensor, names: list[str], prefetches: bool = False) -> None:
        self._weights, self._names, self._prefetches = weights, names, prefetches
        self._tallies = {"train": _Tally(), "eval": _Tally()}

    def take(self, step: Step) -> None:
        """Adds what a batch has to its log window. Collective."""
        batch, tally = step.batch, self._tallies[step.mode]
        tally.merge(_rollout_metrics(batch.counted))
        if step.mode == "eval":  # TRL's are means over batches, and batches of an evaluation differ in size
            tally.merge(_reward_metrics(batch.rewards_per_func, self._weights, self._names))
        tally.merge(_credit_metrics(batch.rewards, batch.advantages))
        if step.mode == "train":
            tally.merge(_audit_metrics(step.audit, batch.sampled_again))
        if step.mode == "train" and self._prefetches:
            tally.merge(_staleness_metrics(batch.staleness))
        if "importance_sampling_ratio" in step.output:
            tally.merge(_mismatch_metrics(step.output, batch.advantages.shape[1]))

    def close(self, mode: str) -> dict[str, float]:
        """Ends the log window of training (`"train"`) or of an evaluation (`"eval"`). Returns its means."""
        tally, self._tallies[mode] = self._tallies[mode], _Tally()
        return tally.means()


def _rollout_metrics(trajectories: list[Trajectory]) -> _Tally:
    """Metrics of the conversations of all ranks; a collective call."""
    records = gather_object([_record(trajectory) for trajectory in trajectories])
    turns = [turn for record in records for turn in record["turns"]]
    tally = _Tally()
    tally.count("trajectory", len(records))
    lengths = [(sum(turn["length"] for turn in record["turns"]), record["ended"]) for record in records]
    _count_completions(tally, [length for length, _ in lengths], [length for length, ended in lengths if ended])
    tally.count("call", sum(turn["tool_calls"] for turn in turns))
    for name, total in (
        ("turns/mean", len(turns)),
        ("rollouts/failed", sum(record["failed"] for record in records)),
        ("tools/call_frequency", sum(turn["tool_calls"] for turn in turns)),
        ("tools/malformed_frequency", sum(turn["malformed"] for turn in turns)),
        ("sequences/mean", sum(record["sequences"] for record in records)),
        ("tokens/unique", sum(record["unique"] for record in records)),
        ("tokens/turn_by_turn", sum(turn["context_length"] + turn["length"] for turn in turns)),
    ):
        tally.add(name, total, per="trajectory")
    tally.add("tools/failure_frequency", sum(turn["failures"] for turn in turns), per="call")
    for index in range(max(len(record["turns"]) for record in records)):
        rows = [record["turns"][index] for record in records if index < len(record["turns"])]
        tally.count(f"turn {index + 1}", len(rows))
        for name in _TURN_METRICS:
            tally.add(f"turn_{index + 1}/{name}", sum(row[name] for row in rows), per=f"turn {index + 1}")
        ratios = [record["teacher"][index] for record in records if index < len(record["teacher"])]
        taught = torch.tensor([ratio for ratio in ratios if ratio is not None])
        for name in (f"turn_{index + 1}/teacher", "teacher/turn"):
            tally.mean(name, taught)
        tally.mean("teacher/coverage", torch.tensor([float(ratio is not None) for ratio in ratios]))
    stops = Counter({reason.value: 0 for reason in StopReason})
    stops.update(record["stop"] for record in records)
    for name, numbers in (
        ("stop", stops),
        ("tokenization", Counter(record["render_mismatch"] for record in records if record["render_mismatch"])),
        ("forks", Counter(turn["fork_cause"] for turn in turns if turn["fork_cause"])),
    ):
        for value, number in sorted(numbers.items()):
            tally.add(f"{name}/{value.replace(' ', '_')}", number, per="trajectory")
    return tally


_TURN_METRICS = ("length", "context_length", "tool_calls", "failures", "malformed")


def _record(trajectory: Trajectory) -> Line:
    assert trajectory.stop_reason is not None  # it was run
    return {
        "stop": trajectory.stop_reason.value,
        "ended": not trajectory.stop_reason.is_truncated,
        "failed": trajectory.failed,
        "render_mismatch": trajectory.render_mismatch,
        "sequences": trajectory.tree.num_sequences,
        "unique": trajectory.tree.num_tokens,
        "teacher": trajectory.teacher_log_ratios,
        "turns": [
            {
                "length": turn.num_tokens,
                "context_length": turn.context_length,
                "tool_calls": len(turn.tool_calls),
                "failures": sum(call.error is not None for call in turn.tool_calls),
                "malformed": int(turn.error is not None),
                "fork_cause": turn.fork_cause,
            }
            for turn in trajectory.turns
        ],
    }


def _credit_metrics(batch: RewardBatch, advantages: torch.Tensor) -> _Tally:
    """Mean reward and mean advantage per turn. The reward is a mean over trajectories to which one applies."""
    tally = _Tally()
    for index in range(advantages.shape[1]):
        rewards = batch.turn_rewards[:, index]
        tally.mean(f"turn_{index + 1}/reward", rewards[~rewards.isnan()])
        tally.mean(f"turn_{index + 1}/advantage", advantages[batch.turn_mask[:, index], index])
    return tally


def _audit_metrics(audit: Line, sampled_again: int) -> _Tally:
    """The handful of an audit's numbers that trackers get; `audit.jsonl` has all."""
    tally, groups = _Tally(), audit["groups"]
    tally.count("group", groups)
    tally.add("credit/groups_without_signal", audit["groups_without_signal"] * groups, per="group")
    if sampled_again:
        tally.add("credit/groups_sampled_again", sampled_again, per="group")
    for name in ("sign_agreement", "uncredited_at_turn", "uncredited_up_to_turn"):
        if audit[name] is not None:
            tally.one(f"credit/{name}", audit[name])
    return tally


def _staleness_metrics(staleness: Staleness) -> _Tally:
    """How a batch that was prefetched came to be trained; a collective call."""
    ranks = gather_object([staleness])
    tally = _Tally()
    turns = [turn for each in ranks for turn in each.turns]
    if turns:
        tally.count("sampled token", sum(tokens for _, tokens in turns))
        tally.add("staleness/mean", sum(behind * tokens for behind, tokens in turns), per="sampled token")
        tally.largest("staleness/max", float(max(behind for behind, _ in turns)))
    tally.one("rollout/ready", sum(each.ready for each in ranks) / len(ranks))
    tally.one("rollout/wait_seconds", max(each.wait_seconds for each in ranks))
    tally.one("sync/seconds", max(each.sync_seconds for each in ranks))
    if staleness.effective is not None and not math.isnan(staleness.effective):  # the same on every process
        tally.one("staleness/effective_sample_size", staleness.effective)
    return tally


def means_over_rows(metrics: dict[str, list[float]], sizes: list[int]) -> dict[str, list[float]]:
    """TRL's metrics of an evaluation, each as one mean over its rows: its batches differ in size."""
    means = {}
    for name, values in metrics.items():
        if len(values) == len(sizes):
            pairs = [(value, size) for value, size in zip(values, sizes, strict=True) if not math.isnan(value)]
            total = sum(size for _, size in pairs)
            means[name] = [sum(value * size for value, size in pairs) / total if total else math.nan]
    return means


def _reward_metrics(rewards: torch.Tensor, weights: torch.Tensor, names: list[str]) -> _Tally:
    """Means of the rewards over the trajectories to which they apply."""
    totals = (rewards * weights.to(rewards.device)).nansum(dim=1).masked_fill(rewards.isnan().all(dim=1), torch.nan)
    tally = _Tally()
    for name, values in zip(
        ["reward", *(f"rewards/{name}/mean" for name in names)], [totals, *rewards.T], strict=True
    ):
        tally.mean(name, values[~values.isnan()])
    return tally


def _mismatch_metrics(batch: dict[str, torch.Tensor], num_turns: int) -> _Tally:
    """Difference between the engine's log-probs and the trainer's, per turn. This is a collective call."""
    trained = (batch["completion_mask"] * batch["tool_mask"]).bool()
    trained &= ~batch["sampling_per_token_logps"].isnan()  # trained tokens of the environment, which no engine sampled
    turns = batch["turn_ids"][trained]
    difference = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).abs()[trained].float()
    zeros = difference.new_zeros(num_turns)
    largest = zeros.scatter_reduce(0, turns, difference, "amax")
    totals = torch.stack(
        [zeros.scatter_add(0, turns, difference), torch.bincount(turns, minlength=num_turns), largest]
    )
    total, count, largest = gather(totals.unsqueeze(0)).unbind(dim=1)
    total, count, largest = total.sum(dim=0), count.sum(dim=0), largest.amax(dim=0)
    tally = _Tally()
    for index in range(num_turns):
        if count[index]:
            name = f"turn_{index + 1}/sampling_logp_difference"
            tally.count(f"trained token of turn {index + 1}", count[index].item())
            tally.add(f"{name}/mean", total[index].item(), per=f"trained token of turn {index + 1}")
            tally.largest(f"{name}/max", largest[index].item())
    return tally


def route_metrics(model: nn.Module) -> dict[str, float]:
    """How the routes of a mixture were replayed since the last call, on all ranks; a collective call."""
    replayer = next((vars(module)["_replayer"] for module in model.modules() if "_replayer" in vars(module)), None)
    if replayer is None:
        return {}
    counts = replayer.take_counts()
    # weights may be elsewhere, where FSDP or DeepSpeed moves them to the CPU
    numbers = torch.tensor([int(value) for value in vars(counts).values()], device=PartialState().device)
    routed, differing, shared, shared_differing = gather(numbers.unsqueeze(0)).sum(dim=0).tolist()
    found = {}
    if routed:
        found["router/differing"] = differing / routed
    if shared:
        found["router/shared_prefix_differing"] = shared_differing / shared
    return found


def _count_completions(tally: _Tally, lengths: list[int], ended: list[int]) -> None:
    """TRL's `completions/*`. As in TRL, the shortest and the longest are means over batches."""
    tally.count("ended trajectory", len(ended))
    tally.add("completions/clipped_ratio", len(lengths) - len(ended), per="trajectory")
    for infix, unit, values in (("", "trajectory", lengths), ("terminated_", "ended trajectory", ended)):
        tally.add(f"completions/mean_{infix}length", sum(values), per=unit)
        tally.one(f"completions/min_{infix}length", min(values, default=0))
        tally.one(f"completions/max_{infix}length", max(values, default=0))
