"""
What would make training fit its memory: changes of a run's options, each named only where the plan of the changed run
leaves a tenth of the memory free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from trl import ModelConfig, get_peft_config

from mt_grpo.app.doctor.case import Case
from mt_grpo.app.doctor.load import Load
from mt_grpo.app.doctor.memory import COPIES, FSDP2, GB, SPARE, Shape, Sharding, four_bit, input_of_layer, read_shape
from mt_grpo.errors import ConfigError
from mt_grpo.options.rules import check_batches

MOST = 3
"""Ways that are named."""
SHORTEST = 256
"""Tokens after the prompt below which no run is advised to go."""
MOST_PROCESSES = 64
OPTIMIZER = 12
"""Bytes of a parameter's weight and moments in the optimiser, which may be kept off the GPU."""

Plan = tuple[Load, Sharding]


class Change(NamedTuple):
    """Something to change, in words, and the run that it makes of another."""

    words: str
    of: Callable[[Load, Sharding], Plan]


def advise(case: Case, load: Load, sharding: Sharding) -> str:
    """Names ways to make a run fit, those first that change least of what it learns."""
    tried: list[float] = []  # memory that plans need

    def fits(plan: Plan) -> bool:
        load, sharding = plan
        tried.append(load.needs(sharding) / SPARE * (1 if load.on_gpu else load.processes))
        return tried[-1] <= case.training_memory

    def fitting(changes: Iterable[Change], plan: Plan) -> list[str]:
        return next(([change.words] for change in changes if fits(change.of(*plan))), [])

    small, large = _smaller(case, load, sharding), _larger(case, load, sharding)
    found = [words for changes in (*small, *large) for words in fitting(changes, (load, sharding))]
    if not found:  # the smallest micro-batch, and one of the others
        plan, words = (load, sharding), []
        for *_, least in filter(None, small):
            plan, words = least.of(*plan), [*words, least.words]
        beside = f" with {' and '.join(words)}" if words else ""
        together = [" and ".join(words)] if len(words) > 1 and fits(plan) else []
        found = together or [f"{words}{beside}" for changes in large for words in fitting(changes, plan)]
    if found:
        return f"take {' or '.join(found[:MOST])}"
    beside_server = case.memory - case.training_memory
    size = f"{'GPUs' if load.on_gpu else 'a machine'} of {math.ceil((min(tried) + beside_server) / GB)} GB"
    return f"no option that is known here makes it fit: take {size}, or a smaller model"


def _smaller(case: Case, load: Load, sharding: Sharding) -> list[list[Change]]:
    """A smaller micro-batch, of which each step gets more."""
    ways = []
    if not (load.checkpointing or sharding.checkpoints):
        ways.append(
            [Change("`gradient_checkpointing: true`", lambda one, way: (replace(one, checkpointing=True), way))]
        )
    return [*ways, [_rows(case, load, rows) for rows in range(load.rows - 1, 0, -1) if load.rows % rows == 0]]


def _rows(case: Case, load: Load, rows: int) -> Change:
    times = load.rows // rows
    words = f"`per_device_train_batch_size: {rows}` and `gradient_accumulation_steps: {load.accumulation * times}`"
    if case.options["steps_per_generation"] is not None:
        words += f" and `steps_per_generation: {case.options['steps_per_generation'] * times}`"
    return Change(words, lambda one, way: (replace(one, rows=rows), way))


