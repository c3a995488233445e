"""The policy over HTTP: what clients of OpenAI's ask for, what they are told, and who may ask."""

import asyncio
import io
import json
from base64 import b64encode
from socket import has_ipv6
from urllib.parse import urlsplit

import openai
import pytest
from PIL import Image, ImageFile
from support.agents import (
    END,
    LOOKUP,
    answers,
    call,
    calling_tokenizer,
    check_whole,
    hold,
    reply,
    run_agent,
    sampled,
    tool_loop,
    web,
)
from support.conversations import user
from support.waiting import until_true

from mt_grpo.envs.protocols import TagProtocol
from mt_grpo.integrations.openai_api import AgentSource
from mt_grpo.trajectory import StopReason

OTHER = {**LOOKUP, "function": {**LOOKUP["function"], "name": "ask"}}
ASKED = {"messages": user("Q1")}


def ask(script, *requests, **options):
    """What one conversation's requests are answered with, or the events of it; errors as they are raised."""
    answered = []

    async def agent(row, client):
        asking = client.openai(max_retries=0).chat.completions
        for request in requests:
            try:
                answer = await asking.create(**{"model": "m", "messages": user("Q1"), **request})
                answered.append([event async for event in answer] if "stream" in request else answer)
            except openai.APIError as error:
                answered.append(error)

    trajectory, runner = hold(agent, script, fails=True, **options)
    told = ("RefusedError: ", "This model's maximum context length is ")
    assert trajectory.error is None or trajectory.error.startswith(told), trajectory.error
    return answered, trajectory, runner


def assistant(content=None, *calls):
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {})}


def system(content):
    return [{"role": "system", "content": content}]


def made(name, query):
    """A call as a client gives it back; the first has the identifier `call00000`."""
    return {"id": name, "type": "function", "function": {"name": "lookup", "arguments": json.dumps({"query": query})}}


def result(name, content):
    return {"role": "tool", "tool_call_id": name, "content": content}


def forks(trajectory):
    return [turn.fork_cause for turn in trajectory.turns]


def context(runner, turn):
    return calling_tokenizer().decode(runner.engine.requests[turn][1])


def test_the_answer_has_the_fields_that_clients_read():
    (answer,), trajectory, _ = ask([call("Lima", "hm")], {"tools": [LOOKUP], "logprobs": True})
    (choice,) = answer.choices
    (made,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.reasoning_content.strip() == "hm"
    assert choice.message.content is None and made.function.name == "lookup"
    assert json.loads(made.function.arguments) == {"query": "Lima"}
    assert [token.logprob for token in choice.logprobs.content] == trajectory.tree.nodes[-1].logprobs
    counted = (answer.usage.prompt_tokens, answer.usage.completion_tokens)
    assert counted == (trajectory.turns[0].context_length, sampled(trajectory))


def test_a_stream_has_what_the_whole_answer_has():
    wanted = {"stream": True, "stream_options": {"include_usage": True}, "tools": [LOOKUP], "logprobs": True}
    (events,), trajectory, _ = ask([call("Lima", "hm")], wanted)
    deltas = [event.choices[0].delta for event in events[:-1]]
    assert "hm" in "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas)
    (asked,) = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
    assert (asked.index, asked.function.name) == (0, "lookup")
    assert events[-2].choices[0].finish_reason == "tool_calls" and not events[-1].choices
    assert events[-1].usage.completion_tokens == sampled(trajectory) and events[0].usage is None
    listed = [event.choices[0].logprobs for event in events[:-1] if event.choices[0].logprobs]
    assert sum(len(each.content) for each in listed) == sampled(trajectory)


def test_a_stop_string_is_trained_and_not_told():
    on = {"messages": [*user("Q2"), assistant("<a>4"), *user("Q3")], "stop": ["</a>"]}
    turns = [f"<a>4</a>{END}", "<a>4</a>", f"A{END}"]
    answered, trajectory, _ = ask(turns, {"stop": "</a>"}, {"messages": user("Q2"), "stop": ["</a>"]}, on)
    assert [answer.choices[0].message.content for answer in answered] == ["<a>4", "<a>4", "A"]
    assert trajectory.turns[0].text == "<a>4</a>" and trajectory.tree.num_sequences == 2
    assert forks(trajectory) == [None, "messages", None]


def test_several_answers_are_forks_of_one_context():
    (answer,), trajectory, _ = ask([f"A{END}", f"B{END}", f"A{END}"], {"n": 3})
    assert [choice.message.content for choice in answer.choices] == ["A", "B", "A"]
    assert trajectory.tree.num_sequences == 3 and answer.usage.completion_tokens == sampled(trajectory)
    assert trajectory.tree.num_tokens == answer.usage.total_tokens


def test_content_parts_and_other_spellings_go_on():
    parts = [{"role": "developer", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "Q1"}]}]
    again = made("x", "Lima")
    again["function"]["arguments"] = '{ "query" :  "Lima"}'
    plain = [*system("S"), {"role": "user", "content": "Q1", "name": "someone"}, assistant("", again)]
    second = {"messages": [*plain, result("x", [{"type": "text", "text": "R"}])], "tools": [LOOKUP]}
    _, trajectory, _ = ask([call("Lima"), f"A{END}"], {"messages": parts, "tools": [LOOKUP]}, second)
    assert forks(trajectory) == [None, None]


