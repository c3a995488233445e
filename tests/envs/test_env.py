"""Environments that users write: one for each conversation, closed whatever happens, and none that holds up others."""

import asyncio
import logging

import pytest
from datasets import Dataset
from support.conversations import user
from support.models import build_tokenizer

from mt_grpo.envs import MultiTurnToolEnv, Step, StepEnv
from mt_grpo.envs.source import close_environments, source_of
from mt_grpo.errors import ConfigError
from mt_grpo.rollout import RolloutLimits, RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.trajectory import StopReason, Trajectory

END = "<|im_end|>"


class Guess(StepEnv):
    """Says whether a guess is too high; what it keeps is its own."""

    def reset(self, row):
        self.number, self.guesses = row["number"], 0
        return "Guess my number."

    def step(self, turn):
        self.guesses += 1
        if turn.text == str(self.number):
            return Step("Yes!", reward=1.0, done=True, rewards={"guesses": float(self.guesses)}, info={"won": True})
        return Step("Higher." if turn.text < str(self.number) else "Lower.", reward=0.0)


def run(env, rows, script=lambda session, turn: f"{turn + 1}{END}", keep=False, **limits):
    runner = RolloutRunner(env, ScriptedEngine(build_tokenizer(), script), RolloutLimits(**limits))
    requests = [RolloutRequest("Q", f"{index:03d}", row) for index, row in enumerate(rows)]
    return asyncio.run(runner.run(requests, SamplingParams(), keep_environments=keep))


@pytest.mark.parametrize("source", [Guess, Guess(), lambda row: Guess()])
def test_state_is_kept_by_conversation(source):
    first, second = run(source, [{"number": 3}, {"number": 1}])
    assert [turn.reward for turn in first.turns] == [0.0, 0.0, 1.0] and [turn.reward for turn in second.turns] == [1.0]
    assert first.turns[0].replies == user("Higher.") and second.turns[-1].replies == user("Yes!")
    ended = (StopReason.ENV_DONE, {"guesses": 3.0}, {"won": True})
    assert (first.stop_reason, first.env_rewards, first.info) == ended
    assert first.prompt == user("Guess my number.")


def test_async_methods_are_awaited():
    class Echo(StepEnv):
        async def reset(self, row):
            return [{"role": "system", "content": "Echo."}, *user(row["prompt"])]

        async def step(self, turn):
            return Step(done=StopReason.ANSWERED, answer=turn.text) if turn.index else turn.text

    [trajectory] = run(Echo, [{}])
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.ANSWERED, "2")
    assert trajectory.turns[0].replies == user("1")


def test_each_row_has_the_environment_that_it_names():
    tools = MultiTurnToolEnv(system_prompt="Answer.", max_steps=0, protocol="learnt_tags")
    sources = {"guess": Guess, "tools": tools}
    rows = [{"environment": "tools"}, {"environment": "guess", "number": 1}, {"environment": "chess"}, {}]
    said = ["<answer>1</answer>", "1"]
    plain, guess, unknown, unnamed = run(sources, rows, lambda session, turn: said[int(session)])
    assert plain.prompt[0]["content"] == "Answer." and plain.answer == "1" and guess.info == {"won": True}
    for trajectory in (unknown, unnamed):
        assert trajectory.stop_reason is StopReason.ENV_ERROR and "guess, tools" in trajectory.error


# What goes wrong in one conversation


class Odd(StepEnv):
    """Returns what its row has, and does not close."""

    closed = 0

    def reset(self, row):
        return row.get("first", "Q")

    def step(self, turn):
        return self.row.get("next", Step(done=True))

    def close(self):
        Odd.closed += 1
        raise ZeroDivisionError("in close")


def test_a_wrong_return_is_named_with_its_method_and_line(caplog):
    with caplog.at_level(logging.WARNING):
        first, then, listed, fine = run(Odd, [{"first": None}, {"next": None}, {"next": [1]}, {}])
    reset, step = (
        f"Odd.{each.__name__} ({__file__}, line {each.__code__.co_firstlineno})" for each in (Odd.reset, Odd.step)
    )
    assert f"{reset} gave `None` for messages: return text or a list of messages." in first.error
    assert f"{step} gave `None` for messages: return text, a list of messages or a `Step`" in then.error
    assert f"{step}: A message is int, without a text `role`" in listed.error
    assert fine.stop_reason is StopReason.ENV_DONE
    assert f"could not be closed, the first for: ZeroDivisionError: in close ({__file__}, line " in caplog.text


def test_an_error_is_kept_with_the_frames_of_the_users_code():
    class Looks(StepEnv):
        def reset(self, row):
            return "Q"

        def step(self, turn):
            return self.look({})

        def look(self, table):
            return table["gone"]

    [trajectory] = run(Looks, [{}])
    line = Looks.look.__code__.co_firstlineno + 1
    assert trajectory.error == "KeyError: 'gone'"
    assert trajectory.where == f"{__file__}, line {line}, in look"
    frames = [text for text in trajectory.traceback.splitlines() if text.lstrip().startswith("File")]
    assert [frame.rsplit(" ", 1)[1] for frame in frames] == ["step", "look"]
    assert trajectory.traceback.endswith("KeyError: 'gone'")
    assert Trajectory.from_dict(trajectory.to_dict()).where == trajectory.where


def test_rewards_may_look_at_an_environment_before_it_is_closed():
    Odd.closed = 0
    [trajectory] = run(Odd, [{"kind": "fine"}], keep=True)
    assert trajectory.environment.row["kind"] == "fine" and not Odd.closed
    asyncio.run(close_environments([trajectory]))
    assert (trajectory.environment, Odd.closed) == (None, 1)


# Refused at the door


class Half(StepEnv):
    def reset(self, row):
        return "Q"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (3, "`env` is 3, from which no environment can be made"),
        ({}, "`env` is an empty dictionary"),
        ({"a": 3}, r"`env\['a'\]` is 3"),
        (dict, "`env` is the class dict, which has no `run` and `close`"),
        (Half, "`env` is the class Half, which lacks step"),
        (lambda row, size: None, "`env` is called with the row or with nothing, and <lambda> takes neither"),
    ],
)
def test_what_makes_no_environment_is_refused(source, problem):
    with pytest.raises(ConfigError, match=problem):
        RolloutRunner(source, ScriptedEngine(build_tokenizer(), []))


def test_rows_that_name_no_environment_are_refused():
    rows = ({"prompt": "?"}, {"environment": "guess"}, {"environment": "gues"})
    plain, guesses, typo = (Dataset.from_list([row]) for row in rows)
    source_of(Guess).check(plain, "training dataset")
    source_of({"guess": Guess}).check(guesses, "training dataset")
    with pytest.raises(ConfigError, match="no column `environment`"):
        source_of({"guess": Guess}).check(plain, "training dataset")
    with pytest.raises(ConfigError, match="names the environment 'gues'; did you mean 'guess'|names .*'guess'"):
        source_of({"guess": Guess}).check(typo, "training dataset")
