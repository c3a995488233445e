"""Gym-like classes: every form of `reset` and `step`, seeds, refused actions, and what goes wrong."""

import asyncio
import logging
import random
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from support.conversations import play
from support.images import picture
from support.waiting import until_true

from mt_grpo.concurrency import OutOfTime
from mt_grpo.envs.source import check_source
from mt_grpo.errors import ConfigError
from mt_grpo.integrations import textarena
from mt_grpo.integrations.gym import GymEnv
from mt_grpo.media import read_image, to_file
from mt_grpo.trajectory import StopReason, Turn


class Guess:
    """Guess a number; four values from `step`."""

    closed = 0

    def reset(self, seed):
        self.number = random.Random(seed).randrange(10)
        return {"low": np.int64(0), "high": 9}

    def step(self, action):
        if not 0 <= action <= 9:
            raise ValueError("0 to 9")
        if action == self.number:
            return "right", 1.0, True, {"number": self.number}
        return ("higher" if action < self.number else "lower"), -0.1, False, {}

    def close(self):
        Guess.closed += 1


class Walk:
    """Five values from `step`, and two from an `async` `reset`."""

    async def reset(self, **options):
        self.place = 0
        return "at 0", {"options": options}

    async def step(self, action):
        self.place += {"left": -1, "right": 1}[action]
        return np.array([self.place]), float(self.place == 2), self.place == 2, self.place < -1, {"place": self.place}


class Coin:
    """Three values from `step`, no seed, nothing to see."""

    def __init__(self, row):
        self.side = row["side"]

    def reset(self):
        return None

    def step(self, action):
        return None, 1 if action == self.side else None, action == self.side


def games(env, turns, rows=({},), **limits):
    played, _ = play(env, turns, rows, prompt="Play.", **limits)
    return [(game, [turn.replies[0]["content"] if turn.replies else "" for turn in game.turns]) for game in played]


NUMBER = random.Random(5).randrange(10)
WRONG = str((NUMBER + 1) % 10)


def test_rewards_of_steps_are_those_of_turns():
    Guess.closed = 0
    [(game, said)] = games(GymEnv(Guess, parse=int), [WRONG, "twelve", "12", str(NUMBER)], [{"seed": 5}])
    assert game.prompt == [{"role": "user", "content": 'Play.\n\n{"low": 0, "high": 9}'}]
    assert [turn.reward for turn in game.turns] == [-0.1, None, None, 1.0]
    not_an_int = "Error: ValueError: invalid literal for int() with base 10: 'twelve'"
    assert said[0] in ("higher", "lower") and said[1:] == [not_an_int, "Error: ValueError: 0 to 9", "right"]
    ended = (game.stop_reason, game.env_rewards, game.info)
    assert ended == (StopReason.ENV_DONE, {"return": 0.9}, {"number": NUMBER}) and Guess.closed == 1


def test_a_game_that_refuses_every_action_is_told_of_once(caplog):
    with caplog.at_level(logging.WARNING):
        for first in ("up", "right"):
            games(GymEnv(Walk, max_turns=5), [first, *["up"] * 4], [{}] * 8)
    # environments of other tests may be closed meanwhile, and say so
    [said] = [record.getMessage() for record in caplog.records if record.name == GymEnv.__module__]
    where = f"({__file__}, line {Walk.step.__code__.co_firstlineno + 1}"
    assert said.startswith(f"The first 16 actions were all refused, the last with KeyError: 'up' {where}")
    assert "mend `Walk.step`" in said


def test_terminated_and_truncated_end_it():
    (won, said), (lost, _) = games(GymEnv(Walk), [["right", "up", "right"], ["left", "left"]], [{}, {}])
    assert won.prompt[0]["content"] == "Play.\n\nat 0" and said[:2] == ["[1]", "Error: KeyError: 'up'"]
    assert (won.stop_reason, won.env_rewards) == (StopReason.ENV_DONE, {"return": 1.0})
    assert (lost.stop_reason, lost.env_rewards) == (StopReason.MAX_STEPS, {"return": 0.0})


