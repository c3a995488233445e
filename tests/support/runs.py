"""Makes the folder of a run without training: conversations, credit, updates, steps, metrics and the tokenizer."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

import mt_grpo
from mt_grpo.runlog import Batch, RunWriter, open_run
from mt_grpo.runlog.files import Heartbeat
from mt_grpo.runlog.writer import finite
from mt_grpo.trajectory import StopReason, ToolCall, Trajectory, Turn
from mt_grpo.viewer.queries import Queries

EMBEDDED = Path(mt_grpo.__file__).parent / "data" / "embedded" / "model" / "tokenizer.json"
TOKENIZER = Tokenizer.from_file(str(EMBEDDED))
HOSTILE = "<script>document.title = 'broken'</script><img src=x onerror=alert(1)>"
REWARDS = [
    {"name": "tool_execution", "kind": "turn", "weight": 0.5, "maximum": 0.2},
    {"name": "exact_match", "kind": "outcome", "weight": 1.0, "maximum": 1.0},
    {"name": "format", "kind": "outcome", "weight": 0.2, "maximum": 1.0},
]
CAPITALS = {"Peru": "Lima", "Chile": "Santiago", "Kenya": "Nairobi", "Japan": "Tokyo", "Norway": "Oslo"}
START = 1_760_000_000.0
CONFIG = "model_name_or_path: org/small\nadvantage_estimator: gtpo\nlearning_rate: 0.00123\n"


def copy_tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True)
    shutil.copy(EMBEDDED, folder)


def write_run(
    folder: Path,
    steps: int = 3,
    groups: int = 4,
    group_size: int = 4,
    ranks: int = 1,
    seed: int = 0,
    poison: str = "",
    group_size_eval: int = 1,
) -> Path:
    """
    Writes a run: an evaluation of `groups` questions before and after, and `steps` steps of `groups` groups.

    Args:
        folder (`Path`): Its `output_dir`.
        ranks (`int`): Processes that write; each has whole groups.
        poison (`str`): Stands at the end of every name, question, answer and error.
    """
    rewards = [{**reward, "name": reward["name"] + poison} for reward in REWARDS]
    draw = random.Random(seed)
    writers = [RunWriter(folder, rank) for rank in range(ranks)]
    sizes = {"started": START, "group_size": group_size, "group_size_eval": group_size_eval, "processes": ranks}
    names = {"rewards": rewards, "estimator": "mt_grpo" + poison, "model": "embedded" + poison}
    options = {"learning_rate": "1e-4" + poison, "max_steps" + poison: 4} if poison else {}
    about = {"kind": "run", "version": 1, **sizes, **names, "options": options}
    writers[0].append([*writers[0].save_tokenizer(copy_tokenizer), about])
    for moment in range(steps + 2):
        step = min(max(0, moment - 1), steps)
        mode = "train" if 0 < moment <= steps else "eval"
        size = group_size if mode == "train" else group_size_eval
        count = groups * size // ranks
        skill = step / max(1, steps)
        batches, lines = [], []
        for rank, writer in enumerate(writers):
            numbers = list(range(rank * count, (rank + 1) * count))
            made = [_conversation(draw, number, number // size, skill, moment, poison) for number in numbers]
            batches.append(Batch(mode, step, 0, size, numbers, made, rewards))
            lines += writer.write(batches[-1])
        writers[0].append(lines)
        for writer, batch in zip(writers, batches, strict=True):
            advantages = [[draw.gauss(0, 1) for _ in each.turns] for each in batch.trajectories]
            writers[0].append(writer.write_credit(batch, advantages))
            if mode == "train":
                writers[0].append(writer.write_updates(step, *_updates(draw, batch)))
        if mode == "train":
            writers[0].append([_step(draw, step)])
            _add_metrics(folder, batches, step)
    return folder


def talk(*turns: tuple[list[int], list[int], str], **fields: Any) -> Trajectory:
    """A conversation of turns: of each the context, what was sampled, and its words."""
    about = {"prompt": [{"role": "user", "content": "?"}], "stop_reason": StopReason.ANSWERED}
    made = Trajectory(**{**about, **fields})
    for index, (context, ids, words) in enumerate(turns):
        made.tree.add_turn(context, ids, [-0.5] * len(ids))
        message = {"role": "assistant", "content": words}
        made.turns.append(Turn(index, message, num_tokens=len(ids), context_length=len(context)))
    return made


def write_conversations(
    folder: Path,
    made: list[Trajectory],
    save_tokenizer: Callable[[Path], Any] = copy_tokenizer,
    rewards: list[dict[str, Any]] = REWARDS,
    **about: Any,
) -> Path:
    """Writes a run of one group, whose turns all have the advantage 0.5."""
    writer, batch = RunWriter(folder), Batch("train", 0, 0, len(made), [*range(len(made))], made, rewards)
    about = {"kind": "run", "version": 1, "group_size": len(made), "rewards": rewards, "estimator": "gtpo", **about}
    writer.append([*writer.save_tokenizer(save_tokenizer), about, *writer.write(batch)])
    writer.append(writer.write_credit(batch, [[0.5] * len(each.turns) for each in made]))
    return folder


def write_begun(folder: Path, error: str | None = None, config: str = CONFIG) -> Any:
    """Writes options and a state alone: of a run that failed, or for as long as what is returned is entered."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config)
    at = {"step": 0, "of": 40, "waits_for": "sampling", "under_way": []}
    pulse = Heartbeat(folder, lambda: at).beating()
    if error is None:
        return pulse
    with suppress(ValueError), pulse:
        raise ValueError(error)
    return folder


