"""Rewards: what they are, how a batch is scored, and those that a recipe lists."""

import asyncio
import functools
import json
import math

import numpy as np
import pytest
from support.registered import keep
from support.reward_batches import score

from mt_grpo.concurrency import run
from mt_grpo.errors import UserError
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
from mt_grpo.rewards.base import ScoreFunction, completion_ids
from mt_grpo.trajectory import StopReason, Trajectory, Turn


def make_trajectory(*texts, session="s-0", stop_reason=None, **row):
    turns = [Turn(index, {"role": "assistant", "content": text}) for index, text in enumerate(texts)]
    prompt = [{"role": "user", "content": "q"}]
    return Trajectory(prompt, turns, session=session, stop_reason=stop_reason, row=row)


def outcomes(function, *batch, **extra):
    """Of a plain function or a reward."""
    reward = function if isinstance(function, RewardFunc) else FunctionReward(function)
    return score([], [reward], batch or [make_trajectory()], **extra).outcome[0]


class Length(TurnReward):
    def score(self, turn, trajectory, **row):
        return float(len(turn.text)) or None


class NumTurns(OutcomeReward):
    weight = 0.5
    name = "num_turns"

    async def score(self, trajectory, *, bonus, **row):
        return len(trajectory.turns) + bonus


class Progress(StateScore):
    def score(self, turn, trajectory, **row):
        return float(turn.index)


class Returns(OutcomeReward):
    def __init__(self, value):
        self.value = value

    def score(self, trajectory, **row):
        return self.value


class Answer(OutcomeReward):
    def __init__(self, column="answer", *more, scale=1.0):
        self.column, self.scale = column, float(scale)

    def score(self, trajectory, **row):
        return 0.0


class Anything(Answer):
    def __init__(self, **options):
        super().__init__(options["column"])


class Neither(RewardFunc):
    def score(self, **row):
        return 0.0


# What a reward is


def test_a_reward_is_named_after_its_class_by_default():
    child = type("Child", (NumTurns,), {})()
    assert (Length().name, NumTurns().name, child.name) == ("Length", "num_turns", "Child")
    child.name = "mine"
    assert (child.name, type(child).name) == ("mine", "Child")
    assert (Length().weight, NumTurns().weight) == (1.0, 0.5)
    assert FunctionReward(functools.partial(sum)).name == "partial"


@pytest.mark.parametrize("abstract", [RewardFunc, TurnReward, OutcomeReward])
def test_a_reward_without_score_cannot_be_made(abstract):
    with pytest.raises(TypeError, match="abstract"):
        type("NoScore", (abstract,), {})()


def test_what_hides_its_parameters_is_in_no_form_of_others():
    assert not ScoreFunction.fits(max) and not ScoreFunction.fits("score")


# Scoring


def test_scores_are_by_reward_trajectory_turn_and_recorded():
    batch = [make_trajectory("ab", "", bonus=0.5), make_trajectory("c", bonus=2)]
    scores = score([Length()], [NumTurns(), Returns(None)], batch)
    assert (scores.turn, scores.outcome) == ([[[2.0, None], [1.0]]], [[2.5, 3.0], [None, None]])
    assert batch[0].rewards == {"outcome": {"num_turns": 2.5, "Returns": None}, "turn": {"Length": [2.0, None]}}
    assert batch[1].rewards == {"outcome": {"num_turns": 3.0, "Returns": None}, "turn": {"Length": [1.0]}}
    assert json.loads(json.dumps(batch[0].to_dict()))["rewards"] == batch[0].rewards


