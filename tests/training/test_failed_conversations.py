"""A conversation that the engine or the environment ended says nothing about the policy, and teaches it nothing."""

from __future__ import annotations

import json

import pytest
import torch
from support.models import CPU_RUN, build_model, lookup
from support.trainers import SEARCH, batch, member

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rewards import OutcomeReward
from mt_grpo.rollout import EngineError, ScriptedEngine
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer


def failing(members, turn_of_failure, answers=("Lima",) * 8):
    """Conversations of a search and an answer, of which some lose their engine before they sample a turn."""

    def script(session, turn):
        if member(session) in members and turn == turn_of_failure:
            return EngineError("the server is gone")
        return [SEARCH, f"<answer>{answers[member(session)]}</answer>"][turn]

    return script


@pytest.mark.parametrize("turn", [0, 1])
def test_equal_members_learn_nothing_though_one_lost_its_engine(build, turn):
    trainer = build(failing({1}, turn))
    inputs = batch(trainer)
    assert [len(trajectory.turns) for trajectory in trainer.batch.trajectories] == [2, turn, 2, 2]
    assert not inputs["advantages"].any()
    trained = inputs["completion_mask"] * inputs["tool_mask"]
    assert trained.sum(dim=1).bool().tolist() == [True, False, True, True]
    assert inputs["num_items_in_batch"] == trained[[0, 2, 3]].sum()


def test_the_baseline_is_of_those_that_did_not_fail(build):
    answers = ("a", "bbbbbbb", "ccc", "ddddd")  # rewards 1.1, -, 1.3, 1.5
    trainer = build(failing({1}, 1, answers))
    inputs = batch(trainer)
    assert trainer.batch.rewards.outcome_rewards.isnan().tolist() == [False, True, False, False]
    assert trainer.batch.rewards.turn_mask.any(dim=1).tolist() == [True, False, True, True]
    z = 0.2 / (0.2 + 1e-4)  # the mean of 1.1, 1.3 and 1.5 is 1.3, their deviation 0.2; all turn rewards are equal
    for row, expected in ((0, -z), (1, 0.0), (2, 0.0), (3, z)):
        mask = inputs["completion_mask"][row].bool()
        torch.testing.assert_close(
            inputs["advantages"][row][mask], torch.full((int(mask.sum()),), expected), rtol=1e-4, atol=1e-6
        )


def test_the_one_member_that_is_left_learns_nothing(build):
    inputs = batch(build(failing({0, 1, 2}, 1)))
    assert not inputs["advantages"].any()


def test_failures_are_counted_and_leave_the_means_of_rewards(build, tmp_path):
    build(failing({1, 2}, 1), max_steps=1).train()
    logged = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert logged["rollouts/failed"] == 0.5
    assert logged["rewards/Answered/mean"] == pytest.approx(1.4)
    assert logged["rewards/Calls/mean"] == 1.0
    assert logged["frac_reward_zero_std"] == 1.0


def test_an_environment_that_raises_leaves_loss_and_baseline_too(tmp_path, tokenizer, questions):
    class Broken(MultiTurnToolEnv):
        async def step(self, turn):
            if self.session.endswith("2") and turn.index == 1:
                raise ZeroDivisionError("by the user")
            return await super().step(turn)

    class Answered(OutcomeReward):
        def score(self, trajectory, **row):
            return float(trajectory.answer is not None)

    trainer = MTGRPOEnvTrainer(
        build_model(tokenizer),
        Broken([lookup], protocol="learnt_tags", max_steps=3),
        [],
        [Answered()],
        MTGRPOConfig(str(tmp_path), max_completion_length=400, **CPU_RUN),
        train_dataset=questions,
        engine=ScriptedEngine(tokenizer, failing(set(), 0)),
        processing_class=tokenizer,
    )
    inputs = batch(trainer)
    assert [trajectory.stop_reason.value for trajectory in trainer.batch.trajectories].count("env_error") == 1
    assert not inputs["advantages"].any()
    assert not (inputs["completion_mask"] * inputs["tool_mask"])[2].any()


def test_a_timeout_is_the_policys_doing_and_stays(build):
    trainer = build(rollout_timeout=1e-9)
    batch(trainer)
    assert "timeout" in {trajectory.stop_reason.value for trajectory in trainer.batch.trajectories}
    assert not trainer.batch.rewards.outcome_rewards.isnan().any()


def test_rewards_skip_failures_and_extra_columns_fit(build):
    """A plain TRL function that reads the last message would fail on a conversation without any."""
    seen = []

    def words(completions, log_extra, **kwargs):
        seen.append(len(completions))
        texts = [completion[-1]["content"] for completion in completions]
        log_extra("text", texts)
        return [float(len(text)) for text in texts]

    trainer = build(failing({1}, 0), rewards=((), (words,)))
    batch(trainer)
    assert seen == [3]
    column = list(trainer._logs["extra"]["text"])
    assert [bool(text) for text in column] == [True, False, True, True]
    assert trainer.batch.trajectories[1].rewards == {"outcome": {"words": None}, "turn": {}}


def test_a_batch_of_failures_asks_no_reward(build):
    def never(completions, **kwargs):
        raise AssertionError

    inputs = batch(build(failing({0, 1, 2, 3}, 0), rewards=((), (never,))))
    assert not inputs["advantages"].any()
