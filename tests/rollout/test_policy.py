"""The policy: words that go on continue their ids, rewritten ones fork, and limits end what asks for more."""

import asyncio
import copy
import gc
import re
import threading
import weakref

import pytest
import torch
from support.models import build_model, build_tokenizer

from mt_grpo.envs import ConversationEnded, MultiTurnToolEnv, Outcome, Step
from mt_grpo.forward.model import ForwardPlan, enable_trees, score, score_turns
from mt_grpo.rollout import EngineError, RolloutLimits, RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.rollout import policy as policies
from mt_grpo.rollout.escaped_text import SpecialTokens
from mt_grpo.training.rollout_batch import row_tree
from mt_grpo.trajectory import StopReason, Trajectory

END = "<|im_end|>"
TOKENIZER = build_tokenizer()


class Loop:
    """An environment whose loop is a function of the policy."""

    def __init__(self, loop):
        self.loop = loop

    async def run(self, policy, row):
        return await self.loop(policy) or Outcome()

    async def close(self):
        pass


def play(runner, *prompts, on_finish=None):
    requests = [RolloutRequest(prompt, f"{index:03d}") for index, prompt in enumerate(prompts)]
    return asyncio.run(runner.run(requests, SamplingParams(), on_finish))


def hold(loop, answers=lambda session, turn: f"A{turn}{END}", history="keep", engine=None, **limits):
    """Runs one conversation: its trajectory, its contexts as text, and the runner."""
    engine = ScriptedEngine(TOKENIZER, answers, **engine or {})
    runner = RolloutRunner(lambda row: Loop(loop), engine, RolloutLimits(**limits), history=history)
    (trajectory,) = play(runner, "Q1")
    return trajectory, [TOKENIZER.decode(context) for _, context, _ in engine.requests], runner


def chat(*parts):
    """Messages, of which texts are the user's."""
    return [part if isinstance(part, dict) else {"role": "user", "content": part} for part in parts]


def assistant(content):
    return {"role": "assistant", "content": content}


def said(*words):
    """A conversation as the template writes it, up to where the assistant begins."""
    roles = ["user", "assistant"] * len(words)
    whole = "".join(f"<|im_start|>{role}\n{word}{END}\n" for role, word in zip(roles, words, strict=False))
    return f"{whole}<|im_start|>assistant\n"


def paths(trajectory: Trajectory) -> list[list[int]]:
    return [sequence.tokens for sequence in trajectory.tree.sequences()]


def assert_all_trained(trajectory, runner):
    assert sum(runner.completion(trajectory).mask) == sum(turn.num_tokens for turn in trajectory.turns)


@pytest.mark.parametrize("copied", [False, True])
def test_messages_that_go_on_continue_the_sampled_ids(copied):
    async def loop(policy):
        messages = chat("Q1")
        for number in range(2, 5):
            turn = await policy.reply(messages)
            messages += chat(assistant(str(turn.text)) if copied else turn.message, f"Q{number}")

    trajectory, contexts, _ = hold(loop)
    assert contexts == [said("Q1"), said("Q1", "A0", "Q2"), said("Q1", "A0", "Q2", "A1", "Q3")]
    assert len(paths(trajectory)) == 1 and trajectory.stop_reason is StopReason.ENV_DONE
    assert [(turn.replies, turn.fork_cause) for turn in trajectory.turns] == [
        (chat("Q2"), None), (chat("Q3"), None), ([], None)
    ]  # fmt: skip


def test_sampled_ids_go_on_though_their_text_has_others():
    async def loop(policy):
        turn = await policy.reply(chat("Q1"))
        await policy.reply(chat("Q1", assistant(turn.text), "Q2"))

    odd = [token for letter in "Lima" for token in TOKENIZER.encode(letter)] + TOKENIZER.encode(END)
    assert odd[:-1] != TOKENIZER.encode("Lima")
    trajectory, _, _ = hold(loop, [odd, f"A{END}"])
    (path,) = paths(trajectory)
    begin = len(TOKENIZER.encode(said("Q1")))
    assert path[begin : begin + len(odd)] == odd


