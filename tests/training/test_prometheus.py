"""Metrics over HTTP, as Prometheus reads them, and the dashboard that draws them."""

import json
import re
import signal
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.forked import Forked
from support.loopback import free_port
from support.trainers import at
from support.waiting import until

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
    numbers, port = {"turn_1/reward": {"first": 0.5}, "stop/token_budget": {"first": float("nan")}}, free_port()
    with serving(port, "run", lambda: numbers):
        assert read(port)['mt_grpo_turn_1_reward{run="first"}'] == 0.5
        numbers["turn_1/reward"]["first"] = 0.75
        assert read(port)['mt_grpo_turn_1_reward{run="first"}'] == 0.75
        with pytest.raises(ConfigError, match=f"`metrics_address: {port}` cannot be listened at"):
            serving(port, "run", dict).__enter__()
    with serving(f"127.0.0.1:{port}", "run", lambda: {"step": {"third": 1}}):  # which is free again
        assert read(port) == {'mt_grpo_step{run="third"}': 1}


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'mt-grpo\[prometheus\]'"):
        serving(9464, "run", dict).__enter__()


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


SERVERS = """
import sys
from mt_grpo.app import serve
from mt_grpo.cli import main
from mt_grpo.servers import start
start._LISTEN_EVERY = 0.2
program = '''
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    log_message = lambda *words: None  # nobody reads before the end
    def do_GET(self):
        if self.path == "/end":
            os._exit(3)
        self.send_response(200 if self.path.startswith("/health") else 404)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
'''
serve.command_at = lambda host, port, *_: ([sys.executable, "-c", program, str(port)], {})
sys.exit(main(["serve", "--config", "recipes/quickstart_vllm.yaml", *sys.argv[1:]]))
"""


@needs_library
def test_replicas_are_told_apart_by_what_lives_and_answers(tmp_path):
    port, first, second = free_port(), free_port(), free_port()
    urls = [f"http://127.0.0.1:{each}" for each in (first, second)]
    options = ["--vllm_server_base_url", *urls, "--metrics_address", str(port)]
    script, log = tmp_path / "servers.py", tmp_path / "log"
    script.write_text(SERVERS)
    process = Forked([str(script), *options], log)

    def seen():
        """Whether each lives, and its silence; none where nothing answers yet."""
        assert process.poll() is None, log.read_text()
        try:
            found = read(port)
        except OSError:
            return None
        return [[found[f'mt_grpo_replica_{name}{{server="{url}"}}'] for url in urls] for name in names]

    def reached(ready):
        until(lambda: (found := seen()) is not None and ready(*found), seen=seen)

    names = ("running", "silent_seconds")
    reached(lambda running, silent: True)
    (_, before), at = seen(), time.monotonic()
    # both have answered since, whose silence had grown with the clock else
    reached(lambda running, silent: running == [1, 1] and max(silent) < min(before) + time.monotonic() - at - 0.5)
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{urls[1]}/end", timeout=10)
    reached(lambda running, silent: running == [1, 0] and silent[0] < silent[1] - 1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0 and "the server at " + urls[1] in log.read_text()
    drawn = set(re.findall(r"mt_grpo_replica_\w+", DASHBOARD.read_text()))
    assert drawn == {f"mt_grpo_replica_{name}" for name in names}
