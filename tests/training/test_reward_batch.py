"""What credit rules are given, and which groups have nothing to learn from, said exactly."""

import math

import pytest
import torch
from support.registered import keep
from support.trainers import SEARCH, Answered, Calls, batch, logged, member
from trl.trainer.utils import nanstd

from mt_grpo.credit import ADVANTAGE_ESTIMATORS, audit_rewards, estimate
from mt_grpo.rewards import OutcomeReward, Scores, StateScore, TurnReward, reward
from mt_grpo.rewards.base import REWARDS
from mt_grpo.runlog import read_trajectories
from mt_grpo.training.reward_batch import _state_ids, gather_rewards, share_of_equal_groups
from mt_grpo.trajectory import StopReason, Trajectory, Turn

NONE = math.nan


@pytest.mark.parametrize(
    ("rewards", "group_size", "weights", "share"),
    [
        ([[0.9]] * 6, 6, [1.0], 1.0),  # whatever their mean rounds to
        ([[0.1, 0.2, 0.3, 0.7], [0.7, 0.3, 0.2, 0.1]], 2, [1.0] * 4, 1.0),  # in whatever order terms come
        ([[1.0, 0.0], [0.0, 1.0]], 2, [1.0, 1.0], 1.0),
        ([[1.0, 0.0], [0.0, 1.0]], 2, [2.0, 1.0], 0.0),
        # members and groups that earn nothing do not count
        ([[1.0], [NONE], [1.0], [2.0], [NONE], [NONE]], 2, [1.0], 0.5),
        ([[NONE], [NONE]], 2, [1.0], NONE),
        ([[1.0], [2.0]], 1, [1.0], 1.0),
    ],
)
def test_groups_of_equal_weighted_sums_are_equal(rewards, group_size, weights, share):
    found = share_of_equal_groups(torch.tensor(rewards), torch.tensor(weights), group_size)
    assert found == pytest.approx(share, rel=0, abs=0, nan_ok=True)


def test_the_order_of_turns_and_rewards_makes_no_signal(build):
    """Each member earns the same four rewards, of two kinds with weights of their own, at other turns."""

    class Earned(TurnReward):
        def score(self, turn, trajectory, **row):
            return self.earned[member(trajectory.session)][turn.index]

    first = [[0.1, 97.3], [97.3, 0.1], [97.3, 0.1], [0.1, 97.3]]
    second = [[0.7, 0.2], [0.2, 0.7], [0.7, 0.2], [0.2, 0.7]]
    rewards = [type(name, (Earned,), {"earned": each})() for name, each in (("First", first), ("Second", second))]
    options = {"reward_weights": [0.3, 0.1], "advantage_estimator": "leave_one_out"}
    script = [SEARCH, "<answer>Lima</answer>"]
    trainer = build(lambda session, turn: script[turn], rewards=(rewards, ()), **options)
    assert not batch(trainer)["advantages"].any()


def test_a_conversation_without_a_turn_is_in_no_baseline():
    made = [Trajectory([], turns, stop_reason=StopReason.ENV_DONE) for turns in ([], [Turn(0, {})], [Turn(0, {})])]
    rewards, shown = gather_rewards(made, Scores([], [[5.0, 1.0, 2.0]]), torch.ones(1), 3)
    for rule in ("reward_to_go", "grpo_or", "grpo_mr", "mt_grpo"):
        assert estimate(rule, rewards)[:, 0].tolist() == pytest.approx([0.0, -(0.5**0.5), 0.5**0.5], abs=1e-3)
    assert audit_rewards(rewards, torch.zeros(3, 1)).rewards[0].applies == 1
    assert shown.tolist() == [[5.0], [1.0], [2.0]]  # as it was judged


