"""Turns that an OpenAI-compatible endpoint takes: its refusals, failures, streams and calls."""

import asyncio
import json
import time

import pytest
from support.endpoints import refusal, streamed, whole
from support.loopback import ScriptedServer
from support.models import build_tokenizer

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.errors import ConfigError, ServerGoneError, ServerSetupError
from mt_grpo.rollout import RolloutLimits, RolloutRequest, RolloutRunner, SamplingParams
from mt_grpo.rollout import endpoint as module
from mt_grpo.rollout.endpoint import ChatEndpoint, _Completion
from mt_grpo.servers import external

CALL = '<tool>{"name": "calculator", "args": {"expression": "1+1"}}</tool>'


@pytest.fixture
def converse(tokenizer, monkeypatch):
    """Runs conversations with an endpoint; returns them and the engine."""
    monkeypatch.setattr(module.random, "uniform", lambda low, high: 0.01)

    def run(server, number=1, protocol="learnt_tags", tokenizer=tokenizer, **limits):
        engine = ChatEndpoint(f"{server.url}/v1", None, tokenizer)
        env = MultiTurnToolEnv(["calculator"], protocol=protocol, max_steps=3)
        runner = RolloutRunner(env, engine, RolloutLimits(**limits))
        requests = [RolloutRequest("What is 1+1?", f"s{place}", seed=place) for place in range(number)]
        return asyncio.run(runner.run(requests, SamplingParams(temperature=0.7))), engine

    return run


def test_conversation_is_recorded_as_any_other(endpoint, converse):
    server = endpoint(lambda number, body: "<answer>2</answer>" if "<result>" in str(body) else CALL + " and so on")
    (told,), engine = converse(server)
    assert (told.answer, told.stop_reason) == ("2", "answered")
    assert told.turns[0].text == CALL  # a stop string ends a turn, wherever the endpoint would go on
    first, second = (body for body in server.asked("/v1/chat/completions"))
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert (first["model"], first["temperature"], first["stream"]) == ("big", 0.7, True)
    sizes = [len(node.tokens) for node in told.tree.nodes if node.turn >= 0]
    assert sizes == [turn.num_tokens for turn in told.turns]
    assert engine.tokenizer.decode(told.tree.path_of_turn(0)).endswith(CALL)
    assert engine.usage["s0"] == {"requests": 2, "prompt": 200, "cached": 80, "completion": 20}


def test_native_calls_are_read_and_answered(endpoint, converse):
    def complete(number, body):
        if body["messages"][-1]["role"] == "tool":
            return whole("It is 2.")
        function = {"name": "calculator", "arguments": '{"expression": "1+1"}'}
        if number:
            return whole(
                {"content": None, "tool_calls": [{"id": "c7", "type": "function", "function": function}]}, "tool_calls"
            )
        return whole(
            {"content": "", "tool_calls": [{"id": "c0", "function": {"name": "calculator", "arguments": "{"}}]}
        )

    server = endpoint(complete)
    (told,), _ = converse(server, protocol="native")
    assert told.turns[0].error == "a tool call needs a name and a JSON object of arguments."
    assert [turn.mask for turn in told.turns] == [[0], None, None]
    assert [call.result for turn in told.turns for call in turn.tool_calls] == ["2"]
    assert told.answer == "It is 2."
    last = server.asked("/v1/chat/completions")[-1]
    assert last["tools"][0]["function"]["name"] == "calculator"
    assert last["messages"][-1]["tool_call_id"] == "c7"
    assert last["messages"][-2]["tool_calls"][0]["function"]["arguments"] == '{"expression": "1+1"}'


@pytest.mark.parametrize("protocol", ["learnt_tags", "native"])
def test_thoughts_beside_an_answer_are_kept(endpoint, converse, protocol):
    server = endpoint(lambda number, body: whole({"content": "<answer>2</answer>", "reasoning": "1 and 1"}))
    (told,), _ = converse(server, protocol=protocol)
    assert told.turns[0].message["reasoning_content"] == "1 and 1" and told.turns[0].text == "<answer>2</answer>"


