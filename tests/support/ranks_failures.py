"""
Runs that `sp_size` cannot share, and runs of which one process fails, each in its own way, one after another:
`ranks_failures OUTPUT_DIR`.
"""

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
from support.architectures import build_random
from support.mixtures import build_mixture
from support.models import build_model, build_tokenizer, lookup
from support.trainers import trainer_builder


class Local(Exception):
    """Takes more than a message, so that other processes could not make one."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{reason} ({code})")


class Length(OutcomeReward):
    error: BaseException | None = None

    def score(self, trajectory, **row):
        if self.error is not None:
            raise self.error
        return float(len(trajectory.answer or ""))


def engine_says(error):
    return lambda trainer: setattr(trainer.runner.engine, "_script", lambda session, turn: error)


def reward_raises(error):
    return lambda trainer: setattr(trainer.outcome_reward_funcs[0], "error", error)


def weights_differ(trainer):
    with torch.no_grad():
        list(trainer.model.parameters())[-1].view(-1)[0] += 1e-6


def no_container(most):
    class Env(MultiTurnToolEnv):
        failed = 0

        def start(self, prompt):
            if Env.failed < most:
                Env.failed += 1
                raise ConnectionError("no container")
            return super().start(prompt)

    return lambda trainer: setattr(trainer.runner, "env", Env([lookup], protocol="learnt_tags"))


def template_of_judge_refuses(trainer):
    trainer.outcome_reward_funcs[1]._tokenizer.chat_template = "{{ raise_exception('no tools here') }}"


def on_finish_raises(trainer):
    class Full(list):
        def append(self, trajectory):
            raise OSError("no space left")

    generate = trainer._generate

    def with_full_list(prompts):
        trainer.batch.trajectories = Full()
        return generate(prompts)

    trainer._generate = with_full_list


def writer_fails(trainer):
    trainer.step_log.records.writer.folder = Path("/dev/null/rollouts")


FAULTS = {
    "weights_differ": weights_differ,
    "adapters_differ": weights_differ,
    "no_conversation_is_left": no_container(sys.maxsize),
    "template_of_judge_refuses": template_of_judge_refuses,
    "engine_fails": engine_says(Local(7, "a bug in the engine")),
    "memory_ends": engine_says(MemoryError("full")),
    "on_finish_raises": on_finish_raises,
    "writer_fails": writer_fails,
    "reward_raises": reward_raises(KeyError("gold")),
    "reward_exits": reward_raises(SystemExit("a library gave up")),
    # one with a sentence, the other with a defect: all must end for the same reason, since some are saved after
    "both_fail_differently": reward_raises(SystemExit("a library gave up")),
    "env_cannot_begin": no_container(1),
}
"""What happens to the trainer of the second process."""
OF_THE_FIRST = {"both_fail_differently": reward_raises(KeyError("gold"))}


def sharded_judge(tokenizer):
    """A reward model whose forward is a collective, as that of a model with sharded weights is."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen3Config(vocab_size=len(tokenizer), head_dim=8, num_key_value_heads=1, num_labels=1, **sizes)
    model = Qwen3ForSequenceClassification(config)
    model.register_forward_pre_hook(lambda *_: dist.all_reduce(torch.ones(1)))
    return model


def wrong_over_trees(tokenizer):
    """It looks at a token's place in the row, which trees change."""
    model = build_model(tokenizer)
    model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: output + 0.01 * torch.arange(output.size(1))[:, None]
    )
    return model


def unshared(tokenizer):
    """Models and options that two processes are refused."""
    cases = {
        "heads": {"model": build_model(tokenizer, num_attention_heads=3, num_key_value_heads=1)},
        "attention of its own": {"model": build_random("bloom", vocab_size=len(tokenizer))},
        "balanced experts": {"model": build_mixture("mixtral", len(tokenizer)), "router_aux_loss_coef": 0.1},
        "wrong over trees": {"model": wrong_over_trees(tokenizer)},
        "three": {"sp_size": 3},
    }
    return {name: {"sp_size": 2, **options} for name, options in cases.items()}


def main(folder: str) -> None:
    tokenizer, rank = build_tokenizer(), PartialState(cpu=True).process_index
    rows = [{"prompt": [{"role": "user", "content": f"What is {number} of Peru"}]} for number in range(6)]
    options = {"max_steps": 1, "max_completion_length": 100, "advantage_estimator": None, "eval_dataset": None}
    given = unshared(tokenizer) | {name: {} for name in FAULTS}
    given["adapters_differ"] = {"peft_config": LoraConfig(target_modules=["q_proj"])}
    ends = {}
    for name, own in given.items():
        build = trainer_builder(Path(folder) / name, tokenizer, Dataset.from_list(rows))
        default = {"model": build_model(tokenizer, max_position_embeddings=1024)}
        spoil = (OF_THE_FIRST, FAULTS)[rank].get(name, lambda trainer: None)
        try:
            trainer = build(
                lambda session, turn: f"<answer>Lima {'a' * int(session[-1])}</answer>",
                rewards=((), (Length(), sharded_judge(tokenizer))),
                reward_processing_classes=[None, build_tokenizer()],
                env=MultiTurnToolEnv([lookup], protocol="learnt_tags"),
                **options | default | own,
            )
            spoil(trainer)
            trainer.train()
            ends[name] = ["trained", trainer.state.global_step]
        except (Exception, SystemExit) as error:
            ends[name] = [type(error).__name__, str(error)]
        print(rank, name, ends[name], file=sys.stderr, flush=True)
    (Path(folder) / f"ends-{rank}.json").write_text(json.dumps(ends))
    accelerator = trainer.accelerator
    del trainer
    leave_group(accelerator)


if __name__ == "__main__":
    main(*sys.argv[1:])
