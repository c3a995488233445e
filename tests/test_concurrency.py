"""The thread with the event loop: plain calls inside a running loop, Ctrl-C, and what does not let itself be ended."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import signal
import subprocess
import sys
import threading
import warnings

import pytest
from support.models import build_model, lookup
from support.own_process import TERMINAL
from support.reward_batches import score
from support.trainers import LETTERS
from support.trainers import SEARCH as CALL
from support.waiting import until

from mt_grpo import concurrency
from mt_grpo.concurrency import begin, call, in_thread, in_waiting_thread, run
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rewards import OutcomeReward, TurnReward
from mt_grpo.rollout import RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.trajectory import StopReason, Trajectory, Turn

INTERRUPT = '<tool>{"name": "interrupt", "args": {}}</tool>'
ANSWER = "<answer>Lima</answer>"


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def test_coroutines_and_threads_have_the_context_of_their_caller():
    variable = contextvars.ContextVar("variable")

    async def work():
        await asyncio.sleep(0)
        return variable.get(), in_main_thread(), await concurrency.call(variable.get, what="the tool")

    async def notebook():
        variable.set("seen")
        return run(work())

    assert asyncio.run(notebook()) == ("seen", False, "seen")


def test_a_call_that_would_wait_for_itself_is_refused():
    async def work():
        return run(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="would wait for itself: await the coroutine"):
        run(work())


@pytest.mark.own_process
def test_a_task_that_exits_ends_neither_thread_nor_process():
    async def leave():
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        run(leave())
    assert run(asyncio.sleep(0, "alive")) == "alive"


@pytest.mark.own_process
def test_a_wait_of_a_thread_outlives_no_main_threads_wait():
    """What only the main thread can do is asked of it while it waits; asked later, it would be cancelled."""
    waits, ends = threading.Event(), threading.Event()

    async def long():
        await in_thread(lambda: waits.set() or ends.wait(60), "long")

    async def begun():
        other.start()
        assert await in_thread(lambda: waits.wait(60), "begun")

    other = threading.Thread(target=lambda: run(long()))
    run(begun())
    ends.set()
    other.join(60)
    assert asyncio.run(in_waiting_thread(lambda: "called")) == "called"


def test_a_forked_process_has_a_loop_of_its_own():
    run(asyncio.sleep(0))
    child = os.fork()
    if not child:
        signal.alarm(20)
        os._exit(0 if run(asyncio.sleep(0, True)) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.own_process
def test_code_that_blocks_the_thread_is_left_behind(caplog, monkeypatch):
    monkeypatch.setattr(concurrency, "GRACE", 0.2)
    release = threading.Event()

    async def block():
        asyncio.current_task().set_name("conversation '7'")
        signal.raise_signal(signal.SIGINT)
        release.wait(60)

    with pytest.raises(KeyboardInterrupt):
        run(block())
    assert "blocks its thread" in caplog.text and "conversation '7'" in caplog.text
    assert run(asyncio.sleep(0, "alive")) == "alive"
    release.set()


# In a notebook


def test_calls_that_never_end_are_told_of(caplog, monkeypatch):
    """Each keeps a thread; a run that has many of them cannot begin another at last."""
    monkeypatch.setattr(concurrency, "_given_up", given_up := concurrency._GivenUp())
    monkeypatch.setattr(given_up, "step", 3)
    over = threading.Event()

    async def hang(number):
        calls = [call(over.wait, what="tool-hang", timeout=0.01) for _ in range(number)]
        return [type(each) for each in await asyncio.gather(*calls, return_exceptions=True)]

    async def interrupted():
        waiting = asyncio.ensure_future(call(over.wait, what="tool-hang", timeout=60))
        await asyncio.sleep(0)
        waiting.cancel()

    for number in (2, 1, 2):
        assert run(hang(number)) == [concurrency.OutOfTime] * number
    run(interrupted())  # by whoever wants no result: that is not the tool's doing
    (said,) = caplog.messages
    assert said.startswith("3 calls that were out of time still run, most of tool-hang, each in a thread")
    over.set()
    until(lambda: given_up._running.total() == 0)


def test_env_generate_works_inside_a_running_loop(tokenizer):
    async def notebook():
        return MultiTurnToolEnv([lookup]).generate(["Lima?"], ScriptedEngine(tokenizer, [CALL, ANSWER]))

    messages = asyncio.run(notebook())["messages"][0]
    assert [message["content"] for message in messages] == [CALL, "<result>about Lima</result>", ANSWER]


def test_plain_rewards_run_in_the_callers_thread():
    class Plain(OutcomeReward):
        def score(self, trajectory, **row):
            signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))  # the main thread only
            return float(in_main_thread())

    class Judge(TurnReward):
        async def score(self, turn, trajectory, **row):
            return float(in_main_thread())

    async def notebook():
        return score([Judge()], [Plain()], [Trajectory([], [Turn(0, {"role": "assistant", "content": "a"})])])

    scores = asyncio.run(notebook())
    assert scores.turn == [[[0.0]]] and scores.outcome == [[1.0]]


@pytest.fixture
def trainer_of(build, tokenizer):
    """Of an asynchronous reward."""

    class Letters(OutcomeReward):
        async def score(self, trajectory, **row):
            return float(sum(turn.text.count("a") for turn in trajectory.turns))

    def make(env, script, **options):
        model = build_model(tokenizer, max_position_embeddings=2048)
        return build(script, model, LETTERS, env=env, advantage_estimator=None, **options)

    return make


def test_the_trainer_trains_inside_a_running_loop(trainer_of):
    async def notebook():
        (trainer := trainer_of(MultiTurnToolEnv([lookup]), None, max_turn_length=4)).train()
        await asyncio.sleep(0)
        return trainer.state.global_step

    assert asyncio.run(notebook()) == 2


# Ctrl-C and failures


class Interrupting:
    """A tool that presses Ctrl-C on its second call, and another that never ends meanwhile."""

    calls = cancelled = 0

    def interrupt(self) -> str:
        """Presses Ctrl-C."""
        self.calls += 1
        if self.calls == 2:
            signal.raise_signal(signal.SIGINT)  # in this thread: nothing wakes the main one
        return "pressed"

    async def lookup(self, query: str) -> str:
        """
        Looks a query up.

        Args:
            query: What to look for.
        """
        if self.calls != 1 or query != "hang":
            return f"about {query}"
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled += 1


async def other_tasks():
    """Tasks of the background loop that are left."""
    return asyncio.all_tasks() - {asyncio.current_task()}


@pytest.mark.own_process
def test_training_goes_on_rightly_after_ctrl_c(trainer_of):
    """In the second step, with conversations at a tool, in the engine and ended."""
    tools, sessions = Interrupting(), []

    def script(session, turn):
        sessions.append(session)
        member = int(session.rsplit("-", 1)[1]) % 4
        hang = CALL.replace("Lima", "hang")
        return {0: [INTERRUPT, ANSWER], 1: [hang, hang, ANSWER]}.get(member, [CALL, "<answer>a</answer>"])[turn]

    env = MultiTurnToolEnv([tools.interrupt, tools.lookup])
    options = {"steps_per_generation": 1, "gradient_accumulation_steps": 1, "tokenization_sanity_check_mode": "strict"}
    trainer = trainer_of(env, script, **options)
    thresholds, threads = gc.get_threshold(), threading.active_count()
    tools.calls = 1  # the first call of all presses
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert gc.get_threshold() == thresholds and tools.cancelled <= 1
    assert not run(other_tasks())
    sessions.clear()
    trainer.train()
    assert trainer.state.global_step == 2 and len(set(sessions)) == 8
    assert [row["stop/answered"] for row in trainer.state.log_history if "loss" in row] == [1.0, 1.0]
    assert threading.active_count() <= threads + 1  # the background thread


@pytest.mark.own_process
def test_a_model_interrupted_while_sampling_samples_again(trainer_of):
    trainer = trainer_of(MultiTurnToolEnv(), None, max_turn_length=200)
    forwards = []

    def press(*_: object) -> None:
        forwards.append(1)
        if len(forwards) == 60:  # after the engine was measured
            signal.raise_signal(signal.SIGINT)

    trainer.model.register_forward_pre_hook(press)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.runner.engine._batch is None and not trainer.runner.engine._live
    assert len(forwards) < 240 and trainer.model.training
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("error", [MemoryError("full"), KeyboardInterrupt(), SystemExit(1), ZeroDivisionError("bug")])
def test_rollouts_go_on_after_whatever_ended_the_last_ones(tokenizer, error):
    def fail_once(trajectory: Trajectory) -> None:
        if not failed:
            failed.append(trajectory.session)
            raise error

    failed, thresholds = [], gc.get_threshold()
    engine = ScriptedEngine(tokenizer, [CALL, ANSWER], latency=lambda session, turn: 0.0 if session == "1" else 0.05)
    runner = RolloutRunner(MultiTurnToolEnv([lookup]), engine, sanity_check_mode="strict")
    requests = [RolloutRequest("hi", str(index)) for index in range(4)]
    with pytest.raises(type(error)):
        run(runner.run(requests, SamplingParams(), fail_once))
    assert gc.get_threshold() == thresholds and failed == ["1"]
    trajectories = run(runner.run(requests, SamplingParams(), fail_once))
    assert [trajectory.stop_reason for trajectory in trajectories] == [StopReason.ANSWERED] * 4


# What does not let itself be ended

STUBBORN = """
import asyncio, threading
from mt_grpo import concurrency
from mt_grpo.concurrency import run
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rewards import OutcomeReward
from mt_grpo.tools import Tool
from mt_grpo.trajectory import ToolCall, Trajectory, Turn
from support.reward_batches import score

