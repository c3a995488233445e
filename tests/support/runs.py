"""Makes the folder of a run without training: conversations, credit, updates, steps, metrics and the tokenizer."""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

import mt_grpo
from mt_grpo.runlog import Batch, RunWriter
from mt_grpo.runlog.writer import finite
from mt_grpo.trajectory import StopReason, ToolCall, Trajectory, Turn

EMBEDDED = Path(mt_grpo.__file__).parent / "data" / "embedded" / "model" / "tokenizer.json"
HOSTILE = "<script>document.title = 'broken'</script><img src=x onerror=alert(1)>"
REWARDS = [
    {"name": "tool_execution", "kind": "turn", "weight": 0.5, "maximum": 0.2},
    {"name": "exact_match", "kind": "outcome", "weight": 1.0, "maximum": 1.0},
    {"name": "format", "kind": "outcome", "weight": 0.2, "maximum": 1.0},
]
CAPITALS = {"Peru": "Lima", "Chile": "Santiago", "Kenya": "Nairobi", "Japan": "Tokyo", "Norway": "Oslo"}
START = 1_760_000_000.0


def write_run(
    folder: Path,
    steps: int = 3,
    groups: int = 4,
    group_size: int = 4,
    turns: int = 3,
    ranks: int = 1,
    seed: int = 0,
    poison: str = "",
) -> Path:
    """
    Writes a run: an evaluation of `groups` questions before and after, and `steps` steps of `groups` groups.

    Args:
        folder (`Path`): Its `output_dir`.
        turns (`int`): Most turns of a conversation.
        ranks (`int`): Processes that write; each has whole groups.
        poison (`str`): Stands at the end of every name, question, answer and error.
    """
    rewards = [{**reward, "name": reward["name"] + poison} for reward in REWARDS]
    draw = random.Random(seed)
    tokenizer = Tokenizer.from_file(str(EMBEDDED))
    writers = [RunWriter(folder, rank) for rank in range(ranks)]
    about = {
        "kind": "run",
        "version": 1,
        "started": START,
        "group_size": group_size,
        "group_size_eval": 1,
        "processes": ranks,
        "rewards": rewards,
        "estimator": "mt_grpo" + poison,
        "model": "embedded" + poison,
        "options": {"learning_rate": "1e-4" + poison, "max_steps" + poison: 4} if poison else {},
    }
    writers[0].append([*writers[0].save_tokenizer(_copy_tokenizer), about])
    for moment in range(steps + 2):
        step = min(max(0, moment - 1), steps)
        mode = "train" if 0 < moment <= steps else "eval"
        size = group_size if mode == "train" else 1
        lines: list[dict[str, Any]] = []
        batches = []
        for rank in range(ranks):
            count = groups * size // ranks
            numbers = list(range(rank * count, (rank + 1) * count))
            skill = step / max(1, steps)
            made = [_conversation(draw, tokenizer, number, size, turns, skill, moment, poison) for number in numbers]
            batches.append(Batch(mode, step, 0, size, numbers, made, rewards))
            lines += writers[rank].write(batches[-1])
        writers[0].append(lines)
        for rank, batch in enumerate(batches):
            advantages = [[draw.gauss(0, 1) for _ in each.turns] for each in batch.trajectories]
            writers[0].append(writers[rank].write_credit(batch, advantages))
            if mode == "train":
                rows, summaries = _updates(draw, batch)
                writers[0].append(writers[rank].write_updates(step, rows, summaries))
        if mode == "train":
            writers[0].append([_step(draw, step)])
            _add_metrics(folder, batches, step)
    return folder


def index_line(session: str, **fields: Any) -> dict[str, Any]:
    """A line of kind `rollout` of an index, of a conversation of a turn."""
    numbers = dict.fromkeys(("step", "k", "rank", "group", "member", "forks", "calls", "row"), 0)
    sizes = {"turns": 1, "tokens": [3], "context": 10, "unique": 13, "errors": [0]}
    texts = {"mode": "train", "prompt": "", "stop": "answered", "error": None, "answer": None, "file": "a.parquet"}
    rewards = {"right": None, "reward": 0.5, "rewards": {}, "turn_rewards": [None]}
    times = {"start": 1.0, "seconds": 1.0, "turn_seconds": [1.0], "tool_seconds": [0.0]}
    return {"session": session, **numbers, **sizes, **texts, **rewards, **times, **fields}


def _copy_tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True)
    shutil.copy(EMBEDDED, folder)