def test_a_past_that_was_rewritten_forks_where_it_differs():
    """An earlier turn is gone on from by its ids."""

    async def loop(policy):
        first = await policy.reply(chat("Q1"))
        await policy.reply(chat("Q1", first.message, "Q2"))
        turn = await policy.reply(chat("Q1", first.message, "Q3"))
        await policy.reply(chat("Q1", first.message, "Q3", turn.message, "Q4"))
        await policy.reply(chat("Q1", assistant("summary"), "Q5"))

    trajectory, contexts, runner = hold(loop)
    assert contexts[2:] == [
        said("Q1", "A0", "Q3"), said("Q1", "A0", "Q3", "A2", "Q4"), said("Q1", "summary", "Q5")
    ]  # fmt: skip
    assert [turn.fork_cause for turn in trajectory.turns] == [None, None, "messages", None, "messages"]
    assert len(paths(trajectory)) == 3 and trajectory.tree.num_tokens < sum(map(len, paths(trajectory)))
    assert_all_trained(trajectory, runner)


@pytest.mark.parametrize(("end", "history"), [(END, "keep"), ("", "keep"), (END, "strip_thinking")])
def test_an_assistants_message_is_continued_without_its_end(end, history):
    async def loop(policy):
        turn = await policy.reply(chat("Q1"))
        more = assistant(turn.text + " Wait,")
        turn = await policy.reply(chat("Q1", more), continue_last=True)
        await policy.reply(chat("Q1", assistant(more["content"] + turn.text), "Q2"))

    trajectory, contexts, runner = hold(loop, [f"A0{end}", f" no{END}", f"A2{END}"], history)
    assert contexts[1:] == [said("Q1") + "A0 Wait,", said("Q1", "A0 Wait, no", "Q2")]
    assert [turn.text for turn in trajectory.turns] == ["A0", " no", "A2"]
    assert trajectory.turns[0].replies == [assistant(" Wait,")]
    assert_all_trained(trajectory, runner)
    assert len(paths(trajectory)) == (2 if end else 1)


def test_a_message_that_nobody_sampled_can_be_continued():
    async def loop(policy):
        await policy.reply(chat("Q1", assistant("The answer")), continue_last=True)

    trajectory, contexts, _ = hold(loop, [f" is 4{END}"])
    assert contexts == [said("Q1") + "The answer"] and trajectory.turns[0].text == " is 4"


@pytest.mark.parametrize(
    ("messages", "options", "problem"),
    [
        (chat("Q", assistant("A")), {}, "nothing to reply to"),
        ([], {}, "nothing to reply to"),
        (chat("Q"), {"continue_last": True}, "needs an assistant's message"),
        (chat(assistant("A")), {"continue_last": True}, "needs an assistant's message"),
        (chat("Q"), {"max_tokens": 2.5}, "`max_tokens` is 2.5: give a whole number"),
        *(
            (chat("Q"), {"stop": stop}, "`stop` is .* and has to be texts that end a turn")
            for stop in ("</a>", ["", "b"], [3])
        ),
    ],
)
def test_a_turn_that_cannot_be_taken_is_an_error(messages, options, problem):
    trajectory, _, _ = hold(lambda policy: policy.reply(messages, **options))
    assert trajectory.stop_reason is StopReason.ENV_ERROR and re.search(problem, trajectory.error)


def test_other_tools_are_another_root():
    schema = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}

    async def loop(policy):
        turn = await policy.reply(chat("Q1"))
        await policy.reply(chat("Q1", turn.message, "Q2"), [schema])

    trajectory, contexts, _ = hold(loop)
    assert "look" in contexts[1] and "look" not in contexts[0]
    assert len(paths(trajectory)) == 2 and trajectory.turns[1].fork_cause == "messages"


@pytest.mark.parametrize("latency", [0, 1.5])
def test_turns_asked_for_at_once_are_all_trained(latency):
    """However long the engine takes: it is not the environment that is idle."""

    async def loop(policy):
        await asyncio.gather(*(policy.reply(chat(f"Q{number}")) for number in range(5)))

    trajectory, contexts, runner = hold(loop, engine={"latency": latency}, idle_timeout=1.0)
    assert contexts == [said(f"Q{number}") for number in range(5)] and trajectory.stop_reason is StopReason.ENV_DONE
    assert [turn.index for turn in trajectory.turns] == list(range(5))
    assert_all_trained(trajectory, runner)


