"""An upstream for a test, closed after it."""

from __future__ import annotations

import pytest
from support.upstreams import completion, upstream


@pytest.fixture
def start(tokenizer):
    servers = []

    def begin(complete=lambda number, body: completion(5, 6), **options):
        servers.append(upstream(tokenizer, complete, **options))
        return servers[-1]

    yield begin
    for server in servers:
        if not server.stopped:
            server.stop()
