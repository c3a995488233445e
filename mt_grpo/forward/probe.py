"""
Tests that a model scores packed trees as it scores each turn alone. Both are done once, on a small forked tree.

The tree has what the trees of runs have: a prompt that two trajectories share, turns early and late, a fork just
before the end, and a trajectory that shares nothing. Its tokens are of the whole vocabulary. It is as deep as the
longest row of the run, up to `DEEPEST` tokens, or twice as deep as a window or a chunk that the run's rows are longer
than, since these have an effect only beyond their length. What the weights make no use of, it cannot see, nor what
begins after `FARTHEST` tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from mt_grpo.errors import UnsupportedModelError
from mt_grpo.forward.interface import base_model, use_attention
from mt_grpo.forward.model import DEFAULT_PLAN, ForwardPlan, Scores, score, score_turns
from mt_grpo.forward.packing import FlatTree, flatten
from mt_grpo.media import SOUND, kind_of
from mt_grpo.token_tree import TokenTree

EXACT = 1e-4
"""Largest difference of a token's log-prob in float32, in nats."""

FACTOR = 4
"""In coarser precisions a turn may differ by this many times what rounding changes in a padded batch."""

MOST_NOISE = 0.5
"""Largest difference, in nats, that rounding can explain: some models that are wrong on trees are wrong on padded
rows too."""

SHALLOWEST = 256
"""Fewest tokens on the longest path: two blocks of FlexAttention's mask."""

DEEPEST = 4096
"""Most tokens on the longest path, but for models whose windows or chunks are larger than half of this."""

FARTHEST = 2**15
"""The largest window that is looked beyond: the model's own mask of a row of twice as many tokens takes 4 GiB."""

REACHES = ("sliding_window", "attention_chunk_size", "floor_scale")
"""Names of the numbers of tokens beyond which a configuration has a layer compute otherwise, as transformers' masks
and Llama 4 have them."""

TURN = 16
"""Tokens per turn. In coarser precisions a difference is a mean over this many tokens."""

_POSITIONS = ("max_position_embeddings", "max_target_positions", "max_seq_len")
"""Names of the number of positions of a model, the first that it has."""

_ENDLESS = 1 << 30  # tokens of a context without an end: more than any has

_SHAKEN = 64  # one number in so many of an embedding is off by a rounding step, where rounding is measured

NOISE_ROWS, NOISE_LENGTH, PADDING = 4, 1024, 300
"""The batch that is padded in two ways: rows, most tokens per row, and padding, which no kernel's block divides."""


@dataclass(frozen=True)
class Proof:
    """How far apart the two ways of scoring the probe tree are."""

    difference: float
    allowed: float

    @property
    def holds(self) -> bool:
        return self.difference <= self.allowed

    def __str__(self) -> str:
        return (
            f"{self.difference:.1e} nats away from one forward for each turn, where its precision explains "
            f"{self.allowed:.1e}"
        )


def prove(model: nn.Module, length: int, plan: ForwardPlan = DEFAULT_PLAN, mixed_precision: str = "no") -> None:
    """
    Proves a model for rows of up to `length` tokens in the way of `plan.forward`, unless this was done before. Every
    rank calls it at the same point, since a sharded forward is collective, and gets the same result.
    """
    base = base_model(model)
    name, padded = type(base).__name__, plan.forward == "padded"
    neither = f"{name} can be trained neither over packed trees nor in padded rows"
    proven = vars(base).setdefault("_proven_lengths", {})
    way = (id(model), plan.forward, plan.attention, mixed_precision)
    if length <= proven.get(way, 0):
        return
    known = _turns_by_length(base)
    if known is not None and length > known:
        turn = f"turn differently in rows of more than {known} tokens and in shorter ones"
        raise UnsupportedModelError(
            f"{neither}, since its rotary positions {turn}: keep prompt and completion within {known} tokens, or set "
            "`forward: turn_by_turn`."
            if padded
            else f"The rotary positions of {name} {turn}, so trees cannot be packed for it; keep rows within {known} "
            "tokens."
        )
    config = base.config.get_text_config()
    depth = _probe_depth(config, length, known)
    if way not in proven or depth > _probe_depth(config, proven[way], known):
        probe = ForwardPlan(forward=plan.forward, attention=plan.attention, group=plan.group)
        proof = measure(model, depth, probe, mixed_precision)
        if not proof.holds:
            raise UnsupportedModelError(
                f"{neither}: it scores these {proof}."
                if padded
                else f"{name} scores packed trees {proof}, so trees cannot be packed for it; set `forward: padded`."
            )
    proven[way] = max(depth, length)


