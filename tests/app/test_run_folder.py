"""Beginning, resuming, replaying and ending a run: what would mix two runs or train nothing is refused."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from datasets import IterableDataset
from safetensors.torch import load_file
from support.app_fixtures import SAVE, recipe_writer
from support.forked import Forked
from support.waiting import until

from mt_grpo.cli import main
from mt_grpo.errors import ConfigError
from mt_grpo.runlog import open_run
from mt_grpo.runlog.files import read_state
from mt_grpo.training.checkpoint import latest_checkpoint
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.preflight import LOCK, check_folder, clear_folder, left_by_runs, locked

OVERWRITE = ("--overwrite_output_dir", "true")
RESUME = ("--resume_from_checkpoint", "true")
LORA = ("--use_peft", "true", "--lora_r", "4", "--lora_target_modules", "all-linear")


def steps(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open() if '"loss"' in line]


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def trained(model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    assert main(["train", *recipe_writer(folder, model_folder)(**SAVE, learning_rate=0.01)]) == 0
    return folder


@pytest.fixture
def run(recipe, trained, tmp_path):
    """The folder of a run of two steps, with a checkpoint of each."""
    folder = shutil.copytree(trained / "run", tmp_path / "run")
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace(str(trained), str(tmp_path)))
    return folder


def test_a_reward_that_changes_the_folder_moves_no_records(recipe, prints, tmp_path, monkeypatch):
    """It is that of the whole process: as `contextlib.chdir` in two threads of tools leaves it."""
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "moving.py").write_text(
        f"import os\ndef moves(**row):\n    os.chdir({str(other)!r})\n    return [1.0] * 4"
    )
    monkeypatch.chdir(tmp_path)
    rewards = {"outcome_reward_funcs": ["moving.moves"], "turn_reward_funcs": None}
    printed = prints("train", *recipe(**rewards, **SAVE | {"do_eval": True}, output_dir="run"))
    assert "Written to run:" in printed and "  run/summary.json" in printed
    assert Path.cwd() == tmp_path and not contents(other) and latest_checkpoint("run") == Path("run/checkpoint-2")
    assert steps(tmp_path / "run") == [1, 2] and read_state(tmp_path / "run")["state"] == "finished"
    run = open_run("run")
    assert {(row["mode"], row["step"]) for row in run.rows} == {("eval", 0), ("train", 0), ("train", 1), ("eval", 2)}
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2


# Resuming


def test_a_run_is_resumed_from_its_latest_checkpoint(recipe, prints, run):
    (run / "checkpoint-9").mkdir()  # of a run that was killed while it wrote it
    prints("train", *recipe(**SAVE, max_steps=3), *RESUME)
    assert steps(run) == [1, 2, 3] and read_state(run)["first"] == 2  # from where the time that is left is told


def test_a_checkpoint_of_other_batches_is_refused(build, model, tmp_path):
    model.save_pretrained(tmp_path / "model")  # a reference model is loaded from there
    kept = {"model": str(tmp_path / "model"), "max_steps": 1, "steps_per_generation": 2}
    build(**kept, save_strategy="steps", save_steps=1).train()
    for option, made, here in (
        ("steps_per_generation", 2, 4),
        ("num_generations", 4, 2),
        ("per_device_train_batch_size", 4, 8),
        ("gradient_accumulation_steps", 1, 2),
        ("num_iterations", 1, 2),
        ("beta", 0.0, 0.1),
    ):
        said = f"was made with `{option}: {made}`, and this run has `{option}: {here}`: resume with[^\n]*$"
        with pytest.raises(ConfigError, match=said):
            build(**{**kept, option: here}).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_other_batches_are_refused_before_the_model_is_loaded(recipe, run, tmp_path, refused):
    keys = {"model_name_or_path": str(tmp_path), "num_generations": 4}
    said = "was made with `num_generations: 2`, and this run has `num_generations: 4`"
    assert said in refused("train", *recipe(**keys, **SAVE), *RESUME)


def test_an_adapter_and_a_whole_model_do_not_mix(recipe, prints, refused, run):
    words = ["train", *recipe(**SAVE)]
    said = "is of a whole model, and this run trains an adapter: resume without `use_peft`"
    assert said in refused(*words, *RESUME, *LORA)
    prints(*words, *LORA, *OVERWRITE, "--max_steps", "1")
    said = "is of an adapter, and this run trains the whole model: resume with `use_peft: true`"
    assert said in refused(*words, *RESUME)
    said = "is of an adapter of rank 4, and this run's has 2"
    assert said in refused(*words, *RESUME, *LORA, "--lora_r", "2")


def test_a_checkpoint_without_batch_sizes_resumes_with_a_warning(build, tmp_path, caplog):
    build(save_strategy="steps", save_steps=1).train()
    path = tmp_path / "checkpoint-1" / "rollouts-rank0.pt"
    state = torch.load(path, weights_only=True)
    del state["options"]
    torch.save(state, path)
    trainer = build()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert trainer.state.global_step == 2 and "does not say with which batch sizes" in caplog.text


def test_a_finished_run_takes_no_further_step(build, tmp_path, caplog):
    whole = build(save_strategy="steps", save_steps=1)
    whole.train()
    for max_steps in (2, 1):
        resumed = build(max_steps=max_steps)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert resumed.state.global_step == 2 and steps(tmp_path) == [1, 2]
        # what is saved or measured after that is the trained model
        assert all(map(torch.equal, whole.model.parameters(), resumed.model.parameters()))
        assert f"is at step 2 of {max_steps}, and takes no further step" in caplog.text


def test_a_finished_run_is_left_as_it_is(recipe, prints, refused, run):
    keys = SAVE | {"learning_rate": 0.01, "do_eval": True}
    prints("train", *recipe(**keys), *OVERWRITE)
    before = contents(run)
    printed = prints("train", *recipe(**keys), *RESUME, "--run_name", "other")
    assert f"The run had finished, and its folder is as it was: {run}" in printed and "What to do next" not in printed
    after = contents(run)
    assert {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)} == {
        run / "state.json"
    }
    (run / "summary.json").write_bytes(before[run / "summary.json"].replace(b'"seconds": ', b'"seconds": null, "": '))
    assert "What to do next" in prints("train", *recipe(**keys), *RESUME)  # it was ended in its last evaluation
    (run / "summary.json").write_text("{")
    assert "summary.json cannot be read" in refused("train", *recipe(**keys), *RESUME)


# Another run's folder


def test_a_used_folder_is_refused_unless_resumed_or_overwritten(recipe, prints, refused, run):
    (run / "notes.txt").write_text("mine")
    (run / "checkpoint-best").mkdir()
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    line = refused("train", *recipe(**SAVE))
    for words in ("holds an earlier run", "metrics.jsonl", " ".join(RESUME), " ".join(OVERWRITE)):
        assert words in line
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    prints("train", *recipe(**SAVE), *OVERWRITE, "--max_steps", "1")
    assert steps(run) == [1] and json.loads((run / "summary.json").read_text())["steps"] == 1
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-best"]
    assert (run / "notes.txt").read_text() == "mine"
    for _ in range(2):
        prints("train", *recipe(**SAVE), *RESUME, *OVERWRITE)  # of the run that is there, which stays
        assert steps(run) == [1, 2]


def test_a_checkpoint_elsewhere_does_not_open_a_used_folder(recipe, refused, run, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text("{}\n")
    keys = {"output_dir": str(tmp_path / "other"), "resume_from_checkpoint": str(run / "checkpoint-1")}
    said = "holds an earlier run (metrics.jsonl): remove it and begin anew"
    assert said in refused("train", *recipe(**keys, **SAVE))


def test_the_model_that_a_run_begins_with_is_not_overwritten(recipe, model_folder, tmp_path, refused):
    folder = shutil.copytree(model_folder, tmp_path / "run")
    line = refused("train", *recipe(model_name_or_path=str(folder)), *OVERWRITE)
    assert "which `overwrite_output_dir: true` clears" in line and (folder / "model.safetensors").exists()


@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl",
        "trajectories.jsonl",
        "rollouts/train-0-0.rank1.parquet",
        "summary.json",
        "model.safetensors",
        "checkpoint-3/trainer_state.json",
    ],
)
def test_what_counts_as_used(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    assert not left_by_runs(str(tmp_path))  # nor an empty folder of records
    (tmp_path / name).touch()
    assert [path.name for path in left_by_runs(str(tmp_path))] == [name.partition("/")[0]]


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


# `--replay`


def test_the_first_step_of_a_replay_is_that_of_its_run(run, prints, tmp_path):
    """The run's own recipe, of a model that samples: nothing else is said, but where to."""
    (tmp_path / "train.jsonl").unlink()  # rows come with the conversations
    again = ["train", "--replay", run, "--output_dir", tmp_path / "again"]
    prints(*again, "--max_steps", "1", "--lr_scheduler_type", "constant")
    made, found = (load_file(folder / "model.safetensors") for folder in (run / "checkpoint-1", tmp_path / "again"))
    assert all(map(torch.equal, made.values(), found.values()))


