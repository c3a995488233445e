"""What a credit rule is given: the rewards of a batch of groups, and how values compare within a group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mt_grpo.credit.normalisation import Scale, centre, largest_deviation
from mt_grpo.errors import ConfigError


class MissingField(ConfigError):
    """A rule needs a field of `RewardBatch` that is not filled in."""

    def __init__(self, rule: str, field: str) -> None:
        super().__init__(f"The advantage estimator {rule!r} needs the `{field}` of a `RewardBatch`: fill them in.")
        self.field = field


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
        names (`tuple[str, ...]`, *optional*): Of the S turn rewards, then of the R outcome rewards.

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
    names: tuple[str, ...] = ()

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

    def needed(self, rule: str, field: str) -> Tensor:
        """
        A field that one rule cannot do without.

        Raises:
            MissingField: If the batch lacks it.
        """
        value: Tensor | None = getattr(self, field)
        if value is None:
            raise MissingField(rule, field)
        return value

    def part_names(self, kind: Literal["turn", "outcome"]) -> list[str]:
        """Of each reward of a kind, the name of what it earns: `turn reward NAME`; a single outcome is `outcome`."""
        streams = self.turn_streams if kind == "turn" else self.outcome_streams
        count = 0 if streams is None else len(streams)
        if kind == "outcome" and count < 2:
            return ["outcome"]
        names = self.names[:count] if kind == "turn" else self.names[-count:]
        whole = "turn reward" if kind == "turn" else "outcome"
        return [f"{whole} {name}" for name in names or range(1, count + 1)]

    def against_group(
        self, values: Tensor, baseline: str, scale_rewards: Scale = "group", scale: Tensor | None = None
    ) -> Tensor:
        """
        Values of shape (B, K) minus the mean of their turn in the group, divided by `scale`, (B, 1), or else by the
        largest of their deviations over turns.
        """
        if scale is None:
            scale = largest_deviation(values, self.group_size, scale_rewards)
        return self.term(centre(values, self.group_size) / scale, values, scale, baseline)

    def against_others(
        self, values: Tensor, baseline: str, scale_rewards: Scale = "group", scale: Tensor | None = None
    ) -> Tensor:
        """Values of trajectories, (B, 1), minus the mean of the other members, divided by their deviation or scale."""
        others = (~self.failed).view(-1, self.group_size).sum(dim=1).repeat_interleave(self.group_size)[:, None] - 1
        if scale is None:
            scale = largest_deviation(values, self.group_size, scale_rewards)
        centred = centre(values, self.group_size) / scale * (others + 1) / others.clamp(min=1)
        return self.term(centred, values, scale, baseline)

    def term(
        self,
        value: Tensor,
        earned: Tensor,
        scale: Tensor,
        baseline: str,
        others: Mapping[str, Tensor] | None = None,
        scale_told: bool = True,
    ) -> Tensor:
        """
        A summand of the advantage. It is `value`, as the rule computed it; `mt_grpo.credit.explain` takes it apart.

        Args:
            value (`Tensor`): What the rule goes on with: `earned` less a baseline, divided by `scale`.
            earned (`Tensor`): What trajectories earned; linear in the rewards.
            scale (`Tensor`): What it is divided by.
            baseline (`str`): The name of what is taken off.
            others (`dict[str, Tensor]`, *optional*): What else is in it, by name, not divided.
            scale_told (`bool`, *optional*, defaults to `True`): Whether a turn of the advantage has one such scale.
        """
        return value

    def advantages(self, total: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A sum of terms as advantages, (B, K), 0 where a turn does not exist; in the dtype of the rewards."""
        return ((0.0 + total) * self.turn_mask).to(dtype or self.turn_rewards.dtype)
