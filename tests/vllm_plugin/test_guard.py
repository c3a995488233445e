"""What stands before a server's endpoints, and the key it leaves for its user."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
from types import SimpleNamespace

import pytest

from mt_grpo.servers.http import ServerSetupError, find_key
from mt_grpo.vllm_plugin import IDENTITY, keys
from mt_grpo.vllm_plugin.guard import ALLOWED, FETCH, SCHEDULING, SLEEP, SLEEPS, Guard

KEY = "the key"
ARGS = SimpleNamespace(host="127.0.0.1", port=8000, api_key=None)
URL = "http://127.0.0.1:8000"


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(keys, "ROOT", str(tmp_path))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    return tmp_path


class Server:
    """An ASGI server that answers everything, and writes down what reached it."""

    def __init__(self, end: Exception | None = None) -> None:
        self.reached, self.end = [], end

    async def __call__(self, scope, receive, send):
        self.reached.append((scope["type"], scope.get("method"), scope.get("path")))
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            if self.end is not None:
                raise self.end
            await send({"type": "lifespan.shutdown.complete"})
        else:
            await send({"type": "http.response.start", "status": 200, "headers": []})


def messages(guard, method, path, *headers, kind="http", receive=None, **scope):
    """What `guard` answers."""
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "method": method, "path": path, "headers": list(headers), "query_string": b"", **scope}
    asyncio.run(guard(scope, receive, send))
    return sent


def ask(*args, **scope):
    """The first message of an answer."""
    return messages(*args, **scope)[0]


def bearer(key=KEY, scheme="Bearer"):
    return (b"authorization", f"{scheme} {key}".encode())


@pytest.fixture
def guarded(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    server = Server()
    guard = Guard(server)
    live(guard)
    server.reached.clear()
    return server, guard


@pytest.mark.parametrize(("method", "path"), sorted(ALLOWED))
def test_what_a_trainer_asks_for_passes_with_the_key_alone(guarded, method, path):
    server, guard = guarded
    assert ask(guard, method, path, bearer())["status"] == 200
    assert ask(guard, method, path, bearer(scheme="bearer"))["status"] == 200
    expected = 200 if path == "/health" else 401
    for headers in (
        [],
        [bearer("another")],
        [bearer(KEY + " ")],
        [bearer("")],
        [bearer(scheme="Basic")],
        [bearer("é")],
    ):
        assert ask(guard, method, path, *headers)["status"] == expected
    assert len(server.reached) == (8 if path == "/health" else 2)


@pytest.mark.parametrize(("method", "path", "query"), sorted(SCHEDULING))
def test_only_a_sleep_that_keeps_the_weights_passes(guarded, method, path, query):
    server, guard = guarded
    assert ask(guard, method, path, bearer(), query_string=query)["status"] == 200
    assert ask(guard, method, path, query_string=query)["status"] == 401
    others = [
        b"",
        query + b"&level=1",
        b"level=1&" + query,
        query.replace(b"0", b"1"),
        query.upper(),
        query + b"&tags=w",
    ]
    for other in set(others) - {query}:
        assert ask(guard, method, path, bearer(), query_string=other)["status"] == 403, other
    assert len(server.reached) == 1


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("POST", path) for path in ("/collective_rpc", "/sleep", "/wake_up", "/abort_requests", "/invocations")),
        *(("POST", path) for path in ("/start_profile", "/scale_elastic_ep", "/reset_mm_cache", "/detokenize")),
        *(("POST", path) for path in ("/v1/responses", "/v1/embeddings", "/", "")),
        *(("GET", path) for path in ("/docs", "/openapi.json", "/load", "/ping", "/is_sleeping", "/v1/realtime")),
        *(("POST", path) for path in ("//collective_rpc", "/v1/../collective_rpc", "/health/../collective_rpc")),
        *(
            ("POST", path)
            for path in ("//pause", "/pause/", "/./pause", "/PAUSE", "/pause;x", "/pause?x", "/pause\x00")
        ),
        *(
            ("GET", path)
            for path in ("/health/", "//health", "/Health", "/health%2f", "/health/x", "/metrics/", " /health")
        ),
        *((method, "/pause") for method in ("GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "post")),
        *((method, "/health") for method in ("HEAD", "POST", "OPTIONS", "CONNECT")),
    ],
)
def test_nothing_else_passes_though_the_key_is_right(guarded, method, path):
    server, guard = guarded
    raw = {"raw_path": b"/health", "query_string": b"method=GET", "root_path": "/v1"}
    override = (b"x-http-method-override", b"GET")
    assert ask(guard, method, path, bearer(), override, **raw)["status"] == 403
    assert not server.reached


@pytest.mark.parametrize(("method", "path", "query"), sorted(SLEEP))
def test_a_server_sleeps_only_on_its_trainers_gpus(monkeypatch, method, path, query):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    for sleeps, status in (("", 403), ("1", 200)):
        monkeypatch.setenv(SLEEPS, sleeps)
        guard = Guard(Server())
        live(guard)
        assert ask(guard, method, path, bearer(), query_string=query)["status"] == status


@pytest.mark.parametrize(
    ("body", "more", "status"),
    [
        (b"", False, 502),
        (b"[]", False, 502),
        (b'{"url": "file:///etc/passwd", "size": 1}', False, 502),
        (b'{"url": "nothing"}', False, 502),
        (b'{"url": "http://127.0.0.1:port/x", "size": 1}', False, 502),
        (b'{"url": "http://127.0.0.1:9/x", "size": 1' + b"0" * 30 + b"}", False, 502),
        (b"[" * 8000, False, 502),
        (b"[" * 200_000, False, 502),
        (b"\xff", False, 502),
        (b"[" * 1000, True, 502),  # it would go on for ever
        (b"[", True, 408),
    ],
)
def test_what_cannot_be_fetched_is_answered_with_why(guarded, monkeypatch, body, more, status):
    server, guard = guarded
    monkeypatch.setattr("mt_grpo.vllm_plugin.guard.BODY_TIMEOUT", 0.05 if status == 408 else 30.0)

    async def receive():
        await asyncio.sleep(0.001)
        return {"type": "http.request", "body": body, "more_body": more}

    head, answer = messages(guard, "POST", FETCH, bearer(), receive=receive)
    assert head["status"] == status and json.loads(answer["body"])["error"] and not server.reached
    assert ask(guard, "POST", FETCH)["status"] == 401


@pytest.mark.parametrize("origin", [b"http://evil.example", b"null", b"http://127.0.0.1:8000", b""])
@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("POST", "/pause"), ("OPTIONS", "/v1/completions")])
def test_web_pages_can_neither_ask_nor_read(guarded, origin, method, path):
    server, guard = guarded
    asked = (b"access-control-request-method", b"POST")
    answer = ask(guard, method, path, bearer(), (b"origin", origin), asked)
    assert answer["status"] == 403
    assert not [name for name, _ in answer["headers"] if name.startswith(b"access-control")]
    assert not server.reached


def test_servers_that_are_started_alike_have_names_of_their_own(monkeypatch):
    """Processes of one server share the name that it was given."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    names = {}
    for count in (None, 1, 2):
        for guard in (Guard(Server()), Guard(Server())):
            live(guard, args=SimpleNamespace(**vars(ARGS), fingerprint_value="all", api_server_count=count))
            for path in ("/v1/completions", "/inference/v1/generate"):
                headers = dict(ask(guard, "POST", path, bearer())["headers"])
                names.setdefault(count, set()).add(headers[IDENTITY.encode()])
    assert len(names[None]) == len(names[1]) == 2 and names[2] == {b"all"}


