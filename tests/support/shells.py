"""What a policy says in the shell of a task, and conversations there that branch."""

import asyncio
import json

from mt_grpo.envs.source import check_source
from mt_grpo.integrations.harbor import HarborEnv, HarborTasks
from mt_grpo.rollout import RolloutRequest, RolloutRunner, SamplingParams, ScriptedEngine
from mt_grpo.rollout.runner import Branching
from support.models import build_tokenizer

SUBMIT = '<tool>{"name": "submit", "args": {}}</tool>'


def call(command):
    return f"<tool>{json.dumps({'name': 'bash', 'args': {'command': command}})}</tool>"


HELLO, TEST = "printf hello > /app/hello.txt", "[ $(cat /app/hello.txt) = hello ] && echo 1 || echo 0"


def write_task(folder, toml, test=TEST, dockerfile="FROM base\nWORKDIR /app\n", result="reward.txt"):
    """Writes a task whose test is a shell command that says the reward."""
    for name, text in {
        "task.toml": toml,
        "instruction.md": "Write the word hello into /app/hello.txt.\n",
        "environment/Dockerfile": dockerfile,
        "environment/data/one.txt": "one\n",
        "tests/test.sh": f"#!/bin/bash\necho verified\nmkdir -p /logs/verifier\n({test}) > /logs/verifier/{result}\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def play_turns(sandbox, folder, *turns, number=1, limits=None, latency=0.0, **options):
    """Plays so many conversations of a folder's first task at once, each with these turns."""
    source = HarborTasks(HarborEnv(sandbox, **options), str(folder))
    row = source.rows("train")[0]
    engine = ScriptedEngine(build_tokenizer(), lambda session, turn: f"{turns[turn]}<|im_end|>", latency)
    requests = [RolloutRequest(row["prompt"], str(index), row=row) for index in range(number)]
    return asyncio.run(RolloutRunner(source, engine, limits).run(requests, SamplingParams(max_tokens=4000)))


def play_branches(sandbox, folder, first, *commands):
    """Plays a first turn, and branches that go on with commands of their own."""
    source = HarborTasks(HarborEnv(sandbox), str(folder))
    check_source(source, branches=True)
    row = source.rows("train")[0]
    said = [[call(command), SUBMIT] for command in commands]
    said[0].insert(0, call(first))
    engine = ScriptedEngine(build_tokenizer(), lambda session, turn: f"{said[int(session)][turn]}<|im_end|>")
    requests = [RolloutRequest(row["prompt"], str(number), row=row) for number in range(len(commands))]
    runner, branching = RolloutRunner(source, engine), Branching(1, len(commands))
    return asyncio.run(runner.run(requests, SamplingParams(max_tokens=4000), branching=branching))
