"""The rules of a conversation: what is answered, what counts as a step, how tools run, when it ends."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from support.conversations import read
from support.models import build_tokenizer
from support.waiting import until_true
from trl.chat_template_utils import add_response_schema

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.errors import ConfigError
from mt_grpo.rollout import RolloutLimits, RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.tools import Tool
from mt_grpo.training import MTGRPOConfig
from mt_grpo.trajectory import StopReason, Trajectory, Turn

ANSWER = "<answer>Lima</answer>"
ANYTHING = {"type": "object", "properties": {}, "additionalProperties": True}


def call_text(name: str, **args: object) -> str:
    return f"<tool>{json.dumps({'name': name, 'args': args})}</tool>"


def tool(function, name: str | None = None, **options) -> Tool:
    return Tool(name or function.__name__, "A tool.", ANYTHING, function, **options)


def take_turn(env: MultiTurnToolEnv, text: str, index: int = 0) -> tuple[Turn, StopReason | None]:
    turn = read(env, text, index)
    step = asyncio.run(env.step(turn))
    turn.replies = step.replies
    return turn, step.done or None


def converse(env: MultiTurnToolEnv, engine: ScriptedEngine, sessions: int = 1, **limits) -> list[Trajectory]:
    requests = [RolloutRequest("hi", f"{index:02d}") for index in range(sessions)]
    return asyncio.run(RolloutRunner(env, engine, RolloutLimits(**limits)).run(requests, SamplingParams()))


@pytest.mark.parametrize("name", ["reasoning", "tool", "result", "answer"])
def test_a_tool_with_the_name_of_a_tag_is_refused(search_tool, name):
    with pytest.raises(ConfigError, match=f"{name!r} has the name of a tag of `call_protocol: tags`.* another name"):
        MultiTurnToolEnv([tool(search_tool, name)])
    assert name in MultiTurnToolEnv([tool(search_tool, name)], protocol="native").tools


# Steps and their bound


@pytest.mark.parametrize(
    ("text", "says", "executed"),
    [
        ("<tool>{oops</tool>", "not valid JSON", False),
        (call_text("serch", query="x"), "unknown tool 'serch'; the tools are: lookup", False),
        (call_text("lookup", quary="x"), "unknown argument 'quary'", False),
        (call_text("lookup", query=3), "must be of type string", False),
        (call_text("lookup"), "missing argument 'query'", False),
        (call_text("lookup", query="x"), "about x", True),
    ],
)
def test_a_bad_turn_gets_an_error_and_counts_as_a_step(search_tool, tokenizer, text, says, executed):
    env = MultiTurnToolEnv([search_tool], max_steps=1)
    [trajectory] = converse(env, ScriptedEngine(tokenizer, [text, text]))
    first, last = trajectory.turns
    assert says in first.replies[0]["content"] and len(first.replies) == 1
    assert first.replies[0]["content"].startswith("<result>" if executed else "<result>Error: ")
    assert first.has_result == executed and first.num_failures == int(not executed)
    assert trajectory.stop_reason is StopReason.MAX_STEPS and last.replies == []


@pytest.mark.parametrize("max_steps", [0, 1, 4])
@pytest.mark.parametrize("text", ["no tags at all", "<tool>{oops</tool>", call_text("lookup", query="x")])
def test_a_model_that_never_answers_has_one_turn_past_max_steps(search_tool, tokenizer, max_steps, text):
    env = MultiTurnToolEnv([search_tool], max_steps=max_steps)
    [trajectory] = converse(env, ScriptedEngine(tokenizer, lambda session, turn: text))
    assert trajectory.stop_reason is StopReason.MAX_STEPS
    assert len(trajectory.turns) == max_steps + 1
    assert sum(len(turn.replies) for turn in trajectory.turns) == max_steps


def test_a_call_past_the_limit_does_not_run_and_is_a_failure(tokenizer):
    ran = []
    env = MultiTurnToolEnv([tool(lambda: ran.append(1), "act")], max_steps=0)
    turn, stop = take_turn(env, call_text("act"))
    assert stop is StopReason.MAX_STEPS and not ran
    assert "limit of 0 steps" in turn.tool_calls[0].error and turn.num_failures == 1 and not turn.has_result


def test_the_model_may_answer_after_its_last_step(search_tool, tokenizer):
    env = MultiTurnToolEnv([search_tool], max_steps=1)
    [trajectory] = converse(env, ScriptedEngine(tokenizer, [call_text("lookup", query="x"), ANSWER]))
    assert trajectory.stop_reason is StopReason.ANSWERED and trajectory.answer == "Lima"


# Tools


def test_tools_of_a_turn_run_together_and_answer_in_call_order():
    reached, barrier = threading.Event(), threading.Barrier(2)

    def first() -> str:
        barrier.wait(120)
        assert reached.wait(120)
        return "first"

    def second() -> str:
        barrier.wait(120)
        return "second"

    async def third() -> str:
        reached.set()
        return "third"

    env = MultiTurnToolEnv([tool(first), tool(second), tool(third)])
    turn, _ = take_turn(env, call_text("first") + call_text("second") + call_text("third"))
    assert [call.result for call in turn.tool_calls] == ["first", "second", "third"]
    texts = "<result>first</result>\n<result>second</result>\n<result>third</result>"
    assert turn.replies == [{"role": "user", "content": texts}]


def test_tools_of_all_conversations_run_at_the_same_time(tokenizer):
    number = 40  # more than a default thread pool has workers
    blocking, met = threading.Barrier(number), []

    def meet() -> str:
        blocking.wait(20)
        return "met"

    async def gather() -> str:
        met.append(1)
        await until_true(lambda: len(met) == number)
        return "gathered"

    env = MultiTurnToolEnv([tool(meet), tool(gather)], tool_timeout=20)
    engine = ScriptedEngine(tokenizer, [call_text("meet"), call_text("gather"), ANSWER])
    for trajectory in converse(env, engine, sessions=number):
        replies = [turn.replies[0]["content"] for turn in trajectory.turns[:2]]
        assert replies == ["<result>met</result>", "<result>gathered</result>"]


def test_a_tool_may_take_a_minute_unless_there_is_no_limit():
    assert MultiTurnToolEnv().tool_timeout == MTGRPOConfig.tool_timeout == 60.0
    assert MultiTurnToolEnv(tool_timeout=None).tool_timeout is None


def plot(function: str, self: str) -> str:
    """
    Plots.

    Args:
        function: Of x.
        self: Anything.
    """
    return function + self


def test_an_argument_may_have_any_name():
    turn, _ = take_turn(MultiTurnToolEnv([plot]), call_text("plot", function="x", self="y"))
    assert turn.tool_calls[0].result == "xy"


# The native protocol, end to end


def test_native_calls_are_run_and_answered_through_the_template(search_tool):
    tokenizer = add_response_schema(build_tokenizer("qwen3"))
    call = '<tool_call>\n{"name": "lookup", "arguments": {"query": "Lima"}}\n</tool_call>'
    engine = ScriptedEngine(tokenizer, [f"{call}\n{call}<|im_end|>", "<tool_call>\n{oops\n</tool_call>", "Peru"])
    [trajectory] = converse(MultiTurnToolEnv([search_tool], protocol="native"), engine)
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.ANSWERED, "Peru")
    assert [reply["content"] for reply in trajectory.turns[0].replies] == ["about Lima"] * 2
    text = tokenizer.decode(trajectory.tree.path())
    assert "<tools>" in text and text.count("<tool_response>\nabout Lima\n</tool_response>") == 2
    assert text.count("<|im_end|>") == text.count("<|im_start|>") - 1
    assert "cannot be read" in trajectory.turns[1].replies[0]["content"]


def test_thinking_opened_by_the_template_is_not_in_the_answer(search_tool):
    tokenizer = add_response_schema(build_tokenizer("qwen3_5_think"))
    engine = ScriptedEngine(tokenizer, ["It is Lima, so\n</think>\n\nPeru<|im_end|>"])
    [trajectory] = converse(MultiTurnToolEnv([search_tool], protocol="native"), engine)
    assert trajectory.answer == "Peru"
    assert trajectory.turns[0].message["reasoning_content"] == "It is Lima, so"


# Prompt, construction


IMAGE = {"type": "image", "text": None}
TOLD = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("system_prompt", "prompt", "begins"),
    [
        (None, TOLD, ""),
        ("Yours.", TOLD, "Yours.\n\n"),
        ("Yours.", [{"role": "system", "content": "Mine."}, *TOLD], "Mine.\n\n"),
        (None, [{"role": "developer", "content": "Mine."}, *TOLD], "Mine.\n\n"),
        (None, [{"role": "system", "content": ""}, *TOLD], ""),
        (None, [{"role": "system", "content": None}, *TOLD], ""),
        (None, [{"role": "assistant", "content": "{}"}, *TOLD], ""),
        ("", TOLD, ""),
        ("", [{"role": "system", "content": "Mine."}, *TOLD], "Mine.\n\n"),
    ],
)
def test_instructions_follow_the_users_text(search_tool, system_prompt, prompt, begins):
    env = MultiTurnToolEnv([search_tool], system_prompt)
    first, *rest = env.start(prompt)
    assert first["content"] == f"{begins}{env.protocol.instructions(list(env.tools.values()))}"
    assert "lookup" in first["content"] and first["role"] == ("system", "developer")[prompt[0]["role"] == "developer"]
    assert rest == prompt[prompt[0]["role"] in ("system", "developer") :]


def test_instructions_follow_a_system_message_of_parts(search_tool):
    own = [{"role": "system", "content": [{"type": "text", "text": "Mine."}]}, *TOLD]
    first, said = MultiTurnToolEnv([search_tool]).start(own)
    assert [part["text"][:7] for part in first["content"]] == ["Mine.", "\n\nSolve"] and said == TOLD[0]
    assert len(own[0]["content"]) == 1


@pytest.mark.parametrize("system_prompt", [None, "Yours."])
def test_a_prompt_without_messages_is_said_to_be_one(search_tool, tokenizer, system_prompt):
    runner = RolloutRunner(MultiTurnToolEnv([search_tool], system_prompt), ScriptedEngine(tokenizer, []))
    [trajectory] = asyncio.run(runner.run([RolloutRequest([], "0")], SamplingParams()))
    assert trajectory.error.startswith("ValueError: There are no messages, so there is nothing to reply to")


@pytest.mark.parametrize("role", ["system", "user"])
@pytest.mark.parametrize("join", [str, lambda text: text.replace(" ", "\n  "), lambda text: [IMAGE, {"text": text}]])
def test_instructions_are_not_repeated(search_tool, role, join):
    env = MultiTurnToolEnv([search_tool])
    told = f"Mine. {env.start('hi')[0]['content']} Yours."
    prompt = [{"role": role, "content": join(told)}, *TOLD]
    assert env.start(prompt) == prompt
    other = MultiTurnToolEnv([plot])
    assert len(str(other.start(prompt))) > len(str(prompt))  # those are not its tools


@pytest.mark.parametrize(
    "options", [{"protocol": "native"}, {"protocol": "learnt_tags"}, {"tools": (), "protocol": "plain"}]
)
def test_some_prompts_get_no_instructions(search_tool, options):
    env = MultiTurnToolEnv(**{"tools": [search_tool], **options})
    own = [{"role": "system", "content": "Mine."}, *TOLD]
    assert env.start("hi") == TOLD and env.start(own) == own


def test_tools_are_shown_once_by_template_or_system_prompt(search_tool):
    [shown] = MultiTurnToolEnv([search_tool], protocol="native").tool_schemas
    assert shown["function"]["name"] == "lookup"
    others = (MultiTurnToolEnv([search_tool]), MultiTurnToolEnv(protocol="native"))
    assert [other.tool_schemas for other in others] == [None, None]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tools": [lambda query: query]}, "docstring"),
        ({"protocol": "tag"}, "nearest is 'tags'"),
        ({"max_steps": -1}, "max_steps"),
        ({"env_mask": 2}, "env_mask"),
        ({"tool_timeout": 0}, "`tool_timeout` is 0; set seconds above 0, or `None`"),
        ({"tool_timeout": -1.0}, "tool_timeout"),
    ],
)
def test_bad_options_are_refused_by_name(options, says):
    with pytest.raises(ValueError, match=says):
        MultiTurnToolEnv(**options)


# The convenience


@pytest.mark.parametrize("env_mask", [0, 1])
def test_generate_returns_ids_messages_and_mask(search_tool, tokenizer, env_mask):
    env = MultiTurnToolEnv([search_tool], env_mask=env_mask)
    texts = [call_text("lookup", query="x"), ANSWER]
    out = env.generate(["hi", [{"role": "user", "content": "ho"}]], ScriptedEngine(tokenizer, texts))
    assert out.keys() == {"ids", "mask", "messages"} and {len(values) for values in out.values()} == {2}
    first, last = (tokenizer.encode(text) for text in texts)
    for ids, mask, messages in zip(out["ids"], out["mask"], out["messages"], strict=True):
        assert [message["content"] for message in messages] == [texts[0], "<result>about x</result>", texts[1]]
        assert ids[: len(first)] == first and ids[-len(last) :] == last
        reply = ids[len(first) : -len(last)]
        assert "<result>about x</result>" in tokenizer.decode(reply)
        assert mask == [1] * len(first) + [env_mask] * len(reply) + [1] * len(last)


def test_generate_hands_on_how_to_sample_and_bounds_each_turn(search_tool, tokenizer):
    seen = []

    class Engine(ScriptedEngine):
        async def generate(self, context, sampling, session):
            seen.append(sampling)
            return await super().generate(context, sampling, session)

    def generate(**sampling):
        """The ids, and the seeds of both."""
        seen.clear()
        engine = Engine(tokenizer, ["x" * 100])
        out = MultiTurnToolEnv([search_tool]).generate(["a", "a"], engine, SamplingParams(max_tokens=7, **sampling))
        return out["ids"], [each.seed for each in seen]

    ids, seeds = generate(temperature=0.5, seed=3)
    assert [len(each) for each in ids] == [7, 7]
    sampled = {(each.max_tokens, each.temperature, each.stop) for each in seen}
    assert sampled == {(7, 0.5, ("</tool>", "</answer>"))}
    assert seeds[0] != seeds[1]  # the same prompt twice is two samples
    assert generate(temperature=0.5, seed=3)[1] == seeds != generate(seed=4)[1]
