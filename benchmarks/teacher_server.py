"""
How much of a teacher's reading on a server is hidden behind rollouts: conversations of eight turns whose tools take a
log-normal time, and a server that reads one of them after another, as one that is bound by prefill.

    python benchmarks/teacher_server.py [--quick]

The time of rollouts alone, of rollouts that are read as they end, and of rollouts that are read once all have ended,
with the same times of tools. Hidden is the share of the third's extra time that the second does not have. Sampling and
server are scripted.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import threading
import time
from typing import Any

from common import build_tokenizer, write

from mt_grpo.concurrency import ConcurrencyLimit, run
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rollout import RolloutRequest, RolloutRunner, SamplingParams
from mt_grpo.rollout.engines import ScriptedEngine
from mt_grpo.training.teacher import ServerTeacher
from mt_grpo.trajectory import Trajectory

CALL = '<tool>{"name": "work", "args": {"number": %d}}</tool>'
TURNS, SIGMA = 8, 0.8


class Reader(ServerTeacher):
    """A server that takes so long for a conversation, one after another."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._one, self._top = seconds, threading.Lock(), 0
        self._places, self._asked = ConcurrencyLimit(32), {}
        self._first_probe = self._probe()

    def _ask(self, ids: list[int]) -> list[dict[int, float]]:
        with self._one:
            time.sleep(self._seconds)
        return [{token: -1.0} for token in ids[1:]]


def measure(way: str, conversations: int, tool: float, read: float, seed: int) -> float:
    """Seconds of a batch, read in one of the ways."""

    async def work(number: int) -> str:
        """
        Works.

        Args:
            number: Which work.
        """
        await asyncio.sleep(tool * random.Random(f"{seed}/{number}").lognormvariate(-(SIGMA**2) / 2, SIGMA))
        return "done"

    def script(session: str, turn: int) -> str:
        return CALL % (int(session) * TURNS + turn) if turn < TURNS - 1 else "<answer>done</answer>"

    env = MultiTurnToolEnv([work], protocol="learnt_tags", max_steps=TURNS)
    engine = ScriptedEngine(build_tokenizer(), script)
    teacher, ended = Reader(read), []
    take: Any = teacher.as_they_end(ended.append) if way == "as they end" else ended.append
    requests = [RolloutRequest(f"Work {number}.", f"{number}") for number in range(conversations)]
    began = time.perf_counter()
    rollouts: list[Trajectory] = run(RolloutRunner(env, engine).run(requests, SamplingParams(), take))
    if way != "alone":
        found, _ = teacher.read([each.tree for each in rollouts])
        assert all(len(turns) == TURNS and all(map(all, turns)) for turns in found)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small, to see that it runs; nothing is written")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    conversations, tool, read, repeats = (8, 0.01, 0.005, 1) if options.quick else (128, 1.0, 0.05, options.repeats)
    rows = []
    print("| alone, s | as they end, s | after the last, s | hidden |\n| --- | --- | --- | --- |")
    for seed in range(repeats):
        alone, now, after = (
            measure(way, conversations, tool, read, seed) for way in ("alone", "as they end", "after the last")
        )
        hidden = 1 - (now - alone) / (after - alone)
        print(f"| {alone:.2f} | {now:.2f} | {after:.2f} | {hidden:.2f} |", flush=True)
        rows.append(
            {"alone": alone, "as they end": now, "after the last": after, "hidden": hidden, "target": ">= 0.9"}
        )
    if not options.quick:
        settings = {"conversations": conversations, "turns": TURNS, "tool_seconds": tool, "read_seconds": read}
        write("teacher_server", settings, rows)


if __name__ == "__main__":
    main()
