"""Agents that are functions or programs: who may ask, what they return, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import shlex
import shutil
import sys
import threading
import time
from urllib.parse import urlsplit

import aiohttp
import openai
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.agents import END, LOOKUP, answers, check_whole, reply, run_agent, web
from support.conversations import user
from support.waiting import until, until_true

from mt_grpo.envs.protocols import PROTOCOLS
from mt_grpo.integrations.openai_api import AgentClient, AgentSource, Command, conversation
from mt_grpo.rollout import EngineError
from mt_grpo.runlog.findings import Counts, find
from mt_grpo.runlog.writer import Batch, rollout_lines
from mt_grpo.trajectory import StopReason

ASKED = {"messages": user("Q1")}


def once(result):
    """An agent that asks for one turn and returns something."""

    async def agent(row, client):
        await reply(client, user("Q1"))
        return result

    return agent


def blocking(row, client):
    """Asks with a client that blocks."""
    with openai.OpenAI(base_url=client.base_url, api_key=client.api_key) as asking:
        return asking.chat.completions.create(model="m", messages=user("Q1")).choices[0].message.content


def script(text: str) -> Command:
    """A program of Python's."""
    return Command(shlex.join([sys.executable, "-c", text]))


@pytest.mark.parametrize(
    ("result", "rewards", "answer"),
    [
        (0.5, {"reward": 0.5}, None),
        (True, {"reward": 1.0}, None),
        ({"exact": 1, "short": 0.5}, {"exact": 1.0, "short": 0.5}, None),
        ({"exact": 1, "answer": "Lima"}, {"exact": 1.0}, "Lima"),
        ("Lima", {}, "Lima"),
        (None, {}, None),
    ],
)
@pytest.mark.parametrize("kind", ["async", "program"])
def test_an_agents_result_is_a_reward_or_the_answer(kind, result, rewards, answer):
    agent = once(result) if kind == "async" else script(f"print('log'); print({json.dumps(result)!r})")
    if kind == "program" and result is None:
        agent = script("")
    (trajectory,), _ = run_agent(agent, answers)
    assert (trajectory.env_rewards, trajectory.answer, trajectory.error) == (rewards, answer, None)
    assert trajectory.stop_reason is (StopReason.ENV_DONE if answer is None else StopReason.ANSWERED)


@pytest.mark.parametrize("result", [[1.0], float("nan"), {"answer": 3}, {"reward": "much"}])
def test_a_result_that_means_nothing_ends_the_conversation(result):
    (trajectory,), _ = run_agent(once(result), answers)
    assert trajectory.stop_reason is StopReason.ENV_ERROR and len(trajectory.turns) == 1


@pytest.mark.parametrize("tools", [[LOOKUP], openai.NOT_GIVEN], ids=["tools", "none"])
def test_text_is_no_malformed_call_where_no_tool_is_offered(tools):
    async def agent(row, client):
        await reply(client, user("Q"), tools=tools)

    (trajectory,), _ = run_agent(agent, answers, protocol=PROTOCOLS["tags"]())
    assert trajectory.turns[0].num_failures == (tools == [LOOKUP])


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_an_agent_may_block(kind):
    async def agent(row, client):
        return blocking(row, client)

    rows = [{}] * (8 if kind == "plain" else 4)
    trajectories, _ = run_agent(blocking if kind == "plain" else agent, answers, rows=rows, idle_timeout=20.0)
    assert [trajectory.answer for trajectory in trajectories] == ["A0"] * len(rows)


def test_an_agent_that_blocks_for_good_is_left_behind():
    go = threading.Event()

    async def stuck(row, client):
        await reply(client, user("Q1"))
        go.wait()

    (trajectory,), _ = run_agent(stuck, answers, idle_timeout=1.5)
    assert trajectory.stop_reason is StopReason.ENV_ERROR and len(trajectory.turns) == 1
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:  # its loop is given up once it has been silent for long enough
        (trajectory,), _ = run_agent(once(1.0), answers, idle_timeout=1.0)
        if trajectory.env_rewards:
            break
    go.set()
    assert trajectory.env_rewards == {"reward": 1.0}


