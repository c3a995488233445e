"""Nothing that tools and environments do hangs or ends a run, and nothing of it is left."""

import asyncio
import contextlib
import gc
import json
import logging
import os
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support import hostile
from support.hostile import COUNTS, GATE, HARMS, LOOPS, NONSENSE, RAISED, VALUES
from support.models import build_tokenizer
from support.waiting import until

from mt_grpo.concurrency import run
from mt_grpo.envs import MultiTurnToolEnv, source
from mt_grpo.envs.source import close_environments
from mt_grpo.rollout import RolloutLimits, RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.rollout import runner as runners
from mt_grpo.runlog.files import to_json
from mt_grpo.tools.mcp import mcp_tools
from mt_grpo.tools.mcp.session import mcp_thread
from mt_grpo.trajectory import Trajectory

ROLLOUT_TIMEOUT, GRACE = 1.0, 0.3
PATIENCE = 60.0  # for conversations that must not run out of time, on a machine that may be busy
CONCURRENT = 64
END = "<|im_end|>"
SERVER = Path(__file__).parent.parent / "support" / "mcp_server.py"


@dataclass
class Conversation:
    """What its model says, its row, and what must become of it."""

    turns: list[str]
    row: dict
    reason: str
    error: str | None = None  # a part of it
    check: Callable[[Trajectory], None] = lambda trajectory: None


def call(name, **arguments):
    return f"<tool>{json.dumps({'name': name, 'args': arguments})}</tool>"


ANSWER = "<answer>A</answer>"
LATE_HARMS = ("hang", "swallow")
OUT_OF_TIME = "timeout", f"took longer than {ROLLOUT_TIMEOUT:g} s."


def of_tools(expected):
    """Calls of plain tools, four a turn and two turns a conversation; what ends one, after another call."""
    late = [name for name, (_, error) in expected.items() if error == hostile.late(name)]
    ending = ["ends", "big", "big_bytes", "big_error"]
    quick = [name for name in expected if name not in (*late, *ending)]
    for begin in range(0, len(quick), 8):
        yield calls_of([quick[begin : begin + 4], quick[begin + 4 : begin + 8]], expected)
    yield calls_of([[*late[:4], "sync_fine"], late[4:] * 2], expected, "hurried_tools")  # the last one by one
    for name in ending:
        yield calls_of([["sync_fine"], ["async_fine", name]], expected, ends=True)


def calls_of(names, expected, env="tools", ends=False):
    names = [each for each in names if each]
    reason = "answered" if not ends else "env_done" if names[-1][-1] == "ends" else "token_budget"

    def check(trajectory):
        for turn, called in zip(trajectory.turns, names, strict=False):
            for one, name in zip(turn.tool_calls, called, strict=True):
                result, error = expected[name]
                assert one.executed and one.result.startswith(result), (name, one.result[:200])
                assert (one.error is None) == (error is None), (name, one.error)
                assert error is None or one.error.startswith(error), (name, one.error)
                assert error != hostile.late(name) or one.seconds >= hostile.TIMEOUT
                assert one.data == ({"n": float("inf")} if name.endswith("_data") else None)
        assert len(trajectory.turns) == len(names) + (not ends)
        assert trajectory.answer == (None if ends else "A")

    turns = ["".join(map(call, called)) for called in names] + [ANSWER]
    return Conversation(turns, {"environment": env}, reason, None, check)


def of_untimed_tools():
    """Calls without a limit of their own end with the conversation's."""
    for name in ("sync_hangs", "async_hangs", "async_swallows", "async_swallows_and_raises"):

        def check(trajectory, name=name):
            [one] = trajectory.turns[0].tool_calls
            assert one.error == f"{name} did not finish before the conversation ended."

        yield Conversation([call(name)], {"environment": "untimed"}, *OUT_OF_TIME, check)


def of_states():
    """A tool that does harm in one of its methods, between two that do none."""
    for method in ("create", "execute", "calc_reward", "release"):
        for how in [*HARMS, *NONSENSE] if method == "execute" else HARMS:

            def check(trajectory, method=method, how=how):
                first, harmed = trajectory.turns[0].tool_calls
                assert first.result == "done" and trajectory.answer == "A"
                fails = method in ("create", "execute")
                assert (trajectory.turns[0].reward, harmed.error is None) == ((1.0, True), (0.5, False))[fails]
                if fails:
                    error = NONSENSE[how][1] if how in NONSENSE else HARMS[how]
                    assert error in harmed.error, harmed.error
                scored = {"first", "last"} | ({"harm"} if method not in ("create", "calc_reward") else set())
                assert trajectory.env_rewards.keys() == scored

            name = "hurried_states" if how in LATE_HARMS else "states"
            row = {"environment": name, "tools_kwargs": {"harm": {"create_kwargs": {"harms": {method: how}}}}}
            yield Conversation([call("first") + call("harm"), ANSWER], row, "answered", None, check)


