"""Two steps of ranks that each start a scripted server: `ranks_colocate FOLDER PORT PER_SERVER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from accelerate import Accelerator
from datasets import Dataset
from transformers import AutoTokenizer

from mt_grpo.app.train import leave_group
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.training import servers as starting
from support.colocated import IDLE, Sleeper
from support.trainers import Letters, trainer_builder


def main(folder: str, port: str, per_server: str) -> None:
    leave_group(run(Path(folder), int(port), int(per_server)))


def run(folder: Path, port: int, per_server: int) -> Accelerator:
    model = str(folder / "base")
    tokenizer = AutoTokenizer.from_pretrained(model)
    servers = []

    def command_at(host, port, args, about):
        servers.append(Sleeper(tokenizer, port, model))
        return IDLE, {}

    starting.command_at, starting.check_vllm = command_at, lambda: None
    rows = [{"prompt": [{"role": "user", "content": f"What is {number} of Peru"}]} for number in range(8)]
    options = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True, "vllm_server_port": port}
    options |= {"vllm_tensor_parallel_size": per_server, "vllm_importance_sampling_mode": "token_truncate"}
    env, limits = MultiTurnToolEnv(protocol="learnt_tags"), {"max_steps": 2, "max_completion_length": 8}
    build = trainer_builder(folder / "run", tokenizer, Dataset.from_list(rows))
    trainer = build(None, model, ((), (Letters(),)), env=env, advantage_estimator=None, **options, **limits)
    trainer.train()
    trainer.weight_sync.close()
    calls = [call for server in servers for call in server.http.calls]
    seen = {"calls": calls, "port": [server.http.port for server in servers]}
    (folder / f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(seen))
    trainer.accelerator.wait_for_everyone()
    return trainer.accelerator


if __name__ == "__main__":
    main(*sys.argv[1:])
