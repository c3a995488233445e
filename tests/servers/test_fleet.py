"""Several servers as the client sees them: who is asked, who is left out, who joins, and what is refused."""

import asyncio
import threading
import time

import pytest
from support.loopback import ScriptedServer, free_port
from support.upstreams import SAMPLING, client_of, completion, play
from support.waiting import until_true

from mt_grpo.errors import ServerGoneError
from mt_grpo.servers.http import ServerSetupError
from mt_grpo.vllm_plugin import IDENTITY

OLDER = {"/version": (200, {"version": "0.30.0"})}


async def ask(client, number, *context):
    """A turn of so many conversations, one after another."""
    return [await client.generate([each, *context], SAMPLING, str(each)) for each in range(number)]


def test_a_run_begins_with_the_servers_that_it_needs(tokenizer, start):
    """The third comes late: it is held against the run, and gets conversations then."""
    servers, port, told = [start(), start()], free_port(), []
    client = client_of(tokenizer, *servers, f"http://127.0.0.1:{port}", min_servers=2, server_timeout=60)

    async def go():
        await client.connect(told.append)
        await ask(client, 1)
        late = start(port=port)
        await until_true(lambda: client.servers[2].up)
        await ask(client, 12)
        return late

    late = play(client, go, connect=False)
    assert "which joins when it is up" in told[-1]
    paths = [path for _, path, _ in late.requests]
    assert "/v1/completions" in paths[paths.index("/tokenize") :] and "/v1/completions" not in paths[:3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": "another"},
        OLDER,
        {"/v1/models": (200, {"data": [{"id": "base", "root": "base", "max_model_len": 8}]})},
    ],
    ids=["model", "version", "context"],
)
def test_a_late_server_that_does_not_fit_is_left_out(tokenizer, start, caplog, wrong):
    port = free_port()
    client = client_of(tokenizer, start(), f"http://127.0.0.1:{port}", min_servers=1, model="base")

    async def go():
        await ask(client, 1)
        late = start(port=port, **wrong)
        await until_true(lambda: "The run goes on without it" in caplog.text)
        await ask(client, 6)
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
        await ask(client, 4)  # on both
        servers[1].stop()
        await asyncio.gather(*(client.generate([number], SAMPLING, str(number)) for number in range(4)))

    with pytest.raises(ServerGoneError, match=f"none did at {servers[1].url}"):
        play(client, go)


def test_servers_that_hang_are_asked_at_the_same_time(tokenizer, start, monkeypatch):
    """Each takes all the time that an answer may take."""
    monkeypatch.setattr("mt_grpo.servers.http.CONNECT_TIMEOUT", 1.0)
    over = threading.Event()
    hanging = [start(**{"/health": lambda body: (over.wait(60) and 200, "")}) for _ in range(20)]
    begun = time.monotonic()
    with pytest.raises(ServerGoneError, match="No vLLM server answered for 0 s"):
        asyncio.run(client_of(tokenizer, *hanging, server_timeout=0.1).connect())
    over.set()
    assert time.monotonic() - begun < 15


# as vLLM's own router answers
WORKERS = {"workers": [{"url": "http://10.0.0.1:8000"}, {"url": "http://10.0.0.2:8000"}]}
ROUTER = {"/workers": (200, WORKERS), "/health": (200, "All servers healthy")}


@pytest.mark.parametrize(
    ("servers", "words"),
    [
        ([{}, OLDER], ["0.31.0 at {0} and 0.30.0 at {1}"]),
        ([{}, {"model": "another"}], ["serves 'another', not 'base'"]),
        (
            [ROUTER],
            [
                "is a router before http://10.0.0.1:8000, http://10.0.0.2:8000",
                "name the servers themselves in `vllm_server_base_url`",
            ],
        ),
    ],
    ids=["versions", "models", "a router"],
)
def test_servers_that_do_not_fit_are_refused_at_the_start(tokenizer, start, servers, words):
    servers = [start(**each) for each in servers]
    with pytest.raises(ServerSetupError) as caught:
        asyncio.run(client_of(tokenizer, *servers, model="base").connect())
    assert "\n" not in str(caught.value)
    assert all(each.format(*(server.url for server in servers)) in str(caught.value) for each in words)


