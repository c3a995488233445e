"""The rewards of a batch of groups, as every credit rule takes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mt_grpo.errors import ConfigError


@dataclass(frozen=True)
class RewardBatch:
    """
    The rewards of a batch of groups.

    Args:
        turn_rewards (`Tensor`): Shape (B, K); NaN if the turn does not exist, or no turn reward applies to it.
        outcome_rewards (`Tensor`): Shape (B,); NaN if no outcome reward applies.
        turn_mask (`Tensor`): Shape (B, K), bool: whether the turn exists.
        result_mask (`Tensor`): Shape (B, K), bool: whether a tool result follows the turn.
        group_size (`int`): Rows i*G .. i*G+G-1 answer the same prompt.
        state_ids (`Tensor`, *optional*): Shape (B, K), int64: equal in the turns of a group that begin in the same
            state.
        state_scores (`Tensor`, *optional*): Shape (B, K): the `StateScore` of the state after each turn; NaN if there
            is none.
        turn_streams (`Tensor`, *optional*): Shape (S, B, K): each turn reward by itself, not weighted.
        outcome_streams (`Tensor`, *optional*): Shape (R, B): each outcome reward by itself, not weighted.
        stream_weights (`Tensor`, *optional*): Shape (S + R,): the weights of both.
        num_branches (`int`, *optional*, defaults to `1`): So many rows in a row continue the same trunk.
        branch_at (`int`, *optional*, defaults to `0`): Turns that these rows share.

    There are two kinds of NaN. An *absent* reward is one that does not apply to a trajectory which ran: the policy
    decided that. Rules that are unbiased count it as 0. A *failed* trajectory, which the engine or the environment
    ended, has no turns and no rewards: `failed` names it, and every rule leaves it out of its means.
    """

    turn_rewards: Tensor
    outcome_rewards: Tensor
    turn_mask: Tensor
    result_mask: Tensor
    group_size: int
    state_ids: Tensor | None = None
    state_scores: Tensor | None = None
    turn_streams: Tensor | None = None
    outcome_streams: Tensor | None = None
    stream_weights: Tensor | None = None
    num_branches: int = 1
    branch_at: int = 0

    @property
    def failed(self) -> Tensor:
        """The trajectories that the engine or the environment ended, shape (B,), bool."""
        return ~self.turn_mask.any(dim=1)

    def of_outcomes(self, rewards: Tensor | None = None) -> Tensor:
        """Outcome rewards, shape (B,), float64: 0 for an absent one, NaN for a failed trajectory."""
        rewards = self.outcome_rewards if rewards is None else rewards
        return rewards.double().nan_to_num(nan=0.0).masked_fill(self.failed, torch.nan)

    def of_turns(self, rewards: Tensor | None = None) -> Tensor:
        """Turn rewards, shape (B, K), float64: 0 for an absent one or no turn, NaN for a failed trajectory."""
        rewards = self.turn_rewards if rewards is None else rewards
        return rewards.double().nan_to_num(nan=0.0).masked_fill(self.failed[:, None], torch.nan)

    def at_turns(self, advantages: Tensor) -> Tensor:
        """Advantages, shape (B, K) or (B, 1), in the dtype of the rewards, rounded once; 0 where there is no turn."""
        return (advantages * self.turn_mask).to(self.turn_rewards.dtype)

    def needed(self, rule: str, field: str) -> Tensor:
        """
        A field that one rule cannot do without.

        Raises:
            ConfigError: If the batch lacks it.
        """
        value: Tensor | None = getattr(self, field)
        if value is None:
            raise ConfigError(
                f"The advantage estimator {rule!r} needs the `{field}` of a `RewardBatch`: fill them in."
            )
        return value
