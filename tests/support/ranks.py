"""A run of three steps on scripted conversations, for one process or several: `ranks OUTPUT_DIR WORLD SCENARIO`."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, gather, gather_object
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from rich.console import Console
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from mt_grpo.app.train import leave_group, run_training
from mt_grpo.credit import ADVANTAGE_ESTIMATORS, RewardBatch, estimate
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.forward.model import ForwardPlan, score
from mt_grpo.rewards import InformationGain, OutcomeReward, StateScore, TurnReward, reward
from mt_grpo.rollout import ScriptedEngine
from mt_grpo.token_tree import TokenTree
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer
from mt_grpo.training.model import NonFiniteError, load_reference
from mt_grpo.training.step_log.records import read_audit
from mt_grpo.weights.transport import _FullParameters
from support.architectures import build_random
from support.audio import SOUND_FAMILIES, tone
from support.hybrids import build_hybrid
from support.images import ScriptedSight, build_processor, build_vision_model, picture
from support.models import CPU_RUN, DEEPSPEED_RUN, build_model, build_tokenizer, lookup

BATCH = 8
ROWS = [
    {"prompt": [{"role": "user", "content": f"What is {number} of Peru"}], "answer": f"Lima {number}"}
    for number in range(6)
]
INFORMED = ("plain", "measured", "adapter", "replay")
"""Scenarios with `information_gain`."""
SEARCH = '<tool>{"name": "lookup", "args": {"query": "Lima"}}</tool>'
SAVED = {"save_strategy": "steps", "save_steps": 3}
MEDIA = {"shuffle_dataset": False, "ddp_find_unused_parameters": False}
SCENARIOS = {
    "plain": {},
    # only the second rank's conversations are rewritten, and only they are sampled again
    "steps": {
        "groups_without_signal": "resample",
        **{"gradient_accumulation_steps": 2, "steps_per_generation": 2, "history": "strip_thinking"},
        **{**SAVED, "save_only_model": True},
    },
    # the conversations of the second rank do not fit, so it has nothing to learn from
    "adapter": {
        **{"max_completion_length": 150, "mask_truncated_completions": True, "beta": 0.1},
        "use_vllm": True,  # the loss corrects for the engine, so there are old log-probs
    },
    "replay": {},  # of a run of one process
    "wrong_trees": {},
    "bf16": {"bf16": True, "max_grad_norm": 1e9},  # gradients as they were reduced
    # of the first rank all conversations end before they branch, of the second none
    "branches": {"advantage_estimator": "branch_to_go", "branch_at": 1, "num_branches": 2, "max_steps": 1},
    "turns": {"max_steps": 1},
    # conversations take their time, those of the second rank more; evaluations come in between
    "ahead": {"max_staleness": 2, "do_eval": True, "eval_strategy": "steps", "eval_steps": 1},
    "reference": {"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 1, **SAVED},
    # every other question shows an image, or plays a sound, so in each step one of two ranks has none
    "images": MEDIA,
    "sounds": MEDIA,
    # Qwen3.5: linear and full attention. With the default rule its third step makes 5e-4 of a rounding of 1e-6.
    "hybrid": {"advantage_estimator": {"name": "gtpo", "gamma": 0.5}},
    "sinks": {},  # gpt-oss: sinks, windows and experts
    "saved": {"save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch"},
    "spoilt": {},  # the second rank's loss is not finite
    "measured": {"do_eval": True, "per_device_eval_batch_size": 3, "num_generations_eval": 1},
    # ten evaluated conversations, eight to a batch: of the second batch the second rank has none
    "uneven": {"do_eval": True, "num_generations_eval": 2, "loss_type": "grpo"},
    "taught": {"distillation_coef": 0.1},  # by a model of another family
    "averaged": {"distillation_coef": 0.1, "num_generations": 2, **SAVED},  # by the mean of the policy, where it tells
}


def conversation(session: str, turn: int) -> str:
    """The second half of a batch, which is the second rank's, thinks, and takes three turns more than the first."""
    number = int(session.rsplit("-", 1)[1])
    second = number >= BATCH // 2
    turns = number % 2 + 3 * second
    action = SEARCH if turn < turns else f"<answer>Lima {'of Peru ' * (number % 3)}</answer>"
    return "<think>well</think>" * second + action