@pytest.mark.parametrize(
    "answer",
    [(404, "Not Found"), (200, "<html>Welcome</html>"), (200, {"hello": "world"}), (200, {"data": "world"})],
    ids=["a folder", "a page", "an API", "another list"],
)
def test_a_port_that_answers_something_else_is_refused_at_once(tokenizer, answer):
    other = ScriptedServer(lambda method, path, body: answer)
    with pytest.raises(ServerSetupError, match=f"^What answers at {other.url} is no vLLM server.*$") as caught:
        asyncio.run(client_of(tokenizer, other, server_timeout=600).connect())
    assert "\n" not in str(caught.value)
    other.stop()


@pytest.mark.parametrize("told_by", ["vLLM", "their guards"])
def test_answers_of_several_servers_in_turn_end_the_run(tokenizer, start, told_by):
    """A server that is restarted never has an identity of before. One of them may answer for the weights of all."""

    def complete(number, body):
        name = "ab"[number % 2]
        if told_by == "vLLM":
            return completion(5, fingerprint=name)
        return (*completion(5, fingerprint="vllm-0.31.0-0123abcd"), {IDENTITY: name})  # of one configuration

    client = client_of(tokenizer, start(complete), server_timeout=20)
    client.weight_version = None if told_by == "vLLM" else 7
    with pytest.raises(ServerSetupError, match="is several servers in turn, as behind a router"):
        play(client, lambda: ask(client, 6))


@pytest.mark.parametrize("fingerprint", [None, ""])
def test_an_answer_that_names_no_server_ends_the_run(tokenizer, start, fingerprint):
    """Behind a router each may come from another one."""
    server = start(lambda number, body: completion(5, fingerprint=fingerprint))
    client, words = client_of(tokenizer, server), f"{server.url} have no `system_fingerprint`.*`mt-grpo serve`"
    with pytest.raises(ServerSetupError, match=words) as caught:
        play(client, lambda: ask(client, 1), connect=False)
    assert "\n" not in str(caught.value) and len(server.asked("/v1/completions")) == 1


def test_an_engine_that_dies_in_mid_sampling_is_left_out(tokenizer, start):
    """Its process answers with errors."""
    dead = []

    def complete(number, body):
        return (500, {"error": {"message": "EngineCore encountered an issue."}}) if dead else completion(20)

    dying = start(complete, **{"/health": lambda body: (503 if dead else 200, "")})
    client = client_of(tokenizer, dying, start(), server_timeout=20)

    async def go():
        first = await ask(client, 8)
        dead.append(True)
        return first, await ask(client, 8, 1)

    first, second = play(client, go)
    assert {20} < {sample.ids[0] for sample in first} and {sample.ids[0] for sample in second} == {5}
    assert [server.up for server in client.servers] == [False, True]


def test_a_request_that_hangs_is_repeated_on_the_same_server(tokenizer, start):
    """A group that leaves its server would leave its prefix."""
    over = threading.Event()
    servers = [
        start(lambda number, body: completion(5) if number != 4 else over.wait(60) and None),
        start(lambda number, body: completion(5)),
    ]
    client = client_of(tokenizer, *servers, request_timeout=1.0)

    async def converse(group, member):
        context = [group]
        for _ in range(4):
            context += (await client.generate(list(context), SAMPLING, f"{group}-{member}")).ids

    async def go():
        await asyncio.gather(*(converse(group, member) for group in range(2) for member in range(3)))

    try:
        play(client, go)
    finally:
        over.set()
    asked = [[body["prompt"][0] for body in server.asked("/v1/completions")] for server in servers]
    assert [len(set(each)) for each in asked] == [1, 1] and [len(each) for each in asked] == [12 + 1, 12]


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
    taken = {f"s{number}": [] for number in range(8)}

    def context(session):
        return [int(session[1:]), 1, 2, *taken[session]]

    async def turn(session):
        taken[session] += (await client.generate(context(session), SAMPLING, session)).ids

    async def go():
        for _ in range(3):
            await asyncio.gather(*map(turn, taken))

    play(client, go)
    assert asked.is_set()
    assert [len(tokens) for tokens in taken.values()] == [3] * 8
    assert len({token for tokens in taken.values() for token in tokens}) == 24
    moved = [session for session, tokens in taken.items() if tokens[0] < 70]
    assert len(moved) == 4 and all(token >= 70 for session in moved for token in taken[session][1:])
    prompts = [body["prompt"] for body in servers[1].asked("/v1/completions")]
    assert all(context(session)[:4] in prompts for session in moved)