concurrency.GRACE = 0.5

async def swallow():
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

async def pressed():
    signal.raise_signal(signal.SIGINT)
    await swallow()

class Judge(OutcomeReward):
    async def score(self, trajectory, **row):
        await pressed()

async def in_thread():
    await asyncio.to_thread(threading.Event().wait)

def step(function, timeout, do=run):
    tool = Tool(function.__name__, "A tool.", {"type": "object", "properties": {}}, function)
    turn = Turn(0, {}, [ToolCall(tool.name)])
    try:
        do(MultiTurnToolEnv([tool], tool_timeout=timeout).step(turn))
    except KeyboardInterrupt:
        print("interrupted")
    print(turn.tool_calls[0].error)

def block():
    threading.Event().wait()

step(block, 0.1)
step(block, 0.1, asyncio.run)
step(in_thread, 0.1)
step(pressed, None)
try:
    score([], [Judge()], [Trajectory([], [Turn(0, {}, [])])])
except KeyboardInterrupt:
    print("interrupted")
step(swallow, 0.1)
"""


def test_what_hangs_or_is_stubborn_lets_the_process_end():
    command = [sys.executable, "-c", TERMINAL + STUBBORN]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.stdout.splitlines() == [
        *["block took longer than 0.1 s."] * 2,
        "in_thread took longer than 0.1 s.",
        *("interrupted", "pressed did not finish before the conversation ended."),
        "interrupted",
        "swallow took longer than 0.1 s.",
    ]
    assert ended.returncode == 0
    for task in ("tool 'pressed'", "reward 'Judge'", "tool 'swallow'"):
        assert f"not ended within 0.5 s: {task}" in ended.stderr


def test_work_that_is_cancelled_before_it_begins_is_closed():
    """Python warns of a coroutine that was never awaited."""
    begun = []

    async def work():
        begun.append(True)

    async def cancelled():
        task = begin(work(), "work")
        task.cancel()
        await asyncio.wait([task])

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        asyncio.run(cancelled())
        gc.collect()
    assert not begun and not [one.message for one in warned if "work" in str(one.message)]
