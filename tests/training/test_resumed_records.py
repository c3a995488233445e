"""A run that was killed anywhere leaves, once it is resumed, the records of one that was not."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from support.forked import Forked
from support.trainers import Answered, Calls, Letters, trainer_builder
from transformers.integrations import TensorBoardCallback

from mt_grpo.runlog import open_run
from mt_grpo.training.step_log import NumbersToTensorBoard

TIMES = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")
OPTIONS = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5, "lr_scheduler_type": "constant"}
OPTIONS |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8, "num_generations_eval": 1}

KILLED = f"""
import os, signal, sys
from pathlib import Path
from datasets import Dataset
from support.models import build_tokenizer
from support.trainers import trainer_builder
from mt_grpo.runlog import writer
from mt_grpo.training import resuming
from mt_grpo.training.step_log.records import Records

folder, moment = Path(sys.argv[1]), sys.argv[2]

def killing(function, when):
    def call(*arguments, **options):
        if when(*arguments):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call

if moment == "trained":  # conversations and credit are written
    Records.update = killing(Records.update, lambda records, update: update.number == 2)
elif moment == "logged":
    Records.log = killing(Records.log, lambda records, logs, number: number == 4)
elif moment == "saving":
    resuming.save_rollouts = killing(resuming.save_rollouts, lambda folder, *rest: folder.name == "checkpoint-4")
elif moment == "trimming":
    writer._keep = killing(writer._keep, lambda path, stays: path.name == "metrics.jsonl")

asked = [[{{"role": "user", "content": f"What is {{n}} of Peru"}}] for n in range(8)]
questions = Dataset.from_dict({{"prompt": asked, "answer": [[f"Lima {{n}}"] for n in range(8)]}})
build = trainer_builder(folder, build_tokenizer(), questions)
build(**{OPTIONS!r}).train(resume_from_checkpoint=True if moment == "trimming" else None)
"""


def records(folder: Path) -> tuple:
    run = open_run(folder)
    rows = [{k: v for k, v in row.items() if "seconds" not in k and k != "start"} for row in run.rows]
    metrics = [{k: v for k, v in line.items() if not k.endswith("_per_second")} for line in run.metrics()]
    metrics = [{k: v for k, v in line.items() if k not in TIMES and "runtime" not in k} for line in metrics]
    audit = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
    files = sorted(path.name for path in (folder / "rollouts").iterdir())
    written = [json.loads(line) for line in (folder / "rollouts" / "index.jsonl").read_text().splitlines()]
    kinds = [
        (line["kind"], line.get("session"), line.get("step"), line.get("file"))
        for line in written
        if line["kind"] != "run" and line.get("file") != "tokenizer/tokenizer.json"
    ]
    assert len(kinds) == len(set(kinds))
    return rows, [line["step"] for line in run.steps()], metrics[:-1], audit, files


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tokenizer, questions):
    folder = tmp_path_factory.mktemp("whole")
    trainer = trainer_builder(folder, tokenizer, questions)(**OPTIONS)
    trainer.train()
    return records(folder), [each.detach() for each in trainer.model.parameters()]


def killed(folder: Path, moment: str) -> None:
    script = folder.with_suffix(".py")
    script.write_text(KILLED)
    run = Forked([str(script), str(folder), moment], folder.with_suffix(".log"))
    assert run.wait(300) == -signal.SIGKILL, folder.with_suffix(".log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("moments", [["trained"], ["logged"], ["saving"], ["saving", "trimming"]], ids="-".join)
def test_a_killed_run_leaves_the_records_of_a_whole_one(moments, whole, tmp_path, tokenizer, questions):
    folder = tmp_path / "run"
    for moment in moments:
        killed(folder, moment)
    trainer = trainer_builder(folder, tokenizer, questions)(**OPTIONS)
    trainer.train(resume_from_checkpoint=True)
    found = records(folder)
    for ours, theirs in zip(found, whole[0], strict=True):
        assert ours == theirs
    assert all(map(torch.equal, [each.detach() for each in trainer.model.parameters()], whole[1]))


def test_going_back_says_which_checkpoints_stay(build, tmp_path, caplog):
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    build(**options).train()
    build(**options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    (said,) = [each.getMessage() for each in caplog.records if "goes on from step 1" in each.getMessage()]
    assert "the records of steps up to 3 were removed" in said and "(checkpoint-2, checkpoint-3)" in said
    assert [line["step"] for line in open_run(tmp_path).metrics() if "loss" in line] == [1, 2, 3]


def test_a_checkpoint_of_another_folder_trims_nothing(build, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1}
    build(max_steps=1, output_dir=str(tmp_path / "first"), **options).train()
    build(max_steps=3, output_dir=str(tmp_path / "second"), **options).train()
    again = build(max_steps=2, output_dir=str(tmp_path / "second"), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-1"))
    assert len([line for line in open_run(tmp_path / "second").metrics() if "loss" in line]) == 4


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