def prove_media(model: nn.Module, plan: ForwardPlan, mixed_precision: str = "no") -> None:
    """As `prove`, on the trees of a plan, which show images or sounds; what it has proven is not remembered."""
    proof = measure(model, SHALLOWEST, plan, mixed_precision)
    if not proof.holds:
        name = type(base_model(model)).__name__
        what = "sounds" if any(kind_of(number) == SOUND for number in plan.media) else "images"
        raise UnsupportedModelError(
            f"{name} cannot be trained with {what} in batches: it scores padded rows of them {proof}; set `forward: "
            "turn_by_turn`."
            if plan.forward == "padded"
            else f"{name} scores packed trees with {what} {proof}, so trees cannot be packed for it; set `forward: "
            "padded`."
        )


def _probe_depth(config: PreTrainedConfig, length: int, known: int | None = None) -> int:
    """Depth for rows of `length` tokens: the next power of two within what the model and `known` allow."""
    reaches = [getattr(config, name, None) or 0 for name in REACHES]
    deepest = max(DEEPEST, *(2 * reach for reach in reaches if reach < length and reach <= FARTHEST))
    depth = max(SHALLOWEST, 1 << (min(length, deepest) - 1).bit_length())
    if known is not None:
        depth = min(depth, known)
    positions = _positions(config) or depth
    rotary = getattr(config, "rope_parameters", None) is not None  # else a table, which ends
    return depth if rotary and length > positions else min(depth, positions)


def _positions(config: PreTrainedConfig) -> int | None:
    """How many positions a model has; `None` where it says nothing, or -1."""
    found = (getattr(config, name, None) for name in _POSITIONS)
    return next((value for value in found if value and value > 0), None)


def context_length(config: PreTrainedConfig) -> int:
    """Most tokens that a model of this configuration reads: its positions. Without any, as Mamba, it has no end."""
    return _positions(config.get_text_config()) or _ENDLESS


def table_length(config: PreTrainedConfig) -> int:
    """Most tokens for which a model has positions: those of a table. Rotary ones have no end."""
    rotary = getattr(config.get_text_config(), "rope_parameters", None) is not None
    return _ENDLESS if rotary else context_length(config)


def _turns_by_length(model: PreTrainedModel) -> int | None:
    """The length from which on a model's positions turn by frequencies that depend on it; else `None`."""
    config = model.config.get_text_config()
    if not any("rope_type" in vars(module) for module in model.modules()):  # some are configured and not there
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    for options in rope.values() if all(isinstance(value, dict) for value in rope.values()) else [rope]:
        if options.get("rope_type") in ("dynamic", "longrope"):
            return options.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None)
    return None


