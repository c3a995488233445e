"""
Measures `mt-grpo view` in a real browser, on a run of 50,000 conversations that it makes itself:

    python benchmarks/viewer.py
    python benchmarks/viewer.py --conversations 500000

Prints a table and writes `benchmarks/results/viewer.json`, or `viewer_large.json`. It needs playwright and
chromium-headless-shell. Another number of conversations is measured once, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from common import write
from processes import running
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.browser import open_browser
from support.runs import REWARDS, write_run

from mt_grpo.runlog import Batch, RunWriter, open_run
from mt_grpo.runlog.index import written
from mt_grpo.runlog.schema import ROW_GROUP
from mt_grpo.token_tree import TokenTree
from mt_grpo.trajectory import StopReason, Trajectory, Turn

TURNS, TOKENS = 10, 1000
"""Of the conversation of 10,000 tokens."""

ALL, LARGE = 50_000, 500_000

WITH_WORDS = ALL
"""Most conversations that have files of their own, so that their words can be searched."""

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
    """A run whose index has so many conversations; of more than `WITH_WORDS` many share the files of a few."""
    write_run(folder, steps=4, groups=GROUPS, group_size=GROUP)
    index = folder / "rollouts" / "index.jsonl"
    first = [orjson.loads(line) for line in index.read_bytes().splitlines()]
    for line in first:
        line.pop("crc")  # of what the line said before
    steps = conversations // (GROUP * GROUPS)
    lines = [line for line in first if line["kind"] == "run"]
    tables: dict[str, pa.Table] = {}
    by_step = {
        step: [each for each in first if each.get("session", "").startswith(f"train-{step:06d}")] for step in range(4)
    }
    for step in range(steps):
        for line in by_step[step % 4]:
            session = f"train-{step:06d}-" + line["session"].split("-", 2)[2]
            file = _copied(index.parent, line["file"], step, tables) if conversations <= WITH_WORDS else line["file"]
            lines.append({**line, "session": session, "step": step, "file": file})
        parts = {"sampling": 3.0, "rewards": 0.1, "sync": 0.4, "training": 2.0}
        lines.append({"kind": "step", "step": step, "start": 0.0, "seconds": 5.5, **parts})
    index.write_bytes(b"".join(map(written, lines)))
    _add_long_one(folder, steps)


def _copied(folder: Path, name: str, step: int, tables: dict[str, pa.Table]) -> str:
    """A file of another step with its conversations, under the names that they have there."""
    copy = name.replace(f"-{step % 4}", f"-{step}", 1)
    if not (folder / copy).exists() and name not in tables:
        tables[name] = pq.read_table(folder / name)
    if not (folder / copy).exists():
        sessions = [f"train-{step:06d}-" + each.split("-", 2)[2] for each in tables[name]["session"].to_pylist()]
        column = tables[name].schema.get_field_index("session")
        renamed = tables[name].set_column(column, tables[name].schema.field(column), [sessions])
        pq.write_table(renamed, folder / copy, row_group_size=ROW_GROUP)
    return copy


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
def serve(folder: Path) -> Iterator[tuple[str, float, int]]:
    """The address of a server while the context lasts, the seconds until it had one, and its process."""
    before = time.perf_counter()
    with running([sys.executable, "-m", "mt_grpo", "view", str(folder), "--no_browser"]) as process:
        url = process.stdout.readline().split(" is at ")[1].split()[0]
        yield url, time.perf_counter() - before, process.pid


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


def search(url: str, total: int) -> dict[str, list[float]]:
    """Seconds until all words are read, and milliseconds of a search after that."""
    before = time.perf_counter()
    while _asked(url, "")["read"] < total:
        time.sleep(0.5)
    measured = {"all words read, s": [round(time.perf_counter() - before, 1)]}
    for text in ('"look it up"', "tool=search", '"capital of Norway" reward<0.5'):
        for _ in range(3):
            before = time.perf_counter()
            assert _asked(url, text)["matched"]
            measured.setdefault(f"search {text}", []).append(round(1000 * (time.perf_counter() - before), 1))
    return measured


def _asked(url: str, text: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}api/find?{urlencode({'q': text, 'limit': 40})}") as answer:
        return json.load(answer)


def peak(process: int) -> float:
    """Most memory that a process has had, in megabytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


TARGETS = {"start": 1500, "first paint": 200, "sort": 100, "filter": 100, "10,000": 150, "search": 1000, "memory": 500}
TARGETS_LARGE = {"start": 5000, "first paint": 200, "sort": 300, "filter": 300, "10,000": 150, "memory": 1000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=ALL)
    conversations = parser.parse_args().conversations
    repetitions = {ALL: 5, LARGE: 3}.get(conversations, 1)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        make_run(run, conversations)
        rows = len(open_run(run).rows)
        os.environ["XDG_CACHE_HOME"] = folder  # nothing of it stays
        starts, words = [], {}
        for _ in range(repetitions):
            with serve(run) as (_, seconds, _):
                starts.append(round(1000 * seconds))
        with serve(run) as (url, _, process):
            if conversations <= WITH_WORDS:
                words = search(url, rows)
            measured = {"start": starts, **in_browser(url, repetitions), **words, "memory, MB": [round(peak(process))]}
    table = Table("", "median", "smallest to largest", "target", title=f"{rows:,} conversations; milliseconds")
    results = []
    for name, values in measured.items():
        targets = TARGETS_LARGE if conversations > ALL else TARGETS
        target = next((f"<= {limit}" for key, limit in targets.items() if name.startswith(key)), None)
        table.add_row(name, f"{statistics.median(values):.0f}", f"{min(values):.0f} to {max(values):.0f}", target)
        unit = {"memory, MB": "MB", "all words read, s": "s"}.get(name, "ms")
        results.append({"label": name, "unit": unit, **({"target": target} if target else {}), "values": values})
    Console().print(table)
    if conversations in (ALL, LARGE):
        name = "viewer" if conversations == ALL else "viewer_large"
        write(name, {"conversations": rows, "repetitions": repetitions, "tokens": TURNS * TOKENS}, results)


if __name__ == "__main__":
    main()
