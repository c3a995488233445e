"""Environments of TRL's form: in one conversation, and their instances between conversations."""

import asyncio
import gc
import signal
import threading
import time

import pytest
from support.conversations import play
from support.images import picture
from support.models import build_tokenizer
from support.trl_environments import DOORS, LEDGER, Ledger, Stopped, Waking, called
from support.waiting import until_true
from trl.chat_template_utils import add_response_schema

from mt_grpo.concurrency import OutOfTime
from mt_grpo.concurrency import run as run_and_wait
from mt_grpo.envs.source import close_environments
from mt_grpo.errors import UserError
from mt_grpo.integrations.trl import TRLEnv
from mt_grpo.tools import BaseTool, OpenAIFunctionToolSchema
from mt_grpo.trajectory import StopReason

DONE = ["Done."]


def run(env, rows, turns, **options):
    return play(env, turns, rows, prompt="Play.", tokenizer=add_response_schema(build_tokenizer()), **options)[0]


def results(trajectory):
    return [call.result for turn in trajectory.turns for call in turn.tool_calls]


def test_methods_are_tools_of_the_conversation_s_own_instance():
    env = TRLEnv(Ledger, [], "Add.", 7)
    assert (env.system_prompt, env.max_steps) == ("Add.", 7)
    env = TRLEnv(Ledger)
    assert sorted(env.tools) == ["add", "double", "fail"] and env.reward_name == "Ledger"
    added, failed, wrong, idle = run(env, [{"start": start} for start in (0, 10, 20, 30)], LEDGER)
    assert added.prompt == [{"role": "user", "content": "Play. It begins at 0."}]
    assert results(added) == ["2", "5", "{'total': 10}"]
    assert results(failed) == ["{'error': 'too late'}", "11"]
    unexpected, unknown = results(wrong)
    assert unexpected == "{'error': \"Ledger.add() got an unexpected keyword argument 'sum'\"}"
    assert "unknown tool 'multiply'" in unknown and unknown.startswith("{'error': ")
    assert [one.env_rewards["Ledger"] for one in (added, failed, wrong, idle)] == [10.0, 11.0, 20.0, 30.0]
    assert {one.stop_reason for one in (added, failed, wrong, idle)} == {StopReason.ANSWERED}


def test_async_classes_work_and_their_reset_is_shown():
    trajectories = run(TRLEnv(Waking), [{}] * 4, DOORS)
    assert trajectories[0].prompt[-1]["content"] == "Play. Open the doors. Now."
    assert [one.env_rewards["Waking"] for one in trajectories] == [0.5, 1.0, 0.0, 0.5]


def test_instances_are_made_once_and_used_again():
    env = TRLEnv(Ledger)
    Ledger.made = 0
    for _ in range(3):
        run(env, [{}] * 3, DONE)
    assert Ledger.made == 2 and len(env.pool) == 3  # the first was made to read its methods
    run(env, [{}] * 5, DONE, max_concurrent=1)
    assert Ledger.made == 2


def test_rewards_get_the_user_s_instance():
    env = TRLEnv(Ledger)
    [trajectory] = run(env, [{"start": 4}], DONE, keep=True)
    users = trajectory.environment.user_environment
    assert type(users) is Ledger and users.total == 4 and len(env.pool) == 0
    asyncio.run(close_environments([trajectory]))
    assert len(env.pool) == 1


def test_a_tool_may_end_the_conversation_and_close_is_none():
    env = TRLEnv(Stopped)
    assert "close" not in env.tools
    [trajectory] = run(env, [{}], [called("add", amount=1), called("finish"), "never"])
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.ENV_DONE, 2)
    assert trajectory.env_rewards == {"Stopped": 1.0}


def test_instances_are_closed_when_nothing_uses_them():
    Stopped.closed = []
    env = TRLEnv(Stopped)
    run(env, [{}, {}], DONE)
    assert Stopped.closed == []
    del env
    gc.collect()
    assert sorted(Stopped.closed) == [1, 1]


def test_columns_may_have_any_name():
    row = {"name": "a", "arguments": "c", "what": "d", "start": 2}
    [trajectory] = run(TRLEnv(Ledger), [row], DONE)
    assert trajectory.error is None and trajectory.env_rewards == {"Ledger": 2.0}


def test_a_tool_that_is_not_released_leaves_the_instance():
    class Held(BaseTool):
        async def release(self, instance_id, **kwargs):
            raise ZeroDivisionError

    function = {"name": "held", "description": "Holds.", "parameters": {"type": "object", "properties": {}}}
    env = TRLEnv(Ledger, [Held({}, OpenAIFunctionToolSchema.model_validate({"function": function}))])
    run(env, [{}], [called("held"), *DONE])
    assert len(env.pool) == 1


def test_a_limit_leaves_the_reward():
    adds = [called("add", amount=2)] * 9
    [trajectory] = run(TRLEnv(Ledger, max_steps=1), [{}], adds)
    assert trajectory.stop_reason is StopReason.MAX_STEPS and trajectory.env_rewards == {"Ledger": 2.0}
    [trajectory] = run(TRLEnv(Ledger), [{}], adds, max_completion_tokens=150)
    assert trajectory.stop_reason is StopReason.TOKEN_BUDGET and trajectory.env_rewards["Ledger"] > 0


