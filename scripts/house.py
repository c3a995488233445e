"""
The size of the house: files, lines, public names, `Any`, refusals, and what one step of the quickstart enters.

    python scripts/house.py              # of this checkout
    python scripts/house.py --step       # also modules and files of one optimiser step, which is run (seconds)
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REFUSALS = ("UserError", "ConfigError", "Error")
STEP = """
import json, sys, tempfile, threading
from mt_grpo.cli import main
from mt_grpo import MTGRPOEnvTrainer

imported, entered = [], set()

def watch(frame, event, arg):
    if "/mt_grpo/" in frame.f_code.co_filename:
        entered.add(frame.f_code.co_filename)

def train(self, *args, **options):
    imported.extend(name for name in sys.modules if name.split(".")[0] == "mt_grpo")
    sys.setprofile(watch)
    threading.setprofile(watch)
    done = own_train(self, *args, **options)
    sys.setprofile(None)
    threading.setprofile(None)
    return done

own_train, MTGRPOEnvTrainer.train = MTGRPOEnvTrainer.train, train
with tempfile.TemporaryDirectory() as folder:
    options = {"output_dir": folder, "max_steps": 1, "do_eval": "false", "per_device_train_batch_size": 16}
    given = [text for name, value in options.items() for text in ("--" + name, str(value))]
    main(["train", "--config", "recipes/quickstart.yaml", *given])
print()
print(json.dumps([len(imported), len(entered)]))
"""


def python_files(folder: Path) -> list[Path]:
    """Python files of a folder; `recipes` in the package is a link."""
    return [path for path in folder.rglob("*.py") if "recipes" not in path.relative_to(folder).parts]


def public_names(tree: ast.Module) -> int:
    """Functions, classes and their methods without an underscore."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return sum(isinstance(node, kinds) and not node.name.startswith("_") for node in tree.body)


def refusals(tree: ast.Module) -> int:
    """`raise` of an error that ends with a sentence."""
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    return sum(ast.unparse(each.func).split(".")[-1].endswith(REFUSALS) for each in raised)


def main() -> None:
    """Counts, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", action="store_true")
    asked = parser.parse_args()
    files = python_files(ROOT / "mt_grpo")
    trees = [ast.parse(path.read_text()) for path in files]
    lines = [path.read_text().count("\n") for path in files]
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    names = [node for tree in trees for node in ast.walk(tree)]
    counts = {
        "files": len(files),
        "lines": sum(lines),
        "lines a file": round(sum(lines) / len(files)),
        "public names": sum(map(public_names, trees)),
        "Any": sum(isinstance(node, ast.Name) and node.id == "Any" for node in names),
        "refusals": sum(map(refusals, trees)),
        "lines of tests": sum(path.read_text().count("\n") for path in python_files(ROOT / "tests")),
        "words of docs": sum(len(path.read_text().split()) for path in pages),
    }
    if asked.step:
        run = subprocess.run([sys.executable, "-c", STEP], cwd=ROOT, capture_output=True, text=True, check=True)
        imported, entered = json.loads(run.stdout.splitlines()[-1])
        counts |= {"modules imported for the quickstart": imported, "files that a step enters": entered}
    for name, count in counts.items():
        print(f"{name:<40}{count:>8,}")


if __name__ == "__main__":
    main()
