"""Beginning, resuming and ending a run: what would mix two runs, train nothing or save nonsense is refused."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from datasets import IterableDataset
from support.trainers import Letters

from mt_grpo.cli import main
from mt_grpo.errors import ConfigError
from mt_grpo.rewards import OutcomeReward
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.model import NonFiniteError
from mt_grpo.training.preflight import LOCK, check_folder, clear_folder, left_by_runs, locked

SAVE = ("--save_strategy", "steps", "--save_steps", "1", "--do_eval", "false")


def steps(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open() if '"loss"' in line]


# Resuming


@pytest.mark.parametrize(
    ("options", "made", "here"),
    [
        ({"steps_per_generation": 4}, "`steps_per_generation: 2`", "`steps_per_generation: 4`"),
        ({"num_generations": 2}, "`num_generations: 4`", "`num_generations: 2`"),
        ({"per_device_train_batch_size": 8}, "`per_device_train_batch_size: 4`", "`per_device_train_batch_size: 8`"),
        ({"gradient_accumulation_steps": 2}, "`gradient_accumulation_steps: 1`", "`gradient_accumulation_steps: 2`"),
        ({"num_iterations": 2}, "`num_iterations: 1`", "`num_iterations: 2`"),
        ({"beta": 0.1}, "`beta: 0.0`", "`beta: 0.1`"),
    ],
)
def test_a_checkpoint_of_other_batches_is_refused(build, model, tmp_path, options, made, here):
    model.save_pretrained(tmp_path / "model")  # a reference model is loaded from there
    options = {"steps_per_generation": 2, **options}
    kept = {"model": str(tmp_path / "model"), "max_steps": 1}
    build(**kept, steps_per_generation=2, save_strategy="steps", save_steps=1).train()
    with pytest.raises(ConfigError, match=f"was made with {made}, and this run has {here}: resume with") as caught:
        build(**kept, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert "\n" not in str(caught.value)


def test_other_batches_are_refused_before_the_model_is_loaded(recipe, tmp_path, capsys):
    assert main(["train", *recipe(), *SAVE, "--max_steps", "1"]) == 0
    keys = {"model_name_or_path": str(tmp_path), "num_generations": 4, "resume_from_checkpoint": "true"}
    assert main(["train", *recipe(**keys), *SAVE]) == 1
    assert "was made with `num_generations: 2`, and this run has `num_generations: 4`" in capsys.readouterr().err


def test_a_checkpoint_without_batch_sizes_resumes_with_a_warning(build, tmp_path, caplog):
    build(save_strategy="steps", save_steps=1).train()
    path = tmp_path / "checkpoint-1" / "rollouts-rank0.pt"
    state = torch.load(path, weights_only=True)
    del state["options"]
    torch.save(state, path)
    trainer = build()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert trainer.state.global_step == 2 and "does not say with which batch sizes" in caplog.text


@pytest.mark.parametrize("max_steps", [2, 1])
def test_a_finished_run_takes_no_further_step(build, tmp_path, caplog, max_steps):
    whole = build(None, rewards=((), (Letters(),)), save_strategy="steps", save_steps=1)
    whole.train()
    resumed = build(None, rewards=((), (Letters(),)), max_steps=max_steps)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 2 and steps(tmp_path) == [1, 2]
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)  # what is saved or measured after that is the trained model
    assert f"is at step 2 of {max_steps}, and takes no further step" in caplog.text


# Another run's folder


def test_a_used_folder_is_refused_unless_resumed_or_overwritten(recipe, tmp_path, capsys):
    folder = tmp_path / "run"
    assert main(["train", *recipe(), *SAVE]) == 0
    (folder / "notes.txt").write_text("mine")
    (folder / "checkpoint-best").mkdir()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    capsys.readouterr()
    assert main(["train", *recipe(), *SAVE]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "holds an earlier run" in line and "metrics.jsonl" in line
    assert "--resume_from_checkpoint true" in line and "--overwrite_output_dir true" in line
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert main(["train", *recipe(), *SAVE, "--overwrite_output_dir", "true", "--max_steps", "1"]) == 0
    assert steps(folder) == [1] and json.loads((folder / "summary.json").read_text())["steps"] == 1
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-best"]
    assert (folder / "notes.txt").read_text() == "mine"
    resume = ("--resume_from_checkpoint", "true", "--overwrite_output_dir", "true")
    assert main(["train", *recipe(), *SAVE, *resume]) == 0  # of the run that is there, which stays
    assert steps(folder) == [1, 2]
    assert main(["train", *recipe(), *SAVE, *resume]) == 0
    assert steps(folder) == [1, 2]


def test_a_checkpoint_elsewhere_does_not_open_a_used_folder(recipe, tmp_path, capsys):
    assert main(["train", *recipe(), *SAVE, "--max_steps", "1"]) == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text("{}\n")
    keys = {"output_dir": str(tmp_path / "other"), "resume_from_checkpoint": str(tmp_path / "run" / "checkpoint-1")}
    assert main(["train", *recipe(**keys), *SAVE]) == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "holds an earlier run (metrics.jsonl): remove it and begin anew" in line


def test_the_model_that_a_run_begins_with_is_not_overwritten(recipe, model_folder, tmp_path, capsys):
    folder = shutil.copytree(model_folder, tmp_path / "run")
    assert main(["train", *recipe(model_name_or_path=str(folder), overwrite_output_dir=True)]) == 1
    assert "which `overwrite_output_dir: true` clears" in capsys.readouterr().err
    assert (folder / "model.safetensors").exists()


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "trajectories.jsonl", "rollouts", "summary.json", "model.safetensors", "checkpoint-3"]
)
def test_what_counts_as_used(tmp_path, name):
    if name.startswith("checkpoint"):
        (tmp_path / name).mkdir()
        assert not left_by_runs(str(tmp_path))
        (tmp_path / name / "trainer_state.json").touch()
    elif name == "rollouts":
        (tmp_path / name).mkdir()
        assert not left_by_runs(str(tmp_path))
        (tmp_path / name / "train-0-0.rank1.parquet").touch()
    else:
        (tmp_path / name).touch()
    assert [path.name for path in left_by_runs(str(tmp_path))] == [name]


def test_from_python_records_are_appended_with_a_warning(build, tmp_path, caplog):
    first = build(max_steps=1)
    first.train()
    first.train()  # the same run to its caller
    assert "holds an earlier run" not in caplog.text
    build(max_steps=1).train()
    assert "holds an earlier run (metrics.jsonl, audit.jsonl, rollouts), to whose records this one adds" in caplog.text
    assert steps(tmp_path) == [1, 1, 1]
    caplog.clear()
    cleared = build(max_steps=1)
    clear_folder(cleared.args)
    cleared.train()
    assert "holds an earlier run" not in caplog.text and steps(tmp_path) == [1]


# Runs that take no step


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"per_device_train_batch_size": 12}, "has 4 rows, and one batch takes 6 prompts (12 completions, 2 for each"),
        ({"per_device_train_batch_size": 12, "dataset_streaming": True}, "has 4 rows, and one batch takes 6 prompts"),
        ({"max_steps": None, "num_train_epochs": 0}, "`num_train_epochs` is 0"),
    ],
)
def test_a_run_that_could_take_no_step_is_refused(recipe, tmp_path, capsys, keys, message):
    assert main(["train", *recipe(**keys, model_name_or_path=str(tmp_path))]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("mt-grpo: ") and message in line
    assert not (tmp_path / "run").exists()


def test_rows_dropped_as_too_long_are_named(recipe, tmp_path, capsys):
    arguments = recipe(per_device_train_batch_size=10, do_eval=False, dataset_train_split="train[4:]")
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(json.dumps({"question": "word " * 600, "answer": "x"}) + "\n")
    assert main(["train", *arguments]) == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "has 4 rows left (1 were dropped, whose prompts are too long), and one batch takes 5 prompts" in line


def test_a_look_at_a_few_rows_needs_no_whole_batch(recipe, capsys):
    keys = {"per_device_train_batch_size": 12, "temperature": 0.0}
    assert main(["rollout", *recipe(**keys), "--num_prompts", "1"]) == 0
    assert "conversation 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_device_train_batch_size": 64}, "has 8 rows, and one batch takes 16 prompts"),
        ({"max_steps": 0}, "`max_steps` is 0"),
        ({"temperature": 0.0}, "`temperature: 0.0` cannot be trained"),
    ],
)
def test_from_python_it_is_refused_as_well(build, options, message):
    with pytest.raises(ConfigError, match=message):
        build(**options).train()


def test_a_stream_that_ends_before_the_first_step_saves_nothing(build, questions, tmp_path):
    passes = iter([8])  # enough rows at the first look, and one after that

    def rows():
        yield from questions.select(range(next(passes, 1)))

    trainer = build(per_device_train_batch_size=8, num_generations=4)
    trainer.train_dataset = IterableDataset.from_generator(rows)
    trainer.accelerator.dataloader_config.dispatch_batches = False  # as TRL sets it for a stream
    with pytest.raises(ConfigError, match="ended before step 1 of 2, so nothing was trained"):
        trainer.train()
    assert not list(tmp_path.glob("checkpoint-*"))


# Spoiled weights


class Spoils(OutcomeReward):
    """Puts NaN into a weight at the second call, as an optimiser step with a NaN gradient does."""

    model = None
    calls = 0

    def score(self, trajectory, **row):
        self.calls += 1
        if self.calls == 5:
            next(p for p in self.model.parameters() if p.requires_grad).data[0] = math.nan
        return float(self.calls % 3)


@pytest.mark.parametrize("save_strategy", ["no", "steps"])
def test_spoiled_weights_are_neither_saved_nor_a_success(build, tmp_path, save_strategy):
    reward = Spoils()
    trainer = build(rewards=((), (reward,)), save_strategy=save_strategy, save_steps=1)
    reward.model = trainer.model
    with pytest.raises(NonFiniteError, match="is not finite since an earlier step|after step 1"):
        trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"] * (save_strategy == "steps")


SPOILING = """
import gc, math
from pathlib import Path
from mt_grpo.rewards import OutcomeReward
from mt_grpo.training import MTGRPOEnvTrainer