def _probe_trees(vocabulary: int, depth: int) -> list[FlatTree]:
    """The trees of the probe, whose longest path has `depth` tokens; the same on every machine."""
    draw = np.random.default_rng(0)
    size = min(TURN, depth // 8)
    sibling, trajectory, stranger = trees = [TokenTree(), TokenTree(), TokenTree()]

    def take(count: int) -> list[int]:
        return [int(token) for token in draw.integers(vocabulary, size=count)]

    def turn(tree: TokenTree, context: list[int]) -> list[int]:
        action = take(size)
        tree.add_turn(context, action, [0.0] * size)
        return context + action

    prompt = take(size)
    turn(sibling, prompt)
    history = turn(trajectory, prompt)
    history = turn(trajectory, history + take(depth // 2 - size - len(history)))
    context = history + take(depth - size - len(history))
    turn(trajectory, context)
    turn(trajectory, context[:-3] + take(3))
    turn(stranger, take(size // 2))
    return [flatten(tree) for tree in trees]


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """A context in which a model is in evaluation mode."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@torch.no_grad()
def measure(
    model: nn.Module, depth: int = SHALLOWEST, plan: ForwardPlan = DEFAULT_PLAN, mixed_precision: str = "no"
) -> Proof:
    """
    Scores the trees of a plan, by default the probe's, as it says and turn by turn, which uses the attention that the
    model had before `enable_trees`.
    """
    base = base_model(model)
    vocabulary = base.config.get_text_config().vocab_size
    size = min(TURN, depth // 8) if not plan.trees else None
    plan = replace(plan, trees=plan.trees or _probe_trees(vocabulary, depth), shared=True)
    turns = [int(tree.turns.max(initial=-1)) + 1 for tree in plan.all_trees[: len(plan.trees)]]
    with without_dropout(model):  # which would differ between the two
        ours = _of_all_turns(score(model, plan), turns)
        step = rounding_step(model, mixed_precision)
        with _own_attention(base):
            keep_logits = not takes(base, "logits_to_keep")
            expected = _of_all_turns(score_turns(model, plan, keep_logits), turns)
            differences = (ours - expected).abs()
            if not expected.isfinite().all():  # weights that are not finite: the trainer names them
                found = torch.stack([differences.new_tensor(0.0), differences.new_tensor(torch.inf)])
            elif step <= torch.finfo(torch.float32).eps:
                found = torch.stack([differences.max(), differences.new_tensor(EXACT)])
            else:
                noise = _rounding_noise(model, base, min(depth, NOISE_LENGTH), vocabulary, ours.device, step)
                allowed = (FACTOR * noise.clamp(min=step)).clamp(max=MOST_NOISE)
                found = torch.stack([differences.view(-1, size or len(differences)).mean(dim=1).max(), allowed])
    difference, allowed = _worst_rank(found).tolist()
    return Proof(difference, allowed)


def _of_all_turns(scores: Scores, num_turns: list[int]) -> Tensor:
    return torch.cat([logps for of_tree in scores.by_turn(num_turns) for logps in of_tree])


def rounding_step(model: nn.Module, mixed_precision: str = "no") -> float:
    """Relative rounding step of a model: the coarsest of its parameters, its wrapper and a matrix product."""
    types = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    types |= {"bf16": {torch.bfloat16}, "fp16": {torch.float16}, "fp8": {torch.bfloat16}}.get(mixed_precision, set())
    if getattr(base_model(model).config, "quantization_config", None) is not None:
        types.add(torch.bfloat16)
    exponents = torch.arange(256, device=next(model.parameters()).device) % 24
    product = torch.diag(1 + 0.5**exponents) @ torch.eye(256, device=exponents.device)
    kept = exponents[product.diag() > 1].max().item()
    return max(0.5**kept, *(torch.finfo(dtype).eps for dtype in types))


def _rounding_noise(
    model: nn.Module, base: PreTrainedModel, length: int, vocabulary: int, device: torch.device, step: float
) -> Tensor:
    """Mean difference, in nats, over the worst `TURN` tokens, of padding and embeddings off by a step."""
    if not takes(base, "position_ids"):  # padding may take positions, of which a table has no more
        length = min(length, (_positions(base.config.get_text_config()) or length + PADDING) - PADDING)
    tokens = np.random.default_rng(1).integers(vocabulary, size=(NOISE_ROWS, length))
    ids = torch.from_numpy(tokens).to(device)
    size = min(length - 1, SHALLOWEST) // TURN * TURN
    results: list[Tensor] = []
    for padding in (0, PADDING):
        mask = nn.functional.pad(torch.ones_like(ids), (padding, 0))
        with shaken(base, step) if padding else nullcontext():
            logits = model(
                input_ids=nn.functional.pad(ids, (padding, 0)),
                attention_mask=mask,
                use_cache=False,
                **({"position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)} if takes(base, "position_ids") else {}),
                **({"logits_to_keep": size + 1} if takes(base, "logits_to_keep") else {}),
            ).logits
        distribution = logits[:, -size - 1 : -1].float().log_softmax(dim=-1)
        results.append(distribution.gather(2, ids[:, -size:, None]))
    return (results[0] - results[1]).abs().view(-1, TURN).mean(dim=1).max()


@contextmanager
def shaken(base: PreTrainedModel, step: float) -> Iterator[None]:
    """Embeddings of which one number in `_SHAKEN` is a rounding step larger, the same ones each time."""

    def shake(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        shaken = torch.randint(_SHAKEN, output.shape, generator=torch.Generator().manual_seed(0)) == 0
        return torch.where(shaken.to(output.device), output * (1 + step), output)

    with base.get_input_embeddings().register_forward_hook(shake):
        yield


def _worst_rank(found: Tensor) -> Tensor:
    """The largest difference and the smallest allowance of all ranks, so that all ranks decide alike."""
    difference, allowed = found.float()
    found = torch.stack([difference.nan_to_num(nan=torch.inf), -allowed.nan_to_num(nan=0.0)])
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.abs()


@contextmanager
def _own_attention(base: PreTrainedModel) -> Iterator[None]:
    """Uses the attention that the model was made with; its replacement for trees may leave something out."""
    ours = base.config._attn_implementation
    use_attention(base, vars(base).get("_attention_without_trees", ours))
    try:
        yield
    finally:
        use_attention(base, ours)


def takes(base: PreTrainedModel, name: str) -> bool:
    """Whether a forward has an argument of this name."""
    return name in inspect.signature(base.forward).parameters
