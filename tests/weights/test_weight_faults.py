"""Control calls that fail once, engines that die under a living process, caches, and what follows an update."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from peft import LoraConfig, get_peft_model
from support.loopback import Loopback, Proxy, Reply
from support.models import build_model
from support.replicas import Remote, step_of

from mt_grpo.errors import WeightSyncError
from mt_grpo.rollout import SamplingParams
from mt_grpo.servers import http
from mt_grpo.servers.http import RequestFailed
from mt_grpo.weights.files import LoraTransport, SafetensorsTransport
from mt_grpo.weights.network import DeltaTransport, HttpTransport


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(http, "DELAYS", (0.01, 0.01, 0.01))
    monkeypatch.setattr(http, "POLL", 0.01)


# Calls that fail once


@pytest.mark.parametrize("fault", ["500", "garbage", "cut", "closed"])
def test_one_bad_answer_of_each_control_call_ends_no_run(replicas, sync_of, fault):
    """`cut`: the server did what it was asked, and nobody heard that it did."""
    failed = set()

    def first(path, updates, number):
        if path in failed:
            return None
        failed.add(path)
        return fault

    proxy = Proxy(replicas[0].http.url, first)
    sync = sync_of(proxy.url, server_timeout=20.0)
    sync.verify_every = 1
    asyncio.run(sync.client.connect(lambda words: None))
    sync.sync(0)
    failed.clear()
    sync.sync(1)
    sync.check()
    assert sync.client.servers[0].up and not sync.client.servers[0].drops
    assert step_of(replicas[0].version) == "1" and sync.fleet.payload.checksum == replicas[0].loaded
    assert {"/sleep", "/update_weights", "/finish_weight_update", "/weight_info", "/v1/completions"} <= failed
    proxy.stop()


def test_a_lasting_fault_of_a_healthy_server_ends_the_run(replicas, sync_of):
    sync = sync_of(*replicas, server_timeout=20.0)
    sync.sync(0)
    replicas[1].refused = "/update_weights"
    with pytest.raises(WeightSyncError, match=f"{replicas[1].http.url}/update_weights was answered with HTTP 500: no"):
        sync.sync(1)
    assert len(replicas[1].http.asked("/update_weights")) == 2 + 1 + len(http.DELAYS)


# Engines that die


def sample(client, number: int = 6) -> list:
    async def go():
        taken = [await client.generate([one, 1], SamplingParams(max_tokens=1), str(one)) for one in range(number)]
        while not all(server.up for server in client.servers):
            await client.generate([1], SamplingParams(max_tokens=1), "waits")
        await client.close()
        return taken

    return asyncio.run(asyncio.wait_for(go(), 60))


CALLS = ["/weight_info", "/sleep", "/start_weight_update", "/update_weights", "/init_weight_transfer_engine"]
CALLS += ["/finish_weight_update", "/reset_prefix_cache", "/wake_up", "/v1/completions"]


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("in_flight", [False, True])
def test_an_engine_that_dies_is_left_out_and_taken_back(replicas, sync_of, path, in_flight):
    """Its process goes on to answer, with errors only."""
    sync = sync_of(*replicas, server_timeout=20.0)
    sync.verify_every = 1
    if in_flight:
        sync.send_in_flight()
    sync.sync(0)
    replicas[1].dies_at = path
    sync.sync(1)
    sync.check()
    assert [server.up for server in sync.client.servers] == [True, False]
    replicas[1].dies_at, replicas[1].dead, replicas[1].active = None, False, False
    replicas[1].version = replicas[1].loaded = "default"
    assert {each.ids[0] for each in sample(sync.client)} == {1}
    assert [step_of(replica.version) for replica in replicas] == ["1", "1"]
    assert sync.fleet.payload.checksum == replicas[1].loaded


@pytest.mark.parametrize("path", ["/update_weights", "/finish_weight_update"])
def test_a_run_waits_for_its_only_engine(replicas, sync_of, path):
    """It gets the weights once more when it is back."""
    looks = []

    def answer(method, asked, body):
        if replicas[0].dead and asked == "/health":
            looks.append(asked)
            replicas[0].dead = len(looks) < 3 + len(http.DELAYS)
            replicas[0].dies_at, replicas[0].active = None, False
            return 503, {}
        return replicas[0].answer(method, asked, body)

    replicas[0].http._script = answer
    sync = sync_of(server_timeout=20.0)
    sync.sync(0)
    replicas[0].dies_at = path
    sync.sync(1)
    assert looks and step_of(replicas[0].version) == "1" and sync.fleet.payload.checksum == replicas[0].loaded
    assert sync.client.servers[0].up


def test_an_engine_that_died_after_rollouts_ends_no_run(replicas, sync_of):
    sync = sync_of(*replicas, server_timeout=20.0)
    sync.sync(0)
    replicas[1].dead = True
    sync.check()
    assert [server.up for server in sync.client.servers] == [True, False]


def test_an_engine_that_dies_while_it_is_restored_is_awaited(replicas, sync_of):
    sync = sync_of(*replicas, server_timeout=20.0)
    sync.sync(0)
    replicas[1].dies_at = "/init_weight_transfer_engine"
    with pytest.raises(RequestFailed) as caught:
        sync.restore(replicas[1].http.url)
    assert caught.value.unreachable


# Caches on the way


def test_no_cache_on_the_way_answers_for_the_server(replicas, sync_of, monkeypatch):
    """One that keeps whatever it was told, whatever the headers say. Nor does a proxy of the environment."""
    kept = {}
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    def answer(request):
        if request.path not in kept or request.method != "GET":
            url = replicas[0].http.url + request.path
            with httpx.Client(trust_env=False, verify=False, timeout=60) as client:
                found = client.request(request.method, url, content=request.content, headers=request.headers)
            kept[request.path] = Reply(found.status_code, found.content, len(found.content))
        return kept[request.path]

    cache = Loopback(answer)
    sync = sync_of(cache.url, server_timeout=20.0)
    asyncio.run(sync.client.connect(lambda words: None))
    for step in range(2):
        sync.sync(step)
        sync.check()
    replicas[0].dead = True
    sync.check()
    assert not sync.client.servers[0].up
    assert "no-store" in replicas[0].http.last_headers["Cache-Control"]
    cache.stop()


# What follows an update


@pytest.mark.parametrize("kind", [SafetensorsTransport, HttpTransport, DeltaTransport, LoraTransport])
def test_after_each_update_no_features_of_older_weights_stay(tokenizer, sync_of, tmp_path, model, kind):
    replica = Remote(tokenizer, None if kind in (SafetensorsTransport, LoraTransport) else tmp_path)
    if kind is LoraTransport:
        replica.model = build_model(tokenizer)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    sync = sync_of(replica, kind=kind, model=model, media={-1: 7})
    sync.sync(0)
    sync.sync(1)
    posts = [path for _, path, _ in replica.http.requests if path in ("/sleep", "/reset_encoder_cache", "/wake_up")]
    assert posts == ["/sleep", "/reset_encoder_cache", "/wake_up"] * 3  # of the proof, and two steps
    replica.close()