def test_calls_that_the_template_refuses_end_one_conversation(endpoint, converse):
    tokenizer = build_tokenizer()
    refuses = "{% for m in messages if 'calculator' in m.tool_calls | string %}{{ raise_exception('no') }}{% endfor %}"
    tokenizer.chat_template = refuses + tokenizer.chat_template
    call = {"id": "c", "function": {"name": "calculator", "arguments": '{"expression": "1+1"}'}}
    server = endpoint(lambda number, body: whole({"content": "", "tool_calls": [call]} if number < 1 else "It is 2."))
    told, _ = converse(server, 2, "native", tokenizer)
    assert sorted(each.stop_reason for each in told) == ["answered", "env_error"]


def test_failures_that_may_pass_are_asked_again(endpoint, converse):
    faults = [
        refusal(500, "oops"),
        streamed("<answer>2</answer>", cut=True),
        None,
        (200, "data: {half\n\n", {"Content-Type": "text/event-stream"}),
        (200, 'data: {"error": {"message": "overloaded"}}\n\n', {"Content-Type": "text/event-stream"}),
    ]
    server = endpoint(lambda number, body: faults[number] if number < len(faults) else "<answer>2</answer>")
    (told,), _ = converse(server)
    assert (told.answer, len(server.asked("/v1/chat/completions"))) == ("2", 6)


def test_all_conversations_wait_as_long_as_the_endpoint_says(endpoint, converse):
    times = []

    def complete(number, body):
        times.append(time.monotonic())
        return refusal(429, "slow down", {"Retry-After": "1"}) if number == 0 else "<answer>2</answer>"

    told, _ = converse(endpoint(complete), number=6, max_concurrent=2)
    assert all(each.answer == "2" for each in told) and len(times) == 7
    assert sum(moment < times[0] + 0.95 for moment in times) <= 2  # those that were under way


def test_fields_that_it_does_not_know_are_left_out(endpoint, converse):
    def complete(number, body):
        if "max_tokens" in body:
            return refusal(400, "Unsupported parameter: use 'max_completion_tokens' instead of 'max_tokens'.")
        for name in ("temperature", "stop", "stream"):
            if name in body:
                return refusal(400, f"Unsupported value: '{name}'", param=name)
        assert body["max_completion_tokens"] <= 50
        return whole("<answer>2</answer> it is")

    (told,), _ = converse(endpoint(complete), max_turn_tokens=50)
    assert (told.answer, told.turns[0].text) == ("2", "<answer>2</answer>")


@pytest.mark.parametrize(
    "says",
    [
        "This model's maximum context length is 100 tokens",
        "prompt is too long: 215000 tokens > 200000 maximum",
        "input length and `max_tokens` exceed context limit: 188240 + 21333 > 200000, decrease input length",
        "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
        "`inputs` tokens + `max_new_tokens` must be <= 4097. Given: 3000 `inputs` tokens and 2000 `max_new_tokens`",
        "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).",
    ],
)
def test_full_context_ends_one_conversation(endpoint, converse, says):
    server = endpoint(lambda number, body: refusal(400, says))
    (told,), engine = converse(server, max_turn_tokens=50)
    assert (told.stop_reason, told.failed, engine._without) == ("context_full", False, set())
    assert ["max_tokens" in body for body in server.asked("/v1/chat/completions")] == [True, False]


def test_a_prompt_that_fits_is_asked_without_a_bound(endpoint, converse):
    says = (
        "maximum context length is 100 tokens. However, you requested 150 (50 in the messages, 100 in the completion)"
    )
    server = endpoint(lambda number, body: refusal(400, says) if "max_tokens" in body else "<answer>2</answer>")
    (told,), _ = converse(server, max_turn_tokens=100)
    assert told.answer == "2"


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (refusal(401, "no"), ServerSetupError, "refuses requests without a key (status 401)"),
        (refusal(429, "pay", code="insufficient_quota"), ServerSetupError, "insufficient_quota"),
        (refusal(404, "no such model"), ServerSetupError, "refuses the model 'big' .* give a model and"),
        (refusal(503, "down"), ServerGoneError, "did not answer in 8 turns"),
        (refusal(429, "a day", {"Retry-After": "86400"}), ServerGoneError, "asked again in 86400 seconds"),
        ((308, "", {"Location": "https://b"}), ServerSetupError, "(status 308: it redirects to https://b); give a"),
    ],
)
def test_endpoint_that_helps_nobody_ends_the_run(endpoint, converse, answer, error, says):
    with pytest.raises(error, match=says.replace("(", r"\(").replace(")", r"\)")):
        converse(endpoint(lambda number, body: answer), number=10)


