"""Hosts and processes that do not find each other: one sentence each, in a time that `ddp_timeout` bounds."""

from __future__ import annotations

import os
import socket

import pytest
import yaml
from support.forked import Forked
from support.loopback import free_port

from mt_grpo.app import launch
from mt_grpo.cli import main
from mt_grpo.training.ranks import ProcessGoneError, says_who_is_gone


@pytest.fixture
def command(recipe, tmp_path):
    """Arguments of `mt-grpo train` for one of two hosts."""
    config = {"distributed_type": "MULTI_CPU", "use_cpu": True, "mixed_precision": "no", "num_processes": 2}

    def of_host(rank: int, port: int, *options: str) -> list[str]:
        path = tmp_path / "accelerate.yaml"
        path.write_text(yaml.safe_dump({**config, "num_machines": 2, "machine_rank": rank}))
        meet = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port), "--ddp_timeout", "1"]
        return [*recipe(do_eval=False), "--accelerate_config", str(path), *meet, *options]

    return of_host


@pytest.mark.parametrize("options", [[], ["--max_restarts", "1"]], ids=["once", "with restarts"])
def test_a_host_whose_first_host_never_comes_says_so(command, capsys, options):
    port = free_port()
    assert main(["train", *command(1, port, *options)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"mt-grpo: The first host of the run cannot be reached at 127.0.0.1:{port} within 1 s (Conn"
    )


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--max_restarts", "1"]], ids=["once", "with restarts"])
def test_a_first_host_that_stays_alone_says_so(command, tmp_path, options):
    port = free_port()
    run = Forked(["-m", "mt_grpo", "train", *command(0, port, *options)], tmp_path / "log")
    assert run.wait(300) == 1
    said = (tmp_path / "log").read_text()
    assert f"mt-grpo: The 2 hosts of the run did not meet at 127.0.0.1:{port} within 1 s" in said
    assert "Traceback" not in said


@pytest.mark.own_process
def test_a_port_that_something_else_listens_at_is_named(command, capsys, monkeypatch):
    """Also where it takes what it is sent and says nothing, for which torch waits without end."""
    monkeypatch.setattr(launch, "ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert main(["train", *command(1, silent.getsockname()[1])]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "Something else than the first host of the run listens at 127.0.0.1:" in line


def test_a_port_of_its_own_for_each_host_is_refused(command, tmp_path, capsys):
    arguments = command(0, 0)
    path = arguments[arguments.index("--accelerate_config") + 1]
    place = arguments.index("--main_process_port")
    del arguments[place : place + 2]
    with open(path, "a") as file:
        file.write("main_process_port: 0\n")
    assert main(["train", *arguments]) == 1
    assert "`main_process_port: 0` lets each host choose a port of its own" in capsys.readouterr().err


@pytest.mark.slow
def test_a_process_whose_peer_never_comes_says_so(recipe, tmp_path):
    """On a CPU, where transformers has no use for `ddp_timeout`, it bounds the wait too."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    group |= {"RANK": "0", "LOCAL_RANK": "0", "ACCELERATE_USE_CPU": "true"}
    arguments = ["-m", "mt_grpo", "train", *recipe(do_eval=False), "--ddp_timeout", "1"]
    run = Forked(arguments, tmp_path / "log", {**os.environ, **group})
    assert run.wait(300) == 1
    said = (tmp_path / "log").read_text()
    assert said.count("mt-grpo: The processes of the run do not reach each other (Timed out") == 1
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[/third_party/gloo/pair.cc:1] Connection closed by peer. More"), ProcessGoneError),
        (RuntimeError("Gloo connectFullMesh failed with [/gloo/pair.cc:1] refused"), ProcessGoneError),
        (RuntimeError("shapes do not fit"), RuntimeError),
    ],
)
def test_only_what_backends_raise_is_about_processes(error, expected):
    with pytest.raises(expected) as found, says_who_is_gone("run"):
        raise error
    assert type(found.value) is expected and "/gloo/" not in str(found.value)