class Spoils(OutcomeReward):
    calls = 0

    def score(self, trajectory, **row):
        self.calls += 1
        if self.calls == 5:
            trainers = [each for each in gc.get_objects() if isinstance(each, MTGRPOEnvTrainer)]
            run = str(Path(__file__).parent / "run")  # those of other tests may not be collected yet
            (trainer,) = [each for each in trainers if each.args.output_dir == run]
            next(trainer.model.parameters()).data[0] = math.nan
        return float(self.calls % 3)
"""


def test_a_spoiled_run_ends_with_one_sentence_and_no_model(recipe, tmp_path, capsys):
    (tmp_path / "spoil.py").write_text(SPOILING)
    keys = {"outcome_reward_funcs": [f"{tmp_path / 'spoil.py'}:Spoils"], "do_eval": False}
    assert main(["train", *recipe(**keys)]) == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("mt-grpo: Weights hold NaN or infinity after step 1")
    assert not list((tmp_path / "run").rglob("*.safetensors"))
    for line in (tmp_path / "run" / "metrics.jsonl").open():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


HOLDS = """
import sys
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.preflight import locked
with locked(MTGRPOConfig(sys.argv[1], use_cpu=True, bf16=False), "a/model"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def args(tmp_path):
    return MTGRPOConfig(str(tmp_path / "run"), use_cpu=True, bf16=False)


@pytest.fixture
def holder(args):
    command = [sys.executable, "-c", HOLDS, args.output_dir]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_run_is_refused_with_the_process_that_trains(args, holder):
    for overwrites in (False, True):
        args.overwrite_output_dir = overwrites
        with pytest.raises(ConfigError, match=f"is in use: process {holder.pid} on "), locked(args, "a/model"):
            pass
        with pytest.raises(ConfigError, match=f"is in use: process {holder.pid} on "):
            check_folder(args, "a/model")


def test_a_run_that_was_killed_holds_nothing(args, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    check_folder(args, "a/model")
    with locked(args, "a/model"):
        pass


def test_a_run_that_ended_leaves_no_lock(args):
    with locked(args, "a/model"):
        assert os.path.exists(os.path.join(args.output_dir, LOCK))
    assert not os.listdir(args.output_dir)


def test_a_block_within_another_keeps_the_lock(args):
    with locked(args, "a/model"):
        with locked(args):
            check_folder(args, "a/model")
        command = [sys.executable, "-c", HOLDS, args.output_dir]
        second = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert f"is in use: process {os.getpid()} on " in second.stderr
    assert not os.listdir(args.output_dir)


def test_a_trainer_in_python_is_kept_out_too(build, args, holder):
    trainer = build(output_dir=args.output_dir)
    with pytest.raises(ConfigError, match=f"is in use: process {holder.pid} on "):
        trainer.train()
    assert trainer.state.global_step == 0
    holder.kill()
    holder.wait()
    trainer.train()
    assert LOCK not in os.listdir(args.output_dir)
