"""Gym-like classes: every form of `reset` and `step`, seeds, refused actions, and what goes wrong."""

from __future__ import annotations

import asyncio
import logging
import random
import time

import numpy as np
import pytest
from support.models import build_tokenizer

from mt_grpo.envs.source import check_source
from mt_grpo.errors import ConfigError
from mt_grpo.integrations.gym import GymEnv
from mt_grpo.rollout import RolloutLimits, RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.trajectory import StopReason


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


def play(env, rows, turns, **limits):
    says = [[text + "<|im_end|>" for text in texts] for texts in turns]
    engine = ScriptedEngine(build_tokenizer(), lambda session, turn: says[int(session)][turn])
    runner = RolloutRunner(env, engine, RolloutLimits(**limits))
    requests = [RolloutRequest(row.pop("prompt", "Play."), f"{index:03d}", row) for index, row in enumerate(rows)]
    return asyncio.run(runner.run(requests, SamplingParams()))


NUMBER = random.Random(5).randrange(10)


def test_rewards_of_steps_are_those_of_turns():
    Guess.closed = 0
    turns = [str((NUMBER + 1) % 10), "twelve", "12", str(NUMBER)]
    [game] = play(GymEnv(Guess, parse=int), [{"seed": 5}], [turns])
    assert game.prompt == [{"role": "user", "content": 'Play.\n\n{"low": 0, "high": 9}'}]
    assert [turn.reward for turn in game.turns] == [-0.1, None, None, 1.0]
    replies = [turn.replies[0]["content"] for turn in game.turns]
    assert replies[0] in ("higher", "lower") and replies[3] == "right"
    assert replies[1:3] == [
        "Error: ValueError: invalid literal for int() with base 10: 'twelve'", "Error: ValueError: 0 to 9"
    ]  # fmt: skip
    assert (game.stop_reason, game.env_rewards, game.info) == (
        StopReason.ENV_DONE, {"return": 0.9}, {"number": NUMBER}
    )  # fmt: skip
    assert Guess.closed == 1


def test_a_game_that_refuses_every_action_is_told_of_once(caplog):
    with caplog.at_level(logging.WARNING):
        play(GymEnv(Walk, max_turns=5), [{} for _ in range(8)], [["up"] * 5] * 8)
        play(GymEnv(Walk, max_turns=5), [{} for _ in range(8)], [["right", *["up"] * 4]] * 8)
    [said] = caplog.messages
    line = Walk.step.__code__.co_firstlineno + 1
    assert said.startswith(
        f"The first 16 actions were all refused, the last with KeyError: 'up' ({__file__}, line {line}"
    )
    assert "mend `Walk.step`" in said


def test_terminated_and_truncated_end_it():
    won, lost = play(GymEnv(Walk), [{}, {}], [["right", "up", "right"], ["left", "left"]])
    assert won.prompt[0]["content"] == "Play.\n\nat 0" and won.turns[0].replies[0]["content"] == "[1]"
    assert won.turns[1].replies[0]["content"] == "Error: KeyError: 'up'"
    assert (won.stop_reason, won.env_rewards) == (StopReason.ENV_DONE, {"return": 1.0})
    assert (lost.stop_reason, lost.env_rewards) == (StopReason.MAX_STEPS, {"return": 0.0})


def test_a_game_may_show_nothing_and_be_made_of_the_row():
    [game] = play(GymEnv(lambda row: Coin(row)), [{"side": "heads"}], [["tails", "heads"]])
    assert game.prompt[0]["content"] == "Play." and game.turns[0].replies[0]["content"] == "(nothing to see)"
    assert [turn.reward for turn in game.turns] == [0.0, 1.0] and game.turns[1].replies == []


def test_actions_may_stand_in_a_tag():
    texts = [
        "I think <act>left</act>",
        "right",
        "<act>right</act>",
        "<act>right",
        "<act>right</act>",
        "<act>right</act>",
    ]
    [game] = play(GymEnv(Walk, tag="act"), [{}], [texts])
    said = [turn.replies[0]["content"] if turn.replies else "" for turn in game.turns]
    assert said[0] == "[-1]" and said[2] == "[0]" and game.env_rewards == {"return": 1.0}
    assert said[1] == said[3] == "Error: ValueError: write your action between <act> and </act>."


def test_limits_leave_the_return():
    turns = [["right", "left", "right", "right"]] * 2
    [bounded] = play(GymEnv(Walk, max_turns=2), [{}], turns[:1])
    assert (bounded.stop_reason, len(bounded.turns)) == (StopReason.MAX_STEPS, 2)
    [refused] = play(GymEnv(Walk, max_turns=1), [{}], [["up"]])
    assert refused.stop_reason is StopReason.MAX_STEPS and refused.env_rewards == {"return": 0.0}
    [short] = play(GymEnv(Guess, parse=int), [{"seed": 5}], [[str((NUMBER + 1) % 10)] * 9], max_completion_tokens=40)
    assert short.stop_reason is StopReason.TOKEN_BUDGET and short.env_rewards["return"] < 0


class Shows:
    """Shows what its row says, or its seed."""

    def __init__(self, row):
        self.row = row

    def reset(self, seed):
        return self.row.get("shown", seed)

    def step(self, action):
        return None, 0.0, True


def shown(**row):
    [message] = asyncio.run(GymEnv(Shows).reset({"prompt": "", **row}))
    return message["content"]


def test_members_of_a_group_begin_with_the_same_game():
    assert shown(level=3) == shown(level=3) != shown(level=4)
    assert shown(level=3, seed=7) == "7"


def test_observations_become_text():
    seen = (None, "a", b"a", {"b": np.arange(2)}, 1.5)
    assert [shown(shown=each) for each in seen] == ["", "a", "a", '{"b": [0, 1]}', "1.5"]


def test_an_observation_follows_what_a_prompt_shows():
    image = {"type": "text", "text": "What is it?"}
    env = GymEnv(Guess, parse=int)
    [message] = asyncio.run(env.reset({"prompt": [{"role": "user", "content": [image]}]}))
    assert message["content"] == [image, {"type": "text", "text": '\n\n{"low": 0, "high": 9}'}]
    [message] = asyncio.run(GymEnv(Coin).reset({"prompt": [{"role": "user", "content": [image]}], "side": "head"}))
    assert message["content"] == [image]


class Broken(Walk):
    """Does what its row says."""

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
        if self.kind == "step hangs":
            time.sleep(1)
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
    *games, fine = play(GymEnv(make), [{"kind": kind} for kind in (*kinds, "fine")], [["go"]] * len(ERRORS))
    games += play(GymEnv(make, step_timeout=0.2), [{"kind": hangs}], [["go"]])
    for kind, game in zip((*kinds, hangs), games, strict=True):
        assert game.stop_reason is StopReason.ENV_ERROR and game.error.startswith(ERRORS[kind]), game.error
    assert fine.env_rewards == {"return": 1.0}


@pytest.mark.parametrize(
    ("make", "max_turns", "problem"),
    [
        (3, None, "`GymEnv` was given 3, which cannot be called"),
        (dict, None, "`GymEnv` was given dict, which has no `reset`: a game has `reset` and `step"),
        (Walk, 0, "`max_turns` is 0"),
    ],
)
def test_what_is_no_game_is_refused(make, max_turns, problem):
    with pytest.raises(ConfigError, match=problem):
        GymEnv(make, max_turns=max_turns)


def test_a_class_named_without_the_wrapper_is_told_of_it():
    with pytest.raises(ConfigError, match="wrap it in `mt_grpo.integrations.gym.GymEnv`"):
        check_source(Guess)
