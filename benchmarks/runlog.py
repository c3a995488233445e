"""A conversation on disk: bytes and milliseconds of writing it as a line of JSON and as a row of a run's files."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import numpy as np
from common import build_tokenizer, write
from measure import interleave

from mt_grpo.data.embedded.corpus import passages
from mt_grpo.runlog import Batch, RunWriter, open_run, read_trajectories
from mt_grpo.runlog.files import to_json
from mt_grpo.trajectory import StopReason, ToolCall, Trajectory, Turn

REWARDS = [
    {"name": "tool_execution", "kind": "turn", "weight": 0.5, "maximum": 1.0},
    {"name": "exact_match", "kind": "outcome", "weight": 1.0, "maximum": 1.0},
]


def conversation(
    draw: np.random.Generator, tokenizer, sentences: list[str], number: int, turns: int, size: int
) -> Trajectory:
    """A conversation of `turns` turns and `size` tokens: half of each turn is sampled, half is what a tool said."""
    made = Trajectory([{"role": "user", "content": "What is asked?"}], session=f"train-000000-000000-{number:06d}")
    made.row, made.stop_reason, made.answer = {"answer": ["Lima"]}, StopReason.ANSWERED, "Lima"
    context = tokenizer.encode(made.prompt[0]["content"])
    for index in range(turns):
        said, found = (_words(draw, tokenizer, sentences, size // turns // 2) for _ in range(2))
        # as engines send them: float32
        logprobs = (-draw.exponential(0.5, len(said)).astype(np.float32)).tolist()
        made.tree.add_turn(context, said, logprobs)
        context = context + said + found
        text, result = tokenizer.decode(said), tokenizer.decode(found)
        call = ToolCall("search", {"query": text[:40]}, result, executed=True, seconds=0.1, start=1.7e9 + index)
        reply = {"role": "tool", "content": result}
        message = {"role": "assistant", "content": text}
        made.turns.append(Turn(index, message, [call], [reply], num_tokens=len(said), start=1.7e9 + index))
    made.rewards = {"outcome": {"exact_match": 1.0}, "turn": {"tool_execution": [1.0] * turns}}
    return made


def _words(draw: np.random.Generator, tokenizer, sentences: list[str], size: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < size:
        ids += tokenizer.encode(sentences[draw.integers(len(sentences))])
    return ids[:size]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=4000, help="of a conversation")
    parser.add_argument("--conversations", type=int, default=64, help="of a batch")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="one repeat of a few; writes no results")
    args = parser.parse_args()
    if args.quick:
        args.conversations, args.repeats = 4, 1
    draw, tokenizer = np.random.default_rng(0), build_tokenizer()
    sentences = passages()
    made = [
        conversation(draw, tokenizer, sentences, number, args.turns, args.tokens)
        for number in range(args.conversations)
    ]
    batch = Batch("train", 0, 0, 8, list(range(len(made))), made, REWARDS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writer = RunWriter(folder)

        def as_json() -> None:
            with (folder / "trajectories.jsonl").open("w", encoding="utf-8") as file:
                file.write("".join(to_json({"step": 0, "mode": "train", **each.to_dict()}) + "\n" for each in made))

        def as_parquet() -> None:
            (folder / "rollouts" / "index.jsonl").unlink(missing_ok=True)
            writer.append(writer.write(batch))

        functions = {"json": as_json, "parquet": as_parquet}
        for function in functions.values():
            function()
        seconds = interleave(functions, args.repeats)
        sizes = {
            "json": (folder / "trajectories.jsonl").stat().st_size,
            "parquet": sum(path.stat().st_size for path in (folder / "rollouts").iterdir()),
        }
        index = (folder / "rollouts" / "index.jsonl").stat().st_size
        assert [each["tree"] for each in read_trajectories(folder)] == [each.tree.to_dict() for each in made]
        run = open_run(folder)
        reading = interleave({"one": lambda: run.trajectory(run.rows[-1]["session"])}, args.repeats)["one"]
    rows = [
        {
            "form": form,
            "kilobytes": round(sizes[form] / len(made) / 1000, 2),
            "milliseconds": round(1000 * statistics.median(seconds[form]) / len(made), 3),
        }
        for form in functions
    ]
    ratios = {
        "bytes": round(sizes["parquet"] / sizes["json"], 3),
        "time": round(statistics.median(seconds["parquet"]) / statistics.median(seconds["json"]), 3),
        "fastest": round(min(seconds["parquet"]) / min(seconds["json"]), 3),
    }
    print("| form | kB a conversation | ms a conversation |\n| --- | --- | --- |")
    for row in rows:
        print(f"| {row['form']} | {row['kilobytes']} | {row['milliseconds']} |")
    print(f"parquet / json: {ratios['bytes']} of the bytes, {ratios['time']} of the time")
    print(f"index: {index / len(made):.0f} bytes a conversation; one is read in {1000 * min(reading):.1f} ms")
    if not args.quick:
        further = {"index_bytes": round(index / len(made)), "read_milliseconds": round(1000 * min(reading), 2)}
        write("runlog", vars(args), rows, ratios=ratios, **further)


if __name__ == "__main__":
    main()
