"""
What batches say: metrics of rollouts, rewards and credit, as means over a log window (docs/runs.md lists them), and
warnings of conversations that fail, rewards that never apply and steps that teach nothing.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence

import torch
from accelerate import PartialState
from accelerate.utils import gather, gather_object
from torch import Tensor, nn

from mt_grpo.credit import RewardBatch, Rule, bias_of_turn_coef, bind_rule, mt_grpo, rule_name, sums_turns
from mt_grpo.credit.audit import long_length, outcome_at_first_turn, pull_apart, scale_ratio
from mt_grpo.rewards import RewardFunc, StateScore, TurnReward, score_cut
from mt_grpo.runlog.findings import Counts, find, why_equal
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.ranks import run_here
from mt_grpo.training.rollout_batch import Staleness
from mt_grpo.training.step_log.records import Line, Step, Update, mean_record
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


CUT = 8  # trajectories of a run that are scored again with their later turns cut off

STILL = 10  # steps in a row without a gradient that are warned of: fewer may be chance

APART = 10  # steps after which it is first asked whether outcomes and turn rewards go apart; then after twice as many

_LOST, _OUT_OF_PROPORTION = 0.3, 3.0
"""Share of the outcome's advantage that the first turn has at least, and the ratio of scales that is warned of."""

logger = logging.getLogger(__name__)