def test_an_agent_that_never_began_is_not_warned_of(recwarn):
    """Another one blocked their loop until its conversation was over."""
    go, loops = threading.Event(), []

    async def agent(row, client):
        loops.append(asyncio.get_running_loop())
        go.wait()

    run_agent(agent, answers, rows=[{}] * 3, idle_timeout=0.5)
    go.set()
    for _ in range(3):
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loops[0]).result(60)
    gc.collect()
    assert not [str(each.message) for each in recwarn if "never awaited" in str(each.message)]


async def crashes(row, client):
    await reply(client, user("Q1"))
    raise KeyError("gone")


async def never_ends(row, client):
    while True:
        await reply(client, user("Q1"))


async def never_gives_up(row, client):
    while True:
        with contextlib.suppress(openai.BadRequestError):
            await reply(client, user("Q1"))


@pytest.mark.parametrize(
    ("agent", "limits", "reason", "told"),
    [
        (crashes, {}, StopReason.ENV_ERROR, "gone"),
        (never_ends, {"rollout_timeout": 1.5, "latency": 0.05}, StopReason.TIMEOUT, None),
        (never_gives_up, {"max_completion_tokens": 20}, StopReason.TOKEN_BUDGET, None),
    ],
)
def test_an_agent_that_goes_wrong_keeps_its_turns(agent, limits, reason, told):
    (trajectory,), runner = run_agent(agent, answers, **limits)
    assert trajectory.stop_reason is reason and trajectory.turns and (told is None or told in trajectory.error)
    check_whole(trajectory, runner)


def test_an_agent_that_hangs_is_ended():
    cancelled = threading.Event()

    async def agent(row, client):
        try:
            await reply(client, user("Q1"))
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    (trajectory,), runner = run_agent(agent, answers, idle_timeout=1.0)
    assert trajectory.stop_reason is StopReason.ENV_ERROR and "between two turns" in trajectory.error
    assert cancelled.wait(60.0)
    check_whole(trajectory, runner)


async def careless(row, client):
    try:
        await reply(client, user("Q1"))
    except openai.OpenAIError:
        return 0.0


def test_a_failing_engine_is_the_cause_whatever_the_agent_does():
    script = {0: EngineError("The server is gone."), 1: f"A{END}"}
    (trajectory,), runner = run_agent(careless, lambda session, turn: script[turn])
    assert (trajectory.stop_reason, trajectory.error) == (StopReason.ENGINE_ERROR, "The server is gone.")
    assert trajectory.env_rewards == {} and not runner.engine.requests  # the client did not try again

    async def patient(row, client):
        await careless(row, client)
        return await once(1.0)(row, client)

    (trajectory,), _ = run_agent(patient, lambda session, turn: script[turn])
    assert trajectory.env_rewards == {"reward": 1.0} and len(trajectory.turns) == 1
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run_agent(careless, [ZeroDivisionError("a bug")] * 3)


# Many requests, large ones, and those that are sent again


def test_a_flood_of_requests_is_sampled_one_by_one_or_refused():
    statuses = []

    async def agent(row, client):
        headers = {"Authorization": f"Bearer {client.api_key}", "x-stainless-retry-count": "0"}
        async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as http:

            async def ask(number):
                body = {"messages": user(f"Q{number % 7}")}
                async with http.post(f"{client.base_url}/chat/completions", json=body) as answer:
                    statuses.append(answer.status)

            await asyncio.gather(*map(ask, range(400)))
        return 1.0

    (trajectory,), runner = run_agent(agent, answers, latency=0.002, context_length=100_000)
    assert len(statuses) == 400 and set(statuses) <= {200, 429}
    assert len(trajectory.turns) == statuses.count(200) >= 256
    assert [turn.index for turn in trajectory.turns] == list(range(len(trajectory.turns)))
    check_whole(trajectory, runner)


def test_who_asks_too_much_at_once_is_told_to_come_again(monkeypatch):
    monkeypatch.setattr(conversation, "MOST_REQUESTS", 0)
    seen = []

    async def agent(row, client):
        with pytest.raises(openai.RateLimitError) as error:
            await client.openai(max_retries=0).chat.completions.create(model="m", messages=user("Q1"))
        seen.append(error.value.response.headers)

    (trajectory,), _ = run_agent(agent, answers)
    assert (seen[0]["x-should-retry"], seen[0]["retry-after"]) == ("true", "1") and trajectory.error is None


