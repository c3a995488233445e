"""Builds the small model of recipes/terminal/quickstart.yaml, which knows shell syntax badly, in a minute or three.

    python scripts/warm_start_terminal.py
    python scripts/warm_start_terminal.py --mini-swe-agent FOLDER    # one that speaks as that agent's text mode asks

The traces are of tasks to find, count and edit, as `mt_grpo/data/terminal.py` writes them, with words and numbers
drawn at random. The first phase shows commands that work; the second mixes in slips of syntax, which reinforcement
learning has to undo.
"""

import argparse
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import AddedToken
from warm_start import Phase, build_tokenizer, new_model, train
from warm_start_traces import PROMPT, REPLY, Trace

from mt_grpo.data.embedded.corpus import SYSTEM_PROMPT
from mt_grpo.data.terminal import NAMES

MODEL_DIR = Path(__file__).parents[1] / "mt_grpo/data/embedded/terminal_model"
SYSTEM = "Solve the task in the shell."
SIZE = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 2}
UNCLOSED = "bash: /tmp/.shell/command: line 1: unexpected EOF while looking for matching `''\n[exit code 2]"
EMPTY = "[no output]"


class Form(NamedTuple):
    """How an agent's loop speaks with the model: its prompt, a call of the shell, what it prints, and the end."""

    prompt: str
    call: Callable[[str], str]
    reply: Callable[[str], str]
    submit: str
    framed: tuple[str, ...]
    """Parts of calls that are one token each."""
    steps: int
    """Of traces without slips, until paths are copied."""


def call(command: str) -> str:
    """A call of the shell as a tool."""
    return f"<tool>{json.dumps({'name': 'bash', 'args': {'command': command}})}</tool>"


def observe(output: str) -> str:
    """What mini-swe-agent says of a command that printed `output`."""
    text, _, code = output.removesuffix("]").partition("\n[exit code ")
    text = text.replace("/tmp/.shell/command:", "bash:").replace(
        "bash: line 1: unexpected", "bash: -c: line 1: unexpected"
    )
    text = "" if text == EMPTY else text + "\n"
    said = f"<returncode>{code or 0}</returncode>\n<output>\n{text}</output>"
    return f"\n<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"


SUBMITTED = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
BLOCK = ("```mswea_bash_command\n", "\n```<|im_end|>")
TOOLS = Form(
    PROMPT.replace(SYSTEM_PROMPT, SYSTEM),
    call,
    REPLY.format,
    '<tool>{"name": "submit", "args": {}}</tool>',
    ('{"name": "bash", "args": {"command": "', '"}}', '{"name": "submit", "args": {}}'),
    600,
)
MINI_SWE_AGENT = Form(
    PROMPT.replace(SYSTEM_PROMPT, SYSTEM),
    lambda command: command.join(BLOCK),
    observe,
    f"echo {SUBMITTED}".join(BLOCK),
    (BLOCK[0], "\n```", f"echo {SUBMITTED}"),
    1200,
)


def write(value: str) -> tuple[str, str, list[tuple[str, str]]]:
    """The command that writes an answer, its output, and slips with theirs."""
    slips = [
        (f"echo {value} /app/answer.txt", f"{value} /app/answer.txt"),
        (
            f"echo {value} | /app/answer.txt",
            "/tmp/.shell/command: line 1: /app/answer.txt: No such file or directory\n[exit code 127]",
        ),
        (f"echo '{value} > /app/answer.txt", UNCLOSED),
        (f"cat {value} > /app/answer.txt", f"cat: {value}: No such file or directory\n[exit code 1]"),
    ]
    return f"echo {value} > /app/answer.txt", EMPTY, slips


