"""A scripted server that a trainer starts. As a program, steps of ranks: `colocated FOLDER PORT PER_SERVER`."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from accelerate import Accelerator
from datasets import Dataset
from transformers import AutoTokenizer

from mt_grpo.app.train import leave_group
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.training import servers as starting
from support.replicas import Replica
from support.trainers import LETTERS, trainer_builder

IDLE = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
"""A process that only lives."""
TRAINS = {"vllm_mode": "colocate", "use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"}
TRAINS |= {"max_steps": 2, "max_completion_length": 8, "advantage_estimator": None, "rewards": LETTERS}
TRAINS |= {"env": MultiTurnToolEnv(protocol="learnt_tags")}
"""What a trainer of `trainer_builder` is given that starts its servers."""


class Sleeper(Replica):
    """A scripted server whose weights are lost in its sleep."""

    def answer(self, method, path, body):
        if path == "/sleep" and "level=2" in self.http.calls[-1]:
            for weight in self.model.parameters():
                weight.data.zero_()
        return super().answer(method, path, body)


def script_servers(tokenizer, folder: str, replace: Callable[..., None] = setattr) -> list[Sleeper]:
    """The servers that trainers will start."""
    servers = []

    def command_at(host, port, args, about):
        servers.append(Sleeper(tokenizer, port=port, folder=folder))
        return IDLE, {}

    replace(starting, "command_at", command_at)
    replace(starting, "check_vllm", lambda: None)
    return servers


def run(given: str, port: str, per_server: str) -> Accelerator:
    folder = Path(given)
    model = str(folder / "base")
    tokenizer = AutoTokenizer.from_pretrained(model)
    servers = script_servers(tokenizer, model)
    rows = [{"prompt": [{"role": "user", "content": f"What is {number} of Peru"}]} for number in range(8)]
    options = {"vllm_enable_sleep_mode": True, "vllm_server_port": int(port)}
    options["vllm_tensor_parallel_size"] = int(per_server)
    build = trainer_builder(folder / "run", tokenizer, Dataset.from_list(rows))
    trainer = build(None, model, **TRAINS, **options)
    trainer.train()
    trainer.weight_sync.close()
    calls = [call for server in servers for call in server.http.calls]
    seen = {"calls": calls, "port": [server.http.port for server in servers]}
    (folder / f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(seen))
    trainer.accelerator.wait_for_everyone()
    return trainer.accelerator


if __name__ == "__main__":
    leave_group(run(*sys.argv[1:]))
