"""Three steps on a real server, for one process or several: `ranks_vllm OUTPUT_DIR PROCESSES URL MODEL`."""

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from mt_grpo.app.train import leave_group
from mt_grpo.envs import MultiTurnToolEnv, Step
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer
from mt_grpo.trajectory import StopReason
from mt_grpo.weights.transport import _FullParameters
from support.models import CPU_RUN, DEEPSPEED_RUN
from support.trainers import Length

BATCH = 8


class Talks(MultiTurnToolEnv):
    """Replies as often as the row says. A turn ends with its first vowel."""

    stop = tuple("aeio")

    async def step(self, turn):
        return Step(done=StopReason.ANSWERED) if turn.index >= self.row["replies"] else "Go on"


def run(folder: str, world: str, url: str, model: str) -> Accelerator:
    processes, tokenizer = int(world), AutoTokenizer.from_pretrained(model)
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {number} of Peru"}], "replies": number}
        for number in range(6)
    ]
    options = {"max_completion_length": 400, "max_steps": 3, "learning_rate": 0.05, "optim": "sgd"}
    options |= {"use_vllm": True, "vllm_server_base_url": url, "vllm_importance_sampling_mode": "token_truncate"}
    options |= CPU_RUN | {"verify_sync_every": 1, "per_device_train_batch_size": BATCH // processes}
    if os.environ.get("ACCELERATE_USE_DEEPSPEED"):
        options |= DEEPSPEED_RUN
    args, loaded = MTGRPOConfig(folder, **options), AutoModelForCausalLM.from_pretrained(model)
    given = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
    trainer = MTGRPOEnvTrainer(loaded, Talks(protocol="learnt_tags"), [], [Length()], args, **given)
    assert trainer.accelerator.num_processes == processes
    trainer.train()
    trainer.weight_sync.close()
    walk = _FullParameters(trainer.model, trainer.accelerator)
    weights = {name: tensor.detach().clone() for name, tensor in walk}  # on every rank: they may be spread
    if trainer.accelerator.is_main_process:
        names = ("loss", "grad_norm", "sampling/sampling_logp_difference/max")
        steps = [[row[name] for name in names] for row in trainer.state.log_history if "loss" in row]
        torch.save({"steps": steps, "weights": weights}, Path(folder) / "result.pt")
    return trainer.accelerator


if __name__ == "__main__":
    leave_group(run(*sys.argv[1:]))
