"""
What containers cost a run: conversations in a minute over their bound, which is the tools' own seconds over the number
of conversations at once; how much of the containers' starts is hidden behind other conversations, of all and without
the first, which have none before them, or behind a first turn where no container is ready; and what is left after all
of them, and after a killed trainer and the next start. Then what a branch costs: seconds from `fork` until the copy
has run a command, and megabytes of disk.

    .venv-interop/containers/in python /host$PWD/benchmarks/sandboxes.py

Sampling is scripted and takes no time, but for the batch that starts at once; each command sleeps. Needs the place
that `make interop-harbor` makes, and `.venv-interop/containers/engine` beside it. Writes
`benchmarks/results/sandboxes.json`. `--quick` forks sandboxes of `bubblewrap` alone, on any machine that has it, and
writes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import psutil
from common import build_tokenizer, write

from mt_grpo.data.terminal import write_tasks
from mt_grpo.integrations.harbor import HarborEnv, HarborTasks
from mt_grpo.integrations.harbor.bubblewrap import check_usable
from mt_grpo.rollout import RolloutLimits, RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine

AT_ONCE, POOL = 8, 8
SAMPLED = 3.0  # seconds of a turn of the batch that starts at once
BOUND, HIDDEN = 0.8, 0.9
PROGRAMS = ("conmon", "docker-compose", "runc")


def left() -> dict[str, int]:
    """What containers there are, with their volumes and networks, and how many processes of engines."""
    found = {
        kind: len(subprocess.run(["podman", *listed], capture_output=True, text=True, check=True).stdout.split())
        for kind, listed in {
            "containers": ("ps", "--all", "--quiet"),
            "volumes": ("volume", "ls", "--quiet"),
            "networks": ("network", "ls", "--quiet"),
        }.items()
    }
    running = [each.info for each in psutil.process_iter(["name", "status"])]
    found["processes"] = sum(
        each["name"] in PROGRAMS and each["status"] != psutil.STATUS_ZOMBIE  # that has ended
        for each in running
    )
    return found


def run(folder: str, conversations: int, turns: int, seconds: float, pool: int = POOL, sampled: float = 0.0) -> list:
    """Holds the conversations, in the order of their rows."""
    tasks = HarborTasks(HarborEnv("podman", sandbox_pool=pool), folder)
    rows = tasks.rows("train")
    tasks.check(rows, "training dataset")
    call = json.dumps({"name": "bash", "args": {"command": f"sleep {seconds}"}})
    said = [*[f"<tool>{call}</tool><|im_end|>"] * turns, '<tool>{"name": "submit", "args": {}}</tool><|im_end|>']
    engine = ScriptedEngine(build_tokenizer(), lambda session, turn: said[turn], sampled)
    requests = [
        RolloutRequest(row["prompt"], f"{number:04d}", row=row)
        for number, row in enumerate(rows[number % len(rows)] for number in range(conversations))
    ]
    runner = RolloutRunner(tasks.given, engine, RolloutLimits(max_concurrent=AT_ONCE))

    def tell(trajectory) -> None:
        done[0] += 1
        print(f"{done[0]} of {conversations}, {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)

    done, begun = [0], time.perf_counter()
    return asyncio.run(runner.run(requests, SamplingParams(max_tokens=4000), on_finish=tell))


def hidden(found: list) -> float:
    """The share of the containers' starts that conversations did not wait for."""
    return 1 - sum(each.info["start_waited"] for each in found) / sum(each.info["start_seconds"] for each in found)


def show(rows: list[dict]) -> None:
    """Prints the middle of each figure."""
    for row in rows:
        print(f"{row['figure']}: {row['values'][len(row['values']) // 2]:.2f}; target: {row['target']}")


def killed(folder: str) -> dict[str, int]:
    """What is left after a trainer was killed while its containers ran, and the next began."""
    arguments = [__file__, "--conversations", str(AT_ONCE), "--seconds", "60", "--tasks", folder]
    trainer = subprocess.Popen([sys.executable, *arguments], stderr=subprocess.DEVNULL)
    while left()["containers"] < AT_ONCE // 2:
        assert trainer.poll() is None
        time.sleep(0.2)
    trainer.kill()
    trainer.wait()
    time.sleep(2.0)  # what it had begun to start goes on without it
    print("left by a killed trainer:", left())
    HarborTasks(HarborEnv("podman"), folder)
    return left()


