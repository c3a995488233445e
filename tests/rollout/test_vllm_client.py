"""The server's client against an upstream that fails as scripted."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest
from support.loopback import free_port
from support.upstreams import SAMPLING, client_of, completion, play
from support.waiting import until_true

from mt_grpo.concurrency import run
from mt_grpo.errors import EngineError, ServerGoneError
from mt_grpo.rollout import SamplingParams
from mt_grpo.servers.fleet import Placement
from mt_grpo.servers.http import Server, ServerSetupError
from mt_grpo.vllm_plugin import keys


def ask(client, context=(1, 2, 3), session="a", connect=True):
    return play(client, lambda: client.generate(list(context), SAMPLING, session), connect)


def ask_logprobs(client, context, tokens):
    return play(client, lambda: client.logprobs(context, tokens, "a"), connect=False)


def test_ids_log_probs_and_reason_come_back_as_sampled(tokenizer, start):
    server = start(lambda number, body: completion(9, 8, 7, reason="length"))
    client = client_of(tokenizer, server)
    client.weight_version = 7
    sample = ask(client)
    assert (sample.ids, sample.logprobs, sample.finish_reason, sample.weight_version) == (
        [9, 8, 7],
        [-0.5] * 3,
        "length",
        7,
    )
    (body,) = server.asked("/v1/completions")
    assert body["prompt"] == [1, 2, 3] and body["max_tokens"] == 8 and body["seed"] == 3 and body["model"] == ""
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
    first, second = server.asked("/v1/completions")
    assert first == second


def scored(logprob, token, fingerprint="one"):
    choice = {"logprobs": {"top_logprobs": [{"token_id:0": -9.0, f"token_id:{token}": logprob}]}}
    return 200, {"choices": [choice], "system_fingerprint": fingerprint}


def test_each_token_of_an_answer_is_scored_after_those_before(tokenizer, start):
    server = start(lambda number, body: scored(-float(len(body["prompt"])), body["logprob_token_ids"][0]))
    assert ask_logprobs(client_of(tokenizer, server), [1, 2], [7, 8, 9]) == [-2.0, -3.0, -4.0]
    asked = sorted(server.asked("/v1/completions"), key=lambda body: len(body["prompt"]))
    assert [body["prompt"] for body in asked] == [[1, 2], [1, 2, 7], [1, 2, 7, 8]]
    assert [body["logprob_token_ids"] for body in asked] == [[7], [8], [9]]
    assert all(body["temperature"] == 1.0 and body["max_tokens"] == 1 for body in asked)
    assert not any("prompt_logprobs" in body for body in asked)  # with it the prefix cache is not read


def test_an_answer_without_the_log_prob_is_asked_for_again(tokenizer, start):
    server = start(lambda number, body: completion(5) if number == 0 else scored(-0.5, 7))
    assert ask_logprobs(client_of(tokenizer, server), [1, 2], [7]) == [-0.5]
    server = start(lambda number, body: completion(5))
    with pytest.raises(EngineError, match="was answered without the log-prob of token 7"):
        ask_logprobs(client_of(tokenizer, server, max_retries=0), [1, 2], [7])


def test_a_refused_request_is_not_repeated_but_shown(tokenizer, start):
    server = start(lambda number, body: (400, {"error": {"message": "Token id 99 is out of vocabulary"}}))
    with pytest.raises(EngineError) as caught:
        ask(client_of(tokenizer, server))
    for part in (f"{server.url}/v1/completions", "HTTP 400", "Token id 99 is out of vocabulary"):
        assert part in str(caught.value)
    assert len(server.asked("/v1/completions")) == 1


def test_a_lasting_fault_ends_the_conversation_after_repeats(tokenizer, start):
    server = start(lambda number, body: (500, "it broke"))
    with pytest.raises(EngineError, match="HTTP 500: it broke"):
        ask(client_of(tokenizer, server, max_retries=2))
    assert len(server.asked("/v1/completions")) == 3


def test_a_request_that_hangs_is_given_up_and_repeated(tokenizer, start):
    done = threading.Event()

    def complete(number, body):
        if number == 0:
            done.wait(120)
        return completion(5)

    server = start(complete)
    begin = time.monotonic()
    try:
        assert ask(client_of(tokenizer, server, request_timeout=0.3)).ids == [5]
    finally:
        done.set()
    assert time.monotonic() - begin < 100


def test_a_request_that_always_hangs_names_the_time_limit(tokenizer, start):
    done = threading.Event()
    server = start(lambda number, body: done.wait(120) and None)
    try:
        with pytest.raises(EngineError, match=r"/v1/completions got no answer .*time limit"):
            ask(client_of(tokenizer, server, request_timeout=0.2, max_retries=1))
    finally:
        done.set()


def test_a_server_that_is_not_up_is_awaited_then_named(tokenizer):
    lines = []
    url = f"http://127.0.0.1:{free_port()}"
    client = client_of(tokenizer, url, server_timeout=0.6)
    with pytest.raises(ServerGoneError) as caught:
        asyncio.run(client.connect(lines.append))
    assert url in str(caught.value) and "mt-grpo serve --config" in str(caught.value)
    assert lines and url in lines[0]


def test_a_server_that_comes_up_later_is_used(tokenizer, start):
    port = free_port()
    timer = threading.Timer(0.5, lambda: start(port=port))
    timer.start()
    assert ask(client_of(tokenizer, f"http://127.0.0.1:{port}", server_timeout=20)).ids == [5, 6]
    timer.join()


def test_a_request_that_outlives_a_close_closes_the_connections(tokenizer, start, caplog):
    """Such as one of an agent whose conversation is over: nobody closes after it."""
    asked, answered = threading.Event(), threading.Event()

    def complete(number, body):
        asked.set()
        answered.wait(20)
        return completion(5)

    async def go():
        client = client_of(tokenizer, start(complete))
        request = asyncio.ensure_future(client.generate([1], SAMPLING, "agent"))
        await asyncio.to_thread(asked.wait, 20)
        await client.close()
        answered.set()
        return (await request).ids

    assert asyncio.run(go()) == [5]
    gc.collect()
    assert "Unclosed" not in caplog.text


def test_the_key_is_sent(tokenizer, start):
    server = start()
    ask(client_of(tokenizer, server, api_key="secret"))
    assert server.last_headers["Authorization"] == "Bearer secret"


def test_a_made_up_key_is_found_again_after_each_restart(tokenizer, start, monkeypatch, tmp_path):
    """Of two servers, each with its own; many requests under way learn of a restart at once."""
    monkeypatch.setattr(keys, "ROOT", str(tmp_path))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    servers = [start(), start()]

    def restart():
        for server in servers:
            server.key = f"key {len(server.requests)} of {server.port}"
            keys.write_key("127.0.0.1", server.port, server.key)

    async def go():
        client = client_of(tokenizer, *servers, max_retries=0)
        await client.connect()
        for _ in range(2):
            jobs = [client.generate([index], SAMPLING, str(index)) for index in range(16)]
            assert {tuple(sample.ids) for sample in await asyncio.gather(*jobs)} == {(5, 6)}
            restart()
        await client.close()

    restart()
    asyncio.run(go())
    assert all(server.asked("/v1/completions") for server in servers)


def test_a_key_that_is_given_is_the_only_one_that_is_tried(tokenizer, start, monkeypatch, tmp_path):
    monkeypatch.setattr(keys, "ROOT", str(tmp_path))
    server = start()
    server.key = "the server's"
    keys.write_key("127.0.0.1", server.port, server.key)
    with pytest.raises(ServerSetupError, match="refuses the API key"):
        ask(client_of(tokenizer, server, api_key="another"))
    assert len(server.requests) == 2  # its health, and its models once


@pytest.mark.parametrize(
    ("endpoints", "words"),
    [
        ({"/v1/models": (401, {"error": "Unauthorized"})}, "VLLM_API_KEY"),
        ({"/tokenize": (200, {"tokens": [1, 2]})}, "encodes text differently"),
        ({"/server_info": (404, {"detail": "Not Found"})}, "VLLM_SERVER_DEV_MODE=1"),
        (
            {"/server_info": (200, {"vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs"}}})},
            "processed_logprobs",
        ),
        ({"model": "other/model"}, "'other/model', not 'base'"),
    ],
    ids=["key", "vocabulary", "flags", "logprobs", "model"],
)
def test_a_server_that_does_not_fit_is_refused_at_the_start(tokenizer, start, endpoints, words):
    with pytest.raises(ServerSetupError, match=words):
        ask(client_of(tokenizer, start(**endpoints), model="base"))


def test_concurrency_is_bounded(tokenizer, start):
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

    client = client_of(tokenizer, start(complete), max_concurrent=3)

    async def go():
        await asyncio.gather(*(client.generate([1], SAMPLING, str(index)) for index in range(12)))

    play(client, go)
    assert most == 3


def test_one_client_serves_several_event_loops_in_turn(tokenizer, start):
    client = client_of(tokenizer, start())
    assert [ask(client, session=str(index), connect=not index).ids for index in range(3)] == [[5, 6]] * 3


def test_a_group_stays_on_one_server_and_groups_are_spread(tokenizer, start):
    servers = [start(), start()]
    client = client_of(tokenizer, *servers)

    async def go():
        prompts = [[group, 1, 2] for group in range(6)]
        for turn in ([], [9, 9]):
            await asyncio.gather(
                *(client.generate(p + turn, SAMPLING, f"{p[0]}-{member}") for p in prompts for member in range(4))
            )

    play(client, go)
    groups = [{body["prompt"][0] for body in server.asked("/v1/completions")} for server in servers]
    assert [len(one) for one in groups] == [3, 3] and not groups[0] & groups[1]


def test_a_group_of_conversations_that_are_over_is_forgotten():
    pool = Placement([Server("http://a"), Server("http://b")])
    for round_ in range(3):
        for index in range(8):
            pool.place(f"{round_}-{index}", [index // 4])
        for index in range(8):
            pool.release(f"{round_}-{index}")
    assert not any(server.sessions for server in pool.servers)
    assert not pool._server_of_group and not pool._group and not pool._server


def test_a_dead_server_among_several_is_left_out_and_taken_back(tokenizer, start):
    dying, other = start(), start()
    client = client_of(tokenizer, dying, other, server_timeout=20)

    async def go():
        sessions = [f"s{index}" for index in range(4)]

        async def turn():
            await asyncio.gather(*(client.generate([i], SAMPLING, s) for i, s in enumerate(sessions)))

        await turn()
        assert dying.asked("/v1/completions") and other.asked("/v1/completions")
        dying.stop()
        await turn()
        assert len(other.asked("/v1/completions")) >= 2 + 4
        back = start(port=dying.port)
        await until_true(lambda: all(server.up for server in client.servers))
        await asyncio.gather(*(client.generate([i], SAMPLING, f"t{i}") for i in range(8)))
        assert back.asked("/v1/completions")

    play(client, go)


def test_all_servers_gone_ends_the_run_with_the_command(tokenizer, start):
    server = start()
    client = client_of(tokenizer, server, server_timeout=0.5)
    ask(client)
    server.stop()
    with pytest.raises(ServerGoneError, match="mt-grpo serve --config"):
        ask(client, connect=False)


def test_a_restarted_server_gets_weights_before_it_is_asked(tokenizer, start):
    """The answer of a server with another identity is thrown away: it was sampled with other weights."""
    held = ["default"]
    server = start(
        lambda number, body: completion(5 if held[0] == "7" else 1, fingerprint="one" if number == 0 else "two"),
        version=lambda: held[0],
    )
    client = client_of(tokenizer, server, server_timeout=20)
    held[0] = "7"
    client.weight_version = 7
    restored = []

    def restore(url):
        restored.append(url)
        held[0] = "7"

    client.restore = restore

    async def go():
        assert (await client.generate([1], SAMPLING, "a")).ids == [5]
        held[0] = "default"
        assert (await client.generate([1], SAMPLING, "a")).ids == [5]

    play(client, go)
    assert restored == [server.url]


def test_a_restart_is_noticed_by_weights_where_names_stay(tokenizer, start):
    """vLLM's own fingerprint is of its configuration, which a restarted server has again."""
    held = ["7"]
    own = "vllm-0.31.0-0123abcd"
    server = start(lambda number, body: completion(int(held[0]), fingerprint=own), version=lambda: held[0])
    client = client_of(tokenizer, server, server_timeout=20)
    client.weight_version = 7
    client.restore = lambda url: held.__setitem__(0, "7")

    async def go():
        assert (await client.generate([1], SAMPLING, "a")).ids == [7]
        held[0] = "0"
        assert (await client.generate([1], SAMPLING, "a")).ids == [7]

    play(client, go)


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
    left = [fault]
    server = start()
    script = server._script
    server._script = lambda method, asked, body: left.pop() if left and asked == path else script(method, asked, body)
    assert ask(client_of(tokenizer, server, server_timeout=20)).ids == [5, 6] and not left


