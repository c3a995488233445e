"""How calls run: limits of a tool, stop tools, results of every kind."""

from __future__ import annotations

import asyncio
import copy
import json
import signal
import threading
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import pytest
from mcp.types import CallToolResult
from pydantic import BaseModel
from support.stateful_tools import Guess, schema
from support.waiting import until_true

from mt_grpo.concurrency import ConcurrencyLimit
from mt_grpo.concurrency import call as call_within
from mt_grpo.concurrency import run as run_and_wait
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.envs.tool_env import execute_calls, fail_unanswered
from mt_grpo.rewards import env_reward, step_reward
from mt_grpo.rollout import RolloutLimits, RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.tools import Tool, ToolDefinitionError, load_tools, tool
from mt_grpo.tools.mcp import McpRemote
from mt_grpo.trajectory import StopReason, ToolCall, Trajectory, Turn

NOTHING = {"type": "object", "properties": {}}


def made(function, name="work", **options) -> Tool:
    return Tool(name, "A tool.", NOTHING, function, **options)


def run(*tools: Tool, calls: int = 1, timeout: float | None = 20.0) -> list[ToolCall]:
    """One turn that calls each tool so often."""
    made_calls = [ToolCall(each.name) for each in tools for _ in range(calls)]
    asyncio.run(execute_calls(made_calls, {each.name: each for each in tools}, timeout))
    return made_calls


def converse(tokenizer, env: MultiTurnToolEnv, turns: list[str], number: int = 1, **limits) -> list[Trajectory]:
    runner = RolloutRunner(env, ScriptedEngine(tokenizer, turns), RolloutLimits(**limits))
    requests = [RolloutRequest("hi", f"{index:02d}") for index in range(number)]
    return asyncio.run(runner.run(requests, SamplingParams()))


async def hang() -> None:
    await asyncio.Event().wait()


class Gauge:
    """Counts how many calls are inside at once; each stays for a moment."""

    def __init__(self) -> None:
        self.inside, self.most, self.lock = 0, 0, threading.Lock()

    async def work(self) -> int:
        self.enter(1)
        await asyncio.sleep(0.005)
        return self.enter(-1)

    def block(self) -> int:
        self.enter(1)
        threading.Event().wait(0.005)
        return self.enter(-1)

    def enter(self, more: int) -> int:
        with self.lock:
            self.inside += more
            self.most = max(self.most, self.inside)
        return 1


# The concurrency limit


@pytest.mark.parametrize("method", ["work", "block"])
def test_no_more_calls_of_a_tool_run_than_its_limit(method):
    gauge = Gauge()
    calls = run(made(getattr(gauge, method), concurrency=3), calls=20)
    assert gauge.most == 3
    assert all(call.executed and call.result == "1" for call in calls)


