"""`mt-grpo train --accelerate_config`: the processes, how they end, and what is refused before there are any."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import fields
from pathlib import Path

import psutil
import pytest
import yaml
from accelerate.utils import is_deepspeed_available
from support.forked import Forked
from support.waiting import until

from mt_grpo.app.launch import _status
from mt_grpo.app.recipe import DATACLASSES
from mt_grpo.app.request import OWN_OPTIONS
from mt_grpo.cli import main
from mt_grpo.runlog import open_run


@pytest.fixture
def config(tmp_path):
    """Writes an accelerate configuration for so many processes without GPUs."""

    def write(processes: int) -> str:
        options = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "MULTI_GPU" if processes > 1 else "NO",  # torchrun, or a single process
            "mixed_precision": "no",
            "num_machines": 1,
            "machine_rank": 0,
            "num_processes": processes,
            "main_process_port": 0,
            "use_cpu": True,
            "debug": False,
        }
        path = tmp_path / "cpu.yaml"
        path.write_text(yaml.safe_dump(options))
        return str(path)

    return write


@pytest.fixture
def start(tmp_path):
    """Starts `mt-grpo train`, whose output is in `tmp_path / "log"`; what it launches may be forked."""

    def begin(*arguments: str, forked: bool = True) -> Forked:
        launcher = ["-m", "support.launcher"] if forked else []
        return Forked([*launcher, "-m", "mt_grpo", "train", *arguments], tmp_path / "log")

    return begin


@pytest.mark.slow
def test_two_processes_train_as_the_configuration_says(start, recipe, config, tmp_path):
    arguments = [*recipe(do_eval=False), "--accelerate_config", config(7), "--num_processes", "2", "--max_steps", "1"]
    assert start(*arguments, forked=False).wait(300) == 0
    folder = tmp_path / "run"
    assert json.loads((folder / "summary.json").read_text())["steps"] == 1
    assert yaml.safe_load((folder / "config.yaml").read_text())["max_steps"] == 1
    assert sorted(open_run(folder).column("rank")) == [0] * 4 + [1] * 4


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_failure_of_the_processes_is_the_exit_status(start, recipe, config, tmp_path, processes):
    arguments = [*recipe(tools=["mt_grpo.errors.nothing"]), "--accelerate_config", config(processes), "--dry_run"]
    assert start(*arguments, forked=processes > 1).wait(300) == 1
    errors = (tmp_path / "log").read_text()
    assert "mt-grpo: The tool 'mt_grpo.errors.nothing' does not exist" in errors and "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "number", "group"),
    [(1, signal.SIGTERM, False), (2, signal.SIGINT, True)],
)
def test_a_signal_ends_every_process(start, recipe, config, tmp_path, processes, number, group):
    """Ctrl-C in a terminal reaches the whole group; another signal only the process it is sent to."""
    keys = {"max_steps": 10000, "do_eval": False}
    run = start(*recipe(**keys), "--accelerate_config", config(processes))
    index, log = tmp_path / "run" / "rollouts" / "index.jsonl", tmp_path / "log"
    until(index.exists, lambda: run.poll() is None, seen=log.read_text)
    children = psutil.Process(run.pid).children(recursive=True)
    assert len(children) >= processes
    (os.killpg if group else os.kill)(run.pid, number)
    assert run.wait(120) == 128 + number
    errors = (tmp_path / "log").read_text()
    assert not psutil.wait_procs(children, 60)[1]
    said = {signal.SIGINT: "interrupted by Ctrl-C", signal.SIGTERM: "ended by SIGTERM"}[number]
    assert f"mt-grpo: {said}." in errors and "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "number"), [(2, signal.SIGUSR1), (2, signal.SIGTERM), (1, signal.SIGTERM)])
def test_a_launcher_ends_with_the_status_of_a_preempted_run(start, recipe, config, tmp_path, processes, number):
    """Its processes are not begun again, and the same command goes on."""
    keys = {"max_steps": 10000, "do_eval": False, "enable_jit_checkpoint": number == signal.SIGTERM}
    arguments = [*recipe(**keys), "--accelerate_config", config(processes), "--max_restarts", "2"]
    run = start(*arguments)
    index, log = tmp_path / "run" / "rollouts" / "index.jsonl", tmp_path / "log"
    until(index.exists, lambda: run.poll() is None, seen=log.read_text)
    os.kill(run.pid, number)
    assert run.wait(120) == 75
    said = (tmp_path / "log").read_text()
    assert said.count(f"The run was asked to end by {number.name}: what was learnt up to step") == 1
    assert "Traceback" not in said
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    step = int(checkpoint.name.rpartition("-")[2])
    assert start(*arguments, "--resume_from_checkpoint", "auto", "--max_steps", str(step + 1)).wait(300) == 0


@pytest.mark.parametrize(("code", "status"), [(0, 0), (3, 3), (-9, 137)])
def test_a_process_that_a_signal_ended_counts_from_128(code, status):
    assert _status(code) == status


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("zero4", "'zero4' is unknown; the nearest is 'zero3': give one of fsdp2, zero2, zero3, or the path of a "),
        ("nowhere/zero3.yaml", "The accelerate configuration 'nowhere/zero3.yaml' is unknown"),
        ("broken.yaml", "broken.yaml is not valid YAML"),
        ("list.yaml", "list.yaml is no accelerate configuration"),
        ("keys.yaml", "The accelerate configuration keys.yaml cannot be launched: The config file at keys.yaml had "),
        ("zero3", "zero3 takes 7 GPUs, a process each, and this machine has"),
        pytest.param(
            "speed.yaml",
            "speed.yaml cannot be launched: DeepSpeed is not installed",
            marks=pytest.mark.skipif(is_deepspeed_available(), reason="it is installed"),
        ),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(recipe, value, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    Path("broken.yaml").write_text("a: [")
    Path("list.yaml").write_text("- a")
    Path("keys.yaml").write_text("distributed_type: 'NO'\nnum_procesess: 2")
    Path("speed.yaml").write_text("distributed_type: DEEPSPEED\nnum_processes: 1\nuse_cpu: true")
    assert main(["train", *recipe(), "--accelerate_config", value]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mt-grpo: ") and message in line


def test_a_process_that_was_launched_launches_none(recipe, monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main(["train", *recipe(), "--accelerate_config", "zero3"]) == 1
    assert "leave it out under `accelerate launch`" in capsys.readouterr().err


def test_options_of_the_command_are_no_fields_of_a_recipe():
    names = {field.name for options in DATACLASSES for field in fields(options)}
    assert not names & {name for own in OWN_OPTIONS.values() for name in own}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--num_machines", "2"], "needs `--main_process_ip`, the address of the host with `--machine_rank 0`"),
        (["--num_machines", "2", "--machine_rank", "2"], "`--machine_rank 2` must be from 0 to 1"),
        (["--num_machines", "4"], "`--num_processes 2`, those of all hosts together, is no multiple of"),
    ],
)
def test_hosts_are_told_what_they_have_to_say(recipe, config, capsys, options, expected):
    assert main(["train", *recipe(), "--accelerate_config", config(2), "--num_processes", "2", *options]) == 1
    assert expected in capsys.readouterr().err


def test_weights_that_no_cpu_shards_are_refused(recipe, tmp_path, capsys):
    path = tmp_path / "sharded.yaml"
    path.write_text(yaml.safe_dump({"distributed_type": "FSDP", "use_cpu": True, "num_processes": 2}))
    assert main(["train", *recipe(), "--accelerate_config", str(path)]) == 1
    assert "`distributed_type: FSDP` and `use_cpu: true`" in capsys.readouterr().err
