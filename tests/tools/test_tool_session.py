"""Tools with a state in each conversation."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest
from support.images import picture
from support.stateful_tools import Guess, schema

from mt_grpo.envs.tool_env import execute_calls
from mt_grpo.tools import BaseTool, Tool, ToolDefinitionError, ToolResponse, ToolSession, load_tools
from mt_grpo.trajectory import ToolCall

ROW = {"extra_info": {"tools_kwargs": {"guess": {"create_kwargs": {"ground_truth": 7, "other": None}}, "x": None}}}


class Recorder(BaseTool):
    """Says what it is asked; fails or hangs where its config says so."""

    def __init__(self, name: str, log: list[str], **behaviour: Any) -> None:
        super().__init__(behaviour, schema(name))
        self.log = log

    async def _do(self, method: str) -> None:
        self.log.append(f"{method} {self.name}")
        await {"raise": self._raise, "hang": self._hang}.get(self.config.get(method), self._pass)()

    async def _pass(self) -> None: ...

    async def _raise(self) -> None:
        raise ValueError("no")

    async def _hang(self) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.3)  # does not let itself be ended at once

    async def create(self, instance_id=None, **kwargs):
        await self._do("create")
        return self.config.get("instance", instance_id)

    async def execute(self, instance_id, parameters, **kwargs):
        await self._do("execute")
        return self.config.get("result", ("done", 1.0, {}))

    async def calc_reward(self, instance_id, **kwargs):
        await self._do("calc_reward")
        return self.config.get("reward", 0.5)

    async def release(self, instance_id, **kwargs):
        await self._do("release")


class Blocking(BaseTool):
    """Methods that are not `async` run in threads, all conversations' at once."""

    def execute(self, instance_id, parameters, **kwargs):
        time.sleep(0.2)
        return {"text": f"{parameters['number']} {kwargs}"}, None, None

    def calc_reward(self, instance_id):
        return None


def session_of(*tools: Any, row: dict | None = None, timeout: float | None = 5.0) -> ToolSession:
    return ToolSession(load_tools(list(tools)), row or {}, timeout)


async def call(session: ToolSession, *calls: ToolCall) -> list[ToolCall]:
    await execute_calls(list(calls), session.tools, 5.0)
    return list(calls)


def guess(number: int) -> ToolCall:
    return ToolCall("guess", {"number": number})


def test_a_tool_of_verl_keeps_its_state_through_a_conversation():
    tool = Guess({}, schema())

    async def converse() -> tuple:
        session = session_of(tool, row=ROW)
        (first,) = await call(session, guess(6))
        rewards = [session.take_reward()]
        await call(session, guess(3), guess(2))
        rewards += [session.take_reward(), session.take_reward()]
        await call(session, guess(-1))
        rewards.append(session.take_reward())
        outcome = await session.rewards()
        await session.release()
        return first.result, rewards, outcome, session.metrics

    text, rewards, outcome, metrics = asyncio.run(converse())
    assert text == "reward=0.50"
    assert rewards == [0.0, -0.1, None, None]
    assert outcome == {"guess": pytest.approx(1 / 6)}
    assert metrics == {"guess": [{"distance": 1}, {"distance": 4}, {"distance": 5}]}
    assert tool._instance_dict == {}


def test_conversations_have_states_of_their_own():
    tool = Guess({}, schema())

    async def converse(truth: int) -> float | None:
        session = session_of(tool, row={"tools_kwargs": {"guess": {"create_kwargs": {"ground_truth": truth}}}})
        await call(session, guess(truth))
        outcome = await session.rewards()
        await session.release()
        return outcome["guess"]

    async def all_of_them() -> list:
        return await asyncio.gather(*[converse(truth) for truth in range(50)])

    assert asyncio.run(all_of_them()) == [1.0] * 50


def test_each_method_is_called_once_and_released_in_reverse():
    log: list[str] = []

    async def converse() -> None:
        session = session_of(Recorder("a", log), Recorder("b", log))
        await session.create("a")
        await session.rewards()
        await asyncio.gather(session.release(), session.release())
        await session.release()

    asyncio.run(converse())
    assert log == ["create a", "calc_reward a", "create b", "calc_reward b", "release b", "release a"]