def test_a_websocket_is_closed_before_it_is_open(guarded):
    server, guard = guarded
    assert ask(guard, "GET", "/v1/realtime", bearer(), kind="websocket")["type"] == "websocket.close"
    assert ask(guard, "GET", "/health", bearer(), kind="websocket")["type"] == "websocket.close"
    assert not server.reached


def live(guard, check=lambda: None, args=ARGS):
    """A server's life, with a look at it while it runs."""
    events = iter(["lifespan.startup", "lifespan.shutdown"])
    sent = []

    async def receive():
        return {"type": next(events)}

    async def send(message):
        sent.append(message["type"])
        if message["type"] == "lifespan.startup.complete":
            check()

    scope = {"type": "lifespan", "app": SimpleNamespace(state=SimpleNamespace(args=args))}
    asyncio.run(guard(scope, receive, send))
    return sent


@pytest.mark.parametrize("end", [None, RuntimeError("a failure")])
def test_a_made_up_key_is_found_while_the_server_runs(root, end):
    server = Server(end)
    guard, found = Guard(server), []

    def check():
        found.append(find_key(URL))
        assert [find_key(url) for url in ("http://localhost:8000/", "http://[::1]:8000")] == found * 2
        assert not find_key("http://127.0.0.1:8001") and not find_key("http://10.0.0.2:8000")
        (folder,) = root.iterdir()
        (file,) = folder.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE(file.stat().st_mode) == 0o600

    assert find_key(URL) is None
    if end is None:
        assert live(guard, check) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    else:
        with pytest.raises(RuntimeError, match="a failure"):
            live(guard, check)
    assert len(found[0]) >= 32
    assert find_key(URL) is None
    assert ask(guard, "POST", "/pause", bearer(found[0]))["status"] == 200
    assert ask(guard, "POST", "/pause", bearer("None"))["status"] == 401
    assert ask(guard, "POST", "/pause")["status"] == 401