def forks(sandbox: str, megabytes: int, place: str, number: int = 5) -> list[dict]:
    """Figures of forks, each of a conversation that wrote so many megabytes; `place` is where sandboxes are."""
    trials = import_module(f"mt_grpo.integrations.harbor.{'bubblewrap' if sandbox == 'bubblewrap' else 'trial'}")
    seconds, written = [], []

    async def answer(container) -> None:
        await container.exec("true", timeout_sec=60)
        seconds.append(time.perf_counter() - began[0])

    async def fork(container) -> None:
        await container.exec(f"head -c {megabytes}M /dev/urandom > large; sync .", timeout_sec=600)
        for _ in range(number):
            used, began[0] = shutil.disk_usage(place).used, time.perf_counter()
            twin, _ = await container.fork()
            written.append(shutil.disk_usage(place).used - used)
            await twin.talk_in(answer)

    async def hold(task: Path) -> None:
        begun = await trials.begin_trial(sandbox, str(task))
        await begun.talk_in(fork)

    began = [0.0]
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(hold(write_tasks(Path(folder), 1, image="localhost/base:1")[0]))
    return [
        {"figure": f"{what} of a fork of {megabytes} MB, {sandbox}", "values": values, "target": "none"}
        for what, values in (("seconds", sorted(seconds)), ("megabytes", sorted(each / 1e6 for each in written)))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=200, help="how many (200)")
    parser.add_argument("--turns", type=int, default=10, help="commands in each (10)")
    parser.add_argument("--seconds", type=float, default=3.0, help="that each command sleeps (3)")
    parser.add_argument("--tasks", help="a folder of tasks; written where it is left out")
    parser.add_argument("--quick", action="store_true", help="two small forks of bubblewrap's, and no results")
    options = parser.parse_args()
    if options.quick:
        return show(forks("bubblewrap", 1, tempfile.gettempdir(), number=2))
    check_usable()
    before = left()
    with tempfile.TemporaryDirectory() as folder:
        if options.tasks is None:
            write_tasks(Path(folder), 4, image="localhost/base:1")
        began = time.perf_counter()
        found = run(options.tasks or folder, options.conversations, options.turns, options.seconds)
        took = time.perf_counter() - began
        assert not any(each.error for each in found), [each.error for each in found]
        if options.tasks is not None:
            return
        at_once = run(folder, AT_ONCE, 1, 0.0, pool=0, sampled=SAMPLED)
        after = left()
        later = killed(folder)
    bound = options.conversations * options.turns * options.seconds / AT_ONCE
    started = sum(each.info["start_seconds"] for each in found)
    rows = [
        {"figure": "conversations over the bound", "values": [bound / took], "target": f">= {BOUND}"},
        {"figure": "starts hidden", "values": [hidden(found)], "target": f">= {HIDDEN}"},
        {"figure": f"without the first {AT_ONCE}", "values": [hidden(found[AT_ONCE:])], "target": f">= {HIDDEN}"},
        {"figure": f"of {AT_ONCE} at once, none ready", "values": [hidden(at_once)], "target": f">= {HIDDEN}"},
    ]
    for when, state in (("all", after), ("a kill and the next start", later)):
        rows += [
            {"figure": f"{what} after {when}", "values": [state[what] - before[what]], "target": "<= 0"}
            for what in state
        ]
    for megabytes in (1, 100):
        rows += forks("podman", megabytes, "/store") + forks("bubblewrap", megabytes, tempfile.gettempdir())
    show(rows)
    settings = vars(options) | {"at_once": AT_ONCE, "pool": POOL, "load": os.getloadavg(), "harbor": version("harbor")}
    write("sandboxes", settings, rows, seconds=took, start_seconds=started / len(found))


if __name__ == "__main__":
    main()
