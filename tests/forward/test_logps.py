"""The head, the ways to score, the batches of a trainer, and the gradients of single turns."""

import numpy as np
import pytest
import torch
from support.forests import FOREST, make_tree
from transformers import GPT2Config, GPT2LMHeadModel

from mt_grpo.forward import _PERIOD, SIZE, TurnGradients, _Projection, token_logps
from mt_grpo.forward import lm_head as head
from mt_grpo.forward.lm_head import chunked_logps
from mt_grpo.forward.model import ForwardPlan, enable_trees, score
from mt_grpo.forward.packing import FlatTree
from mt_grpo.token_tree import TokenTree
from mt_grpo.training.forward_plan import score_batch
from mt_grpo.training.rollout_batch import batch_trees

FORWARDS = ("tree", "padded", "turn_by_turn")
TREES = [make_tree(timesteps) for timesteps in FOREST]
IDS = torch.tensor([[1, 2, 3]])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"forward": "fast"}, "`forward` is 'fast'; choose one of tree, padded, turn_by_turn"),
        ({"attention": "fast"}, "`attention` is 'fast'; choose one of auto, dense, flex, segment"),
        ({"temperature": 0.0}, "`temperature` is 0.0; set a number above 0"),
        ({}, "has the token 999, and the model's are 0 to 334"),
        ({"images": {-7: None}}, "has the token -8, and"),
    ],
)
def test_what_there_is_not_is_refused(model, options, problem):
    trees = [make_tree([([1, *options.get("images", [999]), -8], [2])])]
    with pytest.raises(ValueError, match=problem):
        token_logps(model, trees, **options)


@pytest.mark.parametrize("forward", FORWARDS)
def test_a_path_beyond_a_table_of_positions_is_refused(forward):
    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 40}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    (logps,) = token_logps(model, [make_tree([(list(range(30)), [2, 3])])], forward=forward)[0]
    assert logps.isfinite().all()
    with pytest.raises(ValueError, match="a path of 33 tokens, and the model has 32 positions: shorten it"):
        token_logps(model, [make_tree([(list(range(30)), [2, 3, 4])])], forward=forward)


def test_the_head_holds_no_more_logits_than_a_chunk(monkeypatch):
    monkeypatch.setitem(head.CHUNK_ELEMENTS, "cpu", 16 * 1000)
    rows = set()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            output = function(*args, **(kwargs or {}))
            if isinstance(output, torch.Tensor) and output.dim() == 2 and output.size(1) == 1000:
                rows.add(output.size(0))
            return output

    hidden, weight = torch.randn(200, 4, requires_grad=True), torch.randn(1000, 4)
    with Watch():
        sum(chunked_logps(hidden, weight, None, torch.zeros(200, dtype=torch.long))).sum().backward()
    assert max(rows) == 16


def test_logits_in_float32_are_computed_outside_autocast(model):
    seen = []
    model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].float()))
    enable_trees(model, cast_head_to_fp32=True)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        logps = score(model, ForwardPlan([make_tree([([1, 2, 3], [1, 2, 3])])])).logps
    expected = (seen[0] @ model.lm_head.weight.T).log_softmax(dim=-1).gather(1, IDS.T)[:, 0]
    torch.testing.assert_close(logps, expected)
    token_logps(model, TREES[:1])  # between steps
    assert model._head_in_float32


def test_a_batch_with_nothing_to_score_has_a_gradient_of_zero(model):
    enable_trees(model)
    trees = [FlatTree(np.array(tokens), np.full(4, -1)) for tokens in ([1, 2, 1, 2], [1, 3, 1, 3])]
    found = score_batch(model, ForwardPlan(trees), torch.ones(2, 4, dtype=torch.long), 2)
    (found.logps + found.entropies).sum().backward()
    assert all(p.grad.abs().max() == 0 for p in model.parameters())


