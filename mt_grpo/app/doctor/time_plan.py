"""How long a step takes, what of it, and how many GPUs should serve."""

from __future__ import annotations

from collections.abc import Iterator

from mt_grpo.app.doctor.case import Case
from mt_grpo.app.doctor.findings import OK, WARN, NotKnown
from mt_grpo.app.doctor.memory import server_tokens
from mt_grpo.app.doctor.pace import (
    H100,
    Lengths,
    Speed,
    Step,
    assumed_lengths,
    measure_cpu,
    own_engine_seconds,
    read_run,
    server_seconds,
    training_seconds,
)
from mt_grpo.errors import ConfigError
from mt_grpo.options import check_batches

Lines = Iterator[tuple[str, str, str]]

BETTER = 0.8
"""Share of the time of a step below which another split of the GPUs is recommended: estimates are no finer."""
ALIKE = 1.05
"""Splits of which one takes up to so many times as long as the other count as alike."""
REPLIES = 5
"""Replies of an environment where a recipe sets no `max_env_steps`."""


def estimate(case: Case, lengths: Lengths, speed: Speed, ranks: int, servers: int) -> Step:
    """The parts of a step with so many training processes and servers."""
    args, shape = case.args, case.shape
    turn = args.max_turn_length or args.max_completion_length
    if args.use_vllm:
        size, gpus = case.served_size, args.vllm_tensor_parallel_size
        at_once = case.under_way / servers
        if case.on_gpu:
            at_once = min(at_once, server_tokens(case.memory, shape, size, gpus) / lengths.unique)
        sampling = server_seconds(shape, speed, lengths, case.batch / servers, at_once, size, gpus)
    else:
        turns = (REPLIES if args.max_env_steps is None else args.max_env_steps) + 1
        sampling = own_engine_seconds(shape, speed, turns, turn, -(-case.batch // ranks))
    slowest = max(case.tool_seconds.values(), default=0.0)
    tokens = case.batch * lengths.unique
    forwards = (args.num_iterations > 1 or args.use_vllm) + (args.beta > 0)  # old log-probs, and the reference's
    passes = args.num_iterations + forwards / 3
    microbatches = args.num_iterations * max(1, case.batch // (args.per_device_train_batch_size * ranks))
    checkpointing = bool(args.gradient_checkpointing)
    trained = training_seconds(shape, speed, tokens, ranks, checkpointing, passes, microbatches)
    return Step(sampling, lengths.turns * slowest, trained)


def step(case: Case) -> Lines:
    """The time of a step, and how the GPUs are best split between serving and training."""
    if not case.args.use_cpu and not case.on_gpu:
        raise NotKnown("The memory of a GPU is not known, since there is none here: state it, as `--gpu_memory 80`.")
    speed = H100 if case.on_gpu else measure_cpu(case.shape)
    lengths, factor, run = _calibrated(case, speed)
    found = estimate(case, lengths, speed, case.processes, len(case.urls)).scaled(factor)
    case.plan["step"] = {
        "seconds": found.total,
        "sampling": found.sampling,
        "tools": found.tools,
        "training": found.training,
        "calibrated": run is not None,
        "turns": lengths.turns,
        "sampled tokens": lengths.sampled,
        "unique tokens": lengths.unique,
    }
    tools = _seconds(found.tools) if case.tool_seconds else "not known"
    source = f"calibrated with the steps of {run}" if run else f"an estimate, for {speed.name}"
    steps = case.steps_of_a_batch
    several = f" for a batch and its {steps:g} optimiser steps" if steps != 1 else ""
    what = (
        f"{_seconds(found.total)}{several} ({source}): sampling {_seconds(found.sampling)}, tools {tools}, "
        f"forward and backward {_seconds(found.training)}; for conversations of {lengths.turns:.1f} turns, "
        f"{lengths.sampled:.0f} tokens sampled, {lengths.unique:.0f} trained on"
    )
    assumed = "" if lengths.measured else "half of what the recipe allows; `--calibrate RUN` takes those of a run"
    yield OK, what, assumed
    if case.args.use_vllm and case.on_gpu:
        yield from _split(case, lengths, speed, factor)


def _calibrated(case: Case, speed: Speed) -> tuple[Lengths, float, str | None]:
    """Lengths of conversations, by how much a run was slower than its estimate, and which run that was."""
    args, named = case.args, case.own["calibrate"]
    run = read_run(named or args.output_dir, case.steps_of_a_batch)
    if run is None and named is not None:
        raise ConfigError(
            f"`--calibrate {named}` has no metrics of a step: name the `output_dir` of a run that has logged some."
        )
    if run is not None:
        lengths, seconds = run
        return (
            lengths,
            seconds / estimate(case, lengths, speed, case.processes, len(case.urls)).total,
            (named or args.output_dir),
        )
    steps = REPLIES if args.max_env_steps is None else args.max_env_steps
    return assumed_lengths(case.prompt, steps, args.max_turn_length, args.max_completion_length), 1.0, None


def _split(case: Case, lengths: Lengths, speed: Speed, factor: float) -> Lines:
    """Compares splits of the same GPUs, as long as at least half of them train."""
    each, ranks = case.args.vllm_tensor_parallel_size, case.processes
    total = ranks + each * len(case.urls)
    splits = {}
    for servers in range(1, total // (2 * each) + 1):
        trains = total - servers * each
        splits[trains, servers] = estimate(case, lengths, speed, trains, servers).scaled(factor).total
    if len(splits) < 2:
        return
    now = estimate(case, lengths, speed, ranks, len(case.urls)).scaled(factor).total
    # of those that are about as fast, that with the fewest servers
    least = min(splits.values())
    (trains, servers), best = next(item for item in splits.items() if item[1] < ALIKE * least)
    case.plan["splits"] = {f"{training} + {served * each}": seconds for (training, served), seconds in splits.items()}
    shown = ", ".join(f"{name}: {_seconds(seconds)}" for name, seconds in case.plan["splits"].items())
    what = f"GPUs that train + serve, and a step with them: {shown}"
    if best > BETTER * now:
        yield OK, f"{what}; {ranks} + {each * len(case.urls)} is near the best", ""
        return
    mend = f"train on {trains} and serve on {servers * each}"
    mend += f": {servers} servers, in `vllm_server_base_url`, separated by commas" if servers > 1 else ""
    try:
        check_batches(case.options, trains)
    except ConfigError as error:
        mend += f"; with {trains} processes the batch does not divide: {error}".removesuffix(".")
    yield WARN, f"{what}; an estimate", mend


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
