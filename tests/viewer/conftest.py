"""A run without training, its queries, the page over it, and a browser."""

import pytest
from support.browser import missing, open_browser, opened, serving
from support.runs import queries_of, write_run

from mt_grpo.runlog.files import Heartbeat


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run") / "agent", steps=12, groups=4)


@pytest.fixture(scope="session")
def queries(run_folder):
    return queries_of(run_folder)


@pytest.fixture(scope="session")
def server(queries):
    with serving(queries) as server:
        yield server


@pytest.fixture(scope="session")
def several_runs(tmp_path_factory):
    """A folder with a run that is finished, one that was stopped in a folder below, and one that is broken."""
    folder = tmp_path_factory.mktemp("several") / "runs"
    for seed, (name, step) in enumerate((("first", 4), ("sweep/second", 2))):
        run = write_run(folder / name, steps=4, seed=seed)
        with Heartbeat(run, lambda step=step: {"step": step, "of": 4, "waits_for": "", "under_way": []}).beating():
            pass
    broken = write_run(folder / "broken", steps=1)
    (broken / "metrics.jsonl").write_text("{}\n")
    (folder / "notes").mkdir()
    return folder


@pytest.fixture(scope="module")
def browser():
    if missing():
        pytest.skip(missing())
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def window(browser, queries):
    with opened(browser, queries, viewport={"width": 1400, "height": 860}) as page:
        yield page


@pytest.fixture
def page(window):
    """The page of `queries`, which tests share; nothing may go wrong in it."""
    yield window
    assert not window.wrong
