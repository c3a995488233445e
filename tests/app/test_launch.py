"""`mt-grpo train --accelerate_config`: processes and hosts, how they meet and end, and what is refused before."""

import json
import logging
import os
import signal
import socket
from dataclasses import fields
from pathlib import Path

import psutil
import pytest
import yaml
from accelerate.utils import is_deepspeed_available
from safetensors.torch import load_file
from support.app_fixtures import SAVE
from support.forked import Forked
from support.hosts import ADDRESS, hosts
from support.loopback import free_port
from support.waiting import until
from torch.distributed import TCPStore

from mt_grpo.app import launch
from mt_grpo.app.build import DATACLASSES
from mt_grpo.app.launch import _status
from mt_grpo.app.request import OWN_OPTIONS
from mt_grpo.preemption import is_said_here, speaks
from mt_grpo.runlog import open_run
from mt_grpo.training.checkpoint import is_whole
from mt_grpo.training.ranks import ProcessGoneError, says_who_is_gone


@pytest.fixture
def config(tmp_path):
    """Writes an accelerate configuration for so many processes without GPUs; its option."""

    def write(processes: int = 2, **keys: object) -> list[str]:
        options = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "MULTI_GPU" if processes > 1 else "NO",  # torchrun, or a single process
            "mixed_precision": "no",
            "num_processes": processes,
            "main_process_port": 0,
            "use_cpu": True,
            **keys,
        }
        path = tmp_path / "cpu.yaml"
        path.write_text(yaml.safe_dump({name: value for name, value in options.items() if value is not None}))
        return ["--accelerate_config", str(path)]

    return write


@pytest.fixture
def start(tmp_path):
    """Starts `mt-grpo train`, whose output is in `tmp_path / "log"`; what it launches may be forked."""

    def begin(*arguments: str, forked: bool = True, **environment: str) -> Forked:
        launcher = ["-m", "support.launcher"] if forked else []
        command = [*launcher, "-m", "mt_grpo", "train", *arguments]
        return Forked(command, tmp_path / "log", {**os.environ, **environment})

    return begin


@pytest.fixture
def log(tmp_path):
    """What a command has printed, which has ended without a traceback."""

    def read() -> str:
        said = (tmp_path / "log").read_text()
        assert "Traceback" not in said
        return said

    return read


@pytest.fixture
def trains(start, tmp_path):
    """Starts a long run, and waits until it has sampled."""

    def begin(*arguments: str) -> Forked:
        run = start(*arguments)
        index = tmp_path / "run" / "rollouts" / "index.jsonl"
        until(index.exists, lambda: run.poll() is None, seen=(tmp_path / "log").read_text)
        return run

    return begin


@pytest.mark.slow
def test_two_processes_train_as_the_configuration_says(start, recipe, config, tmp_path):
    arguments = [*recipe(do_eval=False), *config(7), "--num_processes", "2", "--max_steps", "1"]
    assert start(*arguments, forked=False).wait(300) == 0
    folder = tmp_path / "run"
    assert json.loads((folder / "summary.json").read_text())["steps"] == 1
    assert yaml.safe_load((folder / "config.yaml").read_text())["max_steps"] == 1
    assert sorted(open_run(folder).column("rank")) == [0] * 4 + [1] * 4


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_failure_of_the_processes_is_the_exit_status(start, recipe, config, log, processes):
    assert start(*recipe(tools=["mt_grpo.errors.nothing"]), *config(processes), "--dry_run").wait(300) == 1
    assert log().count("mt-grpo: The tool 'mt_grpo.errors.nothing' does not exist") == 1


