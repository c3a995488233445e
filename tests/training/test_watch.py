"""What is wrong with rewards and credit is said in words: once, and where it can be counted at the end."""

from __future__ import annotations

import pytest
from support.trainers import Calls, Letters, conversation, member

from mt_grpo.rewards import OutcomeReward, TurnReward
from mt_grpo.rollout import EngineError
from mt_grpo.training.step_log.warnings import CUT


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
    return [record.message for record in caplog.records if record.name == "mt_grpo.training.step_log.warnings"]


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
    first, last = said(caplog)
    assert first.startswith("In a training batch: 4 of 4 conversations failed (engine_error), the first with: gone.")
    assert last.startswith("In 2 training batches: 4 of 8 conversations failed (engine_error)")


def test_nothing_learnt_follows_from_how_conversations_ended(build, caplog):
    build(rewards=((), (Same(),)), max_turn_length=2).train()
    cut, flat, *_ = said(caplog)
    assert "4 of 4 conversations were cut off by length: a turn used up `max_turn_length`" in cut
    assert flat.endswith("4 of 4 conversations were cut off by length.") and "question" not in flat


def test_evaluation_is_not_watched(build, caplog):
    build(rewards=((), (Same(),)), num_generations_eval=1).evaluate()
    assert not said(caplog)


class Share(TurnReward):
    """Its part of the turns of the whole trajectory."""

    def score(self, turn, trajectory, **row):
        return 1.0 / len(trajectory.turns)


def test_a_turn_reward_that_needs_the_future_is_named_once(build, caplog):
    build(rewards=((Calls(), Share()), (Letters(),)), advantage_estimator="reward_to_go", max_steps=3).train()
    (message,) = said(caplog)
    assert "'Share' of turns depends on later turns (turn " in message
    assert "so the credit rule 'reward_to_go' is biased" in message


@pytest.mark.parametrize("rule", ["grpo_mr", "leave_one_out"])
def test_rules_that_use_the_sum_take_any_turn_reward(build, caplog, rule):
    build(rewards=((Share(),), (Letters(),)), advantage_estimator=rule).train()
    assert not said(caplog)


def test_a_turn_reward_is_asked_again_for_a_few_trajectories(build):
    class Counts(TurnReward):
        asked = 0

        def score(self, turn, trajectory, **row):
            self.asked += 1
            return 0.5

    plain, checked = Counts(), Counts()
    build(rewards=((plain,), (Letters(),)), max_steps=4).train()
    build(rewards=((checked,), (Letters(),)), advantage_estimator="reward_to_go", max_steps=4).train()
    assert checked.asked == plain.asked + 2 * CUT


def test_the_bias_of_mt_grpo_is_said_once(build, caplog):
    build(rewards=((Calls(),), (Letters(),)), turn_advantage_coef=0.5, max_steps=3).train()
    (message,) = said(caplog)
    assert "in 1 of 4 trajectories a tool result follows more than one turn" in message
    assert "1 of 4 trajectories have no tool result, and weigh turn rewards by 1 instead of `turn_coef` 0.5" in message


def test_another_rule_is_not_called_biased(build, caplog):
    build(rewards=((Calls(),), (Letters(),)), advantage_estimator="reward_to_go").train()
    assert not said(caplog)
