"""The server of the page: whom it answers, and with what headers."""

from __future__ import annotations

import json
import socket
from http.client import HTTPConnection

import pytest

from mt_grpo.viewer.server import Server


def get(server, path="/", host=None, method="GET"):
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.putrequest(method, path, skip_host=True)
    if host != "":
        connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8431", "127.0.0.1.evil.example", "", "10.0.0.1:80"])
@pytest.mark.parametrize("path", ["/", "/api/run"])
def test_another_host_name_is_refused(server, host, path):
    answer, body = get(server, path, host)
    assert answer.status == 403 and b"conversations" not in body


@pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost:9999", "localhost", "[::1]:8431"])
def test_names_of_this_machine_are_answered(server, host):
    assert get(server, "/api/run", host)[0].status == 200


@pytest.mark.parametrize("path", ["/", "/app.js", "/style.css", "/api/run", "/missing", "/api/trajectory?session=x"])
def test_every_answer_forbids_what_is_from_elsewhere(server, path):
    answer, _ = get(server, path)
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Access-Control-Allow-Origin"] is None


@pytest.mark.parametrize(
    "path", ["/../queries.py", "/..%2fqueries.py", "/page/app.js", "//etc/passwd", "/__init__.py"]
)
def test_only_files_of_the_page_are_served(server, path):
    assert get(server, path)[0].status == 404


def test_nothing_can_be_changed(server):
    assert get(server, "/", method="POST")[0].status == 501


def test_a_question_that_fails_says_why(server):
    answer, body = get(server, "/api/find?q=rewrd%3C1")
    assert answer.status == 400 and "the nearest is" in json.loads(body)["error"]


def test_it_listens_on_this_machine_only(server):
    assert server.server_address[0] == "127.0.0.1"


def test_the_next_free_port_is_taken(queries, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr("mt_grpo.viewer.server.PORT", port)
        with Server(queries) as server:
            assert port < server.server_port < port + 50
