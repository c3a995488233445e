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

from mt_grpo.integrations.openai_api.conversation import _Calls, _ReturnedMessages
from mt_grpo.integrations.openai_api.dialects import DIALECTS
from mt_grpo.integrations.openai_api.request import ApiError, Warnings, read_chat
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
        reference = {"input": [{"type": "item_reference", "id": "rs_x"}]}
        unknown = {"previous_response_id": "resp_x"}
        for wrong in ({"input": 3}, {"tools": [{"type": "web_search"}]}, unknown, reference):
            with pytest.raises(openai.APIStatusError) as error:
                await asking.create(**{"model": "m", "input": "Q1", **wrong})
            seen.append(error.value.status_code)

    (trajectory,), _ = run_agent(agent, ["A B C D"])
    assert trajectory.error is None and seen[1:] == [400, 400, 404, 404]
    assert seen[0].status == "incomplete" and seen[0].incomplete_details.reason == "max_output_tokens"
    assert seen[0].usage.output_tokens == sampled(trajectory) == 2 and seen[0].output_text == trajectory.turns[0].text


def read_as(dialect: str, body):
    """A request in one of the dialects, read."""
    (made,) = [made() for made in DIALECTS if made.path == dialect]
    return read_chat(body, made.fields, made.as_chat, {"temperature": 1.0}, Warnings())


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
                counted = await web.post("/v1/messages/count_tokens", json={**fixed, "messages": messages})
                answer = await web.post("/v1/messages", json={**fixed, "messages": messages})
                message = told_by(answer.text) if stream else answer.json()
                assert counted.json() == {"input_tokens": message["usage"]["input_tokens"]}
                assert all(block["signature"] for block in message["content"] if block["type"] == "thinking")
                messages.append({"role": "assistant", "content": message["content"]})
                if message["stop_reason"] != "tool_use":
                    assert message["stop_reason"] == "end_turn" and message["usage"]["output_tokens"] > 0
                    return message["content"][0]["text"]
                messages.append({"role": "user", "content": [result(block) for block in asked(message)]})

    (trajectory,), runner = run_agent(agent, SCRIPT)
    check_loop(trajectory, runner)


def asked(message):
    return [block for block in message["content"] if block["type"] == "tool_use"]


def result(block):
    said = [{"type": "text", "text": f"about {block['input']['query']}"}]
    return {"type": "tool_result", "tool_use_id": block["id"], "content": said}


def test_a_thread_goes_on_with_what_is_new():
    """As Anthropic's `tool_runner` asks: after the first turn, a request has results alone."""
    refused = []

    async def agent(row, client):
        headers = {"x-api-key": client.api_key}
        async with httpx.AsyncClient(base_url=client.base_url, trust_env=False, headers=headers) as web:
            begun = {"system": "Be brief.", "tools": [CUSTOM], "messages": user(row["prompt"])}
            message = (await web.post("/messages", json={**begun, "thread": {"type": "create"}})).json()
            while asked(message):
                on = {"type": "continue", "previous_message_id": message["id"]}
                new = {"messages": [{"role": "user", "content": [result(block) for block in asked(message)]}]}
                for wrong in ({"previous_message_id": "msg_x"}, {"type": "fork"}):
                    refused.append(await web.post("/messages", json={**new, "thread": {**on, **wrong}}))
                refused.append(await web.post("/messages", json={**new, "thread": on, "tools": [CUSTOM]}))
                message = (await web.post("/messages", json={**new, "thread": on})).json()
            return message["content"][0]["text"]

    (trajectory,), runner = run_agent(agent, SCRIPT)
    check_loop(trajectory, runner)
    assert [answer.status_code for answer in refused] == [404, 400, 400] * 2
    assert refused[0].json()["error"]["details"] == {"error_code": "thread_not_found"}  # its clients send all again
    assert sum(trajectory.refusals.values()) == 6


def test_items_that_are_referred_to_are_read():
    """As the AI SDK asks: reasoning and texts are sent back by their identifiers."""
    counts = []

    async def agent(row, client):
        asking, given = client.openai().responses, user(row["prompt"])
        while True:
            options = {"input": given, "instructions": "Be brief.", "tools": [FUNCTION], "model": "policy"}
            counts.append((await asking.input_tokens.count(**options)).input_tokens)
            response = await asking.create(**options, include=["message.output_text.logprobs"])
            assert response.usage.input_tokens == counts[-1]
            given = [*given, *({"type": "item_reference", "id": item.id} for item in response.output)]
            results = [
                {"type": "function_call_output", "call_id": item.call_id, "output": "about Peru"}
                for item in response.output
                if item.type == "function_call"
            ]
            if not results:
                (part,) = response.output[-1].content
                assert len(part.logprobs) == response.usage.output_tokens
                return response.output_text
            given += results

    (trajectory,), runner = run_agent(agent, SCRIPT)
    check_loop(trajectory, runner)


