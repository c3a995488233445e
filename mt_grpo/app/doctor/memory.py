"""
What a run takes in bytes. All functions are of numbers alone.

States are as ZeRO (arXiv 1910.02054, section 3.1) counts them, with AdamW: weights and gradients, and in the optimiser
a weight in float32 and two moments, 16 bytes for each parameter in all.
"""

from __future__ import annotations

from dataclasses import dataclass

from mt_grpo.app.doctor.shape import Shape
from mt_grpo.app.doctor.sharding import Sharding

GB = 1e9
RESERVE = 3 * GB
"""Of a GPU, for CUDA itself, graphs, and what lies unused between two tensors."""
PROCESS = 0.7 * GB
"""Of a machine, for a Python process with torch."""
SERVER_SHARE = 0.9
"""Of a GPU's memory that a server plans with; a little below vLLM's default."""
WHOLE = 16
"""Bytes of a parameter that is trained, its gradient and its optimiser's states, in all."""
SPARE = 0.9
"""Share of the memory above which a plan is close: what formulas leave out may be more than the rest."""


@dataclass(frozen=True)
class Precision:
    """
    Bytes of an element.

    Args:
        weights (`float`): Of the weights as they are loaded; less than 1 where they are quantised to 4 bits.
        compute (`int`): Of activations.
        moment (`float`): Of one of the optimiser's two moments, `None` for that of the weights.
    """

    weights: float
    compute: int
    moment: float | None = None


def states(shape: Shape, precision: Precision, sharding: Sharding, ranks: int) -> float:
    """
    Bytes of weights, gradients and the optimiser's states in one process.

    Args:
        shape (`Shape`): The model's.
        precision (`Precision`): Bytes of elements.
        sharding (`Sharding`): What is spread.
        ranks (`int`): Over how many processes.
    """
    # peft keeps an adapter in float32, and who shards casts weights to what it computes in
    whole = precision.weights if sharding.stage == 0 else min(precision.weights, precision.compute)
    frozen, size = (shape.parameters * whole, 4) if shape.adapter else (0.0, whole)
    moment = precision.moment
    if sharding.stage == 0:
        trained = shape.trained * (2 * size + 2 * (size if moment is None else moment))
        buckets = shape.trained * size if ranks > 1 else 0.0  # in which DDP sums gradients
        return frozen + trained + buckets
    optimizer = WHOLE - 2 * size - (0 if moment is None else 8 - 2 * moment)
    if sharding.offloads_optimizer:
        optimizer = 0.0
    if sharding.stage < 3:
        return frozen + shape.trained * (2 * size + optimizer / ranks)
    if sharding.offloads_weights:
        return shape.trained * (size + optimizer) / ranks
    return (frozen + shape.trained * (2 * size + optimizer)) / ranks


def gathered(shape: Shape, precision: Precision, sharding: Sharding) -> float:
    """Bytes of the weights that sharded training holds whole at a time: two layers and the embedding."""
    if sharding.stage < 3:
        return 0.0
    embedding = shape.vocabulary * shape.hidden
    layer = (shape.parameters - embedding) / shape.layers
    return precision.compute * (2 * layer + embedding)


def checkpoints_of_layers(shape: Shape, tokens: int, compute: int) -> float:
    """Bytes of the inputs of all layers, which checkpointed activations keep."""
    return float(shape.layers * tokens * shape.hidden * compute)


def layer_activations(shape: Shape, tokens: int, compute: int) -> float:
    """
    Bytes that one layer keeps for its backward: of the model's width two norms with three tensors each, queries with
    their rotation, what attention returns and the sums; keys and values with theirs; four of the feed-forward's width.
    """
    values = 14 * shape.hidden + 6 * shape.kv_heads * shape.head_size + 4 * shape.intermediate
    return float(tokens * values * compute)


def activations(shape: Shape, tokens: int, compute: int, checkpointing: bool) -> float:
    """Bytes that a forward keeps over `tokens` tokens; with checkpointing, and those of the layer computed again."""
    layer = layer_activations(shape, tokens, compute)
    if checkpointing:
        return checkpoints_of_layers(shape, tokens, compute) + layer
    return shape.layers * layer


def head(shape: Shape, tokens: int, compute: int, chunk: int | None) -> float:
    """
    Bytes of logits.

    Args:
        tokens (`int`): Whose logits are computed.
        chunk (`int`, *optional*): Logits that are computed at a time, in float32; all, and their gradient, where none
            is given (`forward: padded`).
    """
    if chunk is None:
        return float(2 * tokens * shape.vocabulary * compute)
    matrix = 0 if shape.adapter else shape.vocabulary * shape.hidden * 4  # its gradient is summed over chunks
    return 3.0 * 4 * min(chunk, tokens * shape.vocabulary) + matrix


def server_tokens(memory: float, shape: Shape, size: int, gpus: int = 1) -> int:
    """
    Tokens whose keys and values a server holds.

    Args:
        memory (`float`): Bytes of a GPU.
        shape (`Shape`): The model's.
        size (`int`): Bytes of an element of weights and of keys and values.
        gpus (`int`, *optional*, defaults to `1`): Over which the server spreads the model.
    """
    room = gpus * (SERVER_SHARE * memory - RESERVE) - size * shape.parameters
    return max(0, int(room / shape.kv_bytes(size)))


def shared_memory(shape: Shape, size: int) -> float:
    """Bytes of the two weight files that take turns, in elements of `size` bytes."""
    return 2.0 * size * shape.parameters


def checkpoint(shape: Shape, precision: Precision, sharding: Sharding) -> float:
    """Bytes of one checkpoint: weights and the optimiser's states."""
    if shape.adapter:
        return float(shape.adapter * (4 + 8))
    if sharding.stage == 0:
        return 3.0 * precision.weights * shape.parameters
    return shape.parameters * (WHOLE - precision.compute)