def test_a_replay_does_not_write_over_its_run(run, refused):
    before = contents(run)
    for options in ([], OVERWRITE, ["--output_dir", f"{run}/../run"]):
        line = refused("train", "--replay", run, *options)
        assert "give another `--output_dir`" in line or "holds an earlier run" in line
    assert contents(run) == before


def test_a_replay_of_no_run_is_refused(tmp_path, refused):
    assert "There is no folder" in refused("train", "--replay", tmp_path / "nowhere")
    said = "has no `config.yaml`, which `mt-grpo train` writes"
    assert said in refused("train", "--replay", tmp_path)


def test_a_rollout_by_the_recipe_of_a_replay_samples(run, prints, tmp_path):
    again = tmp_path / "again"
    prints("train", "--replay", run, "--output_dir", again)
    assert "conversation 1" in prints("rollout", again / "config.yaml", "--num_prompts", "1")
    assert json.loads((again / "summary.json").read_text())["steps"] == 2


# Runs that take no step


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"per_device_train_batch_size": 12}, "has 4 rows, and one batch takes 6 prompts (12 completions, 2 for each"),
        ({"per_device_train_batch_size": 12, "dataset_streaming": True}, "has 4 rows, and one batch takes 6 prompts"),
        ({"max_steps": None, "num_train_epochs": 0}, "`num_train_epochs` is 0"),
    ],
)
def test_a_run_that_could_take_no_step_is_refused(recipe, tmp_path, refused, keys, message):
    assert message in refused("train", *recipe(**keys, model_name_or_path=str(tmp_path)))
    assert not (tmp_path / "run").exists()


