"""The server's client against an upstream that fails as scripted."""

import asyncio
import gc
import threading
import time
from contextlib import asynccontextmanager, nullcontext

import pytest
from support.loopback import free_port
from support.upstreams import SAMPLING, client_of, completion, play
from support.waiting import in_loop, until_true

from mt_grpo import vllm_plugin
from mt_grpo.concurrency import run
from mt_grpo.errors import EngineError, ServerGoneError
from mt_grpo.rollout import SamplingParams
from mt_grpo.servers.http import ServerSetupError


def ask(client, connect=True):
    return play(client, lambda: client.generate([1, 2, 3], SAMPLING, "a"), connect)


def ask_logprobs(client, context, tokens):
    return play(client, lambda: client.logprobs(context, tokens, "a"), connect=False)


def asked(server):
    return server.asked("/v1/completions")


@asynccontextmanager
async def connected(tokenizer, *servers, **options):
    """A client of servers, with these of its own attributes."""
    own = {name: options.pop(name) for name in ("weight_version", "incoming_version") if name in options}
    client = client_of(tokenizer, *servers, **{"server_timeout": 20, **options})
    for name, value in own.items():
        setattr(client, name, value)
    try:
        await client.connect()
        yield client
    finally:
        await client.close()


async def ask_all(client, contexts):
    return await asyncio.gather(*(client.generate(each, SAMPLING, str(name)) for name, each in contexts.items()))


@pytest.fixture
def gate():
    """What answers once this is set."""
    gate = threading.Event()
    yield gate
    gate.set()


def test_ids_log_probs_and_reason_come_back_as_sampled(tokenizer, start):
    server = start(lambda number, body: completion(9, 8, 7, reason="length"))
    client = client_of(tokenizer, server)
    client.weight_version = 7
    sample = ask(client)
    assert (sample.ids, sample.logprobs, sample.finish_reason) == ([9, 8, 7], [-0.5] * 3, "length")
    assert sample.weight_version == 7
    (body,) = asked(server)
    assert body.items() >= {"prompt": [1, 2, 3], "max_tokens": 8, "seed": 3, "model": ""}.items()
    assert client.context_length == 64


@pytest.mark.parametrize(
    "fault",
    [
        (500, {"error": {"message": "out of memory"}}),
        (503, "overloaded"),
        (429, {"detail": "slow down"}),
        (200, "<html>not JSON</html>"),
        (200, {"choices": []}),
        (200, completion(4, reason="abort")[1]),
        None,
    ],
    ids=["500", "503", "429", "not-json", "no-choices", "aborted", "closed-without-answer"],
)
def test_a_passing_fault_is_repeated(tokenizer, start, fault):
    server = start(lambda number, body: fault if number == 0 else completion(5))
    assert ask(client_of(tokenizer, server)).ids == [5]
    first, second = asked(server)
    assert first == second


def scored(logprob, token):
    choice = {"logprobs": {"top_logprobs": [{"token_id:0": -9.0, f"token_id:{token}": logprob}]}}
    return 200, {"choices": [choice], "system_fingerprint": "one"}


def test_each_token_of_an_answer_is_scored_after_those_before(tokenizer, start):
    server = start(lambda number, body: scored(-float(len(body["prompt"])), body["logprob_token_ids"][0]))
    assert ask_logprobs(client_of(tokenizer, server), [1, 2], [7, 8, 9]) == [-2.0, -3.0, -4.0]
    bodies = sorted(asked(server), key=lambda body: len(body["prompt"]))
    assert [(body["prompt"], body["logprob_token_ids"]) for body in bodies] == [
        ([1, 2], [7]), ([1, 2, 7], [8]), ([1, 2, 7, 8], [9])
    ]  # fmt: skip
    assert all(body["temperature"] == 1.0 and body["max_tokens"] == 1 for body in bodies)
    assert not any("prompt_logprobs" in body for body in bodies)  # with it the prefix cache is not read


def test_an_answer_without_the_log_prob_is_asked_for_again(tokenizer, start):
    server = start(lambda number, body: completion(5) if number == 0 else scored(-0.5, 7))
    assert ask_logprobs(client_of(tokenizer, server), [1, 2], [7]) == [-0.5]
    server = start(lambda number, body: completion(5))
    with pytest.raises(EngineError, match="was answered without the log-prob of token 7"):
        ask_logprobs(client_of(tokenizer, server, max_retries=0), [1, 2], [7])


