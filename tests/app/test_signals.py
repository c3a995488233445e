"""Ctrl-C and SIGTERM: in imports, in a step, in conversations that swallow them, to one process and to several."""

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from support.app_fixtures import SAVE
from support.forked import Forked
from support.own_process import TERMINAL
from support.waiting import until

from mt_grpo import concurrency
from mt_grpo.cli import main
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.preemption import run_interruptibly
from mt_grpo.runlog import read_trajectories
from mt_grpo.runlog.files import Heartbeat

RECIPE = "--model_name_or_path embedded --dataset_name embedded --outcome_reward_funcs exact_match_reward_func"
IMPORTING = f"""{TERMINAL}
module = sys.argv[1]


class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            signal.raise_signal(signal.SIGINT)


sys.meta_path.insert(0, Interrupting())
from mt_grpo.__main__ import main

sys.argv = ["mt-grpo", *sys.argv[2:]]
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("mt_grpo.cli", "--version"),
        ("yaml", "--version"),
        ("pyarrow", "view runs"),
        ("torch", f"serve {RECIPE} --use_vllm true"),
        ("trl", f"train {RECIPE}"),
    ],
)
@pytest.mark.slow
def test_ctrl_c_during_imports_is_one_line(module, command):
    arguments = [sys.executable, "-c", IMPORTING, module, *command.split()]
    ended = subprocess.run(arguments, capture_output=True, text=True)
    assert (ended.stderr, ended.returncode) == ("mt-grpo: interrupted by Ctrl-C.\n", 130)


THREADS = """
import sys, threading, time
from mt_grpo import cli
from mt_grpo.__main__ import main

cli.main = lambda: threading.Thread(target=time.sleep, args=(SECONDS,), name="my logger").start() or 3
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ("0.1", ""),
        ("4", "mt-grpo: the command is over, and the process ends once these threads do: my logger.\n"),
    ],
)
def test_threads_that_keep_a_finished_process_are_named(seconds, said):
    ended = subprocess.run([sys.executable, "-c", THREADS.replace("SECONDS", seconds)], capture_output=True, text=True)
    assert (ended.stderr, ended.returncode) == (said, 3)


LOST = """
import signal, sys, time

from mt_grpo.preemption import run_interruptibly


class Gone:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)  # what is raised here goes no further


def command(arguments):
    gone = Gone()
    del gone
    time.sleep(600)


sys.exit(run_interruptibly(command, []))
"""


@pytest.mark.parametrize("launched", [{}, {"WORLD_SIZE": "2", "RANK": "0"}])
def test_a_signal_in_a_destructor_is_not_lost(launched):
    ended = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, env=os.environ | launched)
    assert (ended.stderr, ended.returncode) == ("mt-grpo: ended by SIGTERM.\n", 143)


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [(signal.SIGQUIT, 131, "ended by SIGQUIT"), ("by a reward", 130, "interrupted by Ctrl-C")],
)
def test_a_signal_that_only_a_launcher_hears_is_named(tmp_path, capsys, raised, status, said):
    def command(arguments):
        with Heartbeat(tmp_path, lambda: {"step": 0, "of": 1, "waits_for": "", "under_way": []}).beating():
            raise KeyboardInterrupt(raised)

    assert run_interruptibly(command, []) == status
    assert capsys.readouterr().err == f"mt-grpo: {said}.\n"


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
    ("name", "status", "words"),
    [
        ("SIGINT", 130, "interrupted by Ctrl-C"),
        ("SIGTERM", 143, "ended by SIGTERM"),
        ("SIGHUP", 129, "ended by SIGHUP"),
    ],
)
def test_a_signal_in_a_step_says_what_is_kept(recipe, prints, tmp_path, capsys, name, status, words):
    plugin, folder = tmp_path / "plugin.py", tmp_path / "run"
    plugin.write_text(IN_THE_OPTIMISER.replace("signal.SIGNAL", f"signal.{name}"))
    assert main(["train", *recipe(**SAVE, max_steps=4, external_plugins=[str(plugin)])]) == status
    errors = capsys.readouterr().err
    (said,) = [line for line in errors.splitlines() if line.startswith("mt-grpo: ")]
    assert said.startswith(
        f"mt-grpo: {words}. 2 steps were taken, and what was learnt up to step 2 is in {folder}/checkpoint-2. "
        f"Metrics and conversations so far are in {folder}. Go on with: "
    )
    assert "Traceback" not in errors
    assert len(list(read_trajectories(folder))) == 3 * 4  # those of the third step too
    plugin.write_text("")
    (resume,) = re.findall(r"Go on with: (?:mt-grpo|\S*python\S* -m mt_grpo) (.*)", said)
    lines = prints(*shlex.split(resume)).splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["3/4", "4/4"]


