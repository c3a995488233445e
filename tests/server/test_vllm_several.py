"""Two real servers of one run: one comes late, and one is killed in the middle of a batch."""

from __future__ import annotations

import asyncio
import signal

import pytest
import torch
from accelerate import Accelerator
from support.marks import needs_server
from support.models import build_model, build_tokenizer
from support.servers import START_LIMIT, RealServer

from mt_grpo.rollout import SamplingParams
from mt_grpo.rollout.engines.vllm.client import VLLMServerClient
from mt_grpo.weights.files import SafetensorsTransport
from mt_grpo.weights.sync import WeightSync

pytestmark = [needs_server, pytest.mark.server]
GROUPS, MEMBERS, TURNS = 4, 3, 3
SAMPLING = SamplingParams(max_tokens=60, seed=3)


@torch.no_grad()
def difference(model, context: list[int], sample) -> float:
    """The largest, between the log-probs that a sample came with and the trainer's."""
    logits = model(input_ids=torch.tensor([context + sample.ids])).logits[0, len(context) - 1 : -1].float()
    logprobs = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(sample.ids).unsqueeze(1))[:, 0]
    return float((logprobs - torch.tensor(sample.logprobs)).abs().max())


def test_a_late_server_takes_over_from_one_that_is_killed(tmp_path):
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, head_dim=32).eval()  # the smallest head that vLLM's CPU attention knows
    path = str(tmp_path / "model")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    first, late = (
        RealServer(path, tmp_path / f"{number}.log", "--vllm_max_model_length", "512") for number in range(2)
    )
    try:
        first.start()
        client = VLLMServerClient(
            [first.url, late.url], tokenizer, model=path, server_timeout=START_LIMIT, min_servers=1
        )
        asyncio.run(client.connect())
        sync = WeightSync(SafetensorsTransport, client, lambda: model, Accelerator(cpu=True), verify_every=1)
        sync.sync(0)
        late.start()
        up = client.servers

        async def hear():
            while not up[1].context_length:
                await client.generate([1, 2], SAMPLING, "listens")
            client.release("listens")
            await client.close()

        asyncio.run(asyncio.wait_for(hear(), START_LIMIT))
        assert not up[1].up  # its weights are not the run's yet
        sync.sync(1)
        assert up[0].up and up[1].up
        turns: list[tuple[str, list[int], object, str]] = []
        killed = asyncio.Event()

        async def converse(group: int, member: int) -> None:
            session, context = f"{group}-{member}", tokenizer.encode(f"user What is {group} about")
            for turn in range(TURNS):
                if turn == TURNS - 1:
                    await killed.wait()
                served = next((server.url for server in up if session in server.sessions), "")
                sample = await client.generate(context, SAMPLING, session)
                turns.append((session, context, sample, served))
                if len(turns) == GROUPS * MEMBERS * (TURNS - 1):
                    asyncio.get_running_loop().call_soon(kill)
                context = context + sample.ids + tokenizer.encode("about that")
            client.release(session)

        def kill() -> None:
            sticky.update({session: server.url for server in up for session in server.sessions})
            first.stop(signal.SIGKILL)
            killed.set()

        sticky: dict[str, str] = {}

        async def batch():
            await asyncio.gather(*(converse(group, member) for group in range(GROUPS) for member in range(MEMBERS)))
            await client.close()

        asyncio.run(asyncio.wait_for(batch(), START_LIMIT))
        assert len(turns) == GROUPS * MEMBERS * TURNS
        assert set(sticky.values()) == {first.url, late.url}
        for group in range(GROUPS):
            assert len({sticky[f"{group}-{member}"] for member in range(MEMBERS)}) == 1
        assert all(served in ("", sticky[session]) for session, _, _, served in turns)
        for _, context, sample, _ in turns:
            assert sample.weight_version == 1 and difference(model, context, sample) < 1e-4
        sync.close()
    finally:
        first.stop()
        late.stop()
