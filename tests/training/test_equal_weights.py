"""The number by which processes tell whether they begin with the same weights."""

from __future__ import annotations

import torch
from support.memory import peak_memory

from mt_grpo.training.ranks import _number


def test_a_large_weight_is_added_up_in_little_memory():
    weight = torch.ones(2**26, dtype=torch.uint8)
    assert peak_memory(lambda: _number({"weight": weight})) < 2**28  # as 64-bit numbers it has twice as much


def test_another_bit_anywhere_is_another_number():
    found = set()
    for place in (None, 0, 2**22, 2**22 + 1):
        weights = {"weight": torch.ones(2**23, dtype=torch.bfloat16), "scale": torch.tensor(1.0)}
        if place is not None:
            weights["weight"][place] += 2**-7
        found.add(_number(weights))
    assert len(found) == 2  # its place does not count
