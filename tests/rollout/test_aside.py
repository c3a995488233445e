"""Long texts are encoded beside the event loop; a group's prompt is encoded once."""

from __future__ import annotations

import asyncio
import threading

import pytest

from mt_grpo.envs import MultiTurnToolEnv, Step
from mt_grpo.rollout import RolloutLimits, RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.rollout.special_tokens import SpecialTokens
from mt_grpo.trajectory import StopReason

ANSWER = "<answer>Lima</answer>"
LONG = "the capital of Peru " * 500


class Talk(MultiTurnToolEnv):
    """Answers the first turn with a text, and ends after the second."""

    def __init__(self, reply: str) -> None:
        super().__init__(system_prompt="")
        self.reply = reply

    async def step(self, turn):
        turn.error = None
        return Step(self.reply) if turn.index == 0 else Step(done=StopReason.ANSWERED)


@pytest.fixture
def encoded(monkeypatch) -> list[tuple[str, threading.Thread]]:
    """Long texts that were encoded, and where."""
    calls, encode = [], SpecialTokens.encode

    def recorded(self, text):
        if len(text) >= len(LONG):
            calls.append((text, threading.current_thread()))
        return encode(self, text)

    monkeypatch.setattr(SpecialTokens, "encode", recorded)
    return calls


def converse(engine, env, prompts, **limits):
    runner = RolloutRunner(env, engine, RolloutLimits(**limits))
    requests = [RolloutRequest(prompt, f"{index:03d}") for index, prompt in enumerate(prompts)]
    return asyncio.run(runner.run(requests, SamplingParams()))


def test_a_group_encodes_its_long_prompt_once_beside_the_loop(tokenizer, encoded):
    engine = ScriptedEngine(tokenizer, ["A1", ANSWER])
    trajectories = converse(engine, Talk("and"), [LONG] * 8 + [LONG + "2"] * 8)
    assert [trajectory.stop_reason for trajectory in trajectories] == [StopReason.ANSWERED] * 16
    assert len(encoded) == 2 and all(thread is not threading.current_thread() for _, thread in encoded)
    first, second = (trajectories[index].tree.nodes[0].tokens for index in (0, 8))
    assert all(trajectory.tree.nodes[0].tokens == first for trajectory in trajectories[:8]) and first != second


def test_conversations_go_on_while_a_long_text_is_encoded(tokenizer, monkeypatch):
    ended, encode, waited = threading.Event(), SpecialTokens.encode, []

    def patient(self, text):
        if len(text) >= len(LONG):
            waited.append(ended.wait(20))
        return encode(self, text)

    monkeypatch.setattr(SpecialTokens, "encode", patient)
    runner = RolloutRunner(Talk("and"), ScriptedEngine(tokenizer, ["A1", ANSWER]))
    requests = [RolloutRequest(LONG, "000"), RolloutRequest("short", "001")]
    finished = []

    def note(trajectory):
        finished.append(trajectory.session)
        ended.set()

    asyncio.run(runner.run(requests, SamplingParams(), note))
    assert waited == [True] and finished == ["001", "000"]


def test_a_long_reply_is_encoded_beside_the_loop(tokenizer, encoded):
    (trajectory,) = converse(ScriptedEngine(tokenizer, ["A1", ANSWER]), Talk(LONG), ["short"])
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert encoded and all(thread is not threading.current_thread() for _, thread in encoded)


def test_a_conversation_out_of_time_while_encoding_has_no_turn(tokenizer, monkeypatch):
    release, encode = threading.Event(), SpecialTokens.encode

    def stuck(self, text):
        if len(text) >= len(LONG):
            release.wait(20)
        return encode(self, text)

    monkeypatch.setattr(SpecialTokens, "encode", stuck)
    engine = ScriptedEngine(tokenizer, ["A1", ANSWER])
    try:
        (trajectory,) = converse(engine, Talk("and"), [LONG], rollout_timeout=0.2)
    finally:
        release.set()
    assert trajectory.stop_reason is StopReason.TIMEOUT and not trajectory.turns and not engine.requests


def test_for_an_engine_in_this_process_texts_are_encoded_at_once(tokenizer, encoded):
    class Local(ScriptedEngine):
        def use_model(self, model):
            pass

    converse(Local(tokenizer, ["A1", ANSWER]), Talk("and"), [LONG] * 2)
    assert [thread for _, thread in encoded] == [threading.current_thread()]
