"""
What a run takes in bytes: the shape of its model, how its states are spread over processes, and the formulas for both.

States are counted as ZeRO (arXiv 1910.02054, section 3.1) does, with AdamW: weights and gradients, and in the
optimiser a weight in float32 and two moments, 16 bytes for each parameter in all.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftConfig, get_peft_model
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from mt_grpo.app.commands import find_accelerate_config, read_accelerate_config
from mt_grpo.errors import ConfigError, UnsupportedModelError, libraries_may_refuse
from mt_grpo.forward.model import check_model, check_sequence_parallel

GB = 1e9
RESERVE = 3 * GB  # of a GPU, for CUDA itself, its graphs and fragmentation
_PROCESS = 0.7 * GB  # of a machine, for a Python process with torch
SERVER_SHARE = 0.9  # of a GPU's memory that a server plans with; a little below vLLM's default
ASLEEP = 2 * GB  # of a GPU, for CUDA and the graphs of a server that sleeps there
_WHOLE = 16  # bytes of a parameter that is trained, its gradient and its optimiser's states, in all
SPARE = 0.9  # share of the memory above which a plan is close: the formulas leave things out that may take the rest


_UNDER_WAY = 5  # tensors that TRL's offloading keeps on the GPU while they are copied
_STATEFUL = ("linear_attention", "conv", "mlp", "moe")
"""Kinds of layers that keep no keys and values of a token; transformers' names."""
MOST_ROWS = 64  # conversations in one batch of the engine that samples from the trainer's own model
_SHARED_BY = range(2, 17)  # values of `sp_size` that are tried


@dataclass(frozen=True)
class Precision:
    """Bytes of an element."""

    weights: float
    compute: int
    moment: float | None = None
    quantised: float | None = None

    @property
    def adapter(self) -> int:
        """Of an adapter, which peft keeps in float32; TRL casts that of a quantised model to bfloat16."""
        return 4 if self.quantised is None else 2


EIGHT_BIT = 1.0  # bytes of a weight that is quantised to 8 bits; its scales, one for a row, are left out


def four_bit(nested: bool) -> float:
    """Bytes of a weight in 4 bits, with a float32 scale for each 64, or `nested`, one of 8 bits and its own."""
    return 0.5 + (1 / 64 + 4 / (64 * 256) if nested else 4 / 64)