def test_rows_dropped_as_too_long_are_named(recipe, tmp_path, refused, caplog):
    arguments = recipe(per_device_train_batch_size=10, do_eval=False, dataset_train_split="train[4:]")
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(json.dumps({"question": "word " * 600, "answer": "x"}) + "\n")
    said = "has 4 rows left (1 were dropped, whose prompts are too long), and one batch takes 5 prompts"
    assert said in refused("train", *arguments) and "Dropped 1 of 5 rows" in caplog.text


def test_a_look_at_a_few_rows_needs_no_whole_batch(recipe, prints):
    arguments = recipe(per_device_train_batch_size=12, temperature=0.0)
    assert "conversation 1" in prints("rollout", *arguments, "--num_prompts", "1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_device_train_batch_size": 64}, "has 8 rows, and one batch takes 16 prompts"),
        ({"max_steps": 0}, "`max_steps` is 0, so nothing is trained"),
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


# The lock

HOLDS = """
import sys, time
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.preflight import locked
with locked(MTGRPOConfig(sys.argv[1], use_cpu=True, bf16=False), "a/model"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def args(tmp_path):
    return MTGRPOConfig(str(tmp_path / "run"), use_cpu=True, bf16=False)


@pytest.fixture
def hold(args, tmp_path):
    """Starts a process that trains in the folder for ever, or ends since it is kept out; and its log."""

    started, log = [], tmp_path / "log"
    (tmp_path / "holds.py").write_text(HOLDS)

    def start():
        started.append(holder := Forked([str(tmp_path / "holds.py"), args.output_dir], log))
        until(lambda: "held" in log.read_text() or holder.poll() is not None, seen=log.read_text)
        return holder, log.read_text()

    yield start
    for holder in started:
        holder.kill()


def test_a_run_is_kept_out_until_the_one_that_trains_is_killed(build, args, hold):
    holder, _ = hold()
    trainer, said = build(output_dir=args.output_dir), f"is in use: process {holder.pid} on "
    for overwrites in (False, True):
        args.overwrite_output_dir = overwrites
        with pytest.raises(ConfigError, match=said), locked(args, "a/model"):
            pass
        with pytest.raises(ConfigError, match=said):
            check_folder(args, "a/model")
    with pytest.raises(ConfigError, match=said):  # one in Python, too
        trainer.train()
    assert trainer.state.global_step == 0
    holder.kill()
    holder.wait()
    args.overwrite_output_dir = False
    check_folder(args, "a/model")
    with locked(args, "a/model"):
        pass
    trainer.train()
    assert LOCK not in os.listdir(args.output_dir)


def test_a_block_within_another_keeps_the_lock_to_its_end(args, hold):
    with locked(args, "a/model"):
        assert os.path.exists(os.path.join(args.output_dir, LOCK))
        with locked(args):
            check_folder(args, "a/model")
        assert f"is in use: process {os.getpid()} on " in hold()[1]
    assert not os.listdir(args.output_dir)