def test_a_rewritten_past_a_sub_agent_and_a_summary_fork():
    retold, summary = ([*user("Q1"), assistant(said), *user("Q2")] for said in ("A0", "sum"))
    others = [{"messages": messages} for messages in (user("another"), retold, summary)]
    _, trajectory, runner = ask(answers, {}, *others)
    assert trajectory.tree.num_sequences == 3 and forks(trajectory) == [None] + ["messages"] * 3
    check_whole(trajectory, runner)


@pytest.mark.parametrize("named", ["alike", "anew", "not"])
def test_results_are_known_where_a_client_names_calls_anew(named):
    """agno has names of its own for calls; other clients have others in each request, or none."""
    cities = [("Lima", "Rome"), ("Peru", "Oslo")]

    def told(request):
        messages = user("Q1")
        for turn, both in enumerate(cities[:request]):
            own = {"alike": f"call_{turn}", "anew": f"call_{turn}_{request}", "not": None}[named]
            names = [own and f"{own}_{number}" for number in range(2)]
            messages.append(assistant(None, *map(made, names, both)))
            results = [result(name, f"about {city}") for name, city in zip(names, both, strict=True)]
            messages += results if named == "not" else results[::-1]
        return {"messages": messages, "tools": [LOOKUP]}

    turns = [call(first).removesuffix(END) + "\n" + call(second) for first, second in cities]
    _, trajectory, runner = ask([*turns, f"Lima{END}"], *map(told, range(3)))
    assert forks(trajectory) == [None] * 3 and trajectory.tree.num_sequences == 1
    found = [[each.result for each in turn.tool_calls] for turn in trajectory.turns]
    assert found == [["about Lima", "about Rome"], ["about Peru", "about Oslo"], []]
    check_whole(trajectory, runner)


CALLED = [*user("Q1"), assistant(None, made("call00000", "Lima")), result("call00000", "It is a city")]
HANDED_OVER = {"messages": system("You are an expert.") + CALLED, "tools": [OTHER]}


@pytest.mark.parametrize(
    "requests",
    [
        [{"tools": [LOOKUP]}, {"messages": user("And Lima?")}, {"messages": CALLED, "tools": [LOOKUP]}],
        [{"messages": system("You hand over.") + user("Q1"), "tools": [LOOKUP]}, HANDED_OVER],
    ],
    ids=["sub-agent", "handoff"],
)
def test_a_call_that_another_agent_answers_has_its_result(requests):
    """The Agents SDK hands over: the next agent is shown the same conversation, with other instructions and tools."""
    _, trajectory, runner = ask([call("Lima"), f"It is a city{END}", f"A city{END}"], *requests)
    assert (trajectory.error, trajectory.tree.num_sequences) == (None, 2)
    assert [turn.has_result for turn in trajectory.turns] == [True] + [False] * (len(requests) - 1)
    assert [message["content"] for message in trajectory.turns[0].replies] == ["It is a city"]
    check_whole(trajectory, runner)


@pytest.mark.parametrize(
    ("choice", "calls"), [("auto", 1), ("none", 0), ("required", 1), ({"function": {"name": "lookup"}}, 1)]
)
def test_a_choice_of_tools_is_honoured_as_far_as_it_can_be(choice, calls):
    (answer,), _, runner = ask([call("Lima")], {"tools": [LOOKUP], "tool_choice": choice})
    message = answer.choices[0].message
    assert len(message.tool_calls or ()) == calls and ("<tool_call>" in (message.content or "")) == (calls == 0)
    assert "lookup" in context(runner, 0)


