"""Several servers as the client sees them: who is asked, who is left out, who joins, and what is refused."""

from __future__ import annotations

import asyncio
import threading

import pytest
from support.loopback import ScriptedServer, free_port
from support.upstreams import SAMPLING, client_of, completion, play
from support.waiting import until_true

from mt_grpo.errors import ServerGoneError
from mt_grpo.servers.http import ServerSetupError
from mt_grpo.vllm_plugin import IDENTITY


def refusal(client) -> str:
    with pytest.raises(ServerSetupError) as caught:
        asyncio.run(client.connect())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_begins_with_the_servers_that_it_needs(tokenizer, start):
    """The third comes late: it is held against the run, and gets conversations then."""
    servers, port, told = [start(), start()], free_port(), []
    client = client_of(tokenizer, *servers, f"http://127.0.0.1:{port}", min_servers=2, server_timeout=60)

    async def go():
        await client.connect(told.append)
        await client.generate([0], SAMPLING, "first")
        late = start(port=port)
        await until_true(lambda: client.servers[2].up)
        for number in range(12):
            await client.generate([number], SAMPLING, str(number))
        await client.close()
        return late

    late = asyncio.run(asyncio.wait_for(go(), 60))
    assert "which joins when it is up" in told[-1]
    paths = [path for _, path, _ in late.requests]
    assert "/v1/completions" in paths[paths.index("/tokenize") :] and "/v1/completions" not in paths[:3]


@pytest.mark.parametrize("fault", ["model", "version", "context"])
def test_a_late_server_that_does_not_fit_is_left_out(tokenizer, start, caplog, fault):
    servers, port = [start()], free_port()
    client = client_of(tokenizer, *servers, f"http://127.0.0.1:{port}", min_servers=1, model="base")
    wrong = {
        "model": {"model": "another"},
        "version": {"/version": (200, {"version": "0.30.0"})},
        "context": {"/v1/models": (200, {"data": [{"id": "base", "root": "base", "max_model_len": 8}]})},
    }[fault]

    async def go():
        await client.generate([0], SAMPLING, "first")
        late = start(port=port, **wrong)
        await until_true(lambda: "The run goes on without it" in caplog.text)
        for number in range(6):
            await client.generate([number], SAMPLING, str(number))
        return late

    assert not play(client, go).asked("/v1/completions")


def test_too_few_servers_end_the_start_with_one_sentence(tokenizer, start):
    client = client_of(tokenizer, start(), f"http://127.0.0.1:{free_port()}", min_servers=2, server_timeout=0.2)
    with pytest.raises(ServerGoneError, match="1 of 2 vLLM servers answered .* `vllm_min_servers` wants 2"):
        asyncio.run(client.connect())


def test_fewer_servers_than_needed_end_the_run(tokenizer, start):
    servers = [start(), start()]
    client = client_of(tokenizer, *servers, min_servers=2, server_timeout=0.3)

    async def go():
        for number in range(4):  # on both
            await client.generate([number], SAMPLING, str(number))
        servers[1].stop()
        await asyncio.gather(*(client.generate([number], SAMPLING, str(number)) for number in range(4)))

    with pytest.raises(ServerGoneError, match=f"none did at {servers[1].url}"):
        play(client, go)


def test_servers_of_mixed_versions_are_refused(tokenizer, start):
    servers = [start(), start(**{"/version": (200, {"version": "0.30.0"})})]
    words = refusal(client_of(tokenizer, *servers))
    assert f"0.31.0 at {servers[0].url} and 0.30.0 at {servers[1].url}" in words


def test_a_replica_with_another_model_is_refused(tokenizer, start):
    words = refusal(client_of(tokenizer, start(), start(model="another"), model="base"))
    assert "serves 'another', not 'base'" in words


@pytest.mark.parametrize(
    "script",
    [
        lambda method, path, body: (404, "Not Found"),
        lambda method, path, body: (200, "<html>Welcome</html>"),
        lambda method, path, body: (200, {"hello": "world"}),
        lambda method, path, body: (200, {"data": "world"}),
    ],
    ids=["a folder", "a page", "an API", "another list"],
)
def test_a_port_that_answers_something_else_is_refused_at_once(tokenizer, script):
    other = ScriptedServer(script)
    words = refusal(client_of(tokenizer, other, server_timeout=600))
    assert f"What answers at {other.url} is no vLLM server" in words
    other.stop()


