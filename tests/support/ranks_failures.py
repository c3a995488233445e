"""Runs of which one process fails, each in its own way, one after another: `ranks_failures OUTPUT_DIR`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from mt_grpo.app.train import leave_group
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rewards import OutcomeReward
from mt_grpo.rollout import ScriptedEngine
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer
from support.models import CPU_RUN, build_model, build_tokenizer, lookup

BATCH = 4  # on each of two ranks


class Local(Exception):
    """Takes more than a message, so that other processes could not make one."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{reason} ({code})")


def engine_fails(trainer, rank):
    if rank == 1:
        trainer.runner.engine._script = lambda session, turn: Local(7, "a bug in the engine")


def memory_ends(trainer, rank):
    if rank == 1:
        trainer.runner.engine._script = lambda session, turn: MemoryError("full")


def on_finish_raises(trainer, rank):
    class Full(list):
        def append(self, trajectory):
            raise OSError("no space left")

    generate = trainer._generate

    def with_full_list(prompts):
        trainer.batch.trajectories = Full()
        return generate(prompts)

    if rank == 1:
        trainer._generate = with_full_list


def writer_fails(trainer, rank):
    if rank == 1:
        trainer.step_log.records.writer.folder = Path("/dev/null/rollouts")


def reward_raises(trainer, rank):
    if rank == 1:
        trainer.outcome_reward_funcs[0].error = KeyError("gold")


def reward_exits(trainer, rank):
    if rank == 1:
        trainer.outcome_reward_funcs[0].error = SystemExit("a library gave up")


def both_fail_differently(trainer, rank):
    """One with a sentence, the other with a defect: all must end for the same reason, since some are saved after."""
    trainer.outcome_reward_funcs[0].error = [KeyError("gold"), SystemExit("a library gave up")][rank]


def env_cannot_begin(trainer, rank):
    class Env(MultiTurnToolEnv):
        def start(self, prompt):
            if rank == 1 and not started:
                started.append(prompt)
                raise ConnectionError("no container")
            return super().start(prompt)

    started = []
    trainer.runner.env = Env([lookup], protocol="learnt_tags")


def no_conversation_is_left(trainer, rank):
    class Env(MultiTurnToolEnv):
        def start(self, prompt):
            if rank == 1:
                raise ConnectionError("no container")
            return super().start(prompt)

    trainer.runner.env = Env([lookup], protocol="learnt_tags")


def template_of_judge_refuses(trainer, rank):
    if rank == 1:
        trainer.outcome_reward_funcs[1]._tokenizer.chat_template = "{{ raise_exception('no tools here') }}"


def weights_differ(trainer, rank):
    with torch.no_grad():
        list(trainer.model.parameters())[-1].view(-1)[0] += rank * 1e-6


def adapters_differ(trainer, rank):
    weights_differ(trainer, rank)


FAULTS = [
    weights_differ,
    adapters_differ,
    no_conversation_is_left,
    template_of_judge_refuses,
    engine_fails,
    memory_ends,
    on_finish_raises,
    writer_fails,
    reward_raises,
    reward_exits,
    both_fail_differently,
    env_cannot_begin,
]


class Length(OutcomeReward):
    error: BaseException | None = None

    def score(self, trajectory, **row):
        if self.error is not None:
            raise self.error
        return float(len(trajectory.answer or ""))


def sharded_judge(tokenizer):
    """A reward model whose forward is a collective, as that of a model with sharded weights is."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen3Config(vocab_size=len(tokenizer), head_dim=8, num_key_value_heads=1, num_labels=1, **sizes)
    model = Qwen3ForSequenceClassification(config)
    model.register_forward_pre_hook(lambda *_: dist.all_reduce(torch.ones(1)))
    return model


def main(folder: str) -> None:
    tokenizer, rank = build_tokenizer(), PartialState(cpu=True).process_index
    rows = [{"prompt": [{"role": "user", "content": f"What is {number} of Peru"}]} for number in range(6)]
    ends = {}
    for fault in FAULTS:
        trainer = MTGRPOEnvTrainer(
            build_model(tokenizer, max_position_embeddings=1024),
            MultiTurnToolEnv([lookup], protocol="learnt_tags"),
            outcome_reward_funcs=[Length(), sharded_judge(tokenizer)],
            reward_processing_classes=[None, build_tokenizer()],
            args=MTGRPOConfig(f"{folder}/{fault.__name__}", max_steps=1, **CPU_RUN, max_completion_length=100),
            train_dataset=Dataset.from_list(rows),
            engine=ScriptedEngine(tokenizer, lambda session, turn: f"<answer>Lima {'a' * int(session[-1])}</answer>"),
            processing_class=tokenizer,
            peft_config=LoraConfig(target_modules=["q_proj"]) if fault is adapters_differ else None,
        )
        fault(trainer, rank)
        try:
            trainer.train()
            ends[fault.__name__] = ["trained", trainer.state.global_step]
        except (Exception, SystemExit) as error:
            ends[fault.__name__] = [type(error).__name__, str(error)]
        print(rank, fault.__name__, ends[fault.__name__], file=sys.stderr, flush=True)
    (Path(folder) / f"ends-{rank}.json").write_text(json.dumps(ends))
    accelerator = trainer.accelerator
    del trainer
    leave_group(accelerator)


if __name__ == "__main__":
    main(*sys.argv[1:])