def _conversation(
    draw: random.Random,
    tokenizer: Tokenizer,
    number: int,
    size: int,
    turns: int,
    skill: float,
    moment: int,
    poison: str,
) -> Trajectory:
    country, capital = list(CAPITALS.items())[number // size % len(CAPITALS)]
    prompt = [
        {"role": "system", "content": "Answer with the tool."},
        {"role": "user", "content": f"What is the capital of {country}?{poison}"},
    ]
    start = START + 60 * moment
    made = Trajectory(prompt, session=f"s-{number}", row={"answer": [capital]}, start=start)
    context = tokenizer.encode("\n".join(message["content"] for message in prompt)).ids
    count = draw.randint(1, turns)
    for index in range(count):
        last = index == count - 1
        failed = draw.random() < 0.2 * (1 - skill) and not last
        text = f"<answer>{capital if draw.random() < 0.3 + 0.6 * skill else 'Paris'}</answer>"
        text = text if last else f'I look it up. <tool>{{"name": "search", "args": {{"query": "{country}"}}}}</tool>'
        ids = tokenizer.encode(text).ids
        turn = Turn(
            index,
            {"role": "assistant", "content": text},
            num_tokens=len(ids),
            context_length=len(context),
            seconds=draw.uniform(0.2, 2.0),
            weight_version=moment,
            start=start,
        )
        if draw.random() < 0.1 and index:  # the history is rewritten
            context, turn.fork_cause = context[: len(context) // 2], "rewritten by the environment"
        made.tree.add_turn(context, ids, [round(-draw.expovariate(2.0), 6) for _ in ids])
        context = context + ids
        if not last:
            result = f"Error: {HOSTILE}" if failed else f"The capital of {country} is {capital}. {HOSTILE}"
            call = ToolCall(
                "search" + poison,
                {"query": country},
                result,
                f"Timeout: took longer than 5 s.{poison}" if failed else None,
                True,
                draw.uniform(0.01, 1.0),
                start=start + turn.seconds,
            )
            turn.tool_calls, turn.replies = [call], [{"role": "tool", "content": result}]
            context = context + tokenizer.encode(result).ids
            start += call.seconds
        start += turn.seconds
        made.turns.append(turn)
    made.answer = made.turns[-1].text.removeprefix("<answer>").removesuffix("</answer>") + poison
    made.seconds = start - made.start
    made.stop_reason = StopReason.ANSWERED if draw.random() < 0.9 else StopReason.TIMEOUT
    made.rewards = {
        "outcome": {
            "exact_match" + poison: float(made.answer == capital + poison),
            "format" + poison: None if number % 7 == 6 else 1.0,
        },
        "turn": {
            "tool_execution" + poison: [
                0.2 * (turn.num_failures == 0) if turn.num_attempts else None for turn in made.turns
            ]
        },
    }
    return made


def _updates(draw: random.Random, batch: Batch) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rows, summaries = [], []
    for session, trajectory in zip(batch.sessions, batch.trajectories, strict=True):
        nodes = [trajectory.tree.nodes[index] for index in trajectory.tree.depth_first()]
        turns = [node.turn for node in nodes for _ in node.tokens]
        begin = turns.index(0)
        columns = [place - begin for place, turn in enumerate(turns) if turn >= 0]
        difference = np.array([draw.gauss(0, 0.01) for _ in columns])
        difference[0] += 0.5 * (draw.random() < 0.05)
        entropies = np.array([draw.expovariate(2.0) for _ in columns])
        ratios = np.array([draw.gauss(1, 0.05) for _ in columns])
        clipped = (abs(ratios - 1) > 0.1).astype(np.int8)
        rows.append(
            {
                "session": session,
                "mode": batch.mode,
                "step": batch.step,
                "k": batch.k,
                "columns": columns,
                "difference": difference.astype(np.float16),
                "entropies": entropies.astype(np.float16),
                "ratios": ratios.astype(np.float16),
                "clipped": clipped,
            }
        )
        summaries.append(
            {
                "mismatch": finite(float(abs(difference).max())),
                "entropy": finite(float(entropies.mean())),
                "clipped": finite(float(clipped.mean())),
            }
        )
    return rows, summaries


def _step(draw: random.Random, step: int) -> dict[str, Any]:
    parts = {name: round(draw.uniform(0.1, 5.0), 3) for name in ("sampling", "rewards", "sync", "training")}
    return {"kind": "step", "step": step, "start": START + 60 * step, "seconds": sum(parts.values()), **parts}


def _add_metrics(folder: Path, batches: list[Batch], step: int) -> None:
    made = [trajectory for batch in batches for trajectory in batch.trajectories]
    name = batches[0].rewards[1]["name"]
    right = sum(trajectory.rewards["outcome"][name] for trajectory in made) / len(made)
    line = {"step": step + 1, "loss": 0.01, "reward": right, f"rewards/{name}/mean": right, "entropy": 0.5}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":  # python tests/support/runs.py FOLDER [STEPS [GROUPS]]
    write_run(Path(sys.argv[1]), *map(int, sys.argv[2:]))
