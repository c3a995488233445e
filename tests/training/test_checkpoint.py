"""Checkpoints that are damaged, of another model, or cannot be written; what a resumed run may be given anew."""

import errno
import io
import json
import logging
import os
import resource
from contextlib import nullcontext
from pathlib import Path
from shutil import copytree

import pytest
import torch
from support.hostile import Executing
from support.learnt import run_ranks
from support.models import build_model
from support.trainers import LETTERS, trainer_builder
from transformers import TrainerCallback

from mt_grpo.errors import ConfigError
from mt_grpo.training.checkpoint import (
    CheckpointError,
    _find_checkpoint,
    batch_options,
    check_checkpoint,
    check_sharding,
    is_whole,
    latest_checkpoint,
    save_rollouts,
    says_what_cannot_be_written,
)
from mt_grpo.training.resuming import _hyperparameters, _take_given

EACH_STEP = {"save_strategy": "steps", "save_steps": 1}
SAVE = {"script": None, "rewards": LETTERS, "max_steps": 2, "max_turn_length": 8, **EACH_STEP}
STATES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory, tokenizer, questions) -> Path:
    folder = tmp_path_factory.mktemp("two_steps")
    trainer_builder(folder, tokenizer, questions)(**SAVE).train()
    return folder


@pytest.fixture
def folder(two_steps, tmp_path) -> Path:
    """Of a run with two checkpoints."""
    return copytree(two_steps, tmp_path / "run")


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.rsplit("-", 1)[1]) for path in folder.glob("checkpoint-*"))


SPOILED = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "text": lambda path: path.write_text("hello"),
    "without keys": lambda path: path.write_text("{}"),
    "another object": lambda path: torch.save([1, 2], path),
    "gone": lambda path: path.unlink(),
}
DAMAGED = [
    *((name, ("empty", "cut", "text")) for name in (*STATES, "config.json", "made_with.json")),
    ("trainer_state.json", ("empty", "cut", "text", "without keys")),
    ("rollouts-rank0.pt", ("empty", "cut", "text", "another object")),
]


@pytest.mark.slow
def test_a_damaged_checkpoint_gives_way_to_the_one_before(folder, caplog):
    last, before = folder / "checkpoint-2", folder / "checkpoint-1"
    for name, ways in (*DAMAGED, *((state, ["gone"]) for state in STATES)):
        sound = (last / name).read_bytes()
        for how in ways:
            SPOILED[how](last / name)
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                assert _find_checkpoint("true", str(folder)) == str(before)
            (said,) = caplog.messages
            problem = f"{last} is damaged, its {name} {'is gone' if how == 'gone' else 'cannot be read'}"
            assert problem in said and f"goes on from the checkpoint before, {before}" in said
            with pytest.raises(ConfigError, match=f"checkpoint-2 is damaged, its {name} .*: resume from another one"):
                _find_checkpoint(str(last), str(folder))
        (last / name).write_bytes(sound)
    for name in STATES[1:]:
        (last / name).unlink()
    assert latest_checkpoint(str(folder)) == last  # as `save_only_model` leaves it


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_by_name_and_passed_over(folder, build):
    SPOILED["cut"](folder / "checkpoint-2" / "rollouts-rank0.pt")
    trainer = build(output_dir=str(folder), **SAVE)
    with pytest.raises(ConfigError, match=r"is damaged, its rollouts-rank0.pt .* another one \(.*checkpoint-1\)\.$"):
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 2 and latest_checkpoint(str(folder)) == folder / "checkpoint-2"


def test_the_folder_of_a_run_is_no_checkpoint(tmp_path):
    (tmp_path / "rollouts").mkdir()
    with pytest.raises(ConfigError, match="is no checkpoint: name one, of which this folder has none"):
        _find_checkpoint(str(tmp_path), "elsewhere")
    for step in (2, 10, 1):
        (tmp_path / f"checkpoint-{step}").mkdir()
    with pytest.raises(ConfigError, match=r"checkpoint-1, .*checkpoint-2, .*checkpoint-10\.$"):
        _find_checkpoint(str(tmp_path), "elsewhere")