def queries_of(folder: Path) -> Queries:
    """What a page asks of a run, which may have begun only."""
    queries = Queries(open_run(folder, begun=True))
    queries.answer("run", {})
    return queries


def index_line(session: str, **fields: Any) -> dict[str, Any]:
    """A line of kind `rollout` of an index, of a conversation of a turn."""
    numbers = dict.fromkeys(("step", "k", "rank", "group", "member", "forks", "calls", "row"), 0)
    sizes = {"turns": 1, "tokens": [3], "context": 10, "unique": 13, "errors": [0]}
    texts = {"mode": "train", "prompt": "", "stop": "answered", "error": None, "answer": None, "file": "a.parquet"}
    rewards = {"right": None, "reward": 0.5, "rewards": {}, "turn_rewards": [None]}
    times = {"start": 1.0, "seconds": 1.0, "turn_seconds": [1.0], "tool_seconds": [0.0]}
    return {"session": session, **numbers, **sizes, **texts, **rewards, **times, **fields}


def _conversation(
    draw: random.Random, number: int, question: int, skill: float, moment: int, poison: str
) -> Trajectory:
    """One of up to three turns, by a policy of some skill."""
    country, capital = list(CAPITALS.items())[question % len(CAPITALS)]
    prompt = [
        {"role": "system", "content": "Answer with the tool."},
        {"role": "user", "content": f"What is the capital of {country}?{poison}"},
    ]
    start = START + 60 * moment
    made = Trajectory(prompt, session=f"s-{number}", row={"answer": [capital]}, start=start)
    context = _ids("\n".join(message["content"] for message in prompt))
    count = draw.randint(1, 3)
    for index in range(count):
        last = index == count - 1
        failed = draw.random() < 0.2 * (1 - skill) and not last
        text = f"<answer>{capital if draw.random() < 0.3 + 0.6 * skill else 'Paris'}</answer>"
        text = text if last else f'I look it up. <tool>{{"name": "search", "args": {{"query": "{country}"}}}}</tool>'
        ids = _ids(text)
        turn = Turn(index, {"role": "assistant", "content": text}, num_tokens=len(ids), context_length=len(context))
        turn.seconds, turn.weight_version, turn.start = draw.uniform(0.2, 2.0), moment, start
        if draw.random() < 0.1 and index:  # the history is rewritten
            context, turn.fork_cause = context[: len(context) // 2], "rewritten by the environment"
        made.tree.add_turn(context, ids, [round(-draw.expovariate(2.0), 6) for _ in ids])
        context = context + ids
        start += turn.seconds
        if not last:
            result = f"Error: {HOSTILE}" if failed else f"The capital of {country} is {capital}. {HOSTILE}"
            error = f"Timeout: took longer than 5 s.{poison}" if failed else None
            seconds = draw.uniform(0.01, 1.0)
            call = ToolCall("search" + poison, {"query": country}, result, error, True, seconds, start=start)
            turn.tool_calls, turn.replies = [call], [{"role": "tool", "content": result}]
            context = context + _ids(result)
            start += seconds
        made.turns.append(turn)
    made.answer = made.turns[-1].text.removeprefix("<answer>").removesuffix("</answer>") + poison
    made.seconds = start - made.start
    made.stop_reason = StopReason.ANSWERED if draw.random() < 0.9 else StopReason.TIMEOUT
    executed = [0.2 * (turn.num_failures == 0) if turn.num_attempts else None for turn in made.turns]
    right = float(made.answer == capital + poison)
    outcome = {"exact_match" + poison: right, "format" + poison: None if number % 7 == 6 else 1.0}
    made.rewards = {"outcome": outcome, "turn": {"tool_execution" + poison: executed}}
    return made


def _ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def _updates(draw: random.Random, batch: Batch) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rows, summaries = [], []
    for session, trajectory in zip(batch.sessions, batch.trajectories, strict=True):
        nodes = [trajectory.tree.nodes[index] for index in trajectory.tree.depth_first()]
        turns = [node.turn for node in nodes for _ in node.tokens]
        columns = [place - turns.index(0) for place, turn in enumerate(turns) if turn >= 0]
        difference = np.array([draw.gauss(0, 0.01) for _ in columns])
        difference[0] += 0.5 * (draw.random() < 0.05)
        entropies = np.array([draw.expovariate(2.0) for _ in columns])
        ratios = np.array([draw.gauss(1, 0.05) for _ in columns])
        clipped = (abs(ratios - 1) > 0.1).astype(np.int8)
        values = {"difference": difference, "entropies": entropies, "ratios": ratios}
        kept = {name: each.astype(np.float16) for name, each in values.items()}
        of_batch = {"session": session, "mode": batch.mode, "step": batch.step, "k": batch.k}
        rows.append({**of_batch, "columns": columns, "clipped": clipped, **kept})
        means = {"mismatch": abs(difference).max(), "entropy": entropies.mean(), "clipped": clipped.mean()}
        summaries.append({name: finite(float(value)) for name, value in means.items()})
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
