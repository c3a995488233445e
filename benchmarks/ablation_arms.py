"""What `ablation.py` compares: variants of the embedded task, and credit rules on each."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from mt_grpo.credit import RewardBatch, Rule, advantage_estimator, reward_to_go
from mt_grpo.credit.rule import Scale
from mt_grpo.data import load_rows
from mt_grpo.data.embedded.corpus import problems
from mt_grpo.rewards import TurnReward
from mt_grpo.trajectory import Trajectory, Turn

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"


class HopReward(TurnReward):
    """
    0.5 for each passage of the question's ideal solution that a turn's search brings and no earlier turn's did; `None`
    for a turn in which no tool ran. Summed over the turns: 0.5 × the hops that were found.

    The `passages` column lists the passages.
    """

    name = "hop_reward"

    def score(self, turn: Turn, trajectory: Trajectory, *, passages: list[str], **row: Any) -> float | None:
        if not any(call.executed for call in turn.tool_calls):
            return None
        seen = _found(trajectory.turns[: turn.index])
        return 0.5 * len((_found([turn]) - seen) & set(passages))


def _found(turns: list[Turn]) -> set[str]:
    return {call.result for turn in turns for call in turn.tool_calls if call.executed and call.error is None}


@dataclass(frozen=True)
class Variant:
    """A task to compare rules on: which embedded questions, and its turn rewards; `None`: those of the recipe."""

    hops: tuple[int, ...]
    turn_rewards: tuple[TurnReward, ...] | None

    @functools.cache  # noqa: B019 - there are two of them
    def rows(self, split: str) -> Dataset:
        """The questions of a split, in the order of `questions`, with the `passages` that answer them."""
        passages = {problem.question: list(problem.passages) for problem in problems(split)}
        rows = load_rows("embedded", split).filter(lambda row: row["hops"] in self.hops)
        return rows.map(lambda row: {"passages": passages[row["prompt"][0]["content"]]})


VARIANTS: dict[str, Variant] = {
    "quickstart": Variant((1, 2), None),
    "two_hops": Variant((2,), (HopReward(),)),
}

ARMS: dict[str, Rule] = {
    "grpo_or": "grpo_or",
    "grpo_mr": "grpo_mr",
    "mt_grpo": "mt_grpo",
    "reward_to_go": "reward_to_go",
    "shuffled": "reward_to_go_shuffled",
    "at_the_end": "reward_to_go_at_the_end",
    "turn_gae": "turn_gae",
    "gtpo": {"name": "gtpo", "gamma": 0.5},
    "one_scale": {"name": "lambda_to_go", "lam": 0.8, "scales": "batch"},
}
"""The credit rule of each arm, with its own defaults."""


@advantage_estimator("reward_to_go_shuffled")
def reward_to_go_shuffled(
    batch: RewardBatch, *, turn_coef: float = 1.0, scale_rewards: Scale = "group", seed: int = 0
) -> Tensor:
    """`reward_to_go` on turn rewards that are shuffled among the turns of their trajectory; (B, K)."""
    return reward_to_go(shuffled(batch, seed), turn_coef=turn_coef, scale_rewards=scale_rewards)


@advantage_estimator("reward_to_go_at_the_end")
def reward_to_go_at_the_end(batch: RewardBatch, *, turn_coef: float = 1.0, scale_rewards: Scale = "group") -> Tensor:
    """`reward_to_go` on turn rewards whose sum is at the last turn of their trajectory; (B, K)."""
    return reward_to_go(at_the_end(batch), turn_coef=turn_coef, scale_rewards=scale_rewards)


def shuffled(batch: RewardBatch, seed: int) -> RewardBatch:
    """
    The same rewards, with the turn rewards of each trajectory in another order, drawn evenly among all orders of the
    turns that exist. Turns without a reward take part. The draw depends on the rewards and the seed alone.
    """
    told = batch.turn_rewards.double().numpy().tobytes() + batch.outcome_rewards.double().numpy().tobytes()
    digest = hashlib.blake2b(told, digest_size=7, key=seed.to_bytes(8, "big")).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    drawn = torch.rand(batch.turn_mask.shape, generator=generator)
    order = drawn.masked_fill(~batch.turn_mask, 2.0).argsort(dim=1)  # turns that exist come first
    return replace(batch, turn_rewards=batch.turn_rewards.gather(1, order))


def at_the_end(batch: RewardBatch) -> RewardBatch:
    """The same rewards, with the sum of each trajectory's turn rewards at the last turn that exists."""
    last = batch.turn_mask & ~torch.nn.functional.pad(batch.turn_mask, (0, 1))[:, 1:]
    sums = batch.turn_rewards.nan_to_num(nan=0.0).sum(dim=1, keepdim=True)
    return replace(batch, turn_rewards=torch.where(last, sums, 0.0).masked_fill(~batch.turn_mask, torch.nan))
