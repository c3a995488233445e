"""Fixtures that all rooms share; tiny models and tokenizers are made once per test run."""

from __future__ import annotations

import gc
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# models are so small that more threads only wait for each other, here and in what is started
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from datasets import Dataset
from support.benchmarks import bench
from support.endpoints import endpoint
from support.models import build_model, build_tokenizer, lookup
from support.own_process import pytest_pyfunc_call
from support.sent_reports import pytest_report_to_serializable
from support.trainers import trainer_builder
from support.upstreams import start
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

# hooks, and fixtures
__all__ = ["bench", "endpoint", "pytest_pyfunc_call", "pytest_report_to_serializable", "start"]

# what tests start in processes of their own may use what tests share
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """
    Processes that share the tests take one file after another: those that last go first, since one of them at the end
    would leave the other processes without work.
    """
    if hasattr(config, "workerinput"):
        marks: dict[Path, set[str]] = {}
        for item in items:
            marks.setdefault(item.path, set()).update(mark.name for mark in item.iter_markers())
        items.sort(key=lambda item: ("server" not in marks[item.path], "slow" not in marks[item.path]))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Every training collects garbage; what was imported need not be searched each time."""
    gc.collect()
    gc.freeze()


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
