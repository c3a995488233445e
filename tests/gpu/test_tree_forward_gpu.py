"""The packed forward on a GPU: FlexAttention, forward and backward, against one forward per turn."""

import random

import pytest
import torch
from support.models import build_model, build_tokenizer

from mt_grpo.token_tree import TokenTree
from mt_grpo.training import token_logps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def trees(seed: int, vocabulary: int) -> list[TokenTree]:
    """A group of four that shares its prompt, thinking stripped from the history of each member."""
    rng = random.Random(seed)
    prompt = [rng.randrange(vocabulary) for _ in range(100)]
    group = []
    for _ in range(4):
        tree, history = TokenTree(), list(prompt)
        for _ in range(4):
            action = [rng.randrange(vocabulary) for _ in range(rng.randint(20, 60))]
            tree.add_turn(history, action, [0.0] * len(action))
            history = history + action[len(action) // 2 :] + [rng.randrange(vocabulary) for _ in range(17)]
        group.append(tree)
    return group


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_scores_and_learns_as_one_forward_a_turn(dtype):
    model = build_model(build_tokenizer(), hidden_size=64, head_dim=32, max_position_embeddings=2048).cuda().to(dtype)
    batch = trees(0, model.config.vocab_size)
    results = []
    for options in ({"attention": "flex"}, {"forward": "turn_by_turn"}):
        model.zero_grad()
        logps = torch.cat([turn for tree in token_logps(model, batch, **options) for turn in tree])
        logps.mean().backward()
        gradient = torch.cat([p.grad.flatten().float() for p in model.parameters()])
        results.append((logps.detach().float(), gradient))
    bound = 1e-4 if dtype == torch.float32 else 5e-2  # FlexAttention multiplies float32 in TF32
    for ours, oracle in zip(*results, strict=True):
        assert (ours - oracle).norm() <= bound * oracle.norm()
