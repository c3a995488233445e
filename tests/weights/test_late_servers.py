"""Servers that come late, and addresses that do not lead to a server of their own each."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from peft import LoraConfig, get_peft_model
from support.loopback import ScriptedServer
from support.models import build_model
from support.replicas import step_of

from mt_grpo.errors import WeightSyncError
from mt_grpo.rollout import SamplingParams
from mt_grpo.rollout.engines.vllm.client import VLLMServerClient
from mt_grpo.weights.files import LoraTransport, SafetensorsTransport


@pytest.fixture
def late(tokenizer, replicas):
    """A run on the first server, whose second is up from a moment on."""
    client = VLLMServerClient([replica.http.url for replica in replicas], tokenizer, min_servers=1)
    replicas[1].http.stopped = True
    asyncio.run(client.connect(lambda words: None))
    return client


def sample(client, number: int = 6) -> list:
    async def go():
        taken = [await client.generate([one, 1], SamplingParams(max_tokens=1), str(one)) for one in range(number)]
        for one in range(number):
            client.release(str(one))
        await client.close()
        return taken

    return asyncio.run(go())


def hear(client, number: int = 1) -> None:
    """Rollouts during which a server is found to be up."""

    async def go():
        while not client.servers[number].context_length:
            await client.generate([1], SamplingParams(max_tokens=1), "one")
            await asyncio.sleep(0.01)
        await client.close()

    asyncio.run(asyncio.wait_for(go(), 60))


@pytest.mark.parametrize("kind", [SafetensorsTransport, LoraTransport])
def test_a_late_server_is_proved_before_it_samples(tokenizer, replicas, late, sync_of, kind):
    model = build_model(tokenizer)
    if kind is LoraTransport:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
        for replica in replicas:
            replica.model = build_model(tokenizer)
    sync = sync_of(kind=kind, client=late, model=model)
    sync.sync(0)
    replicas[1].http.stopped = False
    hear(late)
    assert not replicas[1].http.asked("/v1/completions") and not late.servers[1].up
    sync.sync(1)
    assert late.servers[1].up and [step_of(replica.version) for replica in replicas] == ["1", "1"]
    scored = replicas[1].http.asked("/v1/completions")
    assert len(scored) == 2 and all("prompt_logprobs" in body for body in scored)  # changed weights, and true ones
    taken = sample(late)
    assert {one.ids[0] for one in taken} == {1}
    assert all(len(replica.http.asked("/v1/completions")) > 2 for replica in replicas)


@pytest.mark.parametrize("fault", ["deaf", "blind"])
def test_a_late_server_that_takes_no_weights_is_left_out(tokenizer, replicas, late, sync_of, caplog, fault):
    replicas[1].model = build_model(tokenizer)  # what the trainer holds: equal answers would prove nothing
    sync = sync_of(client=late)
    sync.sync(0)
    replicas[1].http.stopped = False
    setattr(replicas[1], fault, True)
    replicas[1].agrees = fault == "deaf"
    hear(late)
    sync.sync(1)
    assert not late.servers[1].up
    assert f"The run goes on without the vLLM server at {replicas[1].http.url}" in caplog.text
    assert {one.ids[0] for one in sample(late)} == {1}


def test_one_server_under_two_addresses_is_refused(replicas, sync_of):
    other = ScriptedServer(replicas[0].answer)
    with pytest.raises(WeightSyncError, match=f"{other.url} (and .* )?lead to the same vLLM server"):
        sync_of(replicas[0], other.url).sync(0)
    other.stop()


def test_what_spreads_requests_over_servers_is_refused(replicas, sync_of):
    turns = itertools.cycle(replicas)
    proxy = ScriptedServer(lambda *request: next(turns).answer(*request))
    with pytest.raises(WeightSyncError, match=f"What answers at {proxy.url} is several servers in turn"):
        sync_of(proxy.url).sync(0)
    assert not any(replica.updates for replica in replicas)
    proxy.stop()
