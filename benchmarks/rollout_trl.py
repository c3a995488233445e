"""
The same conversations through TRL's own tool loop and through the runner. Only generation is scripted: both trainers
are given the same sampled ids at once, run the same asynchronous tool for the same times, and must end up with the
same tokens and the same mask.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import numpy as np
import torch
from common import build_tokenizer
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from trl import GRPOConfig, GRPOTrainer

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rollout import ScriptedEngine
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer

GROUP = 8


def actions(tokenizer: PreTrainedTokenizerBase, times: np.ndarray) -> list[list[list[int]]]:
    """Sampled ids of each turn of each conversation: a call for each time, then an answer."""
    call = '<tool_call>\n{"name": "wait", "arguments": {"seconds": %.4f}}\n</tool_call><|im_end|>'
    return [[tokenizer.encode(text) for text in [*(call % t for t in row), "Done.<|im_end|>"]] for row in times]


def build_model(vocabulary: int) -> Qwen3ForCausalLM:
    """Small enough that a step is its rollouts: what is compared is the host, on which a larger model lies equally."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, max_position_embeddings=4096, tie_word_embeddings=True,
        )
    )  # fmt: skip


class Timed:
    """A trainer that keeps how long its latest rollouts took and what came out of them."""

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        start = time.perf_counter()
        output = super()._generate(prompts)
        self.rollout_seconds = time.perf_counter() - start
        self.tokens = output[:3]
        return output

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        start = time.perf_counter()
        loss = super().training_step(*args, **kwargs)
        self.step_seconds = time.perf_counter() - start
        return loss


class TRLTrainer(Timed, GRPOTrainer):
    """TRL's trainer and tool loop; what it generates is scripted."""

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        self.turn = 0
        return super()._generate(prompts)

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> tuple[Any, None]:
        self.turn += 1  # every conversation takes as many turns, so each round has them all, in order
        return [list(turns[self.turn - 1]) for turns in self.script], None


class OurTrainer(Timed, MTGRPOEnvTrainer):
    """The trainer of this repository; its engine is scripted."""


def build_trainers(tool: Any, conversations: int, turns: int, folder: str) -> tuple[TRLTrainer, OurTrainer]:
    tokenizer = build_tokenizer()
    options = {
        "use_cpu": True, "bf16": False, "report_to": [], "num_generations": GROUP, "max_steps": 1, "beta": 0.0,
        "per_device_train_batch_size": conversations, "max_completion_length": 2048, "save_strategy": "no",
        "gradient_checkpointing": False, "disable_tqdm": True, "logging_strategy": "no",
    }  # fmt: skip
    dataset = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"Wait {i}."}]} for i in range(conversations // GROUP)]
    )

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        return [float(index % 2) for index in range(len(completions))]

    theirs = TRLTrainer(
        build_model(len(tokenizer)), reward, GRPOConfig(f"{folder}/trl", **options), dataset,
        processing_class=tokenizer, tools=[tool],
    )  # fmt: skip
    ours = OurTrainer(
        build_model(len(tokenizer)),
        MultiTurnToolEnv([tool], max_steps=turns, protocol="native"),
        outcome_reward_funcs=[reward],
        args=MTGRPOConfig(f"{folder}/ours", tokenization_sanity_check_mode="disable", **options),
        train_dataset=dataset,
        engine=ScriptedEngine(tokenizer, lambda session, turn: ours.script[int(session.rsplit("-", 1)[1])][turn]),
        processing_class=tokenizer,
    )
    for trainer in (theirs, ours):
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
    return theirs, ours


def compare(tool: Any, times: list[np.ndarray]) -> dict[str, list[float]]:
    """
    TRL's seconds over ours, of the rollouts and of the whole step, one of each for every array of tool times, shape
    (conversations, turns). The first array is a warm-up.

    Raises:
        RuntimeError: If tokens or masks differ.
    """
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = build_trainers(tool, *times[0].shape, folder)
        ratios: dict[str, list[float]] = {"rollouts": [], "step": []}
        for sample in times:
            for trainer in (theirs, ours):
                trainer.script = actions(trainer.processing_class, sample)
                trainer.train()
            if theirs.tokens != ours.tokens:
                raise RuntimeError("The two trainers ended up with different tokens: the ratio is void.")
            ratios["rollouts"].append(theirs.rollout_seconds / ours.rollout_seconds)
            ratios["step"].append(theirs.step_seconds / ours.step_seconds)
    return {name: values[1:] for name, values in ratios.items()}
