"""Rewards that never apply and batches that teach nothing are said in words, once and at the end."""

from __future__ import annotations

from support.trainers import Letters, conversation, member

from mt_grpo.rewards import OutcomeReward, TurnReward
from mt_grpo.rollout import EngineError


class Never(TurnReward):
    def score(self, turn, trajectory, **row):
        return None


class Late(OutcomeReward):
    """Applies from the second batch on."""

    def score(self, trajectory, **row):
        return None if "-000000-" in trajectory.session[:14] else float(member(trajectory.session))


class Same(OutcomeReward):
    def score(self, trajectory, **row):
        return 0.9


def said(caplog):
    return [record.message for record in caplog.records if record.name == "mt_grpo.training.watch"]


def test_a_reward_that_never_applies_is_named_once_and_again(build, caplog):
    build(rewards=((Never(),), (Letters(),)), max_steps=3).train()
    first, last = said(caplog)
    assert "'Never' applied to none of the 4 trajectories of the first batch" in first
    assert "'Never' applied to no trajectory of this run's 3 batches" in last


def test_a_reward_that_applies_later_is_not_named_at_the_end(build, caplog):
    build(rewards=((), (Late(), Letters())), max_steps=2).train()
    (message,) = said(caplog)
    assert "'Late' applied to none of the 4 trajectories of the first batch" in message


def test_equal_groups_are_warned_of_once_and_counted_at_the_end(build, caplog):
    build(rewards=((), (Same(),)), max_steps=3).train()
    first, last = said(caplog)
    assert "members of each group earn the same" in first
    assert last.startswith("3 of 3 batches taught nothing")


def test_a_run_that_learns_says_nothing(build, caplog):
    build(rewards=((), (Letters(),))).train()
    assert not said(caplog)


def test_failed_conversations_are_not_taken_for_silent_rewards(build, caplog):
    def script(session, turn):
        return EngineError("gone") if session.startswith("train-000000") else conversation(session, turn)

    build(script, rewards=((), (Letters(),)), max_steps=2).train()
    assert not said(caplog)


def test_evaluation_is_not_watched(build, caplog):
    build(rewards=((), (Same(),)), num_generations_eval=1).evaluate()
    assert not said(caplog)
