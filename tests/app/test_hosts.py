"""A run over two hosts that share no folder: what each keeps, and what becomes of it where one dies."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from support.hosts import ADDRESS, hosts
from support.waiting import until

from mt_grpo.runlog import open_run
from mt_grpo.training.checkpoint import is_whole

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
def command(tmp_path, recipe):
    (tmp_path / "stopping.py").write_text(STOPPING)
    (tmp_path / "accelerate.yaml").write_text(
        yaml.safe_dump({"distributed_type": "MULTI_CPU", "use_cpu": True, "mixed_precision": "no", "num_processes": 2})
    )
    keys = {"do_eval": False, "max_steps": STEPS, "save_strategy": "steps", "save_steps": 2}
    keys |= {"resume_from_checkpoint": "auto", "overwrite_output_dir": True}
    rewards = ["exact_match_reward_func", "format_reward_func", f"{tmp_path}/stopping.py:stops"]
    arguments = recipe(**keys, outcome_reward_funcs=rewards)
    return ["-m", "mt_grpo", "train", *arguments, "--accelerate_config", str(tmp_path / "accelerate.yaml")]


def of_host(n: int) -> list[str]:
    meet = ["--main_process_ip", ADDRESS.format(1), "--main_process_port", "29500"]
    return ["--num_machines", "2", "--machine_rank", str(n), *meet]


def wait_for(path: Path, processes: list) -> None:
    until(path.exists, lambda: all(process.poll() is None for process in processes))


@pytest.mark.slow
def test_hosts_die_and_the_run_ends_as_if_none_had(tmp_path, command):
    """A host dies, so the other one says so; the same commands go on, and begin again where a process dies."""
    with hosts(2, tmp_path / "run", tmp_path / "private") as two:
        logs = [tmp_path / f"host{n}.log" for n in range(2)]

        def start(how: str, *options: str) -> list:
            of_second = {"STOPS_AT": "3", "HOW": how, "STOPPED": str(tmp_path / how)}
            return [
                two.start(n, [*command, *of_host(n), *options], logs[n], **(of_second if n else {})) for n in range(2)
            ]

        running = start("host")
        wait_for(tmp_path / "host", running)
        two.kill(1)
        assert running[0].wait(120) == 1
        said = logs[0].read_text()
        assert said.count("mt-grpo: ") == 1 and "Another process of the run is gone" in said
        assert "Traceback" not in said
        first, second = (tmp_path / "private" / name for name in "01")
        assert is_whole(first / "checkpoint-2") and not list(second.glob("checkpoint-*"))

        running = start("process", "--max_restarts", "1")
        assert [process.wait(400) for process in running] == [0, 0], logs[0].read_text()[-3000:]
        assert (tmp_path / "process").exists()
        assert is_whole(first / f"checkpoint-{STEPS}")
        run = open_run(first)
        assert set(run.column("rank")) == {0, 1} and max(run.column("step")) == STEPS - 1
        assert all((first / "rollouts" / name).exists() for name in run.column("file"))

        alone = two.start(0, [*command, "--output_dir", str(tmp_path / "alone")], tmp_path / "alone.log")
        assert alone.wait(400) == 0, (tmp_path / "alone.log").read_text()[-3000:]
    expected, found = (load_file(folder / "model.safetensors") for folder in (tmp_path / "alone", first))
    assert all(found[name].equal(weight) for name, weight in expected.items())


@pytest.mark.slow
def test_hosts_without_a_route_to_each_other_say_so(tmp_path, command):
    with hosts(2, tmp_path / "run", tmp_path / "private") as two:
        two.unplug(1)
        logs = [tmp_path / f"host{n}.log" for n in range(2)]
        running = [two.start(n, [*command, *of_host(n), "--ddp_timeout", "2"], logs[n]) for n in range(2)]
        assert [process.wait(300) for process in running] == [1, 1]
    first, second = (log.read_text() for log in logs)
    assert f"The 2 hosts of the run did not meet at {ADDRESS.format(1)}:29500 within 2 s" in first
    assert "cannot be reached" in second and "(Network is unreachable)" in second
    assert all(said.count("mt-grpo: ") == 1 and "Traceback" not in said for said in (first, second))