@pytest.mark.parametrize("host", [None, "", "0.0.0.0", "::", "localhost", "::1"])
def test_a_server_is_found_on_loopback_whatever_it_listens_on(host):
    found, args = [], SimpleNamespace(host=host, port=8000, api_key=None)
    for _ in range(2):
        live(Guard(Server()), lambda: found.append(find_key(URL)), args)
    assert all(found) and len(set(found)) == 2  # every server makes up another


def test_a_key_that_is_given_is_written_nowhere(guarded, root):
    live(guarded[1])
    assert not list(root.iterdir())
    assert find_key("http://10.0.0.2:8000") == KEY


def test_keys_of_the_command_line_beat_the_environment(guarded, root):
    _, guard = guarded
    live(guard, args=SimpleNamespace(host=None, port=8000, api_key=["first", "second"]))
    assert [ask(guard, "POST", "/pause", bearer(key))["status"] for key in ("first", "second", KEY)] == [200, 200, 401]
    assert not list(root.iterdir())


def test_no_key_opens_a_server_that_has_not_begun():
    for key in ("", "None"):
        assert ask(Guard(Server()), "POST", "/pause", bearer(key))["status"] == 401


def test_a_server_leaves_the_key_of_another_where_it_is():
    """It ends slowly, and its successor is up."""
    live(Guard(Server()), lambda: keys.write_key("127.0.0.1", 8000, "of the next"))
    assert find_key(URL) == "of the next"


def test_the_key_of_a_server_that_was_killed_is_replaced():
    keys.write_key("127.0.0.1", 8000, "of a killed server, and longer than the next")
    keys.write_key("127.0.0.1", 8000, "of the next")
    assert find_key(URL) == "of the next"


@pytest.mark.parametrize("made", ["link", "file", "open", "foreign"])
def test_a_folder_that_others_may_have_made_is_refused(root, monkeypatch, made):
    mine = os.geteuid()
    folder = root / f"mt-grpo-keys-{mine + (made == 'foreign')}"
    if made == "file":
        folder.touch()
    elif made == "link":
        (root / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(root / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o750 if made == "open" else 0o700)
    monkeypatch.setattr(os, "geteuid", lambda: mine + (made == "foreign"))
    for use in (
        keys.check_folder,
        lambda: keys.write_key("127.0.0.1", 8000, KEY),
        lambda: find_key(URL),
        lambda: live(Guard(Server())),
    ):
        with pytest.raises((PermissionError, ServerSetupError), match="remove it, or set `VLLM_API_KEY`") as caught:
            use()
        assert "\n" not in str(caught.value)
    assert not list(root.glob("*/*"))
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    assert find_key(URL) == KEY


@pytest.mark.own_process
def test_a_server_told_to_end_begins_nothing_more(monkeypatch):
    """vLLM's own handler is called all the same, and finishes what is under way."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    heard, guard = [], Guard(Server())
    before = lambda number, frame: heard.append(number)  # noqa: E731
    signal.signal(signal.SIGTERM, before)

    def status(method, path):
        """Inside the server's own loop, where nothing has to be waited for."""
        sent = []

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "headers": [bearer()], "query_string": b""}
        with pytest.raises(StopIteration):
            guard(scope, None, send).send(None)
        return sent[0]["status"]

    def during():
        assert status("GET", "/health") == 200
        os.kill(os.getpid(), signal.SIGTERM)
        asked = [("GET", "/health"), ("POST", "/v1/completions"), ("GET", "/metrics")]
        assert [status(*one) for one in asked] == [503, 503, 200]

    live(guard, during)
    assert heard == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is before
