"""Every chat template that TRL brings shows the model what it is told, or is refused in a sentence at the start."""

from __future__ import annotations

import asyncio
from functools import lru_cache

import pytest
from support.conversations import template_tokenizer
from support.models import TEMPLATES, build_tokenizer
from trl.chat_template_utils import add_response_schema

from mt_grpo.envs import MultiTurnToolEnv, Step, StepEnv
from mt_grpo.rollout import (
    ChatRenderer,
    RolloutRequest,
    RolloutRunner,
    SamplingParams,
    ScriptedEngine,
    TemplateError,
)
from mt_grpo.trajectory import StopReason

NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
SCHEMA = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
ASKED = {"role": "user", "content": "What is the capital of Peru?"}
SAID = {"role": "assistant", "content": "Let me see."}
REPLY = {"role": "user", "content": 'It is "Lima", not Cusco.'}
# Templates without a role for results, or that leave them out: "tags" is the protocol for these.
WITHOUT_RESULTS = {"cohere", "cohere2", "gemma", "gemma3", "llava_next", "phi3", "phi3_5"}
# Templates that take one call in a turn: two results are appended all the same.
ONE_CALL = {"llama3_1", "llama3_2"}
# Templates that write what is said beside calls behind their results, which rewrites the turn.
CALLS_FIRST = {"gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5", "diffusion_gemma"}


@lru_cache
def chat(name: str, with_tools: bool = False) -> ChatRenderer:
    return ChatRenderer(template_tokenizer(name), [SCHEMA] if with_tools else None)


