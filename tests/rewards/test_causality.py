"""Turn rewards that later turns change are found; the built-in ones are none."""

import itertools
import random

from support.reward_batches import score

from mt_grpo.concurrency import run
from mt_grpo.rewards import REWARDS, StateScore, TurnReward, cut_after, load_rewards, score_cut, score_trajectories
from mt_grpo.token_tree import TokenTree
from mt_grpo.trajectory import StopReason, ToolCall, Trajectory, Turn

CALLS = [
    ToolCall("search", {}, "Lima is in Peru", executed=True),
    ToolCall("search", {}, "Cusco", executed=True),
    ToolCall("search", {}, "HTTP 500", "HTTP 500", executed=True),
    ToolCall("serach", {}, "no such tool", "no such tool"),
]
BUILT_IN = [name for name, entry in REWARDS.items() if isinstance(entry, type) and issubclass(entry, TurnReward)]


def make_turn(index, draw):
    calls = draw.choices(CALLS, k=draw.choice([0, 1, 1, 2]))
    error = "not JSON" if not calls and draw.random() < 0.5 else None
    reward, answer = draw.choice([None, draw.random()]), draw.choice([None, "Lima"])
    text = {"role": "assistant", "content": draw.choice(["", "a", "abc"])}
    return Turn(index, text, calls, error=error, reward=reward, answer=answer)


def make_trajectory(num_turns, seed=0):
    draw = random.Random(seed)
    turns = [make_turn(index, draw) for index in range(num_turns)]
    tree = TokenTree()
    for index in range(num_turns):
        tree.add_turn([7, *range(100, 100 + 2 * index)], [100 + 2 * index], [-0.1 * index])
    info = {"env_rewards": {"won": 1.0}, "info": {"moves": num_turns}, "seconds": 3.0, "row": {"answer": "Lima"}}
    info["answer_logprobs"] = {"information_gain": [draw.choice([None, -1.0, -2.0]) for _ in turns]}
    info["teacher_log_ratios"] = [draw.choice([None, -1.0, 0.5]) for _ in turns]
    return Trajectory([], turns, tree, "Lima", StopReason.ANSWERED, session=f"s-{seed}", **info)


def found(funcs, *trajectories):
    score(funcs, [], list(trajectories))
    pairs = [(trajectory, index) for trajectory in trajectories for index in range(len(trajectory.turns))]
    return run(score_cut(funcs, pairs))


def reward(name, of, base=TurnReward):
    return type(name, (base,), {"score": lambda self, turn, trajectory, **row: of(turn, trajectory)})()


def test_built_in_turn_rewards_ignore_later_turns():
    assert set(BUILT_IN) == {
        *("tool_execution_reward_func", "exist_answer_in_search_results", "step_reward", "information_gain"),
        "teacher_agreement",
    }
    trajectories = [make_trajectory(1 + seed % 6, seed) for seed in range(40)]
    assert found(load_rewards(BUILT_IN, "turn"), *trajectories) == {}
    for name in BUILT_IN:
        values = [value for one in trajectories for value in one.rewards["turn"][name]]
        assert len(set(values)) > 2  # they had something to say


class Ending(TurnReward):
    async def score(self, turn, trajectory, **row):
        return float(trajectory.stop_reason.is_truncated)


class Text(TurnReward):
    async def score(self, turn, trajectory, **row):
        return float(len(turn.text))


def share_of_calls(turn, trajectory):
    calls = sum(len(each.tool_calls) for each in trajectory.turns)
    return len(turn.tool_calls) / calls if calls else None


def test_rewards_that_depend_on_later_turns_are_found():
    share = reward("Share", share_of_calls)
    duration = reward("Duration", lambda turn, trajectory: None if trajectory.seconds > 2 else 1.0)
    trajectories = [make_trajectory(4, seed=1), make_trajectory(5, seed=2)]
    result = found([share, Ending(), duration, Text()], *trajectories)
    assert set(result) == {"Share", "Ending", "Duration"}
    assert result["Duration"] == "turn 1 of 4 of trajectory 's-1' earned None, and 1.0 with the later turns cut off"
    assert "earned 0.0, and the failure AttributeError(" in result["Ending"]


def test_a_state_score_is_held_to_the_same():
    left = reward("Left", lambda turn, trajectory: float(len(trajectory.turns) - turn.index), StateScore)
    trajectory = make_trajectory(3)
    run(score_trajectories([Text()], [], [trajectory], state_scores=[left]))
    assert set(run(score_cut([Text(), left], [(trajectory, 0), (trajectory, 2)]))) == {"Left"}


def test_a_reward_that_draws_is_not_accused():
    draws, calls = itertools.count(), itertools.count()

    def once(turn, trajectory):
        if next(calls) > 2:
            raise RuntimeError("called again")
        return 1.0

    rewards = [reward("Draws", lambda turn, trajectory: float(next(draws))), reward("Once", once)]
    assert found(rewards, make_trajectory(3)) == {}


def test_a_cut_trajectory_is_what_was_there_at_the_time():
    whole = make_trajectory(4, seed=3)
    before = whole.to_dict()
    cut = cut_after(whole, 1)
    assert cut.turns == whole.turns[:2] and cut.answer == whole.turns[1].answer
    assert (cut.stop_reason, cut.env_rewards, cut.info, cut.seconds) == (None, {}, {}, 0.0)
    assert cut.row is whole.row and cut.session == whole.session
    assert cut.tree == make_trajectory(2).tree
    assert whole.to_dict() == before


def test_a_cut_tree_keeps_split_actions_and_rewritten_pasts():
    turns = [([1, 2], [3, 4, 5], [-0.1, -0.2, -0.3]), ([1, 2, 3, 9], [6], [-0.4]), ([1, 8], [7], [-0.5])]
    trees = [TokenTree() for _ in turns]
    for index, tree in enumerate(trees):
        for turn in turns[: index + 1]:
            tree.add_turn(*turn)
    trajectory = Trajectory([], [Turn(index, {}) for index in range(3)], trees[-1])
    assert [cut_after(trajectory, index).tree for index in range(3)] == trees


def test_a_teacher_that_knows_the_end_makes_its_reward_late():
    ratio = reward("Ratio", lambda turn, trajectory: trajectory.teacher_log_ratios[turn.index])
    trajectory = make_trajectory(1)
    trajectory.teacher_log_ratios = [0.5]
    assert found([ratio], trajectory) == {}
    assert set(run(score_cut([ratio], [(trajectory, 0)], teacher_knows_end=True))) == {"Ratio"}
