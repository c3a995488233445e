"""
Turns that wait for room in a server's cache, against fixed numbers of conversations and all at once.

A model of a server in virtual time, and of the processes that share it. A step takes a fixed time (the weights are
read), a time for each request of the batch, and a time for each token that is not in the cache. Requests begin in the
order in which they come, as long as there is room. One that grows beyond the room preempts the latest. What
conversations leave in the cache between two turns stays until its room is needed: what was used last goes last, and of
a conversation its end goes first. The order of turns is the client's own code,
`mt_grpo/servers/cache_scheduler.py`, once for each process, and sees what a server's metrics say twice in a
second of virtual time.

    python benchmarks/admission.py [--quick]

Each row is two batches of conversations, one after the other, with their beginnings and ends. Before the first one
nothing is known of the conversations. The best of the fixed numbers, the same in each process, is chosen with
hindsight, for each row by itself. Prints a table and writes `benchmarks/results/admission.json`.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from common import write
from rich.console import Console
from rich.table import Table

from mt_grpo.servers.cache_scheduler import LOOK, CacheScheduler, Pressure

OF_BEST = 0.97
FIXED = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96)
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
    "tools of 3 s": "2 to 9 turns, 3 s in tools",
    "tools of 15 s": "2 to 9 turns, 15 s in tools",
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
    ("tools of 3 s", 20_000),
    ("tools of 3 s", 40_000),
    ("tools of 3 s", 80_000),
    ("tools of 15 s", 20_000),
    ("tools of 15 s", 40_000),
    ("tools of 15 s", 80_000),
)
LOADS = {
    "1 process": ((96,), 0.0),
    "2, even": ((48, 48), 0.0),
    "2, uneven": ((84, 12), 0.0),
    "7, even": ((14, 14, 14, 14, 14, 14, 12), 0.0),
    "7, uneven": ((48, 8, 8, 8, 8, 8, 8), 0.0),
    "7, one has all": ((96, 0, 0, 0, 0, 0, 0), 0.0),
    "7, one after the other": ((14, 14, 14, 14, 14, 14, 12), 5.0),
}
"""Conversations of each process in a batch, and seconds by which it begins later than the one before."""


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
        pause = {"short": 0.5, "heavy tails": 1.0, "fast tools": 0.02, "tools of 3 s": 3.0, "tools of 15 s": 15.0}
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
        turns = [(action, answer, draw.expovariate(1 / pause.get(kind, 1.5))) for action, answer in sizes]
        found.append(Conversation(f"{seed}-{index}", turns, prompt, left=turns[0][0]))
    return found


@dataclass(eq=False)
class Process:
    """One that holds conversations: its order of turns, and those that it has still to begin."""

    admission: CacheScheduler
    look: float
    queue: list[Conversation] = field(default_factory=list)
    begin: float = 0.0
    under_way: int = 0


class Simulation:
    """A server, and processes that share it. Without a `limit` of conversations of each, `CacheScheduler` decides."""

    def __init__(self, cache: int, processes: int, limit: int | None = None) -> None:
        self.cache, self.limit = cache, limit
        self.processes = [Process(CacheScheduler(processes), -LOOK * index / processes) for index in range(processes)]
        self.free = cache
        self.idle: dict[Conversation, None] = {}  # whose prefixes may go, what was used last at the end
        self.kept = 0  # tokens of those
        self.now = self.prefill_seconds = 0.0
        self.computed = self.preemptions = 0

    def keep(self, one: Conversation) -> None:
        self.idle[one] = None
        self.kept += one.cached

    def use(self, one: Conversation) -> None:
        if one in self.idle:
            del self.idle[one]
            self.kept -= one.cached

    def make_room(self, need: int) -> bool:
        if self.free + self.kept < need:
            return False
        while self.free < need:
            one = next(iter(self.idle))
            taken = min(one.cached, need - self.free)
            one.cached -= taken
            self.kept -= taken
            self.free += taken
            if not one.cached:
                del self.idle[one]
        return True

    def run(self, batches: list[list[Conversation]], late: float) -> float:
        """Holds the conversations of each process, which begins `late` after the one before; seconds until all end."""
        start, waiting, running = self.now, list[Conversation](), list[Conversation]()
        away: list[tuple[float, str, Conversation]] = []
        owner = {one: process for process, batch in zip(self.processes, batches, strict=True) for one in batch}
        by_name = {one.name: one for one in owner}
        for number, (process, batch) in enumerate(zip(self.processes, batches, strict=True)):
            process.queue, process.begin, process.under_way = list(batch), start + late * number, 0
        left = len(owner)
        while left:
            told = self.preemptions, self.prefill_seconds, self.computed
            usage = sum(one.cached for one in running) / self.cache
            pressure = Pressure(self.cache, usage, len(running), len(waiting), *told)
            while away and away[0][0] <= self.now:
                self.want(heapq.heappop(away)[2], owner, waiting)
            for process in self.processes:
                if self.now >= process.look:
                    process.admission.observe(pressure, self.now)
                    process.look = max(self.now, process.look + LOOK)
                while process.queue and self.now >= process.begin and process.under_way < (self.limit or math.inf):
                    process.under_way += 1
                    self.want(process.queue.pop(0), owner, waiting)
                waiting += [by_name[name] for name in process.admission.admit(self.now)]
            following = min(process.look for process in self.processes)
            following = min([following, *(one.begin for one in self.processes if one.begin > self.now)])
            if away:
                following = min(following, away[0][0])
            seconds = self.prefill(waiting, running)
            if not running:
                self.now = max(self.now + STEP, following)
                continue
            self.now += STEP + EACH * len(running) + seconds
            over = self.sample(waiting, running)
            for one in over:
                if one in running:
                    running.remove(one)
                else:  # preempted in the step of its last token
                    waiting.remove(one)
                    self.use(one)
                process = owner[one]
                if self.limit is None:
                    process.admission.end(one.name, one.turns[one.turn][0], self.now)
                if one.cached:
                    self.keep(one)
                _, answer, pause = one.turns[one.turn]
                one.turn += 1
                if one.turn == len(one.turns):
                    left -= 1
                    process.under_way -= 1
                    process.admission.leave(one.name)
                    continue
                one.length, one.left = one.length + answer, one.turns[one.turn][0]
                heapq.heappush(away, (self.now + pause, one.name, one))
            if not over:
                self.skip(waiting, running, following)
        return self.now - start

    def want(self, one: Conversation, owner: dict[Conversation, Process], waiting: list[Conversation]) -> None:
        if self.limit is None:
            owner[one].admission.ask(one.name, one.length, self.now)
        else:
            waiting.append(one)

    def prefill(self, waiting: list[Conversation], running: list[Conversation]) -> float:
        seconds, budget, begun = 0.0, CHUNK, 0
        while waiting and budget > 0:
            one = waiting[0]
            need, kept = one.length + 1 - one.cached, one in self.idle
            self.use(one)
            if not self.make_room(need):
                if kept:
                    self.keep(one)
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
                self.keep(last)
                waiting.insert(0, last)
                if last is one:
                    break
            if not one.left:
                over.append(one)
            index += 1
        return over

    def skip(self, waiting: list[Conversation], running: list[Conversation], following: float) -> None:
        """Takes the steps at once in which nothing begins or ends, and nothing is preempted."""
        if waiting:
            first = waiting[0]
            room = self.free + self.kept - (first.cached if first in self.idle else 0)
            if first.length + 1 - first.cached <= room:
                return
        number, step = len(running), STEP + EACH * len(running)
        steps = [math.ceil((following - self.now) / step), (self.free + self.kept) // number]
        few = min(*steps, *(one.left - 1 for one in running))
        if few > 0:
            self.make_room(few * number)
            self.free -= few * number
            self.now += few * step
            for one in running:
                one.length, one.left, one.cached = one.length + few, one.left - few, one.cached + few


def hold(kind: str, cache: int, load: str, share: int, seed: int, limit: int | None) -> tuple[list[float], int]:
    """Sampled tokens per second, of the first batch and of both; and preemptions."""
    numbers, late = LOADS[load]
    simulation = Simulation(cache, len(numbers), limit)
    tokens, seconds, speeds = 0, 0.0, []
    for batch in (2 * seed, 2 * seed + 1):
        held = conversations(kind, sum(numbers) // share, batch)
        tokens += sum(action for one in held for action, _, _ in one.turns)
        ends = list(accumulate(number // share for number in numbers))
        parts = [held[end - number // share : end] for end, number in zip(ends, numbers, strict=True)]
        seconds += simulation.run(parts, late)
        speeds.append(tokens / seconds)
    return speeds, simulation.preemptions


def measure(kind: str, cache: int, load: str, share: int, seed: int) -> dict[str, Any]:
    most = max(LOADS[load][0]) // share
    limits = sorted({min(limit, most) for limit in FIXED})
    fixed = {limit: hold(kind, cache, load, share, seed, limit) for limit in limits}
    best = max(fixed, key=lambda limit: fixed[limit][0][-1])
    (first, both), preemptions = hold(kind, cache, load, share, seed, None)
    return {
        "case": f"{kind}, {cache // 1000}k",
        "load": load,
        "seed": seed,
        "best number": best,
        "best": fixed[best][0][-1],
        "all at once": fixed[most][0][-1],
        "by cache": both,
        "preemptions": preemptions,
        "preemptions, all at once": fixed[most][1],
        "first batch / best": first / fixed[best][0][0],
        "of best": both / fixed[best][0][-1],
        "of all at once": both / fixed[most][0][-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small case; nothing is written")
    quick = parser.parse_args().quick
    cases, seeds, share = (CASES[:1], (0,), 8) if quick else (CASES, (0, 1), 1)
    with ProcessPoolExecutor() as pool:
        asked = [(*case, load, share, seed) for case in cases for load in LOADS for seed in seeds]
        rows = [each.result() for each in [pool.submit(measure, *one) for one in asked]]
    means: dict[str, dict[str, float]] = {}
    for load in LOADS:
        for case in dict.fromkeys(row["case"] for row in rows):
            found = [row["of best"] for row in rows if (row["case"], row["load"]) == (case, load)]
            means.setdefault(case, {})[load] = sum(found) / len(found)
    table = Table(title="Sampled tokens per second of virtual time, by the best fixed number's", caption=f"{OF_BEST}")
    table.add_column("case")
    for load in LOADS:
        table.add_column(load, justify="right")
    for case, by_load in means.items():
        table.add_row(case, *(f"{value:.2f}" for value in by_load.values()))
    Console(width=150).print(table)
    least = min(value for by_load in means.values() for value in by_load.values())
    print(f"{least:.3f} of the best number at least, target {OF_BEST}")
    if not quick:
        write("admission", {"target of best": OF_BEST, "loads": LOADS}, rows, means=means)


if __name__ == "__main__":
    main()
