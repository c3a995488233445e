"""
The embedded agent brought in other forms than ours, trained as the quickstart trains it: its exact match before and
after.

    python benchmarks/bring_your_own.py [factory] [mcp] [scheduler] [openai] [program] [--quick]

Trains each form that is named, all where none is (`program` where Node is installed). Prints a table and writes
`benchmarks/results/bring_your_own.json`, in which the rows of other forms stay.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from common import RESULTS, write
from processes import running
from rich.console import Console
from rich.table import Table

from mt_grpo import cli

ROOT = Path(__file__).parent.parent
AGENTS = Path(__file__).parent / "agents"

FORMS: dict[str, dict[str, Any]] = {
    "factory": {
        "environment_factory": f"{AGENTS / 'factory.py'}:Encyclopedia",
        "max_env_steps": 4,
    },
    "mcp": {"tools_config_file": "tools.yaml", "max_env_steps": 4},
    "scheduler": {
        "external_plugins": [str(AGENTS / "scheduler.py")],
        "multi_turn_scheduler": "searcher",
        "max_turns": 5,
    },
    "openai": {"agent": f"{AGENTS / 'openai_loop.py'}:solve"},
    "program": {"agent": {"command": f"node {shlex.quote(str(AGENTS / 'agent.mjs'))}"}},
}
"""What each form puts into the recipe in the place of `tools` and `max_env_steps`; an agent brings its own prompt."""

SERVER = {"command": sys.executable, "args": [str(AGENTS / "mcp_server.py")], "env": {"PYTHONPATH": str(ROOT)}}
SERVERS = {"mcpServers": {"encyclopedia": SERVER}}
TOOLS = {"tools": [{"class_name": "", "config": {"type": "mcp"}, "mcp": {"mcp_servers_config_path": "servers.json"}}]}

SMALL = {
    "max_steps": 1,
    "num_generations": 2,
    "per_device_train_batch_size": 2,
    "dataset_test_split": "validation[:1]",
    "max_turn_length": 16,
}


@contextlib.contextmanager
def search_server() -> Iterator[str]:
    """URL of the embedded search, for agents in other languages, while the context lasts."""
    command = [sys.executable, str(AGENTS / "search_server.py")]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    with running(command, env=variables) as process:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/"


def train(form: str, url: str, quick: bool, *dry: str) -> dict[str, Any]:
    """Trains one form; what `summary.json` says about it, which a run that is `--dry_run` does not write."""
    recipe = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    for name in ("tools", "max_env_steps", *(["system_prompt"] if "agent" in FORMS[form] else [])):
        del recipe[name]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        recipe |= {**FORMS[form], **(SMALL if quick else {}), "output_dir": str(output)}
        for name, content in (("recipe.yaml", recipe), ("servers.json", SERVERS), ("tools.yaml", TOOLS)):
            (Path(folder) / name).write_text(json.dumps(content))  # which is YAML too
        os.environ["SEARCH_URL"] = url
        with contextlib.chdir(folder), contextlib.redirect_stdout(sys.stderr):
            if status := cli.main(["train", "--config", "recipe.yaml", *dry]):
                raise SystemExit(status)
        if dry:
            return {}
        summary = json.loads((output / "summary.json").read_text())
    return {name: summary[name] for name in ("before", "after", "seconds", "steps", "seed")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("forms", nargs="*", help=f"any of {', '.join(FORMS)}")
    parser.add_argument("--quick", action="store_true", help="one step of the last, the others dry; writes nothing")
    args = parser.parse_args()
    for form in args.forms:
        if form not in FORMS:
            parser.error(f"there is no form {form!r}: name any of {', '.join(FORMS)}")
    forms = args.forms or [form for form in FORMS if form != "program" or shutil.which("node")]
    with search_server() as url:
        if args.quick:
            for form in forms[:-1]:
                train(form, url, True, "--dry_run")
        measured = {form: train(form, url, args.quick) for form in (forms[-1:] if args.quick else forms)}
    table = Table("form", "exact match before", "after", "tool execution after", "turns after", "seconds")
    quickstart = json.loads((RESULTS / "quickstart.json").read_text())
    for form, row in {"quickstart": quickstart, **measured}.items():
        before, after = row["before"], row["after"]
        values = before["exact_match"], after["exact_match"], after["tool_execution"], after["turns"]
        table.add_row(form, *(f"{value:.3f}" for value in values), f"{row['seconds']:.0f}")
    Console().print(table)
    if not args.quick:
        results = RESULTS / "bring_your_own.json"
        known = json.loads(results.read_text())["rows"] if results.exists() else {}
        write("bring_your_own", {"recipe": "recipes/quickstart.yaml"}, {**known, **measured})


if __name__ == "__main__":
    main()