def test_a_model_of_text_has_no_image_of_a_request_decoded(monkeypatch):
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("it was decoded"))
    file = io.BytesIO()
    Image.new("1", (2_000, 2_000)).save(file, format="PNG")
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"}}
    (refusal, other), _, _ = ask([END], of_user(*[part] * 2), of_user(*[part] * 20))
    assert "this run gives its model text only" in str(refusal)
    assert "A message shows images and sounds of 80,000,000 pixels and samples, and 67,108,864" in str(other)


def nested(depth):
    return {"type": "object", "properties": {"a": nested(depth - 2)}} if depth > 0 else {"type": "string"}


def of_user(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


REFUSED = [
    ({"messages": []}, "`messages` must be a non-empty list"),
    ({"messages": [{"role": "robot"}]}, "has no role out of"),
    (of_user({"type": "image_url"}), "an image that is no `data:` URL"),
    (of_user({"type": "image_url", "image_url": {"url": "data:,x"}}), "'data:,x' cannot be read: it is no base64"),
    (of_user({"type": "input_audio"}), "has a sound that is no `input_audio` with `data`"),
    (
        of_user({"type": "audio_url", "audio_url": {"url": "https://example.org/a"}}),
        "has a sound that is no `input_audio`",
    ),
    (of_user({"type": "audio", "audio": "/etc/passwd"}), "has a sound that is no `input_audio`"),
    (of_user({"type": "video"}), "has a part that is no text"),
    ({"messages": [{"role": "user", "content": 3}]}, "is neither text nor a list of parts"),
    ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "is nothing that is read: give `tool_calls`"),
    ({"messages": [assistant("A")]}, "nothing to reply to"),
    ({"tool_choice": "required"}, "give that tool alone"),
    ({"tool_choice": {"function": {"name": "other"}}, "tools": [LOOKUP]}, "`tools` has lookup"),
    ({"response_format": {"type": "json_object"}}, "did not choose"),
    ({"n": 0}, "`n` is 0"),
    ({"n": 1000}, "above 128"),
    ({"top_logprobs": 3, "logprobs": True}, "of the sampled tokens only"),
    ({"stop": [3]}, "`stop` is neither"),
    ({"tools": [{"type": "function"}]}, "no function with a name"),
    ({"functions": [{"name": "a"}]}, "older form"),
    ({"tools": [{**LOOKUP, "function": {"name": "a", "parameters": nested(200)}}]}, "brackets that are too deep"),
]


def test_what_cannot_be_honoured_is_refused():
    errors, trajectory, _ = ask([], *(asked for asked, _ in REFUSED))
    for error, (_, problem) in zip(errors, REFUSED, strict=True):
        assert isinstance(error, openai.BadRequestError) and problem in error.message
    assert not trajectory.turns and REFUSED[0][1] in trajectory.error


def test_what_the_run_decides_is_warned_of_once(caplog):
    requests = {"temperature": 0.1, "top_p": 1.0, "user": "me"}, {"temperature": 0.2, "extra_body": {"seed": 3}}
    ask([f"A{END}"] * 2, *requests)
    named = [record.args[0] for record in caplog.records if "requests set" in record.message]
    assert named == ["temperature", "seed"]


OF_MANY_TOKENS = {"messages": user("What is the capital of Peru " * 9)}


@pytest.mark.parametrize(
    ("second", "limits", "reason", "says"),
    [
        ({}, {"max_completion_tokens": 4}, "token_budget", "gives the whole conversation 4 after its prompt"),
        (OF_MANY_TOKENS, {"context_length": 12}, "context_full", "length is 12 tokens, and the messages have 71"),
    ],
)
def test_a_limit_is_an_error_that_clients_know(second, limits, reason, says):
    (_, error), trajectory, _ = ask(["A B C D E F"] * 3, {}, second, **limits)
    assert isinstance(error, openai.BadRequestError) and error.code == "context_length_exceeded"
    # by which litellm, and so mini-swe-agent and others, know it, and Claude Code
    assert "This model's maximum context length is" in error.message and "prompt is too long" in error.message
    assert (trajectory.stop_reason, trajectory.refusals) == (reason, {}) and says in error.message


LONG = "many words " * 10_000