def calling(count: int, content: str | None = "") -> dict:
    calls = [
        {"type": "function", "id": f"call_{number}", "function": {"name": "look", "arguments": {"query": "Lima"}}}
        for number in range(count)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def results(count: int) -> list[dict]:
    return [
        {"role": "tool", "tool_call_id": f"call_{number}", "name": "look", "content": f"Result number {number}."}
        for number in range(count)
    ]


CASES = {
    "user": (SAID, [REPLY]),
    "one result": (calling(1), results(1)),
    "two results": (calling(2), results(2)),
    "text and a call": (calling(1, "Let me see."), results(1)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_every_template_shows_replies_or_is_refused_at_once(name, case):
    turn, replies = CASES[case]
    family = name.removesuffix("_training")
    if case != "user" and family in WITHOUT_RESULTS:
        with pytest.raises(TemplateError, match=r"^The chat template cannot hold tool calls: [^\n]+\.$"):
            chat(name, with_tools=True)
        return
    renderer = chat(name, with_tools=case != "user")
    ids = renderer.reply_ids(replies, -1, calls=turn.get("tool_calls", ()))
    suffix, position = renderer.decode(ids), 0
    for reply in replies:
        shown = [text for text in (reply["content"], reply["content"].replace('"', '\\"')) if text in suffix]
        assert shown, suffix
        position = suffix.index(shown[0], position)
    if case == "two results" and family in ONE_CALL:
        return
    whole = renderer.prompt_text([ASKED, turn, *replies])
    if case == "text and a call" and family in CALLS_FIRST:
        assert whole.index(replies[-1]["content"]) < whole.index(turn["content"])
    else:
        assert whole.endswith(suffix)


@pytest.mark.parametrize("case", ["user", "one result"])
@pytest.mark.parametrize("name", NAMES)
def test_an_end_that_was_sampled_is_not_written_again(name, case):
    turn, replies = CASES[case]
    if case != "user" and name.removesuffix("_training") in WITHOUT_RESULTS:
        return
    renderer = chat(name, with_tools=case != "user")
    unended = renderer.reply_ids(replies, -1)
    end = renderer.end_id if case == "user" else renderer.end_ids[-1]
    assert renderer.reply_ids(replies, end) == unended[1:]
    assert renderer.text([*renderer.encode("Lima"), end]) == "Lima"


@pytest.mark.parametrize("name", ["gemma4", "gptoss", "glm4moe"])
def test_results_stand_behind_the_calls_own_end(name):
    tokenizer = build_tokenizer(name)
    tokenizer.add_tokens(list(template_tokenizer(name).added_tokens_decoder.values()))
    add_response_schema(tokenizer)
    call, answer = {
        "gemma4": ('<|tool_call>call:look{query:<|"|>Lima<|"|>}<tool_call|><|tool_response>', "Peru<turn|>"),
        "gptoss": (
            ' to=functions.look<|channel|>commentary json<|message|>{"query": "Lima"}<|call|>',
            "<|channel|>final<|message|>Peru<|return|>",
        ),
        "glm4moe": (
            "\n<tool_call>look\n<arg_key>query</arg_key>\n<arg_value>Lima</arg_value>\n</tool_call><|observation|>",
            "\nPeru<|user|>",
        ),
    }[name]

    def look(query: str) -> str:
        """
        Looks.

        Args:
            query: What for.
        """
        return "The capital of Peru."

    engine = ScriptedEngine(tokenizer, [call, answer])
    runner = RolloutRunner(MultiTurnToolEnv([look], protocol="native"), engine)
    (trajectory,) = asyncio.run(runner.run([RolloutRequest("Where is Lima?", "0")], SamplingParams()))
    assert trajectory.error is None and trajectory.answer == "Peru"
    (_, first, sample), (_, second, _) = engine.requests
    assert second[: len(first) + len(sample.ids)] == first + sample.ids
    written = tokenizer.decode(second[len(first) + len(sample.ids) :])
    assert "The capital of Peru." in written and not written.startswith(tokenizer.decode(sample.ids[-1:]))
    whole = runner.renderer.prompt_text(
        [*trajectory.prompt, trajectory.turns[0].message, *trajectory.turns[0].replies]
    )
    assert whole.endswith(written)


@pytest.mark.parametrize("name", [name for name in NAMES if name.removesuffix("_training") not in WITHOUT_RESULTS])
def test_messages_without_content_render_as_with_none(name):
    renderer = chat(name, with_tools=True)
    whole = renderer.prompt_text([ASKED, calling(1, None), *results(1)])
    assert results(1)[0]["content"] in whole and "None" not in whole
    without = calling(1)
    del without["content"]
    assert renderer.prompt_text([ASKED, without, *results(1)]) == whole
    assert renderer.prompt_text([ASKED, SAID, {"role": "user", "content": None}])


def test_a_result_is_named_after_the_call_that_it_answers():
    calls = [
        {"id": "b", "function": {"name": "find", "arguments": {}}},
        {"id": "a", "function": {"name": "look", "arguments": {}}},
    ]
    replies = [{"role": "tool", "tool_call_id": name, "content": f"Result {name}."} for name in "ab"]
    text = chat("gemma4", True).decode(chat("gemma4", True).reply_ids(replies, -1, calls=calls))
    assert "response:look{value:" in text and "response:find{value:" in text
    text = chat("gptoss", True).decode(chat("gptoss", True).reply_ids(replies[:1], -1, calls=calls))
    assert "functions.look to=assistant" in text
    assert "response:a_tool_it_calls" not in text


class Says(StepEnv):
    """Replies to the first turn with one message."""

    def __init__(self, reply):
        self.reply = reply

    def reset(self, row):
        return row["prompt"]

    def step(self, turn):
        return [self.reply] if turn.index == 0 else Step(done=True)


def outcome_of(template: str, reply: dict):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    engine = ScriptedEngine(tokenizer, ["A1<|im_end|>", "A2<|im_end|>"])
    runner = RolloutRunner(Says(reply), engine)
    return asyncio.run(runner.run([RolloutRequest("Q", "0")], SamplingParams()))[0], engine


LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("content", "reply"),
    [
        ("m.content if m.role != 'system' else ''", {"role": "system", "content": "Be brief."}),
        ("m.content if m.role != 'system' else '5'", {"role": "system", "content": "5"}),
        ("m.content[:20]", {"role": "user", "content": "one two three four five six seven"}),
        ("m.content.split('####')[-1]", {"role": "user", "content": "Lima #### Cusco"}),
    ],
)
def test_a_reply_that_the_template_loses_ends_the_conversation(content, reply):
    trajectory, engine = outcome_of(LOOP.replace("CONTENT", content), reply)
    assert trajectory.stop_reason is StopReason.ENV_ERROR and len(engine.requests) == 1
    assert "does not show the model the reply of role" in trajectory.error and "\n" not in trajectory.error


@pytest.mark.parametrize(
    "filtered",
    ["trim", "tojson", "e", "replace('/no_think', '')"],
)
def test_a_reply_may_be_escaped_trimmed_or_freed_of_switches(filtered):
    reply = {"role": "user", "content": ' "Perú" & <b>北京</b>\n\tone \\ two /no_think\n'}
    trajectory, engine = outcome_of(LOOP.replace("CONTENT", f"m.content | {filtered}"), reply)
    assert trajectory.error is None and len(engine.requests) == 2


def test_a_part_that_is_no_text_ends_a_conversation_of_text():
    reply = {"role": "user", "content": [{"type": "text", "text": "Lima"}, {"type": "image"}]}
    trajectory, engine = outcome_of(LOOP.replace("CONTENT", "m.content"), reply)
    assert trajectory.stop_reason is StopReason.ENV_ERROR and len(engine.requests) == 1
    assert "A message has a place for an image and no image" in trajectory.error


@pytest.mark.parametrize(
    "content", ["m.content", "m.content if m.content is string else ''", "m.content[0].text or m.content"]
)
def test_parts_are_joined_where_the_template_does_not_show_them(content):
    reply = {"role": "user", "content": [{"type": "text", "text": "Lima"}, {"type": "text", "text": "Cusco"}]}
    _, engine = outcome_of(LOOP.replace("CONTENT", content), reply)
    assert "Lima\nCusco" in engine.tokenizer.decode(engine.requests[1][1])


def test_a_prompt_that_the_template_loses_ends_the_conversation():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = LOOP.replace("CONTENT", "m.content if m.role != 'system' else ''")
    runner = RolloutRunner(Says(REPLY), ScriptedEngine(tokenizer, ["A1<|im_end|>"]))
    prompt = [{"role": "system", "content": "Answer in Spanish."}, ASKED]
    (trajectory,) = asyncio.run(runner.run([RolloutRequest(prompt, "0")], SamplingParams()))
    assert not trajectory.turns and "the prompt of role 'system': 'Answer in Spanish.'" in trajectory.error


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (LOOP.replace("CONTENT", "m.content if loop.index < 3 else ''"), "a reply to its answer"),
        (LOOP.replace("CONTENT", "m.text.words"), "refuses a question and an answer: 'dict object' has no"),
        (
            LOOP.replace("CONTENT", "m.content if loop.index < 3 else raise_exception('No.')"),
            "refuses a reply .* No. Use",
        ),
    ],
)
def test_a_template_that_loses_replies_is_refused_at_once(template, says):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(TemplateError, match=says):
        RolloutRunner(Says(REPLY), ScriptedEngine(tokenizer, []))


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "glm4moe", "gptoss"])
def test_arguments_as_json_text_read_like_objects(name):
    shown = []
    for arguments in ({"city": "Lima", "<|im_end|>": 1}, '{"city": "Lima", "\\u003c|im_end|>": 1}'):
        call = {"type": "function", "id": "call_0", "function": {"name": "weather", "arguments": arguments}}
        asked = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        result = {"role": "tool", "name": "weather", "tool_call_id": "call_0", "content": "Rain."}
        shown.append(chat(name, with_tools=True).prompt_ids([*asked, result]))
    assert shown[0] == shown[1]