def test_the_limit_holds_across_event_loops():
    gauge, results = Gauge(), []
    limited = made(gauge.work, concurrency=2)
    threads = [threading.Thread(target=lambda: results.extend(run(limited, calls=10))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gauge.most <= 2 and [call.result for call in results] == ["1"] * 30


def test_a_function_a_method_and_a_copy_have_one_limit():
    gauge = Gauge()

    @tool(concurrency=2)
    async def work() -> int:
        """Works."""
        return await gauge.work()

    class Browser:
        @tool(concurrency=1, max_result_size=7)
        def look(self) -> str:
            """Looks."""
            return "x"

    first, second = (load_tools([work])[0] for _ in range(2))
    run(first, replace(second, name="again"), calls=10)
    assert first.limit is second.limit is copy.deepcopy(first).limit and gauge.most == 2
    assert replace(first, concurrency=3).limit.size == 3
    first, second = (Tool.from_function(Browser().look) for _ in range(2))
    assert first.limit is second.limit and (first.concurrency, first.max_result_size) == (1, 7)


@pytest.mark.parametrize("kind", ["async", "thread", "entry of MCP", "stateful"])
def test_a_wait_for_a_place_inside_a_call_is_not_its_time(kind):
    """The other call has the place until it is out of time, and this one gets it then."""
    place, taken = ConcurrencyLimit(1), threading.Event()

    async def keep():
        async with place:
            taken.set()
            await hang()

    async def have(*names):
        await asyncio.to_thread(taken.wait, 20)
        async with place:
            return CallToolResult(content=[])

    remote = McpRemote(SimpleNamespace(call=have), {"name": "waits"}, timeout=0.5)
    waits = {
        "async": have,
        "thread": lambda: run_and_wait(have()),
        "entry of MCP": partial(remote.call, {}),
        "stateful": partial(call_within, have, what="waits", timeout=0.5),
    }[kind]
    hung, waited = run(made(keep, "hangs"), made(waits, "waits"), timeout=0.5)
    assert hung.error == "hangs took longer than 0.5 s." and waited.error is None
    assert waited.seconds < 0.5 <= hung.seconds


def test_the_wait_for_the_limit_counts_toward_no_timeout():
    """Twenty calls of 50 ms one after the other take longer than the time of one."""
    calls = run(made(partial(asyncio.sleep, 0.05), concurrency=1), calls=20, timeout=0.9)
    assert all(call.error is None and call.seconds < 0.9 for call in calls)


def test_a_call_that_hangs_gives_its_place_to_the_next():
    release = threading.Event()
    tools = [made(hang, "hang", concurrency=1), made(lambda: release.wait(20), "block", concurrency=1)]
    calls = run(*tools, made(lambda: 1, "quick"), calls=3, timeout=0.5)
    release.set()
    assert [call.error for call in calls[:6]] == [f"{call.name} took longer than 0.5 s." for call in calls[:6]]
    assert [call.result for call in calls[6:]] == ["1"] * 3


def test_a_call_cancelled_while_it_waits_was_not_run():
    started, ended = [], []

    async def begin() -> None:
        started.append(1)
        try:
            await hang()
        finally:
            ended.append(1)

    limited = made(begin, concurrency=1)
    turn = Turn(0, {}, [ToolCall("work"), ToolCall("work")])

    async def cancelled() -> None:
        task = asyncio.ensure_future(execute_calls(turn.tool_calls, {"work": limited}))
        await until_true(lambda: started)
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(0)
        assert task.cancelled() and ended
        fail_unanswered(turn)
        async with asyncio.timeout(5), limited.limit:  # its place is free again
            pass

    asyncio.run(cancelled())
    assert [(call.executed, call.error) for call in turn.tool_calls] == [
        (True, "work did not finish before the conversation ended."),
        (False, "work was not run: the conversation ended before."),
    ]


def test_a_place_granted_to_a_cancelled_call_goes_on():
    async def check() -> None:
        limit = ConcurrencyLimit(1)
        await limit.__aenter__()
        waiting = [asyncio.ensure_future(limit.__aenter__()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # before its turn
        await limit.__aexit__()
        await asyncio.sleep(0)
        waiting[1].cancel()  # in the same moment as its turn came
        async with asyncio.timeout(5):
            await waiting[2]

    asyncio.run(check())


def test_what_waited_in_a_loop_that_is_gone_holds_nobody_up():
    limit = ConcurrencyLimit(1)
    gone = asyncio.new_event_loop()
    gone.run_until_complete(limit.__aenter__())
    stuck = gone.create_task(limit.__aenter__())
    gone.run_until_complete(asyncio.sleep(0))
    gone.close()

    async def check() -> None:
        await limit.__aexit__()
        async with asyncio.timeout(5), limit:
            pass

    asyncio.run(check())
    assert not stuck.done()
    stuck._log_destroy_pending = False


def test_a_conversation_may_time_out_while_it_waits(tokenizer):
    env = MultiTurnToolEnv([made(hang, concurrency=1)], tool_timeout=None)
    trajectories = converse(tokenizer, env, ['<tool>{"name": "work"}</tool>'], 3, rollout_timeout=1.0)
    assert {each.stop_reason for each in trajectories} == {StopReason.TIMEOUT}
    for call in (each.turns[0].tool_calls[0] for each in trajectories):
        assert ("did not finish" if call.executed else "was not run") in call.error


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"concurrency": 0}, "`concurrency` 0; it counts calls at once, so give 1 or more"),
        ({"concurrency": "8"}, "`concurrency` '8'"),
        ({"max_result_size": -1}, "`max_result_size` -1; it counts characters"),
    ],
)
def test_a_limit_that_is_no_count_is_refused(options, says):
    with pytest.raises(ToolDefinitionError, match="The tool 'work' has") as refusal:
        made(lambda: 1, **options)
    assert says in str(refusal.value)

    @tool(**options)
    def work() -> int:
        """Works."""
        return 1

    with pytest.raises(ToolDefinitionError, match="The tool 'work' has"):
        load_tools([work])


# Stop tools


@tool(ends_episode=True)
def submit(answer: int) -> str:
    """
    Hands in the answer.

    Args:
        answer: A number above 0.
    """
    if answer < 1:
        raise ValueError("The answer is a number above 0.")
    return f"Got {answer}."


def call_text(name: str, **arguments: object) -> str:
    return f"<tool>{json.dumps({'name': name, 'args': arguments})}</tool>"


def submitted(tokenizer, *turns: str) -> Trajectory:
    return converse(tokenizer, MultiTurnToolEnv([submit, made(lambda: 1)]), list(turns))[0]


def test_a_stop_tool_ends_the_conversation_with_its_result(tokenizer):
    trajectory = submitted(tokenizer, call_text("work") + call_text("submit", answer=3), "never sampled")
    assert trajectory.stop_reason is StopReason.ENV_DONE and len(trajectory.turns) == 1
    assert not trajectory.stop_reason.is_truncated and not trajectory.failed
    assert [call.result for call in trajectory.turns[0].tool_calls] == ["1", "Got 3."]
    assert trajectory.messages[-1]["content"] == "<result>1</result>\n<result>Got 3.</result>"
    assert Trajectory.from_dict(trajectory.to_dict()) == trajectory


