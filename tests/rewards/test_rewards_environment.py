"""Rewards that the environment gave, and environments that rewards look at."""

from __future__ import annotations

import pytest
from support.scoring import score

from mt_grpo.rewards import EnvReward, FunctionReward, load_rewards
from mt_grpo.trajectory import StopReason, Trajectory


@pytest.mark.parametrize(
    ("key", "given", "value"),
    [
        (None, {"won": 1.0, "speed": 0.5}, 1.5),
        (None, {}, None),
        ("won", {"won": 1.0, "speed": 0.5}, 1.0),
        ("lost", {"won": 1.0}, None),
    ],
)
def test_what_the_environment_gave_is_a_reward(key, given, value):
    assert EnvReward(key).score(Trajectory([], env_rewards=given)) == value


def test_one_of_its_rewards_has_a_name_of_its_own():
    first, second = load_rewards(["env_reward", EnvReward("won")], "outcome")
    assert (first.name, second.name) == ("env_reward", "env_reward/won")


def test_a_trl_function_sees_the_environments_that_it_asks_for():
    def named(prompts, completions, completion_ids, environments):
        return [float(environment) for environment in environments]

    def any_of_them(prompts, completions, **kwargs):
        return [float(sum(kwargs.get("environments", [7.0])))] * len(completions)

    def neither(prompts, completions, completion_ids):
        return [0.0] * len(completions)

    functions = [FunctionReward(function) for function in (named, any_of_them, neither)]
    batch = [Trajectory([], stop_reason=StopReason.ENV_DONE, environment=value) for value in (1, 2)]
    assert score([], functions, batch).outcome == [[1.0, 2.0], [3.0, 3.0], [0.0, 0.0]]
    plain = [Trajectory([], stop_reason=StopReason.ENV_DONE)]
    assert score([], functions[1:], plain).outcome == [[7.0], [0.0]]


def test_a_trl_function_sees_the_user_s_own_environments():
    class Standing:
        user_environment = 3.0

    def named(completions, environments, **columns):
        return environments

    trajectory = Trajectory([], environment=Standing(), stop_reason=StopReason.ANSWERED)
    assert score([], [FunctionReward(named)], [trajectory]).outcome == [[3.0]]
