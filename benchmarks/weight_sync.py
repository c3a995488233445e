"""
Weight sync by file, against a memory copy of the same bytes, into a real vLLM server on this machine's CPU.

1. The trainer's write into shared memory, against a copy into memory that is there already.
2. The server's load of that file, against what its CPU build cannot do without: one copy, and packing every matrix for
   oneDNN. Both are measured in the server's own worker process.
3. The calls around the load, one by one, each a request to the server.
4. The whole sync as the trainer waits for it, against the sum of what cannot be done without.

    python benchmarks/weight_sync.py [--quick] [--threads 1]

Trainer and server compute with `--threads` and, as `mt-grpo serve` decides it, a thread for each core but one. Beside
the time that passes stands that of the processors in trainer and worker, which other work on the machine disturbs
less. Needs `.venv-vllm` (`make server-cpu`). Prints a table and writes `benchmarks/results/weight_sync.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from common import build_tokenizer, write
from measure import ratio
from rich.console import Console
from rich.table import Table
from server import read, serve
from transformers import Qwen3Config, Qwen3ForCausalLM

from mt_grpo.rollout.engines.vllm import VLLMServerClient
from mt_grpo.servers.http import Server
from mt_grpo.weights.files import SafetensorsTransport
from mt_grpo.weights.sync import WeightSync

TARGET = 0.7
CALLS = {
    "/weight_info": "call: whose weights it holds",
    "/sleep": "call: pause",
    "/start_weight_update": "call: begin the update",
    "/init_weight_transfer_engine": "call: confirm the checksum",
    "/finish_weight_update": "call: end the update",
    "/reset_prefix_cache": "call: empty the prefix cache",
    "/wake_up": "call: resume",
}
REST = "the rest"
WARM = 3  # both weight files exist, and have been written and read, from the third sync on
Times = dict[str, list[tuple[float, float]]]
"""Of each part, in each repeat: seconds that passed, and seconds of processors."""


class Timed(WeightSync):
    """Keeps the times of its parts in `times`; `worker` is the process id of the server's worker."""

    times: Times
    worker: int

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for server in self.client.servers:
            server.get, server.post = self._timed(server.get), self._timed(server.post)  # type: ignore[method-assign]

    def _pack(self, step: int | None) -> None:
        with clock(self.times, "write"):
            super()._pack(step)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(path: str, *args: Any, **params: Any) -> Any:
            # reading the worker's time takes as long as a short call
            with clock(self.times, path, self.worker if path == "/update_weights" else None):
                return call(path, *args, **params)

        return timed


@contextlib.contextmanager
def clock(times: Times, name: str, process: int | None = None) -> Iterator[None]:
    """Appends the time its body takes, with the processor's time of a process, this one where none is given."""
    start, cpu = time.perf_counter(), processor_time(process)
    yield
    times[name].append((time.perf_counter() - start, processor_time(process) - cpu))


def processor_time(process: int | None) -> float:
    """Seconds that all threads of a process have computed."""
    if process is None:
        return time.process_time()
    tasks = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def build_model(layers: int) -> Qwen3ForCausalLM:
    """Layers of the shape of Qwen3-0.6B's with random weights, under the embedded model's tokenizer."""
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def run(model: Qwen3ForCausalLM, folder: str, url: str, repeats: int) -> tuple[Times, int]:
    """Times of each part, and the number of threads of the server's worker."""
    client = VLLMServerClient(url, build_tokenizer(), model=folder)
    asyncio.run(client.connect())
    sync = Timed(SafetensorsTransport, client, lambda: model, Accelerator(cpu=True), verify_every=1 << 30)
    tensors = [parameter.detach() for parameter in model.parameters()]
    copies = [tensor.clone() for tensor in tensors]
    control = Server(url)
    arguments = {"method": "bounds", "args": [str(Path(folder) / "model.safetensors")]}
    try:
        for step in range(WARM + repeats):
            (bounds,) = control.post("/collective_rpc", arguments)["results"]
            sync.worker = int(bounds["pid"])
            if step in (0, WARM):
                times = sync.times = defaultdict(list)
            for name in ("copy", "pack"):
                times[f"server {name}"].append((bounds[name], bounds[f"{name} cpu"]))
            with clock(times, "trainer copy"):
                for tensor, copy in zip(tensors, copies, strict=True):
                    copy.copy_(tensor)
            with clock(times, "whole"):
                sync.sync(step)
        sync.times = defaultdict(list)
        sync.verify()  # a ratio of weights that did not arrive is void
    finally:
        sync.close()
    times["load"] = times.pop("/update_weights")
    parts = zip(*(times[part] for part in ("write", "load", *CALLS)), strict=True)
    spent = [sum(wall for wall, _ in repeat) for repeat in parts]
    times["rest"] = [(whole - known, 0.0) for (whole, _), known in zip(times["whole"], spent, strict=True)]
    both = zip(times["whole"], times["load"], strict=True)
    times["whole"] = [(wall, trainer + worker) for (wall, trainer), (_, worker) in both]
    return times, int(bounds["threads"])


