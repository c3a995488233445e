"""A trainer that starts a real vLLM server, on this machine's CPU."""

import json

import psutil
import pytest
from support.forked import start_ranks
from support.loopback import free_port
from support.servers import OTHER_PROCESSOR, ROOT, START_LIMIT, needs_server

pytestmark = [needs_server, pytest.mark.server, pytest.mark.slow]


def test_the_quickstart_trains_with_a_server_of_its_own(tmp_path, monkeypatch):
    for name in OTHER_PROCESSOR:  # the trainer's server has its environment
        monkeypatch.delenv(name, raising=False)
    folder, port = tmp_path / "run", str(free_port())
    options = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True, "vllm_server_port": port}
    options |= {"vllm_server_timeout": START_LIMIT, "vllm_importance_sampling_mode": "token_truncate"}
    options |= {
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_turn_length": 16,
        "do_eval": False,
        "output_dir": str(folder),
    }
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = ["-m", "mt_grpo", "train", str(ROOT / "recipes/quickstart.yaml"), *arguments]
    (trainer,) = start_ranks(command, 1, tmp_path / "log", {})
    assert trainer.wait(2 * START_LIMIT) == 0, (tmp_path / "log").read_text()
    assert json.loads((folder / "summary.json").read_text())["steps"] == 2
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows if "loss" in row) < 1e-3
    assert not [one for one in psutil.process_iter(["cmdline"]) if port in (one.info["cmdline"] or [])]
