"""The runner: tokens kept as sampled, every reason to stop, and conversations that do not wait for each other."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import itertools
import json
import math
import threading
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import lookup
from support.waiting import in_loop, until_true
from trl.chat_template_utils import add_response_schema

from mt_grpo.envs import MultiTurnToolEnv, Step
from mt_grpo.rewards import tool_execution_reward_func
from mt_grpo.rollout import (
    EngineError,
    RolloutLimits,
    RolloutRequest,
    RolloutRunner,
    SamplingParams,
    ScriptedEngine,
    derive_seed,
)
from mt_grpo.rollout.token_row import SanityCheck
from mt_grpo.tools import Tool
from mt_grpo.trajectory import StopReason, Trajectory

CALL = '<tool>{"name": "lookup", "args": {"query": "Perú 🙂"}}</tool>'
ANSWER = "<answer>Lima</answer>"


def play(runner: RolloutRunner, number: int = 1, on_finish=None):
    requests = [RolloutRequest(f"question {index}", f"{index:03d}", {"id": index}, index) for index in range(number)]
    return runner.run(requests, SamplingParams(), on_finish)


def run(env, engine, number: int = 1, on_finish=None, limits=None, **options):
    runner = RolloutRunner(env, engine, RolloutLimits(**limits or {}), **options)
    return runner, asyncio.run(play(runner, number, on_finish))


async def never() -> None:
    await asyncio.Event().wait()


def tool(name, function) -> Tool:
    properties = {argument: {"type": "string"} for argument in inspect.signature(function).parameters}
    is_async = inspect.iscoroutinefunction(function)
    return Tool(name, "", {"type": "object", "properties": properties}, function, is_async=is_async)


@pytest.fixture
def env() -> MultiTurnToolEnv:
    return MultiTurnToolEnv([lookup], max_steps=4)


# Tokens

ACTIONS = st.sampled_from([CALL, "<tool>{oops</tool>", '<tool>{"name": "no"}</tool>', "plain", ANSWER]) | st.lists(
    st.integers(0, 334), min_size=1, max_size=12
)


@settings(max_examples=60, deadline=None)
@given(
    scripts=st.lists(st.lists(ACTIONS, min_size=6, max_size=6), max_size=4),
    max_completion_tokens=st.none() | st.integers(1, 300),
    max_turn_tokens=st.none() | st.integers(1, 60),
    context_length=st.integers(300, 2000),
    env_mask=st.integers(0, 1),
)
def test_masked_ids_are_sampled_and_the_rest_was_context(
    tokenizer, scripts, max_completion_tokens, max_turn_tokens, context_length, env_mask
):
    env = MultiTurnToolEnv([lookup], system_prompt="Answer.", protocol="learnt_tags", max_steps=4, env_mask=env_mask)
    engine = ScriptedEngine(
        tokenizer, lambda session, turn: scripts[int(session)][turn], context_length=context_length
    )
    limits = {"max_completion_tokens": max_completion_tokens, "max_turn_tokens": max_turn_tokens}
    runner, trajectories = run(env, engine, len(scripts), limits=limits)
    assert [trajectory.row["id"] for trajectory in trajectories] == list(range(len(scripts)))
    asked = defaultdict(list)
    for session, context, sample in engine.requests:
        asked[session].append((context, sample))
    for trajectory in trajectories:
        turns = asked[trajectory.session]
        prompt, expected = turns[0][0], []
        for turn, (context, sample) in enumerate(turns):  # a reply belongs to the turn that it answers
            replies = context[len(prompt) + len(expected) :]
            expected += [(token, env_mask, turn - 1, None) for token in replies]
            expected += [(token, 1, turn, x) for token, x in zip(sample.ids, sample.logprobs, strict=True)]
            assert prompt + [token for token, *_ in expected] == context + sample.ids
        row = runner.completion(trajectory)
        logprobs = [None if math.isnan(logprob) else logprob for logprob in row.logprobs]
        assert [*zip(row.ids, row.mask, row.turns, logprobs, strict=True)] == expected
        assert row.prompt_ids == prompt and len(prompt + row.ids) <= context_length
        assert len(row.ids) <= (max_completion_tokens or len(row.ids))
        assert trajectory.tree.actions() == [sample.ids for _, sample in turns]
        assert [turn.num_tokens for turn in trajectory.turns] == [len(sample.ids) for _, sample in turns]
        assert Trajectory.from_dict(json.loads(json.dumps(trajectory.to_dict()))) == trajectory


@pytest.mark.parametrize("history", ["keep", "strip_thinking"])
@pytest.mark.parametrize("text", ["Lima, ", " ", "Perú 🙂", "<|im_end|>"])
@pytest.mark.parametrize(
    ("limits", "reason"),
    [({}, StopReason.CONTEXT_FULL), ({"max_completion_tokens": 200}, StopReason.TOKEN_BUDGET)],
)
def test_of_a_result_that_fits_nowhere_little_is_encoded(tokenizer, monkeypatch, history, text, limits, reason):
    env = MultiTurnToolEnv([tool("lookup", lambda query: text * (1_100_000 // len(text)))], protocol="learnt_tags")
    engine = ScriptedEngine(tokenizer, [CALL, ANSWER], context_length=400)
    runner = RolloutRunner(env, engine, RolloutLimits(**limits), history=history)
    lengths = []
    for owner, name in ((runner.renderer.tokenizer, "encode"), (runner.renderer.special_tokens, "_plain")):
        encode = getattr(owner, name)

        def counted(text, *more, encode=encode, **options):
            lengths.append(len(text))
            return encode(text, *more, **options)

        monkeypatch.setattr(owner, name, counted)
    [trajectory] = asyncio.run(play(runner))
    assert trajectory.stop_reason is reason and trajectory.error is None
    assert len(trajectory.turns) == 1 and trajectory.tree.num_turns == 1
    assert len(trajectory.turns[0].tool_calls[0].result) > 1_000_000
    assert sum(lengths) < 40_000


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["a", "Lima ", " ", "\n", "🙂", "reasoning", "<|im_end|>"]),
    st.integers(1, 400),
    st.integers(1, 600),
)
def test_what_fits_into_the_room_is_encoded_whole(tokenizer, piece, times, room):
    renderer = RolloutRunner(MultiTurnToolEnv(), ScriptedEngine(tokenizer, [])).renderer
    replies = [{"role": "user", "content": piece * times}]
    whole, ids = renderer.reply_ids(replies, -1), renderer.reply_ids_within(replies, room)
    assert ids == whole or (ids is None and len(whole) > room)


@pytest.mark.parametrize("empty", [(0,), (1,), (0, 1), (2,), (0, 1, 2)])
@pytest.mark.parametrize("history", ["keep", "strip_thinking", "template"])
def test_a_turn_without_tokens_is_a_turn(env, tokenizer, history, empty):
    script = [[] if turn in empty else text for turn, text in enumerate([CALL, CALL, ANSWER])] + [ANSWER]
    engine = ScriptedEngine(tokenizer, script)
    runner, [trajectory] = run(env, engine, history=history, sanity_check_mode="strict")
    assert trajectory.error is None and trajectory.stop_reason is StopReason.ANSWERED
    assert [turn.num_tokens == 0 for turn in trajectory.turns[:3]] == [turn in empty for turn in range(3)]
    (_, prompt, _), *_, (_, context, sample) = [*engine.requests, engine.requests[-1]]
    row = runner.completion(trajectory)
    assert row.prompt_ids == prompt and trajectory.tree.path() == context + sample.ids == prompt + row.ids
    assert sum(row.mask) == sum(turn.num_tokens for turn in trajectory.turns)


def test_a_native_turn_without_tokens_is_an_empty_answer(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    add_response_schema(tokenizer)
    _, [trajectory] = run(MultiTurnToolEnv([lookup], protocol="native"), ScriptedEngine(tokenizer, [[]]))
    assert trajectory.error is None and trajectory.answer == ""


def test_each_turn_has_its_own_seed_from_the_conversation(env, tokenizer):
    class Engine(ScriptedEngine):
        async def generate(self, context, sampling, session):
            seen.append((session, sampling.seed, sampling.stop))
            return await super().generate(context, sampling, session)

    runs = []
    for _ in range(2):
        runs.append(seen := [])
        run(env, Engine(tokenizer, [CALL, ANSWER]), 3)
    assert runs[0] == runs[1] and {stop for _, _, stop in seen} == {("</tool>", "</answer>")}
    assert len({seed for _, seed, _ in seen}) == 6 and all(0 <= seed < 2**63 for _, seed, _ in seen)


def test_a_derived_seed_is_the_same_on_every_machine():
    assert derive_seed(7, "train", 3) == 7137631672708323211 != derive_seed(7, "train", 4)


# Reasons to stop


@pytest.mark.parametrize(
    ("limits", "reason", "length"),
    [
        ({"max_turn_tokens": 50}, StopReason.LENGTH, 50),
        ({"max_completion_tokens": 50}, StopReason.TOKEN_BUDGET, 50),
        ({"max_completion_tokens": 50, "max_turn_tokens": 60}, StopReason.TOKEN_BUDGET, 50),
        ({"max_completion_tokens": 60, "max_turn_tokens": 50}, StopReason.LENGTH, 50),
        ({"max_completion_tokens": 50, "max_turn_tokens": 50}, StopReason.TOKEN_BUDGET, 50),
        ({}, StopReason.CONTEXT_FULL, None),
    ],
)
def test_a_turn_cut_short_says_which_bound_cut_it(env, tokenizer, limits, reason, length):
    engine = ScriptedEngine(tokenizer, ["x" * 5000], context_length=1000)
    _, [trajectory] = run(env, engine, limits=limits)
    [turn] = trajectory.turns
    assert (trajectory.stop_reason, turn.finish_reason, turn.replies, trajectory.answer) == (
        reason,
        "length",
        [],
        None,
    )
    assert turn.num_tokens == (length or 1000 - len(engine.requests[0][1]))


@pytest.mark.parametrize("bound", [StopReason.TOKEN_BUDGET, StopReason.CONTEXT_FULL])
def test_a_reply_that_leaves_no_room_ends_the_conversation(env, tokenizer, bound):
    run(env, engine := ScriptedEngine(tokenizer, [CALL, ANSWER]))
    (_, first, sample), (_, second, _) = engine.requests
    for spare, turns in ((0, 1), (1, 2)):
        engine, limits = ScriptedEngine(tokenizer, [CALL, ANSWER]), {}
        if bound is StopReason.CONTEXT_FULL:
            engine.context_length = len(second) + spare
        else:
            limits = {"max_completion_tokens": len(second) - len(first) + spare}
        _, [trajectory] = run(env, engine, limits=limits)
        assert (trajectory.stop_reason, len(trajectory.turns)) == (bound, turns)
        assert trajectory.turns[0].replies and trajectory.tree.actions()[0] == sample.ids


def test_a_prompt_that_fills_the_context_allows_no_turn(env, tokenizer):
    runner, [trajectory] = run(env, ScriptedEngine(tokenizer, [ANSWER], context_length=10))
    assert (trajectory.stop_reason, trajectory.turns) == (StopReason.CONTEXT_FULL, [])
    row = runner.completion(trajectory)
    assert row.prompt_ids == runner.renderer.prompt_ids(trajectory.prompt) and row.ids == []


def test_a_conversation_out_of_time_keeps_its_turns(env, tokenizer):
    engine = GatedEngine(tokenizer, [CALL])
    engine.gated = {("000", 1)}
    _, [trajectory] = run(env, engine, limits={"rollout_timeout": 1.0})
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.TIMEOUT, 1)
    assert "longer than 1 s" in trajectory.error and engine.released == ["000"] and engine.closed == 1


def test_a_tool_that_hangs_until_the_conversation_ends_failed(tokenizer):
    release = threading.Event()
    hangs = {"hang": never, "hang_in_thread": lambda: release.wait(20)}
    calls = "".join(f'<tool>{{"name": "{name}", "args": {{}}}}</tool>' for name in hangs)
    env = MultiTurnToolEnv([lookup, *itertools.starmap(tool, hangs.items())], tool_timeout=None)
    _, [trajectory] = run(env, ScriptedEngine(tokenizer, [CALL + calls]), limits={"rollout_timeout": 1.0})
    release.set()
    [turn] = trajectory.turns
    assert trajectory.stop_reason is StopReason.TIMEOUT and not turn.has_result
    fine, *hung = turn.tool_calls
    assert (fine.result, fine.error) == ("about Perú 🙂", None)  # it had ended before
    errors = [f"{name} did not finish before the conversation ended." for name in hangs]
    assert [(call.error, call.result) for call in hung] == [(error, f"Error: {error}") for error in errors]
    assert all(call.seconds > 0.2 for call in hung) and (turn.num_attempts, turn.num_failures) == (3, 2)
    assert tool_execution_reward_func.score(turn, trajectory) == pytest.approx(0.2 / 3)


def test_calls_that_an_environment_never_ran_failed(tokenizer):
    class Broken(MultiTurnToolEnv):
        async def step(self, turn):
            if self.session == "000":
                raise ZeroDivisionError("before the calls are run")
            await never()

    limits = {"rollout_timeout": 1.0}
    for trajectory in run(Broken([lookup]), ScriptedEngine(tokenizer, [CALL]), 2, limits=limits)[1]:
        [call] = trajectory.turns[0].tool_calls
        assert call.error == "lookup was not run: the conversation ended before." and not call.executed
        assert trajectory.turns[0].num_failures == 1


def test_an_error_ends_one_conversation_only(tokenizer):
    class Broken(MultiTurnToolEnv):
        def start(self, prompt):
            if prompt == "question 3":
                raise TimeoutError("no container")
            return [] if prompt == "question 4" else super().start(prompt)

        async def step(self, turn):
            if self.session == "001":
                raise ZeroDivisionError("by the user")
            return Step() if self.session == "002" else await super().step(turn)

    def script(session: str, turn: int) -> str | Exception:
        return EngineError("The server is gone.") if (session, turn) == ("000", 1) else [CALL, ANSWER][turn]

    runner, trajectories = run(Broken([lookup]), ScriptedEngine(tokenizer, script), 6, limits={"rollout_timeout": 30})
    failed, raised, silent, unmade, empty, fine = trajectories
    assert (failed.stop_reason, failed.error) == (StopReason.ENGINE_ERROR, "The server is gone.")
    assert (raised.stop_reason, raised.error) == (StopReason.ENV_ERROR, "ZeroDivisionError: by the user")
    assert (unmade.stop_reason, unmade.error) == (StopReason.ENV_ERROR, "TimeoutError: no container")
    assert unmade.prompt == [{"role": "user", "content": "question 3"}]
    assert all(each.stop_reason is StopReason.ENV_ERROR and each.error for each in (silent, empty))
    assert fine.stop_reason is StopReason.ANSWERED and not any(each.answer for each in trajectories[:5])
    assert [[turn.text for turn in each.turns] for each in trajectories] == [[CALL]] * 3 + [[]] * 2 + [[CALL, ANSWER]]
    rows = [runner.completion(trajectory) for trajectory in trajectories]
    assert [(bool(row.prompt_ids), sum(row.mask) > 0) for row in rows] == [
        (True, bool(each.turns)) for each in trajectories
    ]


# Concurrency


class GatedEngine(ScriptedEngine):
    """Answers a conversation only when its gate is open, and counts how many wait at once."""

    gated: set[tuple[str, int]] | None = None
    """Sessions and turns that wait; all by default."""

    def __init__(self, tokenizer, script):
        super().__init__(tokenizer, script)
        self.gates: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.inside: set[str] = set()
        self.peak = 0
        self.released: list[str] = []
        self.closed = 0

    async def generate(self, context, sampling, session):
        self.inside.add(session)
        self.peak = max(self.peak, len(self.inside))
        try:
            if self.gated is None or (session, sum(asked[0] == session for asked in self.requests)) in self.gated:
                await self.gates[session].wait()
            return await super().generate(context, sampling, session)
        finally:
            self.inside.discard(session)

    def release(self, session):
        self.released.append(session)

    async def close(self):
        self.closed += 1

    async def until_inside(self, *sessions: str) -> None:
        await until_true(lambda: self.inside >= set(sessions))


@pytest.mark.parametrize("slow", ["engine", "tool"])
@in_loop
async def test_who_is_slow_holds_up_nobody_and_order_is_kept(tokenizer, slow):
    async def wait(who):
        await engine.gates[who].wait()
        return "done"

    call = '<tool>{{"name": "wait", "args": {{"who": "{}"}}}}</tool>'
    engine = GatedEngine(tokenizer, lambda session, turn: [call.format(session), ANSWER][turn])
    engine.gated = None if slow == "engine" else set()
    finished, order = [], ["002", "003", "001", "000"]
    runner = RolloutRunner(MultiTurnToolEnv([tool("wait", wait)]), engine)
    running = asyncio.ensure_future(play(runner, 4, lambda trajectory: finished.append(trajectory.session)))
    for session in order:
        engine.gates[session].set()
        await until_true(lambda name=session: name in finished)
    trajectories = await running
    assert finished == engine.released == order and engine.closed == 1
    assert [trajectory.session for trajectory in trajectories] == sorted(order)
    assert all(trajectory.stop_reason is StopReason.ANSWERED for trajectory in trajectories)


@in_loop
async def test_only_the_allowed_number_of_conversations_runs_at_once(env, tokenizer):
    engine = GatedEngine(tokenizer, [ANSWER])
    running = asyncio.ensure_future(play(RolloutRunner(env, engine, RolloutLimits(max_concurrent=2)), 5))
    await engine.until_inside("000", "001")
    engine.gates["001"].set()  # the first one still hangs; the others pass through the second place
    await engine.until_inside("000", "002")
    for session in ("002", "003", "004", "000"):
        engine.gates[session].set()
    trajectories = await running
    assert engine.peak == 2 and sorted(engine.released) == [f"{index:03d}" for index in range(5)]
    assert [trajectory.row["id"] for trajectory in trajectories] == list(range(5))


@pytest.mark.parametrize("ends", [asyncio.CancelledError, ZeroDivisionError])
@in_loop
async def test_a_run_that_is_cancelled_or_fails_leaves_nothing(env, tokenizer, ends):
    bug = ends is ZeroDivisionError
    engine, finished = GatedEngine(tokenizer, lambda *_: ends("a bug") if bug else ANSWER), []
    runner = RolloutRunner(env, engine)
    running = asyncio.ensure_future(play(runner, 3, lambda trajectory: finished.append(trajectory.session)))
    await engine.until_inside("000", "001", "002")
    engine.gates["001"].set()
    if not bug:
        await until_true(lambda: finished)
        running.cancel()
    with pytest.raises(ends):
        await running
    assert finished == ([] if bug else ["001"]) and sorted(engine.released) == ["000", "001", "002"]
    assert not engine.inside and asyncio.all_tasks() == {asyncio.current_task()}


@in_loop
async def test_a_run_that_fails_twice_logs_nothing_beside(env, tokenizer):
    untold = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: untold.append(context))
    for steps in range(16):  # of the loop, from one failure to the other
        engine = GatedEngine(tokenizer, lambda *_: ZeroDivisionError("a bug"))
        running = asyncio.ensure_future(play(RolloutRunner(env, engine), 2))
        await engine.until_inside("000", "001")
        engine.gates["000"].set()
        for _ in range(steps):
            await asyncio.sleep(0)
        engine.gates["001"].set()
        with pytest.raises(ZeroDivisionError):
            await running
    del running
    gc.collect()
    assert not untold


def test_a_check_holds_up_nobody_and_is_written_down(env, tokenizer):
    ended, held_up = threading.Event(), []

    class Check(SanityCheck):
        def check(self, trajectory):
            if trajectory.session == "000":
                held_up.append(not ended.wait(20))
            return super().check(trajectory)

    def on_finish(trajectory: Trajectory) -> None:
        if trajectory.session == "001":
            ended.set()

    # a call ends by a stop string, so the template's own end of turn is what follows it
    scripts = [[ANSWER], [CALL, CALL, ANSWER], [f"<think>T</think>\n\n{CALL}<|im_end|>", ANSWER]]
    engine = ScriptedEngine(tokenizer, lambda session, turn: scripts[int(session)][turn])
    runner = RolloutRunner(env, engine, sanity_check_mode="strict")
    runner.sanity = Check(runner.renderer, "strict")
    trajectories = asyncio.run(play(runner, 3, on_finish))
    assert held_up == [False]
    assert [each.render_mismatch for each in trajectories] == [None, None, "text of the assistant message"]


def test_no_full_garbage_collection_stops_the_conversations(env, tokenizer):
    before, seen = gc.get_threshold(), []

    def script(session, turn):
        seen.append(gc.get_threshold())
        raise RuntimeError("the engine is broken")

    with pytest.raises(RuntimeError):
        run(env, ScriptedEngine(tokenizer, script))
    assert seen[0][2] > 1_000_000 and seen[0][:2] == before[:2] and gc.get_threshold() == before