class Warnings:
    """
    Warns once, and with a count at the end, of what stands out in conversations (`mt_grpo.runlog.findings`), rewards
    that are `None` for all, and batches without an advantage; once of turn rewards that depend on later turns, reach
    other turns or count out of proportion, an outcome that hardly reaches the first turn, rewards that go apart over
    `APART` steps, a biased `mt_grpo`, and a gradient of 0 for `STILL` steps. Only the main process warns.
    """

    def __init__(
        self,
        rewards: Sequence[RewardFunc],
        args: MTGRPOConfig,
        state_scores: Sequence[StateScore],
        tools: Sequence[str],
    ) -> None:
        self._args = args
        self._speaks = args.process_index == 0
        self._names = [reward.name for reward in rewards]
        self._about = {"tools": tools}
        self._of_turns = [reward for reward in rewards if isinstance(reward, TurnReward)]
        needs_causal = not sums_turns(rule_name(self._rule))
        self._uncut: list[TurnReward | StateScore] = [*(self._of_turns if needs_causal else []), *state_scores]
        self._to_cut = CUT
        self.causal: dict[str, bool] = {}
        """Whether a turn reward stays as it is when later turns are cut off, for those that were examined here."""
        self._absent = list(self._names)
        self._batches = self._flat = 0
        self._flat_counts = Counts()  # of batches that taught nothing
        self._said: set[str] = set()
        self._means: list[tuple[float, float]] = []
        """Mean outcomes and mean sums of turn rewards of training batches."""
        self._ratio: float | None = None
        """`scale_ratio` of the first batch that tells it."""
        self._found: set[str] = set()
        self._counts = {"train": Counts(), "eval": Counts()}
        self._seen = {"train": 0, "eval": 0}
        self._still = 0
        self._recent: deque[tuple[Line, Counts]] = deque(maxlen=STILL)
        """Audits and conversations of the latest training batches."""

    @property
    def _rule(self) -> Rule:
        return self._args.credit_rule(bool(self._of_turns))

    def begin(self) -> None:
        """Training begins, perhaps after one that was interrupted."""
        self._still = 0
        self._recent.clear()

    # Batches

    def take(self, step: Step) -> None:
        """Looks at a batch that is written and credited."""
        latest = Counts().add(step.lines)
        self._find(latest, step.mode)
        if step.mode == "train":
            self._recent.append((step.audit, latest))
            self._judge(step, latest)

    def _find(self, latest: Counts, mode: str) -> None:
        self._counts[mode].merge(latest)
        self._seen[mode] += 1
        found = [finding for finding in find(latest, self._about) if finding.kind not in self._found]
        self._found.update(finding.kind for finding in found)
        for finding in found if self._speaks else ():
            logger.warning("In %s batch: %s", "a training" if mode == "train" else "an evaluation", finding.sentence)

    def _judge(self, step: Step, latest: Counts) -> None:
        columns = step.batch.rewards_per_func
        self._find_bias(step.batch.rewards)
        self._find_uncredited(step.audit)
        self._find_proportions(step.batch.rewards, step.batch.advantages)
        self._find_apart(step.batch.rewards)
        missing = columns.isnan().all(dim=0).tolist()
        if all(missing):  # all conversations failed, or no reward said anything: there is nothing to compare
            return
        self._batches += 1
        silent = [name for name, empty in zip(self._names, missing, strict=True) if empty]
        self._absent = [name for name in self._absent if name in silent]
        if self._batches == 1 and self._speaks:
            for name in silent:
                logger.warning(
                    "The reward %r applied to none of the %d trajectories of the first batch: it returned `None` for "
                    "each, and has no part in training as long as it does.",
                    name,
                    len(columns),
                )
        if not step.batch.advantages.any() and not self._args.distillation_coef:
            self._flat += 1
            self._flat_counts.merge(latest)
            if self._flat == 1 and self._speaks:
                logger.warning(
                    "The rewards of a batch of %d trajectories teach nothing, since the members of each group earn "
                    "the same (or earn what the credit rule does not use). %s",
                    len(columns),
                    why_equal(latest, self._about),
                )

    def _first(self, kind: str) -> bool:
        """Whether to warn of something: in the main process, the first time."""
        if kind in self._said or not self._speaks:
            return False
        self._said.add(kind)
        return True

    def _find_bias(self, rewards: RewardBatch) -> None:
        rule, options = bind_rule(self._rule, **self._args.rule_options)
        if rule is not mt_grpo:
            return
        bias = bias_of_turn_coef(rewards, options.get("turn_coef", 1.0))
        if bias is not None and self._first("bias"):
            logger.warning("The credit rule 'mt_grpo' is biased on this batch: %s. Take %s.", bias, _KEEPS_PROPORTIONS)

    def _find_uncredited(self, audit: Line) -> None:
        sentence = says_uncredited(audit, self._rule, self._args)
        if sentence is not None and self._first("uncredited"):
            logger.warning(sentence)

    def _find_proportions(self, rewards: RewardBatch, advantages: Tensor) -> None:
        if not self._of_turns or not advantages.any() or not self._speaks:
            return
        sentences = [_says_lost(rewards, self._rule, self._args)] if self._first("lost") else []
        if self._ratio is None:  # until a group has both outcomes that differ and turn rewards that do
            self._ratio = scale_ratio(self._rule, rewards, **self._args.rule_options)
            sentences.append(_says_scales(self._ratio, self._rule))
        for sentence in filter(None, sentences):
            logger.warning(sentence)

    def _find_apart(self, rewards: RewardBatch) -> None:
        ran = ~rewards.failed
        if not self._of_turns or not ran.any():
            return
        outcomes, turns = rewards.of_outcomes()[ran], rewards.of_turns()[ran].sum(dim=1)
        self._means.append((outcomes.mean().item(), turns.mean().item()))
        # looked at each time that their number has doubled: in a look at every step chance would find some
        count = len(self._means)
        if count % APART or (count // APART).bit_count() != 1:
            return
        apart = [
            means
            for means in (self._means, self._means[count // 2 :])
            if len(means) >= APART and pull_apart(*zip(*means, strict=True))
        ]
        if apart and self._first("apart"):
            (first, first_turns), (last, last_turns) = apart[0][0], apart[0][-1]
            take = "weigh turn rewards less (`reward_weights`)"
            if self._ratio is not None and self._ratio > 1:  # weights cancel in a deviation of turn rewards alone
                take = f"take {_KEEPS_PROPORTIONS}"
            logger.warning(
                "Over %d steps the mean outcome went from %.3f to %.3f, and the mean sum of turn rewards from %.3f to "
                "%.3f: the policy learns one at the cost of the other. If the outcome is what you want, %s, or pay "
                "for what makes the outcome better.",
                len(apart[0]),
                first,
                last,
                first_turns,
                last_turns,
                take,
            )

    def recheck(self, trajectories: Sequence[Trajectory], mode: str) -> None:
        """Scores a sample of trajectories again, cut off after a turn; in an evaluation none."""
        asked: Sequence[TurnReward | StateScore] = self._of_turns if mode == "audit" else self._uncut
        if mode == "eval" or self._args.process_index or not asked or not self._to_cut:
            return
        several = [each for each in trajectories if not each.failed and len(each.turns) > 1][: self._to_cut]
        # each turn has its turn, but the last, after which nothing can be cut off
        samples = [(each, (self._to_cut - number) % (len(each.turns) - 1)) for number, each in enumerate(several)]
        self._to_cut -= len(samples)
        teacher = self._args.teacher
        knows_end = isinstance(teacher, dict) and "feedback" in teacher.get("sees", ())
        changed = run_here(score_cut(asked, samples, knows_end), self._args.device)
        for reward in asked if samples else ():
            self.causal[reward.name] = self.causal.get(reward.name, True) and reward.name not in changed
        harmed = {reward.name for reward in self._uncut}
        self._uncut = [reward for reward in self._uncut if reward.name not in changed]
        for name, what in changed.items():
            if name not in harmed:  # the rule takes any turn reward
                continue
            logger.warning(
                "The reward or state score %r of turns depends on later turns (%s), so the credit rule %r is biased: "
                "judge a turn by the trajectory up to it, or use `leave_one_out`, which takes the sum of turn rewards "
                "over the trajectory.",
                name,
                what,
                rule_name(self._rule),
            )

    # Optimiser steps

    def update(self, update: Update) -> None:
        """Looks at the gradient of an optimiser step."""
        self._still = self._still + 1 if update.gradient_norm == 0 else 0
        if self._still == STILL and self._speaks:
            counts = Counts()
            for _, of_batch in self._recent:
                counts.merge(of_batch)
            causes = _why_still([audit for audit, _ in self._recent], counts, self._about)
            logger.warning("The gradient has been exactly 0 for %d steps, so nothing is learnt: %s", STILL, causes)

    def end(self) -> None:
        """Says once more, with counts, what was seen in several batches."""
        if not self._speaks:
            return
        for mode, name in (("train", "training"), ("eval", "evaluation")):
            # one batch was already spoken of
            for finding in find(self._counts[mode], self._about) if self._seen[mode] > 1 else ():
                logger.warning("In %d %s batches: %s", self._seen[mode], name, finding.sentence)
        if self._batches < 2:
            return
        for name in self._absent:
            logger.warning(
                "The reward %r applied to no trajectory of this run's %d batches: it returned `None` for each.",
                name,
                self._batches,
            )
        if self._flat:
            logger.warning(
                "%d of %d batches taught nothing: the members of each of their groups earned the same. %s",
                self._flat,
                self._batches,
                why_equal(self._flat_counts, self._about),
            )


def says_uncredited(audit: Line, rule: Rule, args: MTGRPOConfig) -> str | None:
    """That the rule leaves turn rewards away from their turns; `None` below a percent."""
    at_turn, up_to_turn = audit["uncredited_at_turn"], audit["uncredited_up_to_turn"]
    if at_turn is None or round(100 * at_turn) < 1:
        return None
    _, options = bind_rule(rule, **args.rule_options)
    if options.get("turn_coef") == 0:
        field = "turn_advantage_coef" if args.turn_advantage_coef == 0 else "turn_coef"
        take = f"a `{field}` other than 0"
    elif args.averages_turns:
        take = "`advantage_estimator: leave_one_out`"
    else:
        take = f"{_KEEPS_PROPORTIONS} (`leave_one_out` if turn rewards depend on later turns)"
    lost = f", and {up_to_turn:.0%} at all turns up to it" if round(100 * up_to_turn) else ""
    return (
        f"`{rule_name(rule)}` leaves {at_turn:.0%} of the turn rewards of this batch without credit at the turn that "
        f"earned them{lost}: take {take}."
    )


def _says_lost(rewards: RewardBatch, rule: Rule, args: MTGRPOConfig) -> str | None:
    """That a rule loses the outcome of early turns."""
    share = outcome_at_first_turn(rule, rewards, turn_coef=args.turn_advantage_coef)
    if share is None or share >= _LOST:
        return None
    return (
        f"`{rule_name(rule)}` gives the first turn {share:.2%} of what it gives the turn that gets most for the "
        f"outcome, in conversations of {long_length(rewards)} turns: what an early turn decides is hardly learnt from "
        f"the outcome. Take {_KEEPS_PROPORTIONS}."
    )


def _says_scales(ratio: float | None, rule: Rule) -> str | None:
    """That a rule weighs turn rewards out of proportion."""
    if ratio is None or 1 / _OUT_OF_PROPORTION <= ratio <= _OUT_OF_PROPORTION:
        return None
    counts = f"{ratio:.1f} times as much" if ratio > 1 else f"{ratio:.2f} times as much"
    return (
        f"`{rule_name(rule)}` divides outcome and turn rewards by a deviation each, so that turn rewards count "
        f"{counts} beside the outcome as their weights say. To keep the proportion that your rewards have, take "
        f"{_KEEPS_PROPORTIONS}."
    )


_KEEPS_PROPORTIONS = "`advantage_estimator: {name: lambda_to_go, lam: 0.8, scales: batch}`, the default"
"""A rule that gives every turn the outcome, and keeps the weight of turn rewards beside it."""


def _why_still(audits: Sequence[Line], counts: Counts, about: Line | None = None) -> str:
    """The likely causes of a gradient of 0, as the end of a sentence."""
    if not audits:
        return "no conversation was sampled."
    if not counts.held:
        return find(counts, about)[0].sentence
    mean = mean_record(audits)
    rewards = mean["rewards"]
    if mean["groups_without_signal"] < 1:
        return (
            "some groups have advantages, so their tokens are not trained: they are masked (`rollouts/failed`, "
            "`mask_truncated_completions`) or clipped, or no weight of the model is trained."
        )
    silent = [repr(name) for name, reward in rewards.items() if not reward["applies"]]
    equal = [repr(name) for name, reward in rewards.items() if reward["applies"] and reward["equal_groups"] == 1]
    causes = ["the advantages of all groups were 0 at every turn"]
    causes += [f"{_rewards(silent)} returned `None` for every conversation"] if silent else []
    causes += [f"{_rewards(equal)} gave all members of each group the same"] if equal else []
    if len(silent) + len(equal) < len(rewards):
        causes.append("what other rewards told apart has no weight, or the credit rule does not use it")
        return f"{'; '.join(causes)}."
    return f"{'; '.join(causes)}. {why_equal(counts, about)}"


def _rewards(names: list[str]) -> str:
    return f"the reward{'s' * (len(names) > 1)} {', '.join(names)}"