def test_no_reward_is_asked_about_a_trajectory_that_failed():
    """And the scores of states are apart from rewards."""
    reasons = (None, StopReason.ENGINE_ERROR, StopReason.ENV_ERROR, StopReason.TIMEOUT)
    batch = [make_trajectory("ab", "c", stop_reason=reason) for reason in reasons]
    scores = run(score_trajectories([Length()], [Returns(1.0)], batch, state_scores=[Progress()]))
    nothing = [None, None]
    assert scores.turn == [[[2.0, 1.0], nothing, nothing, [2.0, 1.0]]]
    assert (scores.state, scores.outcome) == ([[[0.0, 1.0], nothing, nothing, [0.0, 1.0]]], [[1.0, None, None, 1.0]])
    ran, failed = batch[0].rewards, batch[1].rewards
    assert ran == {"outcome": {"Returns": 1.0}, "turn": {"Length": [2.0, 1.0]}, "state": {"Progress": [0.0, 1.0]}}
    assert failed == {"outcome": {"Returns": None}, "turn": {"Length": nothing}, "state": {"Progress": nothing}}


def test_without_trajectories_or_rewards_there_are_no_scores():
    scores, trajectory = score([Length()], [NumTurns(), FunctionReward(len)], []), make_trajectory("a")
    assert (scores.turn, scores.outcome) == ([[]], [[], []])
    scores = score([], [], [trajectory])
    assert (scores.turn, scores.outcome, trajectory.rewards) == ([], [], {"outcome": {}, "turn": {}})


def test_async_rewards_run_concurrently():
    # every call holds until all of them have begun: run in turn they would never end
    begun, num_calls = [], 8
    all_begun = asyncio.Event()

    async def meet(*given, **row):
        begun.append(1)
        if len(begun) == num_calls:
            all_begun.set()
        await asyncio.wait_for(all_begun.wait(), timeout=30)
        return 1.0

    async def plain(completions, **columns):
        return [await meet()] * len(completions)

    of_turn, of_outcome = (type("Meets", (base,), {"score": meet}) for base in (TurnReward, OutcomeReward))
    batch = [make_trajectory("a", "b"), make_trajectory("c")]
    outcome_funcs = [of_outcome(), of_outcome(), FunctionReward(plain)]  # 3 turns + 2 + 2 + 1 batch
    scores = asyncio.run(score_trajectories([of_turn()], outcome_funcs, batch))
    assert scores.turn == [[[1.0, 1.0], [1.0]]] and scores.outcome == [[1.0, 1.0]] * 3


def test_scoring_that_is_cancelled_is_no_failure_of_a_reward():
    waits = type("Waits", (OutcomeReward,), {"score": lambda self, trajectory, **row: asyncio.Event().wait()})

    async def act():
        await asyncio.wait_for(score_trajectories([], [waits()], [make_trajectory()]), timeout=0.01)

    with pytest.raises(TimeoutError):
        asyncio.run(act())


def test_whatever_reads_as_a_number_becomes_a_float():
    results = [outcomes(Returns(value))[0] for value in (True, 1, np.float32(1.0))]
    assert [(result, type(result)) for result in results] == [(1.0, float)] * 3


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (math.nan, "ValueError: it returned nan: return a finite number, or `None` where it does"),
        (math.inf, "ValueError: it returned inf: return a finite number"),
        (-math.inf, "ValueError: it returned -inf: return a finite number"),
        (-1e15, "ValueError: it returned -1e+15: return a number between -1e+12 and 1e+12"),
        ("good", "TypeError: it returned 'good': return a number"),
        ("1.0", "TypeError: it returned '1.0': return a number"),
        ([1.0], "TypeError: it returned [1.0]: return a number"),
        (10**400, "OverflowError: int too large"),
    ],
)
def test_a_value_that_is_no_finite_number_is_an_error(value, reason):
    with pytest.raises(RewardError) as caught:
        outcomes(Returns(value), make_trajectory(session="s-7", answer="Lima"))
    assert str(caught.value).startswith(f"The reward 'Returns' failed with {reason}")
    assert str(caught.value).endswith("""(on trajectory 's-7', row {"answer": "Lima"}).""")


class Misspelt(OutcomeReward):
    def scores(self, trajectory, **row):
        return 1.0


def raises(completions, **columns):
    raise RuntimeError("one\n  two")