@pytest.mark.parametrize(
    ("asked", "most"),
    [
        ({"tools": [{**LOOKUP, "function": {**LOOKUP["function"], "description": LONG}}]}, 4096),
        ({"tools": [LOOKUP], "messages": [*user("Q1"), assistant(None, made("x", LONG)), result("x", "R")]}, 4096),
        ({"messages": user("What is the capital of Peru " * 30)}, 60),
        ({"messages": user("word " * 1_400_000)}, 4096),
    ],
    ids=["tools", "arguments", "messages", "megabytes"],
)
def test_what_fits_no_context_is_refused_and_can_be_cut(asked, most):
    (error, answer), trajectory, _ = ask([f"A{END}"], asked, {}, context_length=most)
    assert isinstance(error, openai.BadRequestError) and error.code == "context_length_exceeded"
    assert answer.choices[0].message.content == "A"
    assert trajectory.stop_reason is StopReason.ENV_DONE and len(trajectory.turns) == 1


def test_a_clients_own_limit_of_tokens_is_no_failure():
    (answer,), trajectory, _ = ask(["A B C D E F"], {"max_completion_tokens": 2, "max_tokens": 3})
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 2
    assert trajectory.stop_reason is StopReason.ENV_DONE


def test_a_text_protocol_shows_and_reads_the_clients_tools():
    tagged = '<tool>{"name": "lookup", "args": {"query": "Lima"}}</tool>'
    trajectory, runner = hold(tool_loop, [tagged, f"<answer>Peru</answer>{END}"], protocol=TagProtocol())
    assert trajectory.answer == "<answer>Peru</answer>" and trajectory.turns[1].answer == "Peru"
    assert trajectory.tree.num_sequences == 1 and trajectory.turns[0].has_result
    for words in ('<result>about {"query": "Lima"}</result>', "<tool>", TagProtocol().instructions([])[:20]):
        assert words in context(runner, 1)


def test_a_text_protocol_instructs_after_a_system_message():
    asked = {"messages": system("Be brief.") + user("Q1"), "tools": [LOOKUP]}
    _, _, runner = ask([f"<answer>A</answer>{END}"], asked, protocol=TagProtocol())
    shown = context(runner, 0)
    assert "Be brief.\n\nSolve the task" in shown and shown.count('"name": "lookup"') == 1


@pytest.mark.parametrize("tools", [[LOOKUP], openai.NOT_GIVEN], ids=["tools", "none"])
def test_text_is_no_malformed_call_where_no_tool_is_offered(tools):
    _, trajectory, _ = ask(answers, {"tools": tools}, protocol=TagProtocol())
    assert trajectory.turns[0].num_failures == (tools == [LOOKUP])


def test_an_answer_that_arrives_late_is_not_trained():
    async def agent(row, client):
        asked = asyncio.ensure_future(reply(client, user("Q1")))
        asked.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.sleep(0.1)
        return 1.0

    trajectory, _ = hold(agent, latency=5.0)
    assert not trajectory.turns and trajectory.env_rewards == {"reward": 1.0}


# Who may ask


@pytest.mark.skipif(not has_ipv6, reason="this machine has no IPv6")
def test_an_address_of_ipv6_leads_to_the_policy():
    async def agent(row, client):
        return await post(client)

    assert hold(AgentSource(agent, host="::1"))[0].env_rewards == {"reward": 200.0}


async def post(client, key=None, base=None, session=None):
    headers = {} if session is None else {"X-Session-ID": session}
    async with web(client, key, base_url=base or client.base_url) as http:
        return (await http.post("/chat/completions", json=ASKED, headers=headers)).status_code


