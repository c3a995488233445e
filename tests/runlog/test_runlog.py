"""What a run leaves can be read as it was: whole, half written, and while it is written."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from support.runs import REWARDS, index_line, write_run
from tokenizers import Tokenizer

from mt_grpo.errors import UserError
from mt_grpo.runlog import Batch, RunLogError, RunWriter, open_run, read_trajectories
from mt_grpo.runlog.index import Table
from mt_grpo.runlog.index import written as written_line
from mt_grpo.runlog.schema import CREDIT, ROLLOUTS
from mt_grpo.runlog.writer import end_with_a_line
from mt_grpo.trajectory import StopReason, ToolCall, Trajectory, Turn


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def run(folder):
    return open_run(folder)


def talk(**fields) -> Trajectory:
    """Two turns; the second rewrites the history."""
    made = Trajectory([{"role": "user", "content": "Which city?"}], session="train-000000-000000-000005", **fields)
    made.tree.add_turn([1, 2, 3], [4, 5], [-0.5, -0.25])
    made.tree.add_turn([1, 2, 9], [6], [-1.5])
    call = ToolCall("search", {"q": "x"}, "Error: no", "no", True, 0.5, start=10.0)
    made.turns = [
        Turn(
            0, {"role": "assistant", "content": "a"}, [call], [{"role": "tool", "content": "Error: no"}], num_tokens=2
        ),
        Turn(1, {"role": "assistant", "content": "b"}, num_tokens=1, context_length=3, fork_cause="compact"),
    ]
    made.stop_reason = StopReason.ANSWERED
    made.rewards = {"outcome": {"exact_match": 1.0, "format": None}, "turn": {"tool_execution": [0.2, None]}}
    return made


def batch(*trajectories: Trajectory, step: int = 0, mode: str = "train") -> Batch:
    return Batch(mode, step, 0, 4, list(range(5, 5 + len(trajectories))), list(trajectories), REWARDS)


def written(folder: Path, *batches: Batch) -> RunWriter:
    writer = RunWriter(folder)
    for each in batches:
        writer.append(writer.write(each))
    return writer


def test_what_is_written_is_read_without_loss(tmp_path):
    made = talk(row={"answer": ["Lima"]}, info={"n": 1}, seconds=2.0, start=9.0)
    written(tmp_path, batch(made))
    (data,) = read_trajectories(tmp_path)
    assert (data.pop("step"), data.pop("mode")) == (0, "train")
    assert list(data) == list(made.to_dict()) and data == made.to_dict()
    assert Trajectory.from_dict(data) == made


def test_a_trajectory_without_turns_or_rewards_is_kept(tmp_path):
    made = Trajectory([], stop_reason=StopReason.ENV_ERROR, error="it \ud800 broke")
    written(tmp_path, batch(made))
    run = open_run(tmp_path)
    assert run.rows[0]["reward"] is None and run.rows[0]["right"] is None and run.rows[0]["prompt"] == ""
    whole = run.trajectory(run.rows[0]["session"])
    assert whole["error"] == "it \ud800 broke" and whole["tokens"]["ids"] == [] and whole["nodes"] == []


def test_what_json_lacks_becomes_null(tmp_path):
    made = talk(info={"loss": math.nan})
    made.tree.nodes[1].logprobs[0] = math.nan
    written(tmp_path, batch(made))
    run = open_run(tmp_path)
    whole = run.trajectory(run.rows[0]["session"])
    assert whole["info"] == {"loss": None} and whole["tokens"]["logprobs"].count(None) == 4 + 1


def test_weighted_rewards_are_in_the_index(tmp_path):
    written(tmp_path, batch(talk()))
    (row,) = open_run(tmp_path).rows
    assert row["reward"] == pytest.approx(0.5 * 0.2 + 1.0) and row["turn_rewards"] == [0.1, None]
    assert row["rewards"] == {"tool_execution": 0.2, "exact_match": 1.0, "format": None} and row["right"] is True
    assert (row["group"], row["member"], row["errors"], row["forks"]) == (1, 1, [1, 0], 1)


def test_tokens_are_laid_out_depth_first(tmp_path):
    writer = written(tmp_path, batch(talk()))
    writer.append(writer.write_credit(batch(talk()), [[0.5, -1.0]]))
    run = open_run(tmp_path)
    whole = run.trajectory(run.rows[0]["session"])
    tokens = whole["tokens"]
    assert tokens["ids"] == [1, 2, 3, 4, 5, 9, 6] and tokens["turn"] == [-1, -1, -1, 0, 0, -1, 1]
    assert tokens["parent"] == [-1, 0, 1, 2, 3, 1, 5] and tokens["subtree_end"] == [7, 7, 5, 5, 5, 7, 7]
    assert tokens["logprobs"] == [None, None, None, -0.5, -0.25, None, -1.5]
    assert tokens["advantages"] == [None, None, None, 0.5, 0.5, None, -1.0] and tokens["texts"] is None
    assert [turn["advantage"] for turn in whole["turns"]] == [0.5, -1.0]
    assert whole["nodes"][0] == {"parent": -1, "turn": -1, "begin": 0, "end": 2, "subtree_end": 5}


def test_texts_of_a_path_make_up_its_text(run, folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    forked = next(row["session"] for row in run.rows if row["forks"])
    for session in (run.rows[0]["session"], forked):
        whole = run.trajectory(session)
        tokens = whole["tokens"]
        for leaf in (node for node in whole["nodes"] if node["begin"] == node["end"] or node["turn"] >= 0):
            path, at = [], leaf["end"] - 1
            while at >= 0:
                path.insert(0, at)
                at = tokens["parent"][at]
            text = tokenizer.decode([tokens["ids"][place] for place in path], skip_special_tokens=False)
            assert "".join(tokens["texts"][place] for place in path) == text


def test_a_character_of_several_tokens_is_in_the_last(folder):
    from mt_grpo.runlog.conversation import _token_texts

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    ids = tokenizer.encode("≈ 🦙!").ids
    texts = _token_texts(ids, [{"parent": -1, "begin": 0, "end": len(ids)}], tokenizer)
    assert "".join(texts) == "≈ 🦙!" and "" in texts and "🦙" in texts


def test_updates_give_what_the_trainer_computed(run):
    row = next(row for row in run.rows if row["updates"])
    whole = run.trajectory(row["session"])
    tokens, (update,) = whole["tokens"], whole["updates"]
    sampled = [place for place, turn in enumerate(tokens["turn"]) if turn >= 0]
    for values in (tokens["trainer"], tokens["entropies"], update["ratios"], update["clipped"]):
        assert [place for place, value in enumerate(values) if value is not None] == sampled
    mismatch = max(abs(tokens["trainer"][place] - tokens["logprobs"][place]) for place in sampled)
    assert mismatch == pytest.approx(row["mismatch"], rel=1e-3) and update["step"] == row["step"]


def test_files_have_their_columns_and_small_row_groups(tmp_path):
    writer = written(tmp_path, batch(*[talk() for _ in range(40)]))
    writer.append(writer.write_credit(batch(talk()), [[0.0, 0.0]]))
    file = pq.ParquetFile(tmp_path / "rollouts" / "train-0-0.rank0.parquet")
    assert file.schema_arrow.equals(ROLLOUTS) and file.num_row_groups == 3
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    assert pq.read_schema(tmp_path / "rollouts" / "credit-train-0-0.rank0.parquet").equals(CREDIT)
    run = open_run(tmp_path)
    assert all(run.trajectory(row["session"])["session"] == talk().session for row in run.rows)


# Runs that are killed, go on, or are repeated


def test_half_a_line_is_not_read_and_is_mended(tmp_path):
    written(tmp_path, batch(talk()))
    index = tmp_path / "rollouts" / "index.jsonl"
    with index.open("a") as file:
        file.write('{"kind":"rollout","sess')  # a run that was killed
    assert len(open_run(tmp_path).rows) == 1
    written(tmp_path, batch(talk(), step=1))
    assert [row["step"] for row in open_run(tmp_path).rows] == [0, 1]


def test_a_file_without_a_line_does_not_count(tmp_path):
    writer = written(tmp_path, batch(talk()))
    writer.write(batch(talk(), step=1))  # killed before the index was written
    assert len(open_run(tmp_path).rows) == 1


def test_a_repeated_step_replaces_what_it_left(tmp_path):
    writer = written(tmp_path, batch(talk()))
    writer.append(writer.write_credit(batch(talk()), [[0.5, -1.0]]))
    parts = dict.fromkeys(("start", "sampling", "rewards", "sync", "training"), 0.0)
    writer.append([{"kind": "step", "step": step, "seconds": 1.0, **parts} for step in (0, 1, 2)])
    again = talk(answer="another")
    written(tmp_path, batch(again)).append([{"kind": "step", "step": 1, "seconds": 2.0, **parts}])
    run = open_run(tmp_path)
    (row,) = run.rows
    assert row["answer"] == "another" and row["advantages"] is None
    assert [turn["advantage"] for turn in run.trajectory(row["session"])["turns"]] == [None, None]
    assert [(line["step"], line["seconds"]) for line in run.steps()] == [(0, 1.0), (1, 2.0)]


def test_a_repeated_update_replaces_later_ones():
    table = Table()
    table.add("rollout", [index_line("s"), index_line("other")])
    for step, mismatch in ((3, 0.1), (4, 0.2), (4, 0.3), (3, 0.4)):
        line = {"step": step, "mismatch": mismatch, "entropy": 0.0, "clipped": 0.0, "file": f"u-{step}", "row": 7}
        both = [{"session": "s", **line}, {"session": "other", **line, "step": 9}]
        table.add("update", both)
        assert table[0]["mismatch"] == (0.4 if mismatch == 0.4 else 0.1)
        assert [update["step"] for update in table[0]["updates"]] == list(range(3, step + 1))
    assert table[0]["updates"] == [{"step": 3, "file": "u-3", "row": 7}]
    assert [update["step"] for update in table[1]["updates"]] == [9] and table[1]["mismatch"] == 0.4


def test_a_live_run_is_read_on(tmp_path):
    writer = written(tmp_path, batch(talk()))
    run = open_run(tmp_path)
    assert len(run.column("step")) == 1 and run.refresh() == []
    writer.append(writer.write(batch(talk(), talk(), step=1)))
    assert run.refresh() == [1, 2] and run.column("step").tolist() == [0, 1, 1]
    writer.append(writer.write_credit(batch(talk()), [[0.5, -1.0]]))
    assert run.refresh() == [0] and run.column("advantages")[0] == [0.5, -1.0]


def test_a_run_that_begins_anew_replaces_the_one_that_was_read(tmp_path):
    written(tmp_path, batch(talk(), talk()), batch(talk(), step=1))
    run = open_run(tmp_path)
    assert len(run.column("step")) == 3
    (tmp_path / "rollouts" / "index.jsonl").unlink()
    assert run.refresh() == [] and len(run.column("step")) == 0
    written(tmp_path, batch(talk(answer="another")))
    assert run.refresh() == [0] and run.column("answer") == ["another"]


def test_two_processes_write_into_one_index(tmp_path):
    run = open_run(write_run(tmp_path / "run", steps=1, ranks=2))
    assert set(run.column("rank")) == {0, 1} and (tmp_path / "run/rollouts/train-0-0.rank1.parquet").exists()
    trained = [row for row in run.rows if row["mode"] == "train"]
    assert [row["group"] for row in trained] == [number // 4 for number in range(16)]
    assert all(run.trajectory(row["session"])["tokens"]["trainer"] for row in trained)


def test_a_failed_batch_of_another_process_is_read(tmp_path):
    written(tmp_path, batch(talk()))
    other = RunWriter(tmp_path, 1)
    other.append(other.write(batch(talk(), step=1)), 1)
    assert [row["rank"] for row in open_run(tmp_path).rows] == [0, 1]


def test_lines_that_nobody_knows_are_passed_over(tmp_path):
    writer = written(tmp_path, batch(talk()))
    writer.append([{"kind": "weather", "session": open_run(tmp_path).rows[0]["session"]}, {"kind": "mood"}])
    assert len(open_run(tmp_path).rows) == 1


# Looking at runs


def test_columns_are_arrays_where_they_are_numbers(run):
    columns = run.columns()
    assert columns["reward"].shape == (56,) and columns["mode"].count("train") == 48
    assert math.isnan(columns["mismatch"][0]) and columns["mismatch"][-5] >= 0
    assert run.about["rewards"] == REWARDS and len(run.steps()) == len(run.metrics()) == 3


def test_the_words_of_conversations_can_be_searched(run):
    texts = dict(run.texts())
    assert len(texts) == 56 and "What is the capital of Peru?" in texts[run.rows[0]["session"]]
    assert [session for session, _ in run.texts(50)] == [row["session"] for row in run.rows[50:]]


def test_the_reader_needs_no_torch(folder):
    code = (
        "import sys; from mt_grpo.runlog import open_run; run = open_run(sys.argv[1]); run.trajectory(run.rows[0]"
        "['session']); assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, folder], check=True)


def test_a_large_index_is_read(tmp_path):
    lines = (write_run(tmp_path / "run", steps=1) / "rollouts/index.jsonl").read_text().splitlines()
    of_one = [line.partition(',"crc":')[0] + "}" for line in lines if "train-000000-000000-000003" in line]
    with (tmp_path / "run/rollouts/index.jsonl").open("ab") as file:
        for step in range(1, 2000):
            file.writelines(written_line(json.loads(line.replace("-000003", f"-{step:06d}"))) for line in of_one)
    start = time.perf_counter()
    run = open_run(tmp_path / "run")
    print(f"{len(run.rows) / (time.perf_counter() - start):.0f} rows per second")
    assert len(run.rows) == 8 + 16 + 1999 - 15 and run.rows[-1]["updates"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder / "no", "There is no folder .*no: name the `output_dir` of a run"),
        (lambda folder: folder, "is not the folder of a run: name its `output_dir`"),
        (lambda folder: (folder / "metrics.jsonl").touch() or folder, "has no conversations: the file rollouts/index"),
        (lambda folder: (folder / "state.json").touch() or folder, "has no conversations so far"),
        (lambda folder: (folder / "trajectories.jsonl").touch() or folder, "the form of earlier versions"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, make, words):
    with pytest.raises(UserError, match=words):
        open_run(make(tmp_path))


def test_what_a_run_has_lost_is_said(tmp_path):
    written(tmp_path, batch(talk()))
    run = open_run(tmp_path)
    with pytest.raises(UserError, match="has no conversation 'train-000000-000000-000006'; the nearest is"):
        run.trajectory("train-000000-000000-000006")
    (tmp_path / "rollouts" / run.rows[0]["file"]).unlink()
    with pytest.raises(UserError, match="train-0-0.rank0.parquet is gone"):
        run.trajectory(run.rows[0]["session"])
    (tmp_path / "rollouts" / "index.jsonl").write_text("{broken}\n")
    with pytest.raises(UserError, match="index.jsonl has a damaged line"):
        open_run(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence(tmp_path):
    (tmp_path / "rollouts").mkdir()
    os.symlink("/dev/full", tmp_path / "rollouts" / "index.jsonl")
    writer = RunWriter(tmp_path)
    writer._mended.add(tmp_path / "rollouts" / "index.jsonl")  # it cannot be read to its end
    with pytest.raises(RunLogError, match="cannot be written to .*index.jsonl: No space left on device. Free space"):
        writer.append(writer.write(batch(talk())))


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "rollouts").touch()
    with pytest.raises(
        RunLogError, match="cannot be written to .*train-0-0.rank0.parquet: (File exists|Not a direct)"
    ):
        RunWriter(tmp_path).write(batch(talk()))
    with pytest.raises(RunLogError):
        RunWriter("/dev/null").write(batch(talk()))


def test_a_damaged_file_is_refused_in_a_sentence(tmp_path):
    folder = write_run(tmp_path / "run", steps=1, groups=1)
    run = open_run(folder)
    row = next(row for row in run.rows if row["mode"] == "train")
    (folder / "rollouts" / row["file"]).write_bytes(b"PAR1 half of it")
    with pytest.raises(UserError, match="is damaged"):
        run.trajectory(row["session"])


def test_half_a_line_of_metrics_goes_when_the_next_is_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for text, left in (
        ('{"step": 1}\n{"st', '{"step": 1}\n'),
        ("", ""),
        ('{"step": 1}\n', '{"step": 1}\n'),
        ('{"s', ""),
    ):
        path.write_text(text)
        end_with_a_line(path)
        assert path.read_text() == left


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


def test_a_program_ends_while_its_threads_read(folder):
    subprocess.run([sys.executable, "-c", ENDS_IN_A_READ, str(folder)], check=True, timeout=60)