def uneven_times(session: str, turn: int) -> float:
    """Seconds of a turn, at random; the second rank takes more."""
    draw = random.Random(f"{session} {turn} {time.monotonic()}")
    return draw.random() * (0.01 + 0.03 * (int(session.rsplit("-", 1)[1]) >= BATCH // 2))


def silent_at_first(session: str, turn: int) -> str:
    """All members of the second group answer the same, until they are asked for the third time."""
    parts = session.split("-")
    attempt = int(parts[3]) if len(parts) == 5 else 0
    first = int(parts[-1]) < BATCH // 2
    return conversation(session, turn) if first or attempt == 2 else "<answer>Lima</answer>"


class Searched(TurnReward):
    def score(self, turn, trajectory, **row):
        return 0.1 * (turn.index + 1) if turn.has_result else None


@reward("progress")
class Progress(StateScore):
    def score(self, turn, trajectory, **row):
        return turn.index % 2 + 0.1 * len(turn.text)


class Length(OutcomeReward):
    def score(self, trajectory, **row):
        return float(len(trajectory.answer or ""))


class Watch(TrainerCallback):
    """Sees the gradients of each optimiser step, and the rewards that it learns from."""

    rounded = True
    """Whether every gradient is a number of bfloat16."""
    trainer: MTGRPOEnvTrainer
    rewards: RewardBatch | None = None
    """The rewards of the last step of training; an evaluation may come after it."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        gradients = [whole(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
        self.rounded &= all(gradient.equal(gradient.bfloat16().to(gradient.dtype)) for gradient in gradients)
        self.rewards = self.trainer.batch.rewards


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter, or its gradient, of all ranks."""
    if hasattr(parameter, "ds_id"):  # ZeRO-3
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameter):
            return parameter.detach().clone()
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def assert_a_checkpoint_restores(trainer: MTGRPOEnvTrainer, folder: Path) -> None:
    reference = dict(trainer.accelerator.unwrap_model(trainer.ref_model).named_parameters())
    synced = {name: whole(parameter).detach().clone() for name, parameter in reference.items()}
    sharded = bool(os.environ.get("ACCELERATE_USE_FSDP"))
    assert any(isinstance(parameter, DTensor) for parameter in reference.values()) == sharded
    assert any((whole(p) != synced[n]).any() for n, p in trainer.model.named_parameters() if n in synced)
    for parameter in reference.values():
        parameter.data.zero_()
    load_reference(folder, trainer.args, trainer.accelerator, trainer.ref_model)
    for name, parameter in reference.items():
        torch.testing.assert_close(whole(parameter).detach(), synced[name], rtol=0, atol=0)


def gather_as_nccl() -> None:
    """accelerate's way of gathering where the backend is not gloo, which asks for flat tensors in that call."""
    flat = dist.all_gather_into_tensor
    dist.all_gather_into_tensor = lambda output, tensor: flat(output, tensor.reshape(-1))
    PartialState._shared_state["backend"] = "nccl"


def shift(model: Any, change: Any) -> None:
    """Changes what a model makes of its tokens."""
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: change(output))


def special(scenario: str) -> tuple[Any, Any]:
    """The processor of a scenario, and its model where that is of a family of its own."""
    processor, size = build_tokenizer(), {"vocab_size": len(build_tokenizer())}
    if scenario == "images":
        processor = build_processor()
        return processor, build_vision_model(processor.tokenizer)
    if scenario == "sounds":
        return SOUND_FAMILIES["qwen2-audio"]()
    if scenario == "hybrid":
        return processor, build_hybrid("qwen3.5", **size).train()
    if scenario == "sinks":
        return processor, build_random("gpt-oss", router_aux_loss_coef=0.0, **size).train()
    return processor, None


