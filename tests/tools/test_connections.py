"""Tools that ask a server keep their connections open between calls, and close them when nobody has the tool."""

import gc
import warnings

import pytest
from support.loopback import ScriptedServer

from mt_grpo.tools.python_sandbox import RemotePython
from mt_grpo.tools.search import RetrievalSearch, WikipediaSearch

RAN = {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "4\n", "stderr": ""}}


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda url: RemotePython(url).python("print(4)"), RAN),
        (lambda url: RetrievalSearch(url).search("Peru"), {"result": [[]]}),
        (lambda url: WikipediaSearch(base_url=url).search("Peru"), {"batchcomplete": True}),
    ],
    ids=["code", "retrieval", "wikipedia"],
)
def test_a_tool_that_nobody_has_closes_its_connections(ask, answer):
    server = ScriptedServer(lambda *request: (200, answer))
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", ResourceWarning)
            ask(server.url)
            gc.collect()
    finally:
        server.stop()
    assert len(server.requests) == 1
    assert not [warning.message for warning in warned if f"raddr=('127.0.0.1', {server.port})" in str(warning.message)]
