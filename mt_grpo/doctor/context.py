"""
The run that is examined. Each fact of it is found once, when the first check asks.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import datasets
import torch
from datasets import Dataset, IterableDataset
from peft import PeftConfig
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from trl import get_peft_config

from mt_grpo.app.build import Recipe, load_datasets, prompt_lengths
from mt_grpo.app.request import Request
from mt_grpo.data import HubUnreachable, hub_fault
from mt_grpo.doctor import GPU
from mt_grpo.doctor.memory import (
    ASLEEP,
    COPIES,
    EIGHT_BIT,
    GB,
    SERVER_SHARE,
    SHARING,
    USUAL,
    Load,
    Precision,
    Shape,
    Sharding,
    four_bit,
)
from mt_grpo.envs import EnvSource
from mt_grpo.envs.source import source_of
from mt_grpo.errors import MISREAD, ConfigError, UserError, libraries_may_refuse
from mt_grpo.forward.lm_head import CHUNK_ELEMENTS
from mt_grpo.forward.probe import context_length
from mt_grpo.options.values import SELF
from mt_grpo.training.checkpoint import adapter_settings
from mt_grpo.training.columns import rows_of
from mt_grpo.training.environment import check_env, prepare_tokenizer
from mt_grpo.training.model import OF_POLICY, resolve_base, resolve_model, source_options, subfolder_of
from mt_grpo.training.servers import colocates, server_urls

_LONGEST = 64  # how many prompts are encoded to count their tokens: those with the most characters
_STREAMED = 512  # how many rows of a stream are read
_PROMPT = 200  # tokens of a prompt, assumed if the rows are not known

T = TypeVar("T")


OK, WARN, FAIL = "ok", "warn", "fail"


class NotKnown(ConfigError):
    """A fact that cannot be found out on this machine, e.g. without a network. The run itself may know it."""


def _fact(find: Callable[[RunFacts], T]) -> T:
    """A property that is computed once. A `UserError` that it raised is raised again each time."""

    @functools.wraps(find)
    def get(self: RunFacts) -> T:
        if find.__name__ not in self._known:
            try:
                self._known[find.__name__] = find(self), None
            except UserError as error:
                self._known[find.__name__] = None, error
        value, error = self._known[find.__name__]
        if error is not None:
            raise error
        return value

    return property(get)


def _resolved(option: str, name: str, *where: str | None) -> str:
    try:
        return resolve_model(name, *where)
    except HubUnreachable as error:
        raise NotKnown(
            f"The model {name!r} is not here, and {hub_fault()}: memory and time are not planned. Give a folder with "
            f"its `config.json`, as `{option} FOLDER`, or run this where the Hub can be reached."
        ) from error


class RunFacts:
    """A run, as its recipe and the doctor's own options describe it."""

    def __init__(self, request: Request, recipe: Recipe) -> None:
        self.recipe, self.args, self.own = recipe, recipe.training, request.own
        self._bf16 = request.values.get("bf16")
        given = request.values.get("generation_batch_size")
        # TRL's own is of the one process that this is
        self.options: dict[str, Any] = {**vars(recipe.training), "generation_batch_size": given}
        if given is None:
            self.options["steps_per_generation"] = request.values.get("steps_per_generation")
        self.tool_seconds: dict[str, float] = {}  # seconds of one call of each tool that was called
        self.plan: dict[str, Any] = {}  # numbers of the plan, for `--json`: bytes and seconds
        self._known: dict[str, tuple[Any, UserError | None]] = {}

    # Machine and processes

    @_fact
    def sharding(self) -> Sharding | None:
        """What `--accelerate_config` says. Without it, a copy for a single process, and `None` for several."""
        named = self.own["accelerate_config"]
        if named is not None:
            return Sharding.read(named)
        return COPIES if self.processes == 1 else None

    @_fact
    def processes(self) -> int:
        """Processes that train."""
        named = self.own["accelerate_config"]
        return self.own["num_processes"] or (named and Sharding.read(named).processes) or 1

    def candidates(self) -> tuple[Sharding, ...]:
        """Ways to spread the states: the given one, or the usual ones."""
        usual = USUAL if self.args.sp_size == 1 else SHARING
        return usual if self.sharding is None else (self.sharding,)

    @property
    def on_gpu(self) -> bool:
        """Whether the run is planned for GPUs, stated (`--gpu`, `--gpu_memory`) or found on this machine."""
        return not self.args.use_cpu and (self.states_gpu or torch.cuda.is_available())

    @property
    def states_gpu(self) -> bool:
        """Whether the GPUs are stated, and need not be here."""
        return self.own["gpu"] is not None or self.own["gpu_memory"] is not None

    @_fact
    def memory(self) -> float:
        """Bytes of a GPU, or of this machine for a run on its CPU."""
        if self.args.use_cpu:
            return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        if self.own["gpu_memory"] is not None:
            return self.own["gpu_memory"] * GB
        if self.own["gpu"] is not None:
            return GPU.named(self.own["gpu"]).memory * GB
        if torch.cuda.is_available():
            return float(torch.cuda.get_device_properties(0).total_memory)
        raise NotKnown("The memory of a GPU is not known, since there is none here: state it, as `--gpu H100`.")

    @_fact
    def gpu(self) -> GPU | None:
        """The kind of GPU, stated or found; `None` for one that is not known."""
        if self.own["gpu"] is not None:
            return GPU.named(self.own["gpu"])
        return GPU.find(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None

    # Model

    @_fact
    def name(self) -> str:
        """The model, as `resolve_model` has it."""
        model = self.recipe.model
        found = model.model_name_or_path, model.model_revision, subfolder_of(self.args)
        return _resolved("--model_name_or_path", *found)

    @_fact
    def teacher(self) -> float:
        """Bytes of the weights of a teacher beside the policy; 0 without one, or where it is the policy."""
        teacher = self.args.teacher or {"model": SELF}
        if teacher["model"] == SELF or "server" in teacher:
            return 0.0
        source = {name: value for name, value in source_options(self.args).items() if name not in OF_POLICY}
        with libraries_may_refuse(f"The teacher {teacher['model']!r} cannot be loaded", *MISREAD):
            config = AutoConfig.from_pretrained(resolve_base(_resolved("--teacher", teacher["model"])), **source)
            shape = Shape.of(config, trust_remote_code=self.args.trust_remote_code)
        return shape.parameters * self.precision.weights

    @property
    def source(self) -> dict[str, Any]:
        """Options with which a tokenizer or a configuration is loaded."""
        return source_options(self.args, self.recipe.model.model_revision)

    @_fact
    def config(self) -> PreTrainedConfig:
        with libraries_may_refuse(f"The model {self.name!r} cannot be loaded", *MISREAD):
            return AutoConfig.from_pretrained(resolve_base(self.name), **self.source)

    @_fact
    def tokenizer(self) -> PreTrainedTokenizerBase:
        with libraries_may_refuse(f"The tokenizer of {self.name!r} cannot be loaded", *MISREAD):
            tokenizer = AutoTokenizer.from_pretrained(resolve_base(self.name), **self.source)
        prepare_tokenizer(tokenizer, self.env)
        return tokenizer

    @_fact
    def peft(self) -> PeftConfig | None:
        """The adapter to train, from the model's folder or the options; `None` if the whole model is trained."""
        if adapter_settings(self.name) is not None:
            return PeftConfig.from_pretrained(self.name)
        return get_peft_config(self.recipe.model)

    @_fact
    def shape(self) -> Shape:
        with libraries_may_refuse(f"The model {self.name!r} cannot be made from its configuration"):
            return Shape.of(self.config, self.peft, trust_remote_code=self.args.trust_remote_code)

    @_fact
    def precision(self) -> Precision:
        model = self.recipe.model
        dtype = model.dtype or "float32"
        if dtype == "auto":
            dtype = str(self.config.dtype or "float32").removeprefix("torch.")
        size = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
        quantised = four_bit(model.use_bnb_nested_quant) if model.load_in_4bit else None
        quantised = EIGHT_BIT if model.load_in_8bit else quantised
        moment = 1.0 if "8bit" in str(self.args.optim) else None
        return Precision(float(size), 2 if self.half else min(size, 4), moment, quantised)

    @property
    def half(self) -> bool:
        """Whether the run computes in two bytes, the default on a GPU."""
        return self.args.fp16 or (self.on_gpu if self._bf16 is None else self.args.bf16)

    @property
    def served_size(self) -> int:
        """Bytes of an element in the server."""
        return 2 if self.half else max(2, int(self.precision.weights))

    @_fact
    def context(self) -> int:
        """Tokens of the model's context, as the run uses it."""
        length = context_length(self.config)
        if self.args.use_vllm and self.args.vllm_max_model_length:
            length = min(length, self.args.vllm_max_model_length)
        return length

    # Rows and environment

    @_fact
    def rows(self) -> tuple[Any, Any]:
        """Rows to train on and to evaluate on."""
        datasets.disable_progress_bars()
        try:
            return load_datasets(self.recipe)
        except UserError as error:
            name = self.recipe.script.dataset_name
            if name in (None, "embedded") or Path(name.partition(":")[2] or name).exists() or hub_fault() is None:
                raise
            raise NotKnown(
                f"The rows of {name!r} are not here, and {hub_fault()}: a prompt of {_PROMPT} tokens is assumed."
            ) from error

    @_fact
    def env(self) -> EnvSource:
        known = (None, None)
        with contextlib.suppress(NotKnown):  # it can be built without them
            known = self.rows
        return source_of(check_env(None, self.args, *known))

    @_fact
    def train_rows(self) -> Dataset | IterableDataset:
        return rows_of(self.rows[0], self.env, self.args)

    @property
    def environments(self) -> list[Any]:
        """Each kind of environment once."""
        return self.env.prototypes()

    @_fact
    def prompt_lengths(self) -> list[int]:
        """Tokens of the longest prompts."""
        rows = self.train_rows
        rows = list(rows.take(_STREAMED)) if isinstance(rows, IterableDataset) else rows.select_columns(["prompt"])
        if isinstance(rows, Dataset):
            by_size = sorted(range(len(rows)), key=lambda index: -len(str(rows[index]["prompt"])))
            rows = [self.train_rows[index] for index in by_size[:_LONGEST]]
        count = prompt_lengths(self.tokenizer, self.env, self.args.chat_template_kwargs)
        return [count(row) for row in rows] or [0]

    @property
    def prompt(self) -> int:
        """Tokens of the longest prompt, or `_PROMPT` if the rows are not known."""
        try:
            return max(self.prompt_lengths) or _PROMPT
        except NotKnown:
            return _PROMPT

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation that the run allows."""
        return min(self.context, self.prompt + self.args.max_completion_length)

    @_fact
    def load(self) -> Load:
        """What decides what a training process holds."""
        args = self.args
        return Load(
            self.shape,
            self.precision,
            self.processes,
            args.per_device_train_batch_size,
            args.gradient_accumulation_steps,
            self.prompt,
            args.max_completion_length,
            self.context,
            bool(args.gradient_checkpointing),
            CHUNK_ELEMENTS["cuda" if self.on_gpu else "cpu"] if args.forward != "padded" else None,
            args.beta > 0,
            0 if args.use_vllm else self.under_way,
            bool(args.max_staleness) and not args.use_vllm,
            self.on_gpu,
            args.sp_size,
            args.gradient_checkpointing_layers,
            args.activation_offloading,
            self.teacher,
            (args.teacher or {}).get("teacher_model_kind", "live") != "live",
        )

    # Batches and servers

    @property
    def batch(self) -> int:
        """Conversations of one batch, of all processes."""
        step = self.args.per_device_train_batch_size * self.processes
        steps = self.options["steps_per_generation"] or self.args.gradient_accumulation_steps
        return self.options["generation_batch_size"] or step * steps

    @property
    def steps_of_a_batch(self) -> float:
        """Optimiser steps with the conversations of one batch."""
        step = self.args.per_device_train_batch_size * self.processes * self.args.gradient_accumulation_steps
        return self.args.num_iterations * self.batch / step

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole run."""
        args = self.args
        if args.max_steps > 0:
            return args.max_steps
        if isinstance(self.train_rows, IterableDataset):
            raise ConfigError("The rows are a stream, whose end is not known: set `max_steps`.")
        of_a_step = self.batch / self.steps_of_a_batch
        return math.ceil(args.num_train_epochs * len(self.train_rows) * args.num_generations / of_a_step)

    @property
    def under_way(self) -> int:
        """Conversations that are sampled at once, those of prefetched batches among them."""
        limit, most = self.args.max_concurrent_rollouts, self.batch * (1 + self.args.max_staleness)
        return most if limit is None else min(most, limit * self.processes)

    @property
    def urls(self) -> list[str]:
        return server_urls(self.args, self.processes)

    @property
    def colocated(self) -> bool:
        """Whether the servers run on the GPUs that train."""
        return colocates(self.args)

    @property
    def server_share(self) -> float:
        """The share of a GPU's memory that a server plans with."""
        return float(self.args.vllm_gpu_memory_utilization) if self.colocated else SERVER_SHARE

    @property
    def training_memory(self) -> float:
        """Bytes of a GPU, or of this machine, that training may take: all but what a server keeps on the GPU."""
        if not (self.colocated and self.on_gpu):
            return self.memory
        awake = self.args.vllm_gpu_memory_utilization * self.memory
        return self.memory - (ASLEEP if self.args.vllm_enable_sleep_mode else awake)

    @property
    def local_port(self) -> int | None:
        """Port of the server, if it runs on this machine."""
        parts = urlsplit(self.urls[0])
        return (parts.port or 80) if parts.hostname in ("127.0.0.1", "localhost") else None


Lines = Iterator[tuple[str, str, str]]  # status, finding and mend of each line of a check
Check = Callable[[RunFacts], Lines]
