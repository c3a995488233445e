"""Tools with a state, in whole conversations."""

from __future__ import annotations

import asyncio

import pytest
from support.stateful_tools import Guess, schema

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rewards import env_reward, step_reward
from mt_grpo.rollout import RolloutLimits, RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.trajectory import StopReason

CALL = '<tool>{{"name": "guess", "args": {{"number": {}}}}}</tool>'
TURNS = [CALL.format(6), CALL.format(3) + CALL.format(2), "<answer>7</answer>"]


def converse(tokenizer, tool, turns=TURNS, limits=None, truth=7, **options):
    engine = ScriptedEngine(tokenizer, lambda session, turn: turns[turn] + "<|im_end|>")
    runner = RolloutRunner(MultiTurnToolEnv([tool], protocol="learnt_tags", **options), engine, limits)
    row = {"prompt": "Guess.", "tools_kwargs": {"guess": {"create_kwargs": {"ground_truth": truth}}}}
    request = RolloutRequest("Guess.", "0", row=row)
    (trajectory,) = asyncio.run(runner.run([request], SamplingParams()))
    return trajectory


def test_a_turn_has_the_step_rewards_of_its_calls(tokenizer):
    tool = Guess({}, schema())
    trajectory = converse(tokenizer, tool)
    assert trajectory.stop_reason == StopReason.ANSWERED
    assert [step_reward.score(turn, trajectory) for turn in trajectory.turns] == [0.0, -0.1, None]
    assert env_reward.score(trajectory) == pytest.approx(1 / 6)
    assert trajectory.info["tool_metrics"] == {"guess": [{"distance": 1}, {"distance": 4}, {"distance": 5}]}
    assert tool._instance_dict == {}


def test_a_conversation_cut_off_has_the_rewards_of_its_tools(tokenizer):
    trajectory = converse(tokenizer, Guess({}, schema()), limits=RolloutLimits(max_completion_tokens=60))
    assert trajectory.stop_reason == StopReason.TOKEN_BUDGET
    assert trajectory.env_rewards == {"guess": 0.5}


def test_a_state_that_cannot_be_made_is_told_to_the_model(tokenizer):
    class Broken(Guess):
        async def create(self, instance_id=None, **kwargs):
            raise ValueError("no room")

    trajectory = converse(tokenizer, Broken({}, schema()))
    assert trajectory.stop_reason == StopReason.ANSWERED
    made = trajectory.turns[0].tool_calls[0]
    assert made.result == "Error: ToolStateError: `create` of the tool 'guess' failed: ValueError: no room."
    assert trajectory.turns[0].replies and env_reward.score(trajectory) is None
