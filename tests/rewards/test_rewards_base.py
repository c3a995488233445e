import asyncio
import functools
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from support.scoring import score

import mt_grpo.rewards as rewards
from mt_grpo.concurrency import run
from mt_grpo.errors import UserError
from mt_grpo.imports import ImportPathError
from mt_grpo.rewards import (
    REWARDS,
    FunctionReward,
    OutcomeReward,
    RewardError,
    RewardFunc,
    RewardListError,
    StateScore,
    TurnReward,
    load_rewards,
    score_trajectories,
)
from mt_grpo.rewards.base import KINDS, ScoreFunction, completion_ids
from mt_grpo.trajectory import StopReason, Trajectory, Turn


def make_trajectory(*texts, session="s-0", **row):
    turns = [Turn(index, {"role": "assistant", "content": text}) for index, text in enumerate(texts)]
    return Trajectory([{"role": "user", "content": "q"}], turns, session=session, row=row)


class Length(TurnReward):
    def score(self, turn, trajectory, **row):
        return float(len(turn.text)) or None


class NumTurns(OutcomeReward):
    weight = 0.5
    name = "num_turns"

    async def score(self, trajectory, *, bonus, **row):
        return len(trajectory.turns) + bonus


class Returns(OutcomeReward):
    def __init__(self, value):
        self.value = value

    def score(self, trajectory, **row):
        return self.value


# What a reward is


def test_a_reward_is_named_after_its_class_by_default():
    class Child(NumTurns):
        pass

    child = Child()
    assert (Length().name, NumTurns().name, child.name) == ("Length", "num_turns", "Child")
    child.name = "mine"
    assert (child.name, Child.name) == ("mine", "Child")
    assert (Length().weight, NumTurns().weight) == (1.0, 0.5)


@pytest.mark.parametrize("abstract", [RewardFunc, TurnReward, OutcomeReward])
def test_a_reward_without_score_cannot_be_made(abstract):
    with pytest.raises(TypeError, match="abstract"):
        type("NoScore", (abstract,), {})()


# Scoring


def test_scores_are_by_reward_trajectory_turn_and_recorded():
    batch = [make_trajectory("ab", "", bonus=0.5), make_trajectory("c", bonus=2)]
    scores = score([Length()], [NumTurns(), Returns(None)], batch)
    assert scores.turn == [[[2.0, None], [1.0]]]
    assert scores.outcome == [[2.5, 3.0], [None, None]]
    assert batch[0].rewards == {"outcome": {"num_turns": 2.5, "Returns": None}, "turn": {"Length": [2.0, None]}}
    assert batch[1].rewards == {"outcome": {"num_turns": 3.0, "Returns": None}, "turn": {"Length": [1.0]}}


def test_state_scores_are_apart_from_rewards():
    batch = [make_trajectory("a", "b"), make_trajectory("c")]
    batch[1].stop_reason = StopReason.ENGINE_ERROR
    scores = run(score_trajectories([Length()], [], batch, state_scores=[Progress()]))
    assert scores.turn == [[[1.0, 1.0], [None]]] and scores.state == [[[0.0, 1.0], [None]]]
    assert batch[0].rewards == {"outcome": {}, "turn": {"Length": [1.0, 1.0]}, "state": {"Progress": [0.0, 1.0]}}


def test_a_batch_without_a_trajectory_calls_no_reward():
    scores = score([Length()], [NumTurns(), FunctionReward(len)], [])
    assert scores.turn == [[]] and scores.outcome == [[], []]


def test_without_rewards_there_are_no_scores():
    trajectory = make_trajectory("a")
    scores = score([], [], [trajectory])
    assert (scores.turn, scores.outcome) == ([], [])
    assert trajectory.rewards == {"outcome": {}, "turn": {}}


def test_async_rewards_run_concurrently():
    # every call holds until all of them have begun: run in turn they would never end
    begun, num_calls = [], 8
    all_begun = asyncio.Event()

    async def meet():
        begun.append(1)
        if len(begun) == num_calls:
            all_begun.set()
        await asyncio.wait_for(all_begun.wait(), timeout=30)
        return 1.0

    class MeetTurn(TurnReward):
        async def score(self, turn, trajectory, **row):
            return await meet()

    class MeetOutcome(OutcomeReward):
        async def score(self, trajectory, **row):
            return await meet()

    async def plain(completions, **columns):
        return [await meet()] * len(completions)

    batch = [make_trajectory("a", "b"), make_trajectory("c")]
    outcome_funcs = [MeetOutcome(), MeetOutcome(), FunctionReward(plain)]  # 3 turns + 2 + 2 + 1 batch
    scores = asyncio.run(score_trajectories([MeetTurn()], outcome_funcs, batch))
    assert scores.turn == [[[1.0, 1.0], [1.0]]] and scores.outcome == [[1.0, 1.0]] * 3