async def cancelled(completions, **columns):
    raise asyncio.CancelledError("of a task of its own")


class Stops(BaseException):
    pass


def stops(completions, **columns):
    raise Stops("sync")


def cancels(completions, **columns):
    raise asyncio.CancelledError("at once")


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (cancels, r"'cancels' failed with CancelledError: at once \(on .*test_rewards_base.py, line \d+, in cancels"),
        (stops, r"'stops' failed with Stops: sync \(on .*test_rewards_base.py, line \d+, in stops"),
        (cancelled, r"'cancelled' failed with CancelledError: of a task of its own \(on"),
        (raises, r"'raises' failed with RuntimeError: one two \(on"),
        (NumTurns(), "'num_turns' failed with TypeError: .*'bonus'"),
        # TRL takes NaN for `None`; a mistake in a computation looks the same
        (lambda **columns: [1.0, math.nan], "'<lambda>' failed with ValueError: it returned nan: return a finite"),
        (lambda **columns: [1.0, math.inf], r"does not apply \(on trajectory 's-2'"),
        (
            lambda **columns: [1.0],
            r"1 rewards for 2 completions \(on a batch of 2, whose completions are lists of messages, that begins "
            r"with trajectory 's-1', row {.n.: 1}\)",
        ),
        *(
            (lambda value=value, **columns: value, "it returned .*: return a list of numbers, one for each of 2 compl")
            for value in (None, 1.0, "1.0", {"s": 1.0})
        ),
    ],
)
def test_what_a_reward_does_wrong_is_said_in_one_line(reward, says):
    with pytest.raises(RewardError, match=says):
        outcomes(reward, make_trajectory(session="s-1", n=1), make_trajectory(session="s-2", n=2))


def interrupts(completions, **columns):
    raise KeyboardInterrupt


async def closes(completions, **columns):
    raise GeneratorExit


@pytest.mark.parametrize(("reward", "error"), [(interrupts, KeyboardInterrupt), (closes, GeneratorExit)])
def test_what_ends_a_process_or_a_coroutine_is_no_failure(reward, error):
    with pytest.raises(error):
        outcomes(reward, make_trajectory(session="s-1"))


def test_a_function_that_fails_is_told_what_completions_are():
    def last(completions, **columns):
        return [float("Peru" in messages[-1]["content"]) for messages in completions]

    trajectory = make_trajectory(session="s-1")
    trajectory.texts = ("Where is Lima?", "In Peru.")
    with pytest.raises(RewardError, match="string indices .* of 1, whose completions are texts, that begins with"):
        outcomes(last, trajectory)


def test_a_reward_that_raises_names_reward_trajectory_and_row():
    class Raises(TurnReward):
        def score(self, turn, trajectory, **row):
            if turn.text == "bad":
                raise KeyError("no\nsuch key")
            return 0.0

    batch = [make_trajectory("good", session="s-1"), make_trajectory("good", "bad", session="s-2", question="ü?")]
    with pytest.raises(RewardError) as caught:
        score([Raises()], [], batch)
    line = Raises.score.__code__.co_firstlineno + 2
    assert str(caught.value) == (
        "The reward 'Raises' failed with KeyError: 'no\\nsuch key' (on trajectory 's-2', row {\"question\": \"ü?\"}, "
        f"in {__file__}, line {line}, in score)."
    )
    assert isinstance(caught.value.__cause__, KeyError)
    assert batch[0].rewards == {}


def test_a_long_row_is_cut_at_200_characters():
    with pytest.raises(RewardError) as caught:
        outcomes(Returns(math.inf), make_trajectory(text="x" * 400, thing=object()))
    row = str(caught.value).partition(", row ")[2].removesuffix(").")
    assert row == '{"text": "' + "x" * 189 + "…" and len(row) == 200


