"""
Forward and backward over rewritten histories: TRL's `TreeRow`, as its asynchronous trainer runs it, against the packed
tree on the same rows. Loss and gradient are compared first. Packing is measured elsewhere (`packing.py`) and left out
on both sides.

    python benchmarks/tree_row.py --device cuda --shape 0.6b    # TRL's kernel, FlashAttention-3 from the Hub
    python benchmarks/tree_row.py --device cuda --gathered      # its gathers, with PyTorch's attention
    python benchmarks/tree_row.py [--quick]                     # the same on a CPU, where there is no kernel

Thinking is stripped from the past, over 32 turns on a GPU and 12 on a CPU. Asked on a GPU: at most 0.8 of TRL's time,
half its memory.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import numpy as np
import torch
from common import write
from measure import DoesNotFit, Row, interleave, peak_memory, ratio, stripped_rows, within_memory
from step import BOUND, SHAPES, build_model, difference
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from trl.experimental.async_grpo.packing import TREE_ATTENTION, TreeRow, _flash_attn, register_tree_attention
from trl.trainer.utils import add_fused_lm_head

from mt_grpo.forward.model import _score_packed, enable_trees
from mt_grpo.forward.packing import FlatTree, Packed, pack

GATHERED = "tree_gathered"
"""Attention that gathers keys as TRL's does, without its kernel."""


def gathered_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Each segment's queries over the gathered keys of its path; states are `(1, heads, N, head_dim)`."""
    key, value = key.index_select(2, tree_kv_index), value.index_select(2, tree_kv_index)
    mixed = []
    queries, keys = (bounds.tolist() for bounds in (tree_cu_seqlens_q, tree_cu_seqlens_k))
    for index in range(len(queries) - 1):
        ours, path = slice(*queries[index : index + 2]), slice(*keys[index : index + 2])
        size, length = ours.stop - ours.start, path.stop - path.start
        visible = torch.ones(size, length, dtype=torch.bool, device=query.device).tril(length - size)
        states = query[:, :, ours], key[:, :, path], value[:, :, path]
        mixed.append(scaled_dot_product_attention(*states, visible, scale=scaling, enable_gqa=True))
    return torch.cat(mixed, dim=2).transpose(1, 2), None


def their_batch(rows: list[Row], device: str) -> dict[str, Any]:
    """TRL's row on the device, under the names its trainer hands to the model."""
    row = TreeRow()
    for tokens, trained in rows:
        row.add(
            {
                "input_ids": torch.from_numpy(tokens),
                "completion_mask": torch.from_numpy(trained.astype(np.int64)),
                "old_log_probs": torch.zeros(len(tokens)),
                "advantage": 1.0,
                "group_id": 0,
            }
        )
    packed = {name: tensor.to(device) for name, tensor in row.pack().items()}
    batch = {name: packed[name][None] for name in ("input_ids", "position_ids", "shift_labels")}
    batch |= {name: packed[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    batch["tree_max_seqlen_q"], batch["tree_max_seqlen_k"] = packed["tree_max_seqlens"].tolist()
    return {"model": batch, "token_index": packed["token_index"]}


def their_step(model: PreTrainedModel, batch: dict[str, Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    outputs = model(**batch["model"], fused_lm_head=True)
    return _finish(model, -outputs.log_probs.flatten()[batch["token_index"]].mean())


def our_step(model: PreTrainedModel, packed: Packed) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return _finish(model, -_score_packed(model, packed).logps.mean())


def _finish(model: PreTrainedModel, loss: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    loss.backward()
    if loss.is_cuda:
        torch.cuda.synchronize()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


def need_kernel() -> None:
    """Loads TRL's kernel, or ends with what that needs."""
    try:
        _flash_attn()
    except (ImportError, OSError, ValueError) as error:  # no package; no network, no build for this GPU
        raise SystemExit(
            "TRL's own attention is FlashAttention-3 from the Hub (kernels-community/flash-attn3), which needs a "
            "Hopper GPU, the package `kernels` (`pip install kernels`) and access to the Hub once; add `--gathered` "
            f"to measure its gathers with PyTorch's attention instead ({type(error).__name__}: {error})."
        ) from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=tuple(SHAPES))
    parser.add_argument("--gathered", action="store_true", help="PyTorch's attention in place of TRL's kernel")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="fewer turns, to see that it runs; nothing is written")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kernel = args.device == "cuda" and not args.gathered
    if kernel:
        need_kernel()
    shape = args.shape or ("cpu" if args.device == "cpu" else "0.6b")
    prompt, turns = (32, 2) if args.quick else (512, 12 if args.device == "cpu" else 32)
    rows = [sequence for trajectory in stripped_rows(prompt, 4, turns) for sequence in trajectory]
    register_tree_attention()
    AttentionInterface.register(GATHERED, gathered_attention)
    AttentionMaskInterface.register(GATHERED, lambda **kwargs: None)
    ours = build_model(shape, args.device)
    theirs = copy.deepcopy(ours)
    theirs.set_attn_implementation(TREE_ATTENTION if kernel else GATHERED)
    add_fused_lm_head(theirs, outputs=("log_probs", "entropy"))
    enable_trees(ours)
    packed = pack([FlatTree(tokens, np.where(trained, 0, -1)) for tokens, trained in rows])
    batch = their_batch(rows, args.device)
    functions = within_memory({"trl": lambda: their_step(theirs, batch), "tree": lambda: our_step(ours, packed)})
    name = "tree_row" if args.device == "cpu" else f"tree_row_cuda_{shape}" + "_gathered" * args.gathered
    settings = {"device": args.device, "shape": shape, "seed": 0, "repeats": args.repeats}
    try:
        (their_loss, their_grads), (our_loss, our_grads) = (function() for function in functions.values())
        gap = difference(our_grads, their_grads)
        if gap > BOUND[args.device]:
            raise SystemExit(f"The gradients differ by {gap:.1e}; a ratio would be void.")
        del their_grads, our_grads
        memory = {kind: peak_memory(function, args.device) for kind, function in functions.items()}
        clock = time.process_time if args.device == "cpu" else time.perf_counter
        seconds = interleave(functions, 1 if args.quick else args.repeats, clock)
    except DoesNotFit as error:
        if not args.quick:
            write(name, settings, [{"turns": turns, "out_of_memory": str(error)}])
        raise SystemExit(str(error)) from error
    speed = ratio(seconds, "trl", "tree")
    print("| tokens: TRL / ours | keys TRL gathers | TRL, s | ours, s | ours / TRL (of minima) | MiB: TRL / ours |")
    print("| --- | --- | --- | --- | --- | --- |")
    print(
        f"| {batch['model']['input_ids'].numel()} / {len(packed.input_ids)} "
        f"| {len(batch['model']['tree_kv_index'])} "
        f"| {statistics.median(seconds['trl']):.2f} | {statistics.median(seconds['tree']):.2f} "
        f"| {1 / speed['median']:.2f} ({1 / speed['minimum']:.2f}) | {memory['trl']} / {memory['tree']} |"
    )
    if not args.quick:
        row = {"turns": turns, "seconds": seconds, "ratio": speed, "peak_mib": memory, "gradient_difference": gap}
        row |= {"loss_difference": float((our_loss - their_loss).abs() / their_loss.abs())}
        write(name, settings, [row])


if __name__ == "__main__":
    main()