@pytest.mark.parametrize("arguments", [{"answer": "x"}, {"answer": 0}, {}])
def test_a_stop_tool_that_fails_ends_nothing(tokenizer, arguments):
    trajectory = submitted(tokenizer, call_text("submit", **arguments), call_text("submit", answer=1))
    assert trajectory.stop_reason is StopReason.ENV_DONE and len(trajectory.turns) == 2
    assert trajectory.turns[0].tool_calls[0].error and trajectory.turns[1].tool_calls[0].result == "Got 1."


# Results


class Page(BaseModel):
    title: str


@dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    ("result", "text", "data"),
    [
        ("plain", "plain", None),
        (("seen", {"score": 0.5}), "seen", {"score": 0.5}),
        (("seen", {"page": Page(title="Lima"), "at": Point(1)}), "seen", {"page": {"title": "Lima"}, "at": {"x": 1}}),
        (["seen", {"score": 0.5}], '["seen", {"score": 0.5}]', None),
        (("Lima", 3), '["Lima", 3]', None),
        (Page(title="Lima"), '{"title": "Lima"}', None),
        (Point(1), '{"x": 1}', None),
        ("Perú".encode(), "Perú", None),
        (bytearray(b"text"), "text", None),
        (b"\xff\xfe\x00", "[3 bytes that are not text]", None),
        ({"body": b"ok", "image": b"\x89PNG"}, '{"body": "ok", "image": "[4 bytes that are not text]"}', None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_async", [False, True])
def test_a_result_is_text_for_the_model_and_data_for_rewards(result, text, data, is_async):
    async def work() -> object:
        return result

    [call] = run(made(work if is_async else lambda: result))
    assert (call.result, call.data, call.error) == (text, data, None)
    assert ToolCall(**json.loads(json.dumps(vars(call)))) == call


def test_what_sets_a_signal_handler_runs_in_the_main_thread():
    def limited():  # as with a time limit by `signal.alarm`
        signal.signal(signal.SIGUSR1, signal.signal(signal.SIGUSR1, signal.SIG_DFL))
        if threading.current_thread() is not threading.main_thread():
            raise AssertionError("a handler cannot be set here")
        threads.append(threading.current_thread())
        if len(threads) == 3:
            raise ValueError("of its own")
        return "in time"

    threads = []
    calls = [ToolCall("limited") for _ in range(3)]
    run_and_wait(execute_calls(calls, {"limited": made(limited, "limited")}, 20.0))
    assert sorted(call.result for call in calls) == ["Error: ValueError: of its own", "in time", "in time"]
    # where the main thread does not wait, it is the tool's error
    assert "signal only works in main thread" in run(made(limited))[0].error


def test_an_event_loop_of_its_own_may_handle_signals():
    def served():
        async def serve():
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)
            asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)

        asyncio.run(serve())
        return "served"

    call = ToolCall("served")
    run_and_wait(execute_calls([call], {"served": made(served, "served")}, 20.0))
    assert call.result == "served"
    assert "RuntimeError: set_wakeup_fd only works in main thread" in run(made(served))[0].error


def test_what_needs_the_main_thread_says_how_to_mend_it():
    (call,) = run(made(lambda: signal.signal(signal.SIGUSR1, signal.SIG_DFL)))
    assert call.error.startswith("ValueError: signal only works in main thread")
    assert "with `max_staleness: 0`" in call.error and "`tool_processes: 1`" in call.error


# Tools with a state, in whole conversations

GUESSES = [
    call_text("guess", number=6),
    call_text("guess", number=3) + call_text("guess", number=2),
    "<answer>7</answer>",
]


def guess(tokenizer, tool=Guess, **limits):
    made_tool = tool({}, schema())
    row = {"prompt": "Guess.", "tools_kwargs": {"guess": {"create_kwargs": {"ground_truth": 7}}}}
    env = MultiTurnToolEnv([made_tool], protocol="learnt_tags")
    engine = ScriptedEngine(tokenizer, lambda session, turn: GUESSES[turn] + "<|im_end|>")
    runner = RolloutRunner(env, engine, RolloutLimits(**limits))
    (trajectory,) = asyncio.run(runner.run([RolloutRequest("Guess.", "0", row=row)], SamplingParams()))
    assert made_tool._instance_dict == {}
    return trajectory


def test_a_turn_has_the_step_rewards_of_its_calls(tokenizer):
    trajectory = guess(tokenizer)
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert [step_reward.score(turn, trajectory) for turn in trajectory.turns] == [0.0, -0.1, None]
    assert env_reward.score(trajectory) == pytest.approx(1 / 6)
    assert trajectory.info["tool_metrics"] == {"guess": [{"distance": 1}, {"distance": 4}, {"distance": 5}]}


def test_a_conversation_cut_off_has_the_rewards_of_its_tools(tokenizer):
    trajectory = guess(tokenizer, max_completion_tokens=60)
    assert (trajectory.stop_reason, trajectory.env_rewards) == (StopReason.TOKEN_BUDGET, {"guess": 0.5})
