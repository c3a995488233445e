"""A run of three steps on scripted conversations, for one process or several: `ranks.py OUTPUT_DIR`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from conftest import build_model, build_tokenizer
from datasets import Dataset

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rewards import OutcomeReward, TurnReward
from mt_grpo.rollout import ScriptedEngine
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer

BATCH = 8
SEARCH = '<tool>{"name": "lookup", "args": {"query": "Lima"}}</tool>'


def lookup(query: str) -> str:
    """
    Looks a query up.

    Args:
        query: What to look for.
    """
    return f"about {query}"


def conversation(session: str, turn: int) -> str:
    """The second half of a batch, which is the second rank's, takes three turns more than the first."""
    number = int(session.rsplit("-", 1)[1])
    turns = number % 2 + (3 if number >= BATCH // 2 else 0)
    return SEARCH if turn < turns else f"<answer>Lima {'of Peru ' * (number % 3)}</answer>"


class Searched(TurnReward):
    def score(self, turn, trajectory, **row):
        return 0.1 * (turn.index + 1) if turn.has_result else None


class Length(OutcomeReward):
    def score(self, trajectory, **row):
        return float(len(trajectory.answer or ""))


def main(folder: str) -> None:
    tokenizer = build_tokenizer()
    rows = [{"prompt": [{"role": "user", "content": f"What is {number} of Peru"}]} for number in range(6)]
    args = MTGRPOConfig(
        folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        save_strategy="no",
        per_device_train_batch_size=BATCH // int(sys.argv[2]),
        num_generations=4,
        max_completion_length=480,
        max_steps=3,
        learning_rate=0.1,
        optim="sgd",
    )
    trainer = MTGRPOEnvTrainer(
        build_model(tokenizer, max_position_embeddings=1024),
        MultiTurnToolEnv([lookup], system_prompt="", max_steps=6),
        [Searched()],
        [Length()],
        args,
        Dataset.from_list(rows),
        engine=ScriptedEngine(tokenizer, conversation),
        processing_class=tokenizer,
    )
    assert trainer.accelerator.num_processes == int(sys.argv[2])
    trainer.train()
    if trainer.accelerator.is_main_process:
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        turns = [row["turns/mean"] for row in trainer.state.log_history if "turns/mean" in row]
        weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
        torch.save({"losses": losses, "turns": turns, "weights": weights}, Path(folder) / "result.pt")


if __name__ == "__main__":
    main(sys.argv[1])
