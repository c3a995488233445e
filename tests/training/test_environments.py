"""Environments of a run: several by the rows' column, closed after rewards have seen them, and named in recipes."""

import gc
import json
import re
import sys
import threading
import weakref

import pytest
import torch
from datasets import Dataset
from support.models import CPU_RUN, lookup
from support.trainers import SEARCH, member

from mt_grpo.envs import EnvSource, MultiTurnToolEnv, Step, StepEnv
from mt_grpo.errors import ConfigError
from mt_grpo.options.table import OF_ENVIRONMENT
from mt_grpo.rewards import EnvReward, OutcomeReward
from mt_grpo.training import MTGRPOConfig
from mt_grpo.training.environment import build_env, check_env
from mt_grpo.trajectory import StopReason


class Guess(StepEnv):
    """Asks for a number; every conversation has one of its own."""

    open = 0

    def reset(self, row):
        Guess.open += 1
        self.number = row["number"]
        return f"Guess: {row['prompt']}"

    def step(self, turn):
        if turn.index:
            return Step(done=True, rewards={"near": -abs(self.number - len(turn.text)) / 10})
        return "Again."

    async def close(self):
        Guess.open -= 1
        self.number = None


class Looks(OutcomeReward):
    """Sees the environments as they are when their conversations are over."""

    def __init__(self):
        self.seen = []

    def score(self, trajectory, **row):
        self.seen.append((type(trajectory.environment).__name__, getattr(trajectory.environment, "number", 0)))
        return 0.0


class Fails(OutcomeReward):
    def score(self, trajectory, **row):
        raise ZeroDivisionError


ROWS = [
    {"prompt": "What is Lima", "environment": "tools", "number": None},
    {"prompt": "a number", "environment": "guess", "number": 7},
]


def script(session, turn):
    if member(session) < 4:
        return [SEARCH, "<answer>Lima</answer>"][turn]
    return "four " * (member(session) + turn)


@pytest.fixture
def mixed(build, monkeypatch):
    def make(*rewards, rows=ROWS):
        env = {"tools": MultiTurnToolEnv([lookup], "Search.", protocol="learnt_tags"), "guess": Guess}
        given = {"train_dataset": Dataset.from_list(rows), "eval_dataset": None, "advantage_estimator": None}
        return build(script, rewards=((), rewards), env=env, **given)

    monkeypatch.setattr(Guess, "open", 0)
    return make