def test_the_first_failure_is_reported_after_the_rest_ended():
    ended = []

    class Slow(OutcomeReward):
        async def score(self, trajectory, *, waits, **row):
            for _ in range(waits):
                await asyncio.sleep(0)
            ended.append(trajectory.session)
            raise ValueError("late" if waits else "soon")

    with pytest.raises(RewardError, match=r"late \(on trajectory 'a'"):
        outcomes(Slow(), make_trajectory(session="a", waits=3), make_trajectory(session="b", waits=0))
    assert ended == ["b", "a"]


# Plain TRL reward functions


def trl_trajectory(**row):
    trajectory = make_trajectory("a", **row)
    trajectory.turns[0].replies = [{"role": "tool", "content": "r"}]
    trajectory.tree.add_turn([1, 2], [3], [-0.5])
    trajectory.tree.add_turn([1, 2, 3, 4], [5], [-0.5])
    return trajectory


@pytest.mark.parametrize("is_async", [False, True])
def test_a_trl_function_is_called_once_with_what_trl_passes(is_async):
    """No column stands for what the model said: an accepted answer would earn whatever it says."""
    calls = []

    def plain(**kwargs):
        calls.append(kwargs)
        return [0.5, None]

    async def plain_async(**kwargs):
        return plain(**kwargs)

    taken = dict.fromkeys(["prompt", "prompts", "completion", "completions", "completion_ids"], "of the row")
    batch = [trl_trajectory(answer=name, state=1, **taken) for name in "xy"]
    reward = FunctionReward(plain_async if is_async else plain)
    assert outcomes(reward, *batch, extra={"state": "step 3", "log_metric": print}) == [0.5, None]
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


def test_a_trl_function_may_score_one_or_be_a_generator():
    reward = FunctionReward(lambda completions, answer, **columns: [float(answer[0])])
    assert asyncio.run(reward.score(trl_trajectory(), answer=3)) == 3.0
    assert outcomes(lambda completions, **columns: (2.0 for _ in completions)) == [2.0]


def test_completion_ids_are_what_follows_the_first_context():
    trajectory = make_trajectory()
    assert completion_ids(trajectory) == []
    trajectory.tree.add_turn([1, 2], [], [])
    assert completion_ids(trajectory) == []
    trajectory.tree.extend([], [3], [-0.5])
    trajectory.tree.add_turn([1, 9], [4], [-0.5])  # a rewritten history leaves the first sequence
    assert completion_ids(trajectory) == [3]


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
    of_the_user = type("Standing", (), {"user_environment": 3.0})()
    assert outcomes(named, Trajectory([], environment=of_the_user, stop_reason=StopReason.ANSWERED)) == [3.0]


# Rewards of a recipe


def test_rewards_are_names_paths_instances_classes_or_functions(tmp_path):
    file = tmp_path / "plugin.py"
    file.write_text("def from_file(completions, **columns):\n    return [1.0] * len(completions)\n")
    instance = Returns(1.0)
    loaded = load_rewards(
        ["mt_grpo.rewards.builtin.gsm8k_number_reward_func", f"{file}:from_file", instance, NumTurns, len], "outcome"
    )
    assert [each.name for each in loaded] == ["gsm8k_number_reward_func", "from_file", "Returns", "num_turns", "len"]
    assert loaded[2] is instance and isinstance(loaded[3], NumTurns)
    assert all(isinstance(loaded[index], FunctionReward) for index in (1, 4))
    assert isinstance(load_rewards([Length], "turn")[0], Length)


def test_a_recipe_gives_a_class_its_options_with_its_name(monkeypatch):
    keep(monkeypatch, REWARDS)
    for name, listed in (("answer", Answer), ("anything", Anything)):
        REWARDS.add(name, listed, __name__)
    as_json = '{"name": "anything", "column": "gold"}'
    first, second = load_rewards([{"name": "answer", "scale": 2}, as_json], "outcome")
    assert (type(first), first.column, first.scale) == (Answer, "answer", 2.0)
    assert (type(second), second.column) == (Anything, "gold")
    (by_path,) = load_rewards([{"name": "mt_grpo.rewards.builtin.InformationGain", "prefix": ""}], "turn")
    assert (by_path.prefix, by_path.column) == ("", "answer")


