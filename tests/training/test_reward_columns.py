"""What a reward needs is held against the datasets before anything is loaded or sampled."""

from __future__ import annotations

import functools

import pytest
from datasets import Dataset, IterableDataset
from support.models import CPU_RUN

from mt_grpo.rewards import FunctionReward, OutcomeReward, TurnReward
from mt_grpo.training import ConfigError, MTGRPOConfig, MTGRPOEnvTrainer
from mt_grpo.training.preflight import check_reward_columns

ROWS = [{"prompt": "What is Lima", "answer": "a capital", "level": 1}]
DATA = Dataset.from_list(ROWS)


class Gold(OutcomeReward):
    def score(self, trajectory, gold_answer, **row):
        return 0.0


class Answer(TurnReward):
    def score(self, turn, trajectory, *, answer, **row):
        return 0.0


class Closed(OutcomeReward):
    def score(self, trajectory, answer):
        return 0.0


class Prompt(OutcomeReward):
    def score(self, trajectory, prompt, **row):
        return 0.0


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


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (Gold(), "The reward 'Gold' needs `gold_answer`, which is no column of the training dataset"),
        (FunctionReward(gold), "'gold' needs `gold_answer`"),
        (FunctionReward(gold), "the nearest is 'answer': its columns are prompt, answer, level; name the right one"),
        (FunctionReward(gold), "with `column_mapping: {gold_answer: its name}`"),
        (Prompt(), "'Prompt' needs `prompt`"),
        (Closed(), r"'Closed' cannot be called .* unexpected keyword argument 'level'.*\*\*row"),
        (FunctionReward(closed), r"'closed' cannot be called .*\*\*row"),
    ],
)
def test_what_no_column_brings_is_refused_in_one_sentence(reward, message):
    with pytest.raises(ConfigError, match=message) as caught:
        check_reward_columns([reward], DATA, None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "reward",
    [
        Answer(),
        FunctionReward(functools.partial(gold, gold_answer="Lima")),
        FunctionReward(wrapper),
        FunctionReward(Callable()),
        FunctionReward(max),  # a function in C says nothing
    ],
)
def test_what_can_be_called_is_accepted(reward):
    check_reward_columns([reward], DATA, None)


@pytest.mark.parametrize(
    ("evaluated", "name"),
    [
        (DATA.remove_columns("answer"), "evaluation dataset"),
        ({"easy": DATA, "hard": DATA.remove_columns("answer")}, "evaluation hard dataset"),
        (IterableDataset.from_generator(lambda: iter([{"prompt": "What is Lima"}])), "evaluation dataset"),
    ],
)
def test_evaluation_rows_and_streams_are_looked_at_too(evaluated, name):
    with pytest.raises(ConfigError, match=f"'Answer' needs `answer`, which is no column of the {name}"):
        check_reward_columns([Answer()], DATA, evaluated)


def test_the_trainer_refuses_before_it_loads_a_model(tmp_path):
    with pytest.raises(ConfigError, match="gold_answer"):
        MTGRPOEnvTrainer("/no/such/model", None, [], [gold], MTGRPOConfig(str(tmp_path), **CPU_RUN), DATA)


class Said(TurnReward):
    name = "Answer"

    def score(self, turn, trajectory, **row):
        return 0.0


class Right(OutcomeReward):
    name = "Answer"

    def score(self, trajectory, **row):
        return 0.0


def test_a_turn_reward_and_an_outcome_reward_need_two_names(tmp_path):
    """Metrics, and the index of a run, have one value for a name."""
    with pytest.raises(ConfigError, match="'Answer' is both a turn reward and an outcome reward: .* another `name`"):
        MTGRPOEnvTrainer("/no/such/model", None, [Said()], [Right()], MTGRPOConfig(str(tmp_path), **CPU_RUN), DATA)
