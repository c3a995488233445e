"""Servers that the trainer starts on its own GPUs, with a scripted server in the place of vLLM."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import pytest
from support.colocated import IDLE, TRAINS, script_servers
from support.forked import run_processes
from support.loopback import free_port
from support.models import CPU_RUN, build_model
from support.servers import needs_server
from support.trainers import Letters
from support.waiting import until
from trl import ModelConfig

from mt_grpo.errors import ConfigError, ServerGoneError, WeightSyncError
from mt_grpo.options.rules import check_batches, check_served
from mt_grpo.rollout import ScriptedEngine
from mt_grpo.servers import start, watchdog
from mt_grpo.servers.fleet import _Placement
from mt_grpo.servers.http import Server, ServerSetupError
from mt_grpo.servers.start import OwnServer
from mt_grpo.training import MTGRPOConfig
from mt_grpo.training import servers as starting
from mt_grpo.training.servers import _start_own_server, check_own_servers, command_at, server_urls, transport_of

COLOCATE = {"use_vllm": True, "vllm_mode": "colocate"}
UPDATE = ["/start_weight_update", "/update_weights", "/init_weight_transfer_engine", "/finish_weight_update"]
PUSH = ["/sleep?level=0&mode=keep", *UPDATE, "/reset_prefix_cache?reset_running_requests=true"]
PUSH += ["/wake_up?tags=scheduling"]
CONTROL = {path.split("?")[0] for path in PUSH}


def config(folder, **options) -> MTGRPOConfig:
    return MTGRPOConfig(str(folder), **CPU_RUN, **COLOCATE, **options)


PARALLEL = {"vllm_tensor_parallel_size": 2}
NO_VLLM = {"interpreter": lambda: Path("/no/bin/python")}


@pytest.mark.parametrize(
    ("check", "replaced", "problem"),
    [
        (lambda args: check_batches(vars(args) | PARALLEL, 3), {}, "size: 2` does not divide the 3 processes"),
        (lambda args: check_served(vars(args)), {}, "starts its servers itself"),
        pytest.param(check_own_servers, {}, "Port .* is taken.*another `vllm_server_port`", marks=needs_server),
        (check_own_servers, NO_VLLM, "vLLM is neither in `.venv-vllm`, of the clone"),
    ],
)
def test_what_cannot_be_served_is_said_before_work(tmp_path, monkeypatch, check, replaced, problem):
    for name, value in replaced.items():
        monkeypatch.setattr(starting, name, value)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        args = config(tmp_path, vllm_server_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=problem):
            check(args)


def test_there_is_a_server_for_each_group(tmp_path):
    """And what works on a CPU takes it the weights."""
    args = config(tmp_path, vllm_server_port=9000, vllm_tensor_parallel_size=2)
    assert server_urls(args, 4) == ["http://127.0.0.1:9000", "http://127.0.0.1:9001"]
    assert transport_of(args).server_backend == "safetensors"


def test_an_engine_that_is_given_needs_no_vllm(build, tokenizer, monkeypatch):
    monkeypatch.setattr(starting, "interpreter", NO_VLLM["interpreter"])
    engine = ScriptedEngine(tokenizer, ["a"])
    trainer = build(env=None, reward_funcs=Letters(), engine=engine, advantage_estimator=None, **COLOCATE)
    assert trainer.runner.engine is engine and trainer.weight_sync is None


def test_a_server_that_ends_at_its_start_says_why(monkeypatch):
    code = "raise ValueError('Free memory on the device is less than desired')"
    server = OwnServer([sys.executable, "-c", code], dict(os.environ), "http://127.0.0.1:1")
    monkeypatch.setattr(start, "CHECK_EVERY", 0.05)
    with pytest.raises(ServerSetupError, match="Free memory on the device") as error:
        server.wait(60.0)
    server.close()
    assert str(server.log) in str(error.value) and server.log.exists()
    server.log.unlink()


STARTS = """
import os, signal, subprocess, sys
watchdog, pid = sys.argv[1:]
code = "import os, sys, time; open(sys.argv[1], 'w').write(f'{os.getpid()}.'); time.sleep(600)"
command = [sys.executable, "-S", "-c", code, pid]
subprocess.Popen([sys.executable, "-I", "-S", watchdog, str(os.getpid()), *command], stdin=subprocess.PIPE)
while not os.path.exists(pid) or not open(pid).read().endswith("."):
    pass
