"""A reference that follows the policy goes on from a checkpoint as it was."""

from __future__ import annotations

import pytest
import torch
from support.trainers import Letters

from mt_grpo.training import ConfigError
from mt_grpo.training.model import REFERENCE

OPTIONS = {
    "max_steps": 5,
    "max_turn_length": 12,
    "learning_rate": 1e-2,
    "beta": 0.5,
    "sync_ref_model": True,
    "ref_model_sync_steps": 2,
    "ref_model_mixup_alpha": 0.7,
}


@pytest.fixture
def train(build, tmp_path, model):
    model.save_pretrained(tmp_path / "model")  # TRL loads the reference from there

    def train(name, resume=None, **options):
        options = {**OPTIONS, **options}
        trainer = build(None, str(tmp_path / "model"), ((), (Letters(),)), output_dir=str(tmp_path / name), **options)
        trainer.train(resume_from_checkpoint=resume and str(tmp_path / resume))
        return trainer

    return train


def test_a_resumed_run_has_the_reference_of_an_uninterrupted_one(train):
    whole = train("whole")
    train("cut", save_strategy="steps", save_steps=3)
    resumed = train("cut", resume="cut/checkpoint-3")
    assert any(row.get("kl") for row in whole.state.log_history)
    for kind in ("ref_model", "model"):
        for a, b in zip(getattr(whole, kind).parameters(), getattr(resumed, kind).parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_checkpoint_without_the_synced_reference_is_refused(train, tmp_path):
    train("cut", sync_ref_model=False, save_strategy="steps", save_steps=3, max_steps=3)
    assert not (tmp_path / "cut" / "checkpoint-3" / REFERENCE).exists()
    with pytest.raises(ConfigError, match="no synced reference"):
        train("cut", resume="cut/checkpoint-3")
