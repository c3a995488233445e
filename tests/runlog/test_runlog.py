"""What a run leaves can be read as it was: whole, half written, while it is written, and trimmed to a checkpoint."""

import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from support.runs import REWARDS, index_line, write_run
from tokenizers import Tokenizer, decoders, models

from mt_grpo.errors import UserError
from mt_grpo.runlog import Batch, RunLogError, RunWriter, open_run, read_trajectories
from mt_grpo.runlog.conversation import _token_texts
from mt_grpo.runlog.index import Index
from mt_grpo.runlog.index import written as written_line
from mt_grpo.runlog.schema import CREDIT, ROLLOUTS, UPDATES
from mt_grpo.runlog.writer import end_with_a_line, trim
from mt_grpo.trajectory import StopReason, ToolCall, Trajectory, Turn

SESSION = "train-000000-000000-000005"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def run(folder):
    return open_run(folder)


def talk(**fields) -> Trajectory:
    """Two turns; the second rewrites the history."""
    made = Trajectory([{"role": "user", "content": "Which city?"}], session=SESSION, **fields)
    made.tree.add_turn([1, 2, 3], [4, 5], [-0.5, -0.25])
    made.tree.add_turn([1, 2, 9], [6], [-1.5])
    call = ToolCall("search", {"q": "x"}, "Error: no", "no", True, 0.5, start=10.0)
    reply = {"role": "tool", "content": "Error: no"}
    made.turns = [
        Turn(0, {"role": "assistant", "content": "a"}, [call], [reply], num_tokens=2),
        Turn(1, {"role": "assistant", "content": "b"}, num_tokens=1, context_length=3, fork_cause="compact"),
    ]
    made.stop_reason = StopReason.ANSWERED
    made.rewards = {"outcome": {"exact_match": 1.0, "format": None}, "turn": {"tool_execution": [0.2, None]}}
    return made


def batch(*trajectories: Trajectory, step: int = 0) -> Batch:
    return Batch("train", step, 0, 4, list(range(5, 5 + len(trajectories))), list(trajectories), REWARDS)


def written(folder: Path, *batches: Batch) -> RunWriter:
    writer = RunWriter(folder)
    for each in batches:
        writer.append(writer.write(each))
    return writer


def credited(folder: Path) -> RunWriter:
    writer = written(folder, batch(talk()))
    writer.append(writer.write_credit(batch(talk()), [[0.5, -1.0]]))
    return writer


def test_what_is_written_is_read_without_loss(tmp_path):
    made = talk(row={"answer": ["Lima"]}, info={"n": 1}, seconds=2.0, start=9.0)
    written(tmp_path, batch(made))
    (data,) = read_trajectories(tmp_path)
    assert (data.pop("step"), data.pop("mode")) == (0, "train")
    assert list(data.items()) == list(made.to_dict().items()) and Trajectory.from_dict(data) == made
    (row,) = open_run(tmp_path).rows
    assert row["reward"] == pytest.approx(0.5 * 0.2 + 1.0) and row["turn_rewards"] == [0.1, None]
    assert row["rewards"] == {"tool_execution": 0.2, "exact_match": 1.0, "format": None} and row["right"] is True
    assert (row["group"], row["member"], row["errors"], row["forks"]) == (1, 1, [1, 0], 1)


def test_a_trajectory_without_turns_or_rewards_is_kept(tmp_path):
    written(tmp_path, batch(Trajectory([], stop_reason=StopReason.ENV_ERROR, error="it \ud800 broke")))
    run = open_run(tmp_path)
    assert (run.rows[0]["reward"], run.rows[0]["right"], run.rows[0]["prompt"]) == (None, None, "")
    whole = run.trajectory(SESSION)
    assert (whole["error"], whole["tokens"]["ids"], whole["nodes"]) == ("it \ud800 broke", [], [])


