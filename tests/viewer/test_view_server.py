"""The server of the page: whom it answers, with what headers, and who may write notes."""

import json
import shutil
import socket
from http.client import HTTPConnection

import pytest
from support.browser import serving
from support.runs import queries_of

from mt_grpo.runlog.files import read_notes
from mt_grpo.viewer.server import Server, export


def ask(server, path="/", host=None, method="GET", body=None, **headers):
    """What is answered: the status, the headers and the text."""
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.putrequest(method, path, skip_host=True)
    content = b"" if body is None else json.dumps(body).encode()
    for name, value in {"Host": host or f"127.0.0.1:{server.server_port}", **headers}.items():
        if not (name == "Host" and host == ""):
            connection.putheader(name.replace("_", "-"), value)
    connection.putheader("Content-Length", str(len(content)))
    connection.endheaders(content)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8431", "127.0.0.1.evil.example", "", "10.0.0.1:80"])
@pytest.mark.parametrize("path", ["/", "/api/run"])
def test_another_host_name_is_refused(server, host, path):
    status, _, text = ask(server, path, host)
    assert status == 403 and "conversations" not in text


@pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost:9999", "localhost", "[::1]:8431"])
def test_names_of_this_machine_are_answered(server, host):
    assert ask(server, "/api/run", host)[0] == 200 and server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("path", ["/", "/app.js", "/style.css", "/api/run", "/missing", "/api/trajectory?session=x"])
def test_every_answer_forbids_what_is_from_elsewhere(server, path):
    _, headers, _ = ask(server, path)
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert (headers["X-Content-Type-Options"], headers["Access-Control-Allow-Origin"]) == ("nosniff", None)


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        *[(path, 404, "") for path in ("/../queries.py", "/..%2fqueries.py", "/page/app.js", "//etc/passwd")],
        ("/__init__.py", 404, ""),
        ("/api/find?q=rewrd%3C1", 400, "the nearest is"),
        ("/export/nothing", 400, "give one of messages, sharegpt, tokens, preferences, jsonl"),
    ],
)
def test_what_is_not_there_is_not_served(server, path, status, words):
    answer = ask(server, path)
    assert answer[0] == status and words in answer[2]


def test_conversations_are_downloaded_from_the_page(server, queries):
    _, headers, text = ask(server, "/export/messages?q=mode%3Deval")
    wanted = [row["session"] for row in queries.run.rows if row["mode"] == "eval"]
    assert [json.loads(line)["session"] for line in text.splitlines()] == wanted
    assert headers["Content-Disposition"] == 'attachment; filename="messages.jsonl"'


def hidden_in_a_body(server, session):
    """What a page of somebody else may send: a request of text, whose text is a request of our own page."""
    note, host = b'{"star": true, "note": ""}', f"Host: 127.0.0.1:{server.server_port}"
    own = f"POST /api/note?session={session} HTTP/1.1\r\n{host}\r\nOrigin: {server.url.rstrip('/')}\r\n"
    own += f"Content-Type: application/json\r\nContent-Length: {len(note)}\r\n\r\n"
    head = f"POST /api/note HTTP/1.1\r\n{host}\r\nOrigin: http://elsewhere\r\nContent-Type: text/plain\r\n"
    return f"{head}Content-Length: {len(own) + len(note)}\r\n\r\n{own}".encode() + note


def raw(server, sent):
    """All that is answered to some bytes."""
    with socket.create_connection(("127.0.0.1", server.server_port), 60) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(2**16), b""))


def test_only_the_page_itself_writes_and_only_notes(run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    queries = queries_of(folder)
    session, star = queries.run.rows[0]["session"], {"star": True, "note": ""}
    with serving(queries) as server:
        own = {"Content_Type": "application/json", "Origin": server.url.rstrip("/")}

        def post(body, to=session, **headers):
            return ask(server, f"/api/note?session={to}", None, "POST", body, **own | headers)

        assert [ask(server, "/", method="POST")[0], post(star, Content_Length="9" * 5000)[0]] == [501, 501]
        assert [post(star, Origin="http://elsewhere")[0], post(star, Content_Type="text/plain")[0]] == [403, 403]
        assert raw(server, hidden_in_a_body(server, session)).count(b"HTTP/1.1 ") == 1  # of the request that has it
        wrong = [post(body)[0] for body in ([], {"star": 1, "note": ""}, {"star": True})]
        assert [*wrong, post(star, "nobody")[0]] == [400] * 4 and read_notes(folder) == {}
        assert json.loads(post(star)[2])["notes"][session]["star"]


def test_the_next_free_port_is_taken(queries, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr("mt_grpo.viewer.server.PORT", port)
        with Server(queries) as server:
            assert port < server.server_port < port + 50


def test_conversations_without_credit_are_in_an_exported_file(run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    index = folder / "rollouts" / "index.jsonl"
    lines = index.read_text().splitlines(keepends=True)
    index.write_text("".join(line for line in lines if not line.startswith('{"kind":"credit"')))
    number = export(queries_of(folder), tmp_path / "file.html", "mode=eval")
    _, _, data = (tmp_path / "file.html").read_text().partition('id="data">')
    answers = json.loads(data.partition("</script>")[0])["answers"]
    assert number == len(answers["trajectory"]) == len(answers["why"]) > 0
    assert all("has no advantage yet" in each["error"] for each in answers["why"].values())