@pytest.mark.parametrize(
    ("answer", "says", "times"),
    [
        ((400, {"error": {"message": "Token id 99"}}), r"http://[^ ]+/v1/completions.* HTTP 400: .*Token id 99", 1),
        ((500, "it broke"), "HTTP 500: it broke", 3),
    ],
)
def test_a_lasting_fault_is_repeated_and_a_refusal_is_not(tokenizer, start, answer, says, times):
    server = start(lambda number, body: answer)
    with pytest.raises(EngineError, match=says):
        ask(client_of(tokenizer, server, max_retries=2))
    assert len(asked(server)) == times


def test_a_request_that_hangs_is_given_up_and_repeated(tokenizer, start, gate):
    server = start(lambda number, body: (number or gate.wait(120), completion(5))[1])
    begin = time.monotonic()
    assert ask(client_of(tokenizer, server, request_timeout=0.3)).ids == [5]
    assert time.monotonic() - begin < 100
    server = start(lambda number, body: gate.wait(120) and None)
    with pytest.raises(EngineError, match=r"/v1/completions got no answer .*time limit"):
        ask(client_of(tokenizer, server, request_timeout=0.2, max_retries=1))


def test_a_server_that_is_not_up_is_awaited_then_named(tokenizer, start):
    lines, port = [], free_port()
    url = f"http://127.0.0.1:{port}"
    with pytest.raises(ServerGoneError, match="mt-grpo serve --config") as caught:
        asyncio.run(client_of(tokenizer, url, server_timeout=0.6).connect(lines.append))
    assert url in str(caught.value) and url in lines[0]
    timer = threading.Timer(0.5, lambda: start(port=port))
    timer.start()
    assert ask(client_of(tokenizer, url, server_timeout=20)).ids == [5, 6]
    timer.join()


def test_a_request_that_outlives_a_close_closes_the_connections(tokenizer, start, caplog, gate):
    """Such as one of an agent whose conversation is over: nobody closes after it."""
    begun = threading.Event()
    server = start(lambda number, body: (begun.set(), gate.wait(20), completion(5))[-1])

    async def go():
        client = client_of(tokenizer, server)
        request = asyncio.ensure_future(client.generate([1], SAMPLING, "agent"))
        await asyncio.to_thread(begun.wait, 20)
        await client.close()
        gate.set()
        return (await request).ids

    assert asyncio.run(go()) == [5]
    gc.collect()
    assert "Unclosed" not in caplog.text


@in_loop
async def test_a_made_up_key_is_found_again_after_each_restart(tokenizer, start, monkeypatch, tmp_path):
    """Of two servers, each with its own; many requests under way learn of a restart at once."""
    monkeypatch.setattr(vllm_plugin, "KEYS_ROOT", str(tmp_path))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    servers = [start(), start()]

    def restart():
        for server in servers:
            server.key = f"key {len(server.requests)} of {server.port}"
            vllm_plugin.StoredKey("127.0.0.1", server.port).write(server.key)

    restart()
    async with connected(tokenizer, *servers, max_retries=0) as client:
        for _ in range(2):
            samples = await ask_all(client, {index: [index] for index in range(16)})
            assert [sample.ids for sample in samples] == [[5, 6]] * 16
            restart()
    assert all(map(asked, servers))


def test_a_key_that_is_given_is_the_only_one_that_is_tried(tokenizer, start, monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_plugin, "KEYS_ROOT", str(tmp_path))
    server = start()
    ask(client_of(tokenizer, server, api_key="secret"))
    assert server.last_headers["Authorization"] == "Bearer secret"
    server.requests.clear()
    server.key = "the server's"
    vllm_plugin.StoredKey("127.0.0.1", server.port).write(server.key)
    with pytest.raises(ServerSetupError, match="refuses the API key"):
        ask(client_of(tokenizer, server, api_key="another"))
    assert len(server.requests) == 2  # its health, and its models once


RAW = {"vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs"}}}
FORGETFUL = {"logprobs_mode": "processed_logprobs", "multimodal_config": {"mm_processor_cache_gb": 0.0}}


@pytest.mark.parametrize(
    ("endpoints", "words"),
    [
        ({"/v1/models": (401, {"error": "Unauthorized"})}, "VLLM_API_KEY"),
        ({"/tokenize": (200, {"tokens": [1, 2]})}, "encodes text differently"),
        ({"/server_info": (404, {"detail": "Not Found"})}, "VLLM_SERVER_DEV_MODE=1"),
        ({"/server_info": (200, RAW)}, "processed_logprobs"),
        ({"/server_info": (200, {"vllm_config": {"model_config": FORGETFUL}})}, "without `--mm-processor-cache-gb 0`"),
        ({"model": "other/model"}, "'other/model', not 'base'"),
        *(
            ({"/v1/models": (200, {"data": [{"id": "base", "root": "base", "max_model_len": length}]})}, "is no vLLM")
            for length in (None, 0)
        ),
    ],
)
def test_a_server_that_does_not_fit_is_refused_at_the_start(tokenizer, start, endpoints, words):
    with pytest.raises(ServerSetupError, match=words):
        ask(client_of(tokenizer, start(**endpoints), model="base"))