def table(times: Times, size: int) -> list[dict[str, object]]:
    """A row for each part; its bound is the sum of other parts."""
    packing = ["server copy", "server pack"]
    rows = []
    for part, label, bound, target in (
        ("trainer copy", "memory copy, in the trainer", None, None),
        ("write", "trainer: write into shared memory", ["trainer copy"], TARGET),
        ("server copy", "memory copy, in the server", None, None),
        ("server pack", "packing for oneDNN, in the server", None, None),
        ("load", "server: load the file (a copy and packing)", packing, TARGET),
        *((path, label, None, None) for path, label in CALLS.items()),
        ("rest", REST, None, None),
        ("whole", "whole sync (two copies and packing)", ["trainer copy", *packing], TARGET),
        ("whole", "whole sync (of one copy)", ["trainer copy"], None),
    ):
        row: dict[str, object] = {"part": label, "bytes": size}
        for index, kind in enumerate(("wall", "cpu")):
            row[kind] = [repeat[index] for repeat in times[part]]
            if bound is not None:
                repeats = zip(*(times[name] for name in bound), strict=True)
                limit = [sum(repeat[index] for repeat in parts) for parts in repeats]
                row[f"{kind} ratio"] = ratio({"bound": limit, "part": row[kind]}, "bound", "part")
        rows.append(row | ({} if target is None else {"target": target}))
    return rows


def show(rows: list[dict[str, object]], title: str) -> None:
    """Milliseconds, bytes a second of processor's time, and the share of the bound."""
    printed = Table(title=title)
    for column in (
        "",
        "wall, ms (minimum)",
        "CPU, ms",
        "GB/s of CPU",
        "bound / CPU",
        "bound / wall (of minima)",
        "target",
    ):
        printed.add_column(column, justify="right" if column else "left")
    for row in rows:
        wall, cpu = (statistics.median(row[kind]) for kind in ("wall", "cpu"))
        cells = [f"{wall * 1e3:.1f} ({min(row['wall']) * 1e3:.1f})"]
        waits = row["part"] in (*CALLS.values(), REST)  # for the server's answer
        cells += ["", ""] if waits else [f"{cpu * 1e3:.1f}", f"{row['bytes'] / cpu / 1e9:.2f}"]
        if "wall ratio" in row:
            of_wall = row["wall ratio"]
            cells.append(f"{row['cpu ratio']['median']:.2f}")
            cells.append(f"{of_wall['median']:.2f} ({of_wall['minimum']:.2f})")
            cells.append(f">= {row['target']}" if "target" in row else "")
        printed.add_row(row["part"], *cells)
    Console(width=150).print(printed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model; nothing is written")
    parser.add_argument("--threads", type=int, default=1, help="of the trainer")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    layers, repeats = (1, 1) if args.quick else (6, 9)
    model = build_model(layers)
    size = sum(parameter.nbytes for parameter in model.parameters())
    # where the server finds its extension, beside what it finds already
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
        recipe = read(folder, "--vllm_max_model_length", "512")
        with serve(recipe, "--worker-extension-cls", "server_bounds.Bounds", guard="server_bounds.BoundsGuard") as url:
            times, threads = run(model, folder, url, repeats)
    rows = table(times, size)
    show(rows, f"Weight sync of {size / 1e6:.0f} MB, {args.threads} thread(s) in the trainer, {threads} in the server")
    if not args.quick:
        settings = {"bytes": size, "layers": layers, "repeats": repeats, "seed": 0}
        write("weight_sync", settings | {"threads": args.threads, "server_threads": threads}, rows)


if __name__ == "__main__":
    main()
