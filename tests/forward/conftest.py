"""A model that tests of this room share."""

from __future__ import annotations

import pytest
from support.models import build_model


@pytest.fixture(scope="module")
def shared_model(tokenizer):
    return build_model(tokenizer)


@pytest.fixture(scope="module")
def exact_model(tokenizer):
    """The same in float64: what rounding alone does is far below any bound."""
    return build_model(tokenizer).double()