@dataclass(frozen=True)
class Shape:
    """The shape of a model, from its configuration."""

    parameters: int
    trained: int
    adapter: int
    linear: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    kv_heads: int
    head_size: int
    shared_by: tuple[int, ...]
    kept: int

    @classmethod
    def of(cls, config: PreTrainedConfig, peft: PeftConfig | None = None, **options: Any) -> Shape:
        """The shape of the model that a configuration describes, counted on the meta device, without its memory."""
        with torch.device("meta"):
            # what sees or hears may be no causal language model by name: TRL makes it by its architecture too
            architecture = getattr(transformers, (config.architectures or [""])[0], None)
            known = architecture is None or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
            model = AutoModelForCausalLM.from_config(config, **options) if known else architecture(config)
            parameters = sum(parameter.numel() for parameter in model.parameters())
            head = model.get_output_embeddings()
            layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer is not head]
            linear = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
            shared_by = _numbers_that_share(model)
            adapter = 0
            if peft is not None:
                with libraries_may_refuse("The adapter cannot be made"):
                    adapted = get_peft_model(model, peft)
                adapter = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
        text = config.get_text_config()
        heads, sizes = zip(*map(_key_value_heads, _layer_configs(text)), strict=True)
        return cls(
            parameters,
            adapter or parameters,
            adapter,
            linear,
            text.num_hidden_layers,
            text.hidden_size,
            getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            text.vocab_size,
            max(heads),
            max(sizes),
            shared_by,
            _kept(text),
        )

    def kv_bytes(self, size: int) -> int:
        """Bytes of the keys and values of one token, in elements of `size` bytes."""
        return self.kept * size

    def weights(self, precision: Precision, whole: float | None = None) -> float:
        """Bytes of the weights."""
        whole = precision.weights if whole is None else whole
        if precision.quantised is None:
            return self.parameters * whole
        return self.linear * precision.quantised + (self.parameters - self.linear) * whole

    def states(self, precision: Precision, sharding: Sharding, ranks: int) -> float:
        """Bytes of weights, gradients and the optimiser's states in one process."""
        # sharded weights are cast to the type of the computation
        whole = precision.weights if sharding.stage == 0 else min(precision.weights, precision.compute)
        frozen, size = (self.weights(precision, whole), precision.adapter) if self.adapter else (0.0, whole)
        moment = precision.moment
        if sharding.stage == 0:
            trained = self.trained * (2 * size + 2 * (size if moment is None else moment))
            buckets = self.trained * size if ranks > 1 else 0.0  # in which DDP sums gradients
            return frozen + trained + buckets
        optimizer = _WHOLE - 2 * size - (0 if moment is None else 8 - 2 * moment)
        if sharding.offloads_optimizer:
            optimizer = 0.0
        if sharding.stage < 3:
            return frozen + self.trained * (2 * size + optimizer / ranks)
        if sharding.offloads_weights:
            return self.trained * (size + optimizer) / ranks
        return (frozen + self.trained * (2 * size + optimizer)) / ranks

    def gathered(self, precision: Precision, sharding: Sharding) -> float:
        """Bytes of the weights that sharded training holds whole at a time: two layers and the embedding."""
        if sharding.stage < 3:
            return 0.0
        embedding = self.vocabulary * self.hidden
        layer = (self.parameters - embedding) / self.layers
        return precision.compute * (2 * layer + embedding)

    def input_of_layer(self, tokens: int, compute: int) -> float:
        """Bytes of the input of one layer."""
        return float(tokens * self.hidden * compute)

    def activations(
        self, tokens: int, compute: int, checkpointing: bool, group: int = 1, offloading: bool = False
    ) -> float:
        """Bytes that a forward and its backward keep on their device, at most."""
        # of a layer norms, queries, outputs and sums; keys and values; the feed-forward
        values = 14 * self.hidden + 6 * self.kv_heads * self.head_size + 4 * self.intermediate
        layer = float(tokens * values * compute)
        if not checkpointing and not offloading:
            return self.layers * layer
        group = min(group, self.layers)
        inputs = _UNDER_WAY if offloading else -(-self.layers // group) + group - 1
        return inputs * self.input_of_layer(tokens, compute) + layer

    def head(self, tokens: int, compute: int, chunk: int | None) -> float:
        """Bytes of logits."""
        if chunk is None:
            return float(2 * tokens * self.vocabulary * compute)
        matrix = 0 if self.adapter else self.vocabulary * self.hidden * 4  # its gradient is summed over chunks
        return 3.0 * 4 * min(chunk, tokens * self.vocabulary) + matrix

    def server_tokens(self, memory: float, size: int, gpus: int = 1, share: float = SERVER_SHARE) -> int:
        """Tokens whose keys and values a server holds."""
        room = gpus * (share * memory - RESERVE) - size * self.parameters
        return max(0, int(room / max(1, self.kv_bytes(size))))  # Mamba keeps nothing of a token

    def checkpoint(self, precision: Precision, sharding: Sharding) -> float:
        """Bytes of one checkpoint: weights and the optimiser's states."""
        if self.adapter:
            return float(3 * self.adapter * precision.adapter)
        if sharding.stage == 0:
            return 3.0 * precision.weights * self.parameters
        return self.parameters * (_WHOLE - precision.compute)


def _layer_configs(text: PreTrainedConfig) -> list[PreTrainedConfig]:
    """The configuration of each layer. Those of some models have heads of several sizes."""
    if getattr(text, "is_heterogeneous", False):
        return list(text.per_layer_config)
    return [text] * text.num_hidden_layers


def _key_value_heads(layer: PreTrainedConfig) -> tuple[int, int]:
    """How many a layer has, and their size; 0 where a model has no attention."""
    heads = getattr(layer, "num_attention_heads", None) or 0
    size = getattr(layer, "head_dim", None) or (layer.hidden_size // heads if heads else 0)
    return getattr(layer, "num_key_value_heads", None) or heads, size


def _kept(text: PreTrainedConfig) -> int:
    """Elements of the keys and values of one token, of all layers that keep some of their own."""
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    own = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", None) or 0)
    latent = getattr(text, "kv_lora_rank", None)  # multi-head latent attention
    kept = 0
    for kind, layer in list(zip(kinds, _layer_configs(text), strict=True))[:own]:
        heads, size = _key_value_heads(layer)
        if kind not in _STATEFUL:
            kept += latent + layer.qk_rope_head_dim if latent else 2 * heads * size
    return kept


def _numbers_that_share(model: PreTrainedModel) -> tuple[int, ...]:
    """How many processes can compute rows of a model together."""
    found = []
    with contextlib.suppress(UnsupportedModelError):
        check_model(model)
        for size in _SHARED_BY:
            with contextlib.suppress(UnsupportedModelError):
                check_sequence_parallel(model, size)
                found.append(size)
    return tuple(found)


_OFFLOADED = ("cpu", "nvme")


@dataclass(frozen=True)
class Sharding:
    """How training states are spread over processes, as an accelerate configuration says."""

    name: str
    stage: int
    processes: int | None = None
    offloads_optimizer: bool = False
    offloads_weights: bool = False
    checkpoints: bool = False
    deepspeed: bool = False

    @classmethod
    def read(cls, named: str) -> Sharding:
        """That of an accelerate configuration."""
        name, content = Path(named).name, read_accelerate_config(find_accelerate_config(named))
        try:
            read = {"DEEPSPEED": _deepspeed, "FSDP": _fsdp}.get(content.get("distributed_type"))
            return cls(name, 0, content.get("num_processes")) if read is None else read(name, content)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"The accelerate configuration {name!r}, or the file of DeepSpeed's that it names, cannot be read "
                f"({error}): mend its path or its values."
            ) from error


COPIES = Sharding("a copy for each process", 0)
FSDP2 = Sharding("fsdp2", 3)
USUAL = (COPIES, Sharding("zero2", 2), Sharding("zero3 or fsdp2", 3))
"""What is compared if no configuration is given, from the fastest to the smallest."""
SHARING = (COPIES, FSDP2)  # the same with `sp_size`


def _deepspeed(name: str, content: dict[str, Any]) -> Sharding:
    options = content.get("deepspeed_config") or {}
    stage = options.get("zero_stage", 2)  # accelerate's default
    optimizer, weights = options.get("offload_optimizer_device"), options.get("offload_param_device")
    if "deepspeed_config_file" in options:
        zero = json.loads(Path(options["deepspeed_config_file"]).read_text(encoding="utf-8")).get("zero_optimization")
        stage = (zero or {}).get("stage", 0)
        offload = ((zero or {}).get(key) or {} for key in ("offload_optimizer", "offload_param"))
        optimizer, weights = (each.get("device") for each in offload)
    return Sharding(
        name,
        int(stage),
        content.get("num_processes"),
        offloads_optimizer=optimizer in _OFFLOADED,
        offloads_weights=int(stage) == 3 and weights in _OFFLOADED,
        deepspeed=True,
    )


def _fsdp(name: str, content: dict[str, Any]) -> Sharding:
    options = content.get("fsdp_config") or {}
    stages = {"FULL_SHARD": 3, "HYBRID_SHARD": 3, "SHARD_GRAD_OP": 2, "HYBRID_SHARD_ZERO2": 2, "NO_SHARD": 0}
    if options.get("fsdp_version", 1) == 2:
        stage = 3 if options.get("fsdp_reshard_after_forward", True) else 2
    else:
        stage = stages.get(str(options.get("fsdp_sharding_strategy", "FULL_SHARD")).upper(), 3)
    offloads = bool(options.get("fsdp_offload_params", False))
    checkpoints = bool(options.get("fsdp_activation_checkpointing", False))
    return Sharding(name, stage, content.get("num_processes"), offloads, offloads, checkpoints)


@dataclass(frozen=True)
class Load:
    """What decides what a training process holds."""

    shape: Shape
    precision: Precision
    processes: int
    rows: int
    accumulation: int
    prompt: int
    completion: int
    context: int
    checkpointing: bool
    chunk: int | None
    reference: bool
    under_way: int
    copied: bool
    on_gpu: bool
    sharing: int
    group: int = 1
    offloading: bool = False
    teacher: float = 0.0
    lends: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation."""
        return min(self.context, self.prompt + self.completion)

    def parts(self, sharding: Sharding) -> dict[str, float]:
        """Bytes of what one training process holds at its highest, in the worst micro-batch."""
        shape, precision, ranks = self.shape, self.precision, self.processes
        spread = ranks if sharding.stage == 3 else 1
        whole = self.rows * self.longest, self.rows * min(self.completion, self.longest)
        tokens, trained = (-(-number // self.sharing) for number in whole)
        checkpointing = self.checkpointing or sharding.checkpoints
        training = shape.activations(tokens, precision.compute, checkpointing, self.group, self.offloading)
        logits = shape.head(trained, precision.compute, self.chunk)
        found = {"states": shape.states(precision, sharding, ranks), "activations": training, "logits": logits}
        if sharding.stage == 3:
            found["gathered layers"] = shape.gathered(precision, sharding)
        if self.reference and not shape.adapter:
            found["reference model"] = shape.weights(precision) / spread
        if self.teacher:
            found["teacher"] = self.teacher / spread
        elif self.lends:  # it has weights in float32, and reads before training, while the policy's are put away
            own = shape.trained * (4 if shape.adapter else precision.weights) / spread
            found["teacher"] = 4 * shape.trained / spread + max(0.0, own - training)
        rows = min(-(-self.under_way // ranks), MOST_ROWS)
        cache = float(rows * self.longest * shape.kv_bytes(precision.compute))
        if self.copied:
            found["copy that samples"] = shape.weights(precision) + cache
        elif self.under_way:  # it samples before it trains, so the larger of the two counts
            found["sampling beyond training"] = max(0.0, cache - training - logits)
        found["CUDA and gaps" if self.on_gpu else "Python"] = RESERVE if self.on_gpu else _PROCESS
        return found

    def needs(self, sharding: Sharding) -> float:
        """Their sum."""
        return sum(self.parts(sharding).values())
