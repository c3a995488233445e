"""
What a second OpenEnv server gains where the environment computes: the time of 16 conversations of eight steps of about
40 ms each, on one server and on two.

    make bench-environments

Sampling is scripted and takes no time. Servers are real, each a process of its own. The two ways take turns. Writes
`benchmarks/results/environment_pool.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

from common import build_tokenizer, write

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.openenv_server import OpenEnvServer

from mt_grpo.integrations.openenv import OpenEnv, openenv_server
from mt_grpo.rollout import RolloutRequest, RolloutRunner, SamplingParams
from mt_grpo.rollout.engines import ScriptedEngine

CONVERSATIONS, STEPS, SECONDS = 16, 8, 0.04
TARGET = 1.8


def numbers_in(seconds: float) -> int:
    """How many numbers an environment adds in so many seconds."""
    began = time.process_time()
    sum(each % 7 for each in range(1_000_000))
    return round(1_000_000 * seconds / (time.process_time() - began))


def measure(env: OpenEnv, tokenizer, numbers: int) -> float:
    """Seconds of all conversations."""
    engine = ScriptedEngine(tokenizer, [*[f"work {numbers}<|im_end|>"] * STEPS, "bye<|im_end|>"])
    requests = [RolloutRequest("Work.", f"{number:03d}") for number in range(CONVERSATIONS)]
    began = time.perf_counter()
    done = asyncio.run(RolloutRunner(env, engine).run(requests, SamplingParams()))
    seconds = time.perf_counter() - began
    assert all(len(each.turns) == STEPS + 1 and not each.error for each in done), [each.error for each in done]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="times that each way is measured (7)")
    options = parser.parse_args()
    tokenizer, numbers = build_tokenizer(), numbers_in(SECONDS)
    servers = [OpenEnvServer(room=CONVERSATIONS) for _ in range(2)]
    ways = {
        name: openenv_server([each.url for each in some], action=lambda text: {"message": text})
        for name, some in {"one": servers[:1], "two": servers}.items()
    }
    for env in ways.values():
        measure(env, tokenizer, 1)  # imports, and the first connections
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for name, env in ways.items():
            seconds[name].append(measure(env, tokenizer, numbers))
    for server in servers:
        server.kill()
    ratios = [one / two for one, two in zip(seconds["one"], seconds["two"], strict=True)]
    for name, values in seconds.items():
        print(f"{name}: {median(values):.2f} s ({min(values):.2f} to {max(values):.2f})")
    print(f"one / two: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}); target: {TARGET} or more")
    write(
        "environment_pool",
        {"conversations": CONVERSATIONS, "steps": STEPS, "numbers": numbers, "openenv": version("openenv")},
        [
            {
                "servers": "two against one",
                "ratio": {"median": median(ratios), "minimum": min(ratios), "maximum": max(ratios)},
                "target": TARGET,
                "seconds": seconds,
            }
        ],
    )


if __name__ == "__main__":
    main()
