"""`sp_size`: what it cannot train is refused in one sentence, before any work. What it learns is in test_ranks."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from accelerate import ParallelismConfig
from accelerate.utils import DistributedType
from support.forked import run_processes
from support.models import CPU_RUN

from mt_grpo.errors import ConfigError
from mt_grpo.training import MTGRPOConfig
from mt_grpo.training.forward_plan import sequence_group
from mt_grpo.training.preflight import check_batch_sizes

SAID = {
    "heads": "Qwen3ForCausalLM has 3 attention heads, which 2 processes cannot share equally: set `sp_size` to 3, or",
    "attention of its own": "BloomForCausalLM computes its attention itself, so several processes cannot compute its",
    "balanced experts": "`sp_size: 2` has no loss that balances experts",
    "wrong over trees": "Qwen3ForCausalLM scores packed trees",
    "three": "`sp_size: 3` does not divide 2 processes: start a multiple of it (`--num_processes`), or leave it out.",
}


@pytest.mark.slow
def test_models_that_cannot_be_shared_are_refused_on_every_rank(tmp_path):
    run_processes(["-m", "support.sequence_refusals", str(tmp_path / "said.json")], 2, tmp_path / "log", {})
    said = json.loads((tmp_path / "said.json").read_text())
    assert {name: words[: len(SAID[name])] for name, words in said.items()} == SAID
    assert "shares packed trees among processes: leave `sp_size` out" in said["wrong over trees"]


def test_one_process_cannot_train_for_two(tmp_path):
    args = MTGRPOConfig(str(tmp_path), **CPU_RUN, sp_size=2)  # it may sample
    with pytest.raises(ConfigError, match="`sp_size: 2` does not divide 1 process: start a multiple of it"):
        check_batch_sizes(args)


@pytest.mark.parametrize(
    ("launched", "message"),
    [
        ({"distributed_type": DistributedType.DEEPSPEED}, "which DeepSpeed does not: shard with FSDP2"),
        ({"distributed_type": DistributedType.FSDP}, "which FSDP 1 does not: shard with FSDP2"),
        ({"parallelism_config": ParallelismConfig(sp_size=2)}, "leave it out, and set `sp_size` in the recipe"),
        ({"parallelism_config": ParallelismConfig(cp_size=2)}, "leave it out, and set `sp_size` in the recipe"),
    ],
)
def test_other_ways_to_spread_a_model_are_refused(launched, message):
    accelerator = {"num_processes": 2, "is_fsdp2": False, "parallelism_config": None, "distributed_type": None}
    trainer = SimpleNamespace(args=SimpleNamespace(sp_size=2), accelerator=SimpleNamespace(**accelerator | launched))
    with pytest.raises(ConfigError, match=message):
        sequence_group(trainer)
