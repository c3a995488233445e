"""Ctrl-C while a command imports its modules, in a process of its own."""

from __future__ import annotations

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
