"""Tools with a state in each conversation."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest
from support.images import picture
from support.stateful_tools import SCHEMA, Guess, schema

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
        how = self.config.get(method)
        if how == "raise":
            raise ValueError("no")
        if how == "hang":
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
        await asyncio.sleep(self.config.get("release_takes", 0.0))
        await self._do("release")
        self.log.append(instance_id)

    def told(self) -> list[str]:
        """Without the ids."""
        return [each for each in self.log if " " in each]


def session_of(*tools: Any, row: dict | None = None, timeout: float | None = 5.0) -> ToolSession:
    return ToolSession(load_tools(list(tools)), row or {}, timeout)


def converse(talk, *tools: Any, **options: Any) -> Any:
    """What comes of a coroutine function that is given a session, which is released after it."""

    async def whole() -> Any:
        session = session_of(*tools, **options)
        try:
            return await talk(session)
        finally:
            await session.release()

    return asyncio.run(whole())


async def call(session: ToolSession, name: str, *numbers: int) -> list[str]:
    calls = [ToolCall(name, {"number": number}) for number in numbers]
    await execute_calls(calls, session.tools, 5.0)
    return [each.result for each in calls]


# A tool of verl


def test_a_tool_of_verl_keeps_its_state_through_a_conversation():
    tool = Guess({}, schema())

    async def talk(session):
        texts, rewards = [], []
        for numbers in ((6,), (3, 2), (-1,)):  # the last is not what the schema allows
            texts += await call(session, "guess", *numbers)
            rewards.append(session.take_reward())
        return texts[0], rewards, session.take_reward(), await session.rewards(), session.metrics

    metrics = {"guess": [{"distance": 1}, {"distance": 4}, {"distance": 5}]}
    outcome = {"guess": pytest.approx(1 / 6)}
    assert converse(talk, tool, row=ROW) == ("reward=0.50", [0.0, -0.1, None], None, outcome, metrics)
    assert tool._instance_dict == {}
    # one that was never called still scores its conversation
    assert converse(ToolSession.rewards, tool, row=ROW) == {"guess": 0.0}
    assert tool._instance_dict == {}


def test_conversations_have_states_of_their_own():
    tool = Guess({}, schema())

    async def one(truth: int) -> float | None:
        session = session_of(tool, row={"tools_kwargs": {"guess": {"create_kwargs": {"ground_truth": truth}}}})
        await call(session, "guess", truth)
        outcome = await session.rewards()
        await session.release()
        return outcome["guess"]

    async def all_of_them() -> list:
        return await asyncio.gather(*[one(truth) for truth in range(50)])

    assert asyncio.run(all_of_them()) == [1.0] * 50


# When its methods are called


def test_each_method_is_called_once_and_released_in_reverse():
    first = Recorder("a", [])

    async def talk(session):
        await session.create("a")
        await session.rewards()
        await asyncio.gather(session.release(), session.release())

    converse(talk, first, Recorder("b", first.log))
    assert first.told() == ["create a", "calc_reward a", "create b", "calc_reward b", "release b", "release a"]


def test_a_state_is_made_by_the_first_call_alone():
    first = Recorder("a", [])

    async def talk(session):
        await call(session, "b", -1)  # not what the schema allows
        assert first.log == []
        await call(session, "b", 1, 2)
        await call(session, "b", 3)

    converse(talk, first, Recorder("b", first.log))
    assert first.told() == ["create b", "execute b", "execute b", "execute b", "release b"]


@pytest.mark.parametrize("options", ["text", {"a": [1]}, {"a": {"create_kwargs": 3}}])
def test_arguments_of_a_row_that_are_no_mapping_are_refused(options):
    with pytest.raises(TypeError, match="The row's `tools_kwargs` is no mapping of tools to their methods' arguments"):
        session_of(Recorder("a", []), row={"tools_kwargs": options})
    assert session_of(Recorder("a", []), row={"extra_info": "of another kind"}).tools


def test_tools_without_a_state_pass_through():
    plain = Tool("plain", "", {"type": "object"}, lambda: "as it is")
    assert session_of(plain, Recorder("a", [])).tools["plain"] is plain


def test_the_id_that_create_returns_is_the_one_that_counts():
    first = Recorder("a", [], instance="mine")

    async def talk(session):
        return await session.create("a"), await session.create("b")

    mine, made = converse(talk, first, Recorder("b", first.log, instance=None))
    assert first.log == ["create a", "create b", "release b", made, "release a", "mine"]
    assert mine == "mine" and len(made) == 32


def test_release_goes_on_where_its_caller_is_cancelled():
    first = Recorder("a", [], release_takes=0.1)

    async def talk(session):
        await asyncio.gather(session.create("a"), session.create("b"))
        caller = asyncio.ensure_future(session.release())
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.wait([caller])

    converse(talk, first, Recorder("b", first.log, release_takes=0.1))
    assert first.told()[-2:] == ["release b", "release a"]


def test_methods_that_block_run_in_threads():
    class Blocking(BaseTool):
        def execute(self, instance_id, parameters, **kwargs):
            time.sleep(0.2)
            return {"text": f"{parameters['number']} {kwargs}"}, None, None

        def calc_reward(self, instance_id):
            return None

    tool, row = Blocking({}, schema("block")), {"tools_kwargs": {"block": {"execute_kwargs": {"extra": 1}}}}

    async def one() -> tuple:
        session = session_of(tool, row=row)
        (text,) = await call(session, "block", 3)
        return text, session.take_reward(), await session.rewards(), await session.release()

    async def all_of_them() -> list:
        return await asyncio.gather(*[one() for _ in range(3)])

    assert asyncio.run(all_of_them()) == [("3 {'extra': 1}", None, {}, None)] * 3


# What it returns, and how it fails


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (("text", 0.0, {}), "text"),
        (({"rows": [1]}, 0.0, {}), '{"rows": [1]}'),
        ((ToolResponse(), 0.0, {}), ""),
        ((ToolResponse("a page", image=[picture()]), 0.0, {}), "[image]\na page"),
        ((ToolResponse(image=[1]), 0.0, {}), "Error: MediumError: The image '1' is no image: give"),
        (
            (ToolResponse(video=[1]), 0.0, {}),
            "Error: TypeError: a video cannot be shown: give frames of it as `image`",
        ),
        ("text", "Error: TypeError: `execute` must return (response, reward, metrics), not str"),
        (("text", math.nan, {}), "Error: ValueError: the step reward that `execute` returned is nan: give"),
        (("text", "1", {}), "Error: TypeError: the step reward that `execute` returned is str: give"),
    ],
)
def test_what_execute_returns_reaches_the_model(result, text):
    async def talk(session):
        return *(await call(session, "a", 1)), session.take_reward()

    answer, reward = converse(talk, Recorder("a", [], result=result))
    assert answer.startswith(text)
    assert reward == (None if text.startswith("Error") else 0.0)


FAILURES = [("raise", "ValueError: no"), ("hang", "took longer than 0.05 s")]


@pytest.mark.parametrize(("how", "problem"), FAILURES)
def test_a_failed_create_is_the_error_of_its_call(how, problem):
    tool = Recorder("b", [], create=how)

    async def talk(session):
        texts = await call(session, "b", 0)
        del tool.config["create"]
        return texts + await call(session, "b", 1)

    first, second = converse(talk, tool, timeout=0.05)
    assert first.startswith("Error: ToolStateError: `create` of the tool 'b' failed: ") and problem in first
    assert second == "done"
    # what was half made is released too
    assert tool.told() == ["create b", "create b", "execute b", "release b", "release b"]


@pytest.mark.parametrize(("how", "problem"), FAILURES)
def test_what_fails_at_the_end_is_named_and_ends_nothing(how, problem):
    first = Recorder("a", [])

    async def talk(session):
        outcome = await session.rewards()
        await session.release()
        return outcome, session.failures

    broken = Recorder("b", first.log, calc_reward=how, release=how)
    outcome, (of_reward, of_release) = converse(talk, first, broken, timeout=0.05)
    assert outcome == {"a": 0.5} and first.told()[-1] == "release a"
    assert of_reward.startswith("`calc_reward` of the tool 'b' failed") and problem in of_reward
    assert of_release.startswith("`release` of the tool 'b' failed") and problem in of_release


def test_a_tool_that_does_not_judge_conversations_has_no_reward():
    silent = type("Silent", (BaseTool,), {})({}, schema("silent"))
    assert converse(ToolSession.rewards, silent, Recorder("b", [], reward=math.inf)) == {}


# Outside of a conversation


def test_a_tool_without_a_schema_is_refused():
    with pytest.raises(ToolDefinitionError, match="'BaseTool' has no schema: give its entry a `tool_schema`"):
        BaseTool({})


def test_a_stateful_tool_is_checked_and_not_called_outside():
    (tool,) = load_tools([Recorder("guess", [])])
    made = ToolCall("guess", {"number": 1})
    asyncio.run(execute_calls([made], {"guess": tool}, 5.0))
    assert "it is called in a conversation only" in made.error
    assert tool.schema == SCHEMA
    assert tool.check({"number": -1}) == "guess: argument 'number' must satisfy {\"minimum\": 0}"
