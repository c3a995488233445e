"""OpenAI's Responses and Anthropic's messages: loops in them are one sequence too."""

import json
from functools import partial

import openai
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.agents import END, LOOKUP, call, calling_tokenizer, hold, sampled, tool_loop, web
from support.conversations import user

from mt_grpo.integrations.openai_api.conversation import _Calls, _ReturnedMessages
from mt_grpo.integrations.openai_api.dialects import DIALECTS
from mt_grpo.integrations.openai_api.request import ApiError, Warnings, read_chat
from mt_grpo.trajectory import StopReason

FUNCTION = {"type": "function", **LOOKUP["function"], "strict": True}
CUSTOM = {name: LOOKUP["function"][name] for name in ("name", "description")}
CUSTOM["input_schema"] = LOOKUP["function"]["parameters"]


def check_loop(agent, instructed=True):
    trajectory, runner = hold(agent, [call("Lima", "hm"), "Wait. " + call("Peru"), f"Lima{END}"])
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.ANSWERED, "Lima")
    assert (trajectory.tree.num_sequences, trajectory.render_mismatch) == (1, None)
    assert [turn.has_result for turn in trajectory.turns] == [True, True, False]
    assert [each.result[:6] for turn in trajectory.turns for each in turn.tool_calls] == ["about "] * 2
    context = calling_tokenizer().decode(runner.engine.requests[-1][1])
    # the reasoning that a client did not give back is still there
    assert all(words in context for words in ("hm", "about ", "Peru", *(["Be brief."] if instructed else [])))
    return trajectory


def test_a_loop_over_chat_completions_is_one_sequence():
    check_loop(tool_loop, instructed=False)


