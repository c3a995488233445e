"""Runs of `support.ranks`, and whether two of them learnt the same."""

from pathlib import Path

import torch

from support.forked import run_processes

SHARDED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}


def run_ranks(folder: Path, processes: int, scenario: str = "plain", **environment: str) -> dict:
    """What a scenario of `support.ranks` leaves, run by so many processes."""
    folder.mkdir(exist_ok=True)
    log = folder.with_suffix(".log")
    run_processes(["-m", "support.ranks", str(folder), str(processes), scenario], processes, log, environment)
    return torch.load(folder / "result.pt")


def assert_the_same_is_learnt(one: dict, two: dict) -> None:
    """Losses, gradients, advantages and weights of two runs agree."""
    assert one["turns"] == two["turns"] and len(one["learnt"]) == 3
    torch.testing.assert_close(torch.tensor(one["learnt"]), torch.tensor(two["learnt"]), rtol=1e-4, atol=1e-6)
    assert len(one["credit"]) > 8
    for name, advantages in one["credit"].items():
        assert advantages.any()
        torch.testing.assert_close(two["credit"][name], advantages, rtol=1e-4, atol=1e-5)
    for kind in ("weights", "sent"):  # as trained, and as a server would get them
        assert one[kind].keys() == two[kind].keys()
        for name, weight in one[kind].items():
            torch.testing.assert_close(two[kind][name], weight, rtol=1e-4, atol=1e-5)