def of_steps():
    """A `StepEnv` that does harm in one of its methods, in the event loop or in a thread."""

    def scored(trajectory):
        assert trajectory.env_rewards == {"score": 1.0} and trajectory.turns[0].reward == 0.5

    for kind, harms in (("steps", HARMS), ("plain", [*RAISED, "hang"])):
        for where in ("reset", "step", "close"):
            values = VALUES.get(where, {})
            for how in [*values, *harms]:
                name = f"hurried_{kind}" if how in LATE_HARMS else kind
                row = {"environment": name, "where": where, "how": how}
                if where == "close":
                    yield Conversation(["Hi"], row, "env_done", None, scored)
                else:
                    yield Conversation(["Hi"], row, "env_error", values[how][1] if how in values else HARMS[how])


def of_loops():
    """An environment with a loop of its own."""
    for how in [*LOOPS, *HARMS]:
        ends = OUT_OF_TIME if how in LATE_HARMS else ("env_error", HARMS.get(how))
        reason, error, rewards = LOOPS.get(how, (*ends, {}))

        def check(trajectory, how=how, rewards=rewards):
            assert trajectory.env_rewards == rewards
            assert bool(trajectory.turns) == (how not in ("no_outcome", "wrong_reason", "too_long", "no_messages"))

        yield Conversation(["Hi"], {"environment": "loops", "how": how}, reason, error, check)


def of_factories():
    """What makes the environment does harm, or makes it too late or never."""
    for kind, others in (("make", ["hang", "nothing", "later"]), ("make_softly", ["hang", "swallow", "cancel"])):
        for how in [*RAISED, *others]:
            ends = OUT_OF_TIME if how in (*LATE_HARMS, "later") else ("env_error", HARMS.get(how, NO_ENV))
            yield Conversation([], {"environment": kind, "how": how}, *ends)


NO_ENV = "make made NoneType, which has no `run` and `close`"


def of_others():
    """An environment in disguise, one of no name, and arguments that cannot be copied or written level by level."""

    def disguised(trajectory):
        assert trajectory.env_rewards == {"turns": 5.0}

    def deep(trajectory):
        assert "brackets too deep to read." in trajectory.turns[0].error

    yield Conversation(["Hi"], {"environment": "make", "how": "disguised"}, "env_done", None, disguised)
    yield Conversation([], {"environment": "nobody"}, "env_error", "name one of tools, hurried_tools")
    for depth in (101, 900):
        turns = [call("sync_fine", value=hostile.nested(depth)), ANSWER]
        yield Conversation(turns, {"environment": "tools"}, "answered", None, deep)


# What is left


async def background_tasks():
    return asyncio.all_tasks() - {asyncio.current_task()}


def open_files():
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the folder's own
            yield os.readlink(f"/proc/self/fd/{number}").split(":")[0]


def held():
    """What the process holds that a conversation could leave behind, counted."""
    return {
        "tasks": Counter(task for task in run(background_tasks()) if not task.done()),
        "threads": Counter(threading.enumerate()),
        "files": Counter(open_files()),
        "children": Counter(psutil.Process().children(recursive=True)),
    }


@pytest.fixture
def noise(monkeypatch):
    """What is said on the way, counted: warnings, lost exceptions, threads that end with one."""
    lines: Counter[str] = Counter()
    found = logging.Handler(logging.WARNING)
    found.emit = lambda record: lines.update([f"{record.name}: {record.getMessage().splitlines()[0]}"[:200]])
    gc.collect()  # what earlier tests left is closed before
    logging.getLogger().addHandler(found)
    monkeypatch.setattr(threading, "excepthook", lambda hook: lines.update([f"thread: {hook.exc_value!r}"]))
    monkeypatch.setattr(sys, "unraisablehook", lambda hook: lines.update([f"lost: {hook.exc_value!r}"]))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RuntimeWarning)
        warnings.simplefilter("always", ResourceWarning)
        yield lines
        gc.collect()
        lost = [str(one.message) for one in warned if "unclosed" in str(one.message) or "await" in str(one.message)]
    logging.getLogger().removeHandler(found)
    assert not lost