def test_a_function_that_returns_nan_is_told_to_return_none():
    """TRL takes NaN for `None`; a mistake in a computation looks the same."""

    def ratio(completions, **columns):
        return [math.nan] * len(completions)

    with pytest.raises(RewardError, match="'ratio' failed with ValueError: it returned nan: return `None` where"):
        score([], [FunctionReward(ratio)], [make_trajectory()])


def test_no_reward_is_asked_about_a_trajectory_that_failed():
    class Words(TurnReward):
        def score(self, turn, trajectory, **row):
            return 1.0

    batch = [make_trajectory("a", "b"), make_trajectory("c")]
    batch[0].stop_reason, batch[1].stop_reason = StopReason.ENV_ERROR, StopReason.TIMEOUT
    scores = score([Words()], [Returns(1.0)], batch)
    assert scores.turn == [[[None, None], [1.0]]] and scores.outcome == [[None, 1.0]]
    assert batch[0].rewards == {"turn": {"Words": [None, None]}, "outcome": {"Returns": None}}


@pytest.mark.parametrize("value", [True, 1, np.float32(1.0)])
def test_whatever_reads_as_a_number_becomes_a_float(value):
    [[result]] = score([], [Returns(value)], [make_trajectory()]).outcome
    assert result == 1.0 and type(result) is float


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (math.nan, "ValueError: it returned nan: return `None` where it does not apply"),
        (math.inf, "ValueError: it returned inf, which is not a finite number"),
        (-math.inf, "ValueError: it returned -inf, which is not a finite number"),
        ("good", "TypeError: it returned 'good', which is text: return a number"),
        ("1.0", "TypeError: it returned '1.0', which is text: return a number"),
        ([1.0], "TypeError: it returned [1.0]: return a number"),
        (10**400, "OverflowError: int too large"),
    ],
)
def test_a_value_that_is_no_finite_number_is_an_error(value, reason):
    with pytest.raises(RewardError) as caught:
        score([], [Returns(value)], [make_trajectory(session="s-7", answer="Lima")])
    message = str(caught.value)
    assert message.startswith(f"The reward 'Returns' failed with {reason}")
    assert message.endswith("""on trajectory 's-7', row {"answer": "Lima"}.""")


@pytest.mark.parametrize("value", [None, 1.0, "1.0", {"s": 1.0}])
def test_a_function_that_returns_no_list_is_told_what_to_return(value):
    with pytest.raises(RewardError, match="it returned .*: return a list of numbers, one for each of 1 completions"):
        score([], [FunctionReward(lambda completions, **columns: value)], [make_trajectory()])


def test_a_function_may_be_a_generator_as_in_trl():
    def lengths(completions, **columns):
        yield from (2.0 for _ in completions)

    assert score([], [FunctionReward(lengths)], [make_trajectory()]).outcome == [[2.0]]


class Raises(TurnReward):
    def score(self, turn, trajectory, **row):
        if turn.text == "bad":
            raise KeyError("no\nsuch key")
        return 0.0


def test_a_reward_that_raises_names_reward_trajectory_and_row():
    batch = [make_trajectory("good", session="s-1"), make_trajectory("good", "bad", session="s-2", question="ü?")]
    with pytest.raises(RewardError) as caught:
        score([Raises()], [], batch)
    line = Raises.score.__code__.co_firstlineno + 2
    assert str(caught.value) == (
        "The reward 'Raises' failed with KeyError: 'no\\nsuch key' on trajectory 's-2', row {\"question\": \"ü?\"}, "
        f"in {__file__}, line {line}, in score."
    )
    assert isinstance(caught.value.__cause__, KeyError)
    assert batch[0].rewards == {}


