"""Whether memory and disks hold the run."""

from __future__ import annotations

from mt_grpo.app.doctor.advice import advise
from mt_grpo.app.doctor.case import FAIL, OK, WARN, Case, Lines
from mt_grpo.app.doctor.load import Load
from mt_grpo.app.doctor.memory import GB, RESERVE, SERVER_SHARE, SPARE, checkpoint, server_tokens, shared_memory
from mt_grpo.app.doctor.surroundings import free_bytes
from mt_grpo.training.servers import transport_of

RECORD = 8
"""Bytes per token in the files of `rollouts`, those of the trainer's numbers included."""
CONVERSATION = 2000
"""Bytes per conversation there, beside those of its tokens."""


def training(case: Case) -> Lines:
    """Whether a training process fits; of several ways to spread the states, the first that does."""
    total, ranks = case.training_memory, case.processes
    available = total if case.on_gpu else total / ranks
    beside = f" beside the {(case.memory - total) / GB:.1f} GB of its server" if total < case.memory else ""
    where = (
        f"a GPU{beside}"
        if case.on_gpu
        else "this machine"
        if ranks == 1
        else f"this machine's share for each of {ranks}"
    )
    rejected, load = [], Load.of(case)
    if load.sharing > 1 and load.sharing not in case.shape.shared_by:
        fitting = [str(size) for size in case.shape.shared_by[:4]]
        mend = f"set one of {', '.join(fitting)}, or leave `sp_size` out" if fitting else "leave `sp_size` out"
        yield FAIL, f"{load.sharing} processes cannot compute rows of this model together (`sp_size`)", mend
        return
    for sharding in case.candidates():
        found = load.parts(sharding)
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
        what += f"micro-batch of {tokens} tokens{f' that {load.sharing} share' * (load.sharing > 1)}: {split}"
        if needed > available:
            yield FAIL, what, advise(case, load, sharding)
        elif needed > SPARE * available:
            mend = advise(case, load, sharding)
            yield WARN, what, f"it is close, so measure it with `--probe`; to leave a tenth free, {mend}"
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
    tokens = server_tokens(case.memory, shape, size, gpus, server_share(case))
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
        mend = _more_room(case, gpus, tokens)
        yield FAIL, what, f"raise `vllm_gpu_memory_utilization`, or {mend}" if case.colocated else mend
    elif held < wanted:
        more = "raise `vllm_gpu_memory_utilization`" if case.colocated else "serve on more GPUs"
        yield WARN, what, f"at their longest, some wait for others: {more}, or shorten conversations"
    else:
        yield OK, what, ""
    if case.colocated:
        yield from _sharing(case)


def server_share(case: Case) -> float:
    """The share of a GPU's memory that a server plans with."""
    return float(case.args.vllm_gpu_memory_utilization) if case.colocated else SERVER_SHARE


def _sharing(case: Case) -> Lines:
    """Whether a server that is awake fits beside what a trainer keeps while it samples."""
    load = Load.of(case)
    ways = {sharding.name: load.parts(sharding)["states"] for sharding in case.candidates()}
    name, kept = min(ways.items(), key=lambda item: item[1])
    server = server_share(case) * case.memory
    needed, room = kept + RESERVE + server, case.memory
    case.plan["sampling"] = {"states": kept, "server": server, "available": room}
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


def _more_room(case: Case, gpus: int, tokens: int) -> str:
    """What gives a server room for one conversation."""
    for more in (2, 4, 8):
        held = server_tokens(case.memory, case.shape, case.served_size, more, server_share(case))
        if more > gpus and held >= case.longest:
            shorter = f", or conversations of {tokens} tokens at most" if tokens > case.prompt else ""
            return f"spread the server over more GPUs (`vllm_tensor_parallel_size: {more}`){shorter}"
    return "serve a smaller model, or on GPUs with more memory: eight of these do not hold one conversation beside it"


def files(case: Case) -> Lines:
    """Whether shared memory and the disk hold what the run writes."""
    args = case.args
    yield from _shared(case)
    of_a_step = case.batch / case.steps_of_a_batch
    steps = case.steps
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
    records = steps * of_a_step * (case.longest / 2 * RECORD + CONVERSATION)
    needed, free = kept * each + model + records, free_bytes(args.output_dir)
    case.plan["files"] = {"checkpoints": kept * each, "kept": kept, "trajectories": records, "free": free}
    what = (
        f"{needed / GB:.2f} of {free / GB:.1f} GB free for {args.output_dir}: {kept} checkpoints "
        f"{kept * each / GB:.2f}, the model {model / GB:.2f}, trajectories about {records / GB:.2f}"
    )
    limit = "" if args.save_total_limit or kept < 2 else "set `save_total_limit`, which keeps the latest only"
    yield (FAIL if needed > free else OK), what, limit


def _shared(case: Case) -> Lines:
    if not case.args.use_vllm or not transport_of(case.args).keeps_files:
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
