"""OpenAI's Responses and Anthropic's messages: loops in them are one sequence too."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.agents import END, LOOKUP, call, calling_tokenizer, run_agent, sampled
from support.conversations import user

from mt_grpo.integrations.openai_api import anthropic, responses
from mt_grpo.integrations.openai_api.conversation import Told
from mt_grpo.integrations.openai_api.request import ApiError, Warnings, read_request
from mt_grpo.trajectory import StopReason

FUNCTION = {"type": "function", **LOOKUP["function"], "strict": True}
CUSTOM = {
    "name": "lookup",
    "description": LOOKUP["function"]["description"],
    "input_schema": LOOKUP["function"]["parameters"],
}
SCRIPT = [call("Lima", "hm"), call("Peru"), f"Lima{END}"]


def check_loop(trajectory, runner):
    assert (trajectory.error, trajectory.answer) == (None, "Lima")
    assert trajectory.tree.num_sequences == 1 and trajectory.render_mismatch is None
    assert [turn.has_result for turn in trajectory.turns] == [True, True, False]
    context = calling_tokenizer().decode(runner.engine.requests[-1][1])
    assert "hm" in context and "about Peru" in context and "Be brief." in context


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_loop_over_responses_is_one_sequence(kept, stream):
    """The client sends the whole conversation, or names the response that it goes on from."""

    async def ask(asking, **options):
        if not stream:
            return await asking.create(**options)
        async with asking.stream(**options) as events:
            async for _ in events:
                pass
            return await events.get_final_response()

    async def agent(row, client):
        asking, given, previous = client.openai().responses, user(row["prompt"]), None
        while True:
            options = {"previous_response_id": previous} if kept and previous else {}
            options |= {"input": given, "instructions": "Be brief.", "tools": [FUNCTION], "model": "policy"}
            response = await ask(asking, **options)
            previous, results = response.id, []
            for item in response.output:
                if item.type == "function_call":
                    query = json.loads(item.arguments)["query"]
                    result = {"type": "function_call_output", "call_id": item.call_id, "output": f"about {query}"}
                    results.append(result)
            if not results:
                return response.output_text
            said = [item.model_dump(exclude_none=True) for item in response.output]
            given = results if kept else [*given, *said, *results]

    (trajectory,), runner = run_agent(agent, SCRIPT)
    check_loop(trajectory, runner)


def test_a_response_has_the_fields_that_clients_read():
    seen = []

    async def agent(row, client):
        asking = client.openai(max_retries=0).responses
        seen.append(await asking.create(model="m", input="Q1", max_output_tokens=2))
        for wrong in ({"input": 3}, {"tools": [{"type": "web_search"}]}, {"previous_response_id": "resp_x"}):
            with pytest.raises(openai.APIStatusError) as error:
                await asking.create(**{"model": "m", "input": "Q1", **wrong})
            seen.append(error.value.status_code)

    (trajectory,), _ = run_agent(agent, ["A B C D"])
    assert trajectory.error is None and seen[1:] == [400, 400, 404]
    assert seen[0].status == "incomplete" and seen[0].incomplete_details.reason == "max_output_tokens"
    assert seen[0].usage.output_tokens == sampled(trajectory) == 2 and seen[0].output_text == trajectory.turns[0].text


def events_of(text: str) -> list[dict]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def told_by(text: str) -> dict:
    """The message that the events of a stream make."""
    first, *rest = events_of(text)
    message = first["message"]
    for event in rest:
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                block["input"] = json.loads(delta["partial_json"])
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    assert rest[-1]["type"] == "message_stop"
    return message


@pytest.mark.parametrize("stream", [True, False])
def test_a_loop_over_anthropics_messages_is_one_sequence(stream):
    async def agent(row, client):
        base, messages = client.base_url.removesuffix("/v1"), user(row["prompt"])
        system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        fixed = {"model": "policy", "max_tokens": 500, "tools": [CUSTOM], "system": system, "stream": stream}
        async with httpx.AsyncClient(base_url=base, trust_env=False, headers={"x-api-key": client.api_key}) as web:
            while True:
                answer = await web.post("/v1/messages", json={**fixed, "messages": messages})
                message = told_by(answer.text) if stream else answer.json()
                messages.append({"role": "assistant", "content": message["content"]})
                if message["stop_reason"] != "tool_use":
                    assert message["stop_reason"] == "end_turn" and message["usage"]["output_tokens"] > 0
                    return message["content"][0]["text"]
                messages.append({"role": "user", "content": [result(block) for block in asked(message)]})

    def asked(message):
        return [block for block in message["content"] if block["type"] == "tool_use"]

    def result(block):
        said = [{"type": "text", "text": f"about {block['input']['query']}"}]
        return {"type": "tool_result", "tool_use_id": block["id"], "content": said}

    (trajectory,), runner = run_agent(agent, SCRIPT)
    check_loop(trajectory, runner)


def test_stop_sequences_and_errors_are_told_in_anthropics_form():
    seen = []

    async def agent(row, client):
        headers = {"x-api-key": client.api_key}
        async with httpx.AsyncClient(base_url=client.base_url, trust_env=False, headers=headers) as web:
            for body in (
                {"stop_sequences": ["</a>"], "messages": user("Q1")},
                {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
                {"messages": user("Q1"), "tools": [{"type": "bash_20250124", "name": "bash"}]},
                {"messages": user("Q1 " * 200)},
            ):
                seen.append((await web.post("/messages", json=body)).json())

    (trajectory,), _ = run_agent(agent, ["<a>4</a>"], context_length=100)
    said, *errors = seen
    assert (said["stop_reason"], said["stop_sequence"]) == ("stop_sequence", "</a>")
    assert said["content"] == [{"type": "text", "text": "<a>4"}]
    assert [error["type"] for error in errors] == ["error"] * 3
    assert [error["error"]["type"] for error in errors] == ["invalid_request_error"] * 3
    assert trajectory.stop_reason is StopReason.CONTEXT_FULL


@pytest.mark.parametrize(("read", "given"), [(anthropic.as_chat, "messages"), (responses.as_chat, "input")])
def test_several_answers_are_refused_where_there_is_one(read, given):
    body = {given: user("Q1"), "n": 2}
    with pytest.raises(ApiError, match="`n` is no field"):
        read(body) if read is anthropic.as_chat else read(body, {})


SCALAR = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "user", "assistant", "tool", "auto"])
KEYS = """messages role content type text tool_calls id function name arguments tools parameters tool_choice stop n
max_tokens stream stream_options include_usage response_format logprobs input instructions call_id output
max_output_tokens previous_response_id system tool_result tool_use input_schema stop_sequences temperature""".split()
JSON = st.recursive(
    SCALAR | st.sampled_from(KEYS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(JSON, JSON, st.sampled_from(["chat", "responses", "messages"]))
def test_a_request_is_read_or_refused(body, messages, dialect):
    if isinstance(body, dict):
        body = {**body, "input" if dialect == "responses" else "messages": messages}
    readers = {"chat": lambda body: body, "messages": anthropic.as_chat}
    reader = readers.get(dialect, lambda body: responses.as_chat(body, {}))
    try:
        parsed = read_request(body, reader, {"temperature": 1.0}, Warnings())
    except ApiError as error:
        assert error.status in (400, 404) and error.body["error"]["message"]
    else:
        assert all(isinstance(message["content"], str) for message in parsed.messages)
        assert Told().restore(parsed.messages) == (parsed.messages, *Told().restore(parsed.messages)[1:])
