"""Warns of conversations that fail or are cut off, of rewards that never apply, and of steps that teach nothing."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mt_grpo.credit import RewardBatch, Rule, bias_of_turn_coef, bind_rule, mt_grpo, rule_name, sums_turns
from mt_grpo.credit.audit import outcome_at_first_turn, pull_apart, scale_ratio
from mt_grpo.rewards import RewardFunc, StateScore, TurnReward, score_cut
from mt_grpo.runlog.findings import Counts, find, why_equal
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.ranks import run_here
from mt_grpo.training.step_log.records import Step, Update, mean_record
from mt_grpo.trajectory import Trajectory

CUT = 8  # trajectories of a run that are scored again with their later turns cut off
STILL = 10  # steps in a row without a gradient that are warned of: fewer may be chance
APART = 10  # steps over which outcomes and turn rewards are watched for going apart
LOST, OUT_OF_PROPORTION = 0.3, 3.0
"""Share of the outcome's advantage that the first turn has at least, and the ratio of scales that is warned of."""

logger = logging.getLogger(__name__)


class Warnings:
    """
    Warns once during the run, and with a count at its end, of what stands out in conversations
    (`mt_grpo.runlog.findings`), of rewards that return `None` for every trajectory, and of batches in which no
    trajectory has an advantage. Warns once of

    - turn rewards that depend on later turns, if the credit rule credits single turns with them,
    - turn rewards that do not reach the turn that earned them,
    - an outcome that hardly reaches the first turn,
    - turn rewards that count for far more beside the outcome than their weights say, or for far less,
    - outcomes and turn rewards that go apart over `APART` steps,
    - batches on which the rule `mt_grpo` is biased by its coefficient,
    - a gradient that has been 0 for `STILL` steps.

    Only the main process warns.
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
        self._uncut = [*(self._of_turns if needs_causal else []), *state_scores]
        self._to_cut = CUT
        self.causal: dict[str, bool] = {}
        """Whether a turn reward stays as it is when later turns are cut off, for those that were examined here."""
        self._absent = list(self._names)
        self._batches = self._flat = 0
        self._said_biased = self._said_uncredited = self._said_proportions = self._said_apart = False
        self._means: deque[tuple[float, float]] = deque(maxlen=APART)
        """Mean outcomes and mean sums of turn rewards of the latest training batches."""
        self._found: set[str] = set()
        self._counts = {"train": Counts(), "eval": Counts()}
        self._seen = {"train": 0, "eval": 0}
        self._still = 0
        self._recent: deque[tuple[dict[str, Any], Counts]] = deque(maxlen=STILL)
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
        if not step.batch.advantages.any():
            self._flat += 1
            if self._flat == 1 and self._speaks:
                logger.warning(
                    "The rewards of a batch of %d trajectories teach nothing, since the members of each group earn "
                    "the same (or earn what the credit rule does not use). %s",
                    len(columns),
                    why_equal(latest, self._about),
                )

    def _find_bias(self, rewards: RewardBatch) -> None:
        rule, options = bind_rule(
            self._rule, turn_coef=self._args.turn_advantage_coef, scale_rewards=self._args.scale_rewards
        )
        if rule is not mt_grpo or self._said_biased or not self._speaks:
            return
        bias = bias_of_turn_coef(rewards, options.get("turn_coef", 1.0))
        if bias is not None:
            self._said_biased = True
            logger.warning(
                "The credit rule 'mt_grpo' is biased on this batch: %s. `advantage_estimator: reward_to_go` is not.",
                bias,
            )

    def _find_uncredited(self, audit: dict[str, Any]) -> None:
        sentence = says_uncredited(audit, self._rule, self._args)
        if sentence is not None and not self._said_uncredited and self._speaks:
            self._said_uncredited = True
            logger.warning(sentence)

    def _find_proportions(self, rewards: RewardBatch, advantages: Tensor) -> None:
        if self._said_proportions or not self._speaks or not self._of_turns or not advantages.any():
            return
        self._said_proportions = True
        for sentence in says_proportions(rewards, self._rule, self._args):
            logger.warning(sentence)

    def _find_apart(self, rewards: RewardBatch) -> None:
        ran = ~rewards.failed
        if self._said_apart or not self._speaks or not self._of_turns or not ran.any():
            return
        outcomes, turns = rewards.of_outcomes()[ran], rewards.of_turns()[ran].sum(dim=1)
        self._means.append((outcomes.mean().item(), turns.mean().item()))
        (first, first_turns), (last, last_turns) = self._means[0], self._means[-1]
        if len(self._means) == APART and pull_apart(*zip(*self._means, strict=True)):
            self._said_apart = True
            logger.warning(
                "Over %d steps the mean outcome went from %.3f to %.3f, and the mean sum of turn rewards from %.3f to "
                "%.3f: the policy learns one at the cost of the other. If the outcome is what you want, weigh turn "
                "rewards less (`reward_weights`), or pay for what makes the outcome better.",
                APART,
                first,
                last,
                first_turns,
                last_turns,
            )

    def recheck(self, trajectories: Sequence[Trajectory], mode: str) -> None:
        """
        Scores a sample of this process's trajectories once more, cut off after a turn. With the mode `"audit"` every
        turn reward is asked, whatever the credit rule; in an evaluation none is.
        """
        asked = self._of_turns if mode == "audit" else self._uncut
        if mode == "eval" or self._args.process_index or not asked or not self._to_cut:
            return
        several = [each for each in trajectories if not each.failed and len(each.turns) > 1][: self._to_cut]
        # each turn has its turn, but the last, after which nothing can be cut off
        samples = [(each, (self._to_cut - number) % (len(each.turns) - 1)) for number, each in enumerate(several)]
        self._to_cut -= len(samples)
        changed = run_here(score_cut(asked, samples), self._args.device)
        for reward in asked if samples else ():
            self.causal[reward.name] = self.causal.get(reward.name, True) and reward.name not in changed
        harmed = {reward.name for reward in self._uncut}
        self._uncut = [reward for reward in self._uncut if reward.name not in changed]
        for name, what in changed.items():
            if name not in harmed:  # the rule takes any turn reward
                continue
            logger.warning(
                "The reward or state score %r of turns depends on later turns (%s), so the credit rule %r is biased: "
                "judge a turn by the trajectory up to it, or use `mt_grpo` or `leave_one_out`, which take the sum of "
                "turn rewards over the trajectory.",
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
            causes = why_still([audit for audit, _ in self._recent], counts, self._about)
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
                why_equal(self._counts["train"], self._about),
            )


def says_uncredited(audit: dict[str, Any], rule: Rule, args: MTGRPOConfig) -> str | None:
    """
    That the credit rule leaves turn rewards away from the turns that earned them, and the rule to take; `None` where
    it is less than a percent of them.
    """
    at_turn, up_to_turn = audit["uncredited_at_turn"], audit["uncredited_up_to_turn"]
    if at_turn is None or round(100 * at_turn) < 1:
        return None
    _, options = bind_rule(rule, turn_coef=args.turn_advantage_coef, scale_rewards=args.scale_rewards)
    if options.get("turn_coef") == 0:
        field = "turn_advantage_coef" if args.turn_advantage_coef == 0 else "turn_coef"
        take = f"a `{field}` other than 0"
    elif args.averages_turns:
        take = "`advantage_estimator: leave_one_out`"
    else:
        take = "`advantage_estimator: reward_to_go` (`leave_one_out` if turn rewards depend on later turns)"
    lost = f", and {up_to_turn:.0%} at all turns up to it" if round(100 * up_to_turn) else ""
    return (
        f"`{rule_name(rule)}` leaves {at_turn:.0%} of the turn rewards of this batch without credit at the turn that "
        f"earned them{lost}: take {take}."
    )


def says_proportions(rewards: RewardBatch, rule: Rule, args: MTGRPOConfig) -> list[str]:
    """
    That a credit rule loses the outcome of early turns, or weighs turn rewards out of proportion, a sentence each.
    """
    said, name = [], rule_name(rule)
    options = {"turn_coef": args.turn_advantage_coef, "scale_rewards": args.scale_rewards}
    lengths = rewards.turn_mask.sum(dim=1).double()
    turns = lengths[lengths > 0].mean().item()
    share = outcome_at_first_turn(rule, rewards, turn_coef=args.turn_advantage_coef)
    if share is not None and share < LOST:
        said.append(
            f"`{name}` gives the first turn {share:.2%} of what it gives the turn that gets most for the outcome, in "
            f"conversations of {turns:.0f} turns: what an early turn decides is hardly learnt from the outcome. Take "
            f"{KEEPS_PROPORTIONS}."
        )
    ratio = scale_ratio(rule, rewards, **options)
    if ratio is not None and not 1 / OUT_OF_PROPORTION <= ratio <= OUT_OF_PROPORTION:
        counts = f"{ratio:.1f} times as much" if ratio > 1 else f"{ratio:.2f} times as much"
        said.append(
            f"`{name}` divides outcome and turn rewards by a deviation each, so that turn rewards count {counts} "
            f"beside the outcome as their weights say. To keep the proportion that your rewards have, take "
            f"{KEEPS_PROPORTIONS}."
        )
    return said


KEEPS_PROPORTIONS = "`advantage_estimator: {name: lambda_to_go, lam: 0.8, scales: batch}`, the default"
"""A rule that gives every turn the outcome, and keeps the weight of turn rewards beside it."""


def why_still(audits: Sequence[dict[str, Any]], counts: Counts, about: dict[str, Any] | None = None) -> str:
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
