"""DeepSpeed's ZeRO on two ranks of a CPU, which learn what one learns; `make interop-deepspeed` installs it."""

from __future__ import annotations

import functools

import pytest
import torch
from support.forked import run_processes
from support.learnt import assert_the_same_is_learnt, run_ranks
from support.models import build_model, build_tokenizer
from support.servers import RealServer, needs_server

pytest.importorskip("deepspeed", reason="deepspeed is not installed: run `make interop-deepspeed`")
pytestmark = pytest.mark.slow


def zero(stage: int) -> dict[str, str]:
    """What accelerate's launcher sets for a configuration like recipes/accelerate/zero3.yaml, without a GPU."""
    return {
        "ACCELERATE_USE_CPU": "false",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage),
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true" if stage == 3 else "false",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true" if stage == 3 else "false",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
        "DS_ACCELERATOR": "cpu",
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return functools.cache(lambda scenario: run_ranks(tmp_path_factory.mktemp(scenario), 1, scenario))


KINDS = ["adapter", "steps", "measured", "uneven", "ahead", "images", "sounds", "hybrid", "sinks"]
"""Adapters, moving rows, evaluations, sampling ahead, media on one of two ranks, hybrids and mixtures."""


@pytest.mark.parametrize(
    ("stage", "scenario", "more"),
    [(2, "plain", {}), (3, "plain", {}), (3, "plain", {"LAYERS": "2"}), *((3, kind, {}) for kind in KINDS)],
)
def test_ranks_under_zero_learn_what_one_learns(tmp_path, alone, stage, scenario, more):
    """As weights are trained, and as a server would get them."""
    one, two = alone(scenario), run_ranks(tmp_path, 2, scenario, **more, **zero(stage))
    assert two["sharded"] == (stage == 3)
    assert scenario != "plain" or more or (two["proven"] == one["proven"] and two["proven"])
    assert_the_same_is_learnt(one, two)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_under_zero_goes_on_from_its_checkpoint(tmp_path, stage):
    whole = run_ranks(tmp_path / "whole", 2, "saved", **zero(stage))
    checkpoint = str(tmp_path / "whole" / "checkpoint-1")
    resumed = run_ranks(tmp_path / "resumed", 2, "saved", RESUMED=checkpoint, **zero(stage))
    assert resumed["learnt"] == whole["learnt"]
    for name, weight in whole["weights"].items():
        torch.testing.assert_close(resumed["weights"][name], weight, rtol=0, atol=0)


def test_a_synced_reference_is_restored_under_zero2(tmp_path):
    run_ranks(tmp_path, 2, "reference", **zero(2))


def test_a_loss_that_is_not_finite_ends_both_under_zero3(tmp_path):
    two = run_ranks(tmp_path, 2, "spoilt", **zero(3))
    assert all(weight.isfinite().all() for weight in two["weights"].values())


@needs_server
@pytest.mark.server
def test_ranks_under_zero3_train_with_a_real_server(tmp_path):
    """The server is sent whole weights after each step, and its log-probs are those of the trainer."""
    tokenizer, path = build_tokenizer(), str(tmp_path / "model")
    build_model(tokenizer, head_dim=32).save_pretrained(path)  # the smallest head that vLLM's CPU attention knows
    tokenizer.save_pretrained(path)
    server = RealServer(path, tmp_path / "server.log", "--vllm_max_model_length", "512")
    found = []
    try:
        server.start()
        for processes, environment in ((1, {}), (2, zero(3))):
            folder = tmp_path / str(processes)
            program = ["-m", "support.ranks_vllm", str(folder), str(processes), server.url, path]
            run_processes(program, processes, tmp_path / "log", environment)
            found.append(torch.load(folder / "result.pt"))
    finally:
        server.stop()
    one, two = (torch.tensor(result["steps"]) for result in found)
    torch.testing.assert_close(one[:, :2], two[:, :2], rtol=1e-4, atol=1e-6)
    assert max(one[:, 2].max(), two[:, 2].max()) < 1e-4  # between the log-probs of server and trainer
    for name, weight in found[0]["weights"].items():
        torch.testing.assert_close(found[1]["weights"][name], weight, rtol=1e-4, atol=1e-5)
