"""Several ranks on a CPU: unequal numbers of turns neither deadlock nor change what is learnt."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

TESTS = Path(__file__).parent


def run(folder: Path, processes: int) -> dict:
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)] if processes > 1 else []
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    command = [sys.executable, *launch, str(TESTS / "ranks.py"), str(folder), str(processes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "result.pt")


def test_two_ranks_learn_what_one_learns(tmp_path):
    one, two = (run(tmp_path / str(processes), processes) for processes in (1, 2))
    assert one["turns"] == two["turns"] and len(one["losses"]) == 3
    torch.testing.assert_close(torch.tensor(one["losses"]), torch.tensor(two["losses"]), rtol=1e-4, atol=1e-6)
    for name, weight in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], weight, rtol=1e-4, atol=1e-5)
    assert (tmp_path / "2" / "trajectories.rank1.jsonl").exists()
