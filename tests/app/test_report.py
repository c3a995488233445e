"""What a run says at its end, or when it is interrupted: its commands can be copied, and are run here. Its curve."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import warnings

import pytest
from support.forked import Forked
from support.models import CPU_RUN
from support.own_process import TERMINAL
from support.waiting import until

from mt_grpo.app.train import next_steps, plot
from mt_grpo.cli import main
from mt_grpo.runlog import read_trajectories
from mt_grpo.training import MTGRPOConfig

SAVE = {"save_strategy": "steps", "save_steps": 1, "do_eval": False}


def commands(printed: str, program: str) -> list[list[str]]:
    """The commands of a program among what was printed, as words; those of `mt-grpo` without its name."""
    pattern = r"(?:mt-grpo|\S*python\S* -m mt_grpo) (.*)" if program == "mt-grpo" else rf"(\S*{program}\S* -c .*)"
    return [shlex.split(found) for found in re.findall(pattern, printed)]


def test_a_finished_run_says_how_to_go_on(recipe, tmp_path, capsys):
    assert main(["train", *recipe(**SAVE, overwrite_output_dir=True)]) == 0
    printed = capsys.readouterr().out
    assert f"{tmp_path}/run/rollouts  (every conversation)" in printed
    view, rollout, resume = commands(printed.split("What to do next:")[1], "mt-grpo")
    assert view == ["view", f"{tmp_path}/run"]
    assert rollout == f"rollout --config {tmp_path}/run/config.yaml --model_name_or_path {tmp_path}/run".split()
    assert main([*rollout, "--num_prompts", "1"]) == 0
    assert "conversation 1" in capsys.readouterr().out
    assert resume[-2:] == ["--max_steps", "4"] and main(resume) == 0
    assert "step 4/4" in capsys.readouterr().out
    assert (tmp_path / "run" / "checkpoint-1").exists()  # it was resumed, not begun anew


@pytest.mark.slow
def test_an_adapter_is_put_into_its_model_first(recipe, tmp_path, capsys):
    adapter = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"], "do_eval": False}
    assert main(["train", *recipe(**adapter)]) == 0
    printed = capsys.readouterr().out.split("What to do next:")[1]
    (merge,), (_, rollout) = commands(printed, "python"), commands(printed, "mt-grpo")
    subprocess.run([sys.executable, *merge[1:]], check=True)
    assert (tmp_path / "run" / "merged" / "model.safetensors").exists()
    assert main([*rollout, "--num_prompts", "1"]) == 0


def test_a_run_with_a_server_serves_the_trained_model(tmp_path):
    options = {**CPU_RUN, "report_to": ["tensorboard", "trackio"]}
    args = MTGRPOConfig(str(tmp_path), **options, use_vllm=True, weight_sync="lora")
    served, _, rolled, board, track = [command for _, command in next_steps(args, adapter=False)]
    model = f"--config {tmp_path}/config.yaml --model_name_or_path {tmp_path} --weight_sync auto"
    assert served.endswith(f" serve {model}") and rolled.endswith(f" rollout {model}")
    assert board == f"tensorboard --logdir {tmp_path}" and track == "trackio show --project huggingface"


def test_what_cannot_be_resumed_is_not_said_to_be(tmp_path):
    (_, view), (what, _) = next_steps(MTGRPOConfig(str(tmp_path), **CPU_RUN), adapter=False)
    assert view.endswith(f" view {tmp_path}") and what == "see what the trained agent does"


# Ctrl-C and SIGTERM


IN_THE_OPTIMISER = """
import signal
from torch.optim.optimizer import register_optimizer_step_pre_hook

steps = []


def interrupt(*args):
    steps.append(1)
    if len(steps) == 3:
        handle.remove()
        signal.raise_signal(signal.SIGNAL)


handle = register_optimizer_step_pre_hook(interrupt)
"""


@pytest.mark.own_process
@pytest.mark.parametrize(
    ("name", "status", "words"), [("SIGINT", 130, "interrupted by Ctrl-C"), ("SIGTERM", 143, "ended by SIGTERM")]
)
def test_a_signal_in_a_step_says_what_is_kept(recipe, tmp_path, capsys, name, status, words):
    plugin = tmp_path / "plugin.py"
    plugin.write_text(IN_THE_OPTIMISER.replace("signal.SIGNAL", f"signal.{name}"))
    assert main(["train", *recipe(**SAVE, max_steps=4, external_plugins=[str(plugin)])]) == status
    errors = capsys.readouterr().err
    (said,) = [line for line in errors.splitlines() if line.startswith("mt-grpo: ")]
    folder = tmp_path / "run"
    assert said.startswith(
        f"mt-grpo: {words}. 2 steps were taken, and what was learnt up to step 2 is in {folder}/checkpoint-2. "
        f"Metrics and conversations so far are in {folder}. Go on with: "
    )
    assert "Traceback" not in errors
    assert len(list(read_trajectories(folder))) == 3 * 4  # those of the third step too
    plugin.write_text("")
    (resume,) = commands(said, "mt-grpo")
    assert main(resume) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("step ")] == [
        "3/4",
        "4/4",
    ]


RAISES = """
import signal
from pathlib import Path
from mt_grpo.envs import MultiTurnToolEnv