def test_a_game_may_show_nothing_and_be_made_of_the_row():
    [(game, said)] = games(GymEnv(lambda row: Coin(row)), ["tails", "heads"], [{"side": "heads"}])
    assert game.prompt[0]["content"] == "Play." and said == ["(nothing to see)", ""]
    assert [turn.reward for turn in game.turns] == [0.0, 1.0]


def test_actions_may_stand_in_a_tag():
    right = "<act>right</act>"
    [(game, said)] = games(GymEnv(Walk, tag="act"), ["So <act>left</act>", "right", right, "<act>right", right, right])
    missing = "Error: ValueError: write your action between <act> and </act>."
    assert said == ["[-1]", missing, "[0]", missing, "[1]", "[2]"] and game.env_rewards == {"return": 1.0}


@pytest.mark.parametrize(
    ("env", "turns", "limits", "reason", "number", "earned"),
    [
        (GymEnv(Walk, max_turns=2), ["right", "left", "right"], {}, "max_steps", 2, 0.0),
        (GymEnv(Walk, max_turns=1), ["up"], {}, "max_steps", 1, 0.0),
        (GymEnv(Guess, parse=int), [WRONG] * 9, {"max_completion_tokens": 40}, "token_budget", None, None),
    ],
)
def test_limits_leave_the_return(env, turns, limits, reason, number, earned):
    [(game, _)] = games(env, turns, [{"seed": 5}], **limits)
    assert game.stop_reason == reason and len(game.turns) == (number or len(game.turns))
    assert game.env_rewards["return"] < 0 if earned is None else game.env_rewards == {"return": earned}


class Shows:
    def __init__(self, row):
        self.row = row

    def reset(self, seed):
        return self.row.get("shown", seed)

    def step(self, action):
        return None, 0.0, True


def prompt_of(make, prompt="", **row):
    [message] = asyncio.run(GymEnv(make).reset({"prompt": prompt, **row}))
    return message["content"]


def test_members_of_a_group_begin_with_the_same_game():
    assert prompt_of(Shows, level=3) == prompt_of(Shows, level=3) != prompt_of(Shows, level=4)
    assert prompt_of(Shows, level=3, seed=7) == "7"
    images = [read_image(to_file(picture())) for _ in range(2)] + [picture((0, 0, 1))]
    first, second, other = (prompt_of(Shows, image=image) for image in images)
    assert first == second != other


def test_a_game_that_is_made_too_late_is_closed():
    closed = []

    class Slow(Walk):
        def __init__(self):
            time.sleep(0.3)

        async def close(self):
            closed.append(self)

    async def given_up():
        with pytest.raises(OutOfTime):
            await GymEnv(Slow, step_timeout=0.05).reset({})
        await until_true(lambda: closed, limit=60.0)

    asyncio.run(given_up())


def test_images_that_a_game_shows_are_parts_of_messages():
    class Camera(Shows):
        def step(self, action):
            return picture(), 0.0, False

    async def go():
        env = GymEnv(Camera)
        [first] = await env.reset({"prompt": "Look.", "shown": ["Here", picture()]})
        [reply] = (await env.step(Turn(0, {"role": "assistant", "content": "on"}))).replies
        return [[part["type"] for part in message["content"]] for message in (first, reply)]

    assert asyncio.run(go()) == [["text", "text", "image"], ["image"]]


def test_observations_become_text_that_follows_the_prompt():
    seen = (None, "a", b"a", {"b": np.arange(2)}, 1.5)
    assert [prompt_of(Shows, shown=each) for each in seen] == ["", "a", "a", '{"b": [0, 1]}', "1.5"]
    part = {"type": "text", "text": "What is it?"}
    parts = [{"role": "user", "content": [part]}]
    assert prompt_of(Guess, parts) == [part, {"type": "text", "text": '\n\n{"low": 0, "high": 9}'}]
    assert prompt_of(Coin, parts, side="head") == [part]


