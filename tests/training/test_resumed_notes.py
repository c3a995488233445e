"""What a resumed run and its records say: what differs from the checkpoint, and nothing that is no fault."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.trainers import Answered, Calls, Letters
from transformers.integrations import TensorBoardCallback

from mt_grpo.training.nonfinite import NumbersToTensorBoard

SAVED = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}


def resumed(build, tmp_path, caplog, **keys):
    """What is said when a run of one step goes on for another."""
    build(max_steps=1, **SAVED).train()
    caplog.clear()
    build(max_steps=2, **{"rewards": None, **keys}).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    return [record.getMessage() for record in caplog.records]


def test_a_run_that_is_resumed_as_it_was_says_nothing(build, tmp_path, caplog):
    said = resumed(build, tmp_path, caplog)
    assert not [message for message in said if "missing keys" in message or "was made with other" in message]


def test_other_rewards_of_a_checkpoint_are_named_once(build, tmp_path, caplog):
    said = resumed(build, tmp_path, caplog, rewards=((Calls(),), (Answered(), Letters())))
    (note,) = [message for message in said if "was made with other" in message]
    assert "rewards: Calls (1), Answered (1); here Calls (1), Answered (1), Letters (1)" in note
    assert "data" not in note and "tools" not in note


def test_a_checkpoint_that_does_not_say_is_resumed(build, tmp_path, caplog):
    build(max_steps=1, **SAVED).train()
    (tmp_path / "checkpoint-1" / "made_with.json").unlink()
    build(max_steps=2, rewards=((), (Letters(),))).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert not [record for record in caplog.records if "was made with other" in record.getMessage()]


def test_the_card_of_a_local_model_names_it(build, tmp_path):
    trainer = build(max_steps=1)
    trainer.model.config._name_or_path = str(tmp_path)
    trainer.create_model_card("agent")
    card = Path(tmp_path, "README.md").read_text()
    assert "None" not in card and f"fine-tuned version of `{tmp_path.name}`" in card
    assert "2505.11821" in card and "DeepSeekMath" not in card


def test_tensorboard_is_sent_numbers_only(build, tmp_path, caplog):
    pytest.importorskip("tensorboard")
    trainer = build(max_steps=1, report_to=["tensorboard"])
    kinds = [type(one) for one in trainer.callback_handler.callbacks if isinstance(one, TensorBoardCallback)]
    assert kinds == [NumbersToTensorBoard]
    callback = NumbersToTensorBoard()
    callback.on_train_begin(trainer.args, trainer.state, trainer.control)
    callback.on_log(trainer.args, trainer.state, trainer.control, logs={"reward": None, "loss": 1.0})
    assert "incorrect" not in caplog.text