def test_the_one_before_stays_until_the_next_is_whole(build, tmp_path, monkeypatch):
    """Such as on a disk that is full once the model is written."""
    written = []

    def save(folder, *args):
        written.append(folder)
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save_rollouts(folder, *args)

    monkeypatch.setattr("mt_grpo.training.resuming.save_rollouts", save)
    trainer = build(save_total_limit=1, **SAVE)
    with pytest.raises(CheckpointError, match="checkpoint-2 cannot be written"):
        trainer.train()
    assert steps_in(tmp_path) == [1] and is_whole(tmp_path / "checkpoint-1") and trainer.args.save_total_limit == 1
    trainer.train(resume_from_checkpoint=True)
    assert steps_in(tmp_path) == [2]


def test_the_oldest_goes_whatever_clocks_say(build, tmp_path):
    """A clock that was set back, or a copy of the folder, gives later checkpoints earlier times."""

    class SetBack(TrainerCallback):
        def on_save(self, args, state, control, **keys):
            for folder in tmp_path.glob("checkpoint-*"):
                os.utime(folder, (2e9 - 100 * state.global_step,) * 2)

    build(save_total_limit=2, callbacks=[SetBack()], **SAVE | {"max_steps": 4}).train()
    assert steps_in(tmp_path) == [3, 4]
    build(save_total_limit=2, **SAVE).train()  # another run adds to the folder
    assert steps_in(tmp_path) == [1, 2]


@pytest.mark.parametrize(("place", "value"), [(169, 40), (67, 23), (269, 71), (214, 133)])
def test_whatever_torch_raises_of_a_state_is_damage(tmp_path, place, value):
    """An `IndexError`, a `TypeError`, a `struct.error` and an `AssertionError`, among others."""
    state = {"step": 1, "buffered_inputs": [{"ids": torch.ones(3)}], "processes": 1, "options": {"seed": 1}}
    path = tmp_path / "checkpoint-1" / "rollouts-rank0.pt"
    path.parent.mkdir()
    torch.save(state, path)
    data = bytearray(path.read_bytes())
    data[data.find(b"data.pkl") + place] = value
    path.write_bytes(data)
    assert not is_whole(path.parent)
    with pytest.raises(ConfigError, match=r"its rollouts-rank0\.pt cannot be read \("):
        _find_checkpoint(str(path.parent), str(tmp_path))


def test_a_checkpoint_of_pickled_code_is_not_executed(tmp_path):
    folder, executed, buffer = tmp_path / "run" / "checkpoint-1", tmp_path / "executed", io.BytesIO()
    folder.mkdir(parents=True)
    torch.save({"processes": 1, "step": 0, "options": Executing(executed)}, buffer)
    (folder / "rollouts-rank0.pt").write_bytes(buffer.getvalue())
    (folder / "trainer_state.json").write_text("{}")
    assert latest_checkpoint(str(tmp_path / "run")) is None and not executed.exists()


def test_a_disk_that_is_full_while_saving_is_one_sentence(build, tmp_path):
    """No file may be as large as the model, as on a disk that is full."""
    trainer, (soft, hard) = build(**SAVE), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError) as error:
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = "checkpoint-1 cannot be written", "GB are free there", "no whole checkpoint"
    assert all(words in str(error.value) for words in said) and "\n" not in str(error.value)
    assert not steps_in(tmp_path)


def test_a_folder_that_is_gone_is_what_cannot_be_written(tmp_path):
    gone = tmp_path / "unmounted" / "run"
    with pytest.raises(CheckpointError, match="checkpoint-1 cannot be written: .*GB are free there"):
        with says_what_cannot_be_written(gone / "checkpoint-1", gone):
            (gone / "model").write_text("")


SAVED = {**EACH_STEP, "learning_rate": 0.1, "max_steps": 3, "optim": "adamw_torch"}
WATCHED = ("lr", "initial_lr", "weight_decay", "betas", "eps")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tokenizer, questions) -> str:
    """After the first step of a run with the options `SAVED`."""
    folder = tmp_path_factory.mktemp("saved")
    trainer_builder(folder, tokenizer, questions)(**SAVED).train()
    return str(folder / "checkpoint-1")


class Watch(TrainerCallback):
    """The optimizer's groups at each step."""

    def __init__(self):
        self.seen = []

    def on_pre_optimizer_step(self, args, state, control, optimizer, **kwargs):
        self.seen.append([{name: group.get(name) for name in WATCHED} for group in optimizer.param_groups])


