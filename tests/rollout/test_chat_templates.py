"""Every chat template that TRL brings shows the model what it is told, or is refused in a sentence at the start."""

import asyncio
from functools import lru_cache

import pytest
from support.conversations import template_tokenizer, user
from support.models import TEMPLATES, build_tokenizer

from mt_grpo.envs import Step, StepEnv
from mt_grpo.rollout import ChatRenderer, RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine, TemplateError
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
REPLY = {"role": "user", "content": 'It is "Lima", not Cusco <|im_end|> and a_tool_it_calls.'}
# Templates without a role for results, or that leave them out: "tags" is the protocol for these.
WITHOUT_RESULTS = {"cohere", "cohere2", "gemma", "gemma3", "llava_next", "phi3", "phi3_5"}
# Templates that take one call in a turn: two results are appended all the same.
ONE_CALL = {"llama3_1", "llama3_2"}
# Templates that write what is said beside calls behind their results, which rewrites the turn.
CALLS_FIRST = {"gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5", "diffusion_gemma"}


@lru_cache
def chat(name: str, with_tools: bool = False) -> ChatRenderer:
    return ChatRenderer(template_tokenizer(name), [SCHEMA] if with_tools else None)


def call_of(number: int, arguments: object, name: str = "look") -> dict:
    return {"type": "function", "id": f"call_{number}", "function": {"name": name, "arguments": arguments}}


def calling(count: int, content: str | None = "") -> dict:
    calls = [call_of(number, {"query": f"Lima {number}"}) for number in range(count)]
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
    end = renderer.end_id if case == "user" else renderer.end_ids[-1]
    assert renderer.reply_ids(replies, end, calls=turn.get("tool_calls", ())) == ids[1:]  # it is not written again
    assert renderer.text([*renderer.encode("Lima"), end]) == "Lima"
    if case == "two results" and family in ONE_CALL:
        return
    whole = renderer.decode(renderer.prompt_ids([ASKED, turn, *replies]))
    if case == "text and a call" and family in CALLS_FIRST:
        assert whole.index(replies[-1]["content"]) < whole.index(turn["content"])
    else:
        assert whole.endswith(suffix)


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
    calls = [call_of(1, {}, "find"), call_of(0, {}, "look")]
    replies = [{key: value for key, value in reply.items() if key != "name"} for reply in results(2)]
    gemma, gpt = chat("gemma4", True), chat("gptoss", True)
    text = gemma.decode(gemma.reply_ids(replies, -1, calls=calls))
    assert "response:look{value:" in text and "response:find{value:" in text
    text = gpt.decode(gpt.reply_ids(replies[:1], -1, calls=calls))
    assert "functions.look to=assistant" in text and "response:a_tool_it_calls" not in text


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "glm4moe", "gptoss"])
def test_arguments_as_json_text_read_like_objects(name):
    shown = []
    for arguments in ({"city": "Lima", "<|im_end|>": 1}, '{"city": "Lima", "\\u003c|im_end|>": 1}'):
        turn = {"role": "assistant", "content": "", "tool_calls": [call_of(0, arguments)]}
        shown.append(chat(name, with_tools=True).prompt_ids([ASKED, turn, *results(1)]))
    assert shown[0] == shown[1]


def test_members_of_a_group_share_their_prompts_ids():
    renderer = ChatRenderer(build_tokenizer())
    assert renderer.prompt_ids([ASKED]) is renderer.prompt_ids([dict(ASKED)])
    assert renderer.prompt_ids(user("other")) != renderer.prompt_ids([ASKED])


def test_text_keeps_special_tokens_except_the_end_of_turn():
    renderer = chat("qwen3")
    ids, end = renderer.tokenizer.encode("<think>so</think><|im_start|>Lima"), renderer.tokenizer.eos_token_id
    assert renderer.text(ids) == renderer.text([*ids, end]) == "<think>so</think><|im_start|>Lima"
    assert renderer.text([*ids, end, end]) == "<think>so</think><|im_start|>Lima<|im_end|>"
    assert renderer.text([]) == ""


def test_template_variables_reach_the_prompt_and_every_reply():
    renderer = ChatRenderer(build_tokenizer(), template_kwargs={"enable_thinking": False})
    for ids in (renderer.prompt_ids([ASKED]), renderer.reply_ids([ASKED], 5)):
        assert renderer.decode(ids).endswith("<think>\n\n</think>\n\n")