@pytest.mark.parametrize(("size", "status"), [(7 << 20, 400), (9 << 20, 413)])
def test_a_huge_request_is_refused(size, status):
    seen = []

    async def agent(row, client):
        with pytest.raises(openai.APIStatusError) as error:
            await reply(client, user("word " * (size // 5)))
        seen.append(error.value)
        return await once(1.0)(row, client)

    (trajectory,), _ = run_agent(agent, answers)
    assert seen[0].status_code == status and (status != 400 or seen[0].code == "context_length_exceeded")
    assert trajectory.env_rewards == {"reward": 1.0} and len(trajectory.turns) == 1


@pytest.mark.parametrize("headers", [{"x-stainless-retry-count": "1"}, {"Idempotency-Key": "one"}, {}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_gets_the_first_answer(headers, stream):
    """The first attempt is dropped while it is sampled; the second and the third are told the same."""
    told, sampling = [], threading.Event()

    def seconds(session, turn):
        sampling.set()
        return 0.3

    async def agent(row, client):
        first = {"x-stainless-retry-count": "0"} if "x-stainless-retry-count" in headers else headers
        body = {"messages": user("Q1"), "stream": stream}
        async with web(client) as http:
            dropped = asyncio.ensure_future(http.post("/chat/completions", json=body, headers=first))
            await asyncio.to_thread(sampling.wait)
            dropped.cancel()
            for _ in range(2 if headers else 1):  # without a word about it, a delivered answer is not asked for again
                told.append((await http.post("/chat/completions", json=body, headers=headers)).text)

    (trajectory,), runner = run_agent(agent, answers, latency=seconds)
    assert trajectory.error is None and len(trajectory.turns) == 1 and len(set(told)) == 1
    assert "A0" in told[0] and len(runner.engine.requests) == 1


def test_a_client_that_hangs_up_in_a_stream_loses_nothing():
    async def agent(row, client):
        async with web(client) as http:
            async with http.stream("POST", "/chat/completions", json={**ASKED, "stream": True}) as answer:
                await anext(answer.aiter_lines())
        return await once(1.0)(row, client)

    (trajectory,), runner = run_agent(agent, answers)
    assert trajectory.env_rewards == {"reward": 1.0} and len(trajectory.turns) == 2
    check_whole(trajectory, runner)


def test_the_same_question_asked_anew_is_sampled_anew():
    async def agent(row, client):
        await asyncio.gather(*(reply(client, user("Q1")) for _ in range(3)))

    (trajectory,), _ = run_agent(agent, answers, latency=0.05)
    assert [turn.text for turn in trajectory.turns] == ["A0", "A1", "A2"] and trajectory.tree.num_sequences == 3


def test_512_conversations_at_once_lose_no_request():
    async def agent(row, client):
        said, messages = [], user("Q1")
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {client.api_key}"}) as http:
            for number in range(2):
                async with http.post(f"{client.base_url}/chat/completions", json={"messages": messages}) as answer:
                    message = (await answer.json())["choices"][0]["message"]
                said.append(message["content"])
                messages = [*messages, message, *user(f"Q{number}")]
        return " ".join(said)

    trajectories, runner = run_agent(agent, answers, rows=[{}] * 512, latency=0.01)
    assert [trajectory.answer for trajectory in trajectories] == ["A0 A1"] * 512
    assert len(runner.engine.requests) == 2 * 512
    assert all(trajectory.tree.num_sequences == 1 for trajectory in trajectories)


# Who may ask


async def post(client, key, base=None, session=None):
    """The status of a request for a turn."""
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
    """A request with the key of a conversation, as bytes."""
    path = urlsplit(client.base_url).path
    lines = [f"POST {path}/chat/completions HTTP/1.1", "Host: localhost", f"Authorization: Bearer {client.api_key}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def test_the_door_is_shut_for_strangers():
    seen = {}

    async def agent(row, client):
        base, server = client.base_url, client.base_url.split("/0")[0]

        async def ask(status, url, key=None, body=None, **headers):
            async with web(client, key, base_url="") as http:
                method = "GET" if body is None else "POST"
                answer = await http.request(method, url, headers=headers, **(body or {}))
            seen[url, key, *headers] = (answer.status_code, status)
            assert status == 200 or answer.json()["error"]["message"]
            return answer.json()

        await ask(200, f"{base}/models")
        assert (await ask(200, f"{base}/models/a/b"))["id"] == "a/b"
        await ask(401, f"{base}/models", "")
        await ask(401, f"{base}/models", "x")
        await ask(403, f"{base}/models", Host="evil.example")
        await ask(404, f"{base}/nothing")
        await ask(400, f"{base}/chat/completions", body={"content": b"{"})
        await ask(404, f"{server}/zzz/v1/chat/completions", body={"json": ASKED})
        await ask(404, f"{server}/v1/chat/completions", body={"json": ASKED})
        await ask(200, f"{server}/v1/chat/completions", body={"json": ASKED}, **{"X-Session-ID": client.session})

    (trajectory,), _ = run_agent(agent, [f"A{END}"])
    assert trajectory.error is None and len(seen) == 10
    assert all(found == expected for found, expected in seen.values()), seen


def test_no_agent_takes_turns_in_the_conversation_of_another():
    clients, asked, statuses = {}, asyncio.Event(), {}

    async def agent(row, client):
        clients[row["number"]] = client
        await until_true(lambda: len(clients) == 2)
        if row["number"] == 1:
            await asked.wait()
            return await post(client, client.api_key)
        other, server = clients[1], client.base_url.split("/000")[0] + "/v1"
        statuses["path"] = await post(client, client.api_key, other.base_url)
        statuses["name"] = await post(client, client.api_key, server, other.session)
        statuses["own"] = await post(client, client.api_key, server, client.session)
        asked.set()

    trajectories, _ = run_agent(agent, [f"A{END}"] * 2, rows=[{}, {}])
    assert clients[0].api_key != clients[1].api_key
    assert statuses == {"path": 404, "name": 404, "own": 200}
    assert [len(trajectory.turns) for trajectory in trajectories] == [1, 1]
    assert trajectories[1].env_rewards == {"reward": 200.0}


def test_a_key_ends_with_its_conversation():
    late = []

    async def agent(row, client):
        if row["number"] == 0:
            late.append(client)
            return None
        await until_true(lambda: late)
        status = 200
        while status == 200:
            status = await post(client, late[0].api_key, late[0].base_url)
        return status

    trajectories, _ = run_agent(agent, answers, rows=[{}, {}])
    assert trajectories[1].env_rewards == {"reward": 404.0}


@pytest.mark.parametrize("host", ["localhost", "localhost:99999999", "[::", "evil.example"])
def test_a_wrong_host_is_refused(host):
    told = []

    async def agent(row, client):
        key = f"Authorization: Bearer {client.api_key}"
        told.append(await send(client, f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n{key}\r\n\r\n".encode()))

    (trajectory,), _ = run_agent(agent, [])
    assert trajectory.error is None
    assert told[0].startswith(b"HTTP/1.1 200" if host == "localhost" else b"HTTP/1.1 403")


def of_the_server(caplog):
    """What the server logged: other tests' environments may be closed meanwhile, and say so."""
    return [record for record in caplog.records if record.name.startswith("mt_grpo.integrations.openai_api")]


def test_strangers_are_told_of_once_and_no_key_is_printed(caplog):
    keys, source = [], AgentSource(None)
    body = json.dumps(ASKED).encode()

    async def agent(row, client):
        keys.append(client.api_key)
        for _ in range(20):
            await post(client, "guessed")
            await send(client, b"\x16\x03\x01 no HTTP\r\n\r\n")
            await send(client, request(client, body, f"no header {client.api_key}"))
            await send(client, request(client, body, "Transfer-Encoding: chunked"))

    source.agent = agent
    for _ in range(2):
        run_agent(source, [])
    (record,) = of_the_server(caplog)
    assert "refused: 80 " in record.getMessage() and not any(key in caplog.text for key in keys)


def test_a_damaged_body_is_the_clients_error(caplog):
    told = []

    async def agent(row, client):
        told.append(await send(client, request(client, b"none", "Content-Encoding: gzip", "Content-Length: 4")))
        told.append(await send(client, request(client, b"", "Content-Length: 0", "Connection: close")))

    (trajectory,), _ = run_agent(agent, [])
    assert trajectory.error.startswith("RefusedError: ") and not of_the_server(caplog)
    assert all(answer.startswith(b"HTTP/1.1 400") and b'"error"' in answer for answer in told)


def test_a_client_that_vanishes_is_no_error(caplog):
    """As an agent does that SIGTERM ends while it sends or waits."""

    async def agent(row, client):
        body = json.dumps(ASKED).encode()
        await send(client, request(client, body[:5], "Content-Length: 500"), reads=False)
        await send(client, request(client, body, f"Content-Length: {len(body)}"), reads=False)
        return await post(client, client.api_key)

    (trajectory,), _ = run_agent(agent, answers, latency=0.1)
    assert trajectory.env_rewards == {"reward": 200.0} and trajectory.stop_reason is StopReason.ENV_DONE
    assert not of_the_server(caplog)


# Faults in any order


class Faulty:
    """A client that asks well and badly, and knows how many turns it asked for."""

    def __init__(self, client, web):
        self.url, self.web = f"{client.base_url}/chat/completions", web
        self.messages, self.asked, self.told = user("Q1"), 0, []

    async def post(self, messages, stream=False, **headers):
        async with self.web.post(self.url, json={"messages": messages, "stream": stream}, headers=headers) as answer:
            return await answer.json()

    async def fresh(self, messages):
        self.asked += 1
        answer = await self.post(messages, **{"x-stainless-retry-count": "0"})
        self.told.append(answer["choices"][0]["message"]["content"])
        return answer["choices"][0]["message"]

    async def go_on(self):
        self.messages = [*self.messages, await self.fresh(self.messages), *user(f"Q{self.asked}")]

    async def rewrite(self):
        self.messages = [*user("Q1"), {"role": "assistant", "content": "summary"}, *user(f"Q{self.asked}")]
        await self.go_on()

    async def flood(self):
        await asyncio.gather(*(self.fresh(user(f"P{number}")) for number in range(5)))

    async def retry(self):
        """Drops the first attempt; the second comes at once, the third with the answer known."""
        self.asked += 1
        first = asyncio.ensure_future(self.post(self.messages, **{"x-stainless-retry-count": "0"}))
        await asyncio.sleep(0.005)
        first.cancel()
        again = [await self.post(self.messages, **{"x-stainless-retry-count": str(count)}) for count in (1, 2)]
        assert again[0] == again[1]
        self.told.append(again[0]["choices"][0]["message"]["content"])

    async def hang_up(self):
        self.asked += 1
        one = {"Idempotency-Key": f"hang up {self.asked}"}
        body = {"messages": self.messages, "stream": True}
        async with self.web.post(self.url, json=body, headers=one) as answer:
            await answer.content.readline()
            answer.close()
        async with self.web.post(self.url, json=body, headers=one) as answer:
            assert (await answer.text()).endswith("data: [DONE]\n\n")
        self.told.append(None)

    async def nonsense(self):
        for body in (b"{", b"[]", b'{"messages": [{"role": "user", "content": 3}]}', b'{"messages": null}'):
            async with self.web.post(self.url, data=body) as answer:
                assert answer.status == 400 and (await answer.json())["error"]["message"]


ACTS = [name for name in vars(Faulty) if name in ("go_on", "rewrite", "flood", "retry", "hang_up", "nonsense")]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(ACTS), max_size=6), st.booleans())
def test_no_fault_loses_a_turn_or_trains_it_twice(acts, crashes):
    faulty = []

    async def agent(row, client):
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {client.api_key}"}) as web:
            faulty.append(Faulty(client, web))
            for act in acts:
                await getattr(faulty[0], act)()
        if crashes:
            raise KeyError("crash")

    (trajectory,), runner = run_agent(agent, answers, latency=0.01, context_length=100_000)
    refused = bool(acts) and set(acts) == {"nonsense"}
    assert trajectory.stop_reason is (StopReason.ENV_ERROR if crashes or refused else StopReason.ENV_DONE)
    assert not crashes or "crash" in trajectory.error
    assert len(trajectory.turns) == len(runner.engine.requests) == faulty[0].asked
    told = [words for words in faulty[0].told if words is not None]
    assert set(told) <= {turn.text for turn in trajectory.turns} and len(set(told)) == len(told)
    if trajectory.turns:
        check_whole(trajectory, runner)


# Programs and refusals

ASK = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
body = json.dumps({"messages": [{"role": "user", "content": row["prompt"]}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
"""
ASK_ANTHROPIC = """
import json, os, urllib.request
assert "ANTHROPIC_AUTH_TOKEN" not in os.environ
body = json.dumps({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Q1"}]}).encode()
headers = {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", body, headers)
print(json.load(urllib.request.urlopen(request))["content"][0]["text"])
"""
CURL = """curl -s "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
-d '{"messages": [{"role": "user", "content": "Q1"}]}' | grep -o '"content":"[^"]*"'"""


def test_a_program_reaches_the_policy():
    program = script(ASK + "print('noise'); print(json.dumps({'answer': message['content'], 'n': row['number']}))")
    trajectories, _ = run_agent(program, answers, rows=[{}] * 3)
    assert [trajectory.answer for trajectory in trajectories] == ["A0"] * 3
    assert [trajectory.env_rewards for trajectory in trajectories] == [{"n": float(number)} for number in range(3)]


def test_a_program_finds_anthropics_variables(monkeypatch):
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "the user's own")  # Anthropic's clients would send it beside the key
    (trajectory,), _ = run_agent(script(ASK_ANTHROPIC), answers)
    assert trajectory.answer == "A0"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_a_shell_reaches_the_policy():
    (trajectory,), _ = run_agent(Command(shlex.join(["bash", "-c", CURL])), answers)
    assert trajectory.answer == '"content":"A0"' and len(trajectory.turns) == 1


@pytest.mark.parametrize(
    ("program", "turns", "error"),
    [
        (script(ASK + "sys.exit('out of luck')"), 1, "ended with exit code 1: out of luck"),
        (Command("sh -c 'kill -9 $$'"), 0, "CommandError: sh was ended by SIGKILL, and wrote nothing of why"),
        (Command("sh -c 'kill -40 $$'"), 0, "CommandError: sh was ended by signal 40, and wrote nothing of why"),
        (Command("no-such-program at all"), 0, "no-such-program"),
    ],
)
def test_a_program_that_fails_says_why(program, turns, error):
    (trajectory,), _ = run_agent(program, answers)
    assert trajectory.stop_reason is StopReason.ENV_ERROR and len(trajectory.turns) == turns
    assert error in trajectory.error


async def refused(client):
    with contextlib.suppress(openai.BadRequestError):
        await reply(client, user("Q"), response_format={"type": "x"})
    return 0.5


@pytest.mark.parametrize("kind", ["async", "program"])
def test_an_agent_that_ignores_a_refusal_is_told_of(kind):
    async def agent(row, client):
        return await refused(client)

    body = json.dumps({"messages": user("Q"), "response_format": {"type": "x"}})
    program = "import os, sys, httpx; u = os.environ; httpx.post(u['OPENAI_BASE_URL'] + '/chat/completions', "
    program += f"content={body!r}, headers={{'Authorization': 'Bearer ' + u['OPENAI_API_KEY']}}); sys.exit(3)"
    (trajectory,), _ = run_agent(agent if kind == "async" else script(program), answers)
    assert trajectory.stop_reason is StopReason.ENV_ERROR and not trajectory.turns
    assert "request was refused: `response_format`" in trajectory.error


def test_a_refusal_after_a_turn_is_the_agents_affair():
    async def agent(row, client):
        await reply(client, user("Q"))
        return await refused(client)

    (trajectory,), _ = run_agent(agent, answers)
    assert trajectory.error is None and trajectory.env_rewards == {"reward": 0.5}
    ((why, number),) = trajectory.refusals.items()
    assert why.startswith("`response_format`") and number == 1
    (line,) = rollout_lines(Batch("train", 0, 0, 1, [0], [trajectory]), 0)
    (finding,) = [each.sentence for each in find(Counts().add([line])) if each.kind == "refused"]
    assert "in 1 of 1 conversation" in finding and "`response_format`" in finding


def test_a_refusal_is_kept_whatever_was_wrong():
    """Also where a request was never read: its path is unknown, or it is too large."""

    async def agent(row, client):
        await reply(client, user("Q1"))
        async with web(client) as http:
            await http.post("/embeddings", json={})
            await http.post("/chat/completions", content=b" " * (9 << 20))
            await http.get("/nothing")
            for number in range(20):
                await http.post("/chat/completions", json={"messages": user("Q"), f"field{number}": True})

    (trajectory,), _ = run_agent(agent, answers)
    assert trajectory.stop_reason is StopReason.ENV_DONE and sum(trajectory.refusals.values()) == 22
    why = list(trajectory.refusals)
    assert "/v1/embeddings" in why[0] and "bytes" in why[1] and "`field0`" in why[2]
    assert len(why) == 17 and trajectory.refusals["other reasons"] == 6


def test_a_program_that_fails_after_a_refusal_says_it():
    body = json.dumps({"messages": user("Q"), "guided_json": {"type": "string"}})
    program = ASK + (
        "try:\n    urllib.request.urlopen(urllib.request.Request(request.full_url, "
        f"{body.encode()!r}, headers))\nexcept OSError:\n    sys.exit(3)"
    )
    (trajectory,), _ = run_agent(script(program), answers)
    assert len(trajectory.turns) == 1 and "request was refused: `guided_json`" in trajectory.error


@pytest.mark.parametrize("key", [None, "sk-of-a-provider"])
def test_a_client_that_leads_elsewhere_is_told_the_way(key, monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def agent(row, client):
        elsewhere = {} if key is None else {"api_key": key, "base_url": "http://127.0.0.1:9/v1"}
        openai.OpenAI(max_retries=0, **elsewhere).chat.completions.create(model="m", messages=user("Q1"))

    (trajectory,), _ = run_agent(agent, answers)
    assert trajectory.stop_reason is StopReason.ENV_ERROR and "client.openai()" in trajectory.error
    assert "in agent" in trajectory.where


STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)


def running(marker: str) -> list[psutil.Process]:
    """Processes with a marker on their command line; this one may have others, which other tests have begun."""
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if any(marker in word for word in process.info["cmdline"] or [])]


def until_gone(marker: str) -> None:
    """Waits for the system: it ends a process that is killed in its own time."""
    until(lambda: not running(marker), seen=lambda: running(marker))


@pytest.mark.parametrize("end", ["import time; time.sleep(600)", "print(1.0, flush=True)", "raise SystemExit(3)"])
def test_no_process_outlives_its_conversation(end, tmp_path):
    stubborn = f"{STUBBORN}  # {tmp_path}"  # the same test may run elsewhere on this machine
    # the program waits until the child ignores the signal, and what the child says is no line of the program's own
    start = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {stubborn!r}], stdout=subprocess.PIPE)\n"
        "assert child.stdout.readline() == b'up\\n'\n"
    )
    (trajectory,), _ = run_agent(script(start + end), answers, idle_timeout=5.0 if "sleep" in end else 60.0)
    assert (trajectory.stop_reason is StopReason.ENV_DONE) == end.startswith("print")
    until_gone(str(tmp_path))


def test_a_program_cancelled_while_it_starts_leaves_nothing(tmp_path):
    began = tmp_path / "began"
    program = Command(shlex.join(["bash", "-c", f"(exec -a {tmp_path} sleep 600) & touch {began}; wait"]))

    async def cancelled() -> int:
        conversation = asyncio.ensure_future(program({}, AgentClient("http://127.0.0.1:1/v1", "key", "s", print)))
        while not (started := running(str(tmp_path))):
            await asyncio.sleep(0)
        while not began.exists():  # this loop stands still, as one does that other conversations keep busy
            time.sleep(0.01)
        conversation.cancel()
        await asyncio.wait([conversation], timeout=60.0)
        assert conversation.cancelled()
        return started[0].pid

    assert not psutil.pid_exists(asyncio.run(cancelled()))
    until_gone(str(tmp_path))


def test_a_program_that_writes_without_end_is_read_and_ended(tmp_path):
    program = script(f"import sys  # {tmp_path}\nwhile True: sys.stdout.write('x' * 10000)")
    (trajectory,), _ = run_agent(program, answers, idle_timeout=0.5)
    assert trajectory.stop_reason is StopReason.ENV_ERROR and not running(str(tmp_path))
