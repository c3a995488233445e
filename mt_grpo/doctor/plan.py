"""
The plan of a run: whether memory and disks hold it, and what to change where training does not fit. An estimate, until
a measurement (`--probe`) corrects it.
"""

from __future__ import annotations

import contextlib
import gc
import math
import resource
import shutil
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from peft import PeftModel, get_peft_model
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import Tensor, nn
from trl import ModelConfig, get_peft_config, get_quantization_config
from trl.trainer.utils import selective_log_softmax

from mt_grpo.doctor.context import FAIL, OK, WARN, Check, Lines, RunFacts
from mt_grpo.doctor.memory import COPIES, FSDP2, GB, RESERVE, SPARE, Load, Shape, Sharding, four_bit
from mt_grpo.doctor.step_time import step
from mt_grpo.errors import ConfigError, libraries_may_refuse
from mt_grpo.forward.model import ForwardPlan, enable_trees, score
from mt_grpo.forward.packing import FlatTree
from mt_grpo.options.rules import check_batches
from mt_grpo.training.config import changed
from mt_grpo.training.forward_plan import trained_truncation
from mt_grpo.training.model import Activations, load_policy
from mt_grpo.training.servers import transport_of

_RECORD = 8  # bytes per token in the files of `rollouts`, those of the trainer's numbers included
_CONVERSATION = 2000  # bytes per conversation there, beside those of its tokens
_MOST_ADVICE = 3  # ways that are named
_SHORTEST = 256  # tokens after the prompt below which no run is advised to go
_MOST_PROCESSES = 64
_OPTIMIZER = 12  # bytes of a parameter's weight and moments in the optimiser, which may be kept off the GPU

_Plan = tuple[Load, Sharding]


def _training(facts: RunFacts) -> Lines:
    """Whether a training process fits; of several ways to spread the states, the first that does."""
    total, ranks = facts.training_memory, facts.processes
    available = total if facts.on_gpu else total / ranks
    beside = f" beside the {(facts.memory - total) / GB:.1f} GB of its server" if total < facts.memory else ""
    where = "this machine" if ranks == 1 else f"this machine's share for each of {ranks}"
    where = f"a GPU{beside}" if facts.on_gpu else where
    rejected, load = [], facts.load
    if load.sharing > 1 and load.sharing not in facts.shape.shared_by:
        fitting = [str(size) for size in facts.shape.shared_by[:4]]
        mend = f"set one of {', '.join(fitting)}, or leave `sp_size` out" if fitting else "leave `sp_size` out"
        yield FAIL, f"{load.sharing} processes cannot compute rows of this model together (`sp_size`)", mend
        return
    for sharding in facts.candidates():
        found = load.parts(sharding)
        needed = sum(found.values())
        if needed > SPARE * available and sharding is not facts.candidates()[-1]:
            rejected.append(f"{sharding.name} takes {needed / GB:.1f} GB ({found['states'] / GB:.1f} GB of states)")
            continue
        tokens = facts.args.per_device_train_batch_size * facts.longest
        plan = {"sharding": sharding.name, "processes": ranks, "bytes": needed, "available": available}
        parts = {f"bytes of {name}": size for name, size in found.items()}
        facts.plan["training"] = {**plan, "tokens": tokens, **parts}
        split = ", ".join(f"{name} {size / GB:.2f}" for name, size in found.items() if size > 0)
        what = f"{needed / GB:.1f} of {available / GB:.1f} GB of {where} with {sharding.name}, in the worst "
        what += f"micro-batch of {tokens} tokens{f' that {load.sharing} share' * (load.sharing > 1)}: {split}"
        if needed > available:
            yield FAIL, what, _advise(facts, load, sharding)
        elif needed > SPARE * available:
            mend = _advise(facts, load, sharding)
            yield WARN, what, f"it is close, so measure it with `--probe`; to leave a tenth free, {mend}"
        elif rejected:
            name = sharding.name.split()[0]
            yield OK, f"{what}; {'; '.join(rejected)}", f"launch it with `--accelerate_config {name}`"
        else:
            yield OK, what, ""
        return