CLIENTS = [("bash_20250124", "bash"), ("text_editor_20250728", "edit"), ("memory_20250818", "memory")]


@pytest.mark.parametrize(("kind", "name"), CLIENTS)
def test_a_tool_that_the_client_runs_is_shown_with_its_form(kind, name):
    parsed = read_as("messages", {"messages": user("Q"), "tools": [{"type": kind, "name": name}]})
    function = parsed.tools[0]["function"]
    assert function["name"] == name and function["description"] and "command" in function["parameters"]["properties"]


@pytest.mark.parametrize("kind", ["web_search_20250305", "code_execution_20250825", "computer_20250124", "bash", "x"])
def test_a_tool_that_others_run_is_refused(kind):
    with pytest.raises(ApiError, match=kind):
        read_as("messages", {"messages": user("Q"), "tools": [{"type": kind, "name": "a"}]})


@pytest.mark.parametrize("wrong", [True, False])
def test_a_result_that_is_an_error_is_a_call_that_failed(wrong):
    async def agent(row, client):
        headers = {"x-api-key": client.api_key}
        async with httpx.AsyncClient(base_url=client.base_url, trust_env=False, headers=headers) as web:
            messages = user("Q1")
            for _ in range(2):
                message = (await web.post("/messages", json={"tools": [CUSTOM], "messages": messages})).json()
                results = [{**result(block), "is_error": wrong} for block in asked(message)]
                messages = [*messages, {"role": "assistant", "content": message["content"]}]
                messages.append({"role": "user", "content": results})

    (trajectory,), _ = run_agent(agent, [call("Lima"), f"A{END}"])
    assert trajectory.tree.num_sequences == 1 and trajectory.turns[0].has_result
    assert trajectory.turns[0].tool_calls[0].error == ("about Lima" if wrong else None)


