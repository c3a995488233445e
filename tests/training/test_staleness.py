"""Rollouts and training at the same time: `max_staleness`."""

from __future__ import annotations

import pytest
from support.models import CPU_RUN, build_model
from support.trainers import Letters, Spelling

from mt_grpo.runlog import open_run
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer


def tokens_of(folder):
    """The tokens of each conversation of training, by its name."""
    found = {each["session"]: each["tree"]["nodes"] for each in open_run(folder).trajectories()}
    return {
        session: [node["tokens"] for node in nodes] for session, nodes in found.items() if session.startswith("train")
    }


@pytest.fixture
def sampled(tmp_path, tokenizer, questions):
    """Trains with conversations that the model samples itself. Returns the trainer and its conversations' tokens."""

    def train(name, resume=None, **options):
        folder = tmp_path / name
        options = {"output_dir": str(folder), **CPU_RUN, "max_completion_length": 200, "max_steps": 6, **options}
        trainer = MTGRPOEnvTrainer(
            build_model(tokenizer),
            Spelling(system_prompt="", max_steps=2),
            (),
            (Letters(),),
            MTGRPOConfig(**options),
            train_dataset=questions,
            processing_class=tokenizer,
        )
        trainer.train(resume)
        return trainer, tokens_of(folder)

    return train


def test_without_learning_staleness_changes_no_conversation(sampled):
    _, expected = sampled("0", learning_rate=0.0)
    assert len(expected) == 24
    for staleness in (1, 2, 4):
        trainer, found = sampled(str(staleness), learning_rate=0.0, max_staleness=staleness)
        assert found == expected
        print(
            [
                {k: v for k, v in row.items() if "stal" in k or "ready" in k or "wait" in k or "sync" in k}
                for row in trainer.state.log_history
            ]
        )
