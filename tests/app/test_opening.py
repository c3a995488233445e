"""A long index is read by several processes, as it is by one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.runs import write_run

from mt_grpo.runlog import open_run

READ = """
import json, multiprocessing, sys
from mt_grpo.app import view
from mt_grpo.errors import UserError
from mt_grpo.runlog import index
view.LONG_INDEX, index.PART, index.NEAR = 0, 3000, 100
try:
    run = view.open_run_parallel(sys.argv[1])
except UserError as error:
    sys.exit(f"refused: {error}")
print(json.dumps([run.rows[:], run.steps(), run.about]))
"""


def read(folder) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", READ, folder], capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems read an index in one process")
def test_several_processes_read_what_one_reads(tmp_path):
    folder = write_run(tmp_path / "run", steps=2, ranks=2)
    run = open_run(folder)
    assert read(folder).stdout == f"{json.dumps([run.rows[:], run.steps(), run.about])}\n"
    index = folder / "rollouts" / "index.jsonl"
    lines = index.read_bytes().splitlines(keepends=True)
    lines[len(lines) // 2] = lines[len(lines) // 2].replace(b":", b";", 1)
    index.write_bytes(b"".join(lines))
    ended = read(folder)
    assert ended.returncode == 1 and ended.stderr.startswith("refused: ") and ended.stderr.count("\n") == 1
    assert "has a damaged line" in ended.stderr