class Broken(Walk):
    def __init__(self, row):
        self.kind = row["kind"]
        if self.kind == "not made":
            raise ZeroDivisionError("not made")

    async def reset(self, seed):
        if self.kind == "reset raises":
            raise ZeroDivisionError("in reset")

    def step(self, action):
        if self.kind == "step raises":
            raise ZeroDivisionError("in step")
        time.sleep(self.kind == "step hangs")
        return RETURNED.get(self.kind, ("seen", 1.0, True))


RETURNED = {
    "text": "text",
    "nan": ("seen", float("nan"), False),
    "reward of text": ("seen", "1.0", False),
    "info of text": ("seen", 1.0, False, "none"),
}
ERRORS = {
    "not made": "ZeroDivisionError: not made",
    "reset raises": "ZeroDivisionError: in reset",
    "step raises": "ZeroDivisionError: in step",
    "text": "RuntimeError: Broken.step returned str: return (observation, reward, done)",
    "nan": "RuntimeError: Broken.step returned the reward nan: return a finite number.",
    "reward of text": "RuntimeError: Broken.step returned the reward '1.0': return a finite number.",
    "info of text": "RuntimeError: Broken.step returned the info 'none': return a dictionary.",
    "no game": "ConfigError: `GymEnv` was given dict, which has no `reset`",
    "step hangs": "OutOfTime: Broken.step took longer than 0.2 s.",
}


def test_whatever_a_game_does_ends_its_conversation_only():
    def make(row):
        return {} if row["kind"] == "no game" else Broken(row)

    *kinds, hangs = ERRORS
    *played, (fine, _) = games(GymEnv(make), ["go"], [{"kind": kind} for kind in (*kinds, "fine")])
    played += games(GymEnv(make, step_timeout=0.2), ["go"], [{"kind": hangs}])
    for problem, (game, _) in zip(ERRORS.values(), played, strict=True):
        assert game.stop_reason is StopReason.ENV_ERROR and game.error.startswith(problem), game.error
    assert fine.env_rewards == {"return": 1.0}


class Duel:
    """TextArena's form of a game for two."""

    def __init__(self):
        self.state = SimpleNamespace(current_player_id=0, observations={0: [], 1: []})

    def reset(self, num_players, seed):
        assert num_players == 2

    def step(self, action):
        self.state.current_player_id = 1 - self.state.current_player_id
        return action == "resign", {}

    def close(self):
        return {0: -1.0}, {}


@pytest.mark.parametrize(("reply", "reason"), [("on", StopReason.ENV_DONE), (None, StopReason.ENV_ERROR)])
def test_the_model_is_not_blamed_for_what_an_opponent_raises(monkeypatch, reply, reason):
    monkeypatch.setitem(sys.modules, "textarena", SimpleNamespace(make=lambda name: Duel()))
    env = GymEnv(lambda: textarena._Game("duel", lambda seen: {"": reply or {}["move"]}[seen], {}))
    [(game, _)] = games(env, ["on", "resign"])
    assert (game.stop_reason, len(game.turns)) == (reason, 2 if reply else 1)
    assert (game.error or "").startswith("" if reply else "RuntimeError: `opponent` raised KeyError: 'move'")


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: GymEnv(3), "`GymEnv` was given 3, which cannot be called"),
        (lambda: GymEnv(dict), "`GymEnv` was given dict, which has no `reset`: a game has `reset` and `step"),
        (lambda: GymEnv(Walk, max_turns=0), "`max_turns` is 0"),
        (lambda: check_source(Guess), "wrap it in `mt_grpo.integrations.gym.GymEnv`"),
    ],
)
def test_what_is_no_game_is_refused(make, problem):
    with pytest.raises(ConfigError, match=problem):
        make()
