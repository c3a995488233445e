"""
Writes the lists of files in docs/architecture.md: what to read for a question. Each question is run for real, on a
model of a few thousand parameters and on servers that answer from a script. Its list has the files whose functions
were called, in the order of their first calls, but for files with a few lines of these only.

    python scripts/trace_calls.py            # prints the lists, with the functions that were called
    python scripts/trace_calls.py --write    # writes them to the page
    python scripts/trace_calls.py --check    # fails where the page names other files
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import re
import sys
import tempfile
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import httpx  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from datasets import Dataset  # noqa: E402
from support.loopback import free_port  # noqa: E402
from support.models import build_model, build_tokenizer, lookup  # noqa: E402
from support.replicas import Replica  # noqa: E402
from support.trainers import SEARCH, trainer_builder  # noqa: E402
from support.upstreams import client_of, completion, upstream  # noqa: E402

from mt_grpo.app.build import build_recipe  # noqa: E402
from mt_grpo.app.request import read_request  # noqa: E402
from mt_grpo.envs import MultiTurnToolEnv  # noqa: E402
from mt_grpo.rollout import RolloutRequest, RolloutRunner, SamplingParams  # noqa: E402
from mt_grpo.rollout.engines.vllm import VLLMServerClient  # noqa: E402
from mt_grpo.runlog import open_run  # noqa: E402
from mt_grpo.viewer.queries import Queries  # noqa: E402
from mt_grpo.viewer.server import Server  # noqa: E402
from mt_grpo.weights.files import SafetensorsTransport  # noqa: E402
from mt_grpo.weights.sync import WeightSync  # noqa: E402


class Trace:
    """
    The functions of `mt_grpo` that are called while it is on, by file, in the order of their first calls. What runs
    when a file is imported is none of them.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, int]] = {}
        """By file the functions that were called, and how many lines each has."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """A context in which this thread, and those that begin in it, are watched."""
        package = str(ROOT / "mt_grpo")

        def see(frame: Any, event: str, argument: Any) -> None:
            code, caller = frame.f_code, frame.f_back
            if event != "call" or not code.co_filename.startswith(package) or code.co_name[0] == "<":
                return
            imported = caller is not None and caller.f_code.co_name == "<module>"
            if code.co_flags & inspect.CO_OPTIMIZED and not imported:  # else the body of a class, or a decorator
                functions = self.files.setdefault(str(Path(code.co_filename).relative_to(ROOT)), {})
                if code.co_qualname not in functions:
                    functions[code.co_qualname] = len({line for *_, line in code.co_lines()})

        threading.setprofile(see)
        sys.setprofile(see)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def watch(self, owner: Any, name: str) -> None:
        """Is on while a method of `owner` runs."""
        method = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            with self.on():
                return method(*args, **options)

        setattr(owner, name, watched)


def _trainer(folder: Path, **options: Any) -> Any:
    tokenizer = build_tokenizer()
    rows = [{"prompt": "What is the capital of Peru?", "answer": "Lima"}] * 4
    return trainer_builder(folder, tokenizer, Dataset.from_list(rows))(**options)


def advantage(trace: Trace, folder: Path) -> None:
    """A batch is scored and credited."""
    trainer = _trainer(folder, advantage_estimator=None)
    trace.watch(trainer, "_judge")
    trace.watch(trainer, "_credit")
    trace.watch(trainer.runner, "completion")
    trainer.current_gradient_accumulation_steps = 1
    trainer._generate_and_score_completions([trainer.train_dataset[0]] * 4)


def sampled_turn(trace: Trace, folder: Path) -> None:
    """A conversation of two turns, the first of which calls a tool."""
    tokenizer = build_tokenizer()
    answers = [SEARCH, "<answer>Lima</answer>"]
    models = {"data": [{"id": "base", "root": "base", "max_model_len": 4096}]}

    def complete(number: int, body: dict[str, Any]) -> Any:
        return completion(*tokenizer.encode(answers[number], add_special_tokens=False), tokenizer.eos_token_id)

    server = upstream(tokenizer, complete, **{"/v1/models": (200, models)})
    client = client_of(tokenizer, server)
    runner = RolloutRunner(MultiTurnToolEnv([lookup]), client)

    async def converse() -> None:
        await client.connect()
        prompt = [{"role": "user", "content": "What is the capital of Peru?"}]
        with trace.on():
            (found,) = await runner.run([RolloutRequest(prompt, "0")], SamplingParams())
        assert found.answer == "Lima", found
        await client.close()

    asyncio.run(converse())


def dying_server(trace: Trace, folder: Path) -> None:
    """One of two servers ends, conversations go on, and it comes back."""
    tokenizer, model, port = build_tokenizer(), build_model(build_tokenizer()), free_port()
    replicas = [Replica(tokenizer), Replica(tokenizer, port=port)]
    client = VLLMServerClient([replica.http.url for replica in replicas], tokenizer)
    WeightSync(SafetensorsTransport, client, lambda: model, Accelerator(cpu=True)).sync(0)

    async def die() -> None:
        await client.connect()
        replicas[1].http.stop()
        with trace.on():
            for number in range(4):  # of which each server is asked
                await client.generate([1, number], SamplingParams(max_tokens=2), str(number))
            assert not client.servers[1].up
            Replica(tokenizer, port=port)
            while not client.servers[1].up:
                await asyncio.sleep(0.01)
        await client.close()

    asyncio.run(asyncio.wait_for(die(), 120))


def option(trace: Trace, folder: Path) -> None:
    """A recipe is read, checked and made into dataclasses."""
    recipe = str(ROOT / "recipes" / "quickstart.yaml")
    with trace.on():
        build_recipe(read_request(["--config", recipe, "--output_dir", str(folder / "run")], "train"))


def record(trace: Trace, folder: Path) -> None:
    """A batch is written, and the page asks for one of its conversations."""
    trainer = _trainer(folder, max_steps=1)
    trace.watch(trainer.step_log.records, "take")
    trainer.train()
    with trace.on():
        run = open_run(folder)
    server = Server(Queries(run))
    with trace.on():
        threading.Thread(target=server.serve_forever, daemon=True).start()
        httpx.get(f"{server.url}api/trajectory", params={"place": "0"}).raise_for_status()
    server.shutdown()
    server.server_close()


QUESTIONS: dict[str, Callable[[Trace, Path], None]] = {
    "A token's advantage": advantage,
    "A turn sampled by vLLM": sampled_turn,
    "A server that dies": dying_server,
    "A recipe's key and its use": option,
    "A record and its way to the page": record,
}
"""The questions, and what is run for them."""

NOTES = {
    "A server that dies": "Where no server comes back, the `ServerGoneError` of one process ends all "
    "(`mt_grpo/training/ranks.py`), and `mt_grpo/app/train.py` writes a checkpoint and names it beside the error.",
    "A recipe's key and its use": "The trainer then uses it as `args.KEY`; `git grep` finds where.",
    "A record and its way to the page": "`mt_grpo/viewer/page/trajectory.js` draws the answer.",
}
"""What a trace does not see."""

FEW = 12
"""Lines of called functions below which a file is left out. A list on the page is right while files with twice as many
are in it, and none with half as many, so that not every change of a few lines changes the page."""

COMMON = "What most of these call"

Traces = dict[str, dict[str, dict[str, int]]]


def traces() -> Traces:
    """By question and file, the functions that were called and how many lines each has."""
    found: Traces = {}
    for question, run in QUESTIONS.items():
        trace = Trace()
        with tempfile.TemporaryDirectory() as folder:
            run(trace, Path(folder))
        found[question] = trace.files
    return found


def lists(found: Traces, few: float = FEW) -> dict[str, list[str]]:
    """The files of each list. Those that most questions call are a list of their own."""
    large = {
        title: [file for file, functions in files.items() if sum(functions.values()) >= few]
        for title, files in found.items()
    }
    counts = Counter(file for files in large.values() for file in files)
    common = sorted(file for file, count in counts.items() if 2 * count > len(found))
    own = {title: [file for file in files if file not in common] for title, files in large.items()}
    return {**own, COMMON: common}


def differences(found: Traces, there: dict[str, set[str]]) -> dict[str, list[str]]:
    """By list, the files that it lacks, and those that it should not have."""
    least, most = lists(found, 2 * FEW), lists(found, FEW / 2)
    everywhere = there.get(COMMON, set())
    wrong = {
        title: (set(least[title]) - there.get(title, set()) - everywhere)
        | (there.get(title, set()) - set(most[title]) - set(most[COMMON]))
        for title in found
    }
    return {title: sorted(files) for title, files in wrong.items() if files}


def named(page: str) -> dict[str, set[str]]:
    """The files of each list on the page."""
    parts = re.findall(r"^### (.+?)\n(.*?)(?=^##)", page, re.DOTALL | re.MULTILINE)
    return {title: set(re.findall(r"^- `(\S+)`", part, re.MULTILINE)) for title, part in parts}


def with_lists(page: str, found: dict[str, list[str]]) -> str:
    """The page with these lists in place of its own."""
    written = []
    for title, files in found.items():
        lines = [f"- `{file}`" for file in files]
        note = [f"\n{textwrap.fill(NOTES[title], 119)}"] if title in NOTES else []
        written.append("\n".join([f"### {title}\n", *lines, *note]))
    begin, end = page.index("### "), page.index("\n## ", page.index("### "))
    return page[:begin] + "\n\n".join(written) + "\n" + page[end:]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    options, found = parser.parse_args(), traces()
    page = PAGE.read_text(encoding="utf-8")
    if options.write:
        PAGE.write_text(with_lists(page, lists(found)), encoding="utf-8")
    elif options.check:
        wrong = differences(found, named(page))
        if wrong:
            sys.exit(f"The lists of {PAGE} and the calls differ in {wrong}: run scripts/trace_calls.py --write")
    else:
        for title, files in lists(found).items():
            print(f"### {title}\n")
            for file in files:
                names = dict.fromkeys(name for each in found.values() for name in each.get(file, {}))
                print(f"- `{file}`: {', '.join(found[title].get(file, names) if title in found else names)}")
            print()