@in_loop
async def test_concurrency_is_bounded(tokenizer, start):
    under_way, most, lock = 0, 0, threading.Lock()

    def complete(number, body):
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.05)
        with lock:
            under_way -= 1
        return completion(5)

    async with connected(tokenizer, start(complete), max_concurrent=3) as client:
        await ask_all(client, {index: [1] for index in range(12)})
    assert most == 3


def test_one_client_serves_several_event_loops_in_turn(tokenizer, start):
    client = client_of(tokenizer, start())
    assert [ask(client, connect=not index).ids for index in range(3)] == [[5, 6]] * 3

    async def notebook():
        sample = run(client.generate([1], SAMPLING, "one"))
        run(client.close())
        return sample

    assert asyncio.run(notebook()).ids == [5, 6]


@in_loop
async def test_a_group_stays_on_one_server_and_groups_are_spread(tokenizer, start):
    servers = [start(), start()]
    async with connected(tokenizer, *servers) as client:
        for turn in ([], [9, 9]):
            await ask_all(client, {f"{g}-{member}": [g, 1, 2, *turn] for g in range(6) for member in range(4)})
    groups = [{body["prompt"][0] for body in asked(server)} for server in servers]
    assert [len(one) for one in groups] == [3, 3] and not groups[0] & groups[1]


@in_loop
async def test_a_dead_server_among_several_is_left_out_and_taken_back(tokenizer, start):
    dying, other = start(), start()
    contexts = {f"s{index}": [index] for index in range(4)}
    async with connected(tokenizer, dying, other) as client:
        await ask_all(client, contexts)
        assert asked(dying) and asked(other)
        dying.stop()
        await ask_all(client, contexts)
        assert len(asked(other)) >= 2 + 4
        back = start(port=dying.port)
        await until_true(lambda: all(server.up for server in client.servers))
        await ask_all(client, {f"t{index}": [index] for index in range(8)})
    assert asked(back)


def test_all_servers_gone_ends_the_run_with_the_command(tokenizer, start):
    client = client_of(tokenizer, server := start(), server_timeout=0.5)
    ask(client)
    server.stop()
    with pytest.raises(ServerGoneError, match="mt-grpo serve --config"):
        ask(client, connect=False)


UNKNOWN = (404, {"error": {"message": "The model `adapter-7` does not exist."}})


@pytest.mark.parametrize("shown_by", ["its name", "its weights", "an unknown adapter"])
@in_loop
async def test_a_restarted_server_gets_weights_before_it_is_asked(tokenizer, start, shown_by):
    """What a server samples with other weights is thrown away. vLLM's own name is of its configuration: it stays."""
    held, restored, adapter = ["7"], [], shown_by == "an unknown adapter"

    def complete(number, body):
        if held[0] != "7" and adapter:
            return UNKNOWN
        name = ("one" if number == 0 else "two") if shown_by == "its name" else "vllm-0.31.0-0123abcd"
        return completion(5 if held[0] == "7" else 1, fingerprint=name)

    server = start(complete, version=lambda: held[0])
    async with connected(tokenizer, server, weight_version=7) as client:
        client.restore = lambda url: (restored.append(url), held.__setitem__(0, "7"))
        client.model = "adapter-7" if adapter else client.model
        for weights in ("7", "default"):
            held[0] = weights
            assert (await client.generate([1], SAMPLING, "a")).ids == [5]
    assert restored == [server.url]


@in_loop
async def test_a_server_whose_weights_cannot_be_restored_ends_the_run(tokenizer, start):
    def restore(url):
        raise RuntimeError("lost for good")

    server = start(lambda number, body: completion(5, fingerprint=str(number)), version="default")
    async with connected(tokenizer, server, weight_version=7) as client:
        client.restore = restore
        await client.generate([1], SAMPLING, "a")
        with pytest.raises(RuntimeError, match="lost for good"):
            await client.generate([1], SAMPLING, "a")


@in_loop
async def test_weights_that_never_arrive_are_not_sent_for_ever(tokenizer, start, monkeypatch):
    monkeypatch.setattr("mt_grpo.servers.fleet.POLL", 0.01)
    restored = []
    server = start(lambda number, body: completion(5, fingerprint=str(number)), version="default")
    async with connected(tokenizer, server, weight_version=7, server_timeout=5) as client:
        client.restore = restored.append
        await client.generate([1], SAMPLING, "a")
        with pytest.raises(ServerGoneError, match="took the weights 3 times and still says that it has others"):
            await client.generate([1], SAMPLING, "a")
    assert len(restored) == 3


