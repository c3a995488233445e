"""
Turns that wait for room in a server's cache, against fixed numbers of conversations and all at once.

A model of a server in virtual time. A step takes a fixed time (the weights are read), a time for each request of the
batch, and a time for each token that is not in the cache. Requests begin in the order in which they come, as long as
there is room. One that grows beyond the room preempts the latest. What conversations leave in the cache between two
turns stays until its room is needed: what was used last goes last, and of a conversation its end goes first. The order
of turns is the client's own code, `mt_grpo/rollout/engines/vllm/admission.py`, and sees what a server's metrics say
twice in a second of virtual time.

    python benchmarks/admission.py [--quick]

Each row is two batches of conversations, one after the other, with their beginnings and ends. Before the first one
nothing is known of the conversations. The best of the fixed numbers is chosen with hindsight, for each row by itself.
Prints a table and writes `benchmarks/results/admission.json`.
"""

from __future__ import annotations

import argparse
import heapq
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from common import write
from rich.console import Console
from rich.table import Table

from mt_grpo.rollout.engines.vllm.admission import LOOK, Admission, Pressure

OF_BEST, OF_ALL = 0.95, 1.2
FIXED = (4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
STEP, EACH, PREFILL = 0.012, 0.00006, 0.00012
"""Seconds of a step, of each request in it, and of a token that is computed."""
LONGEST = 16_384
"""Tokens of a context at most."""
CHUNK = 8192
"""Tokens that a step computes at most."""
WORKLOADS = {
    "short": "1 to 5 turns, 0.5 s in tools",
    "middle": "2 to 9 turns, 1.5 s in tools",
    "long": "8 to 20 turns, 1.5 s in tools",
    "heavy tails": "lengths and numbers of turns after Pareto, 1 s in tools",
    "fast tools": "2 to 9 turns, 0.02 s in tools",
    "slow tools": "2 to 9 turns, 15 s in tools",
}
CASES = (
    ("short", 20_000),
    ("short", 60_000),
    ("middle", 20_000),
    ("middle", 40_000),
    ("middle", 80_000),
    ("long", 60_000),
    ("long", 150_000),
    ("heavy tails", 30_000),
    ("heavy tails", 80_000),
    ("fast tools", 40_000),
    ("slow tools", 40_000),
)


@dataclass(eq=False)
class Conversation:
    """A conversation: tokens sampled, tokens that a tool answers and its seconds, by turn; and where it is."""

    name: str
    turns: list[tuple[int, int, float]]
    length: int
    turn: int = 0
    left: int = 0
    cached: int = 0


def conversations(kind: str, number: int, seed: int) -> list[Conversation]:
    draw, found = random.Random(f"{kind} {seed}"), []
    for index in range(number):
        prompt = {"short": draw.randint(300, 700), "long": 1500}.get(kind, 800)
        pause = {"short": 0.5, "heavy tails": 1.0, "fast tools": 0.02, "slow tools": 15.0}.get(kind, 1.5)
        if kind == "short":
            sizes = [(draw.randint(40, 200), draw.randint(50, 400)) for _ in range(draw.randint(1, 5))]
        elif kind == "long":
            sizes = [(draw.randint(100, 500), draw.randint(200, 1500)) for _ in range(draw.randint(8, 20))]
        elif kind == "heavy tails":
            sizes = [
                (min(4000, int(draw.paretovariate(1.3) * 80)), min(3000, int(draw.paretovariate(1.2) * 100)))
                for _ in range(min(30, int(draw.paretovariate(1.1) * 2)))
            ]
        else:
            sizes = [(draw.randint(60, 400), draw.randint(100, 1000)) for _ in range(draw.randint(2, 9))]
        lengths = list(accumulate((action + answer for action, answer in sizes), initial=prompt))[1:]
        sizes = [size for size, length in zip(sizes, lengths, strict=True) if length <= LONGEST] or sizes[:1]
        turns = [(action, answer, draw.expovariate(1 / pause)) for action, answer in sizes]
        found.append(Conversation(f"{seed}-{index}", turns, prompt, left=turns[0][0]))
    return found


class Simulation:
    """A server and its conversations. Without a `limit` of conversations at once, `admission` decides."""

    def __init__(self, cache: int, admission: Admission, limit: int | None = None) -> None:
        self.cache, self.admission, self.limit = cache, admission, limit
        self.free = float(cache)
        self.idle: dict[Conversation, None] = {}  # whose prefixes may go, what was used last at the end
        self.now = self.prefill_seconds = 0.0
        self.computed = self.preemptions = 0

    def make_room(self, need: float) -> bool:
        while self.free < need and self.idle:
            one = next(iter(self.idle))
            taken = min(one.cached, need - self.free)
            one.cached -= taken
            self.free += taken
            if not one.cached:
                del self.idle[one]
        return self.free >= need

    def run(self, batch: list[Conversation]) -> float:
        """Holds conversations; seconds until the last one is over."""
        start, look = self.now, self.now
        by_name = {one.name: one for one in batch}
        queue, waiting, running = list(batch), list[Conversation](), list[Conversation]()
        away: list[tuple[float, str, Conversation]] = []
        under_way, left = 0, len(batch)
        if self.limit is None:
            for one in queue:
                self.admission.ask(one.name, one.length, self.now)
        while left:
            if self.now >= look:
                usage = sum(one.cached for one in running) / self.cache
                told = self.preemptions, self.prefill_seconds, self.computed
                self.admission.observe(Pressure(self.cache, usage, len(running), *told))
                look = self.now + LOOK
            while away and away[0][0] <= self.now:
                one = heapq.heappop(away)[2]
                if self.limit is None:
                    self.admission.ask(one.name, one.length, self.now)
                else:
                    waiting.append(one)
            if self.limit is None:
                waiting += [by_name[name] for name in self.admission.admit(self.now)]
            while self.limit is not None and queue and under_way < self.limit:
                waiting.append(queue.pop(0))
                under_way += 1
            seconds = STEP + self.prefill(waiting, running)
            if not running:
                self.now = max(self.now + STEP, min(away[0][0], look) if away else 0.0)
                continue
            self.now += seconds + EACH * len(running)
            for one in self.sample(waiting, running):
                if one in running:
                    running.remove(one)
                else:  # preempted in the step of its last token
                    waiting.remove(one)
                    self.idle.pop(one, None)
                action, answer, pause = one.turns[one.turn]
                if self.limit is None:
                    self.admission.end(one.name, action, self.now)
                one.turn += 1
                if one.cached:
                    self.idle[one] = None
                if one.turn == len(one.turns):
                    left, under_way = left - 1, under_way - 1
                    self.admission.leave(one.name)
                    continue
                one.length, one.left = one.length + answer, one.turns[one.turn][0]
                heapq.heappush(away, (self.now + pause, one.name, one))
        return self.now - start

    def prefill(self, waiting: list[Conversation], running: list[Conversation]) -> float:
        seconds, budget, begun = 0.0, CHUNK, 0
        while waiting and budget > 0:
            one = waiting[0]
            need, kept = one.length + 1 - one.cached, one in self.idle
            self.idle.pop(one, None)
            if not self.make_room(need):
                if kept:
                    self.idle[one] = None
                break
            self.free -= need
            one.cached += need
            budget -= need
            seconds += PREFILL * need
            begun += 1
            self.computed += need
            running.append(waiting.pop(0))
        self.prefill_seconds += begun * (STEP + seconds)
        return seconds

    def sample(self, waiting: list[Conversation], running: list[Conversation]) -> list[Conversation]:
        """Samples a token for each that runs; those whose turn is over."""
        over, index = [], 0
        while index < len(running):
            one = running[index]
            one.length, one.left = one.length + 1, one.left - 1
            while one.cached < one.length:
                if self.make_room(1):
                    self.free -= 1
                    one.cached += 1
                    break
                last = running.pop()
                self.preemptions += 1
                self.idle[last] = None
                waiting.insert(0, last)
                if last is one:
                    break
            if not one.left:
                over.append(one)
            index += 1
        return over


def hold(kind: str, cache: int, number: int, seed: int, limit: int | None) -> tuple[list[float], int]:
    """Sampled tokens per second, of the first batch and of both; and preemptions."""
    simulation = Simulation(cache, Admission(), limit)
    tokens, seconds, speeds = 0, 0.0, []
    for batch in (2 * seed, 2 * seed + 1):
        held = conversations(kind, number, batch)
        tokens += sum(action for one in held for action, _, _ in one.turns)
        seconds += simulation.run(held)
        speeds.append(tokens / seconds)
    return speeds, simulation.preemptions


def measure(kind: str, cache: int, number: int, seed: int) -> dict[str, Any]:
    fixed = {limit: hold(kind, cache, number, seed, limit) for limit in (*FIXED, number) if limit <= number}
    best = max(fixed, key=lambda limit: fixed[limit][0][-1])
    (first, both), preemptions = hold(kind, cache, number, seed, None)
    return {
        "case": f"{kind}, {cache // 1000}k tokens, seed {seed}",
        "best number": best,
        "best": fixed[best][0][-1],
        "all at once": fixed[number][0][-1],
        "by cache": both,
        "preemptions": preemptions,
        "preemptions, all at once": fixed[number][1],
        "first batch / best": first / fixed[best][0][0],
        "of best": both / fixed[best][0][-1],
        "of all at once": both / fixed[number][0][-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small case; nothing is written")
    quick = parser.parse_args().quick
    cases, seeds, number = (CASES[:1], (0,), 32) if quick else (CASES, (0, 1), 96)
    with ProcessPoolExecutor() as pool:
        started = [pool.submit(measure, *case, number, seed) for case in cases for seed in seeds]
        rows = [each.result() for each in started]
    table = Table(title=f"Sampled tokens per second of virtual time, {number} conversations per batch")
    for column in rows[0]:
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=150).print(table)
    means = {}
    for case in dict.fromkeys(row["case"].rpartition(", ")[0] for row in rows):
        found = [row for row in rows if row["case"].startswith(f"{case}, ")]
        means[case] = {key: sum(row[key] for row in found) / len(found) for key in ("of best", "of all at once")}
        print(f"{case}: {means[case]['of best']:.2f} of the best, {means[case]['of all at once']:.2f} of all at once")
    if not quick:
        settings = {"conversations": number, "target of best": OF_BEST, "target of all at once": OF_ALL}
        write("admission", settings, rows, means=means)


if __name__ == "__main__":
    main()