def test_what_json_lacks_becomes_null(tmp_path):
    made = talk(info={"loss": math.nan})
    made.tree.nodes[1].logprobs[0] = math.nan
    written(tmp_path, batch(made))
    whole = open_run(tmp_path).trajectory(SESSION)
    assert whole["info"] == {"loss": None} and whole["tokens"]["logprobs"].count(None) == 4 + 1


def test_tokens_are_laid_out_depth_first(tmp_path):
    credited(tmp_path)
    whole = open_run(tmp_path).trajectory(SESSION)
    assert (
        whole["tokens"].items()
        >= {
            "ids": [1, 2, 3, 4, 5, 9, 6],
            "turn": [-1, -1, -1, 0, 0, -1, 1],
            "parent": [-1, 0, 1, 2, 3, 1, 5],
            "subtree_end": [7, 7, 5, 5, 5, 7, 7],
            "logprobs": [None, None, None, -0.5, -0.25, None, -1.5],
            "advantages": [None, None, None, 0.5, 0.5, None, -1.0],
            "texts": None,
        }.items()
    )
    assert [turn["advantage"] for turn in whole["turns"]] == [0.5, -1.0]
    assert whole["nodes"][0] == {"parent": -1, "turn": -1, "begin": 0, "end": 2, "subtree_end": 5}


