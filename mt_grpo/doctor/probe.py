"""Measures whether the worst micro-batch of a run fits the memory of this machine."""

from __future__ import annotations

import contextlib
import gc
import resource
import time

import psutil
import torch
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from trl import get_quantization_config
from trl.trainer.utils import selective_log_softmax

from mt_grpo.doctor.context import FAIL, OK, WARN, Lines, RunFacts
from mt_grpo.doctor.memory import GB, SPARE
from mt_grpo.errors import ConfigError, libraries_may_refuse
from mt_grpo.forward.model import ForwardPlan, enable_trees, score
from mt_grpo.forward.packing import FlatTree
from mt_grpo.training.config import changed
from mt_grpo.training.forward_plan import trained_truncation
from mt_grpo.training.model import Activations, load_policy


def probe(facts: RunFacts) -> Lines:
    """Measures the worst micro-batch on this machine, beside the plan of its states, which are not made."""
    device = torch.device("cuda" if torch.cuda.is_available() and not facts.args.use_cpu else "cpu")
    chosen = facts.plan.get("training", {}).get("sharding")
    sharding = next((one for one in facts.candidates() if one.name == chosen), facts.candidates()[-1])
    planned = facts.load.parts(sharding)
    needed = sum(planned.values()) - planned["states"] + 2 * facts.shape.weights(facts.precision)
    if device.type == "cpu" and needed > (free := psutil.virtual_memory().available):
        raise ConfigError(  # the system would kill the process without a word
            f"The probe would take {needed / GB:.1f} GB, and {free / GB:.1f} GB are free here: run it on the machine "
            "of the run."
        )
    batch = f"one micro-batch of {facts.args.per_device_train_batch_size} conversations of {facts.longest} tokens"
    begin = time.perf_counter()
    try:
        peak = _measure(facts, device)
    except torch.OutOfMemoryError:
        yield FAIL, f"{batch} does not fit the memory of this GPU", f"give it {_smaller_batch(facts)}"
        return
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    total, seconds = planned["states"] + peak, time.perf_counter() - begin
    facts.plan["probe"] = {"bytes": peak, "with states": total, "seconds": seconds, "device": device.type}
    available = facts.memory if facts.on_gpu else facts.memory / facts.processes
    what = (
        f"{batch}, forward and backward, took {peak / GB:.2f} GB of the {device.type} "
        f"beside weights and gradients, and {seconds:.1f} s; with {planned['states'] / GB:.2f} GB of planned states "
        f"{total / GB:.2f} GB, of {available / GB:.1f}"
    )
    if total > available:
        yield FAIL, what, f"give it {_smaller_batch(facts)}"
    else:
        yield (WARN if total > SPARE * available else OK), what, ""


def _smaller_batch(facts: RunFacts) -> str:
    """What makes a micro-batch smaller, in words. The plan took it to fit, so it cannot say how much is needed."""
    ways = ["a shorter `max_completion_length`"]
    ways += ["a smaller `per_device_train_batch_size`"] if facts.args.per_device_train_batch_size > 1 else []
    ways += [] if facts.args.gradient_checkpointing else ["`gradient_checkpointing: true`"]
    return " or ".join(ways)


def _measure(facts: RunFacts, device: torch.device) -> float:
    """Bytes at the highest point, less those of weights and gradients, which the plan counts."""
    model = _open(facts).to(device)
    model.train()
    batch = _worst_batch(facts, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before: float = torch.cuda.memory_allocated()
    else:
        _forget_peak()
        before = float(psutil.Process().memory_info().rss)
    with Activations(facts.args, device).kept(model):
        logps = _logps(facts, model, *batch)
    logps.mean().backward()
    grads = sum(one.numel() * one.element_size() for one in (p.grad for p in model.parameters()) if one is not None)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else _peak()
    return max(0.0, peak - before - grads)


def _open(facts: RunFacts) -> nn.Module:
    args = changed(facts.args, model_init_kwargs={"device_map": None, **facts.recipe.init_options()})
    with libraries_may_refuse(f"The model {facts.name!r} cannot be loaded"):
        model = load_policy(facts.name, args, get_quantization_config(facts.recipe.model))
        if facts.peft is not None and not isinstance(model, PeftModel):
            model = get_peft_model(model, facts.peft)
    if args.gradient_checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
    if args.forward == "tree":
        enable_trees(model, args.cast_lm_head_to_fp32)
    return model


def _worst_batch(facts: RunFacts, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens `(B, T)` with no shared prefix between rows."""
    rows, length = facts.args.per_device_train_batch_size, facts.longest
    completion = min(facts.args.max_completion_length, length - 1)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(facts.shape.vocabulary, (rows, length), generator=draw).to(device)
    return ids, torch.ones_like(ids), torch.ones_like(ids[:, -completion:])


def _logps(facts: RunFacts, model: nn.Module, ids: Tensor, mask: Tensor, scored: Tensor) -> Tensor:
    args = facts.args
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
