"""What the suite asks of itself."""

from __future__ import annotations

import ast
from pathlib import Path

MOST = 60
"""Characters of a test's name."""


def test_names_of_tests_are_short():
    functions = (
        node
        for path in sorted(Path(__file__).parent.rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    long = [node.name for node in functions if node.name.startswith("test_") and len(node.name) > MOST]
    assert not long, f"at most {MOST} characters, in plain words: {long}"
