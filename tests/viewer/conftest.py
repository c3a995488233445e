"""A run without training, its queries, and the page over it."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
from support.runs import write_run

from mt_grpo.runlog import open_run
from mt_grpo.viewer.queries import Queries
from mt_grpo.viewer.server import Server


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run") / "agent", steps=12, groups=4)


@pytest.fixture(scope="session")
def queries(run_folder):
    queries = Queries(open_run(run_folder))
    queries.answer("run", {})
    return queries


@contextmanager
def serving(queries):
    with Server(queries, 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="session")
def server(queries):
    with serving(queries) as server:
        yield server