pressed = []


def press(when):
    if not pressed and when:
        pressed.append(True)  # a second signal ends the process at once
        signal.raise_signal(signal.SIGINT)


class Sampling(MultiTurnToolEnv):
    async def step(self, turn):
        press(self.session.startswith("train-000000"))
        return await super().step(turn)


class LastMeasure(MultiTurnToolEnv):
    def start(self, prompt):
        press((Path(__file__).parent / "run" / "model.safetensors").exists())
        return super().start(prompt)
"""


@pytest.mark.own_process
@pytest.mark.parametrize(
    ("env", "keys", "said"),
    [
        (
            "Sampling",
            {"do_eval": False, "max_turn_length": None, "max_completion_length": 2000},
            "mt-grpo: interrupted by Ctrl-C. No step was taken.\n",
        ),
        (
            "LastMeasure",
            {"max_steps": 1},
            "Training had ended: the model, its metrics and its conversations are in HERE/run.",
        ),
    ],
)
def test_ctrl_c_says_whether_anything_is_kept(recipe, tmp_path, capsys, monkeypatch, env, keys, said):
    if env == "Sampling":  # a model that knows nothing would sample for long
        monkeypatch.setattr("mt_grpo.envs.protocols.TagProtocol.stop", tuple("aeiou "))
    (tmp_path / "raises.py").write_text(RAISES)
    assert main(["train", *recipe(env=f"{tmp_path / 'raises.py'}:{env}", **keys)]) == 130
    assert said.replace("HERE", str(tmp_path)) in capsys.readouterr().err


TWICE = """
import asyncio, os, signal
from mt_grpo.envs import MultiTurnToolEnv


class Env(MultiTurnToolEnv):
    async def step(self, turn):
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:  # the first one was heard
                os.kill(os.getpid(), signal.SIGINT)
"""
PRESSED = f"""{TERMINAL}
from mt_grpo.envs.protocols import TagProtocol
TagProtocol.stop = tuple("aeiou ")
from mt_grpo.cli import main
sys.exit(main())
"""


@pytest.mark.slow
def test_a_second_ctrl_c_waits_for_nothing(recipe, tmp_path):
    """A conversation that does not let itself be ended is waited for once, for 5 s."""
    (tmp_path / "twice.py").write_text(TWICE)
    arguments = recipe(
        env=f"{tmp_path / 'twice.py'}:Env", max_turn_length=None, do_eval=False, max_concurrent_rollouts=1
    )
    (tmp_path / "terminal.py").write_text(PRESSED)
    run = Forked([str(tmp_path / "terminal.py"), "train", *arguments], tmp_path / "log")
    assert run.wait() == -signal.SIGINT  # 130 for a shell
    said = (tmp_path / "log").read_text()
    assert said.count("mt-grpo: interrupted by Ctrl-C. No step was taken.") == 1
    assert "did not end within" not in said and "not ended within" not in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_of_several_processes_one_says_what_is_kept(recipe, tmp_path):
    """As in a terminal, the launcher and all of its processes get Ctrl-C, and the launcher passes it on as well."""
    (tmp_path / "terminal.py").write_text(PRESSED)
    launch = ["-m", "support.launcher", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    arguments = recipe(**SAVE, max_steps=5000, per_device_train_batch_size=2)
    command, log = [*launch, str(tmp_path / "terminal.py"), "train", *arguments], tmp_path / "log"
    run = Forked(command, log, {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"})
    until(lambda: re.search("^step +2/", log.read_text(), re.M), lambda: run.poll() is None, seen=log.read_text)
    os.killpg(run.pid, signal.SIGINT)
    run.wait(120)
    said = re.findall(r"mt-grpo: (.*)", log.read_text())
    assert len(said) == 1
    assert re.match(r"interrupted by Ctrl-C\. \d+ steps were taken, and what was learnt up to step \d", said[0])
    assert re.search(r"the command that began this run, with --resume_from_checkpoint \S+/checkpoint-\d+$", said[0])


def test_a_curve_without_a_number_is_drawn_without_a_warning(tmp_path):
    history = [
        {"step": 1, "reward": None, "rewards/a/mean": None},
        {"step": 2, "reward": None, "rewards/a/mean": None},
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot(history, tmp_path / "curve.png", "t")
        plot([], tmp_path / "empty.png", "t")
    assert (tmp_path / "curve.png").stat().st_size
