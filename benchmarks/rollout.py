"""
Rollouts whose engine and tools take scripted times: what the host adds to them.

1. Wall time of 256 conversations over the longest one's own time in engine and tools. Tools take log-normal times
   (median 50 ms, sigma 1.5, four calls a conversation); the engine answers at once, so it hides nothing.
2. Host time of a turn (25 tokens sampled, a reply of 22), late over early in a conversation, and absolute. CPU time of
   the process, which does not depend on what else the machine does; wall time beside it.
3. Event-loop lag from the first request on, of 256 conversations with prompts of 32,768 tokens (groups of 8), each
   finished one checked as in training: with an engine of log-normal times (median 1 s, sigma 0.5), and with the vLLM
   client against an HTTP server of such times in another process. Lag is how late a timer due at any millisecond
   fires.
4. The same conversations through TRL's own tool loop: its time over ours, in one run, for equal tokens and masks. TRL
   runs the tools of one conversation after another, so this is 32 conversations and a median of 10 ms.

    python benchmarks/rollout.py [--quick]

Prints a table and writes `benchmarks/results/rollout.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
from common import build_tokenizer, write
from rich.console import Console
from rich.table import Table
from rollout_trl import GROUP, compare
from upstream import upstream

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rollout import Engine, RolloutRequest, RolloutRunner, Sample, SamplingParams
from mt_grpo.rollout.engines.vllm import VLLMServerClient

CALL = '<reasoning>look</reasoning>\n<tool>{"name": "wait", "args": {"seconds": %.4f}}</tool>'
SIGMA = 1.5
LATENCY = 1.0  # seconds of a request, the median: 256 conversations send 7 million prompt tokens a second
TURNS = 4
UNBOUNDED = 1 << 20


async def wait(seconds: float):  # no `-> str`: TRL would show it to the model
    """
    Waits.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "waited until the end"


class TimedEngine:
    """Returns ids that lie ready, after a while, and keeps nothing."""

    context_length = UNBOUNDED

    def __init__(self, tokenizer, times: np.ndarray, latency: Callable[[], float] = lambda: 0.0) -> None:
        self.tokenizer = tokenizer
        self._actions = [[tokenizer.encode(CALL % seconds) for seconds in row] for row in times]
        self._answer = tokenizer.encode("<answer>done</answer>")
        self._latency = latency
        self._turns: Counter[str] = Counter()
        self.stamps: list[tuple[float, float]] = []
        """Wall and CPU seconds at which requests came."""

    async def generate(self, context: list[int], sampling: SamplingParams, session: str) -> Sample:
        self.stamps.append((time.perf_counter(), time.process_time()))
        turn, actions = self._turns[session], self._actions[int(session)]
        self._turns[session] += 1
        if seconds := self._latency():
            await asyncio.sleep(seconds)
        ids = actions[turn] if turn < len(actions) else self._answer
        return Sample(ids, [-0.1] * len(ids))

    def release(self, session: str) -> None:
        pass

    async def close(self) -> None:
        pass


def tool_times(conversations: int, seed: int, median: float) -> np.ndarray:
    """Seconds of each tool call, shape (conversations, turns)."""
    return np.random.default_rng(seed).lognormal(np.log(median), SIGMA, (conversations, TURNS))


def requests(conversations: int, prompt: str = "Wait") -> list[RolloutRequest]:
    return [RolloutRequest(f"{prompt} {index // GROUP}.", f"{index:06d}") for index in range(conversations)]


def wall_over_longest(tokenizer, conversations: int, seed: int) -> float:
    """Wall time of all conversations at once, over the scripted time of the longest."""
    times = tool_times(conversations, seed, 0.05)
    runner = RolloutRunner(MultiTurnToolEnv([wait], max_steps=TURNS), TimedEngine(tokenizer, times))
    start = time.perf_counter()
    asyncio.run(runner.run(requests(conversations), SamplingParams()))
    return (time.perf_counter() - start) / times.round(4).sum(axis=1).max()


def host_time_a_turn(tokenizer, turns: int) -> np.ndarray:
    """Wall and CPU seconds of each turn of one conversation whose engine and tool take none, shape (turns, 2)."""

    async def wait(seconds: float):
        """
        Answers at once.

        Args:
            seconds: Anything.
        """
        return "the passage about Lima"

    engine = TimedEngine(tokenizer, np.ones((1, turns)))
    runner = RolloutRunner(MultiTurnToolEnv([wait], max_steps=turns), engine)
    asyncio.run(runner.run(requests(1), SamplingParams()))
    return np.diff(np.array(engine.stamps), axis=0)


