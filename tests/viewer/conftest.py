"""A run without training, its queries, and the page over it."""

from __future__ import annotations

import pytest
from support.browser import serving
from support.runs import write_run

from mt_grpo.runlog import open_run
from mt_grpo.viewer.queries import Queries


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run") / "agent", steps=12, groups=4)


@pytest.fixture(scope="session")
def queries(run_folder):
    queries = Queries(open_run(run_folder))
    queries.answer("run", {})
    return queries


@pytest.fixture(scope="session")
def server(queries):
    with serving(queries) as server:
        yield server