os.kill(os.getpid(), signal.SIGKILL)
"""
"""What a trainer does that has started a server and is killed."""


def test_a_killed_trainer_leaves_no_server(tmp_path):
    pid = tmp_path / "pid"
    trainer = subprocess.run([sys.executable, "-c", STARTS, watchdog.__file__, str(pid)], timeout=300)
    assert trainer.returncode == -signal.SIGKILL
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(pid.read_text().removesuffix("."))).wait(60)


@pytest.fixture
def base(tmp_path, tokenizer):
    """The folder of a model."""
    for part in (build_model(tokenizer), tokenizer):
        part.save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.fixture
def served(build, base, tokenizer, questions, monkeypatch):
    """Makes trainers whose server is scripted."""
    servers, made, port = script_servers(tokenizer, base, monkeypatch.setattr), [], free_port()

    def make(**options):
        given = {"vllm_server_port": port, "eval_dataset": questions.select(range(2)), **TRAINS, **options}
        made.append(build(None, base, **given))
        return made[-1]

    make.servers = servers
    yield make
    for trainer in made:
        trainer.weight_sync.close()
    for server in servers:
        server.http.stop()


def children() -> list[psutil.Process]:
    """Processes in the place of servers, once there are some."""

    def idle(process: psutil.Process) -> bool:
        try:
            return process.cmdline() == IDLE
        except psutil.Error:  # one that has ended, of another test or while it is looked at
            return False

    found: list[psutil.Process] = []
    until(lambda: found.extend(filter(idle, psutil.Process().children(recursive=True))) or found)
    return found


def test_servers_sleep_while_the_model_is_trained(served):
    def asked() -> list[str]:
        """What concerns weights, memory and sampling; equal calls in a row are one."""
        calls = served.servers[0].http.calls
        kept = [call for call in calls if call.split("?")[0] in (*CONTROL, "/v1/completions")]
        return [call for call, before in zip(kept, [None, *kept], strict=False) if call != before]

    trainer = served(vllm_enable_sleep_mode=True)
    trainer.train()
    calls, sleep = asked(), ["/sleep?level=0&mode=keep", "/sleep?level=2&mode=abort"]
    once = [*PUSH, "/v1/completions"]
    wake = ["/wake_up?tags=weights", *PUSH, "/wake_up?tags=kv_cache", "/v1/completions"]
    first = calls.index("/start_weight_update") - 1
    assert calls[first:] == [*once, *once, *sleep, *wake, *sleep]  # the proof, then the true weights
    trainer.evaluate()
    assert asked()[len(calls) :] == wake


def test_without_sleep_the_server_is_paused_only(served):
    """And the end of the run ends it."""
    trainer = served()
    trainer.train()
    assert not [call for call in served.servers[0].http.calls if "level=2" in call or call.endswith("tags=weights")]
    started, log = children(), Path(trainer.runner.engine.remedy.split()[-1].rstrip("."))
    assert len(started) == 1 and log.exists()
    trainer.weight_sync.close()
    assert not psutil.wait_procs(started, 60)[1] and not log.exists()


def test_a_server_that_is_lost_ends_the_run_in_a_sentence(served, monkeypatch):
    monkeypatch.setattr(starting, "GONE_TIMEOUT", 0.2)
    trainer = served()
    served.servers[0].http.stop()
    with pytest.raises((ServerGoneError, WeightSyncError), match="has to be started again. Its output is in"):
        trainer.train()


def test_a_trainer_that_fails_leaves_no_server(served, monkeypatch):
    started = []

    def fails(*args):
        started.extend(children())
        raise ConfigError("as it happens")

    monkeypatch.setattr(starting, "_weight_sync", fails)
    with pytest.raises(ConfigError, match="as it happens"):
        served()
    assert not psutil.wait_procs(started, 60)[1]


def test_a_model_without_a_name_is_refused(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match="save it to a folder"):
        _start_own_server(config(tmp_path), build_model(tokenizer))


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        (
            "adapter_config.json",
            '{"peft_type": "IA3", "base_model_name_or_path": "embedded"}',
            "no LoRA .*`peft_type: I",
        ),
        ("adapter_config.json", "", "does not describe an adapter .Expecting value.*: bring the file back"),
        ("adapter_config.json", "[]", "does not describe an adapter .it is no mapping.: bring"),
        ("config.json", '{"model_type": "newer than transformers"}', None),
    ],
)
def test_what_a_server_cannot_hold_is_said_before_it_starts(base, tmp_path, file, content, problem):
    (tmp_path / "base" / file).write_text(content)
    with nullcontext() if problem is None else pytest.raises(ConfigError, match=problem):
        command_at("127.0.0.1", 1, config(tmp_path), ModelConfig(base))


@pytest.mark.slow
@pytest.mark.parametrize("per_server", [1, 2])
def test_each_group_of_ranks_has_a_server(per_server, tmp_path, base):
    first = free_port(2)
    run_processes(["-m", "support.colocated", str(tmp_path), str(first), str(per_server)], 2, tmp_path / "log", {})
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [rank["port"] for rank in ranks] == ([[first], [first + 1]] if per_server == 1 else [[first], []])
    counted = ("/sleep?level=2&mode=abort", "/wake_up?tags=weights", "/update_weights", "/v1/completions")
    for rank in ranks[: 2 // per_server]:
        # a proof and two steps; its ranks' own conversations, and a comparison for each update
        assert [rank["calls"].count(call) for call in counted] == [2, 1, 3, 2 * 4 * per_server + 3]


def test_a_process_samples_from_the_server_on_its_gpu():
    pool = _Placement([Server("http://a:1"), Server("http://b:2")], home="http://b:2")
    assert {pool.place(str(number), [number]).url for number in range(8)} == {"http://b:2"}
    pool.servers[1].drop("gone")
    assert {pool.place(str(number), [number]).url for number in range(8)} == {"http://a:1"}
