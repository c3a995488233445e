"""One run at a time trains in a folder; what holds it is named, and a run that was killed holds nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from mt_grpo.errors import ConfigError
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.preflight import LOCK, check_folder, locked

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
