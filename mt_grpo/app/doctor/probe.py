"""
Runs one micro-batch of the greatest length, forward and backward, and measures its memory. Apart from the plans, since
it loads the model: it is imported for `--probe` only.
"""

from __future__ import annotations

import contextlib
import gc
import resource
import time
from typing import Any

import psutil
import torch
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from trl import get_quantization_config
from trl.trainer.utils import create_model_from_path, selective_log_softmax

from mt_grpo.app.doctor.case import FAIL, OK, WARN, Case, Lines
from mt_grpo.app.doctor.load import Load
from mt_grpo.app.doctor.memory import GB, SPARE, weights
from mt_grpo.errors import ConfigError, libraries_may_refuse
from mt_grpo.forward.model import enable_trees
from mt_grpo.forward.packing import FlatTree
from mt_grpo.forward.plan import ForwardPlan
from mt_grpo.forward.rows import score
from mt_grpo.training.activations import Activations
from mt_grpo.training.checkpoint import adapter_settings
from mt_grpo.training.forward_plan import trained_truncation
from mt_grpo.training.model import resolve_base


def probe(case: Case) -> Lines:
    """
    Measures the worst micro-batch on this machine, beside what the plan gives a process in states. The states of other
    ranks and the optimiser's are not made.
    """
    device = torch.device("cuda" if torch.cuda.is_available() and not case.args.use_cpu else "cpu")
    chosen = case.plan.get("training", {}).get("sharding")
    sharding = next((one for one in case.candidates() if one.name == chosen), case.candidates()[-1])
    planned = Load.of(case).parts(sharding)
    if device.type == "cpu":
        _refuse_too_large(sum(planned.values()) - planned["states"] + 2 * _weights(case))
    begin = time.perf_counter()
    try:
        peak = _measure(case, device)
    except torch.OutOfMemoryError:
        yield (
            FAIL,
            f"one micro-batch of {_size(case)} does not fit the memory of this GPU",
            f"give it {_smaller(case)}",
        )
        return
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    total, seconds = planned["states"] + peak, time.perf_counter() - begin
    case.plan["probe"] = {"bytes": peak, "with states": total, "seconds": seconds, "device": device.type}
    available = case.memory if case.on_gpu else case.memory / case.processes
    what = (
        f"one micro-batch of {_size(case)}, forward and backward, took {peak / GB:.2f} GB of the {device.type} beside "
        f"weights and gradients, and {seconds:.1f} s; with {planned['states'] / GB:.2f} GB of planned states "
        f"{total / GB:.2f} GB, of {available / GB:.1f}"
    )
    if total > available:
        yield FAIL, what, f"give it {_smaller(case)}"
    else:
        yield (WARN if total > SPARE * available else OK), what, ""


def _size(case: Case) -> str:
    return f"{case.args.per_device_train_batch_size} conversations of {case.longest} tokens"


def _smaller(case: Case) -> str:
    """What makes a micro-batch smaller, in words. The plan took it to fit, so it cannot say how much is needed."""
    ways = ["a shorter `max_completion_length`"]
    ways += ["a smaller `per_device_train_batch_size`"] if case.args.per_device_train_batch_size > 1 else []
    ways += [] if case.args.gradient_checkpointing else ["`gradient_checkpointing: true`"]
    return " or ".join(ways)


def _weights(case: Case) -> float:
    return weights(case.shape, case.precision)


def _refuse_too_large(needed: float) -> None:
    """Refuses a probe that the memory does not hold. On a CPU the system would kill the process without a word."""
    free = psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(
            f"The probe would take {needed / GB:.1f} GB, and {free / GB:.1f} GB are free here: run it on the machine "
            "of the run."
        )


def _measure(case: Case, device: torch.device) -> float:
    """Bytes at the highest point, less those of weights and gradients, which the plan counts."""
    model = _open(case).to(device)
    model.train()
    batch = _worst_batch(case, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before: float = torch.cuda.memory_allocated()
    else:
        _forget_peak()
        before = _resident()
    with Activations(case.args, device).kept(model):
        logps = _logps(case, model, *batch)
    logps.mean().backward()
    grads = sum(one.numel() * one.element_size() for one in (p.grad for p in model.parameters()) if one is not None)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else _peak()
    return max(0.0, peak - before - grads)


def _open(case: Case) -> nn.Module:
    args = case.args
    wanted = case.recipe.model
    options: dict[str, Any] = {
        "dtype": wanted.dtype,
        "attn_implementation": wanted.attn_implementation,
        "device_map": None,
        **case.source,
    }
    quantization = get_quantization_config(wanted)
    options |= {} if quantization is None else {"quantization_config": quantization}
    with libraries_may_refuse(f"The model {case.name!r} cannot be loaded"):
        model = create_model_from_path(resolve_base(case.name), **(options | (args.model_init_kwargs or {})))
        if adapter_settings(case.name) is not None:
            model = PeftModel.from_pretrained(model, case.name, is_trainable=True)
        elif case.peft is not None:
            model = get_peft_model(model, case.peft)
    if args.gradient_checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
    if args.forward == "tree":
        enable_trees(model, args.cast_lm_head_to_fp32)
    return model


def _worst_batch(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens `(B, T)`, prompts of one length, of which the rows have nothing in common."""
    rows, length = case.args.per_device_train_batch_size, case.longest
    completion = min(case.args.max_completion_length, length - 1)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(case.shape.vocabulary, (rows, length), generator=draw).to(device)
    return ids, torch.ones_like(ids), torch.ones_like(ids[:, -completion:])


def _logps(case: Case, model: nn.Module, ids: Tensor, mask: Tensor, scored: Tensor) -> Tensor:
    args = case.args
    half = torch.bfloat16 if args.bf16 else torch.float16
    casts = torch.autocast(ids.device.type, half) if args.bf16 or args.fp16 else contextlib.nullcontext()
    with casts:
        if args.forward == "padded":
            keep = scored.size(1)
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=keep + 1).logits
            return selective_log_softmax(logits[:, :-1] / args.temperature, ids[:, -keep:])
        turns = (torch.arange(ids.size(1)) >= ids.size(1) - scored.size(1)).long().numpy() - 1
        trees = [FlatTree(row, turns) for row in ids.cpu().numpy()]
        options = {"temperature": args.temperature, "truncation": trained_truncation(args)}
        return score(model, ForwardPlan(trees, forward=args.forward, attention=args.tree_attention, **options)).logps


def _forget_peak() -> None:
    """Makes Linux count this process's highest memory from here, where it may."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _peak() -> float:
    """Bytes of memory at this process's highest point."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return 1024.0 * int(line.split()[1])
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _resident() -> float:
    with open("/proc/self/statm") as file:
        return float(int(file.read().split()[1]) * resource.getpagesize())