def test_of_several_processes_the_first_to_warn_warns(monkeypatch):
    """Of a kind, whatever its numbers and quotations are; it goes on to, and others begin again with a restart."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    for rank, restart in enumerate("001"):
        monkeypatch.setattr(os, "environ", {**group, "TORCHELASTIC_RESTART_COUNT": restart})
        speaks.cache_clear()  # as in a process of its own
        record = logging.LogRecord("", logging.WARNING, "", 0, "%d differ, as %r", (rank, f"of {rank}"), None)
        assert [is_said_here(record), is_said_here(record)] == [rank != 1] * 2
    speaks.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "number", "group", "said"),
    [(1, signal.SIGTERM, False, "ended by SIGTERM"), (2, signal.SIGINT, True, "interrupted by Ctrl-C")],
)
def test_a_signal_ends_every_process(trains, recipe, config, log, processes, number, group, said):
    """Ctrl-C in a terminal reaches the whole group; another signal only the process it is sent to."""
    run = trains(*recipe(max_steps=10000, do_eval=False), *config(processes))
    children = psutil.Process(run.pid).children(recursive=True)
    assert len(children) >= processes
    (os.killpg if group else os.kill)(run.pid, number)
    assert run.wait(120) == 128 + number
    assert not psutil.wait_procs(children, 60)[1]
    assert f"mt-grpo: {said}." in log()


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "number"), [(2, signal.SIGUSR1), (2, signal.SIGTERM)])
def test_a_launcher_ends_with_the_status_of_a_preempted_run(
    trains, start, recipe, config, log, tmp_path, processes, number
):
    """Its processes are not begun again, and the same command goes on."""
    keys = {"max_steps": 10000, "do_eval": False, "enable_jit_checkpoint": number == signal.SIGTERM}
    arguments = [*recipe(**keys), *config(processes), "--max_restarts", "2"]
    run = trains(*arguments)
    os.kill(run.pid, number)
    assert run.wait(120) == 75
    assert log().count(f"The run was asked to end by {number.name}: what was learnt up to step") == 1
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    step = int(checkpoint.name.rpartition("-")[2])
    assert start(*arguments, "--resume_from_checkpoint", "auto", "--max_steps", str(step + 1)).wait(300) == 0


@pytest.mark.parametrize(("code", "status"), [(0, 0), (3, 3), (-9, 137)])
def test_a_process_that_a_signal_ended_counts_from_128(code, status):
    assert _status(code) == status


# What is refused


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("zero4", "'zero4' is unknown; the nearest is 'zero3': give one of fsdp2, zero2, zero3, or the path of a "),
        ("a" * 300, "is unknown: give one of fsdp2, zero2, zero3"),
        ("nowhere/zero3.yaml", "The accelerate configuration 'nowhere/zero3.yaml' is unknown"),
        ("broken.yaml", "broken.yaml is not valid YAML"),
        ("list.yaml", "list.yaml is no mapping of options to values: `accelerate config` makes one"),
        (__file__.replace("test_launch.py", ""), "is unknown"),
        ("text.yaml", "The accelerate configuration text.yaml has `num_machines: two`: give a whole number"),
        ("latin.yaml", "The accelerate configuration latin.yaml is no text in UTF-8"),
        ("keys.yaml", "The accelerate configuration keys.yaml cannot be launched: The config file at keys.yaml had "),
        ("zero3", "zero3 takes 7 GPUs, a process each, and this machine has"),
        ("sharded.yaml", "`distributed_type: FSDP` and `use_cpu: true`"),
        pytest.param(
            "speed.yaml",
            "speed.yaml cannot be launched: DeepSpeed is not installed",
            marks=pytest.mark.skipif(is_deepspeed_available(), reason="it is installed"),
        ),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(recipe, value, message, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    Path("broken.yaml").write_text("a: [")
    Path("list.yaml").write_text("- a")
    Path("text.yaml").write_text("num_machines: two")
    Path("latin.yaml").write_bytes(b"caf\xe9: 1")
    Path("keys.yaml").write_text("distributed_type: 'NO'\nnum_procesess: 2")
    Path("sharded.yaml").write_text("distributed_type: FSDP\nnum_processes: 2\nuse_cpu: true")
    Path("speed.yaml").write_text("distributed_type: DEEPSPEED\nnum_processes: 1\nuse_cpu: true")
    assert message in refused("train", *recipe(), "--accelerate_config", value)


def test_a_process_that_was_launched_launches_none(recipe, monkeypatch, refused):
    monkeypatch.setenv("LOCAL_RANK", "0")
    said = refused("train", *recipe(), "--accelerate_config", "zero3")
    assert "leave it out under `accelerate launch`" in said


def test_options_of_the_command_are_no_fields_of_a_recipe():
    names = {field.name for options in DATACLASSES for field in fields(options)}
    own = {(command, name) for command, own in OWN_OPTIONS.items() for name in own if name in names}
    # there it is how often a row is sampled, and no group; and where the supervisor of replicas answers, not a run
    assert own == {("eval", "num_generations"), ("rollout", "num_generations"), ("serve", "metrics_address")}


# Hosts


def meet(rank: int, address: str) -> list[str]:
    """The options of one of two hosts."""
    return ["--num_machines", "2", "--machine_rank", str(rank), "--main_process_ip", address]


@pytest.fixture
def of_host(recipe, config):
    """What one of two hosts is told, which waits for a second."""

    def arguments(rank: int, port: int, *options: str) -> list[str]:
        cpus = config(distributed_type="MULTI_CPU", main_process_port=None)
        there = ["--main_process_port", str(port), "--ddp_timeout", "1"]
        return [*recipe(do_eval=False), *cpus, *meet(rank, "127.0.0.1"), *there, *options]

    return arguments


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--num_machines", "2"], "needs `--main_process_ip`, the address of the host with `--machine_rank 0`"),
        (["--num_machines", "2", "--machine_rank", "2"], "`--machine_rank 2` must be from 0 to 1"),
        (["--num_machines", "4"], "`--num_processes 2`, those of all hosts together, is no multiple of"),
        (meet(0, "127.0.0.1"), "`main_process_port: 0` lets each host choose a port of its own"),
    ],
)
def test_hosts_are_told_what_they_have_to_say(recipe, config, refused, options, said):
    assert said in refused("train", *recipe(), *config(), "--num_processes", "2", *options)


def test_a_host_whose_first_host_never_comes_says_so(of_host, refused):
    port = free_port()
    line = refused("train", *of_host(1, port))
    assert line.startswith(
        f"mt-grpo: The first host of the run cannot be reached at 127.0.0.1:{port} within 1 s (Conn"
    )


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--max_restarts", "1")], ids=["once", "with restarts"])
def test_a_first_host_that_stays_alone_says_so(of_host, start, log, options):
    port = free_port()
    assert start(*of_host(0, port, *options), forked=False).wait(300) == 1
    assert f"mt-grpo: The 2 hosts of the run did not meet at 127.0.0.1:{port} within 1 s" in log()


@pytest.mark.own_process
def test_a_port_that_something_else_listens_at_is_named(of_host, refused, monkeypatch):
    """Also where it takes what it is sent and says nothing, for which torch waits without end."""
    monkeypatch.setattr(launch, "ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        line = refused("train", *of_host(1, silent.getsockname()[1]))
    assert "Something else than the first host of the run listens at 127.0.0.1:" in line


@pytest.mark.slow
def test_a_process_whose_peer_never_comes_says_so(recipe, start, log):
    """On a CPU, where transformers has no use for `ddp_timeout`, it bounds the wait too."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    group |= {"RANK": "0", "LOCAL_RANK": "0", "ACCELERATE_USE_CPU": "true"}
    assert start(*recipe(do_eval=False, ddp_timeout=1), forked=False, **group).wait(300) == 1
    assert log().count("mt-grpo: The processes of the run do not reach each other (Timed out") == 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[/third_party/gloo/pair.cc:1] Connection closed by peer. More"), ProcessGoneError),
        (RuntimeError("[/third_party/gloo/pair.cc:1] "), ProcessGoneError),
        (RuntimeError("Gloo connectFullMesh failed with [/gloo/pair.cc:1] refused"), ProcessGoneError),
        (RuntimeError("shapes do not fit"), RuntimeError),
    ],
)
def test_only_what_backends_raise_is_about_processes(error, expected):
    with pytest.raises(expected) as found, says_who_is_gone("run"):
        raise error
    assert type(found.value) is expected and "/gloo/" not in str(found.value)


