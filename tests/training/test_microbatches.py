"""Rows of a batch are dealt to micro-batches and ranks: whole groups, and as much work each."""

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from mt_grpo.forward.media import MediumInputs
from mt_grpo.forward.routes import NO_ROUTE
from mt_grpo.rollout import TokenRow
from mt_grpo.training.rollout_batch import IMAGES, _assign, batch_trees, rebalance, row_tree, token_columns


def batch_of(groups, start, length=2):
    """Rows of some groups, each of other tokens, which begin with its group."""
    size = len(groups)
    ones = torch.ones(size, length, dtype=torch.long)
    ids = torch.tensor(groups)[:, None] * ones
    return {
        "prompt_ids": ids[:, :2],
        "prompt_mask": ones[:, :2],
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


@pytest.mark.parametrize(
    ("groups", "size", "dealt"),
    [
        ([[1, 2]] * 4, 4, [[1, 1], [1, 1], [2, 2], [2, 2]]),  # a group fills micro-batches
        ([[1, 2, 1], [2, 1, 2]], 2, [[1, 1, 1], [2, 2, 2]]),  # a group fits none: its rows lie next to each other
    ],
)
def test_a_group_larger_than_a_micro_batch_lies_together(groups, size, dealt):
    found = rebalance([batch_of(each, 10 * (1 + number)) for number, each in enumerate(groups)], size)
    assert sorted(batch["group_ids"].tolist() for batch in found) == dealt


def test_what_branches_of_a_rewritten_history_share_weighs_once():
    batches = [batch_of([1, 2, 3, 4], start, length=8) for start in (10, 20)]
    for batch in batches:
        batch["completion_ids"] = batch["group_ids"][:, None] + torch.tensor([5, 6, 7, 8] * 2)
        branches = torch.tensor([-1, 0, 1, 2, -1, 4, 5, 6])  # the second is the first once more
        batch["parent"] = torch.stack([branches, torch.arange(-1, 7)] * 2)
    for batch in rebalance(batches, 2):
        assert len({1, 3} & set(batch["group_ids"].tolist())) == 1


def test_padding_that_no_row_needs_goes():
    batch = batch_of([1, 1], 10)
    sides = {"prompt": (3, 0), "completion": (0, 3)}
    batch |= {
        f"{part}_{kind}": pad(batch[f"{part}_{kind}"], sides[part]) for part in sides for kind in ("ids", "mask")
    }
    (dealt,) = rebalance([batch], 2)
    assert dealt["prompt_ids"].tolist() == [[1, 1]] * 2 and dealt["completion_ids"].tolist() == [[11, 11], [12, 12]]


def test_ranks_run_work_of_the_same_size_at_the_same_time():
    plan = _assign([10, 1, 1, 10, 5, 5], ranks=2, steps=3)
    assert [sorted(piece for bin in step for piece in bin) for step in plan] == [[0, 3], [1, 2], [4, 5]]
    assert _assign([4, 3, 2, 1], ranks=2, steps=2) == [[[0], [1]], [[3], [2]]]  # the larger for who had less


def test_every_rank_gets_as_many_pieces_and_as_much_work():
    weights = torch.randn(64, generator=torch.Generator().manual_seed(0)).mul(0.5).exp().tolist()
    plan = _assign(weights, ranks=4, steps=2)
    assert sorted(piece for step in plan for bin in step for piece in bin) == list(range(64))
    assert {len(bin) for step in plan for bin in step} == {8}
    loads = [sum(weights[piece] for step in plan for piece in step[rank]) for rank in range(4)]
    assert max(loads) < 1.05 * min(loads)


def test_ratios_are_padded_with_one():
    """TRL's VESPO multiplies the ratios of all columns."""
    batch = batch_of([1, 1, 2, 2], 10, length=3)
    batch["completion_mask"] = torch.tensor([[1, 1, 1]] * 2 + [[1, 0, 0]] * 2)
    batch["importance_sampling_ratio"] = torch.ones(4, 3)
    (dealt,) = rebalance([batch], 2)
    assert dealt["completion_mask"].sum() == 8 and dealt["importance_sampling_ratio"].eq(1).all()


def test_columns_of_a_batch_give_the_trees_of_its_rows():
    image = MediumInputs(2, {"pixel_values": torch.ones(2, 3)})
    forked = TokenRow([1, 2, 3], [4, 5, 6, 7], [1, 0, 1, 1], [0, 0, 1, 1], [0.0] * 4, [-1, 0, -2, 2])
    forked.prompt_routes, forked.routes = bytes(range(6)), bytes(range(8))
    shown = TokenRow([-9, -9], [4, 5], [1, 1], [0, 0], [0.0] * 2, [-1, 0], media={-9: image})
    output = {
        "prompt_ids": [[1, 2, 3], [0, 8, 8]],
        "prompt_mask": [[1, 1, 1], [0, 1, 1]],
        "completion_ids": [[4, 5, 6, 7], [4, 5, 0, 0]],
        "completion_mask": [[1, 1, 1, 1], [1, 1, 0, 0]],
        "tool_mask": [[1, 0, 1, 1], [1, 1, 1, 1]],
    }
    output = {name: torch.tensor(column) for name, column in output.items()}
    columns = output | token_columns([forked, shown], output)
    assert columns[IMAGES] == [{}, {-9: (2, image.inputs)}] and output["prompt_ids"][1].tolist() == [0, 8, 8]
    for tree, row in zip(batch_trees(columns), (forked, shown), strict=True):
        expected = row_tree(row)
        assert tree.tokens.tolist() == expected.tokens.tolist() and tree.turns.tolist() == expected.turns.tolist()
        assert [path.tolist() for path in tree.paths()] == [path.tolist() for path in expected.paths()]
        routes = np.full((len(tree.tokens), 2), NO_ROUTE) if expected.routes is None else expected.routes
        assert np.array_equal(tree.routes, routes)