def sample(trainer):
    trainer.current_gradient_accumulation_steps = 1
    return trainer._generate_and_score_completions([trainer.train_dataset[index // 4] for index in range(8)])


def test_every_row_has_the_environment_that_it_names(mixed):
    trainer = mixed(EnvReward(), looks := Looks())
    inputs = sample(trainer)
    tools, guesses = trainer.batch.trajectories[:4], trainer.batch.trajectories[4:]
    assert {each.prompt[0]["content"] for each in tools} == {"Search."}
    assert {(each.prompt[0]["content"], each.stop_reason) for each in guesses} == {
        ("Guess: a number", StopReason.ENV_DONE)
    }
    assert all(trajectory.turns[0].has_result and trajectory.answer == "Lima" for trajectory in tools)
    assert looks.seen == [("MultiTurnToolEnv", 0)] * 4 + [("Guess", 7)] * 4 and Guess.open == 0
    rewards = trainer.batch.rewards_per_func[:, 0]
    assert rewards[:4].isnan().all() and rewards[4:].unique().numel() == 4
    assert inputs["advantages"][4:].any() and not inputs["advantages"][:4].any()
    assert torch.isfinite(trainer._compute_loss(trainer.model, inputs))


def test_environments_are_closed_though_a_reward_fails(mixed):
    with pytest.raises(Exception, match="ZeroDivisionError"):
        sample(mixed(Fails()))
    assert Guess.open == 0


def test_environments_that_wait_to_be_judged_are_closed(mixed):
    """Though judging an earlier one fails."""
    trainer, waits = mixed(EnvReward(), rows=ROWS[1:]), threading.Event()
    trainer.runner.engine._latency = lambda session, turn: 0.02 * member(session)

    def take(ended):
        while trainer.runner._running:  # others end meanwhile
            waits.wait(0.001)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trainer.converse([dict(ROWS[1])] * 3, [False] * 3, 1, take)
    assert Guess.open == 0


def test_conversations_that_were_taken_are_let_go(mixed):
    """All of an evaluation together may be more than fits into memory."""
    trainer, taken = mixed(EnvReward(), rows=ROWS[1:]), []
    trainer.runner.engine._latency = lambda session, turn: 0.02 * member(session)
    trainer.converse(
        [dict(ROWS[1])] * 3, [False] * 3, 1, lambda ended: taken.extend(map(weakref.ref, ended.trajectories))
    )
    gc.collect()
    assert len(taken) == 3 and not any(each() for each in taken) and Guess.open == 0


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({**ROWS[1], "environment": "gues"}, r"names the environment 'gues'.*'guess'"),
        ({"prompt": "a number", "number": 7}, "the dataset has no column `environment`"),
    ],
)
def test_rows_without_an_environment_of_theirs_are_refused(mixed, row, problem):
    with pytest.raises(ConfigError, match=problem):
        mixed(EnvReward(), rows=[row] * 2)


class Brings(EnvSource):
    """Brings all that a run needs of data."""

    async def make(self, row):
        return Guess()

    def rows(self, split):
        return Dataset.from_list([{"prompt": split, "number": 7}] * 2)

    def rewards(self):
        return [EnvReward("near")]

    def check(self, rows, name):
        if "number" not in rows.column_names:
            raise ConfigError(f"There is no number in the {name}.")


def test_a_source_brings_its_rows_and_rewards(build):
    given = {"rewards": (None, None), "env": Brings(), "eval_dataset": None, "do_eval": True}
    trainer = build(script, train_dataset=None, **given)
    assert trainer.train_dataset[0]["prompt"] == "train" and trainer.eval_dataset[0]["prompt"] == "eval"
    sample(trainer)
    assert not trainer.batch.rewards_per_func.isnan().any()
    with pytest.raises(ConfigError, match="no number in the training dataset"):
        build(script, train_dataset=[{"prompt": "a number"}], **given)


# Named in a recipe


@pytest.fixture
def config(tmp_path):
    return lambda **options: MTGRPOConfig(str(tmp_path), **CPU_RUN, **options)


@pytest.fixture
def named(config):
    return lambda **options: build_env(config(**options))


def test_options_of_one_of_several_environments_are_its_own(named):
    search = {"tools": ["support.models.lookup"], "max_env_steps": 2}
    env = named(environments={"search": search, "talk": {"call_protocol": "native"}}, max_env_steps=4)
    assert (env["search"].max_steps, list(env["search"].tools)) == (2, ["lookup"])
    assert (env["talk"].max_steps, env["talk"].tools, env["talk"].protocol.native_tools) == (4, {}, True)
    assert list(named(environments='{"one": {"max_env_steps": 1}}')) == ["one"]  # of the command line


def test_tools_of_the_trainer_are_those_of_each_environment(config):
    """As tools of a recipe are, where an environment names no others."""
    several = {"a": {}, "b": {"tools": ["calculator"]}, "c": {"max_env_steps": 2}}
    made = build_env(config(environments=several), tools=[lookup])
    assert [list(made[name].tools) for name in "abc"] == [["lookup"], ["calculator"], ["lookup"]]
    assert made["a"].protocol.native_tools and (made["a"].max_steps, made["c"].max_steps) == (sys.maxsize, 2)


PATH, SCHEDULER = f"{__file__}:Guess", {"multi_turn_scheduler": "retry_scheduler"}
USER = {"base_url": "http://a:1/v1", "model": "m", "system_prompt": "You ask."}
GAMES, TOOLS = {"games": 2}, {"tools": ["calculator"], "max_env_steps": 2}
TYPED = [
    ({"type": "tools", **TOOLS}, TOOLS),
    ({"type": "class", "path": PATH}, {"env": PATH}),
    ({"type": "trl", "factory": "a.B"}, {"environment_factory": "a.B"}),
    ({"type": "agent", "function": "a.solve"}, {"agent": {"function": "a.solve"}}),
    ({"type": "interactions", "file": "a.yaml"}, {"interaction_config_file": "a.yaml"}),
    ({"type": "scheduler", "name": "retry_scheduler", "max_turns": 3}, {**SCHEDULER, "max_turns": 3}),
    ({"type": "simulated_user", **USER}, {"simulated_user": USER}),
    ({"type": "verifiers", "name": "wordle", "config": GAMES}, {"env": "verifiers:wordle", "env_config": GAMES}),
]


@pytest.mark.parametrize(("typed", "options"), TYPED, ids=[typed["type"] for typed, _ in TYPED])
def test_an_env_of_a_type_is_the_older_options(config, typed, options):
    def resolved(**given):
        return {name: getattr(config(**given), name) for name in OF_ENVIRONMENT}

    assert resolved(env=typed) == resolved(env=json.dumps(typed)) == resolved(**options)
    several = config(environments={"a": typed}).environments["a"]
    assert {name: value for name, value in several.items() if value is not None} == options


class Count:
    def reset(self):
        return 0

    def step(self, action):
        return action, 1.0, True


def test_a_game_is_made_of_its_keys(named):
    env = {"type": "gym", "make": f"{__file__}:Count", "parse": "int", "max_turns": 2}
    made = named(env=env)
    assert (made.make.__name__, made.parse, made.max_turns, made.tag) == ("Count", int, 2, None)
    assert named(environments={"a": env, "b": {}})["a"].parse is int
    assert [*named(environments={"a": {"tools": "calculator"}})["a"].tools] == ["calculator"]  # no list of letters
    with pytest.raises(ConfigError, match="`max_env_steps: 3` has no effect on `env: {type: gym}`: only what is made"):
        named(env=env, max_env_steps=3)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"env": {"type": "agnet"}}, "`env: type` is 'agnet'; the nearest is 'agent': choose one of tools, simulated"),
        ({"env": {"path": "a.B"}}, "`env` has no `type`: name one of tools, simulated_user, interactions, class, "),
        ({"env": {"type": "gym"}}, "`env` of the type `gym` has no `make`: give it."),
        (
            {"env": {"type": "agent", "functoin": "a.solve"}},
            "`env` of the type `agent` has an unknown key 'functoin'; the nearest is 'function': it takes function, "
            "command, host, call_protocol.",
        ),
        (
            {"env": {"type": "gym", "make": "a.b", None: 1}},
            "`env` of the type `gym` has an unknown key None: it takes",
        ),
        (
            {"env": {"type": "agent", "function": "a.b"}, **SCHEDULER},
            "`env` of the type `agent` and `multi_turn_scheduler` both say who answers the model: leave one of them",
        ),
        (
            {"env": {"type": "tools", "tools": ["search"]}, "tools": ["calculator"]},
            "`tools` is set both in `env` of the type `tools` and beside it: leave one of them out.",
        ),
        ({"environments": {"a": {"type": "gyn"}}}, "`environments: a: type` is 'gyn'; the nearest is 'gym': choose"),
        ({"environments": {}}, "`environments` is a mapping from the names"),
        ({"environments": "[1]"}, "`environments` is a mapping from the names"),
        ({"environments": {"a": 3}}, "`environments: a` is 3: give a dotted path, or a mapping"),
        ({"environments": {"a": {"tool": []}}}, "key 'tool' of `environments: a` is unknown; the nearest is 'tools'"),
        ({"environments": {"a": {3: []}}}, "The key 3 of `environments: a` is unknown: it takes tools, "),
        ({"environments": {"a": {"tool_timeout": "60"}}}, "`tool_timeout` of `environments: a` is '60'; give a num"),
        ({"environments": {"a": {"env_mask": 2}}}, "`env_mask` of `environments: a` is 2; set 0"),
        ({"environments": '{"a": '}, "`environments` is '{\"a\": ', which is not a JSON mapping"),
        ({"environment_factory": '{"a": '}, "`environment_factory` is '{\"a\": ', which is not a JSON mapping"),
        ({"environments": {"a": "mt_grpo.envs.Step"}}, "`environments: a` is the class Step, which has no `run`"),
        ({"env": "mt_grpo.envs.StepEnv"}, "`env` is the class StepEnv, which lacks reset, step"),
    ],
)
def test_environments_that_are_none_are_refused(named, options, problem):
    with pytest.raises(ConfigError, match=re.escape(problem)):
        named(**options)


@pytest.mark.parametrize(
    "options", [{"tools": ["calculator"]}, {"max_env_steps": 3}, {"call_protocol": "native"}, {"env_mask": 1}]
)
def test_options_that_an_environment_does_not_take_are_refused(config, named, options):
    (name,) = options
    cases = [
        ("`.*Guess`: only what is made of", lambda: named(env=PATH, **options)),
        ("`.*Guess` of `environments: a`: only", lambda: named(environments={"a": {"env": PATH, **options}})),
        ("the `env` that the trainer was given", lambda: check_env(Guess, config(**options))),
        ("the `env` that the trainer was given", lambda: check_env(Guess(), config(**options))),
        ("any of `environments`: only what", lambda: named(environments={"a": PATH, "b": PATH}, **options)),
    ]
    for says, act in cases:
        with pytest.raises(ConfigError, match=f"`{name}: .*` has no effect on {says}"):
            act()
    assert named(environments={"a": PATH, "b": {}}, **options)["a"].__name__ == "Guess"
