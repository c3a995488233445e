"""Trainers for a test."""

from __future__ import annotations

import pytest
from support.trainers import trainer_builder


@pytest.fixture
def build(tmp_path, tokenizer, questions):
    return trainer_builder(tmp_path, tokenizer, questions)
