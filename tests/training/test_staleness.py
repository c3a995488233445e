"""Rollouts and training at the same time: `max_staleness`."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from support.models import CPU_RUN, build_model
from support.trainers import Answered, Calls, Letters, Spelling, conversation
from transformers import TrainerCallback

from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.rollout import ScriptedEngine
from mt_grpo.runlog import open_run
from mt_grpo.training import MTGRPOConfig, MTGRPOEnvTrainer


def tokens_of(folder):
    """The tokens of each conversation of training, by its name."""
    found = {each["session"]: each["tree"]["nodes"] for each in open_run(folder).trajectories()}
    return {
        session: [node["tokens"] for node in nodes] for session, nodes in found.items() if session.startswith("train")
    }


def logged(trainer, name):
    return [row[name] for row in trainer.state.log_history if name in row]


@pytest.fixture
def sampled(tmp_path, tokenizer, questions):
    """Trains with conversations that the model samples itself. Returns the trainer and its conversations' tokens."""

    def train(name, resume=None, callback=None, **options):
        folder = tmp_path / name
        options = {"output_dir": str(folder), **CPU_RUN, "max_completion_length": 200, "max_steps": 6, **options}
        trainer = MTGRPOEnvTrainer(
            build_model(tokenizer),
            Spelling(system_prompt="", max_steps=2),
            (),
            (Letters(),),
            MTGRPOConfig(**options),
            train_dataset=questions,
            eval_dataset=questions.select(range(2)),
            processing_class=tokenizer,
        )
        if callback is not None:
            trainer.add_callback(callback)
        trainer.train(resume)
        return trainer, tokens_of(folder)

    return train


def test_without_learning_staleness_changes_no_conversation(sampled):
    trainer, expected = sampled("0", learning_rate=0.0)
    assert len(expected) == 24 and not logged(trainer, "staleness/mean")
    for staleness in (1, 2, 4):
        trainer, found = sampled(str(staleness), learning_rate=0.0, max_staleness=staleness)
        assert found == expected
        assert logged(trainer, "staleness/max")[:3] == [0.0, 1.0, min(2.0, staleness)]
        assert max(logged(trainer, "staleness/max")) <= staleness


class Gate(ScriptedEngine):
    """Answers the conversations of a batch only once they may; tells which batches have been asked for."""

    def __init__(self, tokenizer, may):
        super().__init__(tokenizer, conversation)
        self.asked, self._may = [], may

    async def generate(self, context, sampling, session):
        step = int(session.split("-")[1])
        if session.startswith("train") and step not in self.asked:
            self.asked.append(step)
        while session.startswith("train") and not self._may(step):
            await asyncio.sleep(0.001)
        return await super().generate(context, sampling, session)


def gated(tmp_path, tokenizer, questions, may, **options):
    options = {"output_dir": str(tmp_path), **CPU_RUN, "max_completion_length": 400, "max_steps": 4, **options}
    return MTGRPOEnvTrainer(
        build_model(tokenizer),
        MultiTurnToolEnv([], system_prompt="", max_steps=3),
        (Calls(),),
        (Answered(),),
        MTGRPOConfig(**options),
        train_dataset=questions,
        eval_dataset=questions,
        engine=Gate(tokenizer, may),
        processing_class=tokenizer,
    )


class AtStep(TrainerCallback):
    def __init__(self, event, step, action):
        setattr(
            self, event, lambda args, state, control, **kwargs: action(control) if state.global_step == step else None
        )


@pytest.mark.parametrize(("staleness", "asked"), [(1, [0, 1]), (2, [0, 1, 2]), (8, [0, 1, 2, 3])])
def test_a_batch_begins_so_many_batches_early(tmp_path, tokenizer, questions, staleness, asked):
    """While the first step is taken, that many later batches have begun; none past the last step."""
    seen = []
    engine = None
    trainer = gated(tmp_path, tokenizer, questions, lambda step: True, max_staleness=staleness)
    engine = trainer.runner.engine

    def look(control):
        while len(engine.asked) < len(asked):
            pass
        seen.append(list(engine.asked))

    trainer.add_callback(AtStep("on_pre_optimizer_step", 0, look))
    trainer.train()
    assert seen == [asked] and engine.asked == [0, 1, 2, 3]
    assert not trainer.runner.under_way