def test_a_message_of_several_lines_becomes_one():
    def several_lines(**columns):
        raise RuntimeError("one\n  two")

    with pytest.raises(RewardError, match="failed with RuntimeError: one two on"):
        score([], [FunctionReward(several_lines)], [make_trajectory()])


def test_a_missing_column_names_the_column():
    with pytest.raises(RewardError, match="'num_turns' failed with TypeError: .*'bonus'"):
        score([], [NumTurns()], [make_trajectory("a")])


def test_a_long_row_is_cut_at_200_characters():
    with pytest.raises(RewardError) as caught:
        score([], [Returns(math.inf)], [make_trajectory(text="x" * 400, thing=object())])
    row = str(caught.value).partition(", row ")[2].removesuffix(".")
    assert row == '{"text": "' + "x" * 189 + "…" and len(row) == 200


def test_the_first_failure_is_reported_after_the_rest_ended():
    ended = []

    class Slow(OutcomeReward):
        async def score(self, trajectory, *, waits, **row):
            for _ in range(waits):
                await asyncio.sleep(0)
            ended.append(trajectory.session)
            raise ValueError("late" if waits else "soon")

    batch = [make_trajectory(session="a", waits=3), make_trajectory(session="b", waits=0)]
    with pytest.raises(RewardError, match="late on trajectory 'a'"):
        score([], [Slow()], batch)
    assert ended == ["b", "a"]


# Plain TRL reward functions


def trl_trajectory(session="s-0", **row):
    trajectory = make_trajectory("a", session=session, **row)
    trajectory.turns[0].replies = [{"role": "tool", "content": "r"}]
    trajectory.tree.add_turn([1, 2], [3], [-0.5])
    trajectory.tree.add_turn([1, 2, 3, 4], [5], [-0.5])
    return trajectory


@pytest.mark.parametrize("is_async", [False, True])
def test_a_trl_function_is_called_once_with_what_trl_passes(is_async):
    calls = []

    def plain(**kwargs):
        calls.append(kwargs)
        return [0.5, None]

    async def plain_async(**kwargs):
        return plain(**kwargs)

    rows = [{"prompt": "p", "completion": "c", "completion_ids": 0, "answer": name, "state": 1} for name in "xy"]
    batch = [trl_trajectory(**row) for row in rows]
    reward = FunctionReward(plain_async if is_async else plain)
    assert score([], [reward], batch, extra={"state": "step 3", "log_metric": print}).outcome == [[0.5, None]]
    completion = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "r"}]
    assert calls == [
        {
            "prompts": [[{"role": "user", "content": "q"}]] * 2,
            "completions": [completion] * 2,
            "completion_ids": [[3, 4, 5]] * 2,
            "answer": ["x", "y"],
            "state": "step 3",
            "log_metric": print,
        }
    ]
    assert reward.name == ("plain_async" if is_async else "plain")


@pytest.mark.parametrize("column", ["prompts", "completions"])
def test_a_column_never_stands_for_what_the_model_said(column):
    """Such as the accepted answers of a data set, which would earn whatever the model writes."""
    judged = []

    def plain(prompts, completions, **columns):
        judged.extend([prompts, completions])
        return [0.0]

    trajectory = trl_trajectory(**{column: "of the row"})
    score([], [FunctionReward(plain)], [trajectory])
    assert judged == [[trajectory.prompt], [trajectory.completion]]


def test_a_trl_function_scores_one_trajectory_on_its_row():
    reward = FunctionReward(lambda completions, answer, **columns: [float(answer[0])])
    assert asyncio.run(reward.score(trl_trajectory(), answer=3)) == 3.0


def test_a_callable_without_a_name_is_named_after_its_type():
    assert FunctionReward(functools.partial(sum)).name == "partial"


def test_a_wrong_number_of_rewards_is_an_error():
    def one_short(prompts, **columns):
        return [1.0] * (len(prompts) - 1)

    with pytest.raises(RewardError) as caught:
        score([], [FunctionReward(one_short)], [trl_trajectory("s-1", n=1), trl_trajectory("s-2", n=2)])
    assert str(caught.value) == (
        "The reward 'one_short' failed with ValueError: it returned 1 rewards for 2 completions on a batch of 2 that "
        "begins with trajectory 's-1', row {\"n\": 1}."
    )