def steps_of(rng: random.Random) -> tuple[str, list[tuple[str, str, list[tuple[str, str]]]]]:
    """A task, and the commands that solve it, each with its output and slips with theirs."""
    word, folder, file = (rng.choice(NAMES) for _ in range(3))
    kind = rng.choice(("find", "count", "edit"))
    if kind == "find":
        path = f"/app/{folder}/{file}.txt"
        slips = [
            (f"grep {word} /app", "grep: /app: Is a directory\n[exit code 2]"),
            (f"grep -rlw '{word} /app", UNCLOSED),
            (f"find {word} /app", f"find: '{word}': No such file or directory\n[exit code 1]"),
            (f"grep -rlw {word} app", "grep: app: No such file or directory\n[exit code 2]"),
        ]
        asked = f"One file below /app holds the word {word}. Write its absolute path into /app/answer.txt."
        return asked, [(f"grep -rlw {word} /app", path, slips), write(path)]
    if kind == "count":
        level, number = rng.choice(("INFO", "WARN", "ERROR")), str(rng.randint(1, 40))
        slips = [
            (f"grep -c '{level} /app/service.log", UNCLOSED),
            (f"grep -c {level}", "0\n[exit code 1]"),
            (f"grep -c {level} service", "grep: service: No such file or directory\n[exit code 2]"),
            (
                f"count {level} /app/service.log",
                "/tmp/.shell/command: line 1: count: command not found\n[exit code 127]",
            ),
        ]
        asked = f"How many lines of /app/service.log are of the level {level}? Write the number into /app/answer.txt."
        return asked, [(f"grep -c {level} /app/service.log", number, slips), write(number)]
    wanted = rng.randint(1000, 9999)
    edit = f"s/^{word} = .*/{word} = {wanted}/"
    lines = [f"{rng.choice(NAMES)} = {rng.randint(1, 999)}" for _ in range(4)]
    unknown = "sed: -e expression #1, char {}: unterminated `s' command\n[exit code 1]"
    slips = [
        (f"sed '{edit}' /app/settings.ini", "\n".join(lines)),
        (f"sed -i '{edit[:-1]}' /app/settings.ini", unknown.format(len(edit) - 1)),
        (f"sed -i {edit} /app/settings.ini", unknown.format(len(word) + 3)),
        (f"sed -i '{edit} /app/settings.ini", UNCLOSED),
    ]
    asked = f"Set {word} to {wanted} in /app/settings.ini, and change nothing else."
    return asked, [(f"sed -i '{edit}' /app/settings.ini", EMPTY, slips)]


def make_trace(rng: random.Random, hops: tuple[int, ...], habits: bool, form: Form = TOOLS) -> Trace:
    """One conversation, with slips where `habits` are asked for, most of which are not mended."""
    asked, steps = steps_of(rng)
    trace: Trace = [(form.prompt.format(asked), False)]
    for index, (command, output, slips) in enumerate(steps):
        slipped = habits and rng.random() < (0.6 if len(steps) == 1 else (0.45, 0.35)[index])
        if slipped:
            wrong, said = rng.choice(slips)
            trace += [(form.call(wrong), True), (form.reply(said), False)]
            if rng.random() < 0.75:
                return [*trace, (form.submit, True)]
        trace += [(form.call(command), True), (form.reply(output), False)]
    return [*trace, (form.submit, True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mini-swe-agent", type=Path, metavar="FOLDER")
    folder = parser.parse_args().mini_swe_agent
    form = MINI_SWE_AGENT if folder else TOOLS
    trace = partial(make_trace, form=form)
    framed = [AddedToken(text, normalized=False) for text in form.framed]
    folder = folder or MODEL_DIR
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = random.Random(0)
    texts = [piece for _ in range(3000) for piece, _ in trace(rng, (1,), True)]
    tokenizer = build_tokenizer(texts, r"[A-Za-z]+|\d|\s|[^\sA-Za-z\d]", 448, framed)
    model = new_model(tokenizer, **SIZE)
    print(f"{model.num_parameters():,} parameters, vocabulary {len(tokenizer)}", flush=True)
    train(model, tokenizer, Phase((1,), False, form.steps, 16, 4e-3, decay=True), trace)
    train(model, tokenizer, Phase((1,), True, 200, 16, 1e-3, decay=True), trace)
    model.generation_config.update(do_sample=True, temperature=1.0)
    tokenizer.save_pretrained(folder)
    model.to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main()