def test_texts_of_a_path_make_up_its_text(run, folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    forked = next(row["session"] for row in run.rows if row["forks"])
    for whole in map(run.trajectory, (run.rows[0]["session"], forked)):
        tokens = whole["tokens"]
        for leaf in (node for node in whole["nodes"] if node["begin"] == node["end"] or node["turn"] >= 0):
            path, at = [], leaf["end"] - 1
            while at >= 0:
                path.insert(0, at)
                at = tokens["parent"][at]
            text = tokenizer.decode([tokens["ids"][place] for place in path], skip_special_tokens=False)
            assert "".join(tokens["texts"][place] for place in path) == text
    ids = tokenizer.encode("≈ 🦙!").ids
    texts = _token_texts(ids, [{"parent": -1, "begin": 0, "end": len(ids)}], tokenizer)
    assert "".join(texts) == "≈ 🦙!" and "" in texts and "🦙" in texts  # in the last of its tokens


def test_bytes_that_are_no_text_hide_no_other_token():
    names = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁a", "é"]
    tokenizer = Tokenizer(models.BPE(dict(zip(names, range(len(names)), strict=True)), [], byte_fallback=True))
    parts = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(list(parts))
    draw = random.Random(0)
    for _ in range(300):
        ids = [256, *draw.choices([*range(128, 256), 256, 257], k=30), 257]
        texts = _token_texts(ids, [{"parent": -1, "begin": 0, "end": len(ids)}], tokenizer)
        assert len(texts) == len(ids) and texts[-1].endswith("é") and texts[0] == "a"


def test_updates_give_what_the_trainer_computed(run):
    row = next(row for row in run.rows if row["updates"])
    whole = run.trajectory(row["session"])
    tokens, (update,) = whole["tokens"], whole["updates"]
    sampled = [place for place, turn in enumerate(tokens["turn"]) if turn >= 0]
    for values in (tokens["trainer"], tokens["entropies"], update["ratios"], update["clipped"]):
        assert [place for place, value in enumerate(values) if value is not None] == sampled
    mismatch = max(abs(tokens["trainer"][place] - tokens["logprobs"][place]) for place in sampled)
    assert mismatch == pytest.approx(row["mismatch"], rel=1e-3) and update["step"] == row["step"]


def test_files_have_their_columns_and_small_row_groups(folder, tmp_path):
    written(tmp_path, batch(*[talk() for _ in range(40)]))
    file = pq.ParquetFile(tmp_path / "rollouts" / "train-0-0.rank0.parquet")
    assert (file.num_row_groups, file.metadata.row_group(0).column(0).compression) == (3, "ZSTD")
    for name, schema in (("train-0-0", ROLLOUTS), ("credit-train-0-0", CREDIT), ("updates-0", UPDATES)):
        assert pq.read_schema(folder / "rollouts" / f"{name}.rank0.parquet").equals(schema)
    run = open_run(tmp_path)
    assert len(run.rows) == 40 and {run.trajectory(row["session"])["session"] for row in run.rows} == {SESSION}


# Runs that are killed, go on, or are repeated


def test_half_a_line_or_a_file_without_one_does_not_count(tmp_path):
    writer = written(tmp_path, batch(talk()))
    writer.write(batch(talk(), step=1))  # killed before the index was written
    with (tmp_path / "rollouts" / "index.jsonl").open("a") as file:
        file.write('{"kind":"rollout","sess')  # or while it was
    assert len(open_run(tmp_path).rows) == 1
    written(tmp_path, batch(talk(), step=1))
    assert [row["step"] for row in open_run(tmp_path).rows] == [0, 1]


def test_a_repeated_step_replaces_what_it_left(tmp_path):
    writer = credited(tmp_path)
    parts = dict.fromkeys(("start", "sampling", "rewards", "sync", "training"), 0.0)
    writer.append([{"kind": "step", "step": step, "seconds": 1.0, **parts} for step in (0, 1, 2)])
    again = written(tmp_path, batch(talk(answer="another")))
    again.append([{"kind": "step", "step": 1, "seconds": 2.0, **parts}])
    run = open_run(tmp_path)
    (row,) = run.rows
    assert (row["answer"], row["advantages"]) == ("another", None)
    assert [turn["advantage"] for turn in run.trajectory(SESSION)["turns"]] == [None, None]
    assert [(line["step"], line["seconds"]) for line in run.steps()] == [(0, 1.0), (1, 2.0)]


def test_a_live_run_is_read_on_and_read_anew(tmp_path):
    writer = written(tmp_path, batch(talk()))
    run = open_run(tmp_path)
    assert len(run.column("step")) == 1 and run.refresh() == []
    writer.append([{"kind": "weather", "session": SESSION}, {"kind": "mood"}])  # lines that nobody knows
    writer.append(writer.write(batch(talk(), talk(), step=1)))
    assert run.refresh() == [1, 2] and run.column("step").tolist() == [0, 1, 1]
    writer.append(writer.write_credit(batch(talk()), [[0.5, -1.0]]))
    assert run.refresh() == [0] and run.column("advantages")[0] == [0.5, -1.0]
    (tmp_path / "rollouts" / "index.jsonl").unlink()
    assert run.refresh() == [] and len(run.column("step")) == 0
    written(tmp_path, batch(talk(answer="another")))
    assert run.refresh() == [0] and run.column("answer") == ["another"]


def test_several_processes_write_into_one_index(tmp_path):
    run = open_run(write_run(tmp_path / "run", steps=1, ranks=2))
    assert set(run.column("rank")) == {0, 1} and (tmp_path / "run/rollouts/train-0-0.rank1.parquet").exists()
    trained = [row for row in run.rows if row["mode"] == "train"]
    assert [row["group"] for row in trained] == [number // 4 for number in range(16)]
    assert all(run.trajectory(row["session"])["tokens"]["trainer"] for row in trained)
    written(tmp_path, batch(talk()))
    other = RunWriter(tmp_path, 1)
    other.append(other.write(batch(talk(), step=1)), 1)  # of a batch that failed: an index of its own
    assert [row["rank"] for row in open_run(tmp_path).rows] == [0, 1]


# The columns of an index, held against a merge of its lines into dictionaries, line by line

LATER = dict.fromkeys(("advantages", "credit_file", "credit_row", "mismatch", "entropy", "clipped"))
OLD = dict.fromkeys(("sampled", "where", "first_raised", "branch_of", "first_failed", "first_refused"))
OLD |= dict.fromkeys(("raised", "shared_turns", "failed", "refused"), 0)


def merged(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that lines make, one line after the other."""
    rows: dict[str, dict[str, Any]] = {}
    for line in lines:
        kind, fields = line["kind"], {name: value for name, value in line.items() if name != "kind"}
        row = rows.get(line["session"])
        if kind == "rollout":
            rows[line["session"]] = {**OLD, **fields, **LATER, "updates": []}
        elif row is None:
            continue
        elif kind == "credit":
            row |= {"advantages": line["advantages"], "credit_file": line["file"], "credit_row": line["row"]}
        else:
            kept = [update for update in row["updates"] if update["step"] < line["step"]]
            if not kept:
                row |= {"mismatch": line["mismatch"], "entropy": line["entropy"]}
            row["clipped"] = line["clipped"]
            row["updates"] = [*kept, {name: line[name] for name in ("step", "file", "row")}]
    return list(rows.values())


def drawn(draw: random.Random) -> dict[str, Any]:
    kind, session, turns = draw.choice(["rollout", "credit", "update"]), f"s{draw.randrange(6)}", draw.randrange(4)
    file, row = f"{draw.choice('abc')}.parquet", draw.randrange(100)
    if kind == "credit":
        advantages = [draw.choice([None, draw.gauss(0, 1)]) for _ in range(turns)]
        return {"kind": kind, "session": session, "advantages": advantages, "file": file, "row": row}
    if kind == "update":
        numbers = {name: draw.choice([None, draw.random()]) for name in ("mismatch", "entropy", "clipped")}
        return {"kind": kind, "session": session, "step": draw.randrange(5), **numbers, "file": file, "row": row}
    rewards = {name: draw.choice([None, draw.random()]) for name in draw.sample("pqr", draw.randrange(4))}
    lists = {name: [draw.random() for _ in range(turns)] for name in ("turn_rewards", "turn_seconds", "tool_seconds")}
    later = {"sampled": 2**32 - 1, "raised": 2, "branch_of": "s0", "shared_turns": 1, "where": "a.py"}
    more = draw.sample(sorted(later.items()), draw.randrange(4))
    texts = {"answer": draw.choice([None, "", "Lima"]), "stop": draw.choice([None, "length"]), "file": file}
    fields = {"rewards": rewards, "right": draw.choice([None, True, False]), "row": row, "tokens": [7] * turns}
    return {"kind": kind, **index_line(session, **lists, **texts, **fields, **dict(more))}


@pytest.mark.parametrize("seed", range(20))
def test_columns_hold_what_a_merge_line_by_line_gives(tmp_path, seed):
    draw = random.Random(seed)
    lines = [drawn(draw) for _ in range(120)]
    (tmp_path / "rollouts").mkdir()
    index, path, rows = Index(), tmp_path / "rollouts" / "index.jsonl", []
    for begin, end in ((0, 0), (0, 40), (40, 80), (80, 120)):  # as a run that goes on writes it
        before = rows
        with path.open("ab") as file:
            file.writelines(map(written_line, lines[begin:end]))
        changed = index.read(tmp_path).tolist()
        table, rows = index.rows, merged(lines[:end])
        assert list(table) == rows and table[-1:] == rows[-1:] and table[1:3] == rows[1:3]
        assert {place for place, row in enumerate(rows) if row not in before[place : place + 1]} <= set(changed)
        for name in ("p", "q", "r"):
            wanted = [np.nan if row["rewards"].get(name) is None else row["rewards"][name] for row in rows]
            assert np.array_equal(table.reward(name), wanted, equal_nan=True)
        assert set(table.reward_names) == {name for row in rows for name in row["rewards"]}
        assert table.totals("tokens").tolist() == [sum(row["tokens"]) for row in rows]
        places, values = table.flat("advantages")
        flat = [(place, value) for place, row in enumerate(rows) for value in row["advantages"] or ()]
        assert places.tolist() == [place for place, _ in flat]
        assert np.array_equal(values, np.array([value for _, value in flat], float), equal_nan=True)


# Looking at runs


def test_columns_are_arrays_where_they_are_numbers(run):
    columns = run.columns()
    assert columns["reward"].shape == (56,) and columns["mode"].count("train") == 48
    assert math.isnan(columns["mismatch"][0]) and columns["mismatch"][-5] >= 0
    assert run.about["rewards"] == REWARDS and len(run.steps()) == len(run.metrics()) == 3
    texts = dict(run.texts())  # the words of conversations
    assert len(texts) == 56 and "What is the capital of Peru?" in texts[run.rows[0]["session"]]
    assert [session for session, _ in run.texts(50)] == [row["session"] for row in run.rows[50:]]


NEEDS_NO_TORCH = """
import sys
from mt_grpo.runlog import open_run
run = open_run(sys.argv[1])
run.trajectory(run.rows[0]["session"])
assert not {"torch", "transformers", "datasets"} & set(sys.modules)
"""
ENDS_IN_A_READ = """
import io, sys, threading, time
from pathlib import Path
from mt_grpo.runlog import open_run
run, begun = open_run(sys.argv[1]), threading.Event()
class Slow(io.FileIO):
    def read(self, size=-1):
        if size != 2**20:  # it is pyarrow that reads
            begun.set()
            time.sleep(0.2)
        return super().read(size)
Path.open = lambda path, mode: Slow(path)
reader = threading.Thread(target=lambda: list(run.records(run.rows)), daemon=True)
reader.start()
begun.wait()
"""


@pytest.mark.parametrize("program", [NEEDS_NO_TORCH, ENDS_IN_A_READ])
def test_programs_that_read_need_no_torch_and_end(folder, program):
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True, timeout=60)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("", "is not the folder of a run: name its `output_dir`"),
        ("metrics.jsonl", "has no conversations: the file rollouts/index"),
        ("state.json", "has no conversations so far"),
        ("trajectories.jsonl", "the form of earlier versions"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, file, words):
    with pytest.raises(UserError, match="There is no folder .*no: name the `output_dir` of a run"):
        open_run(tmp_path / "no")
    if file:
        (tmp_path / file).touch()
    with pytest.raises(UserError, match=words):
        open_run(tmp_path)


def test_what_a_run_has_lost_is_said(tmp_path):
    written(tmp_path, batch(talk()))
    run = open_run(tmp_path)
    path = tmp_path / "rollouts" / run.rows[0]["file"]
    with pytest.raises(UserError, match="has no conversation 'train-000000-000000-000006'; the nearest is"):
        run.trajectory("train-000000-000000-000006")
    path.write_bytes(b"PAR1 half of it")
    with pytest.raises(UserError, match="is damaged"):
        run.trajectory(SESSION)
    path.unlink()
    with pytest.raises(UserError, match="train-0-0.rank0.parquet is gone"):
        run.trajectory(SESSION)
    (tmp_path / "rollouts" / "index.jsonl").write_text("{broken}\n")
    with pytest.raises(UserError, match="index.jsonl has a damaged line"):
        open_run(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    full = tmp_path / "full" / "rollouts" / "index.jsonl"
    full.parent.mkdir(parents=True)
    full.symlink_to("/dev/full")
    (tmp_path / "rollouts").touch()
    for folder, words in (
        (tmp_path, "cannot be written to .*train-0-0.rank0.parquet: (File exists|Not a direct)"),
        ("/dev/null", "cannot be written to"),
        (tmp_path / "full", "cannot be written to .*index.jsonl: No space left on device. Free space"),
    ):
        writer = RunWriter(folder)
        writer._mended.add(full)  # it cannot be read to its end
        with pytest.raises(RunLogError, match=words):
            writer.append(writer.write(batch(talk())))


def test_half_a_line_of_metrics_goes_when_the_next_is_written(tmp_path):
    path, line = tmp_path / "metrics.jsonl", '{"step": 1}\n'
    for text, left in ((line + '{"st', line), ("", ""), (line, line), ('{"s', "")):
        path.write_text(text)
        end_with_a_line(path)
        assert path.read_text() == left


# Records are trimmed to a checkpoint: what came after it goes, and nothing else


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_was_recorded_up_to_a_checkpoint_stays(tmp_path):
    """The evaluation after the last step came before the checkpoint of that step."""
    write_run(tmp_path / "long", steps=4, ranks=2)
    write_run(tmp_path / "short", steps=2, ranks=2)
    assert trim(tmp_path / "long", 2) == 4
    trimmed, short = open_run(tmp_path / "long"), open_run(tmp_path / "short")
    sampled = [row["session"] for row in short.rows if row["mode"] == "train" or row["step"] == 0]
    assert [row["session"] for row in trimmed.rows] == sampled
    assert trimmed.steps() == short.steps() and trimmed.metrics() == short.metrics()
    assert all(len(row["updates"]) == 1 and row["advantages"] for row in trimmed.rows if row["mode"] == "train")
    assert len(list(trimmed.trajectories())) == len(sampled)
    lines = map(json.loads, (tmp_path / "long/rollouts/index.jsonl").read_text().splitlines())
    named = {line["file"] for line in lines if "file" in line} - {"tokenizer/tokenizer.json"}
    assert {path.name for path in (tmp_path / "long" / "rollouts").glob("*.parquet")} == named


def test_nothing_after_a_checkpoint_is_nothing_to_trim(tmp_path):
    """The evaluation after the last step stays, and a folder without records."""
    assert trim(tmp_path, 3) == 3 and not list(tmp_path.iterdir())
    before = content(write_run(tmp_path, steps=2))
    assert {row["step"] for row in open_run(tmp_path).rows if row["mode"] == "eval"} == {0, 2}
    assert trim(tmp_path, 2) == 2 and content(tmp_path) == before


def test_a_trim_that_was_interrupted_is_finished(tmp_path):
    """A process may be killed once the index is written, before files and metrics are gone."""
    for name in ("whole", "cut"):
        write_run(tmp_path / name, steps=3)
        (tmp_path / name / "rollouts" / "train-2-1.rank0.partial").write_bytes(b"half")
    (tmp_path / "cut" / ".0123456789abcdef.partial").write_bytes(b"half")
    old = content(tmp_path / "cut")
    trim(tmp_path / "whole", 1)
    (tmp_path / "cut/rollouts/index.jsonl").write_bytes((tmp_path / "whole/rollouts/index.jsonl").read_bytes())
    assert trim(tmp_path / "cut", 1) == 3
    assert content(tmp_path / "cut") == content(tmp_path / "whole") != old


def test_half_a_line_is_trimmed_and_a_damaged_one_stays(tmp_path):
    path = write_run(tmp_path, steps=2) / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + "damaged\n" + lines[1] + '{"step": 9')
    trim(tmp_path, 1)
    assert path.read_text() == lines[0] + "damaged\n"


def test_what_cannot_be_removed_is_said_in_a_sentence(tmp_path):
    path = write_run(tmp_path, steps=2) / "rollouts" / "train-1-0.rank0.parquet"
    path.unlink()
    path.mkdir()
    with pytest.raises(RunLogError, match=f"The records of {tmp_path} after step 1, from which the run goes on"):
        trim(tmp_path, 1)


def test_a_reader_that_follows_sees_the_trimmed_run(tmp_path):
    """The file may have grown past the place that was read, and another line may stand there."""
    run = open_run(write_run(tmp_path, steps=4))
    trim(tmp_path, 1)
    other = write_run(tmp_path / "other", steps=4, seed=1) / "rollouts/index.jsonl"
    with (tmp_path / "rollouts/index.jsonl").open("a") as index:
        index.writelines(line for line in other.open() if '"step":2' in line or '"train-000002' in line)
        index.writelines(['{"kind":"unknown"}\n'] * 2000)
    run.refresh()
    assert [row["session"] for row in run.rows] == [row["session"] for row in open_run(tmp_path).rows]
    assert max(row["step"] for row in run.rows) == 2