def test_an_infinite_reward_of_a_trl_function_names_its_own_row():
    reward = FunctionReward(lambda prompts, **columns: [1.0, math.inf])
    with pytest.raises(RewardError, match="not a finite number on trajectory 's-2'"):
        score([], [reward], [trl_trajectory("s-1"), trl_trajectory("s-2")])


def test_completion_ids_are_what_follows_the_first_context():
    trajectory = make_trajectory()
    assert completion_ids(trajectory) == []
    trajectory.tree.add_turn([1, 2], [], [])
    assert completion_ids(trajectory) == []
    trajectory.tree.extend([], [3], [-0.5])
    trajectory.tree.add_turn([1, 9], [4], [-0.5])  # a rewritten history leaves the first sequence
    assert completion_ids(trajectory) == [3]


# Rewards of a recipe


def test_built_in_rewards_are_found_by_the_name_they_report():
    assert set(REWARDS) == {
        "answer_logprob",
        "env_reward",
        "exact_match_reward_func",
        "exist_answer_in_search_results",
        "exist_answer_reward_func",
        "format_reward_func",
        "gsm8k_correct_reward_func",
        "gsm8k_number_reward_func",
        "information_gain",
        "reasoning_gym_reward",
        "step_reward",
        "tool_execution_reward_func",
        "xml_reward_func",
    }
    for name, reward_class in REWARDS.items():
        kind = next(kind for kind, base in KINDS.items() if issubclass(reward_class, base))
        (loaded,) = load_rewards([name], kind)
        assert type(loaded) is reward_class is type(getattr(rewards, name))
        assert loaded.name == name


def test_rewards_are_names_paths_instances_classes_or_functions(tmp_path):
    file = tmp_path / "plugin.py"
    file.write_text("def from_file(completions, **columns):\n    return [1.0] * len(completions)\n")
    instance = Returns(1.0)
    loaded = load_rewards(
        ["mt_grpo.rewards.builtin.gsm8k_number_reward_func", f"{file}:from_file", instance, NumTurns, len], "outcome"
    )
    assert [reward.name for reward in loaded] == [
        "gsm8k_number_reward_func",
        "from_file",
        "Returns",
        "num_turns",
        "len",
    ]
    assert loaded[2] is instance and isinstance(loaded[3], NumTurns)
    assert all(isinstance(loaded[index], FunctionReward) for index in (1, 4))
    assert isinstance(load_rewards([Length], "turn")[0], Length)


class Needs(OutcomeReward):
    def __init__(self, model):
        self.model = model

    def score(self, trajectory, **row):
        return 0.0


class Progress(StateScore):
    def score(self, turn, trajectory, **row):
        return float(turn.index)


class Neither(RewardFunc):
    def score(self, **row):
        return 0.0


@pytest.mark.parametrize(
    ("entries", "kind", "message"),
    [
        (
            ["exact_match_reward_func"],
            "turn",
            "'exact_match_reward_func' is a reward for outcomes: list it in `outcome_reward_funcs`.",
        ),
        ([Length()], "outcome", "'Length' is a reward for turns: list it in `turn_reward_funcs`."),
        ([NumTurns], "turn", "'num_turns' is a reward for outcomes: list it in `outcome_reward_funcs`."),
        (
            ["exact_match_reward"],
            "outcome",
            "The outcome reward 'exact_match_reward' is neither a built-in name nor a path such as "
            "`package.module.name`; the nearest is 'exact_match_reward_func'.",
        ),
        (
            [len],
            "turn",
            "The turn reward 'len' is a plain function, which judges whole completions: subclass TurnReward, or list "
            "it in `outcome_reward_funcs`.",
        ),
        ([Progress], "turn", "'Progress' is a reward for states: list it in `state_score`."),
        ([Length()], "state", "'Length' is a reward for turns: list it in `turn_reward_funcs`."),
        (
            [len],
            "state",
            "The state reward 'len' is a plain function, which judges whole completions: subclass StateScore, or list "
            "it in `outcome_reward_funcs`.",
        ),
        ([3], "outcome", "The outcome reward '3' is not a reward: subclass OutcomeReward."),
        ([dict], "outcome", "The outcome reward 'dict' is not a reward: subclass OutcomeReward."),
        ([Neither()], "turn", "The turn reward 'Neither' is not a reward: subclass TurnReward."),
        (["math.pi"], "outcome", "The outcome reward 'math.pi' is not a reward: subclass OutcomeReward."),
        ([len, len], "outcome", "The outcome reward 'len' is listed twice: give one another `name`."),
    ],
)
def test_what_is_no_reward_of_the_kind_is_refused(entries, kind, message):
    with pytest.raises(RewardListError) as caught:
        load_rewards(entries, kind)
    assert str(caught.value) == message
    assert isinstance(caught.value, ValueError)