def test_a_server_whose_weights_cannot_be_restored_ends_the_run(tokenizer, start):
    server = start(lambda number, body: completion(5, fingerprint=str(number)), version="default")
    client = client_of(tokenizer, server, server_timeout=20)
    client.weight_version = 7

    def restore(url):
        raise RuntimeError("lost for good")

    client.restore = restore

    async def go():
        await client.generate([1], SAMPLING, "a")
        with pytest.raises(RuntimeError, match="lost for good"):
            await client.generate([1], SAMPLING, "a")

    play(client, go)


def test_an_unknown_adapter_shows_that_a_server_restarted(tokenizer, start):
    held = ["7"]
    unknown = (404, {"error": {"message": "The model `adapter-7` does not exist."}})
    server = start(lambda number, body: completion(5) if held[0] == "7" else unknown, version=lambda: held[0])
    client = client_of(tokenizer, server, server_timeout=20)
    client.weight_version, client.model = 7, "adapter-7"
    client.restore = lambda url: held.__setitem__(0, "7")

    async def go():
        held[0] = "default"
        assert (await client.generate([1], SAMPLING, "a")).ids == [5]

    play(client, go)


@pytest.mark.parametrize(("held", "restarted"), [("6", False), ("7", False), ("default", True)])
def test_weights_in_between_are_no_restart(tokenizer, start, held, restarted):
    """While weights are sent, a server has those of before or after; one that failed once is asked again."""
    answers = [(500, {"error": "busy"}), completion(5), completion(5)]
    server = start(lambda number, body: answers[min(number, 2)], version=lambda: label[0])
    client, label, restored = client_of(tokenizer, server, server_timeout=20), [held], []
    client.weight_version, client.incoming_version = 6, 7

    def restore(url):
        restored.append(url)
        label[0] = "7"

    client.restore = restore

    async def go():
        asked = asyncio.ensure_future(client.generate([1], SAMPLING, "a"))
        if restarted:
            await until_true(lambda: not client.servers[0].up)
            assert not restored  # the sync goes on: whatever is sent now would be the weights of before
            client.weight_version, client.incoming_version = 7, None
        sample = await asked
        return sample

    sample = play(client, go)
    assert bool(restored) == restarted == bool(client.servers[0].drops)
    assert (sample.weight_version, sample.last_weight_version) == ((7, 7) if restarted else (6, 7))


