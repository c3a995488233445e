"""The maps of the documentation are true: every file and page that they name is there, and no page is left out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def links(page: Path) -> list[str]:
    """The targets of links to this repository, without their anchors."""
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    return [target.partition("#")[0] for target in targets if "://" not in target and not target.startswith("#")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    assert [target for target in links(page) if not (page.parent / target).exists()] == []


def test_the_index_has_every_page_once():
    named = [target for target in links(ROOT / "docs/index.md") if "/" not in target]
    assert sorted(named) == sorted({page.name for page in ROOT.glob("docs/*.md")} - {"index.md"})


def test_the_way_of_a_token_names_files_that_exist():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    files = re.findall(r"`(mt_grpo/[\w/]+\.\w+)`", text)
    assert len(files) > 60
    assert [file for file in files if not (ROOT / file).is_file()] == []


MOST_FILES = {
    "A token's advantage": 8,
    "A turn sampled by vLLM": 14,
    "A server that dies": 9,
    "A recipe's key and its use": 6,
    "A record and its way to the page": 12,
}
"""The lists of what to read, and how many files each may have."""


def lists() -> dict[str, list[str]]:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    parts = re.findall(r"^### (.+?)\n(.*?)(?=^##)", text, re.DOTALL | re.MULTILINE)
    return {title: re.findall(r"^- `(\S+)`:", part, re.MULTILINE) for title, part in parts}


def test_what_to_read_for_a_question_is_few_files():
    assert {title: len(files) <= MOST_FILES[title] for title, files in lists().items()} == dict.fromkeys(
        MOST_FILES, True
    )


@pytest.mark.parametrize("title", MOST_FILES)
def test_files_to_read_are_tied_to_each_other(title):
    """Each file after the first imports one before it, or is imported by one; an engine is known by its interface."""
    files = lists()[title]
    code = [file for file in files if file.endswith(".py")]  # a script of the page is tied by the question it asks
    loose = [
        file
        for place, file in enumerate(code[1:], start=1)
        if not any(file in imports(other) or other in imports(file) for other in code[:place])
    ]
    assert loose == []


def imports(file: str) -> set[str]:
    """The files whose names a file imports, also by way of a room's face."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("mt_grpo"):
            found |= {home(node.module, name.name) for name in node.names}
    return found


def home(module: str, name: str) -> str:
    """The file in which a name that is imported from a module is defined; a module's own where it is one."""
    path = module.replace(".", "/")
    for file in (f"{path}/{name}.py", f"{path}/{name}/__init__.py", f"{path}.py"):
        if (ROOT / file).is_file():
            return file
    face = f"{path}/__init__.py"
    for node in ast.parse((ROOT / face).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module and name in [each.name for each in node.names]:
            return home(node.module, name) if node.module.startswith("mt_grpo") else face
    return face


def test_the_picture_names_rooms_that_exist():
    (picture,) = re.findall(
        r"```mermaid\n(.*?)```", (ROOT / "docs/architecture.md").read_text(encoding="utf-8"), re.DOTALL
    )
    rooms = set(re.findall(r"\b(\w+)/", picture)) - {"engines"}
    assert len(rooms) > 10
    assert [room for room in rooms if not (ROOT / "mt_grpo" / room).is_dir()] == []


def test_the_workflow_runs_what_a_clean_checkout_must_pass():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1] == {"run": "bash .ci/run"} and (ROOT / ".ci/run").is_file()


def test_hooks_before_a_commit_call_installed_tools():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (local,) = hooks["repos"]
    called = [hook["entry"].split()[0] for hook in local["hooks"]]
    assert local["repo"] == "local" and {hook["language"] for hook in local["hooks"]} == {"system"}
    assert set(called) == {"ruff", "lint-imports"}