def test_an_end_token_that_has_no_role_in_the_tokenizer_is_found():
    tokenizer = build_tokenizer()
    tokenizer.eos_token = tokenizer.pad_token
    assert ChatRenderer(tokenizer).end_of_turn == "<|im_end|>"


# Templates that lose what they are given

LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"


def written(template: str | None):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def shown_as(content: str):
    return written(LOOP.replace("CONTENT", content))


@pytest.mark.parametrize(
    ("tokenizer", "says"),
    [
        (written(None), "no chat template"),
        (written("{% for m in messages %}{{ m.role if m.role == 'user' }}<|im_end|>{% endfor %}"), "assistant messag"),
        (written("{% for m in messages %}{{ m.content }}\n{% endfor %}"), "without a special token"),
        # the header of the next turn is no end of this one: what lies between would be lost
        (
            written(
                "{% for m in messages %}{{ m.content }}{% endfor %}"
                "{% if add_generation_prompt %}<|im_start|>{% endif %}"
            ),
            "without a special token",
        ),
        (shown_as("m.content if loop.index < 3 else ''"), "a reply to its answer"),
        (shown_as("m.text.words"), "refuses a question and an answer: 'dict object' has no"),
        (shown_as("m.content if loop.index < 3 else raise_exception('No.')"), "refuses a reply .* No. Use"),
    ],
)
def test_a_template_that_cannot_hold_a_conversation_is_refused(tokenizer, says):
    with pytest.raises(TemplateError, match=says):
        ChatRenderer(tokenizer)


class Says(StepEnv):
    """Replies to the first turn with one message."""

    def __init__(self, reply):
        self.reply = reply

    def reset(self, row):
        return row["prompt"]

    def step(self, turn):
        return [self.reply] if turn.index == 0 else Step(done=True)


def outcome_of(content: str, reply: dict, prompt="Q"):
    """Of a conversation whose contents are shown in this way: its error, and what the model saw."""
    engine = ScriptedEngine(shown_as(content), ["A1<|im_end|>", "A2<|im_end|>"])
    runner = RolloutRunner(Says(reply), engine)
    (trajectory,) = asyncio.run(runner.run([RolloutRequest(prompt, "0")], SamplingParams()))
    assert trajectory.stop_reason is (StopReason.ENV_ERROR if trajectory.error else StopReason.ENV_DONE)
    return trajectory.error, [engine.tokenizer.decode(context) for _, context, _ in engine.requests]


NO_SYSTEM = "m.content if m.role != 'system' else ''"


@pytest.mark.parametrize(
    ("content", "reply"),
    [
        (NO_SYSTEM, {"role": "system", "content": "Be brief."}),
        ("m.content if m.role != 'system' else '5'", {"role": "system", "content": "5"}),
        ("m.content[:20]", {"role": "user", "content": "one two three four five six seven"}),
        ("m.content.split('####')[-1]", {"role": "user", "content": "Lima #### Cusco"}),
    ],
)
def test_a_reply_that_the_template_loses_ends_the_conversation(content, reply):
    error, seen = outcome_of(content, reply)
    assert "does not show the model the reply of role" in error and "\n" not in error and len(seen) == 1


def test_a_prompt_that_the_template_loses_ends_the_conversation():
    error, seen = outcome_of(NO_SYSTEM, REPLY, [{"role": "system", "content": "Answer in Spanish."}, ASKED])
    assert "the prompt of role 'system': 'Answer in Spanish.'" in error and not seen


@pytest.mark.parametrize("filtered", ["trim", "tojson", "e", "replace('/no_think', '')"])
def test_a_reply_may_be_escaped_trimmed_or_freed_of_switches(filtered):
    reply = {"role": "user", "content": ' "Perú" & <b>北京</b>\n\tone \\ two /no_think\n'}
    error, seen = outcome_of(f"m.content | {filtered}", reply)
    assert error is None and len(seen) == 2


def test_a_part_that_is_no_text_ends_a_conversation_of_text():
    reply = {"role": "user", "content": [{"type": "text", "text": "Lima"}, {"type": "image"}]}
    error, seen = outcome_of("m.content", reply)
    assert "A message has a place for an image and no image" in error and len(seen) == 1


@pytest.mark.parametrize(
    "content", ["m.content", "m.content if m.content is string else ''", "m.content[0].text or m.content"]
)
def test_parts_are_joined_where_the_template_does_not_show_them(content):
    reply = {"role": "user", "content": [{"type": "text", "text": "Lima"}, {"type": "text", "text": "Cusco"}]}
    assert "Lima\nCusco" in outcome_of(content, reply)[1][1]