def test_stop_sequences_and_errors_are_told_in_anthropics_form():
    seen = []

    async def agent(row, client):
        headers = {"x-api-key": client.api_key}
        async with httpx.AsyncClient(base_url=client.base_url, trust_env=False, headers=headers) as web:
            for body in (
                {"stop_sequences": ["</a>"], "messages": user("Q1")},
                {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
                {"messages": user("Q1"), "tools": [{"type": "web_fetch_20250910", "name": "web_fetch"}]},
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


@pytest.mark.parametrize(("dialect", "given"), [("messages", "messages"), ("responses", "input")])
def test_several_answers_are_refused_where_there_is_one(dialect, given):
    with pytest.raises(ApiError, match="`n` is no field"):
        read_as(dialect, {given: user("Q1"), "n": 2})


ASKED = {"chat/completions": {"messages": user("Q")}, "messages": {"messages": user("Q")}, "responses": {"input": "Q"}}
SCHEMA = {"type": "json_schema", "name": "a", "schema": {}}
COULD_CHANGE = [
    *(
        ("chat/completions", name, {"a": 1})
        for name in ("guided_json", "structured_outputs", "web_search_options", "logit_bias")
    ),
    ("chat/completions", "guided_json", {}),
    ("chat/completions", "chat_template_kwargs", {"enable_thinking": False}),
    ("chat/completions", "add_generation_prompt", False),
    ("chat/completions", "modalities", ["text", "audio"]),
    ("chat/completions", "ignore_eos", True),
    ("chat/completions", "input", "Q2"),
    ("chat/completions", "unheard_of", False),
    ("messages", "mcp_servers", [{"url": "http://a"}]),
    ("messages", "container", "c"),
    ("messages", "output_format", SCHEMA),
    ("messages", "output_config.format", SCHEMA),
    ("messages", "output_config.task_budget", {"total": 3}),
    ("messages", "context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
    ("messages", "compaction", {"type": "summarize"}),
    ("messages", "tool_choice", "auto"),
    ("messages", "thread", {"type": "fork"}),
    ("responses", "prompt", {"id": "pmpt_1"}),
    ("responses", "conversation", "conv_1"),
    ("responses", "background", True),
    ("responses", "context_management", [{"type": "compaction"}]),
    ("responses", "text.format", SCHEMA),
    ("responses", "messages", user("Q2")),
]


def with_field(dialect: str, name: str, value):
    outer, _, inner = name.partition(".")
    return {**ASKED[dialect], outer: {inner: value} if inner else value}


@pytest.mark.parametrize(("dialect", "name", "value"), COULD_CHANGE)
def test_what_could_change_the_answer_is_refused_by_name(dialect, name, value):
    with pytest.raises(ApiError, match=f"^`{name}` ") as error:
        read_as(dialect, with_field(dialect, name, value))
    assert (error.value.status, error.value.param) == (400, name)


OPENAIS = {"type": "function", "name": "a"}
TOOLS = [
    (
        "chat/completions",
        {"type": "function", "function": {"name": "a", "input_examples": [{}]}},
        "function.input_examples",
    ),
    ("chat/completions", {"type": "function", "function": {"name": "a"}, "defer_loading": True}, "defer_loading"),
    ("messages", {"name": "a", "defer_loading": True}, "defer_loading"),
    ("messages", {"name": "a", "input_examples": [{"b": 1}]}, "input_examples"),
    ("messages", {"type": "bash_20250124", "name": "bash", "allowed_callers": ["code_execution"]}, "allowed_callers"),
    ("responses", {**OPENAIS, "defer_loading": True}, "defer_loading"),
]


@pytest.mark.parametrize(("dialect", "tool", "name"), TOOLS)
def test_a_tool_that_is_to_be_shown_otherwise_is_refused(dialect, tool, name):
    with pytest.raises(ApiError, match="is no field that this server reads") as error:
        read_as(dialect, {**ASKED[dialect], "tools": [tool]})
    assert error.value.param == f"tools[0].{name}"


def test_a_tools_fields_that_change_nothing_pass():
    same = {"strict": True, "defer_loading": False, "cache_control": {"type": "ephemeral"}, "input_examples": []}
    function = {"name": "a", "parameters": {"type": "object"}, "return": {"type": "string"}, "strict": True}
    read_as("chat/completions", {**ASKED["chat/completions"], "tools": [{"type": "function", "function": function}]})
    read_as("responses", {**ASKED["responses"], "tools": [OPENAIS | same]})
    for tool in ({"name": "a"}, {"type": "text_editor_20250728", "name": "a", "max_characters": 9}):
        read_as("messages", {**ASKED["messages"], "tools": [tool | same]})


def test_tokens_are_counted_of_what_can_be_asked():
    """Of a past that ends with an answer too; what is too long to be rendered is refused as it is in a turn."""
    asked = [*user("Q"), {"role": "assistant", "content": "A"}]
    long = [CUSTOM | {"description": "x" * 20_000}]
    counted = []

    async def agent(row, client):
        base = client.base_url.removesuffix("/v1")
        async with httpx.AsyncClient(base_url=base, trust_env=False, headers={"x-api-key": client.api_key}) as web:
            for body in ({"messages": asked}, {"messages": asked, "tools": long}):
                counted.append(await web.post("/v1/messages/count_tokens", json=body))
        raise openai.OpenAIError("the agent's own")

    (trajectory,), _ = run_agent(agent, [], context_length=1024)
    assert [answer.status_code for answer in counted] == [200, 400] and counted[0].json()["input_tokens"] > 0
    assert counted[1].json()["error"]["code"] == "context_length_exceeded"
    assert "No request reached the policy" not in trajectory.error


PASSED = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "timeout": 3, "unheard_of": None}
DECIDED = {
    "chat/completions": {"temperature": 0.5, "reasoning_effort": "low", "seed": 3},
    "messages": {"temperature": 0.5, "thinking": {"type": "adaptive"}, "output_config.effort": "low"},
    "responses": {"temperature": 0.5, "reasoning": {"effort": "low"}, "text.verbosity": "low"},
}


@pytest.mark.parametrize("dialect", ASKED)
def test_what_changes_nothing_passes_and_the_runs_is_told(dialect, caplog):
    for name, value in PASSED.items():
        read_as(dialect, with_field(dialect, name, value))
    assert not caplog.records
    for name, value in DECIDED[dialect].items():
        read_as(dialect, with_field(dialect, name, value))
    assert [record.args[0] for record in caplog.records] == list(DECIDED[dialect])


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
@given(JSON, JSON, st.sampled_from(["chat/completions", "responses", "messages"]))
def test_a_request_is_read_or_refused(body, messages, dialect):
    if isinstance(body, dict):
        body = {**body, "input" if dialect == "responses" else "messages": messages}
    try:
        parsed = read_as(dialect, body)
    except ApiError as error:
        assert error.status in (400, 404) and error.body["error"]["message"]
    else:
        assert all(isinstance(message["content"], str) for message in parsed.messages)
        assert _ReturnedMessages().restore(parsed.messages, _Calls(None, None))[0] == parsed.messages