class Broken:
    closed: list[str] = []

    def reset(self, kind):
        self.kind = kind
        if kind == "reset raises":
            raise ZeroDivisionError("in reset")
        time.sleep(2 * (kind == "reset hangs"))
        return {"reset shows an image": [{"type": "image"}], "reset returns nothing": None}.get(kind, "")

    def wait(self) -> str:
        """Waits."""
        time.sleep(2 * (self.kind == "tool hangs"))
        if self.kind == "tool exits":
            raise SystemExit(3)
        return "waited"

    def get_reward(self):
        if self.kind == "reward raises":
            raise ZeroDivisionError("in get_reward")
        rewards = {"nan": float("nan"), "none": None, "infinite": float("inf"), "text": "1.0", "a list": [1.0]}
        return rewards.get(self.kind.removeprefix("reward is "), 1)

    def close(self):
        Broken.closed.append(self.kind)
        raise ZeroDivisionError("in close")


ERRORS = {
    "reset raises": "FactoryError: Broken.reset raised ZeroDivisionError: in reset",
    "reset hangs": "OutOfTime: Broken.reset took longer than 0.3 s.",
    "reset shows an image": "MediumError: A message has a place for an image and no image: give as many images as "
    "places in the row's column `images`, or an image in the part itself.",
    "reward raises": "FactoryError: Broken.get_reward raised ZeroDivisionError: in get_reward",
    "reward is infinite": "FactoryError: Broken.get_reward returned inf: return a finite number.",
    "reward is text": "FactoryError: Broken.get_reward returned '1.0': return a finite number.",
    "reward is a list": "FactoryError: Broken.get_reward returned [1.0]: return a finite number.",
}


def test_whatever_a_class_does_ends_its_conversation_only():
    kinds = [*ERRORS, "tool hangs", "tool exits", "reward is nan", "reward is none", "reset returns nothing"]
    Broken.closed = []
    hanging = [kind for kind in kinds if "hangs" in kind]
    limits = {TRLEnv(Broken): [kind for kind in kinds if kind not in hanging]}
    limits[TRLEnv(Broken, tool_timeout=0.3)] = hanging
    ended = {}
    for env, some in limits.items():
        ended |= zip(some, run(env, [{"kind": kind} for kind in some], [called("wait"), "Done."]), strict=True)
    for kind, trajectory in ended.items():
        reason = StopReason.ENV_ERROR if kind in ERRORS else StopReason.ANSWERED
        assert (trajectory.stop_reason, trajectory.error) == (reason, ERRORS.get(kind))
    assert results(ended["tool hangs"]) == ["{'error': 'wait took longer than 0.3 s.'}"]
    assert results(ended["tool exits"]) == ["{'error': 'SystemExit: 3'}"]
    assert ended["reward is nan"].env_rewards == ended["reward is none"].env_rewards == {}
    assert ended["reset returns nothing"].env_rewards == {"Broken": 1.0}
    assert sorted(Broken.closed) == ["reset hangs", "reset raises", "tool hangs"]  # the rest can be used again
    assert [len(env.pool) for env in limits] == [len(kinds) - 3, 0]


def test_a_conversation_without_time_gives_its_instance_up():
    Broken.closed = []
    env = TRLEnv(Broken, tool_timeout=5.0)
    [trajectory] = run(env, [{"kind": "tool hangs"}], [called("wait")], rollout_timeout=0.3)
    assert trajectory.stop_reason is StopReason.TIMEOUT and trajectory.env_rewards == {}
    assert Broken.closed == ["tool hangs"] and len(env.pool) == 0


def test_an_instance_made_too_late_is_kept_for_others():
    def slow():
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.6)
        return Ledger()

    env = TRLEnv(slow)

    async def hold_all():
        await env.pool.take(None)
        making = asyncio.ensure_future(env.pool.take(None))
        await asyncio.sleep(0.1)
        making.cancel()
        await asyncio.wait([making])
        with pytest.raises(OutOfTime):
            await env.pool.take(0.05)
        await until_true(lambda: len(env.pool) == 2, limit=60.0)

    asyncio.run(hold_all())


# Refused at the door


class NoReset:
    def act(self, what):
        pass


class Undescribed(NoReset):
    def reset(self, **row):
        pass


def raises():
    raise ZeroDivisionError("in the factory")


@pytest.mark.parametrize(
    ("factory", "problem"),
    [
        (3, "`environment_factory` is 3, which cannot be called"),
        (lambda row: row, "makes nothing without arguments .TypeError"),
        (raises, "`environment_factory` raises makes nothing without arguments .ZeroDivisionError: in the fac"),
        (NoReset, "`environment_factory` NoReset makes NoReset, which has no `reset`"),
        (Undescribed, "The tool 'act' has no docstring"),
    ],
)
def test_what_makes_no_environment_is_refused(factory, problem):
    with pytest.raises(UserError, match=problem):
        TRLEnv(factory)


class Timed:
    """Bounds its own time with a signal, which only the main thread can do."""

    def reset(self, **row):
        self.limit()

    def limit(self) -> str:
        """Sets the handler of a signal."""
        signal.signal(signal.SIGUSR1, signal.signal(signal.SIGUSR1, signal.SIG_DFL))
        return "in time"


def test_a_class_may_use_signals():
    [trajectory] = run(TRLEnv(Timed), [{}], [called("limit"), "Done."], run=run_and_wait)
    assert results(trajectory) == ["in time"]


class Camera:
    def reset(self, **row):
        return None

    def look(self) -> list:
        """Takes an image."""
        return [{"type": "image", "image": picture()}, {"type": "text", "text": "a page"}]

    def listen(self) -> list:
        """Takes a sound."""
        return [{"type": "audio", "audio": [0.0] * 160}]


@pytest.mark.parametrize(("method", "shows"), [("look", "shows an image"), ("listen", "plays a sound")])
def test_what_a_model_cannot_read_ends_the_conversation(method, shows):
    [trajectory] = run(TRLEnv(Camera), [{}], [called(method)])
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    told = f"TemplateError: A message of 'tool' {shows}, and this run gives its model text only: use a"
    assert trajectory.error.startswith(told)
