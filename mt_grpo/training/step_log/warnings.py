"""Warnings of conversations that fail, rewards that never apply, and steps that teach nothing."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from mt_grpo.credit import RewardBatch, Rule, bias_of_turn_coef, bind_rule, mt_grpo, rule_name, sums_turns
from mt_grpo.credit.audit import long_length, outcome_at_first_turn, pull_apart, scale_ratio
from mt_grpo.rewards import RewardFunc, StateScore, TurnReward, score_cut
from mt_grpo.runlog.findings import Counts, find, why_equal
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.ranks import run_here
from mt_grpo.training.step_log.records import Line, Step, Update, mean_record
from mt_grpo.trajectory import Trajectory

CUT = 8  # trajectories of a run that are scored again with their later turns cut off

STILL = 10  # steps in a row without a gradient that are warned of: fewer may be chance

APART = 10  # steps after which it is first asked whether outcomes and turn rewards go apart; then after twice as many

_LOST, _OUT_OF_PROPORTION = 0.3, 3.0
"""Share of the outcome's advantage that the first turn has at least, and the ratio of scales that is warned of."""
_KEEPS_PROPORTIONS = "`advantage_estimator: {name: lambda_to_go, lam: 0.8, scales: batch}`, the default"
"""A rule that gives every turn the outcome, and keeps the weight of turn rewards beside it."""
_KEEPS_OUTCOME = "`advantage_estimator: grpo_or`, the default"
"""One that gives it to every turn where nothing else pays."""

logger = logging.getLogger(__name__)


class Warnings:
    """Warns in the main process of what batches and gradients show, of each once, and with a count at the end."""

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
        rule, options = bind_rule(self._rule, **self._args.rule_options)
        bias = bias_of_turn_coef(step.batch.rewards, options.get("turn_coef", 1.0)) if rule is mt_grpo else None
        if bias is not None and self._first("bias"):
            logger.warning("The credit rule 'mt_grpo' is biased on this batch: %s. Take %s.", bias, _KEEPS_PROPORTIONS)
        uncredited = says_uncredited(step.audit, self._rule, self._args)
        if uncredited is not None and self._first("uncredited"):
            logger.warning(uncredited)
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

    def _find_proportions(self, rewards: RewardBatch, advantages: Tensor) -> None:
        if not advantages.any() or not self._speaks:
            return
        # scores of states may carry an outcome to early turns, which a made-up outcome does not show
        lost = (self._of_turns or rewards.state_scores is None) and self._first("lost")
        take = _KEEPS_PROPORTIONS if self._of_turns else _KEEPS_OUTCOME
        sentences = [_says_lost(rewards, self._rule, self._args, take)] if lost else []
        if self._of_turns and self._ratio is None:  # until both differ in a group
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


def _says_lost(rewards: RewardBatch, rule: Rule, args: MTGRPOConfig, take: str) -> str | None:
    """That a rule loses the outcome of early turns."""
    share = outcome_at_first_turn(rule, rewards, turn_coef=args.turn_advantage_coef)
    if share is None or share >= _LOST:
        return None
    return (
        f"`{rule_name(rule)}` gives the first turn {share:.2%} of what it gives the turn that gets most for the "
        f"outcome, in conversations of {long_length(rewards)} turns: what an early turn decides is hardly learnt from "
        f"the outcome. Take {take}."
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
