"""One sync from each of two processes to two servers, then rollouts of rank 1 only: `ranks_sync FOLDER URL URL`."""

import asyncio
import json
import sys
from pathlib import Path

from accelerate import Accelerator

from mt_grpo.app.train import leave_group
from mt_grpo.rollout import SamplingParams
from mt_grpo.rollout.engines.vllm import VLLMServerClient
from mt_grpo.weights.files import SafetensorsTransport
from mt_grpo.weights.sync import WeightSync
from support.models import build_model, build_tokenizer


async def sample(client: VLLMServerClient) -> list[tuple[int, int | None]]:
    """One token of each of some conversations, until every server has been asked: (token, version)."""
    samples, number = [], 0
    while not all(server.up for server in client.servers) or number < 16:
        taken = await client.generate([number % 50, 1], SamplingParams(max_tokens=1), str(number))
        samples.append((taken.ids[0], taken.weight_version))
        number += 1
    await client.close()
    return samples


def failure_of(sync: WeightSync) -> str:
    """What a process ends with where a sync meets a defect in the main process."""

    def broken(*_: object) -> None:
        raise KeyError("a defect")

    sync.transport.deliver = broken
    try:
        sync.sync(2)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run(folder: str, *urls: str) -> Accelerator:
    accelerator, tokenizer = Accelerator(cpu=True), build_tokenizer()
    model, client = build_model(tokenizer), VLLMServerClient(list(urls), tokenizer)
    asyncio.run(client.connect())
    sync = WeightSync(SafetensorsTransport, client, lambda: model, accelerator, folder=folder)
    sync.sync(1)
    seen = {"up": [server.up for server in client.servers]}
    if not accelerator.is_main_process:
        seen["sampled"] = asyncio.run(asyncio.wait_for(sample(client), 60))
        seen["up_afterwards"] = [server.up for server in client.servers]
    seen["failure"] = failure_of(sync)
    (Path(folder) / f"rank{accelerator.process_index}.json").write_text(json.dumps(seen))
    accelerator.wait_for_everyone()
    sync.close()
    return accelerator


if __name__ == "__main__":
    leave_group(run(*sys.argv[1:]))
