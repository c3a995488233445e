"""Ranks that compute packed rows together, and hold the results against those of one: `sequence_ranks SIZE`."""

import random
import sys
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from mt_grpo.forward.lm_head import Truncation
from mt_grpo.forward.model import ForwardPlan, _score_packed, _score_trees, enable_trees
from mt_grpo.forward.packing import Packed, SequenceGroup, pack
from mt_grpo.forward.probe import measure
from mt_grpo.forward.routes import route_shape
from mt_grpo.token_tree import TokenTree
from support.architectures import build_random
from support.mixtures import build_mixture

CPU = torch.device("cpu")
KINDS = ("gpt-oss", "gemma 2", "cohere 2", "granite", "llama 4", "gpt-2", "opt", "phimoe", "modernbert decoder")


def random_trees(seed: int, trees: int = 3) -> list[TokenTree]:
    """Trees of few ids, so that they meet; every turn goes on from a prefix of one before it, so that they fork."""
    draw = random.Random(seed)

    def some(most: int) -> list[int]:
        return [draw.randint(1, 5) for _ in range(draw.randint(1, most))]

    found = []
    for _ in range(trees):
        tree, history = TokenTree(), [[1, 2]]
        for _ in range(draw.randint(1, 5)):
            before = draw.choice(history)
            context = before[: draw.randint(1, len(before))] + some(20)
            action = some(8)
            tree.add_turn(context, action, [0.0] * len(action))
            history.append(context + action)
        found.append(tree)
    return found


def scores(
    model: nn.Module, packed: Packed, sequence: SequenceGroup | None, plain: np.ndarray | None = None, **options
) -> list[torch.Tensor]:
    """Log-probs and entropies, a loss of both, and the gradient of all parameters, summed over the processes."""
    model.zero_grad()
    found = _score_packed(model, packed, ForwardPlan(group=sequence, **options), plain)
    weights = torch.linspace(-1, 1, len(found.logps), dtype=found.logps.dtype)
    loss = (found.logps * weights).sum() + (found.entropies * weights).cos().sum()
    loss.backward()
    gradients = torch.cat(
        [(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in model.parameters()]
    )
    if sequence is not None:
        dist.all_reduce(gradients, group=sequence.group)
    return [found.logps.detach(), found.entropies.detach(), loss.detach(), gradients]


def assert_equal(model: nn.Module, packed: Packed, sequence: SequenceGroup, bound: float, **options) -> None:
    alone, together = scores(model, packed, None, **options), scores(model, packed, sequence, **options)
    for one, several in zip(alone, together, strict=True):
        torch.testing.assert_close(several, one, rtol=0, atol=bound * max([1.0, *one.abs().flatten().tolist()]))


def check_kinds(sequence: SequenceGroup) -> None:
    for number, kind in enumerate(KINDS):
        model = build_random(kind)
        enable_trees(model)
        assert_equal(model, pack(random_trees(10 * number)), sequence, 1e-5)


def check_options(sequence: SequenceGroup) -> None:
    """Other attentions, checkpoints, a distribution that is cut, a wide layer of keys, and single precision."""
    model = build_random(
        "seed-oss", num_attention_heads=8, num_key_value_heads=2, attention_dropout=0.0, residual_dropout=0.0
    )
    enable_trees(model)
    packed = pack(random_trees(7, 6))
    assert_equal(model, packed, sequence, 1e-5)
    assert_equal(model, packed, sequence, 1e-5, attention="dense")
    cut = {"temperature": 0.7, "truncation": Truncation(top_k=9), "plain": packed.tree % 2 == 1}
    assert_equal(model, packed, sequence, 1e-5, **cut)
    for kind in (True, False):
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": kind})
        model.enable_input_require_grads()
        assert_equal(model, packed, sequence, 1e-5)
    model.eval()
    assert measure(model, 64, ForwardPlan(group=sequence)).holds
    half = build_random("seed-oss").bfloat16()
    enable_trees(half)
    one, several = (scores(half, packed, group)[0] for group in (None, sequence))
    assert (one - several).abs().mean() < 0.02


def check_small(sequence: SequenceGroup) -> None:
    """Rows of fewer tokens than there are processes, labels that are all in one share, and none."""
    model = build_random("gpt-oss")
    enable_trees(model)
    for context, action in (([1], [2]), ([1, 2, 3] * 20, [4]), ([1, 2, 3, 4, 5], [])):
        tree = TokenTree()
        tree.add_turn(context, action, [0.0] * len(action))
        assert_equal(model, pack([tree]), sequence, 1e-5)


def check_own(sequence: SequenceGroup) -> None:
    """Each process gives a row of its own, and gets the scores of that."""
    model = build_random("gemma 2")
    enable_trees(model)
    trees = random_trees(100 + sequence.rank)
    with torch.no_grad():
        ours, alone = (_score_trees(model, ForwardPlan(trees, group=group)).logps for group in (sequence, None))
    torch.testing.assert_close(ours, alone, rtol=0, atol=1e-5)


def check_routes(sequence: SequenceGroup) -> None:
    """Mixtures are routed as their tokens were sampled, and each token is counted once."""
    for name in ("qwen3_moe", "deepseek_v3"):
        model = build_mixture(name)
        enable_trees(model)
        packed, shape = pack(random_trees(40)), route_shape(model.config)
        draw = np.random.default_rng(0)
        chosen = draw.permuted(np.tile(np.arange(shape.experts), (len(packed.input_ids), shape.layers, 1)), axis=2)
        routes = chosen[:, :, : shape.chosen].astype(np.uint8).reshape(len(packed.input_ids), -1)
        packed = replace(packed, routes=routes, shared_routes=(7, 3))
        counts = []
        for group in (None, sequence):
            _score_packed(model, packed, ForwardPlan(group=group))
            found = model._replayer.take_counts()
            counts.append(torch.tensor([int(value) for value in vars(found).values()]))
        dist.all_reduce(counts[1], group=sequence.group)
        assert torch.equal(*counts) and counts[0].all()
        assert_equal(model, packed, sequence, 1e-5)


def main(size: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    sequence = SequenceGroup.of_neighbours(int(size), CPU)
    for check in (check_own, check_small, check_options, check_kinds, check_routes):
        check(sequence)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