def options_of(folder: str, world: int, scenario: str) -> MTGRPOConfig:
    options = CPU_RUN | {"max_completion_length": 480, "max_steps": 3, "state_score": "progress", "optim": "sgd"}
    options |= {"learning_rate": 0.1, **SCENARIOS[scenario]}
    options["per_device_train_batch_size"] = BATCH // world // options.get("steps_per_generation", 1)
    if scenario == "uneven":
        options["per_device_eval_batch_size"] = BATCH // world
    if "SP_SIZE" in os.environ:
        options |= {"sp_size": int(os.environ["SP_SIZE"]), "gradient_checkpointing": True}
    if "REENTRANT" in os.environ:
        options |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    if "LAYERS" in os.environ:
        options |= {"gradient_checkpointing": True, "gradient_checkpointing_layers": int(os.environ["LAYERS"])}
    if os.environ.get("ACCELERATE_USE_DEEPSPEED"):
        options |= DEEPSPEED_RUN
    if scenario == "taught":
        options["teacher"] = {"model": str(Path(folder, "teacher")), "sees": ["answer", "sibling"]}
    if scenario == "averaged":
        options["teacher"] = {"model": "self", "teacher_model_kind": "ema", "teacher_update_rate": 0.5}
        options["teacher"]["gate"] = "explained"
    if scenario == "replay":
        options["replay"] = os.environ["REPLAYED"]
    args = MTGRPOConfig(folder, **options)
    if os.environ.get("ACCELERATE_USE_FSDP"):  # accelerate shards on GPUs only, though torch does it on a CPU too
        args.distributed_state.distributed_type = DistributedType.MULTI_GPU
    if os.environ.get("ACCELERATE_USE_DEEPSPEED"):
        args.use_cpu = True  # once accelerate has taken DeepSpeed
    if os.environ.get("GATHER_AS_NCCL"):
        gather_as_nccl()
    return args