# Two hosts that share no folder

STOPPING = """
import os, signal, time
from pathlib import Path

def stops(completions, trainer_state, **row):
    if trainer_state.global_step == int(os.environ.get("STOPS_AT", -1)):
        once = Path(os.environ["STOPPED"])
        if os.environ["HOW"] == "host":
            once.touch()
            time.sleep(600)
        if not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return [0.0] * len(completions)
"""
STEPS = 5


@pytest.fixture
def two(tmp_path, recipe, config):
    """Two hosts; `begin` starts a run on both, the second with further variables, and `alone` on the first."""
    (tmp_path / "stopping.py").write_text(STOPPING)
    keys = {**SAVE, "max_steps": STEPS, "save_steps": 2, "overwrite_output_dir": True}
    rewards = ["exact_match_reward_func", "format_reward_func", f"{tmp_path}/stopping.py:stops"]
    arguments = recipe(**keys, resume_from_checkpoint="auto", outcome_reward_funcs=rewards)
    command = ["-m", "mt_grpo", "train", *arguments, *config(distributed_type="MULTI_CPU", main_process_port=29500)]
    with hosts(2, tmp_path / "run", tmp_path / "private") as two:
        two.logs = [tmp_path / f"host{n}.log" for n in range(2)]
        two.begin = lambda *options, **of_second: [
            two.start(n, [*command, *meet(n, ADDRESS.format(1)), *options], two.logs[n], **(of_second if n else {}))
            for n in range(2)
        ]
        two.alone = lambda folder: two.start(0, [*command, "--output_dir", str(folder)], folder.with_suffix(".log"))
        yield two