def test_a_padded_batch_gives_the_log_probs_of_trained_tokens(model):
    """As TRL makes it."""
    columns = {
        "prompt_ids": torch.tensor([[0, 1, 2], [0, 1, 2], [3, 1, 2]]),
        "prompt_mask": torch.tensor([[0, 1, 1], [0, 1, 1], [1, 1, 1]]),
        "completion_ids": torch.tensor([[4, 5, 6, 7], [4, 6, 0, 0], [4, 5, 5, 0]]),
        "completion_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]),
        "tool_mask": torch.tensor([[1, 0, 1, 1]] * 3),
        "turn_ids": torch.tensor([[0, 0, 1, 1]] * 3),
    }
    ids, mask = (torch.cat([columns[f"prompt_{name}"], columns[f"completion_{name}"]], 1) for name in ("ids", "mask"))
    trained = columns["completion_mask"] * columns["tool_mask"]
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -5:-1]
    expected = logits.log_softmax(-1).gather(2, ids[:, -4:, None]).squeeze(2)
    enable_trees(model)
    for forward in FORWARDS:
        for size in (None, 2):
            found = score_batch(model, ForwardPlan(batch_trees(columns), forward=forward), mask, 4, size)
            torch.testing.assert_close(found.logps, expected * trained)
            assert (found.entropies > 0).equal(trained.bool())


def test_trees_of_several_rows_come_back_in_their_order(model, monkeypatch):
    trees = [TokenTree(), *TREES, TokenTree()]
    whole = token_logps(model, trees)
    monkeypatch.setattr("mt_grpo.forward.ROW_TOKENS", 9)
    found = token_logps(model, trees)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)
    assert [len(turn) for turn in found[1]] == [2, 1, 3] and found[0] == found[-1] == []
    for forward in FORWARDS:
        assert token_logps(model, [], forward=forward) == []
        assert token_logps(model, [TokenTree()], forward=forward) == [[]]


def test_two_models_of_one_configuration_both_run_over_trees(model):
    """As the reference model that TRL makes from the policy's configuration."""
    first, second = token_logps(model, TREES[:1]), type(model)(model.config)
    second.load_state_dict(model.state_dict())
    torch.testing.assert_close(token_logps(second, TREES[:1]), first)


def test_a_kernel_of_transformers_still_runs_in_other_forwards(model):
    expected = model(input_ids=IDS).logits
    model.config._attn_implementation = "flash_attention_2"
    enable_trees(model)
    torch.testing.assert_close(model(input_ids=IDS).logits, expected)


# Projected gradients of turns keep the inner products of the gradients themselves


def errors(one, other, seeds):
    """Of the inner products of two projections, in lengths of the two."""
    wanted, length = (one * other).sum().item(), (one.norm() * other.norm()).item()
    projections = [_Projection([one], seed) for seed in range(seeds)]
    return torch.tensor([((each([one]) @ each([other])).item() - wanted) / length for each in projections])


def test_inner_products_are_kept_in_the_mean_over_signs():
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(700, 40, generator=generator) for _ in range(2))
    found = errors(one, other + one, 40)
    assert abs(found.mean()) < 1 / SIZE**0.5 and found.std() < 2 / SIZE**0.5


def test_matrices_of_low_rank_lose_no_more_than_others():
    """Gradients of linear layers are such: all rows are multiples of one, and heavy columns lie in one place."""
    generator = torch.Generator().manual_seed(1)
    row = torch.randn(512, generator=generator)
    row[3] *= 30.0
    one, other = (torch.outer(torch.randn(512, generator=generator), row) for _ in range(2))
    assert errors(one, other, 20).abs().mean() < 2 / SIZE**0.5


def test_what_is_longer_than_the_signs_is_projected_whole():
    longer = torch.zeros(_PERIOD + 7)
    longer[-1] = 2.0
    assert [_Projection([longer])([each]).abs().sum().item() for each in (longer, None)] == [2.0, 0.0]


@pytest.mark.parametrize("forward", ["tree", "padded"])
def test_the_gradient_of_a_turn_is_that_of_its_log_probs(model, forward):
    """In a tree whose history was rewritten too; a masked token adds nothing."""
    parameters = [each for each in model.eval().parameters() if each.requires_grad]
    gradients, project = TurnGradients(model, forward=forward, temperature=0.7), _Projection(parameters)
    for tree in [*TREES, make_tree([([1, 2], [])])]:
        wanted = token_logps(model, [tree], forward="turn_by_turn", temperature=0.7)[0]
        for turn, logps in enumerate(wanted):
            found, ours = gradients.of_turn(tree, turn)
            assert found.shape == (SIZE,)
            if not len(logps):
                assert not found.any()
                continue
            exact = project(torch.autograd.grad(logps.sum(), parameters, retain_graph=True, allow_unused=True))
            torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(ours, logps.detach(), rtol=1e-4, atol=1e-5)
            assert not gradients.of_turn(tree, turn, [0] * len(logps))[0].any()
