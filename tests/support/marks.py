"""Marks of tests that need what not every machine has."""

import pytest

from support.servers import SERVER_PYTHON

needs_server = pytest.mark.skipif(
    not SERVER_PYTHON.exists(), reason="there is no .venv-vllm: make it with `make server-cpu`"
)
