"""
A whole policy step, forward and backward: TRL's stock `_compute_loss` on padded rows against the packed tree on the
same rows. Loss and gradient are compared first.

    python benchmarks/step.py                        # small random model, CPU
    python benchmarks/step.py --device cuda --shape 0.6b
    python benchmarks/step.py --teacher              # a model of the same size reads the batch first, in both ways
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from common import build_tokenizer, write
from datasets import Dataset
from measure import WORKLOADS, DoesNotFit, Row, free_memory, interleave, peak_memory, ratio, within_memory
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from mt_grpo.forward.attention import TreeLayout
from mt_grpo.forward.model import ForwardPlan, enable_trees
from mt_grpo.forward.packing import pack
from mt_grpo.training.forward_plan import score_batch
from mt_grpo.training.rollout_batch import batch_trees

SHAPES = {  # hidden, intermediate, layers, heads, key-value heads, head size, vocabulary
    "cpu": (128, 384, 2, 4, 2, 64, 2048),
    "0.6b": (1024, 3072, 28, 16, 8, 128, 151936),
    "1.7b": (2048, 6144, 28, 16, 8, 128, 151936),
    "4b": (2560, 9728, 36, 32, 8, 128, 151936),
}

BOUND = {"cpu": 1e-5, "cuda": 5e-2}
"""Relative difference of the gradients above which a ratio is void: rounding of float32, of bfloat16."""


def build_model(shape: str, device: str) -> Qwen3ForCausalLM:
    hidden, intermediate, layers, heads, groups, size, vocabulary = SHAPES[shape]
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=size,
        vocab_size=vocabulary,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    )
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    return model.to(torch.bfloat16 if device == "cuda" else torch.float32)


def build_batch(rows: list[list[Row]], device: str) -> dict[str, Any]:
    """TRL's batch: prompts padded on the left, completions on the right, an advantage for each token."""
    sequences = [sequence for trajectory in rows for sequence in trajectory]
    begins = [int(trained.argmax()) for _, trained in sequences]
    prompts = [torch.from_numpy(tokens[:begin]) for (tokens, _), begin in zip(sequences, begins, strict=True)]
    completions = [torch.from_numpy(tokens[begin:]) for (tokens, _), begin in zip(sequences, begins, strict=True)]
    masks = [torch.from_numpy(trained[begin:]).long() for (_, trained), begin in zip(sequences, begins, strict=True)]

    def pad(pieces: list[torch.Tensor], side: str) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True, padding_side=side).to(device)

    tool_mask = pad(masks, "right")
    torch.manual_seed(0)
    return {
        "prompt_ids": pad(prompts, "left"),
        "prompt_mask": pad([torch.ones_like(piece) for piece in prompts], "left"),
        "completion_ids": pad(completions, "right"),
        "completion_mask": pad([torch.ones_like(piece) for piece in completions], "right"),
        "tool_mask": tool_mask,
        "turn_ids": torch.zeros_like(tool_mask),
        "advantages": torch.randn(tool_mask.shape).to(device),
        "num_items_in_batch": tool_mask.sum(),
    }


class TreeTrainer(GRPOTrainer):
    """TRL's trainer with its forward replaced."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self._inputs = inputs
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, None]:
        inputs = self._inputs
        plan = ForwardPlan(batch_trees(inputs), temperature=self.temperature)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        with self.accelerator.autocast():
            logps, entropies, *_ = score_batch(model, plan, mask, inputs["completion_ids"].size(1))
        return logps, entropies, None


def build_trainer(kind: type[GRPOTrainer], model: Qwen3ForCausalLM, device: str, folder: str) -> GRPOTrainer:
    arguments = GRPOConfig(
        folder, use_cpu=device == "cpu", bf16=device == "cuda", report_to=[], num_generations=2,
        per_device_train_batch_size=2, loss_type="dapo", gradient_checkpointing=False,
    )  # fmt: skip
    trainer = kind(
        model,
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 2),
        processing_class=build_tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = arguments.steps_per_generation = 1
    trainer.teacher = None
    return trainer


@torch.no_grad()
def taught(trainer: GRPOTrainer, batch: dict[str, Any]) -> torch.Tensor:
    """What a teacher makes of the trained tokens, in the trainer's own way."""
    ids, mask = (torch.cat([batch[f"prompt_{kind}"], batch[f"completion_{kind}"]], dim=1) for kind in ("ids", "mask"))
    trainer._inputs = batch
    logps, *_ = trainer._get_per_token_logps_and_entropies(
        trainer.teacher, ids, mask, batch["completion_ids"].size(1), batch_size=len(ids)
    )
    return logps[batch["tool_mask"].bool()]


