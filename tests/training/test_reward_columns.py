"""What a reward needs is held against the datasets before anything is loaded or sampled."""

import asyncio
import functools
from contextlib import nullcontext

import pytest
from datasets import Dataset, IterableDataset
from support.models import CPU_RUN

from mt_grpo.rewards import FunctionReward, OutcomeReward, TurnReward, load_rewards
from mt_grpo.training import ConfigError, MTGRPOConfig, MTGRPOEnvTrainer
from mt_grpo.training.columns import check_reward_columns
from mt_grpo.trajectory import Trajectory, Turn

DATA = Dataset.from_list([{"prompt": "What is Lima", "answer": "a capital", "level": 1}])


def made(name, base, score):
    return type(name, (base,), {"score": score})()


ANSWER = made("Answer", TurnReward, lambda self, turn, trajectory, *, answer, **row: 0.0)
RIGHT = made("Answer", OutcomeReward, lambda self, trajectory, **row: 0.0)
GOLD = made("Gold", OutcomeReward, lambda self, trajectory, gold_answer, **row: 0.0)
CLOSED = made("Closed", OutcomeReward, lambda self, trajectory, answer: 0.0)
NO_TURN = made("NoTurn", TurnReward, lambda self, trajectory, **row: 0.0)
OF_TURN = made("OfTurn", OutcomeReward, lambda self, turn, trajectory, **row: 0.0)
LEVEL = made("Level", TurnReward, lambda self, level, trajectory, **row: 0.0)
PROMPT = made("Prompt", OutcomeReward, lambda self, trajectory, prompt, **row: 0.0)


def gold(completions, gold_answer, **kwargs):
    return [0.0] * len(completions)


def closed(prompts, completions, answer):
    return [0.0] * len(completions)


@functools.wraps(gold)
def wrapper(*args, **kwargs):
    return gold(*args, gold_answer="Lima", **kwargs)


class Callable:
    def __call__(self, completions, trainer_state, log_metric, answer, other=None, **kwargs):
        return [0.0] * len(completions)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str.endswith(ground_truth)), "source": data_source}


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (GOLD, "The reward 'Gold' needs `gold_answer`, which is no column of the training dataset"),
        (FunctionReward(gold), "'gold' needs `gold_answer`"),
        (FunctionReward(gold), "the nearest is 'answer': its columns are prompt, answer, level; name the right one"),
        (FunctionReward(gold), "with `column_mapping: {gold_answer: its name}`"),
        (PROMPT, "'Prompt' needs `prompt`"),
        (CLOSED, r"unexpected keyword argument 'level'.*: define it as `score\(self, trajectory, \*\*row\)`"),
        (NO_TURN, r"'NoTurn' cannot be called .*: define it as `score\(self, turn, trajectory, \*\*row\)`"),
        (OF_TURN, r"'OfTurn' cannot be called .*: define it as `score\(self, trajectory, \*\*row\)`"),
        (FunctionReward(closed), r"'closed' cannot be called .*\*\*row"),
        (LEVEL, "'Level' cannot be called .* values for argument 'level'.: rename its column `level`"),
        (*load_rewards([compute_score], "outcome"), "takes the right answer from the column `ground_truth`, or `rew"),
    ],
)
def test_what_no_column_brings_is_refused_in_one_sentence(reward, message):
    with pytest.raises(ConfigError, match=message) as caught:
        check_reward_columns([reward], DATA, None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "function",
    [
        functools.partial(gold, gold_answer="Lima"),
        wrapper,
        Callable(),
        max,  # a function in C says nothing
    ],
)
def test_what_can_be_called_is_accepted(function):
    check_reward_columns([ANSWER, FunctionReward(function)], DATA, None)


@pytest.mark.parametrize(
    ("evaluated", "name"),
    [
        (DATA.remove_columns("answer"), "evaluation dataset"),
        ({"easy": DATA, "hard": DATA.remove_columns("answer")}, "evaluation dataset 'hard'"),
        (IterableDataset.from_generator(lambda: iter([{"prompt": "What is Lima"}])), "evaluation dataset"),
    ],
)
def test_evaluation_rows_and_streams_are_looked_at_too(evaluated, name):
    with pytest.raises(ConfigError, match=f"'Answer' needs `answer`, which is no column of the {name}"):
        check_reward_columns([ANSWER], DATA, evaluated)


@pytest.mark.parametrize(
    ("turns", "outcomes", "message"),
    [
        ([], [gold], "gold_answer"),
        # metrics, and the index of a run, have one value for a name
        ([ANSWER], [RIGHT], "'Answer' is both a turn reward and an outcome reward: .* another `name`"),
    ],
)
def test_the_trainer_refuses_before_it_loads_a_model(tmp_path, turns, outcomes, message):
    with pytest.raises(ConfigError, match=message):
        MTGRPOEnvTrainer("/no/such/model", None, turns, outcomes, MTGRPOConfig(str(tmp_path), **CPU_RUN), DATA)


@pytest.mark.parametrize(
    ("reward", "answers", "says"),
    [
        ("exact_match_reward_func", [3, 4], None),
        ("exact_match_reward_func", [3.0, 0.5], None),
        ("exact_match_reward_func", [["Lima", "lima"], ["Oslo"]], None),
        ("exist_answer_reward_func", [{"value": "Lima", "aliases": ["a"]}, {"value": "Oslo", "aliases": []}], None),
        ("gsm8k_correct_reward_func", [3, 4], None),
        ("exact_match_reward_func", ["3", None], "2 of the training dataset: None is no answer: give text, a num"),
        ("exact_match_reward_func", [3.0, float("nan")], "2 of the training dataset: nan is no answer"),
        ("exact_match_reward_func", [[3, None], [4]], r"1 of the training dataset: \[3, None\] is no answer"),
        ("exist_answer_reward_func", [{"gold": "3"}], "1 of the training dataset: {'gold': '3'} is no answer"),
        ("gsm8k_correct_reward_func", ["3", "none"], "2 of the training dataset: the answer column holds no num"),
    ],
)
def test_answers_are_taken_where_a_reward_can_read_them(reward, answers, says):
    rows = Dataset.from_list([{"prompt": "?", "answer": answer} for answer in answers])
    problem = f"The reward '{reward}' cannot use the column 'answer' of row {says}"
    with pytest.raises(ConfigError, match=problem) if says else nullcontext():
        check_reward_columns(load_rewards([reward], "outcome"), rows, None)


async def with_truth(solution_str, ground_truth, **kwargs):
    return float(solution_str == f"Peru {ground_truth} {kwargs['extra_info']}")


def plain_score(predict_str, ground_truth):
    return 1 if predict_str == ground_truth else None


@pytest.mark.parametrize(
    ("function", "row", "said", "score"),
    [
        (compute_score, {"reward_model": {"ground_truth": "Lima", "style": "rule"}}, "It is Lima", 1.0),
        (compute_score, {"ground_truth": "Oslo", "reward_model": {"ground_truth": "Lima"}}, "It is Lima", 0.0),
        (with_truth, {"ground_truth": "Lima", "extra_info": 3}, "Peru Lima 3", 1.0),
        (plain_score, {"ground_truth": "Lima"}, "Oslo", None),
    ],
)
def test_reward_functions_in_the_form_of_verl_score(function, row, said, score):
    (reward,) = load_rewards([function], "outcome")
    check_reward_columns([reward], Dataset.from_list([{"prompt": "?", **row}]), None)
    turn = Turn(0, {"role": "assistant", "content": said})
    assert asyncio.run(reward.score(Trajectory([], [turn]), **row)) == score
    assert reward.name == function.__name__
