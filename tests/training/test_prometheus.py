"""Metrics over HTTP, as Prometheus reads them, and the dashboard that draws them."""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.loopback import free_port
from support.trainers import at

from mt_grpo.errors import ConfigError
from mt_grpo.training.step_log import serving

DASHBOARD = Path(__file__).parents[2] / "recipes" / "cluster" / "grafana.json"

needs_library = pytest.mark.skipif(find_spec("prometheus_client") is None, reason="needs mt-grpo[prometheus]")


def read(port: int) -> dict[str, float]:
    """What Prometheus would read, by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


@needs_library
def test_numbers_are_read_as_they_are_at_the_moment():
    numbers, port = {"turn_1/reward": 0.5, "stop/token_budget": float("nan")}, free_port()
    with serving(port, "first", lambda: numbers):
        assert read(port)['mt_grpo_turn_1_reward{run="first"}'] == 0.5
        numbers["turn_1/reward"] = 0.75
        assert read(port)['mt_grpo_turn_1_reward{run="first"}'] == 0.75
        with pytest.raises(ConfigError, match=f"`metrics_address: {port}` cannot be listened at"):
            serving(port, "second", dict).__enter__()
    with serving(f"127.0.0.1:{port}", "third", lambda: {"step": 1}):  # which is free again
        assert read(port) == {'mt_grpo_step{run="third"}': 1}


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'mt-grpo\[prometheus\]'"):
        serving(9464, "first", dict).__enter__()


@needs_library
def test_a_run_has_what_the_dashboard_draws(build):
    port, found = free_port(), {}
    trainer = build(metrics_address=port, eval_strategy="steps", eval_steps=1, max_steps=1)
    trainer.add_callback(at("on_evaluate", lambda **_: found.update(read(port))))
    trainer.train()
    there = {name.partition("{")[0]: value for name, value in found.items()}
    drawn = set(re.findall(r"\b(mt_grpo_\w+)\{", json.dumps(json.loads(DASHBOARD.read_text())["panels"])))
    assert drawn <= there.keys() and there["mt_grpo_step"] == there["mt_grpo_max_steps"] == 1
    assert any(name.startswith("mt_grpo_stop_") for name in there)
    with pytest.raises(OSError):
        read(port)
