"""Whose weights a server holds: two runs on one server notice each other, and a run that is gone blocks nobody."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from accelerate import Accelerator
from support.models import build_model
from support.replicas import step_of

from mt_grpo.errors import WeightSyncError
from mt_grpo.rollout.engines.vllm.client import VLLMServerClient
from mt_grpo.servers import owner
from mt_grpo.servers.http import ServerSetupError
from mt_grpo.servers.owner import new_run, read_owner, released, weight_label
from mt_grpo.training import MTGRPOConfig
from mt_grpo.training.servers import weight_sync


def run_of(process: int) -> str:
    """The name a run of that process has."""
    own = f"-{os.getpid()}-{owner._start(os.getpid())}-"
    return new_run().replace(own, f"-{process}-{owner._start(process)}-")


@pytest.fixture
def other():
    """A process that does something else."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    process.stdin.close()


def test_a_run_of_another_process_is_refused_while_it_lives(replicas, sync_of, other):
    version = replicas[0].version = weight_label(run_of(other.pid), 7)
    words = rf"another run \(process {other.pid} on .*, step 7\).*`vllm_server_port`.*end it first\.$"
    with pytest.raises(WeightSyncError, match=words):
        sync_of().sync(0)
    assert replicas[0].version == version and not replicas[0].updates


def test_a_run_is_refused_before_its_trainer_is_made(replicas, tokenizer, model, other, tmp_path):
    replicas[0].version = weight_label(run_of(other.pid), 7)
    client = VLLMServerClient(replicas[0].http.url, tokenizer)
    args = MTGRPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(ServerSetupError, match="another run"):
        weight_sync(args, client, lambda: model, Accelerator(cpu=True))


@pytest.mark.parametrize("reaped", [False, True], ids=["unnoticed", "gone"])
def test_a_run_that_was_killed_blocks_nobody(replicas, sync_of, other, reaped):
    run = run_of(other.pid)
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    if reaped:
        other.wait()
    replicas[0].version = weight_label(run, 7)
    sync_of().sync(0)
    assert step_of(replicas[0].version) == "0"


def test_a_process_of_the_same_number_is_another_one(replicas, sync_of, other):
    run = run_of(other.pid)
    start = owner._start(other.pid)
    replicas[0].version = weight_label(run.replace(f"-{start}-", f"-{start - 1}-"), 7)
    sync_of().sync(0)


def test_a_server_held_by_another_machine_is_refused_until_freed(replicas, sync_of):
    there = new_run().replace(owner._machine(), "0a1b2c3d.4026531836")
    replicas[0].version = weight_label(there, "proof")
    with pytest.raises(WeightSyncError, match="step proof.*or restart the server if that run was killed"):
        sync_of().sync(0)
    replicas[0].version = released(replicas[0].version)
    sync_of().sync(0)


@pytest.mark.parametrize("version", ["default", "12", "a-b:3"])
def test_versions_that_no_run_of_ours_set_name_nobody(replicas, sync_of, version):
    assert read_owner(version) is None
    replicas[0].version = version
    sync_of().sync(0)


def test_a_run_that_ends_gives_its_servers_back(replicas, sync_of):
    first = sync_of(*replicas)
    first.sync(4)
    first.close()
    assert [replica.version for replica in replicas] == [f"{first.run}:4:released"] * 2
    first.close()
    second = sync_of(*replicas)
    second.sync(0)
    first.close()
    assert [replica.version for replica in replicas] == [f"{second.run}:0"] * 2


def test_every_server_is_looked_at(replicas, sync_of, other):
    replicas[1].version = weight_label(run_of(other.pid), 7)
    with pytest.raises(WeightSyncError, match=f"{replicas[1].http.url} holds the weights of another run"):
        sync_of(*replicas).sync(0)
    assert not replicas[0].updates


def test_weights_another_run_sends_during_rollouts_are_noticed(replicas, sync_of, other):
    sync = sync_of(*replicas)
    sync.sync(0)
    sync.check()
    replicas[1].version = weight_label(run_of(other.pid), 7)
    with pytest.raises(WeightSyncError, match="while this run sampled from it"):
        sync.check()
    with pytest.raises(WeightSyncError, match="holds the weights of another run"):
        sync.sync(1)


def test_a_second_trainer_takes_over_and_the_first_one_notices(replicas, sync_of):
    first, second = sync_of(), sync_of()
    first.sync(0)
    second.sync(0)
    with pytest.raises(WeightSyncError, match="while this run sampled from it"):
        first.check()
    first.sync(1)
    first.check()


def test_a_server_that_was_restarted_during_rollouts_ends_no_run(replicas, sync_of, tokenizer):
    sync = sync_of(*replicas)
    sync.sync(0)
    replicas[1].version, replicas[1].model = "default", build_model(tokenizer, seed=9)
    sync.check()
    assert [server.up for server in sync.client.servers] == [True, False]
    sync.restore(replicas[1].http.url)
    assert step_of(replicas[1].version) == "0"