def test_a_list_of_models_that_is_none_is_refused(tokenizer):
    server = ScriptedServer(lambda method, path, body: (200, {"data": 5}))
    with pytest.raises(ConfigError, match="lists no model"):
        assert ChatEndpoint(f"{server.url}/v1", None, tokenizer).model
    server.stop()


def test_a_moderated_prompt_fails_alone(endpoint, converse):
    server = endpoint(
        lambda number, body: refusal(403, "Your input was flagged") if number == 0 else "<answer>2</answer>"
    )
    told, _ = converse(server, 2)
    assert sorted(each.stop_reason for each in told) == ["answered", "engine_error"]


_STREAM = {"Content-Type": "text/event-stream"}
_SAID = "<answer>2</answer>"
_SEVERAL = [
    {"choices": [{"index": number, "delta": {"content": text}, "finish_reason": reason}]}
    for number, text, reason in [(1, "<answer>3", None), (0, _SAID, None), (1, "</answer>", "stop"), (0, "", "stop")]
]
_THOUGHT = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}


@pytest.mark.parametrize(
    "answer",
    [
        (200, f'data: {{"choices": [{{"delta": {{"content": "{_SAID}\u2028"}}, "finish_reason": "stop"}}]}}', _STREAM),
        whole({"content": [_THOUGHT, {"type": "text", "text": _SAID}]}),
        whole({"content": None, "refusal": _SAID}),
        (200, "\n".join(f"data: {json.dumps(part)}" for part in _SEVERAL), _STREAM),
    ],
    ids=["line separator", "parts", "refusal", "several choices"],
)
def test_text_is_read_however_it_is_sent(endpoint, converse, answer):
    (told,), _ = converse(endpoint(lambda number, body: answer))
    assert told.answer == "2"


@pytest.mark.parametrize("reason", ["length", "model_length", "MAX_TOKENS"])
def test_a_turn_that_was_cut_has_no_end(endpoint, converse, tokenizer, reason):
    (told,), _ = converse(endpoint(lambda number, body: whole("It", reason)), protocol="native")
    assert told.tree.actions() == [tokenizer.encode("It")]


def test_tokens_from_caches_are_counted_by_any_name():
    found = []
    for cached in (
        {"prompt_tokens_details": {"cached_tokens": 4}},
        {"cached_tokens": 4},
        {"prompt_cache_hit_tokens": 4},
    ):
        answer = _Completion()
        answer.add({"usage": {"prompt_tokens": 9, "completion_tokens": 2, **cached}})
        found.append(answer.usage)
    assert found == [{"prompt": 9, "cached": 4, "completion": 2}] * 3


@pytest.mark.parametrize(
    "answer",
    [
        *[(200, text, {}) for text in ("[" * 100_000, '{"usage": {"prompt_tokens": Infinity}}')],
        *[(200, {"choices": [], "usage": usage}) for usage in ([1], {"prompt_tokens_details": [1]})],
        (200, {"choices": {"first": 1}}, {}),
        (500, "[" * 100_000, {}),
        (503, "busy", {"Retry-After": f"Mon, 01 Jan 2024 00:00:00 +{'9' * 14}"}),  # a zone beyond all others
        (200, "data: " + "a" * 10_000, _STREAM),  # a line without an end
    ],
)
def test_an_answer_of_no_known_shape_fails_one_conversation(endpoint, converse, monkeypatch, answer):
    monkeypatch.setattr(external, "MAX_BYTES", 9_000 if answer[-1] is _STREAM else external.MAX_BYTES)
    (told,), _ = converse(endpoint(lambda number, body: answer))
    assert told.stop_reason == "engine_error" and "gave no answer in 6 attempts" in told.error


