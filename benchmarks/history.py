"""
What a history policy costs over 1-64 turns: sequences, their tokens, tokens of the tree that shares their prefixes,
tokens of one forward per turn, and host time.

    python benchmarks/history.py [--quick]

Prints a table, writes `benchmarks/results/history.json` and `docs/images/history.png`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from pathlib import Path

import matplotlib
from common import build_tokenizer, write
from rich.console import Console
from rich.table import Table

from mt_grpo.envs import MultiTurnToolEnv, Step
from mt_grpo.rollout import RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.trajectory import StopReason, Trajectory

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

POLICIES = {"keep": None, "compact": 8, "strip_thinking": None}
THOUGHT = "<think>\n" + "the question asks for the capital, so the capital is to be found " * 3 + "\n</think>\n\n"


class Talk(MultiTurnToolEnv):
    """Asks the same question a number of times."""

    def __init__(self, turns: int) -> None:
        super().__init__(protocol="learnt_tags")
        self.number = turns

    async def step(self, turn):
        done = StopReason.ANSWERED if turn.index + 1 == self.number else False
        return Step("And which currency is used there?", done=done)


def converse(tokenizer, turns: int, policy: str) -> tuple[Trajectory, float]:
    """One scripted conversation, and the seconds the host took for it."""
    engine = ScriptedEngine(tokenizer, lambda session, turn: f"{THOUGHT}Lima{turn}<|im_end|>", context_length=1 << 20)
    runner = RolloutRunner(Talk(turns), engine, history=policy, compact_every=POLICIES[policy])
    start = time.perf_counter()
    (trajectory,) = asyncio.run(runner.run([RolloutRequest("What is the capital of Peru?", "0")], SamplingParams()))
    return trajectory, time.perf_counter() - start


def measure(tokenizer, turns: int, policy: str, repeats: int) -> dict[str, float]:
    """The row of one policy at one number of turns."""
    runs = [converse(tokenizer, turns, policy) for _ in range(repeats)]
    trajectory = runs[0][0]
    return {
        "policy": policy,
        "turns": turns,
        "sequences": trajectory.tree.num_sequences,
        "sequence tokens": sum(len(sequence.tokens) for sequence in trajectory.tree.sequences()),
        "tree tokens": trajectory.tree.num_tokens,
        "turn-by-turn tokens": sum(turn.context_length + turn.num_tokens for turn in trajectory.turns),
        "host µs a turn": statistics.median(seconds for _, seconds in runs) / turns * 1e6,
    }


def plot(rows: list[dict[str, float]], path: Path) -> None:
    """Tokens over turns: what the tree computes, and what its sequences would if each stood alone."""
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for policy in POLICIES:
        points = [row for row in rows if row["policy"] == policy]
        turns = [row["turns"] for row in points]
        label = f"{policy} every {POLICIES[policy]}" if POLICIES[policy] else policy
        tokens = [row["sequence tokens"] for row in points]
        (line,) = axes.plot(turns, tokens, linestyle="--", label=f"{label}: as separate sequences")
        tokens = [row["tree tokens"] for row in points]
        axes.plot(turns, tokens, marker="o", color=line.get_color(), label=f"{label}: as a tree")
    axes.set(xlabel="turns", ylabel="tokens computed", xscale="log", yscale="log", title="Tokens a trajectory costs")
    axes.set_xticks([1, 2, 4, 8, 16, 32, 64], [1, 2, 4, 8, 16, 32, 64])
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer turns and repeats, to see that it runs")
    quick = parser.parse_args().quick
    tokenizer = build_tokenizer()
    counts = [1, 2, 4] if quick else [1, 2, 4, 8, 16, 32, 64]
    rows = [measure(tokenizer, turns, policy, 1 if quick else 5) for policy in POLICIES for turns in counts]
    table = Table(title="history")
    for column in rows[0]:
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in rows:
        table.add_row(*(value if isinstance(value, str) else f"{value:.0f}" for value in row.values()))
    Console().print(table)
    if not quick:
        write("history", {"repeats": 5}, rows)
        plot(rows, Path(__file__).parents[1] / "docs" / "images" / "history.png")


if __name__ == "__main__":
    main()
