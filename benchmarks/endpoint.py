"""
Host time of a turn that is asked for over HTTP, beside one that is asked for in this process. The engine answers at
once, so nothing is hidden: conversations of 24 turns (25 tokens sampled, a reply of 22), one after another.

- in process: an environment that calls `policy.reply`;
- HTTP, client elsewhere: a program that posts with the standard library; its own time is not ours;
- HTTP, `openai` here: a function that awaits `AsyncOpenAI`, whose time counts;
- requests of 512 conversations at once that were lost, and their turns per second, with the client here.

CPU time of this process, which does not depend on what else the machine does; wall time beside it.

    python benchmarks/endpoint.py [--quick]

Prints a table and writes `benchmarks/results/endpoint.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import statistics
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import build_tokenizer, write
from rich.console import Console
from rich.table import Table

from mt_grpo.envs import Outcome
from mt_grpo.integrations.openai_api import AgentSource, Command
from mt_grpo.rollout import RolloutRequest, RolloutRunner, Sample, SamplingParams

WORDS = '<reasoning>look</reasoning>\n<tool>{"name": "wait", "args": {"seconds": 0.0500}}</tool>'
REPLY = "<result>waited until the end</result>"
TURNS = 24
AT_ONCE = 512


class Engine:
    """Returns ids that lie ready, and notes when requests came, in wall and CPU seconds."""

    context_length = 1 << 20

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._ids = tokenizer.encode(WORDS)
        self.stamps: dict[str, list[tuple[float, float]]] = {}
        self.requests: Counter[str] = Counter()

    async def generate(self, context: list[int], sampling: SamplingParams, session: str) -> Sample:
        self.stamps.setdefault(session, []).append((time.perf_counter(), time.process_time()))
        self.requests[session] += 1
        return Sample(list(self._ids), [-0.1] * len(self._ids))

    def release(self, session: str) -> None:
        pass

    async def close(self) -> None:
        pass


class InProcess:
    """The same loop as the agents', over the policy itself."""

    async def run(self, policy, row):
        messages = [{"role": "user", "content": row["prompt"]}]
        for _ in range(row["turns"]):
            turn = await policy.reply(messages)
            messages = [*messages, turn.message, {"role": "user", "content": row["reply"]}]
        return Outcome()

    async def close(self):
        pass


async def with_openai(row, client):
    completions = client.openai(max_retries=0).chat.completions
    messages = [{"role": "user", "content": row["prompt"]}]
    for _ in range(row["turns"]):
        answer = await completions.create(model="policy", messages=messages)
        said = {"role": "assistant", "content": answer.choices[0].message.content}
        messages += [said, {"role": "user", "content": row["reply"]}]


PROGRAM = Command(shlex.join([sys.executable, str(Path(__file__).parent / "agents" / "plain_http.py")]))
WAYS = {
    "in process": lambda row: InProcess(),
    "HTTP, client elsewhere": AgentSource(PROGRAM),
    "HTTP, openai here": AgentSource(with_openai),
}


def rollouts(tokenizer: Any, source: Any, number: int, turns: int, together: bool) -> tuple[Engine, list[Any]]:
    engine = Engine(tokenizer)
    runner = RolloutRunner(source, engine)
    row = {"turns": turns, "reply": REPLY}
    requests = [RolloutRequest("Wait a while.", f"{index:04d}", row) for index in range(number)]

    async def go() -> list[Any]:
        if together:
            return await runner.run(requests, SamplingParams())
        return [(await runner.run([request], SamplingParams()))[0] for request in requests]

    trajectories = asyncio.run(go())
    failed = [trajectory.error for trajectory in trajectories if trajectory.error is not None]
    if failed:
        raise RuntimeError(failed[0])
    return engine, trajectories


def measure(tokenizer: Any, source: Any, conversations: int, turns: int) -> dict[str, float]:
    """Median milliseconds of a turn: of the second quarter of a conversation and of the last, and of all."""
    engine, _ = rollouts(tokenizer, source, conversations, turns, together=False)
    gaps = [
        [tuple(1000 * (b - a) for a, b in zip(one, two, strict=True)) for one, two in pairwise(times)]
        for times in engine.stamps.values()
    ]
    quarter = len(gaps[0]) // 4

    def median(which: int, begin: int, end: int | None) -> float:
        return round(statistics.median(gap[which] for conversation in gaps for gap in conversation[begin:end]), 3)

    return {
        "cpu_ms": median(1, 1, None),
        "cpu_ms_early": median(1, 1, 1 + quarter),
        "cpu_ms_late": median(1, -quarter, None),
        "wall_ms": median(0, 1, None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few conversations; writes nothing")
    args = parser.parse_args()
    tokenizer = build_tokenizer()
    conversations, turns, at_once = (2, 8, 16) if args.quick else (20, TURNS, AT_ONCE)
    rows = {name: measure(tokenizer, source, conversations, turns) for name, source in WAYS.items()}
    start = time.perf_counter()
    engine, trajectories = rollouts(tokenizer, AgentSource(with_openai), at_once, 4, together=True)
    seconds = time.perf_counter() - start
    sampled = sum(len(trajectory.turns) for trajectory in trajectories)
    flood = {"conversations": at_once, "turns": sampled, "lost": 4 * at_once - sampled}
    flood["turns_per_second"] = round(sampled / seconds, 1)
    table = Table("a turn", "CPU ms", "early", "late", "wall ms")
    for name, row in rows.items():
        table.add_row(name, *(f"{value:.2f}" for value in row.values()))
    console = Console()
    console.print(table)
    added = rows["HTTP, client elsewhere"]["cpu_ms"] - rows["in process"]["cpu_ms"]
    console.print(f"HTTP adds {added:.2f} ms of host time to a turn (aim: at most 1.5 ms).")
    console.print(f"{at_once} conversations at once: {flood['lost']} of {4 * at_once} requests lost.")
    if not args.quick:
        settings = {"turns": turns, "conversations": conversations, "aim_ms": 1.5}
        write("endpoint", settings, rows, added_ms=round(added, 3), at_once=flood)


if __name__ == "__main__":
    main()
