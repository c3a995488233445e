"""Environments that users write: one for each conversation, closed whatever happens, and none that holds up others."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from contextlib import suppress

import pytest
from datasets import Dataset
from support.conversations import user
from support.models import build_tokenizer
from support.waiting import until_true

from mt_grpo.envs import MultiTurnToolEnv, Outcome, Step, StepEnv
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
    """Returns, or does, what its row has."""

    closed = 0

    def reset(self, row):
        return self.does("first", "Q")

    async def step(self, turn):
        value = self.does("next", Step(done=True))
        return await value if inspect.isawaitable(value) else value

    async def close(self):
        Odd.closed += 1
        return self.does("last", None)

    def does(self, what, default):
        value = self.row.get(what, default)
        return value() if callable(value) else value


class Hasty(Odd):
    """Has no time for what hangs."""

    step_timeout = 0.2


def raises(error):
    def act():
        raise error

    return act


async def hangs():
    await asyncio.Event().wait()


async def swallows():
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)


def half(content):
    return [{"role": "user", "content": content}]


GRAPH = {"children": []}
GRAPH["children"] += [{"parent": GRAPH}] * 2
GRAPH["children"] += [{"parent": GRAPH, "root": GRAPH}]
ODD = {
    "reset raises": ({"first": raises(ZeroDivisionError("in reset"))}, "ZeroDivisionError: in reset"),
    "reset hangs": ({"first": lambda: time.sleep(5)}, "OutOfTime: Hasty.reset took longer than 0.2 s."),
    "step hangs": ({"next": hangs}, "OutOfTime: Hasty.step took longer than 0.2 s."),
    "step hangs and swallows": ({"next": swallows}, "OutOfTime: Hasty.step took longer than 0.2 s."),
    "exits": ({"next": raises(SystemExit(3))}, "RuntimeError: SystemExit: 3"),
    "cancels": ({"next": raises(asyncio.CancelledError())}, "cancelled itself"),
    "nothing": ({"next": []}, "neither replied nor ended"),
    "a number": ({"next": 3}, "gave int for messages"),
    "half a character": ({"next": "a\ud800"}, "has half a character, '\\ud800' at place 1: leave it out"),
    "half in a part": ({"next": half([{"type": "text", "text": "\udfff"}])}, "'\\udfff' at place 0: leave it out"),
    "no role": ({"next": [{"content": "no role"}]}, "A message is dict, without a text `role`: give a dictionary"),
    "nan": ({"next": Step("Q", reward=float("nan"))}, "the reward of a step is nan: give a finite number"),
    "inf": ({"next": Step(done=True, rewards={"score": float("inf")})}, "the reward 'score' is inf: give a finite"),
    "a word": ({"next": Step(done=True, rewards={"score": "good"})}, "the reward 'score' is str: give a finite"),
    "a whole number that no float holds": ({"next": Step("Q", reward=10**400)}, "the reward of a step is inf: give a"),
    "a graph without an end": ({"next": Step(done=True, info=GRAPH)}, "`info` of the outcome goes more than"),
    "no JSON": ({"next": Step(done=True, info={(1, 2): 3})}, "`info` of the outcome"),
    "answer": ({"next": Step(done=True, answer=3)}, "`answer` of the outcome is int: give text or `None`"),
    "no first": (
        {"first": None},
        "Odd.reset ({file}, line {reset}) gave `None` for messages: return text or a list of",
    ),
    "empty": ({"first": []}, "There are no messages, so there is nothing to reply to"),
    "None": ({"next": None}, "Odd.step ({file}, line {step}) gave `None` for messages: return text, a list of mes"),
    "a mapping": ({"next": {"reward": 1.0}}, "return text, a list of messages or a `Step`, as `Step(**...)`."),
    "a reward": ({"next": 1.0}, "gave float for messages: return text, a list of messages or a `Step`, as `Step(rewa"),
    "Gym": ({"next": ("o", 1.0, True)}, "or wrap an environment of Gym's in `mt_grpo.integrations.gym.GymEnv`."),
    "a list": ({"next": [1]}, "Odd.step ({file}, line {step}): A message is int, without a text `role`"),
    "text": ({"next": Step(reward="1.0")}, "Odd.step ({file}, line {step}): the reward of a step is str"),
    "close raises": ({"last": raises(ZeroDivisionError("in close"))}, None),
    "fine": ({}, None),
}


def test_whatever_an_environment_does_ends_its_conversation_only(caplog):
    """And a wrong return is named with its method and line."""
    Odd.closed = 0
    lines = {name: vars(Odd)[name].__code__.co_firstlineno for name in ("step", "reset")} | {"file": __file__}
    rows = [row | {"hasty": "hangs" in kind} for kind, (row, _) in ODD.items()]
    with caplog.at_level(logging.WARNING):
        trajectories = run(lambda row: Hasty() if row["hasty"] else Odd(), rows)
    for (kind, (_, says)), trajectory in zip(ODD.items(), trajectories, strict=True):
        assert trajectory.environment is None
        if says is None:
            assert trajectory.stop_reason is StopReason.ENV_DONE
        else:
            assert trajectory.stop_reason is StopReason.ENV_ERROR, kind
            for name, value in lines.items():
                says = says.replace(f"{{{name}}}", str(value))
            assert says in trajectory.error, (kind, trajectory.error)
    assert Odd.closed == len(ODD)
    assert f"could not be closed, the first for: ZeroDivisionError: in close ({__file__}, line " in caplog.text


class Loop:
    """An environment with a loop of its own, which does what it is told."""

    closed = 0

    def __init__(self, row):
        self.row = row
        if row["kind"] == "made late":
            time.sleep(0.5)
        if row["kind"] == "not made":
            raise ZeroDivisionError("not made")

    async def run(self, policy, row):
        await policy.reply(user("Q"))
        if row["kind"] == "swallows":
            while Loop.closed < 4:  # the others' environments
                try:
                    await asyncio.sleep(0.05)
                except asyncio.CancelledError:
                    pass
        if row["kind"] == "no outcome":
            return 3.0
        if row["kind"] == "hangs":
            await asyncio.Event().wait()
        return Outcome({"score": 1.0})

    def close(self):
        Loop.closed += 1


def test_every_environment_that_is_made_is_closed(monkeypatch):
    monkeypatch.setattr("mt_grpo.rollout.runner.GRACE", 0.2)
    Loop.closed = 0
    kinds = {0.3: ("hangs", "swallows", "made late"), None: ("no outcome", "not made", "fine")}

    async def hold(limit):
        requests = [RolloutRequest("Q", f"{index:03d}", {"kind": kind}) for index, kind in enumerate(kinds[limit])]
        engine = ScriptedEngine(build_tokenizer(), ["A"])
        return await RolloutRunner(Loop, engine, RolloutLimits(rollout_timeout=limit)).run(requests, SamplingParams())

    async def all_closed():
        ended = await asyncio.gather(*map(hold, kinds))
        await until_true(lambda: Loop.closed == 5)
        return ended

    (hangs, swallows, made_late), (no_outcome, not_made, fine) = asyncio.run(all_closed())
    assert {hangs.stop_reason, swallows.stop_reason, made_late.stop_reason} == {StopReason.TIMEOUT}
    assert "returned float: return an `Outcome`" in no_outcome.error
    assert not_made.error == "ZeroDivisionError: not made" and fine.env_rewards == {"score": 1.0}
    assert Loop.closed == 5


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
    [trajectory] = run(Odd, [{"kind": "fine"}], keep=True)
    Odd.closed = 0
    assert trajectory.environment.row["kind"] == "fine"
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


def test_a_factory_that_makes_something_else_ends_one():
    [trajectory] = run(lambda row: object(), [{}])
    assert trajectory.stop_reason is StopReason.ENV_ERROR and "has no `run` and `close`" in trajectory.error


def test_rows_that_name_no_environment_are_refused():
    rows = ({"prompt": "?"}, {"environment": "guess"}, {"environment": "gues"})
    plain, guesses, typo = (Dataset.from_list([row]) for row in rows)
    source_of(Guess).check(plain, "training dataset")
    source_of({"guess": Guess}).check(guesses, "training dataset")
    with pytest.raises(ConfigError, match="no column `environment`"):
        source_of({"guess": Guess}).check(plain, "training dataset")
    with pytest.raises(ConfigError, match="names the environment 'gues'; did you mean 'guess'|names .*'guess'"):
        source_of({"guess": Guess}).check(typo, "training dataset")
