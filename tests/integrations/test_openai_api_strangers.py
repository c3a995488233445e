"""Who may ask in a conversation, and what becomes of requests by anybody else."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

import httpx
import pytest
from support.agents import END, run_agent
from support.conversations import user
from support.waiting import until_true

from mt_grpo.integrations.openai_api import AgentSource
from mt_grpo.trajectory import StopReason

ASKED = {"messages": user("Q1")}


async def post(client, key, base=None, session=None):
    """The status of a request for a turn."""
    headers = {"Authorization": f"Bearer {key}"} | ({} if session is None else {"X-Session-ID": session})
    async with httpx.AsyncClient(trust_env=False) as web:
        answer = await web.post(f"{base or client.base_url}/chat/completions", json=ASKED, headers=headers)
    return answer.status_code


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

    trajectories, _ = run_agent(agent, lambda session, turn: f"A{turn}{END}", rows=[{}, {}])
    assert trajectories[1].env_rewards == {"reward": 404.0}


@pytest.mark.parametrize("host", ["localhost", "localhost:99999999", "[::", "evil.example"])
def test_a_wrong_host_is_refused(host):
    answers = []

    async def agent(row, client):
        key = f"Authorization: Bearer {client.api_key}"
        answers.append(await send(client, f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n{key}\r\n\r\n".encode()))

    (trajectory,), _ = run_agent(agent, [])
    assert trajectory.error is None
    assert answers[0].startswith(b"HTTP/1.1 200" if host == "localhost" else b"HTTP/1.1 403")


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
    answers = []

    async def agent(row, client):
        answers.append(await send(client, request(client, b"none", "Content-Encoding: gzip", "Content-Length: 4")))
        answers.append(await send(client, request(client, b"", "Content-Length: 0", "Connection: close")))

    (trajectory,), _ = run_agent(agent, [])
    assert trajectory.error.startswith("RefusedError: ") and not of_the_server(caplog)
    assert all(answer.startswith(b"HTTP/1.1 400") and b'"error"' in answer for answer in answers)


def test_a_client_that_vanishes_is_no_error(caplog):
    """As an agent does that SIGTERM ends while it sends or waits."""

    async def agent(row, client):
        body = json.dumps(ASKED).encode()
        await send(client, request(client, body[:5], "Content-Length: 500"), reads=False)
        await send(client, request(client, body, f"Content-Length: {len(body)}"), reads=False)
        return await post(client, client.api_key)

    (trajectory,), _ = run_agent(agent, lambda session, turn: f"A{END}", latency=0.1)
    assert trajectory.env_rewards == {"reward": 200.0} and trajectory.stop_reason is StopReason.ENV_DONE
    assert not of_the_server(caplog)