def _serving(facts: RunFacts) -> Lines:
    """How many conversations a server holds."""
    if not facts.args.use_vllm:
        return
    shape, size = facts.shape, facts.served_size
    gpus = facts.args.vllm_tensor_parallel_size
    if not facts.on_gpu:
        yield OK, f"{shape.kv_bytes(size):,} bytes a token on the CPU: `VLLM_CPU_KVCACHE_SPACE` bounds the GB", ""
        facts.plan["server"] = {"bytes of a token": shape.kv_bytes(size)}
        return
    tokens = shape.server_tokens(facts.memory, size, gpus, facts.server_share)
    urls = len(facts.urls)
    held, wanted = urls * tokens // facts.longest, facts.under_way
    facts.plan["server"] = {"bytes of a token": shape.kv_bytes(size), "tokens": tokens, "conversations": held}
    what = (
        f"{shape.kv_bytes(size):,} bytes a token: {tokens:,} tokens beside the model in {gpus} GPU{'s' * (gpus > 1)}, "
        f"{held} conversations of {facts.longest} tokens"
        + (f" with {urls} servers" if urls > 1 else "")
        + f"; {wanted} are under way at once"
    )
    if tokens < facts.longest:
        mend = _more_room(facts, gpus, tokens)
        yield FAIL, what, f"raise `vllm_gpu_memory_utilization`, or {mend}" if facts.colocated else mend
    elif held < wanted:
        more = "raise `vllm_gpu_memory_utilization`" if facts.colocated else "serve on more GPUs"
        yield WARN, what, f"at their longest, some wait for others: {more}, or shorten conversations"
    else:
        yield OK, what, ""
    if facts.colocated:
        yield from _sharing(facts)


def _sharing(facts: RunFacts) -> Lines:
    """Whether a server that is awake fits beside what a trainer keeps while it samples."""
    load = facts.load
    ways = {sharding.name: load.parts(sharding)["states"] for sharding in facts.candidates()}
    name, kept = min(ways.items(), key=lambda item: item[1])
    server = facts.server_share * facts.memory
    needed, room = kept + RESERVE + server, facts.memory
    facts.plan["sampling"] = {"states": kept, "server": server, "available": room}
    what = (
        f"{needed / GB:.1f} of {room / GB:.1f} GB of a GPU while conversations are sampled: the server "
        f"{server / GB:.1f}, the trainer's states {kept / GB:.1f} with {name}, CUDA {RESERVE / GB:.1f}"
    )
    if needed > room:
        share = (room - kept - RESERVE) / room
        lower = f"set `vllm_gpu_memory_utilization: {share:.2f}` at most" if share > 0.05 else ""
        yield FAIL, what, lower or "train on more GPUs, or an adapter (`use_peft: true`)"
    else:
        yield OK, what, ""


def _more_room(facts: RunFacts, gpus: int, tokens: int) -> str:
    """What gives a server room for one conversation."""
    for more in (2, 4, 8):
        held = facts.shape.server_tokens(facts.memory, facts.served_size, more, facts.server_share)
        if more > gpus and held >= facts.longest:
            shorter = f", or conversations of {tokens} tokens at most" if tokens > facts.prompt else ""
            return f"spread the server over more GPUs (`vllm_tensor_parallel_size: {more}`){shorter}"
    return "serve a smaller model, or on GPUs with more memory: eight of these do not hold one conversation beside it"


def _files(facts: RunFacts) -> Lines:
    """Whether shared memory and the disk hold what the run writes."""
    args = facts.args
    yield from _shared(facts)
    of_a_step = facts.batch / facts.steps_of_a_batch
    steps = facts.steps
    saved = 0
    if args.save_strategy == "steps":
        saved = int(steps / args.save_steps) if args.save_steps >= 1 else int(1 / args.save_steps)
    elif args.save_strategy == "epoch":
        saved = int(args.num_train_epochs)
    # The one that is written lies beside those that are kept, of which it replaces one afterwards.
    kept = min(saved, args.save_total_limit + 1 if args.save_total_limit else saved)
    each = facts.shape.checkpoint(facts.precision, facts.candidates()[-1])
    if args.save_only_model:
        each = facts.shape.trained * facts.precision.weights
    model = facts.shape.trained * facts.precision.weights
    records = steps * of_a_step * (facts.longest / 2 * _RECORD + _CONVERSATION)
    needed, free = kept * each + model + records, _free_bytes(args.output_dir)
    facts.plan["files"] = {"checkpoints": kept * each, "kept": kept, "trajectories": records, "free": free}
    what = (
        f"{needed / GB:.2f} of {free / GB:.1f} GB free for {args.output_dir}: {kept} checkpoints "
        f"{kept * each / GB:.2f}, the model {model / GB:.2f}, trajectories about {records / GB:.2f}"
    )
    limit = "" if args.save_total_limit or kept < 2 else "set `save_total_limit`, which keeps the latest only"
    yield (FAIL if needed > free else OK), what, limit