class Answer(OutcomeReward):
    def __init__(self, column="answer", *more, scale=1.0):
        self.column, self.scale = column, float(scale)

    def score(self, trajectory, **row):
        return 0.0


class Anything(Answer):
    def __init__(self, **options):
        super().__init__(options["column"])


def test_a_recipe_gives_a_class_its_options_with_its_name(monkeypatch):
    for name, listed in (("answer", Answer), ("anything", Anything)):
        monkeypatch.setitem(REWARDS._entries, name, listed)
    as_json = '{"name": "anything", "column": "gold"}'
    first, second = load_rewards([{"name": "answer", "scale": 2}, as_json], "outcome")
    assert (type(first), first.column, first.scale) == (Answer, "answer", 2.0)
    assert (type(second), second.column) == (Anything, "gold")
    (by_path,) = load_rewards([{"name": "mt_grpo.rewards.gain.InformationGain", "prefix": ""}], "turn")
    assert (by_path.prefix, by_path.column) == ("", "answer")


@pytest.mark.parametrize(
    ("entry", "kind", "message"),
    [
        (
            {"name": "answer", "colum": "gold"},
            "outcome",
            "The outcome reward 'answer' has no option 'colum'; the nearest is 'column': its options are column, "
            "scale.",
        ),
        (
            {"name": "step_reward", "scale": 2},
            "turn",
            "The turn reward 'step_reward' has no option 'scale': it has none.",
        ),
        (
            {"name": "mt_grpo.rewards.gain.information_gain", "gain": "log_prob"},
            "turn",
            "The turn reward 'mt_grpo.rewards.gain.information_gain' has no option 'gain': it has none.",
        ),
        (
            {"name": "answer", "scale": "big"},
            "outcome",
            "The outcome reward 'answer' cannot be made with the options {'scale': 'big'} (ValueError: could not "
            "convert string to float: 'big').",
        ),
        (
            {"column": "gold"},
            "outcome",
            "The reward {'column': 'gold'} has no name: give the name or the path of a reward class and its options, "
            "such as `{name: information_gain, column: answer}`.",
        ),
        ('{"name": ', "outcome", "The reward '{\"name\": ' is not valid JSON (Expecting value at character 9)."),
        ({"name": "information_gain", "scorer": "me"}, "turn", "`scorer` is 'me': choose one of trainer, server."),
    ],
)
def test_options_that_a_reward_does_not_take_are_refused(entry, kind, message, monkeypatch):
    monkeypatch.setitem(REWARDS._entries, "answer", Answer)
    with pytest.raises(UserError) as caught:
        load_rewards([entry], kind)
    assert str(caught.value) == message


def test_a_class_that_needs_arguments_asks_for_an_instance():
    with pytest.raises(
        RewardListError, match=r"'Needs' is a class .* \(TypeError: .*'model'\): give them with its name"
    ):
        load_rewards([Needs], "outcome")


def test_a_path_that_does_not_import_names_the_reward():
    with pytest.raises(ImportPathError, match="The turn reward 'no_such_package.f' does not import"):
        load_rewards(["no_such_package.f"], "turn")


def test_rewards_import_no_torch():
    code = "import sys, mt_grpo.rewards; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_scores_are_json():
    trajectory = make_trajectory("ab", "", bonus=0)
    score([Length()], [NumTurns()], [trajectory])
    assert json.loads(json.dumps(trajectory.to_dict()))["rewards"] == trajectory.rewards


@pytest.mark.parametrize(("number", "value"), [("weight", math.nan), ("weight", "1"), ("maximum", None)])
def test_a_weight_that_is_no_number_is_refused(number, value):
    wrong = type("Wrong", (Returns,), {number: value})(1.0)
    with pytest.raises(RewardListError, match=f"'Wrong' has the `{number}` .*: set a finite number"):
        load_rewards([wrong], "outcome")


def test_what_hides_its_parameters_is_in_no_form_of_others():
    assert not ScoreFunction.fits(max) and not ScoreFunction.fits("score")
