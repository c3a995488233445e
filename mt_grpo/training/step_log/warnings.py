"""Warns of conversations that fail or are cut off, of rewards that never apply, and of batches that teach nothing."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from mt_grpo.credit import Audit, RewardBatch, biases_of_mt_grpo, bind_rule, mt_grpo, rule_name, sums_turns
from mt_grpo.rewards import RewardFunc, StateScore, TurnReward, score_cut
from mt_grpo.runlog.files import to_json
from mt_grpo.runlog.findings import Counts, find, why_equal
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.processes import run_here
from mt_grpo.training.rollout_batch import RolloutBatch
from mt_grpo.trajectory import Trajectory

CUT = 8
"""Trajectories of a run that are scored again with their later turns cut off."""

logger = logging.getLogger(__name__)


class RewardWatch(TrainerCallback):
    """
    Warns of what stands out in conversations (`mt_grpo.runlog.findings`), of rewards that return `None` for every
    trajectory, and of batches in which no trajectory has an advantage: once during the run, and with a count at its
    end. Warns once of turn rewards that depend on later turns, if the
    credit rule credits single turns with them, and of batches on which the rule `mt_grpo` is biased.

    Args:
        rewards (`Sequence[RewardFunc]`): The rewards.
        args (`MTGRPOConfig`): The run's options.
        state_scores (`Sequence[StateScore]`): The state score, if there is one.
        tools (`Sequence[str]`, *optional*): Names of the environment's tools.
    """

    def __init__(
        self,
        rewards: Sequence[RewardFunc],
        args: MTGRPOConfig,
        state_scores: Sequence[StateScore] = (),
        tools: Sequence[str] = (),
    ) -> None:
        self._names = [reward.name for reward in rewards]
        self._absent = list(self._names)
        self._batches = self._flat = 0
        self._args = args
        needs_causal = not sums_turns(rule_name(args.advantage_estimator))
        self._of_turns = [reward for reward in rewards if isinstance(reward, TurnReward)]
        self._uncut = [*(self._of_turns if needs_causal else []), *state_scores]
        self._to_cut = CUT
        self.causal: dict[str, bool] = {}
        """Whether a turn reward stays as it is when later turns are cut off, for those that were examined here."""
        self._said_biased = False
        self._about = {"tools": tools}
        self._found: set[str] = set()
        self._latest = Counts()
        self._counts = {"train": Counts(), "eval": Counts()}
        self._seen = {"train": 0, "eval": 0}

    def see(self, rows: Sequence[dict[str, Any]], mode: str, speaks: bool) -> None:
        """
        Looks at the conversations of a batch.

        Args:
            rows (`Sequence[dict]`): Their lines of the index, of all processes.
            mode (`str`): `"train"` or `"eval"`.
            speaks (`bool`): Whether this process warns.
        """
        self._latest = Counts().add(rows)
        self._counts[mode].add(rows)
        self._seen[mode] += 1
        found = [finding for finding in find(self._latest, self._about) if finding.kind not in self._found]
        self._found.update(finding.kind for finding in found)
        for finding in found if speaks else ():
            logger.warning("In %s batch: %s", "a training" if mode == "train" else "an evaluation", finding.sentence)

    def recheck(self, trajectories: Sequence[Trajectory], mode: str) -> None:
        """
        Scores a sample of this process's trajectories once more, cut off after a turn.

        Args:
            trajectories (`Sequence[Trajectory]`): Scored trajectories.
            mode (`str`): `"train"`; `"audit"`, where every turn reward is asked, whatever the credit rule; or
                `"eval"`, where none is.
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
                rule_name(self._args.advantage_estimator),
            )

    def observe(self, batch: RolloutBatch, advantages: Tensor, speaks: bool) -> None:
        """
        Records a training batch.

        Args:
            batch (`RolloutBatch`): The batch, with the rewards of all processes.
            advantages (`Tensor`): Their advantages, shape (B, K).
            speaks (`bool`): Whether this process warns.
        """
        columns = batch.rewards_per_func
        self._observe_bias(batch.rewards, speaks)
        missing = columns.isnan().all(dim=0).tolist()
        if all(missing):  # all conversations failed, or no reward said anything: there is nothing to compare
            return
        self._batches += 1
        silent = [name for name, empty in zip(self._names, missing, strict=True) if empty]
        self._absent = [name for name in self._absent if name in silent]
        if self._batches == 1 and speaks:
            for name in silent:
                logger.warning(
                    "The reward %r applied to none of the %d trajectories of the first batch: it returned `None` for "
                    "each, and has no part in training as long as it does.",
                    name,
                    len(columns),
                )
        if not advantages.any():
            self._flat += 1
            if self._flat == 1 and speaks:
                logger.warning(
                    "The rewards of a batch of %d trajectories teach nothing, since the members of each group earn "
                    "the same (or earn what the credit rule does not use). %s",
                    len(columns),
                    why_equal(self._latest, self._about),
                )

    def _observe_bias(self, rewards: RewardBatch, speaks: bool) -> None:
        rule, options = bind_rule(
            self._args.advantage_estimator,
            turn_coef=self._args.turn_advantage_coef,
            scale_rewards=self._args.scale_rewards,
        )
        if rule is not mt_grpo or self._said_biased or not speaks:
            return
        biases = biases_of_mt_grpo(rewards, options.get("turn_coef", 1.0))
        self._said_biased = bool(biases)
        if biases:
            logger.warning(
                "The credit rule 'mt_grpo' is biased on this batch: %s. `advantage_estimator: reward_to_go` is not.",
                "; ".join(biases),
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
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


STILL = 10
"""Steps in a row without a gradient that are spoken of: fewer may be chance."""

logger = logging.getLogger(__name__)


class AuditLog(TrainerCallback):
    """
    Appends an audit to `audit.jsonl` in the output folder for each log step in which conversations were sampled, the
    mean over its batches, and warns once when the gradient has been 0 for `STILL` steps.
    """

    def __init__(self) -> None:
        self._window: list[dict[str, Any]] = []
        self._recent: deque[dict[str, Any]] = deque(maxlen=STILL)
        self._still = 0

    def observe(self, audit: Audit, names: Sequence[str], causal: Mapping[str, bool]) -> None:
        """
        Takes note of a training batch.

        Args:
            audit (`Audit`): Its audit.
            names (`Sequence[str]`): Names of its rewards.
            causal (`Mapping[str, bool]`): Whether a turn reward stays as it is when later turns are cut off; turn
                rewards that were not examined are absent.
        """
        record = as_record(audit, names, causal)
        self._window.append(record)
        self._recent.append(record)

    def observe_gradient(self, norm: float | None, speaks: bool) -> None:
        """
        Takes note of a step.

        Args:
            norm (`float`, *optional*): The norm of its gradient; `None` where it is not known.
            speaks (`bool`): Whether this process warns.
        """
        self._still = self._still + 1 if norm == 0 else 0
        if self._still == STILL and speaks:
            logger.warning(
                "The gradient has been exactly 0 for %d steps, so nothing is learnt: %s.",
                STILL,
                why_still(list(self._recent)),
            )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._window, self._still = [], 0
        self._recent.clear()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if "loss" in logs:  # else they are of an evaluation
            self._write(args, state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._write(args, state)

    def _write(self, args: Any, state: Any) -> None:
        window, self._window = self._window, []
        if window and state.is_world_process_zero:
            line = {"step": state.global_step, **mean_record(window)}
            with (Path(args.output_dir) / "audit.jsonl").open("a", encoding="utf-8") as file:
                file.write(to_json(line) + "\n")


def as_record(audit: Audit, names: Sequence[str], causal: Mapping[str, bool]) -> dict[str, Any]:
    """An audit as JSON has it, with its rewards by name."""
    rewards = {
        name: {**asdict(reward), "causal": causal.get(name)} for name, reward in zip(names, audit.rewards, strict=True)
    }
    return {**asdict(audit), "rewards": rewards}


def mean_record(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """
    The mean of each number over the records that have it, for the rewards of the last one. Groups are summed, and a
    reward that was once not causal is not.
    """
    mean: dict[str, Any] = {}
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


def read_audit(folder: str | Path) -> dict[str, Any] | None:
    """
    The audit of a whole run: the mean over the log steps in its folder's `audit.jsonl`; `None` where there are none.
    Of a step that was taken again, after a resumption, the last one counts.
    """
    path = Path(folder) / "audit.jsonl"
    if not path.exists():
        return None
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    by_step = {line.pop("step"): line for line in lines}
    return mean_record(list(by_step.values())) if by_step else None


def why_still(records: Sequence[dict[str, Any]]) -> str:
    """The likely causes of a gradient of 0, as half a sentence."""
    if not records:
        return "no conversation was sampled"
    mean = mean_record(records)
    rewards = mean["rewards"]
    if all(reward["applies"] is None for reward in rewards.values()):
        return "every conversation failed; `error` of the conversations has the reason"
    if mean["groups_without_signal"] < 1:
        return (
            "some groups have advantages, so their tokens are not trained: they are masked (`rollouts/failed`, "
            "`mask_truncated_completions`) or clipped, or no weight of the model is trained"
        )
    silent = [repr(name) for name, reward in rewards.items() if not reward["applies"]]
    equal = [repr(name) for name, reward in rewards.items() if reward["applies"] and reward["equal_groups"] == 1]
    causes = ["the advantages of all groups were 0 at every turn"]
    causes += [f"{_rewards(silent)} returned `None` for every conversation"] if silent else []
    causes += [f"{_rewards(equal)} gave all members of each group the same"] if equal else []
    if len(silent) + len(equal) < len(rewards):
        causes.append("what other rewards told apart has no weight, or the credit rule does not use it")
    return "; ".join(causes)


def _rewards(names: list[str]) -> str:
    return f"the reward{'s' * (len(names) > 1)} {', '.join(names)}"