def _shared(facts: RunFacts) -> Lines:
    if not facts.args.use_vllm or not transport_of(facts.args).keeps_files:
        return
    folder = facts.args.weight_sync_folder or "/dev/shm"
    needed, free = 2.0 * facts.served_size * facts.shape.parameters, _free_bytes(folder)
    facts.plan["weights"] = {"folder": folder, "bytes": needed, "free": free}
    what = f"{needed / GB:.2f} of {free / GB:.1f} GB free in {folder} for two files of weights that take turns"
    if needed > free:
        mend = "free some, or set `weight_sync_folder` to another folder that the server sees too"
        yield FAIL, what, f"{mend}; a container gets more by `--ipc host` or `--shm-size`"
    else:
        yield OK, what, ""


def _free_bytes(folder: str | Path) -> int:
    """Free bytes of the disk on which a folder is, or will be."""
    path = Path(folder).absolute()
    return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free


# Advice: changes of options, each named only where the plan of the changed run leaves a tenth of the memory free


class _Change(NamedTuple):
    """Something to change, in words, and what it makes of a run."""

    words: str
    load: dict[str, Any] = {}  # noqa: RUF012
    sharding: Sharding | None = None

    def of(self, plan: _Plan) -> _Plan:
        load, sharding = plan
        return replace(load, **self.load), self.sharding or sharding


def _advise(facts: RunFacts, load: Load, sharding: Sharding) -> str:
    """Names ways to make a run fit, those first that change least of what it learns."""
    tried: list[float] = []  # memory that plans need

    def fits(plan: _Plan) -> bool:
        load, sharding = plan
        tried.append(load.needs(sharding) / SPARE * (1 if load.on_gpu else load.processes))
        return tried[-1] <= facts.training_memory

    def fitting(changes: Iterable[_Change], plan: _Plan) -> list[str]:
        return next(([change.words] for change in changes if fits(change.of(plan))), [])

    small, large = _smaller(facts, load, sharding), _larger(facts, load, sharding)
    found = [words for changes in (*small, *large) for words in fitting(changes, (load, sharding))]
    if not found:  # the smallest micro-batch, and one of the others
        plan, words = (load, sharding), []
        for *_, least in filter(None, small):
            plan, words = least.of(plan), [*words, least.words]
        beside = f" with {' and '.join(words)}" if words else ""
        together = [" and ".join(words)] if len(words) > 1 and fits(plan) else []
        found = together or [f"{words}{beside}" for changes in large for words in fitting(changes, plan)]
    if found:
        return f"take {' or '.join(found[:_MOST_ADVICE])}"
    beside_server = facts.memory - facts.training_memory
    size = f"{'GPUs' if load.on_gpu else 'a machine'} of {math.ceil((min(tried) + beside_server) / GB)} GB"
    return f"no option that is known here makes it fit: take {size}, or a smaller model"


def _smaller(facts: RunFacts, load: Load, sharding: Sharding) -> list[list[_Change]]:
    """A smaller micro-batch, of which each step gets more."""
    ways = []
    if not (load.checkpointing or sharding.checkpoints):
        ways.append([_Change("`gradient_checkpointing: true`", {"checkpointing": True})])
    return [*ways, [_rows(facts, load, rows) for rows in range(load.rows - 1, 0, -1) if load.rows % rows == 0]]


def _rows(facts: RunFacts, load: Load, rows: int) -> _Change:
    times = load.rows // rows
    words = f"`per_device_train_batch_size: {rows}` and `gradient_accumulation_steps: {load.accumulation * times}`"
    if facts.options["steps_per_generation"] is not None:
        words += f" and `steps_per_generation: {facts.options['steps_per_generation'] * times}`"
    return _Change(words, {"rows": rows})


