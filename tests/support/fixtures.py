"""Fixtures that all rooms share; tiny models and tokenizers are made once per test run."""

import os

import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from support.benchmarks import bench
from support.endpoints import endpoint
from support.models import build_model, build_tokenizer, lookup
from support.trainers import trainer_builder
from support.upstreams import start

__all__ = ["bench", "endpoint", "start"]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture
def model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    return build_model(tokenizer)


@pytest.fixture(scope="session")
def questions() -> Dataset:
    """Eight rows with a prompt and an answer."""
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": f"What is {number} of Peru"}], "answer": [f"Lima {number}"]}
            for number in range(8)
        ]
    )


@pytest.fixture
def search_tool():
    return lookup


@pytest.fixture
def build(tmp_path, tokenizer, questions):
    """Makes trainers on scripted conversations; see `trainer_builder`."""
    return trainer_builder(tmp_path, tokenizer, questions)


@pytest.fixture
def ghostscript(tmp_path, monkeypatch):
    """A program of this name; the path of what it writes."""
    program, trace = tmp_path / "gs", tmp_path / "started"
    program.write_text(f"#!/bin/sh\ntouch {trace}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return trace