def _larger(case: Case, load: Load, sharding: Sharding) -> list[list[Change]]:
    """More GPUs for each micro-batch, other ways to spread the states, more processes, less to train."""
    ways: list[list[Change]] = []
    whole = not load.shape.adapter
    quantised = load.precision.quantised is not None
    if _one_is_too_long(case, load, sharding):
        ways += [_grouped(load), _offloaded(load), _shared(case, load, sharding)]
    if load.on_gpu and not quantised:
        if sharding.stage < 3 and load.processes > 1:
            ways.append([Change("`--accelerate_config zero3`", lambda one, way: (one, Sharding("zero3", 3)))])
        if whole and not sharding.offloads_optimizer:
            ways.append([_offload(load)])
        if sharding.stage == 3:
            numbers = range(load.processes + 1, MOST_PROCESSES + 1)
            ways.append([_processes(number, load) for number in numbers if _divides(case, number)])
    lengths = range((load.completion - 1) // 128 * 128, SHORTEST - 1, -128)
    ways.append([_completion(tokens) for tokens in lengths])
    if whole:
        ways.append([_adapter(case)])
    if load.on_gpu and not quantised:
        ways.append([_quantised(case, load)])
    return ways


def _one_is_too_long(case: Case, load: Load, sharding: Sharding) -> bool:
    """Whether a single conversation is what does not fit, beside states that do, where each layer keeps its input."""
    held = replace(load, rows=1, checkpointing=True, group=1, offloading=False).parts(sharding)
    needed, room = sum(held.values()), SPARE * case.memory
    return needed > room > needed - held["activations"]


def _grouped(load: Load) -> list[Change]:
    """Layers in groups, from two on: each more takes more time, up to the number that keeps least."""
    if load.offloading:
        return []
    most = math.isqrt(load.shape.layers) + 1
    return [_group(size) for size in range(max(2, load.group + 1), most + 1)]


def _group(size: int) -> Change:
    return Change(
        f"`gradient_checkpointing_layers: {size}`",
        lambda one, way: (replace(one, checkpointing=True, group=size), way),
    )


def _offloaded(load: Load) -> list[Change]:
    """Activations in the machine's memory, which holds those of all processes on it."""
    if not load.on_gpu or load.offloading:
        return []
    tokens = -(-load.rows * load.longest // load.sharing)
    held = load.processes * load.shape.layers * input_of_layer(load.shape, tokens, load.precision.compute)
    beside = " in place of `gradient_checkpointing_layers`" if load.group > 1 else ""
    words = f"`activation_offloading: true`{beside}, which takes {held / GB:.0f} GB of the machine's memory"
    return [Change(words, lambda one, way: (replace(one, checkpointing=True, group=1, offloading=True), way))]


def _shared(case: Case, load: Load, sharding: Sharding) -> list[Change]:
    """More processes that compute a micro-batch together: of those that there are, or twice as many for one."""
    if not load.on_gpu or case.args.forward != "tree":
        return []
    ways = []
    for size in load.shape.shared_by:
        processes = size if load.processes == 1 else load.processes
        if size <= load.sharing or processes % size or not _divides(case, processes):
            continue
        spread = sharding if sharding.stage == 0 else FSDP2
        words = f"`sp_size: {size}`" + f" on {processes} GPUs" * (load.processes == 1)
        words += " and `--accelerate_config fsdp2`" * (spread is FSDP2 and sharding.name != FSDP2.name)
        ways.append(Change(words, _share(size, processes, spread)))
    return ways


def _share(size: int, processes: int, spread: Sharding) -> Callable[[Load, Sharding], Plan]:
    return lambda one, way: (replace(one, sharing=size, processes=processes), spread)


def _offload(load: Load) -> Change:
    held = OPTIMIZER * load.shape.parameters / GB
    words = (
        f"DeepSpeed's ZeRO-3 with `offload_optimizer_device: cpu`, which takes {held:.0f} GB of the machine's memory"
    )
    return Change(words, lambda one, way: (one, Sharding("zero3", 3, offloads_optimizer=True)))


def _processes(number: int, load: Load) -> Change:
    return Change(
        f"{number} processes in place of {load.processes}", lambda one, way: (replace(one, processes=number), way)
    )


def _divides(case: Case, processes: int) -> bool:
    try:
        check_batches(case.options, processes)
    except ConfigError:
        return False
    return True


def _completion(tokens: int) -> Change:
    return Change(f"`max_completion_length: {tokens}`", lambda one, way: (replace(one, completion=tokens), way))


def _adapter(case: Case) -> Change:
    words = f"an adapter ({_adapter_options(case)[0]})"
    return Change(words, lambda one, way: (replace(one, shape=_adapted(case)), way))


def _quantised(case: Case, load: Load) -> Change:
    def change(one: Load, way: Sharding) -> Plan:
        shape = one.shape if one.shape.adapter else _adapted(case)
        precision = replace(one.precision, weights=2.0, quantised=four_bit(nested=False))
        return replace(one, shape=shape, precision=precision), COPIES

    beside = "" if load.shape.adapter else f"{_adapter_options(case)[0]} and "
    return Change(f"a quantised model ({beside}`load_in_4bit: true`, `dtype: bfloat16`)", change)


def _adapter_options(case: Case) -> tuple[str, ModelConfig]:
    """The options of an adapter, in words too. Of models that PEFT does not know it has to be told the layers."""
    if case.config.model_type in TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING:
        return "`use_peft: true`", ModelConfig(use_peft=True)
    words = "`use_peft: true` and `lora_target_modules: all-linear`"
    return words, ModelConfig(use_peft=True, lora_target_modules=["all-linear"])


def _adapted(case: Case) -> Shape:
    settings = get_peft_config(_adapter_options(case)[1])
    return read_shape(case.config, settings, trust_remote_code=case.args.trust_remote_code)
