"""
Rollouts against a scripted engine: what the host adds to the tools and the engine.

1. Wall time of 256 conversations whose tool calls take log-normal times (sigma 1.5), over the longest single one.
2. Host time of a turn, late over early in a conversation of 128 turns, and absolute.
3. Event-loop lag while 256 conversations of 32k-token contexts are under way.

    python benchmarks/rollout.py [--quick]

Prints a table and writes `benchmarks/results/rollout.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import numpy as np
from common import build_tokenizer, report

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rollout import RolloutRequest, RolloutRunner, Sampling, ScriptedEngine

CALL = '<tool>{"name": "wait", "args": {"seconds": SECONDS}}</tool>'
ANSWER = "<answer>done</answer>"


async def wait(seconds: float) -> str:
    """
    Waits.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "waited"


def tool_times(conversations: int, turns: int, seed: int) -> np.ndarray:
    """Seconds of each tool call, shape (conversations, turns): log-normal, median 20 ms."""
    return np.random.default_rng(seed).lognormal(np.log(0.02), 1.5, (conversations, turns))


def wall_over_longest(tokenizer, conversations: int, turns: int, seed: int) -> tuple[float, float]:
    """(wall seconds of all conversations at once, seconds of the one that takes longest alone)."""
    times = tool_times(conversations, turns, seed)

    def script(session: str, turn: int) -> str:
        return CALL.replace("SECONDS", f"{times[int(session), turn]:.4f}") if turn < turns else ANSWER

    def run(sessions: list[int]) -> float:
        runner = RolloutRunner(MultiTurnToolEnv([wait], max_steps=turns), ScriptedEngine(tokenizer, script))
        requests = [RolloutRequest("Wait.", f"{session:06d}") for session in sessions]
        start = time.perf_counter()
        asyncio.run(runner.run(requests, Sampling()))
        return time.perf_counter() - start

    return run(list(range(conversations))), run([int(times.sum(axis=1).argmax())])


def host_time_a_turn(tokenizer, turns: int) -> list[float]:
    """Seconds the host spends on each turn of one long conversation, engine and tool taking none."""
    stamps: list[float] = []

    async def nothing(query: str) -> str:
        """
        Answers at once.

        Args:
            query: Anything.
        """
        return f"the passage about {query}"

    def script(session: str, turn: int) -> str:
        stamps.append(time.perf_counter())
        call = '<reasoning>look</reasoning>\n<tool>{"name": "nothing", "args": {"query": "Lima"}}</tool>'
        return call if turn < turns else ANSWER

    engine = ScriptedEngine(tokenizer, script, context_length=1 << 20)
    engine.requests = _Forgetful()
    runner = RolloutRunner(MultiTurnToolEnv([nothing], max_steps=turns), engine)
    asyncio.run(runner.run([RolloutRequest("Go.", "000000")], Sampling()))
    return list(np.diff(stamps))


class _Forgetful(list):
    """Keeps nothing: the engine's record of contexts is not part of what is measured."""

    def append(self, item: object) -> None:
        pass


def event_loop_lag(tokenizer, conversations: int, context: int, turns: int) -> list[float]:
    """Seconds by which a 1 ms timer fires late, sampled while conversations with long contexts run."""
    long = [7] * context

    def script(session: str, turn: int) -> str:
        return CALL.replace("SECONDS", "0.05") if turn < turns else ANSWER

    engine = ScriptedEngine(tokenizer, script, latency=lambda session, turn: 0.2 + int(session) / 1000)
    engine.context_length = 1 << 20
    engine.requests = _Forgetful()
    runner = RolloutRunner(MultiTurnToolEnv([wait], max_steps=turns), engine)
    runner.renderer.prompt_ids = lambda messages: list(long)
    lags: list[float] = []

    async def measure() -> None:
        requests = [RolloutRequest("Wait.", f"{session:06d}") for session in range(conversations)]
        rollouts = asyncio.ensure_future(runner.run(requests, Sampling()))
        await asyncio.sleep(0.15)  # every prompt is in place
        while not rollouts.done():
            start = time.perf_counter()
            await asyncio.sleep(0.001)
            lags.append(time.perf_counter() - start - 0.001)
        await rollouts

    asyncio.run(measure())
    return lags


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="smaller sizes, to see that it runs")
    quick = parser.parse_args().quick
    tokenizer = build_tokenizer()
    conversations, repeats = (16, 1) if quick else (256, 5)
    rows = {}
    walls = [wall_over_longest(tokenizer, conversations, 4, seed) for seed in range(repeats)]
    rows["wall / longest single conversation"] = [wall / longest for wall, longest in walls]
    turns = 16 if quick else 130
    host = [host_time_a_turn(tokenizer, turns) for _ in range(3 * repeats)]
    early = [statistics.median(times[3:7]) for times in host]
    late = [statistics.median(times[-4:]) for times in host]
    rows["host time, turn 128 / turn 4"] = [b / a for a, b in zip(early, late, strict=True)]
    rows["host time at turn 128, µs"] = [value * 1e6 for value in late]
    lags = [event_loop_lag(tokenizer, conversations, 1024 if quick else 32768, 3) for _ in range(repeats)]
    rows["event-loop lag p99, ms"] = [float(np.percentile(lag, 99)) * 1e3 for lag in lags]
    report("rollout", rows, {"conversations": conversations, "quick": quick})


if __name__ == "__main__":
    main()
