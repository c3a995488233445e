"""A scripted vLLM server, and clients of it."""

import asyncio

import pytest

from mt_grpo.rollout.engines import SamplingParams
from mt_grpo.rollout.engines.vllm import VLLMServerClient
from support.loopback import ScriptedServer

SAMPLING = SamplingParams(max_tokens=8, seed=3)


def completion(*ids: int, fingerprint: str = "one", reason: str = "stop") -> tuple[int, dict]:
    tokens = {"tokens": [f"token_id:{token}" for token in ids], "token_logprobs": [-0.5] * len(ids)}
    choice = {"logprobs": tokens, "finish_reason": reason}
    return 200, {"choices": [choice], "system_fingerprint": fingerprint}


def upstream(tokenizer, complete, *, version="7", model="base", port=0, **endpoints):
    """A healthy server: completions are of `complete(number, body)`, other paths' answers of `endpoints`."""
    numbers = iter(range(1000))

    def script(method, path, body):
        if path == "/v1/completions":
            return complete(next(numbers), body)
        if path in endpoints:
            answer = endpoints[path]
            return answer(body) if callable(answer) else answer
        config = {"model_config": {"logprobs_mode": "processed_logprobs"}}
        entry = {"id": model, "root": model, "max_model_len": 64}
        return {
            "/health": (200, ""),
            "/metrics": (404, {}),
            "/workers": (404, {"detail": "Not Found"}),
            "/version": (200, {"version": "0.31.0"}),
            "/v1/models": (200, {"data": [entry]}),
            "/server_info": (200, {"vllm_config": config}),
            "/weight_info": (200, {"weight_version": version() if callable(version) else version}),
            "/tokenize": (200, {"tokens": tokenizer.encode(body.get("prompt", ""), add_special_tokens=False)}),
        }[path]

    return ScriptedServer(script, port)


def client_of(tokenizer, *servers, **options):
    urls = [getattr(server, "url", server) for server in servers]
    return VLLMServerClient(urls, tokenizer, **{"server_timeout": 1.0, "request_timeout": 30.0, **options})


def play(client, scenario, connect=True):
    """Runs a scenario with a client, which is connected before it and closed after it."""

    async def go():
        try:
            if connect:
                await client.connect()
            return await scenario()
        finally:
            await client.close()

    return asyncio.run(asyncio.wait_for(go(), 60))


@pytest.fixture
def start(tokenizer):
    """Starts upstreams, which are closed after the test."""
    servers = []

    def begin(complete=lambda number, body: completion(5, 6), **options):
        servers.append(upstream(tokenizer, complete, **options))
        return servers[-1]

    yield begin
    for server in servers:
        server.stop()
