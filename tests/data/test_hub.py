"""What is not here and cannot be fetched is refused at once."""

from __future__ import annotations

import pytest
from huggingface_hub import constants

from mt_grpo.data import load_rows
from mt_grpo.data.loaders import DatasetError
from mt_grpo.errors import ConfigError
from mt_grpo.training.model import resolve_model

NOBODY = "http://127.0.0.1:9"  # the port that discards; nothing listens there


@pytest.fixture
def closed(monkeypatch, tmp_path):
    """A machine without a network, and with an empty cache, whose folder this is."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", NOBODY)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fetched(cache, kind, file):
    """Puts a file of `some/thing` into a cache."""
    folder = cache / f"{kind}s--some--thing"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (folder / "snapshots" / ("0" * 40) / file).write_text("{}")


def test_a_model_on_a_hub_that_is_out_of_reach_is_refused(closed):
    with pytest.raises(ConfigError, match=rf"'some/thing' is neither .* {NOBODY} cannot be reached .*: name a folder"):
        resolve_model("some/thing")


def test_a_model_in_the_cache_needs_no_hub(closed):
    fetched(closed, "model", "config.json")
    assert resolve_model("some/thing") == "some/thing"


def test_a_model_that_is_not_cached_is_refused_offline(closed, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="since `HF_HUB_OFFLINE` is set"):
        resolve_model("some/thing")


def test_a_dataset_on_a_hub_that_is_out_of_reach_is_refused(closed):
    with pytest.raises(DatasetError, match=rf"'trivaqa' .* the nearest is 'triviaqa': .* {NOBODY} cannot be reached"):
        load_rows("trivaqa", "train")