def groups_of(trainer, checkpoint=None):
    trainer.add_callback(watch := Watch())
    trainer.train(checkpoint)
    return watch.seen


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, None),
        ({"learning_rate": 0.01}, "learning_rate: 0.1; here 0.01"),
        ({"lr_scheduler_type": "constant"}, None),
        ({"lr_scheduler_type": "cosine", "warmup_steps": 2}, None),
        ({"weight_decay": 0.5}, "weight_decay: 0.0; here 0.5"),
        ({"adam_beta1": 0.5, "adam_epsilon": 0.1}, "adam_beta1: 0.9; here 0.5 | adam_epsilon: 1e-08; here 0.1"),
        ({"max_steps": 5}, None),
    ],
)
def test_options_of_the_optimizer_are_those_given(build, checkpoint, caplog, given, said):
    """From the first step on, as in a run that had them from the beginning."""
    here = SAVED | given | {"save_strategy": "no"}
    expected = groups_of(build(**here))
    resumed = build(**here)
    assert groups_of(resumed, checkpoint) == expected[1:]
    notes = [message for message in caplog.messages if "was made with other" in message]
    assert len(notes) == (said is not None) and (said is None or said in notes[0])
    logged = [row["learning_rate"] for row in resumed.state.log_history if "learning_rate" in row]
    assert logged[1:] == [groups[0]["lr"] for groups in expected[1:]]


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, as optimizers without a schedule do."""

    def __init__(self, params, lr, momentum=0.0):
        super().__init__(params, lr=lr, momentum=momentum)
        for group in self.param_groups:
            group["k"] = 0


def test_what_an_optimizer_counts_in_its_groups_is_kept():
    saved, here = (Counting([torch.nn.Parameter(torch.zeros(1))], *given) for given in ((0.1, 0.9), (0.01, 0.5)))
    saved.param_groups[0]["k"] = 7
    schedule, given = torch.optim.lr_scheduler.LambdaLR(here, lambda step: 1.0), _hyperparameters(here)
    here.load_state_dict(saved.state_dict())
    _take_given(here, schedule, given)
    (group,) = here.param_groups
    assert (group["k"], group["lr"], group["momentum"]) == (7, 0.01, 0.5)


EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 1}


def test_a_rate_by_evaluations_cannot_be_another(build, tmp_path):
    options = {**SAVED, **EVALUATED, "lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "reward"}
    options |= {"lr_scheduler_kwargs": {"patience": 0}, "max_steps": 2}
    build(**options | {"max_steps": 1}).train()
    checkpoint = str(tmp_path / "checkpoint-1")
    for name, value in (("learning_rate", 0.2), ("lr_scheduler_kwargs", {"patience": 3})):
        with pytest.raises(ConfigError, match=f"was made with `{name}: .*, and this run has `{name}: "):
            build(**options | {name: value}).train(checkpoint)
    ((group, *_),) = groups_of(build(**options | {"weight_decay": 0.5}), checkpoint)
    assert group["weight_decay"] == 0.5


@pytest.mark.parametrize(
    ("sizes", "given", "problem"),
    [
        ({}, {"seed": 7}, "was made with `seed: 42`, and this run has `seed: 7`"),
        ({}, {"shuffle_dataset": False}, "with `shuffle_dataset: True`, and this run has `shuffle_dataset: False`"),
        ({}, {"optim": "sgd"}, "was made with `optim: adamw_torch`, and this run has `optim: sgd`"),
        ({"hidden_size": 16}, {}, "checkpoint-1 is of another model .*has the shape"),
    ],
)
def test_what_a_checkpoint_is_bound_to_is_refused(build, tokenizer, checkpoint, sizes, given, problem):
    with pytest.raises(ConfigError, match=problem) as refused:
        build(model=build_model(tokenizer, **sizes), **SAVED | given).train(checkpoint)
    assert "\n" not in str(refused.value)


def test_intervals_given_anew_count(build, tmp_path, checkpoint):
    """And a fused optimizer goes on with the same state."""
    given = {"max_steps": 5, "save_steps": 2, "logging_steps": 4, "optim": "adamw_torch_fused"}
    (resumed := build(**SAVED | given)).train(checkpoint)
    assert steps_in(tmp_path) == [2, 4, 5]
    assert [row["step"] for row in resumed.state.log_history if "loss" in row] == [1, 4]


def test_the_best_by_another_measure_is_not_kept(build, tmp_path):
    options = SAVED | EVALUATED | {"load_best_model_at_end": True, "metric_for_best_model": "turns/mean"}
    build(**options | {"max_steps": 1}).train()
    options |= {"metric_for_best_model": "reward", "greater_is_better": True, "max_steps": 2}
    build(**options).train(str(tmp_path / "checkpoint-1"))
    last = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert last["best_global_step"] == 2


# Other processes


def options_of(size, accumulated=2, generations=2) -> dict[str, int]:
    options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulated}
    return options | {"steps_per_generation": generations}


@pytest.fixture
def of_two(build, tmp_path):
    """Says which conversations two processes share; returns what a run of so many others is told."""
    options, path = batch_options(build().args) | options_of(4), tmp_path / "checkpoint-1"
    path.mkdir()
    for rank in range(2):
        state = {"step": 3, "buffered_inputs": [], "processes": 2, "options": options}
        torch.save(state, path / f"rollouts-rank{rank}.pt")
    return lambda processes, here: check_checkpoint(path, options | here, 0, processes)


@pytest.mark.parametrize(
    ("processes", "here", "mend"),
    [
        (1, options_of(8), None),
        (1, options_of(4, 4, 4), None),
        (4, options_of(2), None),
        (8, options_of(2, 1, 1), None),
        (1, options_of(4), "go on with `--per_device_train_batch_size 8`, or with as many"),
        (4, options_of(4), "go on with `--per_device_train_batch_size 2`, or with as many"),
        (4, options_of(4, 2, 1), "`--per_device_train_batch_size 2 --steps_per_generation 2`, or"),
        (16, options_of(1), "`--gradient_accumulation_steps 1 --steps_per_generation 1`, or"),
        (3, options_of(4), r"has 24 and 24: go on with as many processes as wrote it \(`--num_processes 2`\)"),
    ],
)
def test_other_processes_go_on_with_the_same_batch_only(of_two, caplog, processes, here, mend):
    if mend is None:
        of_two(processes, here)
        assert f"was made by 2 processes, and this run has {processes}: what was sampled" in caplog.text
        return
    with pytest.raises(ConfigError, match=mend) as refused:
        of_two(processes, here)
    assert "\n" not in str(refused.value) and "16 conversations in a step" in str(refused.value)


def test_other_processes_under_deepspeed_are_refused(of_two, tmp_path):
    (tmp_path / "checkpoint-1" / "global_step1").mkdir()
    with pytest.raises(ConfigError, match="under DeepSpeed, whose state .* launch it with `--num_processes 2`"):
        of_two(1, options_of(8))


ZERO3 = "global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt"
SHARDINGS = {"global_step3": "DeepSpeed", ZERO3: "DeepSpeed ZeRO-3", ".": None}
SHARDINGS |= {"pytorch_model_fsdp_0": "FSDP", "pytorch_model_fsdp.bin": "FSDP"}


@pytest.mark.parametrize("here", dict.fromkeys(SHARDINGS.values()))
@pytest.mark.parametrize("name", SHARDINGS)
def test_a_checkpoint_of_another_sharding_is_refused(tmp_path, name, here):
    """Libraries would raise for the one, and go on without the optimizer's state for the other."""
    (tmp_path / name).mkdir(parents=True, exist_ok=True)
    made = SHARDINGS[name]
    problem = f"written (without|under) .*{made or 'sharding'}, and this"
    with nullcontext() if here == made else pytest.raises(ConfigError, match=problem) as refused:
        check_sharding(tmp_path, here)
    assert here == made or ("accelerate merge-weights" in str(refused.value)) == (name == "pytorch_model_fsdp_0")


@pytest.mark.slow
def test_one_process_goes_on_with_the_steps_of_two(tmp_path):
    whole = run_ranks(tmp_path / "whole", 2, "saved")
    resumed = run_ranks(tmp_path / "resumed", 1, "saved", RESUMED=str(tmp_path / "whole" / "checkpoint-1"))
    learnt = [torch.tensor(run["learnt"][1:]) for run in (resumed, whole)]
    torch.testing.assert_close(*learnt, rtol=1e-4, atol=1e-6)
    for name, weight in whole["weights"].items():
        torch.testing.assert_close(resumed["weights"][name], weight, rtol=1e-4, atol=1e-5)
