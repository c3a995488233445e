"""Whether memory and disks hold the run."""

from __future__ import annotations

import math

from datasets import IterableDataset

from mt_grpo.app.doctor.case import FAIL, OK, WARN, Case, Lines
from mt_grpo.app.doctor.memory import (
    GB,
    PROCESS,
    RESERVE,
    SPARE,
    Sharding,
    activations,
    checkpoint,
    gathered,
    head,
    server_tokens,
    shared_memory,
    states,
)
from mt_grpo.app.doctor.surroundings import free_bytes
from mt_grpo.app.doctor.time_plan import MOST_ROWS
from mt_grpo.errors import ConfigError
from mt_grpo.forward.lm_head import CHUNK_ELEMENTS

RECORD = 8
"""Bytes per token in the Parquet files of `rollouts`, those of the trainer's numbers included."""


def parts(case: Case, sharding: Sharding) -> dict[str, float]:
    """Bytes of what one training process holds at its highest, in the worst micro-batch."""
    args, shape, precision, ranks = case.args, case.shape, case.precision, case.processes
    rows = args.per_device_train_batch_size
    tokens = rows * case.longest
    checkpointing = args.gradient_checkpointing or sharding.checkpoints
    chunk = CHUNK_ELEMENTS["cuda" if case.on_gpu else "cpu"] if args.forward != "padded" else None
    trained = rows * min(args.max_completion_length, case.longest)
    training = activations(shape, tokens, precision.compute, checkpointing)
    logits = head(shape, trained, precision.compute, chunk)
    found = {"states": states(shape, precision, sharding, ranks), "activations": training, "logits": logits}
    if sharding.stage == 3:
        found["gathered layers"] = gathered(shape, precision, sharding)
    if args.beta > 0 and not shape.adapter:
        held = shape.parameters * precision.weights
        found["reference model"] = held / ranks if sharding.stage == 3 else held
    if not args.use_vllm:  # it samples before it trains, so the larger of the two counts
        rows = min(-(-case.under_way // ranks), MOST_ROWS)
        cache = rows * case.longest * shape.kv_bytes(precision.compute)
        found["sampling beyond training"] = max(0.0, cache - training - logits)
    found["CUDA and gaps" if case.on_gpu else "Python"] = RESERVE if case.on_gpu else PROCESS
    return found


def smaller(case: Case) -> str:
    """The options that make a micro-batch smaller, in words."""
    ways = ["a smaller `per_device_train_batch_size`", "a shorter `max_completion_length`"]
    ways += [] if case.args.gradient_checkpointing else ["`gradient_checkpointing: true`"]
    return " or ".join(ways)


def training(case: Case) -> Lines:
    """Whether a training process fits; of several ways to spread the states, the first that does."""
    total, ranks = case.memory, case.processes
    available = total if case.on_gpu else total / ranks
    where = "a GPU" if case.on_gpu else "this machine" if ranks == 1 else f"this machine's share for each of {ranks}"
    rejected = []
    for sharding in case.candidates():
        found = parts(case, sharding)
        needed = sum(found.values())
        if needed > SPARE * available and sharding is not case.candidates()[-1]:
            rejected.append(f"{sharding.name} takes {needed / GB:.1f} GB ({found['states'] / GB:.1f} GB of states)")
            continue
        case.plan["training"] = {
            "sharding": sharding.name,
            "processes": ranks,
            "bytes": needed,
            "available": available,
            "tokens": case.args.per_device_train_batch_size * case.longest,
            **{f"bytes of {name}": size for name, size in found.items()},
        }
        split = ", ".join(f"{name} {size / GB:.2f}" for name, size in found.items() if size > 0)
        tokens = case.args.per_device_train_batch_size * case.longest
        what = f"{needed / GB:.1f} of {available / GB:.1f} GB of {where} with {sharding.name}, in the worst "
        what += f"micro-batch of {tokens} tokens: {split}"
        if needed > available:
            yield FAIL, what, f"give it {smaller(case)}{', or more processes' if sharding.stage else ''}"
        elif needed > SPARE * available:
            yield WARN, what, f"it is close, so measure it with `--probe`; less takes {smaller(case)}"
        elif rejected:
            name = sharding.name.split()[0]
            yield OK, f"{what}; {'; '.join(rejected)}", f"launch it with `--accelerate_config {name}`"
        else:
            yield OK, what, ""
        return


def serving(case: Case) -> Lines:
    """How many conversations a server holds."""
    if not case.args.use_vllm:
        return
    shape, size = case.shape, case.served_size
    gpus = case.args.vllm_tensor_parallel_size
    if not case.on_gpu:
        yield OK, f"{shape.kv_bytes(size):,} bytes a token on the CPU: `VLLM_CPU_KVCACHE_SPACE` bounds the GB", ""
        case.plan["server"] = {"bytes of a token": shape.kv_bytes(size)}
        return
    tokens = server_tokens(case.memory, shape, size, gpus)
    urls = len(case.urls)
    held, wanted = urls * tokens // case.longest, case.under_way
    case.plan["server"] = {"bytes of a token": shape.kv_bytes(size), "tokens": tokens, "conversations": held}
    what = (
        f"{shape.kv_bytes(size):,} bytes a token: {tokens:,} tokens beside the model in {gpus} GPU{'s' * (gpus > 1)}, "
        f"{held} conversations of {case.longest} tokens"
        + (f" with {urls} servers" if urls > 1 else "")
        + f"; {wanted} are under way at once"
    )
    if tokens < case.longest:
        yield FAIL, what, "spread the server over more GPUs (`vllm_tensor_parallel_size`), or shorten conversations"
    elif held < wanted:
        yield WARN, what, "at their longest, some wait for others: serve on more GPUs, or shorten conversations"
    else:
        yield OK, what, ""


def files(case: Case) -> Lines:
    """Whether shared memory and the disk hold what the run writes."""
    args = case.args
    yield from _shared(case)
    of_a_step = case.batch / case.steps_of_a_batch
    if args.max_steps > 0:
        steps = args.max_steps
    elif isinstance(case.train_rows, IterableDataset):
        raise ConfigError("The rows are a stream, whose end is not known: set `max_steps`.")
    else:
        steps = math.ceil(args.num_train_epochs * len(case.train_rows) * args.num_generations / of_a_step)
    saved = 0
    if args.save_strategy == "steps":
        saved = int(steps / args.save_steps) if args.save_steps >= 1 else int(1 / args.save_steps)
    elif args.save_strategy == "epoch":
        saved = int(args.num_train_epochs)
    # The one that is written lies beside those that are kept, of which it replaces one afterwards.
    kept = min(saved, args.save_total_limit + 1 if args.save_total_limit else saved)
    each = checkpoint(case.shape, case.precision, case.candidates()[-1])
    if args.save_only_model:
        each = case.shape.trained * case.precision.weights
    model = case.shape.trained * case.precision.weights
    records = steps * of_a_step * case.longest / 2 * RECORD
    needed, free = kept * each + model + records, free_bytes(args.output_dir)
    case.plan["files"] = {"checkpoints": kept * each, "kept": kept, "trajectories": records, "free": free}
    what = (
        f"{needed / GB:.2f} of {free / GB:.1f} GB free for {args.output_dir}: {kept} checkpoints "
        f"{kept * each / GB:.2f}, the model {model / GB:.2f}, trajectories about {records / GB:.2f}"
    )
    limit = "" if args.save_total_limit or kept < 2 else "set `save_total_limit`, which keeps the latest only"
    yield (FAIL if needed > free else OK), what, limit


def _shared(case: Case) -> Lines:
    if not case.args.use_vllm or case.args.weight_sync not in ("auto", "safetensors"):
        return
    folder = case.args.weight_sync_folder or "/dev/shm"
    needed, free = shared_memory(case.shape, case.served_size), free_bytes(folder)
    case.plan["weights"] = {"folder": folder, "bytes": needed, "free": free}
    what = f"{needed / GB:.2f} of {free / GB:.1f} GB free in {folder} for two files of weights that take turns"
    if needed > free:
        mend = "free some, or set `weight_sync_folder` to another folder that the server sees too"
        yield FAIL, what, f"{mend}; a container gets more by `--ipc host` or `--shm-size`"
    else:
        yield OK, what, ""
