"""Ctrl-C while a command imports its modules, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

RECIPE = "--model_name_or_path embedded --dataset_name embedded --outcome_reward_funcs exact_match_reward_func"
CODE = """
import signal, sys


module = sys.argv[1]


class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            signal.raise_signal(signal.SIGINT)


# a shell that runs tests in the background ignores SIGINT
signal.signal(signal.SIGINT, signal.default_int_handler)
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
        ("tokenizers", "export runs"),
        ("torch", f"rollout {RECIPE}"),
        ("torch", f"serve {RECIPE} --use_vllm true"),
        ("trl", f"train {RECIPE}"),
    ],
)
@pytest.mark.slow
def test_ctrl_c_during_imports_is_one_line(module, command):
    ended = subprocess.run([sys.executable, "-c", CODE, module, *command.split()], capture_output=True, text=True)
    assert (ended.stderr, ended.returncode) == ("mt-grpo: interrupted by Ctrl-C.\n", 130)


LOST = """
import signal, sys, time

from mt_grpo.app.interrupt import run_interruptibly


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