def test_tools_without_a_state_pass_through():
    plain = Tool("plain", "", {"type": "object"}, lambda: "as it is")
    session = session_of(plain, Recorder("a", []))
    assert session.tools["plain"] is plain


def test_a_state_is_made_by_the_first_call_alone():
    log: list[str] = []

    async def converse() -> None:
        session = session_of(Recorder("a", log), Recorder("b", log))
        await call(session, ToolCall("b", {"number": -1}))  # not what the schema allows
        assert log == []
        await call(session, ToolCall("b", {"number": 1}), ToolCall("b", {"number": 2}))
        await call(session, ToolCall("b", {"number": 3}))
        await session.release()

    asyncio.run(converse())
    assert log == ["create b", "execute b", "execute b", "execute b", "release b"]


def test_a_tool_never_called_still_scores_its_conversation():
    tool = Guess({}, schema())

    async def converse() -> dict:
        session = session_of(tool, row=ROW)
        outcome = await session.rewards()
        await session.release()
        return outcome

    assert asyncio.run(converse()) == {"guess": 0.0}
    assert tool._instance_dict == {}


@pytest.mark.parametrize(("how", "problem"), [("raise", "ValueError: no"), ("hang", "took longer than 0.05 s")])
def test_a_failed_create_is_the_error_of_its_call(how, problem):
    log: list[str] = []
    tool = Recorder("b", log, create=how)

    async def converse() -> list[str]:
        session = session_of(tool, timeout=0.05)
        made = [ToolCall("b", {"number": number}) for number in range(2)]
        await execute_calls(made[:1], session.tools, 5.0)
        del tool.config["create"]
        await execute_calls(made[1:], session.tools, 5.0)
        await session.release()
        return [one.result for one in made]

    first, second = asyncio.run(converse())
    assert first.startswith("Error: ToolStateError: `create` of the tool 'b' failed: ") and problem in first
    assert second == "done"
    assert log == ["create b", "create b", "execute b", "release b", "release b"]  # what was half made, too


@pytest.mark.parametrize(("how", "problem"), [("raise", "ValueError: no"), ("hang", "it took longer than 0.05 s")])
def test_what_fails_at_the_end_is_named_and_ends_nothing(how, problem):
    log: list[str] = []

    async def converse() -> tuple:
        session = session_of(Recorder("a", log), Recorder("b", log, calc_reward=how, release=how), timeout=0.05)
        outcome = await session.rewards()
        await session.release()
        return outcome, session.failures

    outcome, failures = asyncio.run(converse())
    assert outcome == {"a": 0.5}
    assert [failure.split(" failed")[0] for failure in failures] == [
        "`calc_reward` of the tool 'b'",
        "`release` of the tool 'b'",
    ]
    assert all(problem in failure for failure in failures)
    assert log[-1] == "release a"


def test_release_goes_on_where_its_caller_is_cancelled():
    log: list[str] = []

    class Slow(Recorder):
        async def release(self, instance_id, **kwargs):
            await asyncio.sleep(0.1)
            await self._do("release")

    async def converse() -> None:
        session = session_of(Slow("a", log), Slow("b", log))
        await asyncio.gather(session.create("a"), session.create("b"))
        caller = asyncio.ensure_future(session.release())
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.wait([caller])
        await session.release()

    asyncio.run(converse())
    assert log[-2:] == ["release b", "release a"]


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (("text", 0.0, {}), "text"),
        (({"rows": [1]}, 0.0, {}), '{"rows": [1]}'),
        ((ToolResponse(), 0.0, {}), ""),
        ((ToolResponse("a page", image=[picture()]), 0.0, {}), "[image]\na page"),
        (
            (ToolResponse(image=[1]), 0.0, {}),
            "Error: MediumError: The image '1' is no image: give",
        ),
        (
            (ToolResponse(video=[1]), 0.0, {}),
            "Error: TypeError: a video cannot be shown: give frames of it as `image`",
        ),
        ("text", "Error: TypeError: `execute` must return (response, reward, metrics), not str"),
        (
            ("text", math.nan, {}),
            "Error: ValueError: `execute` returned the step reward nan, which is no finite",
        ),
        (("text", "1", {}), "Error: ValueError: `execute` returned the step reward '1', which is no finite number"),
    ],
)
def test_what_execute_returns_reaches_the_model(result, text):
    async def converse() -> tuple:
        session = session_of(Recorder("a", [], result=result))
        (made,) = await call(session, ToolCall("a", {"number": 1}))
        return made.result, session.take_reward()

    answer, reward = asyncio.run(converse())
    assert answer.startswith(text)
    assert reward == (None if text.startswith("Error") else 0.0)