@pytest.mark.slow
def test_hosts_die_and_the_run_ends_as_if_none_had(tmp_path, two):
    """A host dies, so the other one says so; the same commands go on, and begin again where a process dies."""

    def begin(how: str, *options: str) -> list:
        return two.begin(*options, STOPS_AT="3", HOW=how, STOPPED=str(tmp_path / how))

    running = begin("host")
    until((tmp_path / "host").exists, lambda: all(process.poll() is None for process in running))
    two.kill(1)
    assert running[0].wait(120) == 1
    said = two.logs[0].read_text()
    assert said.count("mt-grpo: ") == 1 and "Another process of the run is gone" in said and "Traceback" not in said
    first, second = (tmp_path / "private" / name for name in "01")
    assert is_whole(first / "checkpoint-2") and not list(second.glob("checkpoint-*"))

    running = begin("process", "--max_restarts", "1")
    assert [process.wait(400) for process in running] == [0, 0], two.logs[0].read_text()[-3000:]
    assert (tmp_path / "process").exists() and is_whole(first / f"checkpoint-{STEPS}")
    run = open_run(first)
    assert set(run.column("rank")) == {0, 1} and max(run.column("step")) == STEPS - 1
    assert all((first / "rollouts" / name).exists() for name in run.column("file"))

    alone = tmp_path / "alone"
    assert two.alone(alone).wait(400) == 0, alone.with_suffix(".log").read_text()[-3000:]
    expected, found = (load_file(folder / "model.safetensors") for folder in (alone, first))
    assert all(found[name].equal(weight) for name, weight in expected.items())


@pytest.mark.slow
def test_hosts_without_a_route_to_each_other_say_so(two):
    two.unplug(1)
    assert [process.wait(300) for process in two.begin("--ddp_timeout", "2")] == [1, 1]
    first, second = (log.read_text() for log in two.logs)
    assert f"The 2 hosts of the run did not meet at {ADDRESS.format(1)}:29500 within 2 s" in first
    assert "cannot be reached" in second and "(Network is unreachable)" in second
    assert all(said.count("mt-grpo: ") == 1 and "Traceback" not in said for said in (first, second))