@pytest.mark.parametrize(
    ("limits", "reason", "rewrites"),
    [
        ({"max_completion_tokens": 30}, StopReason.TOKEN_BUDGET, False),
        ({"max_completion_tokens": 30}, StopReason.TOKEN_BUDGET, True),
        ({"engine": {"context_length": 40}}, StopReason.CONTEXT_FULL, False),
    ],
)
def test_a_loop_without_an_end_of_its_own_is_ended(limits, reason, rewrites):
    async def loop(policy):
        messages = chat("Q1")
        while True:
            turn = await policy.reply(messages)
            messages = chat(f"Q{turn.index}") if rewrites else [*messages, turn.message, *chat("Q")]

    trajectory, _, _ = hold(loop, **limits)
    assert trajectory.stop_reason is reason and trajectory.turns


def test_an_outcome_counts_though_a_limit_was_reached():
    async def loop(policy):
        turns = []
        while True:
            try:
                turns.append(await policy.reply(chat("Q1"), max_tokens=2))
            except ConversationEnded as ended:
                return Outcome({"score": float(len(turns))}, ended.stop_reason, "4", {"turns": len(turns)})

    trajectory, _, _ = hold(loop, lambda session, turn: "A B C D", max_completion_tokens=7)
    assert trajectory.stop_reason is StopReason.TOKEN_BUDGET and trajectory.answer == "4"
    assert trajectory.env_rewards == {"score": 4.0} and trajectory.info == {"turns": 4}
    assert [turn.finish_reason for turn in trajectory.turns] == ["length"] * 4


def test_a_loop_may_ask_again_after_a_failure():
    async def loop(policy):
        first = await policy.reply(chat("Q1"))
        with pytest.raises(EngineError):
            await policy.reply(chat("Q1", first.message, "Q2"))
        await policy.reply(chat("Q1", first.message, "Q2"))

    trajectory, contexts, _ = hold(loop, [f"A0{END}", EngineError("busy"), f"A1{END}"])
    assert contexts == [said("Q1"), said("Q1", "A0", "Q2")] and len(paths(trajectory)) == 1
    assert trajectory.tree.path()[: -len(trajectory.tree.actions()[-1])] == TOKENIZER.encode(contexts[1])


@pytest.mark.parametrize("sampled", [0, 2])
def test_a_loop_that_asks_for_nothing_is_ended(sampled):
    async def loop(policy):
        for number in range(sampled):
            await asyncio.sleep(0.6)
            await policy.reply(chat(f"Q{number}"))
        await asyncio.Event().wait()

    trajectory, _, _ = hold(loop, idle_timeout=1.0)
    assert len(trajectory.turns) == sampled and trajectory.stop_reason is StopReason.ENV_ERROR
    assert trajectory.error == "The environment took longer than 1 s between two turns."


def test_a_bug_of_the_engine_is_raised_whatever_the_loop_does():
    async def loop(policy):
        try:
            await policy.reply(chat("Q1"))
        except ZeroDivisionError:
            return Outcome()

    with pytest.raises(ZeroDivisionError, match="a bug"):
        hold(loop, [ZeroDivisionError("a bug")])
    trajectory, _, _ = hold(loop, [EngineError("The server is gone.")])
    assert (trajectory.stop_reason, trajectory.error) == (StopReason.ENGINE_ERROR, "The server is gone.")


def test_roots_and_forks_have_the_log_probs_of_each_turn_alone():
    """A forest as the forward packs it, against one pass over each turn's whole context."""

    async def loop(policy):
        first = await policy.reply(chat("Q1"))
        await policy.reply(chat("Q1", first.message, "Q2"))
        await policy.reply(chat("Other question"))
        await policy.reply(chat("Q1", first.message, "Q3"))
        await policy.reply(chat("Q1", assistant(first.text + " so")), continue_last=True)

    trajectory, _, runner = hold(loop)
    row, model = runner.completion(trajectory), build_model(TOKENIZER).double()
    assert_all_trained(trajectory, runner)
    enable_trees(model)
    actions, plan = trajectory.tree.actions(), ForwardPlan([row_tree(row)])
    tree, alone = (way(model, plan).by_turn([len(actions)])[0] for way in (score, score_turns))
    assert torch.allclose(torch.cat(tree).float(), torch.cat(alone), atol=1e-5)
    for (_, context, _), action, logps in zip(runner.engine.requests, actions, alone, strict=True):
        path = torch.tensor([context + action])  # what was sampled from
        own = model(path).logits[0, :-1].log_softmax(-1).gather(1, path[0, 1:, None])[-len(action) :, 0]
        assert torch.allclose(logps, own.float(), atol=1e-5)


