"""Which groups have nothing to learn from, said exactly."""

from __future__ import annotations

import math

import pytest
import torch
from support.trainers import member
from trl.trainer.utils import nanstd

from mt_grpo.rewards import OutcomeReward
from mt_grpo.training.reward_batch import share_of_equal_groups

NONE = math.nan


def share(columns, group_size, weights=None):
    columns = torch.tensor(columns)
    return share_of_equal_groups(columns, torch.tensor(weights or [1.0] * columns.shape[1]), group_size)


def test_equal_rewards_are_equal_whatever_their_mean_rounds_to():
    rewards = [[0.9]] * 6
    assert not torch.isclose(nanstd(torch.tensor(rewards)), torch.zeros(()))  # TRL's criterion
    assert share(rewards, 6) == 1.0


def test_a_sum_is_the_same_in_whatever_order_its_terms_come():
    assert share([[0.1, 0.2, 0.3, 0.7], [0.7, 0.3, 0.2, 0.1]], 2) == 1.0


def test_weights_decide_what_is_equal():
    assert share([[1.0, 0.0], [0.0, 1.0]], 2) == 1.0
    assert share([[1.0, 0.0], [0.0, 1.0]], 2, [2.0, 1.0]) == 0.0


def test_members_and_groups_that_earn_nothing_do_not_count():
    assert share([[1.0], [NONE], [1.0], [2.0], [NONE], [NONE]], 2) == 0.5
    assert math.isnan(share([[NONE], [NONE]], 2))
    assert share([[1.0], [2.0]], 1) == 1.0


@pytest.mark.parametrize("spread", [0.0, 1e-3])
def test_the_logged_share_is_exact(build, spread):
    class Nearly(OutcomeReward):
        def score(self, trajectory, **row):
            return 0.9 + spread * (member(trajectory.session) == 3)

    trainer = build(rewards=((), (Nearly(),)), max_steps=1, num_generations=6, per_device_train_batch_size=6)
    trainer.train()
    (row,) = [row for row in trainer.state.log_history if "frac_reward_zero_std" in row]
    assert row["frac_reward_zero_std"] == float(spread == 0)