def test_an_execute_that_raises_is_an_error_of_its_call_alone():
    async def converse() -> tuple:
        session = session_of(Recorder("a", [], execute="raise"), Recorder("b", []))
        calls = await call(session, ToolCall("a", {"number": 1}), ToolCall("b", {"number": 1}))
        return [made.result for made in calls], session.take_reward()

    assert asyncio.run(converse()) == (["Error: ValueError: no", "done"], 1.0)


def test_methods_that_block_run_in_threads():
    tool = Blocking({}, schema("block"))
    row = {"tools_kwargs": {"block": {"execute_kwargs": {"extra": 1}}}}

    async def converse() -> tuple:
        session = session_of(tool, row=row)
        (made,) = await call(session, ToolCall("block", {"number": 3}))
        return made.result, session.take_reward(), await session.rewards(), await session.release()

    async def all_of_them() -> list:
        return await asyncio.gather(*[converse() for _ in range(3)])

    assert asyncio.run(all_of_them()) == [("3 {'extra': 1}", None, {}, None)] * 3


@pytest.mark.parametrize("error", [SystemExit, StopIteration, asyncio.CancelledError])
@pytest.mark.parametrize("is_async", [True, False])
def test_what_a_tool_raises_at_the_end_stays_in_it(error, is_async):
    class Broken(BaseTool):
        def release(self, instance_id, **kwargs):
            raise error("out")

    class AsyncBroken(BaseTool):
        async def release(self, instance_id, **kwargs):
            raise error("out")

    async def converse() -> list[str]:
        session = session_of((AsyncBroken if is_async else Broken)({}, schema("broken")))
        await session.create("broken")
        await session.release()
        return session.failures

    (failure,) = asyncio.run(converse())
    assert failure.startswith("`release` of the tool 'broken' failed: RuntimeError: ")


def test_the_id_that_create_returns_is_the_one_that_counts():
    seen = []

    class Own(Recorder):
        async def release(self, instance_id, **kwargs):
            seen.append(instance_id)

    async def converse() -> None:
        session = session_of(Own("a", [], instance="mine"), Own("b", [], instance=None))
        assert await session.create("a") == "mine"
        await session.create("b")
        await session.release()

    asyncio.run(converse())
    assert seen[1] == "mine" and len(seen[0]) == 32


def test_a_tool_that_does_not_judge_conversations_has_no_reward():
    class Silent(BaseTool): ...

    async def converse() -> dict:
        session = session_of(Silent({}, schema("silent")), Recorder("b", [], reward=math.inf))
        return await session.rewards()

    assert asyncio.run(converse()) == {}


def test_a_tool_without_a_schema_is_refused():
    with pytest.raises(ToolDefinitionError, match="'BaseTool' has no schema: give its entry a `tool_schema`"):
        BaseTool({})


def test_a_stateful_tool_is_not_called_outside_a_conversation():
    (tool,) = load_tools([Recorder("a", [])])
    made = ToolCall("a", {"number": 1})
    asyncio.run(execute_calls([made], {"a": tool}, 5.0))
    assert "it is called in a conversation only" in made.error


def test_the_schema_is_the_one_that_was_given():
    (tool,) = load_tools([Recorder("guess", [])])
    assert tool.schema["function"]["parameters"]["properties"]["number"]["minimum"] == 0
    assert tool.check({"number": -1}) == "guess: argument 'number' must satisfy {\"minimum\": 0}"