def test_half_characters_and_odd_names_of_calls_are_read(endpoint, converse):
    function = {"name": "calculator", "arguments": '{"expression": "\\ud800"}'}
    calls = [{"index": "x", "id": 7, "function": function}, {"index": 0, "id": "b\ud800", "function": function}]
    answers = [whole({"content": "\ud800", "tool_calls": calls}), whole("\ud800")]
    (told,), _ = converse(endpoint(lambda number, body: answers[number]), protocol="native")
    assert [call.id for call in told.turns[0].tool_calls] == ["7", "b?"] and told.answer == "?"


@pytest.mark.parametrize(
    ("models", "says"),
    [(("a", "b"), "has 2 models, such as a: name one, as `--model NAME@http"), ((), "lists no model")],
)
def test_endpoint_with_several_models_needs_a_name(endpoint, tokenizer, models, says):
    server = endpoint(lambda number, body: "", models=models)
    with pytest.raises(ConfigError, match=says):
        assert ChatEndpoint(f"{server.url}/v1", None, tokenizer).model
    assert ChatEndpoint(f"{server.url}/v1", "other", tokenizer).model == "other"


def test_key_is_sent_and_told_to_nobody(endpoint, tokenizer, monkeypatch):
    server = endpoint(lambda number, body: "")
    with pytest.raises(ConfigError, match="`--api_key_env` is 'NO_SUCH_KEY'"):
        ChatEndpoint(f"{server.url}/v1", None, tokenizer, "NO_SUCH_KEY")
    monkeypatch.setenv("SOME_KEY", " secret\n")
    server.key = "secret"
    assert ChatEndpoint(f"{server.url}/v1", None, tokenizer, "SOME_KEY").model == "big"
    server.key = "another"
    with pytest.raises(ConfigError, match="refuses the key in SOME_KEY") as raised:
        assert ChatEndpoint(f"{server.url}/v1", None, tokenizer, "SOME_KEY").model
    assert "secret" not in str(raised.value)


def test_calls_of_one_name_are_several(endpoint, converse):
    function = {"name": "calculator", "arguments": {"expression": "1+1"}}
    calls = [{"id": "", "function": function}, *[{"id": "same", "function": function}] * 2]
    for number, each in enumerate(parts := [{"index": number, **call} for number, call in enumerate(calls)]):
        parts[number] = {"choices": [{"delta": {"tool_calls": [each]}}]}
    streams = _Completion()
    for part in [*parts, {"choices": [{"delta": {}, "finish_reason": "stop"}]}]:
        streams.add(part)
    assert [json.loads(call["arguments"]) for call in streams.calls.values()] == [{"expression": "1+1"}] * 3
    server = endpoint(lambda number, body: whole("2." if number else {"content": "", "tool_calls": calls}))
    (told,), _ = converse(server, protocol="native")
    assert [(call.id, call.result) for call in told.turns[0].tool_calls] == [
        ("call_0", "2"),
        ("same", "2"),
        ("call_2", "2"),
    ]


def test_a_line_of_many_parts_is_read_in_one_pass():
    """16 MB in 16,000 parts; joining them one by one copied 130 GB."""

    class Response:
        async def aiter_bytes(self):
            for _ in range(2**14):
                yield b"x" * 1000
            yield b"\ny"

    async def lines():
        return [len(line) async for line in module._lines(Response())]

    begun = time.monotonic()
    assert asyncio.run(lines()) == [1000 * 2**14, 1]
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("numbers", [(None, None, None), (0, 0, 0), (0, 1, 1)])
def test_calls_of_a_stream_are_told_apart_however_numbered(numbers):
    answer = _Completion()
    parts = [("a", '{"x": 1}'), ("b", '{"y":'), (None if numbers[2] != 0 else "b", " 2}")]
    for number, (name, arguments) in zip(numbers, parts, strict=True):
        function = {"name": "look" if arguments.startswith("{") else None, "arguments": arguments}
        answer.add({"choices": [{"delta": {"tool_calls": [{"index": number, "id": name, "function": function}]}}]})
    found = [(call["name"], call["arguments"]) for call in answer.calls.values()]
    assert found == [("look", '{"x": 1}'), ("look", '{"y": 2}')]