@pytest.fixture
def briefly(monkeypatch):
    monkeypatch.setattr(runners, "GRACE", GRACE)
    monkeypatch.setattr(source, "CLOSE_TIMEOUT", GRACE)
    COUNTS.clear()
    GATE.clear()
    yield
    GATE.set()


def hold(sources, conversations, keep=False, concurrent=CONCURRENT, timeout=PATIENCE, on_finish=None):
    """Runs conversations as a trainer does, and returns their trajectories and the time it took."""

    def script(session, turn):
        turns = conversations[int(session)].turns
        return turns[min(turn, len(turns) - 1)] + END

    engine = ScriptedEngine(build_tokenizer(), script)
    limits = RolloutLimits(max_completion_tokens=4000, rollout_timeout=timeout, max_concurrent=concurrent)
    runner = RolloutRunner(sources, engine, limits, sanity_check_mode="strict" if keep else "disable")
    requests = [RolloutRequest("Q", str(index), one.row) for index, one in enumerate(conversations)]
    start = time.perf_counter()
    trajectories = run(runner.run(requests, SamplingParams(), on_finish, keep_environments=keep))
    assert not runner.under_way
    return runner, trajectories, time.perf_counter() - start


def judge(runner, trajectories, conversations):
    wrong = []
    for trajectory, expected in zip(trajectories, conversations, strict=True):
        try:
            assert trajectory.stop_reason == expected.reason, trajectory.error
            assert (trajectory.error is None) == (expected.error is None), trajectory.error
            assert expected.error is None or expected.error in trajectory.error
            expected.check(trajectory)
            # what training does with it
            runner.completion(trajectory)
            if len(json.dumps(trajectory.turns, default=str)) < 100_000:
                assert to_json(trajectory.to_dict())
        except Exception as error:
            wrong.append(f"{expected.row}: {trajectory.stop_reason}, {error!r:.300}")
    assert not wrong, f"{len(wrong)} of {len(conversations)}:\n" + "\n".join(wrong[:20])


def until_nothing_is_left(before):
    deadline = time.monotonic() + 120
    while any(left := [now - then for now, then in zip(held().values(), before.values(), strict=True)]):
        assert time.monotonic() < deadline, left
        gc.collect()
        time.sleep(0.02)


