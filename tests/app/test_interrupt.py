"""Ctrl-C while a command imports its modules, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

REWARD = ("--outcome_reward_funcs", "exact_match_reward_func")
CODE = """
import signal, sys


module, number = sys.argv[1], getattr(signal, sys.argv[2])


class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            signal.raise_signal(number)


# a shell that runs tests in the background ignores SIGINT
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting())
from mt_grpo.__main__ import main

sys.argv = ["mt-grpo", *sys.argv[3:]]
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("mt_grpo.cli", ["--version"]),
        ("yaml", ["--version"]),
        ("pyarrow", ["view", "runs"]),
        ("tokenizers", ["export", "runs"]),
        ("torch", ["rollout", "--model_name_or_path", "embedded", "--dataset_name", "embedded", *REWARD]),
        (
            "torch",
            ["serve", "--model_name_or_path", "embedded", "--dataset_name", "embedded", *REWARD, "--use_vllm", "true"],
        ),
        ("trl", ["train", "--model_name_or_path", "embedded", "--dataset_name", "embedded", *REWARD]),
    ],
)
@pytest.mark.parametrize(("name", "status", "words"), [("SIGINT", 130, "interrupted by Ctrl-C")])
@pytest.mark.slow
def test_ctrl_c_during_imports_is_one_line(module, command, name, status, words):
    ended = subprocess.run([sys.executable, "-c", CODE, module, name, *command], capture_output=True, text=True)
    assert ended.stderr == f"mt-grpo: {words}.\n" and ended.returncode == status


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
