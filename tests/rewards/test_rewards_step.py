"""The reward that came with the conversation."""

from mt_grpo.rewards import load_rewards, step_reward
from mt_grpo.trajectory import Trajectory, Turn


def test_the_reward_of_a_turn_is_what_it_was_given():
    turns = [Turn(0, {}, reward=0.5), Turn(1, {}), Turn(2, {}, reward=-1.0)]
    trajectory = Trajectory([], turns=turns)
    assert [step_reward.score(turn, trajectory) for turn in turns] == [0.5, None, -1.0]


def test_it_is_a_turn_reward_by_name():
    (loaded,) = load_rewards(["step_reward"], "turn")
    assert loaded.score(Turn(0, {}, reward=2.0), Trajectory([])) == 2.0
    assert loaded.name == "step_reward"


def test_the_reward_of_a_turn_survives_a_file():
    trajectory = Trajectory([], turns=[Turn(0, {}, reward=0.25)])
    assert Trajectory.from_dict(trajectory.to_dict()).turns[0].reward == 0.25