def event_loop_lag(tokenizer, engine: Engine, conversations: int, context: int) -> tuple[float, float]:
    """
    99th percentile, in seconds, of how late a timer fires that is due at any millisecond: by the clock, and by the CPU
    time that the loop's thread spent on other things, which the load of the machine does not change.
    """
    text = tokenizer.decode(tokenizer.encode("What is the capital of Peru? " * (context // 8))[:context])
    runner = RolloutRunner(MultiTurnToolEnv([wait], max_steps=TURNS), engine, sanity_check_mode="strict")
    lags: tuple[list[float], list[float]] = ([], [])
    gc.collect()  # what an earlier run has left would be collected as this one begins

    async def measure() -> None:
        rollouts = asyncio.ensure_future(runner.run(requests(conversations, text), SamplingParams(max_tokens=100)))
        due = time.perf_counter()
        while not rollouts.done():
            used = time.thread_time()
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            late, used = time.perf_counter() - due, time.thread_time() - used
            due += 0.001
            for lag, values in zip((late, used), lags, strict=True):
                values.append(lag)
                values.extend(np.arange(lag - 0.001, 0.0, -0.001))  # timers that were due while this one was late
            due = max(due, time.perf_counter())
        await rollouts

    asyncio.run(measure())
    return tuple(float(np.percentile(values, 99)) for values in lags)


def lag_with_engine(tokenizer, conversations: int, context: int, seed: int) -> tuple[float, float]:
    rng = np.random.default_rng(seed)
    times = tool_times(conversations, seed, 0.05)
    engine = TimedEngine(tokenizer, times, lambda: float(rng.lognormal(np.log(LATENCY), 0.5)))
    return event_loop_lag(tokenizer, engine, conversations, context)


def lag_with_client(tokenizer, conversations: int, context: int) -> tuple[float, float]:
    ids = tokenizer.encode(CALL % 0.05)
    logprobs = {"tokens": [f"token_id:{token}" for token in ids], "token_logprobs": [-0.1] * len(ids)}
    answer = {"choices": [{"finish_reason": "stop", "logprobs": logprobs}], "system_fingerprint": "upstream"}
    with upstream(json.dumps(answer).encode(), LATENCY, 0.5) as url:
        client = VLLMServerClient(url, tokenizer)
        client.context_length = UNBOUNDED  # `connect` would ask the server for it
        return event_loop_lag(tokenizer, client, conversations, context)


def report(rows: list[tuple[str, str, list[float]]], settings: dict[str, object]) -> None:
    table = Table(title="rollout")
    for column in ("", "target", "median", "min", "max", "repeats"):
        table.add_column(column, justify="right" if column else "left")
    for label, target, values in rows:
        numbers = [f"{value:.3f}" for value in (statistics.median(values), min(values), max(values))]
        table.add_row(label, target, *numbers, str(len(values)))
    Console(width=110).print(table)
    if not settings["quick"]:
        content = [{"label": label, "target": target, "values": values} for label, target, values in rows]
        write("rollout", settings, content)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="smaller sizes, to see that it runs")
    quick = parser.parse_args().quick
    tokenizer = build_tokenizer()
    conversations, context, repeats = (16, 1024, 1) if quick else (256, 32768, 5)
    host = [host_time_a_turn(tokenizer, 136) for _ in range(3 * repeats + 1)][1:]  # the first one warms up
    early, late = (
        np.array([np.median(times[turns], axis=0) for times in host]) for turns in (slice(2, 10), slice(124, 132))
    )
    walls = [wall_over_longest(tokenizer, conversations, seed) for seed in range(repeats)]
    scripted = 1e3 * np.array(
        [lag_with_engine(tokenizer, conversations, context, seed) for seed in range(min(3, repeats))]
    )
    client = 1e3 * np.array([lag_with_client(tokenizer, conversations, context) for _ in range(min(3, repeats))])
    members = 8 if quick else 32
    long = compare(wait, [tool_times(members, seed, 0.01) for seed in range(min(3, repeats) + 1)])
    short = long if quick else compare(wait, [np.full((members, 1), 0.05)] * (repeats + 1))
    rows = [
        ("wall / longest conversation", "<= 1.05", walls),
        ("host time of a turn at turn 128, µs CPU", "<= 400", list(late[:, 1] * 1e6)),
        ("host time of a turn at turn 128, µs by the clock", "<= 400", list(late[:, 0] * 1e6)),
        ("host time, turn 128 / turn 4, CPU", "<= 1.1", list(late[:, 1] / early[:, 1])),
        ("event-loop lag p99, scripted engine, ms CPU", "<= 5", list(scripted[:, 1])),
        ("event-loop lag p99, scripted engine, ms by the clock", "<= 5", list(scripted[:, 0])),
        ("event-loop lag p99, client over HTTP, ms CPU", "<= 5", list(client[:, 1])),
        ("event-loop lag p99, client over HTTP, ms by the clock", "<= 5", list(client[:, 0])),
        (f"rollouts, TRL / ours, {members} x {TURNS} log-normal tools", "", long["rollouts"]),
        (f"rollouts, TRL / ours, {members} x one 50 ms tool", ">= 10", short["rollouts"]),
        (f"whole step, TRL / ours, {members} x one 50 ms tool", ">= 10", short["step"]),
    ]
    report(rows, {"conversations": conversations, "context": context, "quick": quick})


if __name__ == "__main__":
    main()
