"""
How long a real server is paused for weights, by `weight_sync: http` against a file of its own machine.

    python benchmarks/weight_pause.py [--quick]

The server is the same for both, and so is the model, with layers of Qwen3-0.6B's shape. The pause is the time from the
call that pauses until the answer of the call that resumes. The two ways take turns, and the first two syncs of each
turn do not count: files and memory are used for the first time. Needs `.venv-vllm` (`make server-cpu`). Prints the
pauses and writes `benchmarks/results/weight_pause.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from typing import Any

import torch
from accelerate import Accelerator
from common import build_tokenizer, write
from server import read, serve
from transformers import Qwen3Config, Qwen3ForCausalLM

from mt_grpo.rollout.engines.vllm import VLLMServerClient
from mt_grpo.servers.http import Server
from mt_grpo.weights.files import SafetensorsTransport
from mt_grpo.weights.network import HttpTransport
from mt_grpo.weights.sync import WeightSync
from mt_grpo.weights.transport import Transport

TARGET = 1.2
WARM = 2


def pauses(kind: type[Transport], client: VLLMServerClient, model: Any, number: int) -> list[float]:
    """Seconds of so many pauses."""
    sync, found, begun = WeightSync(kind, client, lambda: model, Accelerator(cpu=True)), list[float](), 0.0
    post = Server.post

    def timed(self: Server, path: str, *args: Any, **params: Any) -> Any:
        nonlocal begun
        if path == "/sleep":
            begun = time.perf_counter()
        answer = post(self, path, *args, **params)
        if path == "/wake_up":
            found.append(time.perf_counter() - begun)
        return answer

    Server.post = timed  # type: ignore[method-assign]
    try:
        for step in range(WARM + number):
            sync.sync(step)
    finally:
        Server.post = post  # type: ignore[method-assign]
        sync.close()
    return found[-number:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model; nothing is written")
    quick = parser.parse_args().quick
    layers, rounds, number = (1, 1, 1) if quick else (8, 3, 5)
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
    config = Qwen3Config(vocab_size=len(tokenizer), head_dim=128, num_hidden_layers=layers, **sizes)
    config.tie_word_embeddings = True
    model = Qwen3ForCausalLM(config)
    size = 4 * sum(weight.numel() for weight in model.parameters())
    times: dict[str, list[float]] = {"file": [], "http": []}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        with serve(read(folder, "--vllm_max_model_length", "512")) as url:
            client = VLLMServerClient(url, tokenizer)
            asyncio.run(client.connect())
            for _ in range(rounds):
                times["file"] += pauses(SafetensorsTransport, client, model, number)
                times["http"] += pauses(HttpTransport, client, model, number)
    ratio = statistics.median(times["http"]) / statistics.median(times["file"])
    for way, seconds in times.items():
        print(f"{way}: {1e3 * statistics.median(seconds):.0f} ms in the median, {1e3 * min(seconds):.0f} at least")
    print(f"{size / 1e6:.0f} MB; http / file: {ratio:.2f}; target <= {TARGET}")
    if not quick:
        rows = [{"way": way, "seconds": seconds} for way, seconds in times.items()]
        total = {"part": "http / file", "values": [ratio], "target": f"<= {TARGET}"}
        write("weight_pause", {"bytes": size, "rounds": rounds, "repeats": number}, [total, *rows])


if __name__ == "__main__":
    main()
