"""
What `tool_processes` gains where a tool computes in Python: the time of 24 conversations of two calls of about 40 ms
each, and how late the event loop fires a timer meanwhile, with calls in threads and in processes.

    python benchmarks/tool_processes.py [--quick]

Sampling is scripted and takes no time. The two ways take turns. Writes `benchmarks/results/tool_processes.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from statistics import median

import numpy as np
from common import build_tokenizer, write

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rollout import RolloutRequest, RolloutRunner, SamplingParams
from mt_grpo.rollout.engines import ScriptedEngine
from mt_grpo.tools import in_processes

CALL = '<reasoning>count</reasoning>\n<tool>{"name": "compute", "args": {"steps": %d}}</tool>'
SECONDS = 0.04


def compute(steps: int) -> str:
    """
    Adds numbers.

    Args:
        steps: How many.
    """
    return str(sum(number % 7 for number in range(steps)))


def measure(env: MultiTurnToolEnv, tokenizer, conversations: int, steps: int) -> tuple[float, float]:
    """Seconds of all conversations, and the 99th percentile of how late a timer fires meanwhile."""
    engine = ScriptedEngine(tokenizer, [CALL % steps, CALL % steps, "<answer>done</answer>"])
    requests = [RolloutRequest("Count.", f"{number}") for number in range(conversations)]
    late = []

    async def both() -> float:
        began = time.perf_counter()
        rollouts = asyncio.ensure_future(RolloutRunner(env, engine).run(requests, SamplingParams()))
        while not rollouts.done():
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            late.append(time.perf_counter() - due)
        for trajectory in await rollouts:
            assert [call.error for turn in trajectory.turns for call in turn.tool_calls] == [None, None]
        return time.perf_counter() - began

    return asyncio.run(both()), float(np.percentile(late, 99))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repeat of few conversations, one process; no result")
    parser.add_argument("--processes", type=int, default=2, help="as `tool_processes` (2)")
    options = parser.parse_args()
    conversations, repeats, processes = (4, 1, 1) if options.quick else (24, 7, options.processes)
    tokenizer = build_tokenizer()
    began = time.perf_counter()
    compute(1_000_000)
    steps = round(1_000_000 * SECONDS / (time.perf_counter() - began))
    envs = {
        "threads": MultiTurnToolEnv([compute]),
        "processes": MultiTurnToolEnv(in_processes([compute], processes)),
    }
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in envs}
    for _ in range(repeats):
        for way, env in envs.items():
            found[way].append(measure(env, tokenizer, conversations, steps))
    for way, values in found.items():
        print(
            f"{way}: {median(s for s, _ in values):.2f} s, timers late by {1e3 * median(s for _, s in values):.1f} ms"
        )
    ratios = sorted(one / other for (one, _), (other, _) in zip(*found.values(), strict=True))
    print(f"threads / processes: {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    if not options.quick:
        settings = {"conversations": conversations, "processes": options.processes, "steps": steps}
        write("tool_processes", settings, [{"way": way, "values": values} for way, values in found.items()])


if __name__ == "__main__":
    main()
