"""
Mutation scores: of small faults put into a module, the share that its tests find.

    pip install cosmic-ray
    python scripts/mutation.py                                     # 40 faults in each of `TESTS`: hours of a core
    python scripts/mutation.py credit/rules --faults 10

Faults are those of Cosmic Ray (another operator, another number, a condition turned round, a loop that runs not once),
drawn with a fixed seed. Each is tried in a process forked off one that has imported torch already, with the module as
it would be if the file said so; files stay as they are. A fault that makes tests run longer than `--patience` counts
as found.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.util
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
TESTS = {
    "token_tree": ["test_trajectory.py", "rollout/test_branching.py", "rollout/test_token_row.py", "forward"],
    "credit/rule": ["credit"],
    "credit/rules": ["credit"],
    "forward/packing": ["forward"],
    "rollout/policy": ["rollout"],
    "rollout/rendering": ["rollout"],
    "weights/transport": ["weights"],
}
OPERATORS = (
    "AddNot",
    "BinaryOperator_Add_Sub",
    "BinaryOperator_Mul_Div",
    "BinaryOperator_Sub_Add",
    "Comparison_Eq_NotEq",
    "Comparison_Gt_GtE",
    "Comparison_Is_IsNot",
    "Comparison_Lt_LtE",
    "Comparison_LtE_Lt",
    "NumberReplacer",
    "ReplaceAndWithOr",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
    "ReplaceFalseWithTrue",
    "ReplaceOrWithAnd",
    "ReplaceTrueWithFalse",
    "ReplaceUnaryOperator_USub_UAdd",
    "ReplaceUnaryOperator_Delete_Not",
    "ZeroIterationForLoop",
)


class Mutated(importlib.abc.SourceLoader, importlib.abc.MetaPathFinder):
    """Imports one module from other text than its file's."""

    def __init__(self, name: str, path: Path, text: str) -> None:
        self.name, self.path, self.text = name, path, text

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=self)

    def get_filename(self, fullname: str) -> str:
        return str(self.path)

    def get_data(self, path: str) -> bytes:
        return self.text.encode()


def faults(text: str) -> list[tuple[str, int, str]]:
    """All faults of a module: line, and the module's text with it."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    found = []
    for name in operator_names():
        short = name.split("/")[-1].replace("ReplaceBinary", "Binary").replace("ReplaceComparison", "Comparison")
        if short not in OPERATORS:
            continue
        operator = get_operator(name)()
        for number in range(10_000):
            changed = mutate_code(text, operator, number)
            if changed is None:
                break
            pairs = zip(text.splitlines(), changed.splitlines(), strict=False)
            line = next((at for at, (old, other) in enumerate(pairs, 1) if old != other), 0)
            found.append((short, line, changed))
    return found


def survives(module: str, text: str, tests: list[str], patience: float) -> bool:
    """Whether tests pass with the module's text put in its place."""
    child = os.fork()
    if child == 0:
        import pytest

        os.setpgid(0, 0)
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        path = ROOT / "mt_grpo" / f"{module}.py"
        sys.meta_path.insert(0, Mutated("mt_grpo." + module.replace("/", "."), path, text))
        sys.dont_write_bytecode = True
        options = ["-x", "-q", "-n0", "-p", "no:cacheprovider", "-m", "not slow and not server"]
        os._exit(int(pytest.main([*options, *(str(ROOT / "tests" / name) for name in tests)])))
    end = time.monotonic() + patience
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def main() -> None:
    """Tries faults, and prints a table and what was not found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=[], help="of those in TESTS (all)")
    parser.add_argument("--faults", type=int, default=40, help="of each module (40)")
    parser.add_argument("--patience", type=float, default=600, help="seconds for the tests of one fault (600)")
    asked = parser.parse_args()

    for name in ("datasets", "hypothesis", "transformers", "trl"):
        importlib.import_module(name)
    torch.set_num_threads(1)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    for module in asked.modules or TESTS:
        text = (ROOT / "mt_grpo" / f"{module}.py").read_text()
        begin = time.monotonic()
        if not survives(module, text, TESTS[module], asked.patience):
            sys.exit(f"tests of {module} fail, or take longer than --patience, without any fault")
        of_all = faults(text)
        drawn = random.Random(0).sample(of_all, min(asked.faults, len(of_all)))
        left = [
            (name, line) for name, line, changed in drawn if survives(module, changed, TESTS[module], asked.patience)
        ]
        share, seconds = 1 - len(left) / len(drawn), time.monotonic() - begin
        print(f"{module:24} {share:.2f} of {len(drawn)} faults found, of {len(of_all)} ({seconds:.0f} s)")
        for name, line in sorted(left, key=lambda each: each[1]):
            print(f"    not found: {name}, line {line}: {text.splitlines()[line - 1].strip()}", flush=True)


if __name__ == "__main__":
    main()
