"""What holds for all tests; fixtures that all rooms share are in `support/fixtures.py`."""

import gc
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# models are so small that more threads only wait for each other, here and in what is started
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from support.forking import begin_forks
from support.own_process import pytest_pyfunc_call, pytest_report_to_serializable

__all__ = ["pytest_pyfunc_call", "pytest_report_to_serializable"]

# what tests start in processes of their own may use what tests share
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])


def pytest_configure(config: pytest.Config) -> None:
    begin_forks()
    if config.getoption("dist", "no") == "no":  # what only hands tests out imports nothing for them
        config.pluginmanager.import_plugin("support.fixtures")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that last go first: one of them at the end would leave the other processes without work."""
    if hasattr(config, "workerinput"):
        marks: dict[Path, set[str]] = {}
        for item in items:
            marks.setdefault(item.path, set()).update(mark.name for mark in item.iter_markers())
        items.sort(key=lambda item: ("server" not in marks[item.path], "slow" not in marks[item.path]))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Every training collects garbage; what was imported need not be searched each time."""
    gc.collect()
    gc.freeze()