@pytest.mark.parametrize("keep", [False, True])
def test_each_hostile_conversation_ends_as_it_must(keep, noise, briefly):
    """All of them, in two halves; in one of these rewards look at the environments before they are closed."""
    tools, expected = hostile.calls()
    states = [hostile.State(name) for name in ("first", "harm", "last")]
    # what must end for its time has little of it, and everything else enough
    hurried = {"step_timeout": hostile.TIMEOUT}
    sources = {
        "tools": MultiTurnToolEnv(tools, protocol="learnt_tags", tool_timeout=PATIENCE),
        "hurried_tools": MultiTurnToolEnv(tools, protocol="learnt_tags", tool_timeout=hostile.TIMEOUT),
        "untimed": MultiTurnToolEnv(tools, protocol="learnt_tags", tool_timeout=None),
        "states": MultiTurnToolEnv(states, "", tool_timeout=PATIENCE),
        "hurried_states": MultiTurnToolEnv(states, "", tool_timeout=hostile.TIMEOUT),
        "steps": hostile.Steps,
        "hurried_steps": type("HurriedSteps", (hostile.Steps,), hurried),
        "plain": hostile.PlainSteps,
        "hurried_plain": type("HurriedPlainSteps", (hostile.PlainSteps,), hurried),
        "loops": hostile.Loop,
        "make": hostile.make,
        "make_softly": hostile.make_softly,
    }
    others = (of_untimed_tools, of_states, of_steps, of_loops, of_factories, of_others)
    conversations = [*of_tools(expected), *(one for kind in others for one in kind())][keep::2]
    run(asyncio.sleep(0))
    before = held()
    memory = psutil.Process().memory_info().rss
    finished = []
    # conversations that must run out of time have little of it, and the others enough
    parts = [[one for one in conversations if (one.reason == "timeout") == late] for late in (False, True)]
    (runner, trajectories, seconds), (_, hung, more) = (
        hold(sources, part, keep, timeout=timeout, on_finish=finished.append)
        for part, timeout in zip(parts, (PATIENCE, ROLLOUT_TIMEOUT), strict=True)
    )
    trajectories, seconds, conversations = trajectories + hung, seconds + more, parts[0] + parts[1]
    assert len(finished) == len(conversations)
    if keep:
        assert any(trajectory.environment is not None for trajectory in trajectories)
        run(close_environments(trajectories))
    assert not any(trajectory.environment for trajectory in trajectories)
    judge(runner, trajectories, conversations)
    GATE.set()
    until_nothing_is_left(before)
    # one that a thread made late is closed by the event loop, a moment after the thread has ended
    until(lambda: COUNTS["made"] == COUNTS["closed"], seen=lambda: str(COUNTS), limit=60)
    assert COUNTS["created"] == COUNTS["released"], COUNTS
    waves = [-(-len(part) // CONCURRENT) for part in parts]
    lone = sum(turn.count("sync_lone") for one in conversations for turn in one.turns)  # one after another
    bound = (3 * waves[0] + lone) * hostile.TIMEOUT + waves[1] * (ROLLOUT_TIMEOUT + GRACE) + sum(waves) * GRACE
    grown = (psutil.Process().memory_info().rss - memory) / 1e6
    print(f"\n{len(conversations)} in {seconds:.1f} s, bound {bound:.1f} s, {grown:.0f} MB: {noise}")
    assert seconds < bound + PATIENCE
    assert not [line for line in noise if not line.startswith("mt_grpo")], noise
    assert sum(noise.values()) == 1 and "environments could not be closed" in str(noise), noise


def test_a_run_that_its_caller_fails_closes_every_environment(briefly):
    def on_finish(trajectory):
        if trajectory.session == "5":
            raise ZeroDivisionError("in on_finish")

    row = {"where": "nowhere", "how": "value"}
    conversations = [Conversation(["Hi"], row, "env_done") for _ in range(20)]
    before = held()
    with pytest.raises(ZeroDivisionError, match="in on_finish"):
        hold(hostile.Steps, conversations, True, concurrent=3, on_finish=on_finish)
    until_nothing_is_left(before)
    until(lambda: COUNTS["made"] == COUNTS["closed"], seen=lambda: str(COUNTS), limit=60)
    assert COUNTS["made"] >= 6


@pytest.mark.slow
def test_a_server_killed_in_mid_call_ends_calls_only(tmp_path, noise, briefly, monkeypatch):
    pytest.importorskip("mcp")
    monkeypatch.setattr("mt_grpo.tools.mcp.PAUSE_SECONDS", 0.0)
    path = tmp_path / "servers.json"
    small = {"command": sys.executable, "args": [str(SERVER), "stdio"], "env": {"PYTHONPATH": ":".join(sys.path)}}
    path.write_text(json.dumps({"mcpServers": {"hostile": small}}))
    run(asyncio.sleep(0))
    mcp_thread.get()
    before = held()
    tools = mcp_tools(str(path), ["add", "big", "die", "fail"]) + mcp_tools(str(path), ["slow"], timeout=2.0)
    next(tool for tool in tools if tool.name == "big").max_result_size = 50
    # what a call may be answered, where another conversation's may have ended the server
    ended = "McpServerGone: the MCP server 'hostile' ended"
    says = {
        call("add", a=1, b=2): "3",
        call("big", characters=10_000_000): "x" * 50 + "\n[9,999,950 of 10,000,000 characters",
        call("fail", reason="no"): "Error: McpToolError: Error executing tool fail",
        call("slow", seconds=60): "Error: McpToolError: slow took longer than 2 s.",
        call("die", words="bye"): f"Error: {ended}",
    }

    def conversation(said):
        def check(trajectory):
            [one] = trajectory.turns[0].tool_calls
            assert one.result.startswith((says[said], f"Error: {ended}")), one.result[:200]
            assert trajectory.answer == "A"

        return Conversation([said, ANSWER], {}, "answered", None, check)

    conversations = [conversation(said) for said in [*says, call("add", a=1, b=2)] * 2]
    env = MultiTurnToolEnv(tools, protocol="learnt_tags", tool_timeout=60.0)
    runner, trajectories, _ = hold(env, conversations, concurrent=3, timeout=120.0)
    judge(runner, trajectories, conversations)
    del tools, env, runner
    until_nothing_is_left(before)
    assert all("mt_grpo.tools.mcp" in line for line in noise), noise
