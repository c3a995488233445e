"""
How long a step of a run takes, and how many GPUs should serve. An estimate, until the metrics of a run correct it.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mt_grpo.doctor import GPU
from mt_grpo.doctor.context import OK, WARN, Lines, NotKnown, RunFacts
from mt_grpo.doctor.memory import MOST_ROWS, Shape
from mt_grpo.errors import ConfigError
from mt_grpo.options.rules import check_batches
from mt_grpo.runlog import Run
from mt_grpo.runlog.schema import METRICS, Row

_EFFICIENCY = 0.5  # share of the speed of a large matrix product that a whole model reaches on a CPU
_OPS_PER_LAYER = 200  # small operations of a layer on a CPU, the work of Python among them
_OPS_PER_TOKEN = 2500  # the same outside the layers, per token of a batch that is sampled
_LATEST = 3  # latest batches of a run whose mean is taken


@dataclass(frozen=True)
class _Speed:
    """The speed of a processor."""

    flops: float
    bandwidth: float
    layer: float
    token: float
    name: str


OF_PEAK, OF_BANDWIDTH = 0.4, 0.6  # shares of a GPU's peak that a run is taken to reach


def _speed_of(gpu: GPU | None) -> _Speed:
    """The speed that a run is taken to reach on a GPU; on an H100 where the kind is not known."""
    kind = GPU.named("H100") if gpu is None else gpu
    assumed = "assumed, since the GPU is not known" if gpu is None else "assumed"
    name = f"{kind.name} at {OF_PEAK:.0%} of its peak, {assumed}".replace("%", " %")
    return _Speed(OF_PEAK * kind.flops * 1e12, OF_BANDWIDTH * kind.bandwidth * 1e12, 1e-4, 2e-3, name)


@dataclass(frozen=True)
class _Lengths:
    """Means over conversations."""

    turns: float
    sampled: float
    unique: float
    measured: bool = False


@dataclass(frozen=True)
class _Step:
    """Seconds of the parts of a step."""

    sampling: float
    tools: float
    training: float
    staleness: int = 0  # batches that are prefetched
    shared: bool = False  # whether one device samples and trains

    @property
    def total(self) -> float:
        """The formula of docs/staleness.md, of a server that is not full."""
        least = self.training + self.sampling * self.shared
        return max(least, (self.sampling + self.tools + self.training) / (self.staleness + 1))

    def scaled(self, factor: float) -> _Step:
        parts = {name: getattr(self, name) * factor for name in ("sampling", "tools", "training")}
        return replace(self, **parts)


def _assumed_lengths(prompt: int, steps: int, turn: int | None, completion: int) -> _Lengths:
    """Lengths to assume without a run: half of what the recipe allows."""
    turns = (steps + 2) / 2
    sampled = min(turns * (turn or completion) / 2, completion / 2)
    return _Lengths(turns, sampled, prompt + max(sampled, completion / 2))


def recomputed(checkpointing: bool, group: int) -> float:
    """What checkpointing multiplies the time by: a second forward, a third of all but the last layers of groups."""
    return (4 + (1 - 1 / group)) / 3 if checkpointing else 1.0


def _server_seconds(
    shape: Shape, speed: _Speed, lengths: _Lengths, conversations: float, at_once: float, size: int, gpus: int
) -> float:
    """Seconds that one server takes to sample a batch."""
    at_once = max(1.0, min(conversations, at_once))
    reads = size * shape.parameters + at_once * lengths.unique * shape.kv_bytes(size)
    step = max(reads / speed.bandwidth, 2 * shape.parameters * at_once / speed.flops) / gpus
    step += shape.layers * speed.layer
    read = max(0.0, lengths.unique - lengths.sampled)  # prompts and results of tools, each once
    prefill = 2 * shape.parameters * read * conversations / (speed.flops * gpus)
    return math.ceil(conversations / at_once) * lengths.sampled * step + prefill


def _read_run(folder: str, steps_of_a_batch: float = 1.0) -> tuple[_Lengths, float] | None:
    """Lengths and the seconds of a batch, from the metrics of a run; `None` where it has logged no step."""
    if not os.path.isfile(Path(folder, METRICS)):
        return None
    records, names = Run.metrics_of(Path(folder)), ("turns/mean", "completions/mean_length", "tokens/unique")
    latest = _LATEST * max(1, round(steps_of_a_batch))
    steps = [record for record in records if _has(record, "step_time")][-latest:]  # not all have sampled
    sampled = [record for record in records if _has(record, *names)][-_LATEST:]
    if not steps or not sampled:
        return None
    lengths = _Lengths(*(statistics.mean(record[name] for record in sampled) for name in names), True)
    return lengths, statistics.mean(record["step_time"] for record in steps) * steps_of_a_batch


def _has(record: Row, *names: str) -> bool:
    return all(isinstance(record.get(name), int | float) for name in names)


def _measure_cpu(shape: Shape, seconds: float = 0.15) -> _Speed:
    """Measures this processor with matrices as wide as the model, in a fraction of a second."""
    width, inner = min(shape.hidden, 2048), min(shape.intermediate, 4096)
    rows, matrix = torch.ones(512, width), torch.ones(width, inner)
    flops = _EFFICIENCY * 2 * 512 * width * inner / _fastest(lambda: rows @ matrix, seconds)
    vector, small = torch.ones(1, min(width, 128)), torch.ones(min(width, 128), min(width, 128))
    launch = _fastest(lambda: torch.nn.functional.silu(vector @ small), seconds) / 2
    size = torch.ones(2**22)
    bandwidth = 4 * 2**22 / _fastest(size.sum, seconds)
    return _Speed(flops, bandwidth, _OPS_PER_LAYER * launch, _OPS_PER_TOKEN * launch, "this CPU, measured")


def _fastest(work: Any, seconds: float) -> float:
    """Seconds of the fastest call within `seconds`, after a call to warm up."""
    work()
    best, end = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best


_BETTER = 0.8
"""Another split of the GPUs is recommended where its step takes less than this share: estimates are no finer."""
_ALIKE = 1.05  # splits of which one takes up to so many times as long as the other count as alike
_REPLIES = 5  # replies of an environment where a recipe sets no `max_env_steps`


def _estimate(facts: RunFacts, lengths: _Lengths, speed: _Speed, ranks: int, servers: int) -> _Step:
    """The parts of a step with so many training processes and servers."""
    args, shape = facts.args, facts.shape
    turn = args.max_turn_length or args.max_completion_length
    if args.use_vllm:
        size, gpus = facts.served_size, args.vllm_tensor_parallel_size
        at_once = facts.under_way / servers
        if facts.on_gpu:
            held = shape.server_tokens(facts.memory, size, gpus, facts.server_share)
            at_once = min(at_once, held / lengths.unique)
        sampling = _server_seconds(shape, speed, lengths, facts.batch / servers, at_once, size, gpus)
    else:
        turns = (_REPLIES if args.max_env_steps is None else args.max_env_steps) + 1
        conversations = -(-facts.batch // ranks)
        rows = min(conversations, MOST_ROWS)
        token = shape.layers * speed.layer + speed.token + 2 * shape.parameters * rows / speed.flops
        # the longest row of a turn is assumed to be half of what is allowed
        sampling = turns * math.ceil(conversations / MOST_ROWS) * turn / 2 * token
    slowest = max(facts.tool_seconds.values(), default=0.0)
    tokens = facts.batch * lengths.unique
    corrected = args.num_iterations > 1 or args.use_vllm or args.max_staleness > 0
    forwards = corrected + (args.beta > 0)  # old log-probs, and the reference's
    passes = args.num_iterations + forwards / 3
    microbatches = args.num_iterations * max(1, facts.batch // (args.per_device_train_batch_size * ranks))
    again = recomputed(bool(args.gradient_checkpointing), args.gradient_checkpointing_layers)
    # a frozen weight has no gradient of its own
    work = (4 if shape.adapter else 6) * shape.parameters * tokens * passes * again
    trained = work / (speed.flops * ranks) + 3 * microbatches * shape.layers * speed.layer
    return _Step(sampling, lengths.turns * slowest, trained, args.max_staleness, not args.use_vllm)


def step(facts: RunFacts) -> Lines:
    """The time of a step, and how the GPUs are best split between serving and training."""
    if not facts.args.use_cpu and not facts.on_gpu:
        raise NotKnown("The memory of a GPU is not known, since there is none here: state it, as `--gpu H100`.")
    speed = _speed_of(facts.gpu) if facts.on_gpu else _measure_cpu(facts.shape)
    lengths, factor, run = _calibrated(facts, speed)
    found = _estimate(facts, lengths, speed, facts.processes, len(facts.urls)).scaled(factor)
    facts.plan["step"] = {
        "seconds": found.total,
        "sampling": found.sampling,
        "tools": found.tools,
        "training": found.training,
        "calibrated": run is not None,
        "turns": lengths.turns,
        "sampled tokens": lengths.sampled,
        "unique tokens": lengths.unique,
    }
    tools = _seconds(found.tools) if facts.tool_seconds else "not known"
    source = f"calibrated with the steps of {run}" if run else f"an estimate, for {speed.name}"
    steps = facts.steps_of_a_batch
    several = f" for a batch and its {steps:g} optimiser steps" if steps != 1 else ""
    overlap = f", of which `max_staleness: {found.staleness}` has some at the same time" if found.staleness else ""
    what = (
        f"{_seconds(found.total)}{several} ({source}): sampling {_seconds(found.sampling)}, tools {tools}, "
        f"forward and backward {_seconds(found.training)}{overlap}; for conversations of "
        f"{lengths.turns:.1f} turns, {lengths.sampled:.0f} tokens sampled, {lengths.unique:.0f} trained on"
    )
    hours = found.total * facts.steps / facts.steps_of_a_batch / 3600
    facts.plan["step"]["hours of the run"] = hours
    takes = f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.0f} minutes" if hours >= 1 / 60 else "a minute"
    what += f"; {takes} for the {facts.steps} steps of the run"
    assumed = "" if lengths.measured else "half of what the recipe allows; `--calibrate RUN` takes those of a run"
    yield OK, what, assumed
    if facts.args.use_vllm and facts.on_gpu and not facts.colocated:
        yield from _split(facts, lengths, speed, factor)


def _calibrated(facts: RunFacts, speed: _Speed) -> tuple[_Lengths, float, str | None]:
    """Lengths of conversations, by how much a run was slower than its estimate, and which run that was."""
    args, named = facts.args, facts.own["calibrate"]
    run = _read_run(named or args.output_dir, facts.steps_of_a_batch)
    if run is None and named is not None:
        raise ConfigError(
            f"`--calibrate {named}` has no metrics of a step: name the `output_dir` of a run that has logged some."
        )
    if run is not None:
        lengths, seconds = run
        estimated = _estimate(facts, lengths, speed, facts.processes, len(facts.urls)).total
        return lengths, seconds / estimated, named or args.output_dir
    steps = _REPLIES if args.max_env_steps is None else args.max_env_steps
    return _assumed_lengths(facts.prompt, steps, args.max_turn_length, args.max_completion_length), 1.0, None


def _split(facts: RunFacts, lengths: _Lengths, speed: _Speed, factor: float) -> Lines:
    """Compares splits of the same GPUs, as long as at least half of them train."""
    each, ranks = facts.args.vllm_tensor_parallel_size, facts.processes
    total = ranks + each * len(facts.urls)
    splits = {}
    for servers in range(1, total // (2 * each) + 1):
        trains = total - servers * each
        splits[trains, servers] = _estimate(facts, lengths, speed, trains, servers).scaled(factor).total
    if len(splits) < 2:
        return
    now = _estimate(facts, lengths, speed, ranks, len(facts.urls)).scaled(factor).total
    # of those that are about as fast, that with the fewest servers
    least = min(splits.values())
    (trains, servers), best = next(item for item in splits.items() if item[1] < _ALIKE * least)
    facts.plan["splits"] = {f"{training} + {served * each}": seconds for (training, served), seconds in splits.items()}
    shown = ", ".join(f"{name}: {_seconds(seconds)}" for name, seconds in facts.plan["splits"].items())
    what = f"GPUs that train + serve, and a step with them: {shown}"
    if best > _BETTER * now:
        yield OK, f"{what}; {ranks} + {each * len(facts.urls)} is near the best", ""
        return
    mend = f"train on {trains} and serve on {servers * each}"
    mend += f": {servers} servers, in `vllm_server_base_url`, separated by commas" if servers > 1 else ""
    try:
        check_batches(facts.options, trains)
    except ConfigError as error:
        mend += f"; with {trains} processes the batch does not divide: {error}".removesuffix(".")
    yield WARN, f"{what}; an estimate", mend


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