async def send(client, data, reads=True):
    """Bytes to the server, whose client is gone afterwards; what it answered."""
    url = urlsplit(client.base_url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(data)
    answered = await reader.read(4096) if reads else await writer.drain()
    writer.transport.abort()
    return answered


def request(client, body, *headers):
    path = urlsplit(client.base_url).path
    lines = [f"POST {path}/chat/completions HTTP/1.1", "Host: localhost", f"Authorization: Bearer {client.api_key}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def test_the_door_is_shut_for_strangers():
    async def agent(row, client):
        base, server = client.base_url, client.base_url.split("/0")[0]

        async def told(status, url, key=None, body=None, **headers):
            async with web(client, key, base_url="") as http:
                answer = await http.request("GET" if body is None else "POST", url, headers=headers, **(body or {}))
            assert answer.status_code == status, (url, key, headers)
            assert status == 200 or answer.json()["error"]["message"]
            return answer.json()

        await told(200, f"{base}/models")
        assert (await told(200, f"{base}/models/a/b"))["id"] == "a/b"
        await told(401, f"{base}/models", "")
        await told(401, f"{base}/models", "x")
        await told(403, f"{base}/models", Host="evil.example")
        await told(404, f"{base}/nothing", "", **{"x-goog-api-key": client.api_key})
        await told(400, f"{base}/chat/completions", body={"content": b"{"})
        await told(404, f"{server}/zzz/v1/chat/completions", body={"json": ASKED})
        await told(404, f"{server}/v1/chat/completions", body={"json": ASKED})
        await told(200, f"{server}/v1/chat/completions", body={"json": ASKED}, **{"X-Session-ID": client.session})
        key = f"Authorization: Bearer {client.api_key}"
        for host, status in {"localhost": 200, "localhost:99999999": 403, "[::": 403, "evil.example": 403}.items():
            answered = await send(client, f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n{key}\r\n\r\n".encode())
            assert answered.startswith(f"HTTP/1.1 {status}".encode()), host
        return 1.0

    assert hold(agent)[0].env_rewards == {"reward": 1.0}


def test_no_agent_takes_turns_in_the_conversation_of_another():
    clients, asked = {}, asyncio.Event()

    async def agent(row, client):
        clients[row["number"]] = client
        await until_true(lambda: len(clients) == 2)
        if row["number"] == 1:
            await asked.wait()
            return await post(client)
        other, server = clients[1], client.base_url.split("/000")[0] + "/v1"
        statuses = {
            "path": await post(client, base=other.base_url),
            "name": await post(client, base=server, session=other.session),
            "own": await post(client, base=server, session=client.session),
        }
        asked.set()
        return statuses

    trajectories, _ = run_agent(agent, [f"A{END}"] * 2, rows=[{}, {}])
    assert clients[0].api_key != clients[1].api_key
    assert [len(trajectory.turns) for trajectory in trajectories] == [1, 1]
    statuses = [trajectory.env_rewards for trajectory in trajectories]
    assert statuses == [{"path": 404, "name": 404, "own": 200}, {"reward": 200}]


def test_a_key_ends_with_its_conversation():
    late = []

    async def agent(row, client):
        if row["number"] == 0:
            late.append(client)
            return None
        await until_true(lambda: late)
        while (status := await post(late[0])) == 200:
            pass
        return status

    trajectories, _ = run_agent(agent, answers, rows=[{}, {}])
    assert trajectories[1].env_rewards == {"reward": 404.0}


def of_the_server(caplog):
    """What the server logged: other tests' environments may be closed meanwhile, and say so."""
    return [record for record in caplog.records if record.name.startswith("mt_grpo.integrations.openai_api")]


def test_strangers_are_told_of_once_and_no_key_is_printed(caplog):
    keys, body = [], json.dumps(ASKED).encode()

    async def agent(row, client):
        keys.append(client.api_key)
        for _ in range(5):
            await post(client, "guessed")
            await send(client, b"\x16\x03\x01 no HTTP\r\n\r\n")
            await send(client, request(client, body, f"no header {client.api_key}"))
            await send(client, request(client, body, "Transfer-Encoding: chunked"))

    source = AgentSource(agent)
    for _ in range(2):
        hold(source, fails=True)
    (record,) = of_the_server(caplog)
    assert "refused: 20 " in record.getMessage() and not any(key in caplog.text for key in keys)


def test_a_damaged_body_is_the_clients_error(caplog):
    told = []

    async def agent(row, client):
        told.append(await send(client, request(client, b"none", "Content-Encoding: gzip", "Content-Length: 4")))
        told.append(await send(client, request(client, b"", "Content-Length: 0", "Connection: close")))

    trajectory, _ = hold(agent, fails=True)
    assert trajectory.error.startswith("RefusedError: ") and not of_the_server(caplog)
    assert all(answer.startswith(b"HTTP/1.1 400") and b'"error"' in answer for answer in told) and len(told) == 2


def test_a_client_that_vanishes_is_no_error(caplog):
    """As an agent does that SIGTERM ends while it sends or waits."""
    body = json.dumps(ASKED).encode()

    async def agent(row, client):
        await send(client, request(client, body[:5], "Content-Length: 500"), reads=False)
        await send(client, request(client, body, f"Content-Length: {len(body)}"), reads=False)
        return await post(client)

    trajectory, _ = hold(agent, latency=0.1)
    assert trajectory.env_rewards == {"reward": 200.0} and trajectory.stop_reason is StopReason.ENV_DONE
    assert not of_the_server(caplog)
