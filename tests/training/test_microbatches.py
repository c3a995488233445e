"""Rows of a batch are dealt to micro-batches and ranks: whole groups, and as much work each."""

from __future__ import annotations

import numpy as np
import torch

from mt_grpo.forward.media import MediumInputs
from mt_grpo.forward.routes import NO_ROUTE
from mt_grpo.rollout import TokenRow
from mt_grpo.training.rollout_batch import IMAGES, assign, batch_trees, rebalance, row_tree, token_columns


def batch_of(groups, start):
    size = len(groups)
    ones = torch.ones(size, 2, dtype=torch.long)
    ids = torch.tensor([[group, group] for group in groups])
    return {
        "prompt_ids": ids,
        "prompt_mask": ones,
        "completion_ids": ids + torch.arange(start, start + size)[:, None],
        "completion_mask": ones,
        "tool_mask": ones,
        "turn_ids": 0 * ones,
        "group_ids": torch.tensor(groups),
        "num_items_in_batch": torch.tensor(8),
        "ref_per_token_logps": None,
    }


def test_a_group_meets_in_one_micro_batch_and_no_row_is_lost():
    batches = [batch_of([1, 2, 3, 4], 10), batch_of([4, 3, 2, 1], 20)]
    dealt = rebalance(batches, 2)
    for batch in dealt:
        assert len(set(batch["group_ids"].tolist())) == 2
        assert batch["prompt_ids"][:, 0].equal(batch["group_ids"])
        assert batch["num_items_in_batch"] == 8 and batch["ref_per_token_logps"] is None
    before, after = (torch.cat([batch["completion_ids"] for batch in each])[:, 0] for each in (batches, dealt))
    assert before.sort().values.equal(after.sort().values)


def test_a_group_larger_than_a_micro_batch_fills_micro_batches():
    dealt = rebalance([batch_of([1, 2], start) for start in (10, 20, 30, 40)], 4)
    assert sorted(batch["group_ids"].tolist() for batch in dealt) == [[1, 1], [1, 1], [2, 2], [2, 2]]


def test_groups_that_fit_no_micro_batch_lie_next_to_each_other():
    dealt = rebalance([batch_of([1, 2, 1], 10), batch_of([2, 1, 2], 20)], 2)
    assert torch.cat([batch["group_ids"] for batch in dealt]).tolist() == [1, 1, 1, 2, 2, 2]


def test_what_branches_of_a_rewritten_history_share_weighs_once():
    batches = [batch_of([1, 2, 3, 4], start) for start in (10, 20)]
    for batch in batches:
        size = len(batch["group_ids"])
        batch["completion_ids"] = batch["group_ids"][:, None] + torch.tensor([5, 6, 7, 8] * 2)
        batch["completion_mask"] = batch["tool_mask"] = torch.ones(size, 8, dtype=torch.long)
        batch["turn_ids"] = torch.zeros(size, 8, dtype=torch.long)
        branches = torch.tensor([-1, 0, 1, 2, -1, 4, 5, 6])  # the second is the first once more
        chain = torch.arange(-1, 7)
        batch["parent"] = torch.stack([branches if group in (1, 3) else chain for group in (1, 2, 3, 4)])
    for batch in rebalance(batches, 2):
        assert len({1, 3} & set(batch["group_ids"].tolist())) == 1


def test_padding_that_no_row_needs_goes():
    batch = batch_of([1, 1], 10)
    batch["prompt_ids"], batch["prompt_mask"] = (
        torch.nn.functional.pad(batch[key], (3, 0)) for key in batch if key.startswith("prompt_")
    )
    batch["completion_ids"], batch["completion_mask"] = (
        torch.nn.functional.pad(batch[key], (0, 3)) for key in batch if key.startswith("completion_")
    )
    (dealt,) = rebalance([batch], 2)
    assert dealt["prompt_ids"].tolist() == [[1, 1]] * 2 and dealt["completion_ids"].tolist() == [[11, 11], [12, 12]]


def test_ranks_run_work_of_the_same_size_at_the_same_time():
    plan = assign([10, 1, 1, 10, 5, 5], ranks=2, steps=3)
    assert [sorted(piece for bin in step for piece in bin) for step in plan] == [[0, 3], [1, 2], [4, 5]]


def test_every_rank_gets_as_many_pieces_and_as_much_work():
    weights = torch.randn(64, generator=torch.Generator().manual_seed(0)).mul(0.5).exp().tolist()
    plan = assign(weights, ranks=4, steps=2)
    assert sorted(piece for step in plan for bin in step for piece in bin) == list(range(64))
    assert {len(bin) for step in plan for bin in step} == {8}
    loads = [sum(weights[piece] for step in plan for piece in step[rank]) for rank in range(4)]
    assert max(loads) < 1.05 * min(loads)


def test_ratios_are_padded_with_one():
    """TRL's VESPO multiplies the ratios of all columns."""
    batches = [batch_of([1, 1, 2, 2], 10)]
    batches[0]["completion_ids"] = torch.ones(4, 3, dtype=torch.long)
    batches[0]["completion_mask"] = torch.tensor([[1, 1, 1]] * 2 + [[1, 0, 0]] * 2)
    batches[0]["importance_sampling_ratio"] = torch.ones(4, 3)
    (dealt,) = rebalance(batches, 2)
    assert dealt["completion_mask"].sum() == 8
    assert dealt["importance_sampling_ratio"].eq(1).all()


def test_columns_of_a_batch_give_the_trees_of_its_rows():
    image = MediumInputs(2, {"pixel_values": torch.ones(2, 3)})
    forked = TokenRow([1, 2, 3], [4, 5, 6, 7], [1, 0, 1, 1], [0, 0, 1, 1], [0.0] * 4, [-1, 0, -2, 2])
    forked.prompt_routes, forked.routes = bytes(range(6)), bytes(range(8))
    shown = TokenRow([-9, -9], [4, 5], [1, 1], [0, 0], [0.0] * 2, [-1, 0], media={-9: image})
    output = {
        "prompt_ids": torch.tensor([[1, 2, 3], [0, 8, 8]]),
        "prompt_mask": torch.tensor([[1, 1, 1], [0, 1, 1]]),
        "completion_ids": torch.tensor([[4, 5, 6, 7], [4, 5, 0, 0]]),
        "completion_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
        "tool_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]]),
    }
    columns = output | token_columns([forked, shown], output)
    assert columns[IMAGES] == [{}, {-9: (2, image.inputs)}] and output["prompt_ids"][1].tolist() == [0, 8, 8]
    for tree, row in zip(batch_trees(columns), (forked, shown), strict=True):
        expected = row_tree(row)
        assert tree.tokens.tolist() == expected.tokens.tolist() and tree.turns.tolist() == expected.turns.tolist()
        assert [path.tolist() for path in tree.paths()] == [path.tolist() for path in expected.paths()]
        routes = np.full((len(tree.tokens), 2), NO_ROUTE) if expected.routes is None else expected.routes
        assert np.array_equal(tree.routes, routes)