@pytest.mark.parametrize(("number", "found"), [(1, None), (99, "404: The model `adapter-7` does not exist")])
def test_a_404_of_a_server_that_is_up_is_asked_again(tokenizer, start, number, found):
    """Of a proxy, or before an adapter is loaded; one that lasts is named."""
    server = start(lambda at, body: completion(5) if at >= number else UNKNOWN)
    with nullcontext() if found is None else pytest.raises(EngineError, match=found):
        ask(client_of(tokenizer, server, max_retries=1))


@pytest.mark.parametrize(("held", "restarted"), [("6", False), ("7", False), ("default", True)])
@in_loop
async def test_weights_in_between_are_no_restart(tokenizer, start, held, restarted):
    """While weights are sent, a server has those of before or after; one that failed once is asked again."""
    label, restored = [held], []
    server = start(
        lambda number, body: completion(5) if number else (500, {"error": "busy"}), version=lambda: label[0]
    )
    async with connected(tokenizer, server, weight_version=6, incoming_version=7) as client:
        client.restore = lambda url: (restored.append(url), label.__setitem__(0, "7"))
        request = asyncio.ensure_future(client.generate([1], SAMPLING, "a"))
        if restarted:
            await until_true(lambda: not client.servers[0].up)
            assert not restored  # the sync goes on: whatever is sent now would be the weights of before
            client.weight_version, client.incoming_version = 7, None
        sample = await request
    assert bool(restored) == restarted == bool(client.servers[0].drops)
    assert (sample.weight_version, sample.last_weight_version) == ((7, 7) if restarted else (6, 7))


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        *((path, fault) for path in ("/v1/models", "/server_info", "/tokenize") for fault in ((503, "busy"), None)),
        *((path, (200, "{}")) for path in ("/server_info", "/tokenize")),
        ("/v1/models", (200, '{"data": [{"id"')),
    ],
)
def test_a_bad_answer_at_the_start_is_asked_for_again(tokenizer, start, monkeypatch, path, fault):
    monkeypatch.setattr("mt_grpo.servers.http.POLL", 0.01)
    left, server = [fault], start()
    script = server._script
    server._script = lambda method, asked, body: left.pop() if left and asked == path else script(method, asked, body)
    assert ask(client_of(tokenizer, server, server_timeout=20)).ids == [5, 6] and not left


@in_loop
async def test_requests_in_flight_read_no_prefix_of_other_weights(tokenizer, start):
    async with connected(tokenizer, server := start()) as client:
        for client.weight_version, client.salted in ((7, False), (7, True), (8, True)):
            await client.generate([1], SAMPLING, "a")
    assert [body.get("cache_salt") for body in asked(server)] == [None, "7", "8"]


@in_loop
async def test_servers_may_keep_the_model_in_different_folders(tokenizer, start):
    def only(name):
        return lambda number, body: completion(5) if body["model"] in ("", name) else UNKNOWN

    servers = [start(only(name), model=name) for name in ("/data/a/qwen", "/data/b/qwen")]
    async with connected(tokenizer, *servers, model="/home/me/qwen") as client:
        samples = await ask_all(client, {number: [number] for number in range(8)})
    assert [sample.ids for sample in samples] == [[5]] * 8 and all(map(asked, servers))


def test_a_server_lost_long_ago_is_asked_before_it_is_given_up(tokenizer, start):
    """Nobody looks for it between two batches of rollouts."""
    client = client_of(tokenizer, start())
    client.servers[0].down_since = time.monotonic() - 1000
    assert ask(client, connect=False).ids == [5, 6]


def test_closing_beside_a_rollout_leaves_it_its_connections(tokenizer, start, gate):
    begun, samples = threading.Event(), []

    def complete(number, body):
        if body["max_tokens"] == 7:
            begun.set()
            gate.wait(20)
        return completion(5)

    client = client_of(tokenizer, start(complete))

    async def rollout():
        await client.connect()
        try:
            return await client.generate([1], SamplingParams(7), "rollout")
        finally:
            await client.close()

    waiting = threading.Thread(target=lambda: samples.append(run(rollout())))
    waiting.start()
    assert begun.wait(120)
    assert run(client.generate([1], SAMPLING, "beside")).ids == [5]
    client.release("beside")
    run(client.close())
    gate.set()
    waiting.join(20)
    assert [sample.ids for sample in samples] == [[5]] and len(client.servers[0].sessions) <= 1
