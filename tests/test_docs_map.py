"""The maps of the documentation are true: every file and page that they name is there, and no page is left out."""

import pkgutil
import re
import runpy
from pathlib import Path

import pytest
import yaml
from support.forked import Forked

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/reports/*.md")])


def links(page: Path) -> list[str]:
    """The targets of links to this repository, without their anchors."""
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    return [target.partition("#")[0] for target in targets if "://" not in target and not target.startswith("#")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    assert [target for target in links(page) if not (page.parent / target).exists()] == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = [heading.lower() for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_anchor_is_a_heading(page):
    found = re.findall(r"\]\(((?!https?:)[^)\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    targets = [(page.parent / target if target else page, anchor) for target, anchor in found]
    assert [anchor for target, anchor in targets if target.suffix == ".md" and anchor not in anchors(target)] == []


def test_files_and_names_of_the_package_on_pages_exist():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES if page.name != "CHANGELOG.md")
    files = set(re.findall(r"`((?:mt_grpo|scripts|recipes|tests/support)/[\w./]+\.\w+)`", text))
    assert [file for file in sorted(files) if not (ROOT / file).is_file()] == []
    for name in sorted(set(re.findall(r"\bmt_grpo(?:\.\w+)+", text))):
        pkgutil.resolve_name(name)  # raises where it is not there


def test_the_index_has_every_page_once():
    named = [target for target in links(ROOT / "docs/index.md") if "/" not in target]
    assert sorted(named) == sorted({page.name for page in ROOT.glob("docs/*.md")} - {"index.md"})


def test_the_way_of_a_token_names_files_that_exist():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    files = re.findall(r"`(mt_grpo/[\w/]+\.\w+)`", text)
    assert len(files) > 60
    assert [file for file in files if not (ROOT / file).is_file()] == []


@pytest.mark.slow
def test_what_to_read_for_a_question_is_what_it_calls(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    log = tmp_path / "log"
    assert Forked(["scripts/trace_calls.py", "--check"], log).wait(600) == 0, log.read_text()[-2000:]


def test_the_reference_of_fields_is_that_of_the_code():
    reference = runpy.run_path(str(ROOT / "scripts" / "write_reference.py"))["reference"]
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert page == reference(), "run python scripts/write_reference.py"


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