_pressed = set()


def press(by: MultiTurnToolEnv, when: bool) -> None:
    if when and type(by) not in _pressed:
        _pressed.add(type(by))  # a second signal ends the process at once
        os.kill(os.getpid(), signal.SIGINT)


class Sampling(MultiTurnToolEnv):
    async def step(self, turn):
        press(self, self.session.startswith("train-000000"))
        return await super().step(turn)


class LastMeasure(MultiTurnToolEnv):
    def start(self, prompt):
        press(self, Path(os.environ["MEASURED"]).exists())
        return super().start(prompt)


class Stubborn(MultiTurnToolEnv):
    """Does not let itself be ended."""

    async def step(self, turn):
        concurrency.GRACE = 0.5
        press(self, True)
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            self.cancelled()

    def cancelled(self):
        pass


class Twice(Stubborn):
    def cancelled(self):  # the first one was heard
        os.kill(os.getpid(), signal.SIGINT)


LONG = {"max_turn_length": None, "max_completion_length": 2000}


@pytest.mark.own_process
@pytest.mark.parametrize(
    ("env", "keys", "said"),
    [
        (Sampling, {"do_eval": False, **LONG}, "mt-grpo: interrupted by Ctrl-C. No step was taken.\n"),
        (
            LastMeasure,
            {"max_steps": 1},
            "Training had ended: the model, its metrics and its conversations are in RUN.",
        ),
    ],
)
def test_ctrl_c_says_whether_anything_is_kept(recipe, tmp_path, capsys, monkeypatch, env, keys, said):
    if env is Sampling:  # a model that knows nothing would sample for long
        monkeypatch.setattr("mt_grpo.envs.protocols.TagProtocol.stop", tuple("aeiou "))
    monkeypatch.setenv("MEASURED", str(tmp_path / "run" / "model.safetensors"))
    assert main(["train", *recipe(env=f"{__file__}:{env.__name__}", **keys)]) == 130
    assert said.replace("RUN", str(tmp_path / "run")) in capsys.readouterr().err


class Evaluated(MultiTurnToolEnv):
    async def step(self, turn):
        press(self, True)
        return await super().step(turn)


@pytest.mark.own_process
def test_ctrl_c_in_an_evaluation_says_how_it_goes_on(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mt_grpo.envs.protocols.TagProtocol.stop", tuple("aeiou "))
    save = ["--save", str(tmp_path / "evaluated")]
    assert main(["eval", *recipe(env=f"{__file__}:{Evaluated.__name__}", **LONG), *save]) == 130
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mt-grpo: ")]
    (folder,) = re.findall(r"interrupted by Ctrl-C. What has ended is in (\S+), and the same command goes on", said)
    assert Path(folder).is_relative_to(tmp_path / "evaluated")


PRESSED = f"""{TERMINAL}
from mt_grpo.envs.protocols import TagProtocol
TagProtocol.stop = tuple("aeiou ")
from mt_grpo.cli import main
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "env", "status", "waited"),
    [
        ("train", Stubborn, 130, True),
        ("rollout", Stubborn, 130, True),
        ("train", Twice, -signal.SIGINT, False),  # 130 for a shell
    ],
)
def test_ctrl_c_ends_a_command_though_a_conversation_swallows_it(recipe, tmp_path, command, env, status, waited):
    """It is waited for once, for 5 s; after a second Ctrl-C not at all."""
    (tmp_path / "terminal.py").write_text(PRESSED)
    keys = {"max_concurrent_rollouts": 1, "do_eval": False} if env is Twice else {}
    arguments = recipe(env=f"{__file__}:{env.__name__}", **LONG, **keys)
    run, log = Forked([str(tmp_path / "terminal.py"), command, *arguments], tmp_path / "log"), tmp_path / "log"
    assert run.wait() == status
    said = log.read_text()
    assert said.count("mt-grpo: interrupted by Ctrl-C.") == 1
    assert ("not ended within 0.5 s: conversation 'eval-0000" in said) == waited
    if env is Twice:
        assert "No step was taken" in said
        assert not any(words in said for words in ("not ended within", "did not end within", "Traceback"))


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
    (said,) = re.findall(r"mt-grpo: (.*)", log.read_text())
    assert re.match(r"interrupted by Ctrl-C\. \d+ steps were taken, and what was learnt up to step \d", said)
    assert re.search(r"the command that began this run, with --resume_from_checkpoint \S+/checkpoint-\d+$", said)
