"""
Prompt tokens that a real vLLM server's prefix cache served, over those it could have.

Groups of conversations, all at once, every turn answered with a passage, against a server on this machine's CPU.
*Reusable* is the longest prefix that a request's context shares with the context and action of any request asked
before it, in whatever state that is: members of a group asked at the same moment count, since the server computes
their prompt once where it takes them into one batch. The last token of a context is not among them: it always has to
be computed. vLLM caches whole blocks, so that they are counted in whole blocks too. This is counted from the tokens on
the client's side; what was served comes from the server's own metrics.

The same conversations are then sampled from two servers. A group stays on one of them, so that two serve as large a
share of the prompts from their caches as one.

    python benchmarks/prefix_cache.py [--quick]

Needs `.venv-vllm` (`make server-cpu`). Prints a table and writes `benchmarks/results/prefix_cache.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from common import build_tokenizer, write
from rich.console import Console
from rich.table import Table
from server import block_size, metric, read, serve
from transformers import AutoModelForCausalLM

from mt_grpo.data import embedded
from mt_grpo.data.embedded.tool import search
from mt_grpo.envs import MultiTurnToolEnv, Step
from mt_grpo.rollout import RolloutLimits, RolloutRequest, RolloutRunner, Sample, SamplingParams, derive_seed
from mt_grpo.rollout.engines.vllm import VLLMServerClient
from mt_grpo.servers.http import Server
from mt_grpo.trajectory import StopReason, Trajectory, Turn

TARGET = 0.99
TARGET_OF_TWO = 0.95
"""Share of prompt tokens from the caches of two servers, over that of one."""
LENGTH = 4096
SUBJECTS = ("river", "mountain", "moon", "country", "capital", "writer", "element", "state")


class Passages(MultiTurnToolEnv):
    """Answers every turn with a passage, whatever the model said."""

    async def step(self, turn: Turn) -> str | Step:
        if turn.index >= self.max_steps:
            return Step(done=StopReason.MAX_STEPS)
        subject = SUBJECTS[derive_seed(self.session, turn.index) % len(SUBJECTS)]
        return search(f"{subject} {turn.index}")


class Prefixes:
    """The prefixes of everything added, in whole blocks."""

    def __init__(self, block: int) -> None:
        self.block = block
        self._known: set[int] = set()

    def _keys(self, tokens: list[int]) -> Any:
        key = 0
        for begin in range(0, len(tokens) - self.block + 1, self.block):
            key = hash((key, *tokens[begin : begin + self.block]))
            yield key

    def add(self, tokens: list[int]) -> None:
        self._known.update(self._keys(tokens))

    def match(self, tokens: list[int]) -> int:
        """Tokens of the longest prefix of `tokens` that is known."""
        length = 0
        for key in self._keys(tokens):
            if key not in self._known:
                break
            length += self.block
        return length


class Recorded(VLLMServerClient):
    """Keeps in `asked` the context and the action of every request, in the order of asking."""

    async def generate(self, context: list[int], sampling: SamplingParams, session: str) -> Sample:
        request = [list(context), []]
        self.asked.append(request)
        sample = await super().generate(context, sampling, session)
        request[1] = sample.ids
        return sample


def reusable(asked: list[list[list[int]]], block: int) -> int:
    """Tokens that a cache of such blocks could serve, given requests (context, action) in the order of asking."""
    prefixes, total = Prefixes(block), 0
    for context, action in asked:
        total += prefixes.match(context[:-1])
        prefixes.add(context + action)
    return total


def build_model(folder: str) -> None:
    """The embedded model with room for long conversations."""
    model = AutoModelForCausalLM.from_pretrained(Path(embedded.__file__).parent / "model")
    model.config.max_position_embeddings = LENGTH
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def run(urls: list[str], folder: str, groups: int, members: int, turns: int) -> dict[str, Any]:
    """One round of rollouts; the servers' metrics before and after it."""
    client = Recorded(urls, build_tokenizer(), model=folder)
    client.asked = []
    asyncio.run(client.connect())
    env = Passages(
        system_prompt="Search, then answer. " + search("ocean") * 3, max_steps=turns - 1, protocol="learnt_tags"
    )
    runner = RolloutRunner(env, client, RolloutLimits(max_turn_tokens=64))
    requests = []
    for group in range(groups):
        prompt = f"{search(SUBJECTS[group % len(SUBJECTS)])} Question {group}: what is that?"
        requests += [RolloutRequest(prompt, f"{group:03d}-{member:03d}") for member in range(members)]
    for number, request in enumerate(requests):
        request.seed = derive_seed(0, number)

    async def go() -> list[Trajectory]:
        try:
            return await runner.run(requests, SamplingParams())
        finally:
            await client.close()

    names = {"hits": "vllm:prefix_cache_hits_total", "queries": "vllm:prefix_cache_queries_total"}
    before = {key: sum(metric(url, name) for url in urls) for key, name in names.items()}
    start = time.perf_counter()
    trajectories = asyncio.run(go())
    seconds = time.perf_counter() - start
    served = {key: int(sum(metric(url, name) for url in urls) - before[key]) for key, name in names.items()}
    tokens = sum(len(context) for context, _ in client.asked)
    if served["queries"] != tokens:
        raise SystemExit(f"The server counts {served['queries']} prompt tokens, not {tokens}.")
    block = block_size(urls[0])
    row = {"tokens": reusable(client.asked, 1), "blocks": reusable(client.asked, block), "hits": served["hits"]}
    return row | {
        "servers": len(urls),
        "block": block,
        "conversations": len(requests),
        "turns": sum(len(trajectory.turns) for trajectory in trajectories) / len(trajectories),
        "requests": len(client.asked),
        "context": tokens,
        "of_blocks": row["hits"] / row["blocks"],
        "of_tokens": row["hits"] / row["tokens"],
        "of_prompts": row["hits"] / tokens,
        "seconds": seconds,
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Tokens, and shares of the reusable ones."""
    table = Table(title="Prompt tokens from the server's prefix cache")
    columns = ("servers", "block", "conversations", "turns each", "prompt tokens", "reusable", "in whole blocks")
    for column in (*columns, "from the cache", "share of blocks", "target", "share of tokens", "wall, s"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [
            row["servers"],
            row["block"],
            row["conversations"],
            f"{row['turns']:.1f}",
            row["context"],
            row["tokens"],
        ]
        cells += [row["blocks"], row["hits"], f"{row['of_blocks']:.4f}", f">= {TARGET}", f"{row['of_tokens']:.4f}"]
        table.add_row(*map(str, cells), f"{row['seconds']:.1f}")
    Console(width=170).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few conversations, one server; nothing is written")
    quick = parser.parse_args().quick
    warnings.simplefilter("ignore", FutureWarning)
    groups, members, turns = (2, 2, 4) if quick else (8, 8, 12)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        build_model(folder)
        for flags in ((),) if quick else ((), ("--block-size", "32")):
            with serve(read(folder, "--vllm_max_model_length", str(LENGTH)), *flags) as url:
                version = Server(url).get("/version")["version"]
                rows.append(run([url], folder, groups, members, turns))
                show(rows)
        if not quick:
            flags, limit = ("--block-size", "32"), ("--vllm_max_model_length", str(LENGTH))
            with serve(read(folder, *limit), *flags) as one, serve(read(folder, *limit), *flags) as other:
                rows.append(run([one, other], folder, groups, members, turns))
                rows[-1]["of_one"] = rows[-1]["of_prompts"] / rows[-2]["of_prompts"]
                show(rows)
                print(f"Two servers over one: {rows[-1]['of_one']:.3f} (target: >= {TARGET_OF_TWO})")
    if not quick:
        settings = {"groups": groups, "members": members, "turns": turns, "seed": 0, "target": TARGET, "vllm": version}
        write("prefix_cache", settings, rows)
    least = min(row["of_blocks"] for row in rows if row["servers"] == 1)
    if least < TARGET:
        raise SystemExit(f"The cache served {least:.4f} of what it could; target: {TARGET}.")
    if not quick and rows[-1]["of_one"] < TARGET_OF_TWO:
        raise SystemExit(f"Two servers reach {rows[-1]['of_one']:.3f} of one; target: {TARGET_OF_TWO}.")


if __name__ == "__main__":
    main()
