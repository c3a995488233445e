"""
`mt-grpo credit RUN_DIR`: reads its command line. Imports no torch before the conversations to take are known.
"""

from __future__ import annotations

import json
import sys

from mt_grpo.advisor.choice import choose
from mt_grpo.app.interrupt import ends_at_once
from mt_grpo.app.view import read_words
from mt_grpo.errors import ConfigError
from mt_grpo.runlog import open_run

USAGE = """usage: mt-grpo credit RUN_DIR [--step N] [--max_groups N] [--model_name_or_path NAME] [--json]

compares all credit rules on the rewards of a run: computes the gradient of each turn of its conversations, and says
where the gradient of each rule points and how noisy it is; RUN_DIR is the `output_dir` of a run, or a folder of
`mt-grpo rollout RECIPE.yaml --num_prompts 32 --save FOLDER`

  --step N                   the conversations of this step; without it the first step that has groups
  --max_groups N             so many groups at most
  --model_name_or_path NAME  the model that sampled them, where it is not found by itself
  --json                     print JSON
"""


def credit(arguments: list[str]) -> int:
    """`mt-grpo credit RUN_DIR`."""
    if {"-h", "--help"}.intersection(arguments):
        print(USAGE, end="")
        return 0
    values = ("--step", "--max_groups", "--model_name_or_path")
    folders, options = read_words("credit", arguments, values=values, flags=("--json",))
    if len(folders) != 1:
        raise ConfigError("`mt-grpo credit` takes one folder, the `output_dir` of a run: `mt-grpo credit runs/NAME`.")
    step, most = _number(options, "--step", 0), _number(options, "--max_groups", 2)
    chosen = choose(open_run(folders[0]), step, most, options.get("--model_name_or_path"))
    with ends_at_once():
        from mt_grpo.advisor.measure import measure
        from mt_grpo.advisor.report import as_json, show

    found = measure(chosen, tell=lambda line: print(line, file=sys.stderr, flush=True))
    if "--json" in options:
        print(json.dumps(as_json(found), indent=2, allow_nan=False))
    else:
        show(found)
    return 0


def _number(options: dict[str, str], name: str, least: int) -> int | None:
    if name not in options:
        return None
    text = options[name]
    if not text.isdecimal() or len(text) > 9 or int(text) < least:
        raise ConfigError(f"`{name}` takes a whole number from {least} on; {text[:40]!r} is none.")
    return int(text)
