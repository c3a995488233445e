"""Environments that users write: one for each conversation, closed whatever happens, and none that holds up others."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest
from datasets import Dataset
from support.conversations import user
from support.models import build_tokenizer

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
    assert (first.stop_reason, first.env_rewards, first.info) == (
        StopReason.ENV_DONE, {"guesses": 3.0}, {"won": True}
    )  # fmt: skip
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
    plain, guess, unknown, unnamed = run(
        sources, rows, lambda session, turn: ["<answer>1</answer>", "1"][int(session)]
    )
    assert plain.prompt[0]["content"] == "Answer." and plain.answer == "1" and guess.info == {"won": True}
    for trajectory in (unknown, unnamed):
        assert trajectory.stop_reason is StopReason.ENV_ERROR and "guess, tools" in trajectory.error


# What goes wrong in one conversation


class Broken(StepEnv):
    """Does what its row says."""

    closed: list[str] = []

    def __init__(self):
        if threading.current_thread().name == "never":
            raise AssertionError

    def reset(self, row):
        self.kind = row["kind"]
        if self.kind == "reset raises":
            raise ZeroDivisionError("in reset")
        if self.kind == "reset hangs":
            time.sleep(5)
        return {"no messages": None, "empty": []}.get(self.kind, "Q")

    async def step(self, turn):
        match self.kind:
            case "step hangs":
                await asyncio.Event().wait()
            case "step swallows":
                while True:
                    try:
                        await asyncio.Event().wait()
                    except asyncio.CancelledError:
                        if self.kind == "over":
                            raise
            case "step exits":
                raise SystemExit(3)
            case "step cancels":
                raise asyncio.CancelledError
            case "step is silent":
                return None
            case "step says nothing":
                return []
            case "step answers a number":
                return 3
            case "step writes half a character":
                return "a\ud800"
            case "step shows half a character":
                return [{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}]
            case "step gives no message":
                return [{"content": "no role"}]
            case "step rewards nan":
                return Step("Q", reward=float("nan"))
            case "reward of the whole is inf":
                return Step(done=True, rewards={"score": float("inf")})
            case "reward of the whole is a word":
                return Step(done=True, rewards={"score": "good"})
            case "info has no JSON form":
                return Step(done=True, info={(1, 2): 3})
            case "answer is a number":
                return Step(done=True, answer=3)
        return Step(done=True)

    async def close(self):
        Broken.closed.append(self.kind)
        self.kind, kind = "over", self.kind
        if kind == "close raises":
            raise ZeroDivisionError("in close")


class Hanging(Broken):
    """Has no time for what hangs."""

    step_timeout = 0.2


FAILURES = {
    "reset raises": "ZeroDivisionError: in reset",
    "reset hangs": "OutOfTime: Hanging.reset took longer than 0.2 s.",
    "step hangs": "OutOfTime: Hanging.step took longer than 0.2 s.",
    "step swallows": "OutOfTime: Hanging.step took longer than 0.2 s.",
    "step exits": "RuntimeError: SystemExit: 3",
    "step cancels": "cancelled itself",
    "step is silent": "gave `None` for messages",
    "step says nothing": "neither replied nor ended",
    "step answers a number": "gave int for messages",
    "step writes half a character": "a message of 'user' has half a character, '\\ud800' at place 1: leave it out",
    "step shows half a character": "a message of 'user' has half a character, '\\udfff' at place 0: leave it out",
    "step gives no message": "A message is dict, without a text `role`: give a dictionary",
    "step rewards nan": "the reward of a step is nan: give a finite number",
    "reward of the whole is inf": "the reward 'score' is inf: give a finite number",
    "reward of the whole is a word": "the reward 'score' is str: give a finite number",
    "info has no JSON form": "`info` of the outcome",
    "answer is a number": "`answer` of the outcome is int: give text or `None`",
    "no messages": "gave `None` for messages",
    "empty": "There are no messages, so there is nothing to reply to",
}


def test_whatever_an_environment_does_ends_its_conversation_only(caplog):
    kinds = [*FAILURES, "fine", "close raises"]
    Broken.closed = []
    with caplog.at_level(logging.WARNING):
        hang = [kind for kind in kinds if kind.endswith(("hangs", "swallows"))]
        kinds = hang + [kind for kind in kinds if kind not in hang]
        trajectories = run(Hanging, [{"kind": kind} for kind in hang])
        trajectories += run(Broken, [{"kind": kind} for kind in kinds[len(hang) :]])
    for kind, trajectory in zip(kinds, trajectories, strict=True):
        if kind in FAILURES:
            assert trajectory.stop_reason is StopReason.ENV_ERROR, kind
            assert FAILURES[kind] in trajectory.error, (kind, trajectory.error)
        else:
            assert trajectory.stop_reason is StopReason.ENV_DONE
        assert trajectory.environment is None
    assert sorted(Broken.closed) == sorted(kinds)
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
        for _ in range(1200):
            if Loop.closed == 5:
                break
            await asyncio.sleep(0.05)
        return ended

    (hangs, swallows, made_late), (no_outcome, not_made, fine) = asyncio.run(all_closed())
    assert {hangs.stop_reason, swallows.stop_reason, made_late.stop_reason} == {StopReason.TIMEOUT}
    assert "returned float: return an `Outcome`" in no_outcome.error
    assert not_made.error == "ZeroDivisionError: not made" and fine.env_rewards == {"score": 1.0}
    assert Loop.closed == 5


class Wrong(StepEnv):
    """Returns what its row has."""

    def reset(self, row):
        return row.get("first", "Q")

    def step(self, turn):
        return self.row["next"]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"next": None}, "Wrong.step ({file}, line {step}) gave `None` for messages: return text, a list of messages "
         "or a `Step`."),
        ({"next": {"reward": 1.0}}, "Wrong.step ({file}, line {step}) gave dict for messages: return text, a list of "
         "messages or a `Step`, as `Step(**...)`."),
        ({"next": 1.0}, "gave float for messages: return text, a list of messages or a `Step`, as `Step(reward=1.0, "
         "done=True)`."),
        ({"next": ("o", 1.0, True)}, "or wrap an environment of Gym's in `mt_grpo.integrations.gym.GymEnv`."),
        ({"next": [1]}, "Wrong.step ({file}, line {step}): A message is int, without a text `role`"),
        ({"next": Step(reward="1.0")}, "Wrong.step ({file}, line {step}): the reward of a step is str"),
        ({"first": None}, "Wrong.reset ({file}, line {reset}) gave `None` for messages: return text or a list of "
         "messages."),
    ],
)  # fmt: skip
def test_a_wrong_return_is_named_with_its_method_and_line(row, sentence):
    lines = {name: vars(Wrong)[name].__code__.co_firstlineno for name in ("step", "reset")}
    [trajectory] = run(Wrong, [row])
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert sentence.format(file=__file__, **lines) in trajectory.error
    assert trajectory.where is None


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
    [trajectory] = run(Broken, [{"kind": "fine"}], keep=True)
    Broken.closed = []
    assert trajectory.environment.kind == "fine"
    asyncio.run(close_environments([trajectory]))
    assert trajectory.environment is None and Broken.closed == ["fine"]


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
