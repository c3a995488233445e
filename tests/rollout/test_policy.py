"""The policy: words that go on continue their ids, rewritten ones fork, and limits end what asks for more."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
import weakref

import pytest
import torch
from support.conversations import user
from support.models import build_model, build_tokenizer

from mt_grpo.envs import ConversationEnded, MultiTurnToolEnv, Outcome, Step
from mt_grpo.forward.model import ForwardPlan, enable_trees, score, score_turns
from mt_grpo.rollout import EngineError, RolloutLimits, RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.rollout import policy as policies
from mt_grpo.rollout.special_tokens import SpecialTokens
from mt_grpo.training.rollout_batch import row_tree
from mt_grpo.trajectory import StopReason, Trajectory

END = "<|im_end|>"


class Loop:
    """An environment whose loop is a function of the policy."""

    def __init__(self, loop):
        self.loop = loop

    async def run(self, policy, row):
        return await self.loop(policy) or Outcome()

    async def close(self):
        pass


def hold(loop, answers, history="keep", context_length=4096, **limits):
    """Runs one conversation: its trajectory, its contexts as text, and the runner."""
    tokenizer = build_tokenizer()
    engine = ScriptedEngine(tokenizer, answers, context_length=context_length)
    runner = RolloutRunner(lambda row: Loop(loop), engine, RolloutLimits(**limits), history=history)
    (trajectory,) = asyncio.run(runner.run([RolloutRequest("Q1", "0")], SamplingParams()))
    contexts = [context for _, context, _ in engine.requests]
    return trajectory, [tokenizer.decode(context) for context in contexts], runner


def said(*words):
    """A conversation as the template writes it, up to where the assistant begins."""
    roles = ["user", "assistant"] * len(words)
    whole = "".join(f"<|im_start|>{role}\n{word}{END}\n" for role, word in zip(roles, words, strict=False))
    return f"{whole}<|im_start|>assistant\n"


def paths(trajectory: Trajectory) -> list[list[int]]:
    return [sequence.tokens for sequence in trajectory.tree.sequences()]


@pytest.mark.parametrize("copied", [False, True])
def test_messages_that_go_on_continue_the_sampled_ids(copied):
    async def loop(policy):
        messages = user("Q1")
        for number in range(2, 5):
            turn = await policy.reply(messages)
            message = {"role": "assistant", "content": str(turn.text)} if copied else turn.message
            messages = [*messages, message, *user(f"Q{number}")]

    trajectory, contexts, _ = hold(loop, [f"A{number}{END}" for number in range(3)])
    assert contexts == [said("Q1"), said("Q1", "A0", "Q2"), said("Q1", "A0", "Q2", "A1", "Q3")]
    assert len(paths(trajectory)) == 1 and trajectory.stop_reason is StopReason.ENV_DONE
    assert [turn.replies for turn in trajectory.turns] == [user("Q2"), user("Q3"), []]
    assert [turn.fork_cause for turn in trajectory.turns] == [None] * 3


def test_sampled_ids_go_on_though_their_text_has_others():
    async def loop(policy):
        turn = await policy.reply(user("Q1"))
        await policy.reply([*user("Q1"), {"role": "assistant", "content": turn.text}, *user("Q2")])

    tokenizer = build_tokenizer()
    odd = [token for letter in "Lima" for token in tokenizer.encode(letter)] + tokenizer.encode(END)
    assert odd[:-1] != tokenizer.encode("Lima")
    trajectory, _, _ = hold(loop, lambda session, turn: odd if turn == 0 else f"A{END}")
    (path,) = paths(trajectory)
    begin = len(tokenizer.encode(said("Q1")))
    assert path[begin : begin + len(odd)] == odd


def test_a_past_that_was_rewritten_forks_where_it_differs():
    async def loop(policy):
        first = await policy.reply(user("Q1"))
        await policy.reply([*user("Q1"), first.message, *user("Q2")])
        await policy.reply([*user("Q1"), {"role": "assistant", "content": "summary"}, *user("Q3")])

    trajectory, contexts, runner = hold(loop, [f"A{number}{END}" for number in range(3)])
    assert contexts[2] == said("Q1", "summary", "Q3")
    assert len(paths(trajectory)) == 2 and trajectory.turns[2].fork_cause == "messages"
    assert sum(runner.completion(trajectory).mask) == sum(turn.num_tokens for turn in trajectory.turns)


def test_an_earlier_turn_is_gone_on_from_by_its_ids():
    async def loop(policy):
        first = await policy.reply(user("Q1"))
        await policy.reply([*user("Q1"), first.message, *user("Q2")])
        turn = await policy.reply([*user("Q1"), first.message, *user("Q3")])
        await policy.reply([*user("Q1"), first.message, *user("Q3"), turn.message, *user("Q4")])

    trajectory, contexts, _ = hold(loop, [f"A{number}{END}" for number in range(4)])
    assert contexts[2:] == [said("Q1", "A0", "Q3"), said("Q1", "A0", "Q3", "A2", "Q4")]
    assert len(paths(trajectory)) == 2
    assert [turn.fork_cause for turn in trajectory.turns] == [None, None, "messages", None]
    assert trajectory.tree.num_tokens < sum(map(len, paths(trajectory)))


@pytest.mark.parametrize("end", [END, ""])
def test_an_assistants_message_is_continued_without_its_end(end):
    async def loop(policy):
        turn = await policy.reply(user("Q1"))
        more = {"role": "assistant", "content": turn.text + " Wait,"}
        turn = await policy.reply([*user("Q1"), more], continue_last=True)
        whole = {"role": "assistant", "content": more["content"] + turn.text}
        await policy.reply([*user("Q1"), whole, *user("Q2")])

    trajectory, contexts, runner = hold(loop, [f"A0{end}", f" no{END}", f"A2{END}"])
    assert contexts[1] == said("Q1") + "A0 Wait,"
    assert contexts[2] == said("Q1", "A0 Wait, no", "Q2")
    assert [turn.text for turn in trajectory.turns] == ["A0", " no", "A2"]
    assert trajectory.turns[0].replies == [{"role": "assistant", "content": " Wait,"}]
    row = runner.completion(trajectory)
    assert sum(row.mask) == sum(turn.num_tokens for turn in trajectory.turns)
    assert len(paths(trajectory)) == (2 if end else 1)


def test_a_message_that_nobody_sampled_can_be_continued():
    async def loop(policy):
        await policy.reply([*user("Q1"), {"role": "assistant", "content": "The answer"}], continue_last=True)

    trajectory, contexts, _ = hold(loop, [f" is 4{END}"])
    assert contexts == [said("Q1") + "The answer"] and trajectory.turns[0].text == " is 4"


@pytest.mark.parametrize(
    ("messages", "options", "problem"),
    [
        ([*user("Q"), {"role": "assistant", "content": "A"}], {}, "nothing to reply to"),
        ([], {}, "nothing to reply to"),
        (user("Q"), {"continue_last": True}, "needs an assistant's message"),
        ([{"role": "assistant", "content": "A"}], {"continue_last": True}, "needs an assistant's message"),
    ],
)
def test_messages_with_nothing_to_answer_are_an_error(messages, options, problem):
    async def loop(policy):
        await policy.reply(messages, **options)

    trajectory, _, _ = hold(loop, ["A"])
    assert trajectory.stop_reason is StopReason.ENV_ERROR and problem in trajectory.error


def test_other_tools_are_another_root():
    schema = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}

    async def loop(policy):
        turn = await policy.reply(user("Q1"))
        await policy.reply([*user("Q1"), turn.message, *user("Q2")], [schema])

    trajectory, contexts, _ = hold(loop, [f"A0{END}", f"A1{END}"])
    assert "look" in contexts[1] and "look" not in contexts[0]
    assert len(paths(trajectory)) == 2 and trajectory.turns[1].fork_cause == "messages"


def test_turns_asked_for_at_once_are_all_trained():
    async def loop(policy):
        await asyncio.gather(*(policy.reply(user(f"Q{number}")) for number in range(5)))

    trajectory, contexts, runner = hold(loop, [f"A{number}{END}" for number in range(5)])
    assert contexts == [said(f"Q{number}") for number in range(5)]
    row = runner.completion(trajectory)
    assert sum(row.mask) == sum(turn.num_tokens for turn in trajectory.turns)
    assert [turn.index for turn in trajectory.turns] == list(range(5))


@pytest.mark.parametrize(
    ("limits", "reason", "rewrites"),
    [
        ({"max_completion_tokens": 30}, StopReason.TOKEN_BUDGET, False),
        ({"max_completion_tokens": 30}, StopReason.TOKEN_BUDGET, True),
        ({"context_length": 40}, StopReason.CONTEXT_FULL, False),
    ],
)
def test_a_loop_without_an_end_of_its_own_is_ended(limits, reason, rewrites):
    async def loop(policy):
        messages = user("Q1")
        while True:
            turn = await policy.reply(messages)
            messages = user(f"Q{turn.index}") if rewrites else [*messages, turn.message, *user("Q")]

    trajectory, _, _ = hold(loop, lambda session, turn: f"A{END}", **limits)
    assert trajectory.stop_reason is reason and trajectory.turns


def test_an_outcome_counts_though_a_limit_was_reached():
    async def loop(policy):
        turns = []
        while True:
            try:
                turns.append(await policy.reply(user("Q1"), max_tokens=2))
            except ConversationEnded as ended:
                return Outcome({"score": float(len(turns))}, ended.stop_reason, "4", {"turns": len(turns)})

    trajectory, _, _ = hold(loop, lambda session, turn: "A B C D", max_completion_tokens=7)
    assert trajectory.stop_reason is StopReason.TOKEN_BUDGET and trajectory.answer == "4"
    assert trajectory.env_rewards == {"score": 4.0} and trajectory.info == {"turns": 4}
    assert [turn.finish_reason for turn in trajectory.turns] == ["length"] * 4


def test_a_loop_may_ask_again_after_a_failure():
    async def loop(policy):
        first = await policy.reply(user("Q1"))
        messages = [*user("Q1"), first.message, *user("Q2")]
        with pytest.raises(EngineError):
            await policy.reply(messages)
        await policy.reply(messages)

    answers = [f"A0{END}", EngineError("busy"), f"A1{END}"]
    trajectory, contexts, _ = hold(loop, answers)
    assert contexts == [said("Q1"), said("Q1", "A0", "Q2")] and len(paths(trajectory)) == 1
    assert trajectory.tree.path()[: -len(trajectory.tree.actions()[-1])] == build_tokenizer().encode(contexts[1])


def test_a_continued_message_is_whole_in_a_stripped_history():
    async def loop(policy):
        turn = await policy.reply(user("Q1"))
        more = {"role": "assistant", "content": turn.text + " so"}
        turn = await policy.reply([*user("Q1"), more], continue_last=True)
        whole = {"role": "assistant", "content": more["content"] + turn.text}
        await policy.reply([*user("Q1"), whole, *user("Q2")])

    _, contexts, _ = hold(loop, [f"A0{END}", f" on{END}", f"A2{END}"], history="strip_thinking")
    assert contexts[2] == said("Q1", "A0 so on", "Q2")


@pytest.mark.parametrize("sampled", [0, 2])
def test_a_loop_that_asks_for_nothing_is_ended(sampled):
    async def loop(policy):
        for number in range(sampled):
            await asyncio.sleep(0.6)
            await policy.reply(user(f"Q{number}"))
        await asyncio.Event().wait()

    trajectory, _, _ = hold(loop, lambda session, turn: f"A{END}", idle_timeout=1.0)
    assert len(trajectory.turns) == sampled and trajectory.stop_reason is StopReason.ENV_ERROR
    assert trajectory.error == "The environment took longer than 1 s between two turns."


def test_an_engine_that_takes_long_is_waited_for():
    async def loop(policy):
        await asyncio.gather(*(policy.reply(user(f"Q{number}")) for number in range(3)))

    tokenizer = build_tokenizer()
    engine = ScriptedEngine(tokenizer, lambda session, turn: f"A{END}", latency=1.5)
    runner = RolloutRunner(lambda row: Loop(loop), engine, RolloutLimits(idle_timeout=1.0))
    (trajectory,) = asyncio.run(runner.run([RolloutRequest("Q1", "0")], SamplingParams()))
    assert len(trajectory.turns) == 3 and trajectory.stop_reason is StopReason.ENV_DONE


def test_an_engine_error_ends_the_loop_that_lets_it_pass():
    async def loop(policy):
        await policy.reply(user("Q1"))

    trajectory, _, _ = hold(loop, [EngineError("The server is gone.")])
    assert (trajectory.stop_reason, trajectory.error) == (StopReason.ENGINE_ERROR, "The server is gone.")


def test_a_bug_of_the_engine_is_raised_whatever_the_loop_does():
    async def loop(policy):
        try:
            await policy.reply(user("Q1"))
        except ZeroDivisionError:
            return Outcome()

    with pytest.raises(ZeroDivisionError, match="a bug"):
        hold(loop, [ZeroDivisionError("a bug")])


def test_roots_and_forks_have_the_log_probs_of_each_turn_alone():
    """A forest as the forward packs it, against one pass over each turn's whole context."""

    async def loop(policy):
        first = await policy.reply(user("Q1"))
        await policy.reply([*user("Q1"), first.message, *user("Q2")])
        await policy.reply(user("Other question"))
        await policy.reply([*user("Q1"), first.message, *user("Q3")])
        await policy.reply([*user("Q1"), {"role": "assistant", "content": first.text + " so"}], continue_last=True)

    trajectory, _, runner = hold(loop, [f"A{number}{END}" for number in range(5)])
    contexts = [context for _, context, _ in runner.engine.requests]
    row, model = runner.completion(trajectory), build_model(build_tokenizer()).double()
    assert sum(row.mask) == sum(turn.num_tokens for turn in trajectory.turns)
    enable_trees(model)
    actions, plan = trajectory.tree.actions(), ForwardPlan([row_tree(row)])
    tree, alone = (way(model, plan).by_turn([len(actions)])[0] for way in (score, score_turns))
    assert torch.allclose(torch.cat(tree).float(), torch.cat(alone), atol=1e-5)
    for turn, action in enumerate(actions):  # and against the whole context that was sampled from
        path = torch.tensor([contexts[turn] + action])
        logps = model(path).logits[0, :-1].log_softmax(-1).gather(1, path[0, 1:, None])[-len(action) :, 0]
        assert torch.allclose(alone[turn], logps.float(), atol=1e-5)


def test_renderers_that_nobody_uses_are_not_kept(tokenizer, monkeypatch):
    monkeypatch.setattr(policies, "RENDERERS_KEPT", 3)
    sampler = policies.Sampler(ScriptedEngine(tokenizer, []), RolloutLimits(), {}, "keep", None)
    tools = [[{"type": "function", "function": {"name": f"tool_{number}"}}] for number in range(8)]
    used = sampler.renderer(tools[0])
    made = [weakref.ref(sampler.renderer(each)) for each in tools]
    gc.collect()
    assert sampler.renderer(copy.deepcopy(tools[0])) is used
    assert sum(each() is not None for each in made) <= 1 + 3


ANSWER = "<answer>Lima</answer>"
LONG = "the capital of Peru " * 500


class Talk(MultiTurnToolEnv):
    """Answers the first turn with a text, and ends after the second."""

    def __init__(self, reply: str) -> None:
        super().__init__(protocol="learnt_tags")
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