def run(folder: str, processes: str, scenario: str) -> Accelerator:
    world = int(processes)
    # made before the options: under ZeRO-3 transformers would make one that sees in parts, and fails
    processor, model = special(scenario)
    args = options_of(folder, world, scenario)
    rows, sensing, adapter = [dict(row) for row in ROWS], scenario in ("images", "sounds"), None
    tokenizer = processor.tokenizer if sensing else processor
    for number, row in enumerate(rows[::2] if sensing else []):
        if scenario == "images":
            row["images"] = [picture("red", (16, 16 + 8 * len(row["answer"])))]
        else:
            row["audio"] = tone(30.0 * (number + 1))
    if scenario == "adapter":
        adapter = LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    if model is None:
        model = build_model(tokenizer, max_position_embeddings=1024, tie_word_embeddings=adapter is None)
    if scenario == "wrong_trees":  # it looks at a token's place in the row, which trees change
        shift(model, lambda output: output + 0.01 * torch.arange(output.size(1))[:, None])
    if scenario == "reference":  # is loaded from where the policy came from
        model.config._name_or_path = str(Path(folder) / "model")
        with args.distributed_state.main_process_first():
            model.save_pretrained(model.config._name_or_path)
    if scenario == "taught":
        with args.distributed_state.main_process_first():
            build_random("llama", vocab_size=len(tokenizer)).save_pretrained(args.teacher["model"])
            tokenizer.save_pretrained(args.teacher["model"])
    script = silent_at_first if scenario == "steps" else conversation
    times = uneven_times if scenario == "ahead" else 0.0
    trainer = MTGRPOEnvTrainer(
        model,
        MultiTurnToolEnv([lookup], protocol="learnt_tags", max_steps=6),
        [] if scenario == "branches" else [Searched(), *[InformationGain()][: scenario in INFORMED]],
        [] if scenario == "turns" else [Length()],
        args,
        rows if sensing else Dataset.from_list(rows),
        Dataset.from_list(rows[: 5 if scenario == "uneven" else 6]) if args.do_eval else None,
        engine=(ScriptedSight if sensing else ScriptedEngine)(tokenizer, script, times),
        processing_class=processor,
        peft_config=adapter,
        callbacks=[watch := Watch()],
    )
    watch.trainer = trainer
    assert trainer.accelerator.num_processes == world
    evaluations = []
    if scenario == "spoilt":
        if trainer.accelerator.process_index == 1:
            shift(trainer.model, lambda output: output * torch.nan)
        with pytest.raises(NonFiniteError, match="loss of step 1 is nan"):
            trainer.train()
    elif scenario in ("measured", "uneven"):
        run_training(trainer, {}, Console(quiet=True))
    else:
        trainer.train(os.environ.get("RESUMED"))
    if scenario == "wrong_trees":
        torch.save({"gave up": trainer.forwards.gave_up_trees, "forward": args.forward}, Path(folder) / "result.pt")
        return trainer.accelerator
    if scenario == "uneven":
        stream = IterableDataset.from_generator(lambda: iter(rows[:5]))
        evaluations = [trainer.evaluate(dataset) for dataset in (None, stream)]
    if scenario == "taught" and os.environ.get("ACCELERATE_USE_FSDP"):  # layer by layer
        assert all(isinstance(layer, FSDPModule) for layer in trainer.teacher_model.model.layers)
    if scenario == "reference":
        assert_a_checkpoint_restores(trainer, Path(folder) / "checkpoint-3")
    if scenario == "averaged":
        mean = {name: whole(weight) for name, weight in trainer.teacher_weights.weights.items()}
        trainer.teacher_weights.begin(str(Path(folder) / "checkpoint-3"))
        assert all(whole(weight).equal(mean[name]) for name, weight in trainer.teacher_weights.weights.items())
    result = result_of(trainer, watch) | {"evaluations": evaluations}
    if trainer.accelerator.is_main_process:
        torch.save(result, Path(folder) / "result.pt")
    return trainer.accelerator


def result_of(trainer: MTGRPOEnvTrainer, watch: Watch) -> dict[str, Any]:
    args, accelerator = trainer.args, trainer.accelerator
    walk = _FullParameters(trainer.model, accelerator)
    walk.dtype = torch.bfloat16 if args.bf16 else None  # of the server that such a recipe starts
    sent = {name: tensor.detach().clone() for name, tensor in walk}
    tree = TokenTree()
    tree.add_turn([1, 2], [1, 2], [0.0] * 2)
    with accelerator.autocast():
        logps = score(trainer.model, ForwardPlan([tree])).logps
    model = accelerator.unwrap_model(trainer.model)
    logged = [row for row in trainer.state.log_history if "loss" in row]
    return {
        "proven": [n for module in model.modules() for n in vars(module).get("_proven_lengths", {}).values()],
        "sharded": any(isinstance(one, DTensor) or hasattr(one, "ds_id") for one in model.parameters()),
        "turns": [row["turns/mean"] for row in logged],
        "learnt": [[float(row["loss"]), float(row["grad_norm"])] for row in logged],
        "weights": {name: whole(parameter).detach() for name, parameter in model.named_parameters()},
        "sent": sent,
        "dtype": logps.dtype,
        "credit": {name: estimate(name, watch.rewards) for name in ADVANTAGE_ESTIMATORS if watch.rewards},
        "rounded": watch.rounded,
        "audit": read_audit(args.output_dir) if accelerator.is_main_process else None,
        "sampled": sum(gather_object([len(trainer.batch.counted) + sum(map(len, trainer.batch.discarded))])),
        "work": gather(torch.stack([part["completion_mask"].sum() for part in trainer._buffered_inputs])),
    }


if __name__ == "__main__":
    leave_group(run(*sys.argv[1:]))