@pytest.mark.parametrize("spread", [0.0, 1e-3])
def test_the_logged_share_is_exact(build, spread):
    class Nearly(OutcomeReward):
        def score(self, trajectory, **row):
            return 0.9 + spread * (member(trajectory.session) == 3)

    assert not torch.isclose(nanstd(torch.full((6,), 0.9)), torch.zeros(()))  # TRL's criterion
    trainer = build(rewards=((), (Nearly(),)), max_steps=1, num_generations=6, per_device_train_batch_size=6)
    trainer.train()
    assert logged(trainer, "frac_reward_zero_std") == [[float(spread == 0)]]


# What rules are given besides sums


class Words(TurnReward):
    def score(self, turn, trajectory, **row):
        return 10.0 + turn.index


@pytest.fixture
def progress(monkeypatch):
    keep(monkeypatch, REWARDS)

    @reward("progress")
    class Progress(StateScore):
        async def score(self, turn, trajectory, **row):
            return float(turn.index) if turn.has_result else None

    return "progress"


def test_records_of_state_scores_are_read(build, progress, tmp_path):
    trainer = build(advantage_estimator="state_baseline", state_score=progress)
    batch(trainer)
    found = [each["rewards"] for each in read_trajectories(tmp_path)]
    assert found == [each.rewards for each in trainer.batch.trajectories] and "state" in found[0]


def test_rules_are_given_streams_states_and_scores(build, progress):
    """Member 0 searches twice, 1 once, 2 not at all, 3 writes a malformed call first."""
    options = {"reward_weights": [1.0, 0.1, 2.0], "advantage_estimator": "state_baseline", "state_score": progress}
    trainer = build(rewards=((Calls(), Words()), (Answered(),)), **options)
    output = batch(trainer)
    rewards = trainer.batch.rewards
    calls, words = rewards.turn_streams
    expected = torch.tensor([[1, 1, NONE], [1, NONE, NONE], [NONE, NONE, NONE], [0, 1, NONE]])
    torch.testing.assert_close(calls, expected, equal_nan=True)
    assert words[0].tolist() == [10.0, 11.0, 12.0] and words[2, 1].isnan()
    torch.testing.assert_close(rewards.stream_weights, torch.tensor([1.0, 0.1, 2.0]))
    torch.testing.assert_close(rewards.outcome_streams[0] * 2, rewards.outcome_rewards)
    weighted = (rewards.turn_streams * torch.tensor([1.0, 0.1])[:, None, None]).nansum(dim=0)
    torch.testing.assert_close(rewards.turn_rewards.nan_to_num(), weighted, check_dtype=False)
    states = rewards.state_ids
    assert states[:, 0].tolist() == [0] * 4  # the prompt
    assert states[0, 1] == states[0, 2] == states[1, 1] == states[3, 2]  # the same result
    assert states[3, 1] not in (0, states[0, 1])  # an error message
    expected = torch.tensor([[0, 1, NONE], [0, NONE, NONE], [NONE, NONE, NONE], [NONE, 1, NONE]])
    torch.testing.assert_close(rewards.state_scores, expected, equal_nan=True)
    assert trainer.batch.trajectories[0].rewards["state"] == {"progress": [0.0, 1.0, None]}
    assert output["advantages"].isfinite().all()
    rules = [name for name, rule in ADVANTAGE_ESTIMATORS.items() if rule.__module__.startswith("mt_grpo.")]
    assert all(estimate(name, rewards).any() for name in rules)


def test_a_state_is_what_the_environment_said_last():
    def made(*replies):
        turns = [Turn(index, {}, replies=list(reply)) for index, reply in enumerate(replies)]
        return _state_ids(Trajectory([], turns))

    said = {"role": "tool", "content": "Lima"}
    assert made() == [] and made([said]) == [0]
    first = made([said | {"tool_call_id": "a"}], [], [])
    second = made([{"role": "user", "content": "no"}], [said | {"tool_call_id": "b"}], [said])
    assert first[1] == second[2] and first[1] not in (0, first[2], second[1])
    assert all(-(2**63) <= number < 2**63 for number in first + second)