def _larger(facts: RunFacts, load: Load, sharding: Sharding) -> list[list[_Change]]:
    """More GPUs for each micro-batch, other ways to spread the states, more processes, less to train."""
    ways: list[list[_Change]] = []
    whole = not load.shape.adapter
    quantised = load.precision.quantised is not None
    # a single conversation is what does not fit, beside states that do, where each layer keeps its input
    held = replace(load, rows=1, checkpointing=True, group=1, offloading=False).parts(sharding)
    needed, room = sum(held.values()), SPARE * facts.memory
    if needed > room > needed - held["activations"]:
        ways += [_grouped(load), _offloaded(load), _shared_rows(facts, load, sharding)]
    if load.on_gpu and not quantised:
        if sharding.stage < 3 and load.processes > 1:
            ways.append([_Change("`--accelerate_config zero3`", sharding=Sharding("zero3", 3))])
        if whole and not sharding.offloads_optimizer:
            taken = f"which takes {_OPTIMIZER * load.shape.parameters / GB:.0f} GB of the machine's memory"
            words = f"DeepSpeed's ZeRO-3 with `offload_optimizer_device: cpu`, {taken}"
            ways.append([_Change(words, sharding=Sharding("zero3", 3, offloads_optimizer=True))])
        if sharding.stage == 3:
            numbers = range(load.processes + 1, _MOST_PROCESSES + 1)
            beside = f"processes in place of {load.processes}"
            fitting = [number for number in numbers if _divides(facts, number)]
            ways.append([_Change(f"{number} {beside}", {"processes": number}) for number in fitting])
    lengths = range((load.completion - 1) // 128 * 128, _SHORTEST - 1, -128)
    ways.append([_Change(f"`max_completion_length: {tokens}`", {"completion": tokens}) for tokens in lengths])
    beside, shape = "", load.shape
    if whole:
        words, shape = _adapted(facts)
        beside = f"{words} and "
        ways.append([_Change(f"an adapter ({words})", {"shape": shape})])
    if load.on_gpu and not quantised:
        words = f"a quantised model ({beside}`load_in_4bit: true`, `dtype: bfloat16`)"
        precision = replace(load.precision, weights=2.0, quantised=four_bit(nested=False))
        ways.append([_Change(words, {"shape": shape, "precision": precision}, COPIES)])
    return ways


def _grouped(load: Load) -> list[_Change]:
    """Layers in groups, from two on: each more takes more time, up to the number that keeps least."""
    if load.offloading:
        return []
    sizes = range(max(2, load.group + 1), math.isqrt(load.shape.layers) + 2)
    name = "gradient_checkpointing_layers"
    return [_Change(f"`{name}: {size}`", {"checkpointing": True, "group": size}) for size in sizes]


def _offloaded(load: Load) -> list[_Change]:
    """Activations in the machine's memory, which holds those of all processes on it."""
    if not load.on_gpu or load.offloading:
        return []
    tokens = -(-load.rows * load.longest // load.sharing)
    held = load.processes * load.shape.layers * load.shape.input_of_layer(tokens, load.precision.compute)
    beside = " in place of `gradient_checkpointing_layers`" if load.group > 1 else ""
    words = f"`activation_offloading: true`{beside}, which takes {held / GB:.0f} GB of the machine's memory"
    return [_Change(words, {"checkpointing": True, "group": 1, "offloading": True})]


def _shared_rows(facts: RunFacts, load: Load, sharding: Sharding) -> list[_Change]:
    """More processes that compute a micro-batch together: of those that there are, or twice as many for one."""
    if not load.on_gpu or facts.args.forward != "tree":
        return []
    ways = []
    for size in load.shape.shared_by:
        processes = size if load.processes == 1 else load.processes
        if size <= load.sharing or processes % size or not _divides(facts, processes):
            continue
        spread = sharding if sharding.stage == 0 else FSDP2
        words = f"`sp_size: {size}`" + f" on {processes} GPUs" * (load.processes == 1)
        words += " and `--accelerate_config fsdp2`" * (spread is FSDP2 and sharding.name != FSDP2.name)
        ways.append(_Change(words, {"sharing": size, "processes": processes}, spread))
    return ways


def _divides(facts: RunFacts, processes: int) -> bool:
    try:
        check_batches(facts.options, processes)
    except ConfigError:
        return False
    return True


def _adapted(facts: RunFacts) -> tuple[str, Shape]:
    """An adapter's options, and the shape with it. Of models that PEFT does not know it has to be told the layers."""
    words, layers = "`use_peft: true`", None
    if facts.config.model_type not in TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING:
        words, layers = f"{words} and `lora_target_modules: all-linear`", ["all-linear"]
    adapter = get_peft_config(ModelConfig(use_peft=True, lora_target_modules=layers))
    return words, Shape.of(facts.config, adapter, trust_remote_code=facts.args.trust_remote_code)


PLAN: dict[str, Check] = {"training memory": _training, "server memory": _serving, "files": _files, "step": step}
"""The plan's parts by name. They come after the checks, which measure what tools cost."""


# The measurement: whether the worst micro-batch of a run fits the memory of this machine


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
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # Linux counts this process's highest memory from here, where it may
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


def _peak() -> float:
    """Bytes of memory at this process's highest point."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return 1024.0 * int(line.split()[1])
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
