"""Files and folders that a recipe names, looked for before torch is imported."""

from __future__ import annotations

import pytest

from mt_grpo.app.places import check_places, check_writable
from mt_grpo.errors import ConfigError

RECIPE = {"model_name_or_path": "embedded", "dataset_name": "embedded"}


def test_a_folder_of_somebody_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(ConfigError, match=f"cannot be written, since {tmp_path} is not yours to write to"):
        check_writable(str(tmp_path / "a" / "run"))


def test_only_what_a_command_needs_is_looked_for(tmp_path):
    values = RECIPE | {"tools": ["no_such.tool"], "dataset_name": "no.jsonl", "output_dir": __file__}
    check_places(values, "serve")
    check_places(RECIPE | {"output_dir": __file__}, "rollout")  # writes nothing
    check_places(RECIPE | {"tools": ["made_by_it.tool"], "external_plugins": ["plugin.py"]}, "train")
    assert not list(tmp_path.iterdir())


def test_one_name_stands_for_a_list_of_one():
    check_places(RECIPE | {"tools": "calculator", "turn_reward_funcs": "mt_grpo.rewards.TurnReward"}, "train")
    with pytest.raises(ValueError, match="there is no module 'no_such'"):
        check_places(RECIPE | {"outcome_reward_funcs": "no_such.reward"}, "rollout")
