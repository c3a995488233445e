"""
Measures `mt-grpo view` in a real browser, on a run of 50,000 conversations that it makes itself:

    python benchmarks/viewer.py

Prints a table and writes `benchmarks/results/viewer.json`. It needs playwright and chromium-headless-shell.
`--conversations 2000` takes fewer, once, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
from common import write
from processes import running
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.browser import open_browser
from support.runs import REWARDS, write_run

from mt_grpo.runlog import Batch, RunWriter, open_run
from mt_grpo.runlog.index import written
from mt_grpo.token_tree import TokenTree
from mt_grpo.trajectory import StopReason, Trajectory, Turn

TURNS, TOKENS = 10, 1000
"""Of the conversation of 10,000 tokens."""

ALL = 50_000

GROUP, GROUPS = 8, 16
"""Conversations of a group, and groups of a step."""

SHADE = """async name => {
  const button = [...document.querySelectorAll('.choice button')].find(each => each.textContent === name)
  const before = performance.now()
  button.click()
  document.body.getBoundingClientRect()
  await new Promise(done => requestAnimationFrame(() => setTimeout(done)))
  return performance.now() - before
}"""
ASK = """async ([selector, value]) => {
  performance.clearMarks()
  const before = performance.now()
  const element = document.querySelector(selector)
  if (value === null) element.click()
  else {
    element.value = value
    element.dispatchEvent(new Event('input'))
  }
  while (!performance.getEntriesByName('found').length) await new Promise(done => setTimeout(done, 1))
  return performance.now() - before
}"""
TYPING = 120
"""Milliseconds that the field of the filter waits for another letter."""


def make_run(folder: Path, conversations: int) -> None:
    """A run whose index has so many conversations; they share the files of a few."""
    write_run(folder, steps=4, groups=GROUPS, group_size=GROUP)
    index = folder / "rollouts" / "index.jsonl"
    first = [orjson.loads(line) for line in index.read_bytes().splitlines()]
    for line in first:
        line.pop("crc")  # of what the line said before
    steps = conversations // (GROUP * GROUPS)
    lines = [line for line in first if line["kind"] == "run"]
    by_step = {
        step: [each for each in first if each.get("session", "").startswith(f"train-{step:06d}")] for step in range(4)
    }
    for step in range(steps):
        for line in by_step[step % 4]:
            session = f"train-{step:06d}-" + line["session"].split("-", 2)[2]
            lines.append({**line, "session": session, "step": step})
        parts = {"sampling": 3.0, "rewards": 0.1, "sync": 0.4, "training": 2.0}
        lines.append({"kind": "step", "step": step, "start": 0.0, "seconds": 5.5, **parts})
    index.write_bytes(b"".join(map(written, lines)))
    _add_long_one(folder, steps)


def _add_long_one(folder: Path, step: int) -> None:
    """A conversation of `TURNS` turns of `TOKENS` tokens."""
    tree, turns, context = TokenTree(), [], list(range(100, 150))
    for number in range(TURNS):
        action = [200 + (7 * number + 13 * place) % 3000 for place in range(TOKENS)]
        tree.add_turn(list(context), action, [-0.01 * (place % 300) for place in range(TOKENS)])
        context = context + action + list(range(300, 320))
        message = {"role": "assistant", "content": "long"}
        turns.append(
            Turn(
                number,
                message,
                num_tokens=TOKENS,
                context_length=len(context),
                replies=[{"role": "tool", "content": "go on"}],
            )
        )
    prompt = [{"role": "user", "content": "Write much."}]
    long = Trajectory(prompt, turns, tree, stop_reason=StopReason.ANSWERED, start=0.0)
    long.rewards = {"turn": {"tool_execution": [0.1] * TURNS}, "outcome": {"exact_match": 1.0, "format": 1.0}}
    writer = RunWriter(folder)
    batch = Batch("train", step, 0, 1, [0], [long], REWARDS)
    writer.append(writer.write(batch))
    writer.append(writer.write_credit(batch, [[(-1) ** number * 0.3 * number for number in range(TURNS)]]))


@contextmanager
def serve(folder: Path) -> Iterator[tuple[str, float]]:
    """The address of a server while the context lasts, and the seconds until it had one."""
    before = time.perf_counter()
    with running([sys.executable, "-m", "mt_grpo", "view", str(folder), "--no_browser"]) as process:
        url = process.stdout.readline().split(" is at ")[1].split()[0]
        yield url, time.perf_counter() - before


def in_browser(url: str, repetitions: int) -> dict[str, list[float]]:
    """What is measured in the page, in milliseconds."""
    measured: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        measured.setdefault(name, []).append(round(value, 1))

    with open_browser() as browser:
        for _ in range(repetitions):
            page = browser.new_page(viewport={"width": 1400, "height": 860})
            page.goto(url)
            page.wait_for_function("() => performance.getEntriesByName('shown overview').length")
            paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
            note("first paint", page.evaluate(paint))
            note("overview drawn", page.evaluate("performance.getEntriesByName('shown overview')[0].startTime"))
            page.evaluate("() => { performance.clearMarks(); location.hash = '#/find' }")
            page.wait_for_function("() => performance.getEntriesByName('shown find').length")
            for name, what in (
                ("sort by reward", "reward"),
                ("sort by prompt", "prompt"),
                ("sort by mismatch", "mismatch"),
            ):
                note(name, page.evaluate(ASK, [f".th .col-{what} button", None]))
            filters = ("stop=timeout reward<0.5", '"capital of Peru"', "mismatch>.1 errors>0", "spread=0")
            for text in filters:
                note(f"filter {text}", page.evaluate(ASK, ["#filter", text]) - TYPING)
            opened = "session => { performance.clearMarks(); location.hash = '#/trajectory?session=' + session }"
            page.evaluate(opened, _long(url))
            page.wait_for_function("() => performance.getEntriesByName('shown trajectory').length")
            assert page.locator(".tokens span").count() == TURNS * TOKENS
            for name in ("log-prob", "advantage"):
                note(f"10,000 tokens by {name}", page.evaluate(SHADE, name))
            page.close()
    return measured


def _long(url: str) -> str:
    """The session of the long conversation."""
    with urllib.request.urlopen(f"{url}api/find?sort=-tokens&limit=1") as answer:
        return json.load(answer)["rows"][0]["session"]


TARGETS = {"start": 1500, "first paint": 1000, "sort": 100, "filter": 100, "10,000": 150}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=ALL)
    conversations = parser.parse_args().conversations
    repetitions = 5 if conversations == ALL else 1
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        make_run(run, conversations)
        rows = len(open_run(run).rows)
        starts = []
        for _ in range(repetitions):
            with serve(run) as (_, seconds):
                starts.append(round(1000 * seconds))
        with serve(run) as (url, _):
            measured = {"start": starts, **in_browser(url, repetitions)}
    table = Table("", "median, ms", "smallest to largest", "target", title=f"{rows:,} conversations")
    results = []
    for name, values in measured.items():
        target = next((f"<= {limit}" for key, limit in TARGETS.items() if name.startswith(key)), None)
        table.add_row(name, f"{statistics.median(values):.0f}", f"{min(values):.0f} to {max(values):.0f}", target)
        results.append({"label": name, "unit": "ms", **({"target": target} if target else {}), "values": values})
    Console().print(table)
    if conversations == ALL:
        write("viewer", {"conversations": rows, "repetitions": repetitions, "tokens": TURNS * TOKENS}, results)


if __name__ == "__main__":
    main()