def step(trainer: GRPOTrainer, batch: dict[str, Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    trainer.model.zero_grad()
    if trainer.teacher is not None:
        taught(trainer, batch)
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    if loss.is_cuda:
        torch.cuda.synchronize()
    return loss.detach(), [parameter.grad for parameter in trainer.model.parameters()]


def difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Relative to the norm of the whole gradient."""
    gap = sum((a.double() - b.double()).norm() ** 2 for a, b in zip(ours, theirs, strict=True))
    return float((gap / sum(b.double().norm() ** 2 for b in theirs)) ** 0.5)


def compare(
    name: str, batch: dict[str, Any], stock: GRPOTrainer, tree: GRPOTrainer, device: str, repeats: int
) -> dict[str, Any]:
    """Equality, memory and time of one workload; prints its row of the table. `DoesNotFit` where one side does not."""
    packed = pack(batch_trees(batch))
    padded = batch["prompt_ids"].numel() + batch["completion_ids"].numel()
    functions = within_memory({"trl": lambda: step(stock, batch), "tree": lambda: step(tree, batch)})
    (their_loss, theirs), (our_loss, ours) = (function() for function in functions.values())
    gap = difference(ours, theirs)
    if tree.teacher is not None:
        gap = max(gap, float((taught(tree, batch) - taught(stock, batch)).abs().max()))
    if gap > BOUND[device]:
        raise SystemExit(f"{name}: gradients, or the teacher's log-probs, differ by {gap:.1e}; a ratio would be void.")
    del theirs, ours
    memory = {kind: peak_memory(function, device) for kind, function in functions.items()}
    # the processor's time on a CPU, whose cores may be shared with other work
    seconds = interleave(functions, repeats, time.process_time if device == "cpu" else time.perf_counter)
    speed, limit = ratio(seconds, "trl", "tree"), padded / len(packed.input_ids)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    print(
        f"| {name} | {limit:.2f} | {len(packed.label) / padded:.0%} "
        f"| {medians['trl']:.2f} s | {medians['tree']:.2f} s "
        f"| {speed['median']:.2f} (min {speed['minimum']:.2f}) | {speed['median'] / limit:.2f} "
        f"| {memory['trl']} / {memory['tree']} | {gap:.0e} |",
        flush=True,
    )
    return {
        "workload": name,
        "padded_tokens": padded,
        "unique_tokens": len(packed.input_ids),
        "trained_tokens": len(packed.label),
        "attention": TreeLayout(packed).attention(torch.device(device)),
        "seconds": seconds,
        "ratio": speed,
        "ratio_over_limit": {key: value / limit for key, value in speed.items()},
        "peak_mib": memory,
        "loss_difference": float((our_loss - their_loss).abs() / their_loss.abs()),
        "gradient_difference": gap,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=tuple(SHAPES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--teacher", action="store_true", help="a teacher reads the batch before each step")
    args = parser.parse_args()
    shape = args.shape or ("cpu" if args.device == "cpu" else "0.6b")
    torch.set_num_threads(args.threads)
    model = build_model(shape, args.device)
    settings = {"device": args.device, "shape": shape, "seed": 0, "repeats": args.repeats, "threads": args.threads}
    results = []
    print(
        "| workload | padded / unique | trained | TRL | tree | time ratio | ratio / limit | memory, MiB | gradient |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    other = copy.deepcopy(model)
    with tempfile.TemporaryDirectory() as folder:
        stock = build_trainer(GRPOTrainer, copy.deepcopy(model), args.device, folder)
        tree = build_trainer(TreeTrainer, model, args.device, folder)
        enable_trees(model)
        if args.teacher:
            stock.teacher, tree.teacher = copy.deepcopy(stock.model), other  # TRL's reads with its own head
            enable_trees(other)
        for name, make in WORKLOADS.items():
            try:
                row = compare(name, build_batch(make(), args.device), stock, tree, args.device, args.repeats)
            except DoesNotFit as error:
                row = {"workload": name, "out_of_memory": str(error)}
                print(f"| {name} | {error} |", flush=True)
                for trainer in (stock, tree):
                    trainer.model.zero_grad()
                free_memory()
            results.append(row)
            file = "_".join(["step", *["teacher"] * args.teacher, args.device, *[shape] * (args.device == "cuda")])
            write(file, settings, results)


if __name__ == "__main__":
    main()
