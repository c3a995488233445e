"""A run of three steps on scripted conversations, for one process or several: `ranks.py OUTPUT_DIR WORLD SCENARIO`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather
from conftest import CPU_RUN, build_model, build_tokenizer, lookup
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from torch.distributed.tensor import DTensor
from transformers import ModernBertDecoderConfig, ModernBertDecoderForCausalLM

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rewards import OutcomeReward, TurnReward
from mt_grpo.rollout import ScriptedEngine
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer
from mt_grpo.training.attention import UnsupportedModelError
from mt_grpo.training.forward import batch_logps
from mt_grpo.training.run import leave_group, run_training
from mt_grpo.training.weight_transports import Parameters

BATCH = 8
SEARCH = '<tool>{"name": "lookup", "args": {"query": "Lima"}}</tool>'
SCENARIOS = {
    "plain": {},
    # only the second rank's conversations are rewritten
    "steps": {
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 2,
        "history": "strip_thinking",
        "save_strategy": "steps",
        "save_steps": 3,
        "save_only_model": True,
    },
    # the conversations of the second rank do not fit, so it has nothing to learn from
    "adapter": {"max_completion_length": 150, "mask_truncated_completions": True},
    "bf16": {"bf16": True},
    "refused": {},
    "measured": {"do_eval": True, "per_device_eval_batch_size": 3, "num_generations_eval": 1},
}


def conversation(session: str, turn: int) -> str:
    """The second half of a batch, which is the second rank's, thinks, and takes three turns more than the first."""
    number = int(session.rsplit("-", 1)[1])
    second = number >= BATCH // 2
    turns = number % 2 + 3 * second
    action = SEARCH if turn < turns else f"<answer>Lima {'of Peru ' * (number % 3)}</answer>"
    return "<think>well</think>" * second + action


class Searched(TurnReward):
    def score(self, turn, trajectory, **row):
        return 0.1 * (turn.index + 1) if turn.has_result else None


class Length(OutcomeReward):
    def score(self, trajectory, **row):
        return float(len(trajectory.answer or ""))


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def main(folder: str, world: int, scenario: str) -> Accelerator:
    tokenizer = build_tokenizer()
    rows = [{"prompt": [{"role": "user", "content": f"What is {number} of Peru"}]} for number in range(6)]
    options = {**CPU_RUN, "max_completion_length": 480, **SCENARIOS[scenario]}
    options["per_device_train_batch_size"] = BATCH // world // options.get("steps_per_generation", 1)
    args = MTGRPOConfig(
        folder,
        max_steps=3,
        learning_rate=0.1,
        optim="sgd",
        **options,
    )
    if os.environ.get("ACCELERATE_USE_FSDP"):  # accelerate shards on GPUs only, though torch does it on a CPU too
        args.distributed_state.distributed_type = DistributedType.MULTI_GPU
    adapter = None
    if scenario == "adapter":
        adapter = LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    model = build_model(tokenizer, max_position_embeddings=1024, tie_word_embeddings=adapter is None)
    if scenario == "refused":
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = ModernBertDecoderForCausalLM(
            ModernBertDecoderConfig(vocab_size=len(tokenizer), pad_token_id=0, **sizes)
        )
    trainer = MTGRPOEnvTrainer(
        model,
        MultiTurnToolEnv([lookup], system_prompt="", max_steps=6),
        [Searched()],
        [Length()],
        args,
        Dataset.from_list(rows),
        Dataset.from_list(rows) if scenario == "measured" else None,
        engine=ScriptedEngine(tokenizer, conversation),
        processing_class=tokenizer,
        peft_config=adapter,
    )
    assert trainer.accelerator.num_processes == world
    if scenario == "refused":
        with pytest.raises(UnsupportedModelError, match="ModernBertDecoderForCausalLM .* nats"):
            trainer.train()
        torch.save({"requests": len(trainer.runner.engine.requests)}, Path(folder) / "result.pt")
        return trainer.accelerator
    if scenario == "measured":
        run_training(trainer, {}, Console(quiet=True))
    else:
        trainer.train()
    sent = {name: tensor.detach().clone() for name, tensor in Parameters(trainer.model, trainer.accelerator)}
    ids = torch.tensor([[1, 2]])
    with trainer.accelerator.autocast():
        logps, _ = batch_logps(trainer.model, ids, ids > 0, ids, ids > 0, ids > 0)
    model = trainer.accelerator.unwrap_model(trainer.model)
    logged = [row for row in trainer.state.log_history if "loss" in row]
    result = {
        "sharded": any(isinstance(parameter, DTensor) for parameter in model.parameters()),
        "proven": list(vars(model)["_proven_lengths"].values()),
        "turns": [row["turns/mean"] for row in logged],
        "learnt": [[float(row["loss"]), float(row["grad_norm"])] for row in logged],
        "weights": {name: whole(parameter).detach() for name, parameter in model.named_parameters()},
        "sent": sent,
        "dtype": logps.dtype,
        "work": gather(torch.stack([part["completion_mask"].sum() for part in trainer._buffered_inputs])),
    }
    if trainer.accelerator.is_main_process:
        torch.save(result, Path(folder) / "result.pt")
    return trainer.accelerator


if __name__ == "__main__":
    leave_group(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