def test_nothing_is_ahead_and_no_thread_with_staleness_0(tmp_path, tokenizer, questions):
    trainer = gated(tmp_path, tokenizer, questions, lambda step: True)
    seen = []
    trainer.add_callback(
        AtStep("on_pre_optimizer_step", 0, lambda control: seen.append(list(trainer.runner.engine.asked)))
    )
    before = {thread.name for thread in threading.enumerate()}
    trainer.train()
    assert seen == [[0]]
    assert {thread.name for thread in threading.enumerate()} <= before | {"mt-grpo-background"}


def test_an_evaluation_leaves_batches_in_flight_alone(tmp_path, tokenizer, questions):
    """Batch 1 is under way while the evaluation after step 1 is made, and ends after it."""
    may = threading.Event()
    trainer = gated(tmp_path, tokenizer, questions, lambda step: step < 2 or may.is_set(), max_staleness=1)

    class After(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                control.should_evaluate = True

        def on_evaluate(self, args, state, control, **kwargs):
            assert sorted(trainer.runner.under_way) == [f"train-000002-000000-{row:06d}" for row in range(4)]
            may.set()

    trainer.add_callback(After())
    trainer.train()
    assert trainer.state.global_step == 4 and len(trainer.eval_trajectories) > 0
    assert len(tokens_of(tmp_path)) == 16


def test_a_run_that_stops_ends_what_is_under_way(tmp_path, tokenizer, questions):
    trainer = gated(tmp_path, tokenizer, questions, lambda step: step == 0, max_staleness=2)
    stop = AtStep("on_step_end", 1, lambda control: setattr(control, "should_training_stop", True))
    trainer.add_callback(stop)
    trainer.train()
    assert trainer.state.global_step == 1 and not trainer.runner.under_way


def test_an_interrupted_run_keeps_what_is_finished(tmp_path, tokenizer, questions):
    """Conversations of a waiting batch that are finished are not sampled again; the others are."""

    def answers(session, turn):
        return conversation(session, turn)

    class Some(Gate):
        async def generate(self, context, sampling, session):
            if session in ("train-000001-000000-000001", "train-000001-000000-000003"):
                await asyncio.Event().wait()
            return await super().generate(context, sampling, session)

    def build(engine, folder, **options):
        return MTGRPOEnvTrainer(
            build_model(tokenizer),
            MultiTurnToolEnv([], system_prompt="", max_steps=3),
            (Calls(),),
            (Answered(),),
            MTGRPOConfig(
                output_dir=str(folder),
                **{**CPU_RUN, "save_strategy": "steps"},
                save_steps=1,
                max_completion_length=400,
                max_steps=3,
                max_staleness=1,
                **options,
            ),
            train_dataset=questions,
            engine=engine,
            processing_class=tokenizer,
        )

    whole = build(Gate(tokenizer, lambda step: True), tmp_path / "whole")
    whole.train()
    engine = Some(tokenizer, lambda step: True)
    cut = build(engine, tmp_path / "cut")

    class Interrupt(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **kwargs):
            while len(cut.runner.under_way) != 2:  # the other two are finished
                pass

        def on_save(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    cut.add_callback(Interrupt())
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    engine = Gate(tokenizer, lambda step: True)
    resumed = build(engine, tmp_path / "cut")
    resumed.train(str(tmp_path / "cut" / "checkpoint-1"))
    again = {session for session, _, _ in engine.requests if session.startswith("train-000001")}
    assert again == {"train-000001-000000-000001", "train-000001-000000-000003"}
    assert tokens_of(tmp_path / "cut") == tokens_of(tmp_path / "whole")
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
