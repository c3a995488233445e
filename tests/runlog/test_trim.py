"""Records are trimmed to a checkpoint: what came after it goes, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.runs import write_run

from mt_grpo.runlog import open_run
from mt_grpo.runlog.writer import RunLogError, trim


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


def test_the_evaluation_after_the_last_step_stays(tmp_path):
    write_run(tmp_path, steps=2)
    before = content(tmp_path)
    assert {row["step"] for row in open_run(tmp_path).rows if row["mode"] == "eval"} == {0, 2}
    assert trim(tmp_path, 2) == 2
    assert content(tmp_path) == before


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


def test_half_a_line_goes_and_a_damaged_one_stays(tmp_path):
    write_run(tmp_path, steps=2)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + "damaged\n" + lines[1] + '{"step": 9')
    trim(tmp_path, 1)
    assert path.read_text() == lines[0] + "damaged\n"


def test_a_folder_without_records_is_left_alone(tmp_path):
    assert trim(tmp_path, 3) == 3
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_removed_is_said_in_a_sentence(tmp_path):
    write_run(tmp_path, steps=2)
    (tmp_path / "rollouts" / "train-1-0.rank0.parquet").unlink()
    (tmp_path / "rollouts" / "train-1-0.rank0.parquet").mkdir()
    with pytest.raises(RunLogError, match=f"The records of {tmp_path} after step 1, from which the run goes on"):
        trim(tmp_path, 1)


def test_a_reader_that_follows_sees_the_trimmed_run(tmp_path):
    """The file may have grown past the place that was read, and another line may stand there."""
    write_run(tmp_path, steps=4)
    run = open_run(tmp_path)
    trim(tmp_path, 1)
    write_run(tmp_path / "other", steps=4, seed=1)
    lines = (tmp_path / "other/rollouts/index.jsonl").read_text().splitlines(keepends=True)
    with (tmp_path / "rollouts/index.jsonl").open("a") as index:
        index.writelines(line for line in lines if '"step":2' in line or '"train-000002' in line)
        index.writelines(['{"kind":"unknown"}\n'] * 2000)
    run.refresh()
    assert [row["session"] for row in run.rows] == [row["session"] for row in open_run(tmp_path).rows]
    assert max(row["step"] for row in run.rows) == 2
