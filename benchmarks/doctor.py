"""
What `mt-grpo doctor` plans beside what torch, a real vLLM server and a run report: states of training, tokens of a
server's cache, the highest memory of a micro-batch, seconds of a step of the quickstart.

    python benchmarks/doctor.py              # needs `.venv-vllm`
    python benchmarks/doctor.py --quick      # the embedded model, without a server and without a run
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from common import build_tokenizer, write
from transformers import AutoModelForCausalLM, Qwen2Config

from mt_grpo.cli import main as mt_grpo
from mt_grpo.data import embedded
from mt_grpo.doctor.memory import COPIES, Precision, Shape

ROOT = Path(__file__).parent.parent
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")
EMBEDDED = str(Path(embedded.__file__).parent / "model")
TOLERANCE = {"states": 0.05, "cache": 0.05, "micro-batch": 1.0, "step": 1.0}
"""Relative differences that are allowed: twice as much, or half, for what is an estimate."""
STEPS = 6


def half_billion() -> Qwen2Config:
    """The shape of Qwen2.5-0.5B."""
    return Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def row(kind: str, what: str, planned: float, measured: float) -> dict[str, Any]:
    """Prints and returns one comparison."""
    print(f"{kind:12} {what:45} planned {planned:16,.2f}  measured {measured:16,.2f}  × {planned / measured:.2f}")
    return {"kind": kind, "what": what, "planned": planned, "measured": measured, "ratio of plan": planned / measured}


def compare_states(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Weights, gradients and moments after a real step of AdamW."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.ones(1, 8, dtype=torch.long)).logits.float().mean().backward()
    optimizer.step()
    tensors = [*model.parameters(), *(one.grad for one in model.parameters())]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    measured = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    size = dtype.itemsize
    planned = Shape.of(model.config).states(Precision(size, size), COPIES, 1)
    return row("states", f"{label(name)}, {str(dtype).removeprefix('torch.')}", planned, measured)


def label(name: str) -> str:
    return "embedded" if name == EMBEDDED else "random, 0.5 billion"


def compare_cache(name: str, dtype: str) -> dict[str, Any]:
    """Tokens of the cache that a real server makes in one GiB."""
    from server import block_size, read, serve
    from support.servers import get

    config = AutoModelForCausalLM.from_pretrained(name).config
    with serve(read(name, "--dtype", dtype)) as url:
        blocks = int(re.search(r'cache_config_info\{[^}]*num_gpu_blocks="(\d+)"', get(url, "/metrics").text)[1])
        measured = blocks * block_size(url)
    planned = 2**30 / Shape.of(config).kv_bytes(getattr(torch, dtype).itemsize)
    return row("cache", f"{label(name)}, {dtype}, tokens in 1 GiB", planned, measured)


def doctor(*options: str) -> dict[str, Any]:
    """The plan that the command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        mt_grpo(["doctor", QUICKSTART, "--json", *options])
    return json.loads(printed.getvalue())["plan"]


def compare_probe(*options: str) -> dict[str, Any]:
    """The highest memory of a micro-batch on this CPU."""
    plan = doctor("--probe", "--output_dir", "/nonexistent-run", *options)
    planned = plan["training"]["bytes of activations"] + plan["training"]["bytes of logits"]
    return row("micro-batch", "quickstart, bytes beside the states", planned, plan["probe"]["bytes"])


def train(folder: str, steps: int) -> float:
    """Runs the quickstart without evaluations; returns the seconds of CPU that it took."""
    command = [sys.executable, "-m", "mt_grpo", "train", QUICKSTART, "--max_steps", str(steps), "--do_eval", "false"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*command, "--output_dir", folder], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compare_steps() -> Iterator[dict[str, Any]]:
    """
    Seconds of a step of the quickstart: without metrics, held against the seconds of one core, since other work on the
    machine does not count in these; and with the metrics of the run's first half, against its second half.
    """
    with tempfile.TemporaryDirectory() as folder:
        run, one, half, none = (str(Path(folder, name)) for name in ("run", "one", "half", "none"))
        busy = (train(run, STEPS) - train(one, 1)) / (STEPS - 1)
        yield row("step", "quickstart, uncalibrated", doctor("--output_dir", none)["step"]["seconds"], busy)
        lines = Path(run, "metrics.jsonl").read_text().splitlines()[:STEPS]
        Path(half).mkdir()
        Path(half, "metrics.jsonl").write_text("\n".join(lines[: STEPS // 2]))
        measured = statistics.median(json.loads(line)["step_time"] for line in lines[STEPS // 2 :])
        calibrated = doctor("--output_dir", none, "--calibrate", half)["step"]["seconds"]
        yield row("step", "quickstart, calibrated with its first half", calibrated, measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    rows = [compare_states(EMBEDDED, torch.float32)]
    if quick:
        rows.append(compare_probe("--per_device_train_batch_size", "8"))
    else:
        rows.append(compare_probe())
        with tempfile.TemporaryDirectory() as folder:
            build_tokenizer().save_pretrained(folder)
            AutoModelForCausalLM.from_config(half_billion(), dtype=torch.bfloat16).save_pretrained(folder)
            rows += [compare_states(folder, dtype) for dtype in (torch.bfloat16, torch.float32)]
            rows += [compare_cache(EMBEDDED, "float32"), compare_cache(folder, "bfloat16")]
        rows += compare_steps()
        write("doctor", {"threads": torch.get_num_threads(), "steps": STEPS}, rows)
    for one in rows:
        far = max(one["ratio of plan"], 1 / one["ratio of plan"]) - 1
        if far > TOLERANCE[one["kind"]]:
            sys.exit(
                f"{one['kind']} of {one['what']}: the plan is {far:.0%} off, more than {TOLERANCE[one['kind']]:.0%}."
            )


if __name__ == "__main__":
    main()