def test_requests_in_flight_read_no_prefix_of_other_weights(tokenizer, start):
    bodies = []

    def complete(number, body):
        bodies.append(body)
        return completion(5)

    client = client_of(tokenizer, start(complete))

    async def go():
        for version, salted in ((7, False), (7, True), (8, True)):
            client.weight_version, client.salted = version, salted
            await client.generate([1], SAMPLING, "a")

    play(client, go)
    assert [body.get("cache_salt") for body in bodies] == [None, "7", "8"]


def test_servers_may_keep_the_model_in_different_folders(tokenizer, start):
    def only(name):
        missing = (404, {"error": {"message": "The model does not exist."}})
        return lambda number, body: completion(5) if body["model"] in ("", name) else missing

    servers = [start(only(name), model=name) for name in ("/data/a/qwen", "/data/b/qwen")]
    client = client_of(tokenizer, *servers, model="/home/me/qwen")

    async def go():
        samples = await asyncio.gather(*(client.generate([number], SAMPLING, str(number)) for number in range(8)))
        return samples

    assert [sample.ids for sample in play(client, go)] == [[5]] * 8
    assert all(server.asked("/v1/completions") for server in servers)


def test_a_server_lost_long_ago_is_asked_before_it_is_given_up(tokenizer, start):
    """Nobody looks for it between two batches of rollouts."""
    client = client_of(tokenizer, start())
    client.servers[0].down_since = time.monotonic() - 1000
    assert ask(client, connect=False).ids == [5, 6]


def test_the_client_works_while_the_callers_loop_runs(tokenizer, start):
    client = client_of(tokenizer, start())

    async def notebook():
        sample = run(client.generate([1], SAMPLING, "one"))
        run(client.close())
        return sample

    assert asyncio.run(notebook()).ids == [5, 6]


def test_closing_beside_a_rollout_leaves_it_its_connections(tokenizer, start):
    asked, answered = threading.Event(), threading.Event()

    def complete(number, body):
        if body["max_tokens"] == 7:
            asked.set()
            answered.wait(20)
        return completion(5)

    client = client_of(tokenizer, start(complete))

    async def rollout():
        await client.connect()
        try:
            return await client.generate([1], SamplingParams(7), "rollout")
        finally:
            await client.close()

    samples = []
    waiting = threading.Thread(target=lambda: samples.append(run(rollout())))
    waiting.start()
    assert asked.wait(120)
    assert run(client.generate([1], SAMPLING, "beside")).ids == [5]
    client.release("beside")
    run(client.close())
    answered.set()
    waiting.join(20)
    assert [sample.ids for sample in samples] == [[5]] and len(client.servers[0].sessions) <= 1