GAIN = "mt_grpo.rewards.builtin.information_gain"


@pytest.mark.parametrize(
    ("kind", "entries", "says"),
    [
        ("turn", ["exact_match_reward_func"], "is a reward for outcomes: list it in `outcome_reward_funcs`."),
        ("turn", [NumTurns], "'num_turns' is a reward for outcomes: list it in `outcome_reward_funcs`."),
        ("turn", [Progress], "'Progress' is a reward for states: list it in `state_score`."),
        ("outcome", [Length()], "'Length' is a reward for turns: list it in `turn_reward_funcs`."),
        ("state", [Length()], "'Length' is a reward for turns: list it in `turn_reward_funcs`."),
        (
            "outcome",
            ["exact_match_reward"],
            "The outcome reward 'exact_match_reward' is neither a built-in name nor a path such as "
            "`package.module.name`; the nearest is 'exact_match_reward_func'.",
        ),
        ("turn", [len], "'len' is a plain function, which judges whole completions: subclass TurnReward, or list it"),
        ("state", [len], "'len' is a plain function, which judges whole completions: subclass StateScore, or list it"),
        ("outcome", [3], "The outcome reward '3' is not a reward: subclass OutcomeReward."),
        ("outcome", [dict], "The outcome reward 'dict' is not a reward: subclass OutcomeReward."),
        ("turn", [Neither()], "The turn reward 'Neither' is not a reward: subclass TurnReward."),
        ("outcome", ["math.pi"], "The outcome reward 'math.pi' is not a reward: subclass OutcomeReward."),
        ("outcome", [len, len], "The outcome reward 'len' is listed twice: give one another `name`."),
        ("outcome", [Returns], "'Returns' cannot be made without arguments (TypeError: "),
        ("outcome", [Returns], "'value'): give them with its name"),
        ("outcome", [Misspelt], "'Misspelt' has no method `score`; the nearest is 'scores': define it in its class."),
        ("turn", ["no_such_package.f"], "The turn reward 'no_such_package.f' does not import"),
        (
            "outcome",
            [{"name": "answer", "colum": "gold"}],
            "'answer' has no option 'colum'; the nearest is 'column': its options are column, scale.",
        ),
        ("turn", [{"name": "step_reward", "scale": 2}], "'step_reward' has no option 'scale': it has none."),
        ("turn", [{"name": GAIN, "gain": "log_prob"}], f"'{GAIN}' has no option 'gain': it has none."),
        (
            "outcome",
            [{"name": "answer", "scale": "big"}],
            "cannot be made with the options {'scale': 'big'} (ValueError: could not convert string to float: 'big').",
        ),
        (
            "outcome",
            [{"column": "gold"}],
            "{'column': 'gold'} has no name: give the name or the path of a reward class and its options, such as `{",
        ),
        ("outcome", ['{"name": '], "The reward '{\"name\": ' is not valid JSON (Expecting value at character 9)."),
        ("turn", [{"name": "information_gain", "scorer": "me"}], "`scorer` is 'me': choose one of trainer, server."),
    ],
)
def test_what_is_no_reward_of_the_kind_is_refused(kind, entries, says, monkeypatch):
    keep(monkeypatch, REWARDS)
    REWARDS.add("answer", Answer, __name__)
    with pytest.raises(UserError) as caught:
        load_rewards(entries, kind)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "mend"),
    [
        *(("weight", value, "set a finite number") for value in (math.nan, "1")),
        ("maximum", None, "set a finite number"),
        ("name", 3, "give it text"),
    ],
)
def test_a_weight_or_a_name_of_another_kind_is_refused(field, value, mend):
    wrong = type("Wrong", (Returns,), {field: value})(1.0)
    with pytest.raises(RewardListError, match=f"Wrong'? has the `{field}` .*: {mend}") as caught:
        load_rewards([wrong], "outcome")
    assert isinstance(caught.value, ValueError)
