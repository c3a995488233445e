"""The runner: tokens kept as sampled, every reason to stop, and conversations that do not wait for each other."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import math
import threading
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import lookup
from support.waiting import until_true
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
from mt_grpo.rollout.token_check import SanityCheck
from mt_grpo.trajectory import StopReason, Trajectory

CALL = '<tool>{"name": "lookup", "args": {"query": "Perú 🙂"}}</tool>'
ANSWER = "<answer>Lima</answer>"


def requests(number: int) -> list[RolloutRequest]:
    return [RolloutRequest(f"question {index}", f"{index:03d}", {"id": index}, index) for index in range(number)]


def run(env: MultiTurnToolEnv, engine: ScriptedEngine, number: int = 1, on_finish=None, **limits) -> list[Trajectory]:
    runner = RolloutRunner(env, engine, RolloutLimits(**limits))
    return asyncio.run(runner.run(requests(number), SamplingParams(), on_finish))


@pytest.fixture
def env(search_tool) -> MultiTurnToolEnv:
    return MultiTurnToolEnv([search_tool], max_steps=4)


# Tokens

ACTIONS = st.sampled_from([CALL, "<tool>{oops</tool>", '<tool>{"name": "no"}</tool>', "plain", ANSWER]) | st.lists(
    st.integers(0, 334), min_size=1, max_size=12
)


@settings(max_examples=60, deadline=None)
@given(
    scripts=st.lists(st.lists(ACTIONS, min_size=6, max_size=6), min_size=1, max_size=4),
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
    limits = RolloutLimits(max_completion_tokens, max_turn_tokens)
    runner = RolloutRunner(env, engine, limits)
    trajectories = asyncio.run(runner.run(requests(len(scripts)), SamplingParams()))
    asked = defaultdict(list)
    for session, context, sample in engine.requests:
        asked[session].append((context, sample))
    for trajectory in trajectories:
        completion = runner.completion(trajectory)
        turns = asked[trajectory.session]
        context, last = turns[-1]
        ids, logprobs = completion.ids, completion.logprobs
        assert completion.prompt_ids == turns[0][0]
        assert completion.prompt_ids + ids == context + last.ids
        sampled = [position for position, logprob in enumerate(logprobs) if not math.isnan(logprob)]
        assert [ids[position] for position in sampled] == [token for _, sample in turns for token in sample.ids]
        assert [logprobs[position] for position in sampled] == [x for _, sample in turns for x in sample.logprobs]
        assert [completion.turns[position] for position in sampled] == [
            index for index, (_, sample) in enumerate(turns) for _ in sample.ids
        ]
        assert completion.mask == [1 if position in set(sampled) else env_mask for position in range(len(ids))]
        assert completion.turns == sorted(completion.turns)
        assert len(completion.prompt_ids + ids) <= context_length
        assert len(ids) <= (max_completion_tokens or len(ids))
        assert trajectory.tree.actions() == [sample.ids for _, sample in turns]
        assert [turn.num_tokens for turn in trajectory.turns] == [len(sample.ids) for _, sample in turns]
        assert Trajectory.from_dict(json.loads(json.dumps(trajectory.to_dict()))) == trajectory


class Counting:
    """Counts the characters that a renderer gives its tokenizer to encode."""

    def __init__(self, renderer, monkeypatch):
        self.characters = 0
        for owner, name in ((renderer.tokenizer, "encode"), (renderer.special_tokens, "_plain")):
            monkeypatch.setattr(owner, name, self.counted(getattr(owner, name)))

    def counted(self, encode):
        def encoded(text, *args, **options):
            self.characters += len(text)
            return encode(text, *args, **options)

        return encoded


@pytest.mark.parametrize("history", ["keep", "strip_thinking"])
@pytest.mark.parametrize("text", ["Lima, ", " ", "Perú 🙂", "<|im_end|>"])
@pytest.mark.parametrize(
    ("limits", "reason"),
    [({}, StopReason.CONTEXT_FULL), ({"max_completion_tokens": 200}, StopReason.TOKEN_BUDGET)],
)
def test_of_a_result_that_fits_nowhere_little_is_encoded(tokenizer, monkeypatch, history, text, limits, reason):
    def lookup(query: str) -> str:
        """
        Looks a query up.

        Args:
            query: What to look for.
        """
        return text * (5_500_000 // len(text))

    engine = ScriptedEngine(tokenizer, [CALL, ANSWER], context_length=400)
    env = MultiTurnToolEnv([lookup], system_prompt="Answer.", protocol="learnt_tags")
    runner = RolloutRunner(env, engine, RolloutLimits(**limits), history=history)
    counting = Counting(runner.renderer, monkeypatch)
    [trajectory] = asyncio.run(runner.run(requests(1), SamplingParams()))
    assert trajectory.stop_reason is reason and trajectory.error is None
    assert len(trajectory.turns) == 1 and trajectory.tree.num_turns == 1
    assert len(trajectory.turns[0].tool_calls[0].result) > 5_000_000
    assert counting.characters < 40_000


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["a", "Lima ", " ", "\n", "🙂", "reasoning", "<|im_end|>"]),
    st.integers(1, 400),
    st.integers(1, 600),
)
def test_what_fits_into_the_room_is_encoded_whole(tokenizer, piece, times, room):
    renderer = RolloutRunner(MultiTurnToolEnv(), ScriptedEngine(tokenizer, [])).renderer
    replies = [{"role": "user", "content": piece * times}]
    whole, ids = renderer.reply_ids(replies, -1), renderer.reply_ids_within(replies, -1, room)
    assert ids == whole or (ids is None and len(whole) > room)


@pytest.mark.parametrize("empty", [(0,), (1,), (0, 1), (2,), (0, 1, 2)])
@pytest.mark.parametrize("history", ["keep", "strip_thinking", "template"])
def test_a_turn_without_tokens_is_a_turn(env, tokenizer, history, empty):
    script = [[] if turn in empty else text for turn, text in enumerate([CALL, CALL, ANSWER])]
    engine = ScriptedEngine(tokenizer, lambda session, turn: script[turn] if turn < 3 else ANSWER)
    runner = RolloutRunner(env, engine, history=history, sanity_check_mode="strict")
    (trajectory,) = asyncio.run(runner.run(requests(1), SamplingParams()))
    assert trajectory.error is None and trajectory.stop_reason is StopReason.ANSWERED
    assert [turn.num_tokens == 0 for turn in trajectory.turns[:3]] == [turn in empty for turn in range(3)]
    contexts = [context for _, context, _ in engine.requests]
    assert trajectory.tree.path() == contexts[-1] + engine.requests[-1][2].ids
    row = runner.completion(trajectory)
    assert row.prompt_ids == contexts[0] and row.prompt_ids + row.ids == trajectory.tree.path()
    assert sum(row.mask) == sum(turn.num_tokens for turn in trajectory.turns)


def test_a_native_turn_without_tokens_is_an_empty_answer(search_tool, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    add_response_schema(tokenizer)
    env = MultiTurnToolEnv([search_tool], protocol="native")
    (trajectory,) = run(env, ScriptedEngine(tokenizer, [[]]))
    assert trajectory.error is None and trajectory.answer == ""


def test_a_reply_belongs_to_the_turn_it_answers(env, tokenizer):
    engine = ScriptedEngine(tokenizer, [CALL, ANSWER])
    runner = RolloutRunner(env, engine)
    [trajectory] = asyncio.run(runner.run(requests(1), SamplingParams()))
    completion = runner.completion(trajectory)
    first = [index for index, turn in enumerate(completion.turns) if turn == 0]
    text = tokenizer.decode([completion.ids[index] for index in first])
    assert text.startswith(CALL) and "<result>about Perú 🙂</result>" in text
    assert (
        tokenizer.decode([t for t, turn in zip(completion.ids, completion.turns, strict=True) if turn == 1]) == ANSWER
    )


def test_each_turn_has_its_own_seed_from_the_conversation(env, tokenizer):
    seen = []

    class Engine(ScriptedEngine):
        async def generate(self, context, sampling, session):
            seen.append((session, sampling.seed, sampling.stop))
            return await super().generate(context, sampling, session)

    run(env, Engine(tokenizer, [CALL, ANSWER]), 3)
    assert len({seed for _, seed, _ in seen}) == 6 and all(0 <= seed < 2**63 for _, seed, _ in seen)
    assert {stop for _, _, stop in seen} == {("</tool>", "</answer>")}
    again, seen[:] = list(seen), []
    run(env, Engine(tokenizer, [CALL, ANSWER]), 3)
    assert seen == again


def test_a_derived_seed_is_the_same_on_every_machine():
    assert derive_seed(7, "train", 3) == 7137631672708323211
    assert derive_seed(7, "train", 3) != derive_seed(7, "train", 4)


# Reasons to stop


def test_an_answer_ends_the_conversation(env, tokenizer):
    [trajectory] = run(env, ScriptedEngine(tokenizer, [CALL, ANSWER]))
    assert (trajectory.stop_reason, trajectory.answer, trajectory.error) == (StopReason.ANSWERED, "Lima", None)
    assert [turn.index for turn in trajectory.turns] == [0, 1] and trajectory.row == {"id": 0}


def test_one_step_more_than_allowed_ends_the_conversation(env, tokenizer):
    [trajectory] = run(env, ScriptedEngine(tokenizer, [CALL] * 5))
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.MAX_STEPS, 5)


@pytest.mark.parametrize(
    ("limits", "reason", "lengths"),
    [
        ({"max_turn_tokens": 50}, StopReason.LENGTH, [50]),
        ({"max_completion_tokens": 50}, StopReason.TOKEN_BUDGET, [50]),
        ({"max_completion_tokens": 50, "max_turn_tokens": 60}, StopReason.TOKEN_BUDGET, [50]),
        ({"max_completion_tokens": 60, "max_turn_tokens": 50}, StopReason.LENGTH, [50]),
        ({}, StopReason.CONTEXT_FULL, None),
    ],
)
def test_a_turn_cut_short_says_which_bound_cut_it(env, tokenizer, limits, reason, lengths):
    engine = ScriptedEngine(tokenizer, ["x" * 5000], context_length=1000)
    [trajectory] = run(env, engine, **limits)
    assert trajectory.stop_reason is reason and trajectory.turns[-1].finish_reason == "length"
    assert [turn.num_tokens for turn in trajectory.turns] == (lengths or [1000 - len(engine.requests[0][1])])
    assert trajectory.turns[0].replies == [] and trajectory.answer is None


@pytest.mark.parametrize("bound", [StopReason.TOKEN_BUDGET, StopReason.CONTEXT_FULL])
def test_a_reply_that_leaves_no_room_ends_the_conversation(env, tokenizer, bound):
    engine = ScriptedEngine(tokenizer, [CALL, ANSWER])
    run(env, engine)
    (_, first, sample), (_, second, _) = engine.requests
    prompt, room = len(first), len(second)
    for spare, turns in ((0, 1), (1, 2)):
        engine = ScriptedEngine(tokenizer, [CALL, ANSWER])
        if bound is StopReason.CONTEXT_FULL:
            engine.context_length = room + spare
            [trajectory] = run(env, engine)
        else:
            [trajectory] = run(env, engine, max_completion_tokens=room - prompt + spare)
        assert (trajectory.stop_reason, len(trajectory.turns)) == (bound, turns)
        assert trajectory.turns[0].replies and trajectory.tree.actions()[0] == sample.ids


def test_a_prompt_that_fills_the_context_allows_no_turn(env, tokenizer):
    engine = ScriptedEngine(tokenizer, [ANSWER], context_length=10)
    runner = RolloutRunner(env, engine)
    [trajectory] = asyncio.run(runner.run(requests(1), SamplingParams()))
    assert (trajectory.stop_reason, trajectory.turns) == (StopReason.CONTEXT_FULL, [])
    completion = runner.completion(trajectory)
    assert completion.prompt_ids == runner.renderer.prompt_ids(trajectory.prompt) and completion.ids == []


def test_a_conversation_out_of_time_keeps_its_turns(env, tokenizer):
    released = []

    class Engine(ScriptedEngine):
        async def generate(self, context, sampling, session):
            if len(self.requests) == 1:
                await asyncio.Event().wait()
            return await super().generate(context, sampling, session)

        def release(self, session):
            released.append(session)

    [trajectory] = run(env, Engine(tokenizer, [CALL]), rollout_timeout=1.0)
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.TIMEOUT, 1)
    assert "longer than 1 s" in trajectory.error and released == ["000"]


def test_a_tool_that_hangs_until_the_conversation_ends_failed(tokenizer):
    async def hang() -> str:
        """Hangs."""
        await asyncio.Event().wait()

    def hang_in_thread() -> str:
        """Hangs."""
        release.wait(20)

    release = threading.Event()
    names = ["lookup", "hang", "hang_in_thread"]
    calls = "".join(f'<tool>{{"name": "{name}", "args": {{}}}}</tool>' for name in names[1:])
    env = MultiTurnToolEnv([lookup, hang, hang_in_thread], tool_timeout=None)
    [trajectory] = run(env, ScriptedEngine(tokenizer, [CALL + calls]), rollout_timeout=1.0)
    release.set()
    [turn] = trajectory.turns
    assert trajectory.stop_reason is StopReason.TIMEOUT and not turn.has_result
    fine, *hung = turn.tool_calls
    assert (fine.result, fine.error) == ("about Perú 🙂", None)  # it had ended before
    for name, call in zip(names[1:], hung, strict=True):
        assert call.error == f"{name} did not finish before the conversation ended." and call.seconds > 0.2
        assert call.result == f"Error: {call.error}"
    assert (turn.num_attempts, turn.num_failures) == (3, 2)
    assert tool_execution_reward_func.score(turn, trajectory) == pytest.approx(0.2 / 3)


def test_calls_that_an_environment_never_ran_failed(tokenizer):
    class Broken(MultiTurnToolEnv):
        async def step(self, turn):
            if self.session == "000":
                raise ZeroDivisionError("before the calls are run")
            await asyncio.Event().wait()

    for trajectory in run(Broken([lookup]), ScriptedEngine(tokenizer, [CALL]), 2, rollout_timeout=1.0):
        [call] = trajectory.turns[0].tool_calls
        assert call.error == "lookup was not run: the conversation ended before." and not call.executed
        assert trajectory.turns[0].num_failures == 1


def test_an_environment_that_cannot_begin_ends_one_conversation(tokenizer):
    class Env(MultiTurnToolEnv):
        def start(self, prompt):
            if prompt == "question 0":
                raise TimeoutError("no container")
            if prompt == "question 1":
                return []
            return super().start(prompt)

    engine = ScriptedEngine(tokenizer, [ANSWER])
    runner = RolloutRunner(Env(), engine, RolloutLimits(rollout_timeout=30))
    raised, unrenderable, fine = trajectories = asyncio.run(runner.run(requests(3), SamplingParams()))
    assert (raised.stop_reason, raised.error) == (StopReason.ENV_ERROR, "TimeoutError: no container")
    assert unrenderable.stop_reason is StopReason.ENV_ERROR and unrenderable.error
    assert raised.prompt == [{"role": "user", "content": "question 0"}] and raised.turns == []
    assert fine.stop_reason is StopReason.ANSWERED
    rows = [runner.completion(trajectory) for trajectory in trajectories]
    assert [bool(row.prompt_ids) for row in rows] == [True] * 3 and [bool(row.ids) for row in rows] == [0, 0, 1]


def test_an_engine_error_ends_one_conversation_only(env, tokenizer):
    def script(session: str, turn: int) -> str | Exception:
        return EngineError("The server is gone.") if (session, turn) == ("000", 1) else [CALL, ANSWER][turn]

    failed, fine = run(env, ScriptedEngine(tokenizer, script), 2)
    assert (failed.stop_reason, failed.error) == (StopReason.ENGINE_ERROR, "The server is gone.")
    assert [turn.text for turn in failed.turns] == [CALL] and len(failed.tree.actions()) == 1
    assert fine.stop_reason is StopReason.ANSWERED


class BrokenEnv(MultiTurnToolEnv):
    async def step(self, turn):
        if self.session == "000":
            raise ZeroDivisionError("by the user")
        if self.session == "001":
            return Step()  # without a reply
        return await super().step(turn)


def test_an_environment_error_ends_one_conversation_only(tokenizer):
    raised, silent, fine = run(BrokenEnv(), ScriptedEngine(tokenizer, [ANSWER]), 3)
    assert (raised.stop_reason, raised.error) == (StopReason.ENV_ERROR, "ZeroDivisionError: by the user")
    assert silent.stop_reason is StopReason.ENV_ERROR and silent.error
    assert [turn.text for turn in raised.turns] == [ANSWER] and raised.answer is None
    assert fine.stop_reason is StopReason.ANSWERED


# Concurrency


class GatedEngine(ScriptedEngine):
    """Answers a conversation only when its gate is open, and counts how many wait at once."""

    def __init__(self, tokenizer, script):
        super().__init__(tokenizer, script)
        self.gates: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.inside: set[str] = set()
        self.peak = 0
        self.released: list[str] = []

    async def generate(self, context, sampling, session):
        self.inside.add(session)
        self.peak = max(self.peak, len(self.inside))
        try:
            await self.gates[session].wait()
            return await super().generate(context, sampling, session)
        finally:
            self.inside.discard(session)

    def release(self, session):
        self.released.append(session)

    async def until_inside(self, *sessions: str) -> None:
        await until_true(lambda: self.inside >= set(sessions))


def test_a_slow_conversation_holds_up_nobody_and_order_is_kept(env, tokenizer):
    async def main() -> None:
        engine, finished = GatedEngine(tokenizer, [CALL, ANSWER]), []
        runner = RolloutRunner(env, engine)
        running = asyncio.ensure_future(
            runner.run(requests(4), SamplingParams(), lambda t: finished.append(t.session))
        )
        for session in ("002", "003", "001", "000"):
            engine.gates[session].set()
            await until_true(lambda name=session: name in finished)
        trajectories = await running
        assert finished == ["002", "003", "001", "000"]
        assert [trajectory.session for trajectory in trajectories] == ["000", "001", "002", "003"]
        assert all(trajectory.stop_reason is StopReason.ANSWERED for trajectory in trajectories)
        assert engine.released == finished

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_slow_tool_holds_up_nobody(tokenizer):
    async def main() -> None:
        gate, finished = asyncio.Event(), []

        async def slow(who: str) -> str:
            """
            Waits.

            Args:
                who: Who waits.
            """
            if who == "000":
                await gate.wait()
            return "done"

        call = lambda session: f'<tool>{{"name": "slow", "args": {{"who": "{session}"}}}}</tool>'  # noqa: E731
        engine = ScriptedEngine(tokenizer, lambda session, turn: [call(session), ANSWER][turn])
        runner = RolloutRunner(MultiTurnToolEnv([slow]), engine)

        def on_finish(trajectory: Trajectory) -> None:
            finished.append(trajectory.session)
            if len(finished) == 3:
                gate.set()

        await runner.run(requests(4), SamplingParams(), on_finish)
        assert sorted(finished[:3]) == ["001", "002", "003"] and finished[3] == "000"

    asyncio.run(asyncio.wait_for(main(), 120))


def test_only_the_allowed_number_of_conversations_runs_at_once(env, tokenizer):
    async def main() -> None:
        engine = GatedEngine(tokenizer, [ANSWER])
        runner = RolloutRunner(env, engine, RolloutLimits(max_concurrent=2))
        running = asyncio.ensure_future(runner.run(requests(5), SamplingParams()))
        await engine.until_inside("000", "001")
        engine.gates["001"].set()  # the first one still hangs; the others pass through the second place
        await engine.until_inside("000", "002")
        for session in ("002", "003", "004", "000"):
            engine.gates[session].set()
        trajectories = await running
        assert engine.peak == 2
        assert sorted(engine.released) == [f"{index:03d}" for index in range(5)]
        assert [trajectory.row["id"] for trajectory in trajectories] == list(range(5))

    asyncio.run(asyncio.wait_for(main(), 120))


def test_cancelling_a_run_cancels_its_conversations(env, tokenizer):
    async def main() -> None:
        engine, finished = GatedEngine(tokenizer, [ANSWER]), []
        runner = RolloutRunner(env, engine)
        running = asyncio.ensure_future(
            runner.run(requests(3), SamplingParams(), lambda t: finished.append(t.session))
        )
        await engine.until_inside("000", "001", "002")
        engine.gates["001"].set()
        await until_true(lambda: finished)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert finished == ["001"] and sorted(engine.released) == ["000", "001", "002"]
        assert not engine.inside
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_an_unplanned_failure_reaches_the_caller_and_ends_all(env, tokenizer):
    async def main() -> None:
        engine = GatedEngine(tokenizer, lambda session, turn: ZeroDivisionError("a bug in the engine"))
        running = asyncio.ensure_future(RolloutRunner(env, engine).run(requests(3), SamplingParams()))
        await engine.until_inside("000", "001", "002")
        engine.gates["001"].set()
        with pytest.raises(ZeroDivisionError):
            await running
        assert sorted(engine.released) == ["000", "001", "002"] and not engine.inside

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_check_of_a_long_context_holds_up_nobody(env, tokenizer):
    ended, held_up = threading.Event(), []

    class Check(SanityCheck):
        def check(self, trajectory):
            if trajectory.session == "000":
                held_up.append(not ended.wait(20))
            return super().check(trajectory)

    def on_finish(trajectory: Trajectory) -> None:
        if trajectory.session == "001":
            ended.set()

    def script(session: str, turn: int) -> str:
        return ANSWER if session == "000" else [CALL, CALL, ANSWER][turn]

    runner = RolloutRunner(env, ScriptedEngine(tokenizer, script), sanity_check_mode="strict")
    runner.sanity = Check(runner.renderer, "strict")
    trajectories = asyncio.run(runner.run(requests(2), SamplingParams(), on_finish))
    assert held_up == [False]
    # the call ends by a stop string, so the template's own end of turn is what follows it
    assert [trajectory.render_mismatch for trajectory in trajectories] == [None, None]


def test_what_a_check_finds_is_written_into_the_trajectory(env, tokenizer):
    runner = RolloutRunner(
        env, ScriptedEngine(tokenizer, [f"<think>T</think>\n\n{CALL}<|im_end|>", ANSWER]), sanity_check_mode="strict"
    )
    [trajectory] = asyncio.run(runner.run(requests(1), SamplingParams()))
    assert trajectory.render_mismatch == "text of the assistant message"


def test_nothing_to_run_is_no_conversation(env, tokenizer):
    assert run(env, ScriptedEngine(tokenizer, []), 0) == []


def test_no_full_garbage_collection_stops_the_conversations(env, tokenizer):
    before, seen = gc.get_threshold(), []

    def script(session, turn):
        seen.append(gc.get_threshold())
        raise RuntimeError("the engine is broken")

    with pytest.raises(RuntimeError):
        run(env, ScriptedEngine(tokenizer, script))
    assert seen[0][2] > 1_000_000 and seen[0][:2] == before[:2] and gc.get_threshold() == before


def test_the_engine_lets_go_when_a_batch_is_over(env, tokenizer):
    class Engine(ScriptedEngine):
        closed = 0

        async def close(self):
            self.closed += 1

    engine = Engine(tokenizer, [CALL, ANSWER])
    run(env, engine)
    assert engine.closed == 1