@pytest.mark.parametrize("kept", ["nothing", "response", "items"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_loop_over_responses_is_one_sequence(kept, stream):
    """Whether the client sends all, names the response it goes on from, or refers to parts, calls before words."""

    async def ask(asking, **options):
        if not stream:
            return await asking.create(**options)
        async with asking.stream(**options) as events:
            return await events.get_final_response()

    def answered(item):
        told = f"about {json.loads(item.arguments)['query']}"
        return {"type": "function_call_output", "call_id": item.call_id, "output": told}

    async def agent(row, client):
        asking, given, previous = client.openai().responses, user(row["prompt"]), {}
        while True:
            options = {"input": given, "instructions": "Be brief.", "tools": [FUNCTION], "model": "policy", **previous}
            counted = await asking.input_tokens.count(**options)
            response = await ask(asking, **options, include=["message.output_text.logprobs"])
            assert response.usage.input_tokens == counted.input_tokens
            results = [answered(item) for item in response.output if item.type == "function_call"]
            if not results:
                (part,) = response.output[-1].content
                assert len(part.logprobs) == response.usage.output_tokens
                return response.output_text
            said = [item.model_dump(exclude_none=True) for item in response.output]
            if kept == "items":
                said = [{"type": "item_reference", "id": item.id} for item in response.output[::-1]]
            previous = {"previous_response_id": response.id} if kept == "response" else {}
            given = results if previous else [*given, *said, *results]

    check_loop(agent)


def post(path, bodies, script, raises=None, **options):
    """What requests of one conversation are answered with, and its trajectory."""
    answered = []

    async def agent(row, client):
        async with web(client) as http:
            answered.extend([await http.post(path, json=body) for body in bodies])
        if raises is not None:
            raise raises

    trajectory, _ = hold(agent, script, fails=True, **options)
    assert len(answered) == len(bodies), trajectory.error
    return [(answer.status_code, answer.json()) for answer in answered], trajectory


def test_a_response_has_the_fields_that_clients_read():
    wrong = [{"input": 3}, {"tools": [{"type": "web_search"}]}, {"input": ["Q"]}, {"input": [{"type": "image"}]}]
    wrong += [{"previous_response_id": "resp_x"}, {"input": [{"type": "item_reference", "id": "rs_x"}]}]
    bodies = [{"input": "Q1", "max_output_tokens": 2}, *({"input": "Q1"} | each for each in wrong)]
    ((_, response), *refused), trajectory = post("/responses", bodies, ["A B C D"])
    assert trajectory.error is None and [status for status, _ in refused] == [400] * 4 + [404] * 2
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["usage"]["output_tokens"] == sampled(trajectory) == 2
    assert response["output"][-1]["content"][0]["text"] == trajectory.turns[0].text


def test_instructions_are_of_one_response_and_messages_of_all():
    """As OpenAI has it: the next response has other instructions or none, and the developer's message goes on."""
    contexts = []

    async def agent(row, client):
        async with web(client) as http:
            body = {"input": [{"role": "developer", "content": "DEV"}, *user("Q1")], "instructions": "INS1"}
            for more in ({"instructions": "INS2"}, {}, {}):
                answer = await http.post("/responses", json=body)
                body = {"input": "Q2", "previous_response_id": answer.json()["id"], **more}

    _, runner = hold(agent, ["A", "B", "C"])
    for _, ids, *_ in runner.engine.requests:
        shown = calling_tokenizer().decode(ids)
        contexts.append([word for word in ("INS1", "INS2", "DEV") if word in shown])
    assert contexts == [["INS1", "DEV"], ["INS2", "DEV"], ["DEV"]]


def told_by(text: str) -> dict:
    """The message that the events of a stream make."""
    first, *rest = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
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


def asked(message):
    return [block for block in message["content"] if block["type"] == "tool_use"]


def result(block, **more):
    said = [{"type": "text", "text": f"about {block['input']['query']}"}]
    return {"type": "tool_result", "tool_use_id": block["id"], "content": said, **more}


def results(message, **more):
    return {"role": "user", "content": [result(block, **more) for block in asked(message)]}


@pytest.mark.parametrize("stream", [True, False])
def test_a_loop_over_anthropics_messages_is_one_sequence(stream):
    async def agent(row, client):
        base, messages = client.base_url.removesuffix("/v1"), user(row["prompt"])
        system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        fixed = {"model": "policy", "max_tokens": 500, "tools": [CUSTOM], "system": system, "stream": stream}
        async with web(client, base_url=base, headers={"x-api-key": client.api_key}) as http:
            while True:
                counted = await http.post("/v1/messages/count_tokens", json={**fixed, "messages": messages})
                answer = await http.post("/v1/messages", json={**fixed, "messages": messages})
                message = told_by(answer.text) if stream else answer.json()
                assert counted.json() == {"input_tokens": message["usage"]["input_tokens"]}
                assert all(block["signature"] for block in message["content"] if block["type"] == "thinking")
                messages.append({"role": "assistant", "content": message["content"]})
                if message["stop_reason"] != "tool_use":
                    assert message["stop_reason"] == "end_turn" and message["usage"]["output_tokens"] > 0
                    return message["content"][0]["text"]
                messages.append(results(message))

    check_loop(agent)


@pytest.mark.parametrize("stream", [True, False])
def test_numbers_of_calls_reach_anthropics_clients(stream):
    """Integers of any size; what is no number in JSON is null."""
    written = '{"query": [1234567890123456789012, 0.5, NaN, 1e999]}'
    turn = f'<tool_call>\n{{"name": "lookup", "arguments": {written}}}\n</tool_call>{END}'

    async def agent(row, client):
        async with web(client) as http:
            answer = await http.post("/messages", json={"tools": [CUSTOM], "messages": user("Q1"), "stream": stream})
        message = told_by(answer.text) if stream else answer.json()
        assert asked(message)[0]["input"] == {"query": [1234567890123456789012, 0.5, None, None]}

    hold(agent, lambda session, number: turn)


@pytest.mark.parametrize(
    ("written", "echoed"),
    [
        ("1234567890123456789012", "1234567890123456789012"),
        ("1234567890123456789", "1234567890123456800"),  # what JavaScript writes
        ("[2.0, 1e3]", "[2, 1000]"),
        ("NaN", "null"),
    ],
)
def test_a_call_goes_on_however_a_client_writes_its_numbers(written, echoed):
    asks = f'<tool_call>\n{{"name": "lookup", "arguments": {{"query": {written}}}}}\n</tool_call>{END}'

    async def agent(row, client):
        async with web(client) as http:
            asking = {"tools": [CUSTOM], "messages": user("Q1")}
            (block,) = asked((await http.post("/messages", json=asking)).json())
            said = json.dumps({**block, "input": {"query": "HERE"}}).replace('"HERE"', echoed)
            found = {"type": "tool_result", "tool_use_id": block["id"], "content": "found"}
            asking["messages"] += [{"role": "assistant", "content": ["SAID"]}, {"role": "user", "content": [found]}]
            await http.post("/messages", content=json.dumps(asking).replace('"SAID"', said))

    trajectory, _ = hold(agent, [asks, f"Lima{END}"])
    assert len(trajectory.turns) == 2 and trajectory.tree.num_sequences == 1


def test_a_thread_goes_on_with_what_is_new():
    """As Anthropic's `tool_runner` asks: after the first turn, a request has results alone."""

    async def agent(row, client):
        async with web(client) as http:

            async def ask(status, **body):
                answer = await http.post("/messages", json=body)
                assert answer.status_code == status, answer.text
                return answer.json()

            begun = {"system": "Be brief.", "tools": [CUSTOM], "messages": user(row["prompt"])}
            message = await ask(200, **begun, thread={"type": "create"})
            while asked(message):
                on, new = {"type": "continue", "previous_message_id": message["id"]}, [results(message)]
                unknown = await ask(404, messages=new, thread={**on, "previous_message_id": "msg_x"})
                assert unknown["error"]["details"] == {"error_code": "thread_not_found"}  # its clients send all again
                await ask(400, messages=new, thread={**on, "type": "fork"})
                await ask(400, messages=new, thread=on, tools=[CUSTOM])
                message = await ask(200, messages=new, thread=on)
            return message["content"][0]["text"]

    assert sum(check_loop(agent).refusals.values()) == 6


@pytest.mark.parametrize("wrong", [True, False])
def test_a_result_that_is_an_error_is_a_call_that_failed(wrong):
    made = {"type": "tool_use", "id": "call00000", "name": "lookup", "input": {"query": "Lima"}}
    message = {"role": "assistant", "content": [made]}
    told = (user("Q1"), [*user("Q1"), message, results(message, is_error=wrong)])
    bodies = [{"tools": [CUSTOM], "messages": messages} for messages in told]
    _, trajectory = post("/messages", bodies, [call("Lima"), f"A{END}"])
    assert trajectory.tree.num_sequences == 1 and trajectory.turns[0].has_result
    assert trajectory.turns[0].tool_calls[0].error == ("about Lima" if wrong else None)


def test_stop_sequences_and_errors_are_told_in_anthropics_form():
    bodies = (
        {"stop_sequences": ["</a>"], "messages": user("Q1")},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"messages": user("Q1"), "tools": [{"type": "web_fetch_20250910", "name": "web_fetch"}]},
        {"messages": user("Q1 " * 200)},
    )
    ((_, said), *errors), trajectory = post("/messages", bodies, ["<a>4</a>"], context_length=100)
    assert (said["stop_reason"], said["stop_sequence"]) == ("stop_sequence", "</a>")
    assert said["content"] == [{"type": "text", "text": "<a>4"}]
    assert [(each["type"], each["error"]["type"]) for _, each in errors] == [("error", "invalid_request_error")] * 3
    assert trajectory.stop_reason is StopReason.CONTEXT_FULL


def test_tokens_are_counted_of_what_can_be_asked():
    """Of a past that ends with an answer too; what is too long to be rendered is refused as it is in a turn."""
    past = [*user("Q"), {"role": "assistant", "content": "A"}]
    bodies = [{"messages": past, "tools": tools} for tools in ([], [CUSTOM | {"description": "x" * 20_000}])]
    raises = openai.OpenAIError("the agent's own")
    answers, trajectory = post("/messages/count_tokens", bodies, [], raises, context_length=1024)
    assert [status for status, _ in answers] == [200, 400] and answers[0][1]["input_tokens"] > 0
    assert answers[1][1]["error"]["code"] == "context_length_exceeded"
    assert "No request reached the policy" not in trajectory.error


# Fields of requests

READERS = {"chat": "chat/completions", "messages": "messages", "responses": "responses"}
ASKED = {"chat": {"messages": user("Q")}, "messages": {"messages": user("Q")}, "responses": {"input": "Q"}}


def read_as(dialect: str, body):
    (made,) = [made() for made in DIALECTS if made.path == READERS[dialect]]
    return read_chat(body, made.fields, made.as_chat, {"temperature": 1.0}, Warnings())


def with_field(dialect: str, name: str, value):
    outer, _, inner = name.partition(".")
    return {**ASKED[dialect], outer: {inner: value} if inner else value}


SCHEMA = {"type": "json_schema", "name": "a", "schema": {}}
REFUSED = [
    ("chat", "messages", user("Q") * 2049),
    ("chat", "tools", [LOOKUP] * 129),
    ("chat", "stop", ["a"] * 65),
    *(("chat", name, {"a": 1}) for name in ("guided_json", "structured_outputs", "web_search_options", "logit_bias")),
    ("chat", "guided_json", {}),
    ("chat", "web_search_options", {}),
    ("chat", "chat_template_kwargs", {"enable_thinking": False}),
    ("chat", "add_generation_prompt", False),
    ("chat", "modalities", ["text", "audio"]),
    ("chat", "ignore_eos", True),
    ("chat", "input", "Q2"),
    ("chat", "unheard_of", False),
    ("messages", "mcp_servers", [{"url": "http://a"}]),
    ("messages", "container", "c"),
    ("messages", "n", 2),
    ("messages", "output_format", SCHEMA),
    ("messages", "output_config.format", SCHEMA),
    ("messages", "output_config.task_budget", {"total": 3}),
    ("messages", "context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
    ("messages", "compaction", {"type": "summarize"}),
    ("messages", "tool_choice", "auto"),
    ("messages", "thread", {"type": "fork"}),
    ("responses", "n", 2),
    ("responses", "prompt", {"id": "pmpt_1"}),
    ("responses", "conversation", "conv_1"),
    ("responses", "background", True),
    ("responses", "context_management", [{"type": "compaction"}]),
    ("responses", "text.format", SCHEMA),
    ("responses", "messages", user("Q2")),
]


@pytest.mark.parametrize(("dialect", "name", "value"), REFUSED)
def test_too_much_and_what_could_change_the_answer_are_refused(dialect, name, value):
    with pytest.raises(ApiError, match=f"^`{name}` ") as error:
        read_as(dialect, with_field(dialect, name, value))
    assert (error.value.status, error.value.param) == (400, name)


@pytest.mark.parametrize("kind", ["bash_20250124", "text_editor_20250728", "memory_20250818"])
def test_a_tool_that_the_client_runs_is_shown_with_its_form(kind):
    parsed = read_as("messages", {"messages": user("Q"), "tools": [{"type": kind, "name": "own"}]})
    function = parsed.tools[0]["function"]
    assert function["name"] == "own" and function["description"] and "command" in function["parameters"]["properties"]


NOT_READ = "is no field that this server reads"
OPENAIS = {"type": "function", "name": "a"}
CODED = {"type": "bash_20250124", "name": "bash", "allowed_callers": ["code_execution"]}
EXAMPLES = {"name": "a", "input_examples": [{"b": 1}]}
TOOLS = [
    ("chat", {"type": "function", "function": EXAMPLES}, NOT_READ, ".function.input_examples"),
    ("chat", {"type": "function", "function": {"name": "a"}, "defer_loading": True}, NOT_READ, ".defer_loading"),
    ("messages", {"name": "a", "defer_loading": True}, NOT_READ, ".defer_loading"),
    ("messages", EXAMPLES, NOT_READ, ".input_examples"),
    ("messages", CODED, NOT_READ, ".allowed_callers"),
    ("responses", {**OPENAIS, "defer_loading": True}, NOT_READ, ".defer_loading"),
    *(
        ("messages", {"type": kind, "name": "a"}, kind, "")
        for kind in ("web_search_20250305", "code_execution_20250825", "computer_20250124", "bash", "x")
    ),
]


@pytest.mark.parametrize(("dialect", "tool", "problem", "place"), TOOLS)
def test_a_tool_that_others_run_or_is_shown_otherwise_is_refused(dialect, tool, problem, place):
    with pytest.raises(ApiError, match=problem) as error:
        read_as(dialect, {**ASKED[dialect], "tools": [tool]})
    assert error.value.param == f"tools[0]{place}"


def test_what_a_text_block_or_a_thread_has_beside_is_refused():
    for message, more, place in (
        ({"citations": [{"cited_text": "a"}]}, {}, "messages[0].content.citations"),
        ({}, {"thread": {"type": "create", "truncation": 3}}, "thread.truncation"),
    ):
        block = {"type": "text", "text": "Q", "cache_control": {"type": "ephemeral"}, "citations": None, **message}
        with pytest.raises(ApiError, match=NOT_READ) as error:
            read_as("messages", {"messages": [{"role": "user", "content": [block]}], **more})
        assert error.value.param == place


def test_a_tools_fields_that_change_nothing_pass():
    same = {"strict": True, "defer_loading": False, "cache_control": {"type": "ephemeral"}, "input_examples": []}
    function = {"name": "a", "parameters": {"type": "object"}, "return": {"type": "string"}, "strict": True}
    for dialect, tool in (
        ("chat", {"type": "function", "function": function}),
        ("responses", OPENAIS | same),
        ("messages", {"name": "a"} | same),
        ("messages", {"type": "text_editor_20250728", "name": "a", "max_characters": 9} | same),
    ):
        read_as(dialect, {**ASKED[dialect], "tools": [tool]})


PASSED = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "timeout": 3, "unheard_of": None}
DECIDED = {
    "chat": {"temperature": 0.5, "reasoning_effort": "low", "seed": 3},
    "messages": {
        "temperature": 0.5,
        "thinking": {"type": "adaptive"},
        "output_config.effort": "low",
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
    },
    "responses": {"temperature": 0.5, "reasoning": {"effort": "low"}, "text.verbosity": "low"},
}


@pytest.mark.parametrize("dialect", ASKED)
def test_what_changes_nothing_passes_and_the_runs_is_told(dialect, caplog):
    read = partial(read_as, dialect)
    for name, value in {**PASSED, "logit_bias": {}, "chat_template_kwargs": {}}.items():
        read(with_field(dialect, name, value))
    assert not caplog.records
    for name, value in DECIDED[dialect].items():
        read(with_field(dialect, name, value))
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
@example({"context_management": 3}, [], "messages")
@given(JSON, JSON, st.sampled_from(list(READERS)))
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
