"""
Small tasks for agents in a terminal, in Harbor's form, made from a seed: to find, count, edit, mend a test, and chain.

    python -m mt_grpo.data.terminal tasks/train --number 64 --image debian:13

Each has a solution that earns 1, so `harbor run --agent oracle --path tasks/train` checks the machine before a model
does. The image needs bash, coreutils, grep, sed and findutils.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shlex
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from mt_grpo.errors import ConfigError

NAMES = "amber birch cedar delta ember fjord grove hazel iris jade koala lotus maple nylon opal pearl".split()
_TOML = """version = "1.0"
[metadata]
kind = "{kind}"
difficulty = "{difficulty}"
[verifier]
timeout_sec = 30.0
[agent]
timeout_sec = 300.0
[environment]
build_timeout_sec = 300.0
cpus = 1
memory_mb = 512
"""


class _Task(NamedTuple):
    """A task: its instruction, its files, commands that solve it, and a command that is true when it is solved."""

    instruction: str
    files: dict[str, str]
    solution: str
    test: str
    difficulty: str = "easy"


def _find(draw: random.Random) -> _Task:
    word, *names = draw.sample(NAMES, 5)
    files = {f"{name}/{draw.choice(NAMES)}.txt": f"{draw.choice(names)}\n" for name in names}
    path = draw.choice(sorted(files))
    files[path] = f"{word}\n"
    return _Task(
        f"One file below /app holds the word {word}. Write its absolute path into /app/answer.txt.",
        files,
        f"grep -rlw {word} /app --include='*.txt' > /tmp/found; cp /tmp/found /app/answer.txt",
        f'[ "$(cat /app/answer.txt)" = /app/{path} ]',
    )


def _count(draw: random.Random) -> _Task:
    levels = [draw.choice(("INFO", "WARN", "ERROR")) for _ in range(draw.randint(20, 60))]
    log = "".join(f"{number:03d} {level} {draw.choice(NAMES)}\n" for number, level in enumerate(levels))
    level = draw.choice(levels)
    return _Task(
        f"How many lines of /app/service.log are of the level {level}? Write the number into /app/answer.txt.",
        {"service.log": log},
        f"grep -c ' {level} ' /app/service.log > /app/answer.txt",
        f'[ "$(tr -d [:space:] < /app/answer.txt)" = {levels.count(level)} ]',
    )


def _edit(draw: random.Random) -> _Task:
    keys = draw.sample(NAMES, 4)
    values = {key: draw.randint(1, 999) for key in keys}
    key, wanted = draw.choice(keys), draw.randint(1000, 9999)
    right = "".join(f"{name} = {wanted if name == key else value}\n" for name, value in values.items())
    return _Task(
        f"Set {key} to {wanted} in /app/settings.ini, and change nothing else.",
        {"settings.ini": "".join(f"{name} = {value}\n" for name, value in values.items())},
        f"sed -i 's/^{key} = .*/{key} = {wanted}/' /app/settings.ini",
        f'[ "$(cat /app/settings.ini)" = {shlex.quote(right.rstrip())} ]',
    )


def _mend(draw: random.Random) -> _Task:
    one, other = draw.sample(range(2, 60), 2)
    sign, wrong = draw.sample("+-*", 2)
    result, hidden = {"+": (one + other, 10), "-": (one - other, 4), "*": (one * other, 21)}[sign]
    return _Task(
        "`bash /app/check.sh` fails. Mend /app/compute.sh so that it succeeds; leave the check as it is.",
        {
            "compute.sh": f"echo $(($1 {wrong} $2))\n",
            "check.sh": f'[ "$(bash /app/compute.sh {one} {other})" = "{result}" ]\n',
        },
        f"sed -i 's/[$]1 . [$]2/$1 {sign} $2/' /app/compute.sh",
        # other numbers than those that the agent sees: what prints the one result solves nothing
        f'bash /app/check.sh && [ "$(bash /app/compute.sh 7 3)" = {hidden} ]',
        "medium",
    )


def _chain(draw: random.Random) -> _Task:
    folders = draw.sample(NAMES, 3)
    sizes = {name: draw.sample(range(1, 40), 3) for name in folders}
    files = {f"{name}/{number}.log": "line\n" * size for name in folders for number, size in enumerate(sizes[name])}
    largest = max(folders, key=lambda name: sum(sizes[name]))
    if sum(sum(sizes[name]) == sum(sizes[largest]) for name in folders) > 1:  # a tie has no answer
        return _chain(draw)
    result = "/app/result/lines.txt"
    return _Task(
        "Find the folder below /app whose .log files have most lines together. Make /app/result/ with a copy of those "
        "files, and write the number of their lines into /app/result/lines.txt.",
        files,
        f"mkdir /app/result; cp /app/{largest}/*.log /app/result; cat /app/{largest}/*.log | wc -l > {result}",
        f"diff -r --exclude=lines.txt /app/{largest} /app/result && "
        f'[ "$(tr -d [:space:] < {result})" = {sum(sizes[largest])} ]',
        "hard",
    )


KINDS: dict[str, Callable[[random.Random], _Task]] = {
    "find": _find,
    "count": _count,
    "edit": _edit,
    "mend": _mend,
    "chain": _chain,
}
"""What makes a task of each kind."""
_EMBEDDED = ("find", "count")


def write_tasks(
    folder: Path, number: int, seed: int = 0, image: str = "debian:13", kinds: Sequence[str] = tuple(KINDS)
) -> list[Path]:
    """Writes tasks of some kinds in turn, each in a folder of its own; other seeds make other tasks."""
    draw = random.Random(seed)
    written = []
    for index in range(number):
        kind = kinds[index % len(kinds)]
        task = KINDS[kind](draw)
        path = folder / f"{kind}-{seed}-{index:04d}"
        made = {
            "task.toml": _TOML.format(kind=kind, difficulty=task.difficulty),
            "instruction.md": task.instruction + "\n",
            "environment/Dockerfile": f"FROM {image}\nWORKDIR /app\nCOPY app /app\n",
            "solution/solve.sh": f"#!/bin/bash\n{task.solution}\n",
            "tests/test.sh": f"#!/bin/bash\nif {task.test}; then reward=1; else reward=0; fi\n"
            "mkdir -p /logs/verifier\necho $reward > /logs/verifier/reward.txt\n",
        } | {f"environment/app/{name}": text for name, text in task.files.items()}
        for name, text in made.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(text)
        written.append(path)
    return written


def own_folder(name: str, what: str) -> Path:
    """A folder of this user for `what`, made where it is not there; others may make one under its name before."""
    folder = Path(tempfile.gettempdir(), f"{name}-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise ConfigError(
            f"{folder}, where {what} are written, is another user's, and so would they be: remove it, or set `TMPDIR` "
            "to a folder of your own."
        )
    return folder


def embedded_tasks(split: str) -> Path:
    """The folder of the tasks to find and count that `embedded` names, written where it is not there yet."""
    number, seed = {"train": (96, 0), "eval": (48, 1)}[split]
    named = f"{metadata.version('mt-grpo')}-{'-'.join(_EMBEDDED)}-{number}-{seed}"
    folder = own_folder("mt-grpo-tasks", "the embedded tasks") / named
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            write_tasks(Path(made, named), number, seed, kinds=_EMBEDDED)
            with contextlib.suppress(OSError):  # another process of the run was first
                Path(made, named).rename(folder)
    return folder


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--number", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--image", default="debian:13")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    asked = parser.parse_args()
    written = write_tasks(asked.folder, asked.number, asked.seed, asked.image, asked.kinds)
    print(f"Wrote {len(written)} tasks into {asked.folder}.")


if __name__ == "__main__":
    _main()