def test_renderers_that_nobody_uses_are_not_kept(tokenizer, monkeypatch):
    monkeypatch.setattr(policies, "RENDERERS_KEPT", 3)
    sampler = policies.Sampler(ScriptedEngine(tokenizer, []), RolloutLimits(), {}, "keep", None)
    tools = [[{"type": "function", "function": {"name": f"tool_{number}"}}] for number in range(8)]
    used = sampler.renderer(tools[0])
    made = [weakref.ref(sampler.renderer(each)) for each in tools]
    gc.collect()
    assert sampler.renderer(copy.deepcopy(tools[0])) is used
    assert sum(each() is not None for each in made) <= 1 + 3


# Long texts are encoded beside the event loop

ANSWER = "<answer>Lima</answer>"
LONG = "the capital of Peru " * 500


class Talk(MultiTurnToolEnv):
    """Answers the first turn with a text, and ends after the second."""

    def __init__(self, reply: str = "and") -> None:
        super().__init__(protocol="learnt_tags")
        self.reply = reply

    async def step(self, turn):
        turn.error = None
        return Step(self.reply) if turn.index == 0 else Step(done=StopReason.ANSWERED)


class Encoded(list):
    """Long texts that were encoded: each waits for the gate, and says whether in a thread."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()


@pytest.fixture
def encoded(monkeypatch):
    calls, encode = Encoded(), SpecialTokens.encode

    def recorded(self, text):
        if len(text) >= len(LONG):
            calls.append(calls.gate.wait(20) and threading.current_thread() is not threading.main_thread())
        return encode(self, text)

    monkeypatch.setattr(SpecialTokens, "encode", recorded)
    yield calls
    calls.gate.set()


@pytest.fixture
def engine(tokenizer):
    return ScriptedEngine(tokenizer, ["A1", ANSWER])


def test_a_group_encodes_its_long_prompt_once_beside_the_loop(engine, encoded):
    trajectories = play(RolloutRunner(Talk(), engine), *[LONG] * 8, *[LONG + "2"] * 8)
    assert [trajectory.stop_reason for trajectory in trajectories] == [StopReason.ANSWERED] * 16
    assert encoded == [True] * 2
    prompts = [trajectory.tree.nodes[0].tokens for trajectory in trajectories]
    assert prompts == [prompts[0]] * 8 + [prompts[8]] * 8 and prompts[0] != prompts[8]


def test_conversations_go_on_while_a_long_text_is_encoded(engine, encoded):
    encoded.gate.clear()
    finished = []

    def note(trajectory):
        finished.append(trajectory.session)
        encoded.gate.set()

    play(RolloutRunner(Talk(), engine), LONG, "short", on_finish=note)
    assert encoded == [True] and finished == ["001", "000"]


def test_a_long_reply_is_encoded_beside_the_loop(engine, encoded):
    (trajectory,) = play(RolloutRunner(Talk(LONG), engine), "short")
    assert trajectory.stop_reason is StopReason.ANSWERED and encoded and all(encoded)


def test_a_conversation_out_of_time_while_encoding_has_no_turn(engine, encoded):
    encoded.gate.clear()
    (trajectory,) = play(RolloutRunner(Talk(), engine, RolloutLimits(rollout_timeout=0.2)), LONG)
    assert trajectory.stop_reason is StopReason.TIMEOUT and not trajectory.turns and not engine.requests


def test_for_an_engine_in_this_process_texts_are_encoded_at_once(engine, encoded):
    engine.use_model = lambda model: None
    play(RolloutRunner(Talk(), engine), LONG, LONG)
    assert encoded == [False]
