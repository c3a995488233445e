"""Tools that are plain functions, called in processes of their own."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import psutil
import pytest
from support import computing_tools
from support.computing_tools import ask, end, fail, leave, lock, spin, unsendable, where
from support.waiting import until, until_true

from mt_grpo.concurrency import run
from mt_grpo.envs import MultiTurnToolEnv
from mt_grpo.envs.source import source_of
from mt_grpo.envs.tool_env import execute_calls
from mt_grpo.errors import ConfigError
from mt_grpo.tools import Tool, ToolDefinitionError, in_processes
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.environment import build_env, check_env
from mt_grpo.trajectory import ToolCall

FUNCTIONS = [where, fail, ask, end, leave, lock, spin, unsendable]


@pytest.fixture(scope="module")
def tools():
    return {tool.name: tool for tool in in_processes(FUNCTIONS, 2)}


def called(tools, *calls, timeout=60.0):
    made = [ToolCall(name, arguments) for name, arguments in calls]
    run(execute_calls(made, tools, timeout))
    return made


def ends(process):
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(process)).wait(timeout=60)


def runs_elsewhere(tools):
    (call,) = called(tools, ("where", {}))
    assert call.error is None and call.result != str(os.getpid())
    return call.result


def test_calls_run_in_as_many_processes_as_there_are(tools):
    processes = {call.result for call in called(tools, *[("where", {})] * 12)}
    assert 1 <= len(processes) <= 2 and str(os.getpid()) not in processes


def test_an_error_is_told_with_its_line_in_the_tool(tools):
    (call,) = called(tools, ("fail", {"code": 5}))
    assert call.result == "Error: NoNumber: 5: odd"
    assert computing_tools.__file__ in call.where and "in fail" in call.where


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("end", {"code": 3}, "The process that ran it ended."),
        ("leave", {}, "SystemExit: done"),
        ("ask", {}, "EOFError: EOF when reading a line"),
        ("unsendable", {}, "TypeError: cannot pickle '_thread.lock' object"),
    ],
)
def test_what_ends_a_call_ends_no_other(tools, name, arguments, error):
    one, other = called(tools, (name, arguments), ("where", {}))
    assert (one.error, other.error) == (error, None)


def test_a_call_that_is_given_up_ends_its_process(tools, tmp_path):
    file, call = tmp_path / "process", ToolCall("spin", {"file": str(tmp_path / "process")})

    async def give_up():
        running = asyncio.create_task(execute_calls([call], tools))
        await until_true(lambda: file.exists() and file.read_text())
        running.cancel()
        await asyncio.wait([running])

    run(give_up())
    assert call.error == "spin did not finish before the conversation ended."
    ends(file.read_text())
    runs_elsewhere(tools)


def test_locks_leave_no_file_where_their_process_is_killed(tools):
    (call,) = called(tools, ("lock", {}))
    assert call.result == "None"


def test_only_plain_functions_are_called_there():
    async def waits() -> str:
        """Waits."""

    class Counter:
        def count(self) -> str:
            """Counts."""

    def nested() -> str:
        """Is not at the top of a module."""

    functions = [where, waits, Counter().count]
    inside, *others = in_processes(functions, 1)
    assert inside.function is not where and [each.function for each in others] == functions[1:]
    with pytest.raises(ToolDefinitionError, match=r"no tool is a plain function .*tools are: waits, count"):
        in_processes(functions[1:], 2)
    with pytest.raises(ConfigError, match=r"nested \(.*test_tool_processes.py, line \d+\) cannot be called .* top of"):
        in_processes([nested], 2)


def test_a_smaller_limit_of_a_tool_is_kept():
    limited = replace(Tool.from_function(where), concurrency=1)
    one, other = in_processes([limited, replace(limited, name="other", concurrency=9)], 2)
    assert (one.concurrency, other.concurrency) == (1, 2) and one.limit is limited.limit


SCRIPT = """
from mt_grpo.concurrency import run
from mt_grpo.processes import Processes

def own(word):
    return word + "led"

def main():
    processes = Processes(1)
    processes.start([own])
    print(run(processes.call(own, {"word": "cal"})))
"""


@pytest.mark.parametrize("guarded", [True, False])
def test_a_script_needs_a_guard(tmp_path, guarded):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT + ("\nif __name__ == '__main__':\n    main()\n" if guarded else "\nmain()\n"))
    ended = subprocess.run([sys.executable, str(file)], capture_output=True, text=True)
    if guarded:
        assert ended.stdout == "called\n"
    else:
        assert "put what that does under `if __name__ == '__main__':`" in ended.stderr.splitlines()[-1]


SPINS = """
from support.computing_tools import spin
from mt_grpo.processes import Processes
from mt_grpo.concurrency import run
if __name__ == '__main__':
    run(Processes(1).call(spin, {'file': 'process'}))
"""


def test_processes_end_with_the_one_that_made_them(tmp_path):
    file, spun = tmp_path / "script.py", tmp_path / "process"
    file.write_text(SPINS)
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, str(file)], env=os.environ | path, cwd=tmp_path) as made:
        until(lambda: spun.exists() and spun.read_text(), lambda: made.poll() is None)
        made.kill()
    ends(spun.read_text())


def test_processes_end_with_their_pool():
    (tool,) = in_processes([where], 1)
    process = runs_elsewhere({"where": tool})
    del tool
    gc.collect()
    ends(process)


def test_a_recipe_names_their_number(tmp_path):
    args = MTGRPOConfig(str(tmp_path), tools=["support.computing_tools.where"], tool_processes=1, use_cpu=True)
    runs_elsewhere(check_env(source_of(build_env(args)), args).tools)
    with pytest.raises(ConfigError, match="`tool_processes` is 1, and the trainer was given an `env`"):
        check_env(MultiTurnToolEnv([where]), args)
    others = {"talk": {"call_protocol": "plain"}, "mine": "mt_grpo.envs.MultiTurnToolEnv"}
    args.tools, args.environments = None, {"tools": {"tools": ["support.computing_tools.where"]}, **others}
    built = build_env(args)
    runs_elsewhere(built["tools"].tools)
    assert not built["talk"].tools
    for environments in (None, others):
        args.environments = environments
        with pytest.raises(ConfigError, match="`tool_processes` is 1, and no tool is named: leave it out"):
            build_env(args)