def test_a_router_is_named_with_the_servers_behind_it(tokenizer, start):
    """As vLLM's own router answers."""
    workers = {"workers": [{"url": "http://10.0.0.1:8000"}, {"url": "http://10.0.0.2:8000"}]}
    router = start(**{"/workers": (200, workers), "/health": (200, "All servers healthy")})
    words = refusal(client_of(tokenizer, router))
    assert "is a router before http://10.0.0.1:8000, http://10.0.0.2:8000" in words
    assert "name the servers themselves in `vllm_server_base_url`" in words


def test_answers_of_several_servers_in_turn_end_the_run(tokenizer, start):
    """A server that is restarted never has an identity of before."""
    router = start(lambda number, body: completion(5, fingerprint="ab"[number % 2]))
    client = client_of(tokenizer, router, server_timeout=20)

    async def go():
        for number in range(6):
            await client.generate([number], SAMPLING, str(number))

    with pytest.raises(ServerSetupError, match="is several servers in turn, as behind a router"):
        play(client, go)


def test_servers_in_turn_are_told_apart_by_their_guards(tokenizer, start):
    """They have one configuration, and one of them answers for the weights of all."""
    own = "vllm-0.31.0-0123abcd"
    router = start(lambda number, body: (*completion(5, fingerprint=own), {IDENTITY: "ab"[number % 2]}))
    client = client_of(tokenizer, router, server_timeout=20)
    client.weight_version = 7

    async def go():
        for number in range(6):
            await client.generate([number], SAMPLING, str(number))

    with pytest.raises(ServerSetupError, match="is several servers in turn, as behind a router"):
        play(client, go)


def test_an_engine_that_dies_in_mid_sampling_is_left_out(tokenizer, start):
    """Its process answers with errors."""
    dead = []

    def complete(number, body):
        return (500, {"error": {"message": "EngineCore encountered an issue."}}) if dead else completion(20)

    dying = start(complete, **{"/health": lambda body: (503 if dead else 200, "")})
    client = client_of(tokenizer, dying, start(), server_timeout=20)

    async def go():
        first = [await client.generate([number], SAMPLING, str(number)) for number in range(8)]
        dead.append(True)
        second = [await client.generate([number, 1], SAMPLING, str(number)) for number in range(8)]
        return first, second

    first, second = play(client, go)
    assert {20} < {sample.ids[0] for sample in first} and {sample.ids[0] for sample in second} == {5}
    assert [server.up for server in client.servers] == [False, True]


@pytest.mark.parametrize("fingerprint", [None, ""])
def test_an_answer_that_names_no_server_ends_the_run(tokenizer, start, fingerprint):
    """Behind a router each may come from another one."""
    server = start(lambda number, body: completion(5, fingerprint=fingerprint))
    client = client_of(tokenizer, server)

    with pytest.raises(
        ServerSetupError, match=f"{server.url} have no `system_fingerprint`.*`mt-grpo serve`"
    ) as caught:
        play(client, lambda: client.generate([1], SAMPLING, "one"), connect=False)
    assert "\n" not in str(caught.value) and len(server.asked("/v1/completions")) == 1


def test_conversations_of_a_dying_server_go_on_from_their_tokens(tokenizer, start):
    """What it sampled and never answered is sampled once more elsewhere, after the same context, and kept once."""
    asked, dying = threading.Event(), []

    def die(number, body):
        if number < 4:
            return completion(20 + number)
        asked.set()
        dying[0].stopped = True
        return None

    servers = [start(die), start(lambda number, body: completion(70 + number))]
    dying.append(servers[0])
    client = client_of(tokenizer, *servers, server_timeout=20)

    async def go():
        contexts = {f"s{number}": [number, 1, 2] for number in range(8)}
        taken = {session: [] for session in contexts}
        for _ in range(3):

            async def turn(session):
                sample = await client.generate(contexts[session], SAMPLING, session)
                contexts[session] = contexts[session] + sample.ids
                taken[session] += sample.ids

            await asyncio.gather(*map(turn, contexts))
        return contexts, taken

    contexts, taken = play(client, go)
    assert asked.is_set()
    every = [token for tokens in taken.values() for token in tokens]
    assert len(every) == len(set(every)) == 24
    for number, session in enumerate(contexts):
        assert contexts[session] == [number, 1, 2] + taken[session] and len(taken[session]) == 3
    moved = [session for session, tokens in taken.items() if tokens[0] < 70]
    assert len(moved) == 4 and all(token >= 70 for session in moved for token in taken[session][1:])
    prompts = [body["prompt"] for body in servers[1].asked("/v1/completions")]
    assert all(contexts[session][:4] in prompts for session in moved)
