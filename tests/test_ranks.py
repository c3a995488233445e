"""Several ranks on a CPU: unequal numbers of turns neither deadlock nor change what is learnt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
SHARDED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}


def run(folder: Path, processes: int, scenario: str = "plain", **environment: str) -> dict:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    environment = {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        **environment,
    }
    script = [str(TESTS / "ranks.py"), str(folder), str(processes), scenario]
    command = [sys.executable, *(launch if processes > 1 else []), *script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "result.pt")


def assert_the_same_is_learnt(one: dict, two: dict) -> None:
    assert one["turns"] == two["turns"] and len(one["learnt"]) == 3
    torch.testing.assert_close(torch.tensor(one["learnt"]), torch.tensor(two["learnt"]), rtol=1e-4, atol=1e-6)
    for kind in ("weights", "sent"):  # as trained, and as a server would get them
        assert one[kind].keys() == two[kind].keys()
        for name, weight in one[kind].items():
            torch.testing.assert_close(two[kind][name], weight, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run(tmp_path_factory.mktemp("alone"), 1)


def test_two_ranks_learn_what_one_learns(tmp_path, alone):
    assert_the_same_is_learnt(alone, run(tmp_path, 2))
    assert (tmp_path / "trajectories.rank1.jsonl").exists()


def test_two_ranks_with_sharded_weights_learn_what_one_learns(tmp_path, alone):
    two = run(tmp_path, 2, **SHARDED)
    assert two["sharded"] and not alone["sharded"]
    assert two["proven"] == alone["proven"] and two["proven"]
    assert_the_same_is_learnt(alone, two)


def test_measuring_before_training_leaves_sharded_weights_to_be_trained(tmp_path, alone):
    """FSDP and DeepSpeed wrap a model once, with its optimiser: an evaluation must not do it first."""
    assert_the_same_is_learnt(alone, run(tmp_path, 2, "measured", **SHARDED))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["before"]["questions"] == summary["after"]["questions"] == 6 and summary["steps"] == 3


def test_a_trained_output_layer_is_learnt_from_all_ranks_though_one_has_nothing_to_learn_from(tmp_path):
    one, two = run(tmp_path / "1", 1, "adapter"), run(tmp_path / "2", 2, "adapter", **SHARDED)
    assert two["sharded"] and any("lm_head.modules_to_save" in name for name in two["weights"])
    assert_the_same_is_learnt(one, two)


def test_all_ranks_refuse_a_model_that_scores_trees_wrong(tmp_path):
    assert run(tmp_path, 2, "refused", **SHARDED) == {"requests": 0}


def test_sharding_in_bfloat16_does_not_round_log_probs(tmp_path):
    two = run(tmp_path, 2, "bf16", **SHARDED)
    assert two["sharded"] and two["dtype"] == torch.float32 and two["proven"]


def test_rows_move_between_ranks_so_that_work_is_even(tmp_path):
    one, two = run(tmp_path / "1", 1, "steps"), run(tmp_path / "2", 2, "steps")
    assert_the_same_is_learnt(one, two)
    assert sum(two["work"]) == sum(one["work"])
    saved = {path.name for path in (tmp_path / "2" / "checkpoint-3").iterdir()}
    assert saved >= {"model.safetensors", "rollouts-rank0.pt", "rollouts-rank1.pt"}
    first, second = two["work"].view(2, 2).sum(dim=1).tolist()  # a rank's micro-batches
    assert max(first, second) < 1.05 * min(first, second)
