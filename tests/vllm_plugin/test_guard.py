"""What stands before a server's endpoints, and the key it leaves for its user."""

import asyncio
import json
import os
import signal
import stat
from types import SimpleNamespace

import pytest

from mt_grpo import vllm_plugin
from mt_grpo.servers.http import ServerSetupError, find_key
from mt_grpo.vllm_plugin import IDENTITY
from mt_grpo.vllm_plugin.guard import ALLOWED, FETCH, SCHEDULING, SLEEP, SLEEPS, Guard

KEY, URL = "the key", "http://127.0.0.1:8000"


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_plugin, "KEYS_ROOT", str(tmp_path))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    return tmp_path


class Server:
    """An ASGI server that answers everything, and writes down what reached it."""

    def __init__(self, end: Exception | None = None) -> None:
        self.reached, self.end = [], end

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            if self.end is not None:
                raise self.end
            await send({"type": "lifespan.shutdown.complete"})
        else:
            self.reached.append((scope["type"], scope["method"], scope["path"]))
            await send({"type": "http.response.start", "status": 200, "headers": []})


def live(guard, check=lambda: None, **args):
    """A server's life, with a look at it while it runs."""
    events, sent = iter(["lifespan.startup", "lifespan.shutdown"]), []

    async def receive():
        return {"type": next(events)}

    async def send(message):
        sent.append(message["type"])
        if message["type"] == "lifespan.startup.complete":
            check()

    args = SimpleNamespace(**{"host": "127.0.0.1", "port": 8000, "api_key": None, **args})
    asyncio.run(guard({"type": "lifespan", "app": SimpleNamespace(state=SimpleNamespace(args=args))}, receive, send))
    return sent


def answer(guard, method, path, *headers, kind="http", receive=None, **scope):
    """The messages of an answer."""
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "method": method, "path": path, "headers": list(headers), "query_string": b"", **scope}
    work = guard(scope, receive, send)
    if receive is not None:
        asyncio.run(work)
    else:  # nothing has to be waited for, so that it may be asked inside a loop too
        with pytest.raises(StopIteration):
            work.send(None)
    return sent


def status(*args, **scope):
    return answer(*args, **scope)[0]["status"]


def bearer(key=KEY, scheme="Bearer"):
    return (b"authorization", f"{scheme} {key}".encode())


@pytest.fixture
def guarded(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    server = Server()
    guard = Guard(server)
    live(guard)
    return server, guard


@pytest.mark.parametrize(("method", "path"), sorted(ALLOWED))
def test_what_a_trainer_asks_for_passes_with_the_key_alone(guarded, method, path):
    server, guard = guarded
    right = [bearer(), bearer(scheme="bearer")]
    wrong = [bearer("another"), bearer(KEY + " "), bearer(""), bearer(scheme="Basic"), bearer("é")]
    assert [status(guard, method, path, header) for header in right] == [200, 200]
    expected = 200 if path == "/health" else 401
    assert {status(guard, method, path, *header) for header in ([], *zip(wrong, strict=True))} == {expected}
    assert len(server.reached) == (8 if path == "/health" else 2)


@pytest.mark.parametrize(("method", "path", "query"), sorted(SCHEDULING))
def test_only_a_sleep_that_keeps_the_weights_passes(guarded, method, path, query):
    server, guard = guarded
    assert status(guard, method, path, bearer(), query_string=query) == 200
    assert status(guard, method, path, query_string=query) == 401
    others = {b"", query + b"&level=1", b"level=1&" + query, query.replace(b"0", b"1"), query + b"&tags=w"}
    for other in (others | {query.upper()}) - {query}:
        assert status(guard, method, path, bearer(), query_string=other) == 403, other
    assert len(server.reached) == 1


STRANGE = {
    "POST": [
        *("/collective_rpc", "/sleep", "/wake_up", "/abort_requests", "/invocations", "/start_profile"),
        *("/scale_elastic_ep", "/reset_mm_cache", "/detokenize", "/v1/responses", "/v1/embeddings", "/", ""),
        *("//collective_rpc", "/v1/../collective_rpc", "/health/../collective_rpc", "/health", "//pause", "/pause/"),
        *("/./pause", "/PAUSE", "/pause;x", "/pause?x", "/pause\x00"),
    ],
    "GET": [
        *("/docs", "/openapi.json", "/load", "/ping", "/is_sleeping", "/v1/realtime", "/health/", "//health"),
        *("/Health", "/health%2f", "/health/x", "/metrics/", " /health", "/pause"),
    ],
    "OPTIONS": ["/pause", "/health"],
    "HEAD": ["/pause", "/health"],
    "CONNECT": ["/health"],
    **{method: ["/pause"] for method in ("PUT", "PATCH", "DELETE", "TRACE", "post")},
}


@pytest.mark.parametrize(("method", "path"), [(method, path) for method in STRANGE for path in STRANGE[method]])
def test_nothing_else_passes_though_the_key_is_right(guarded, method, path):
    server, guard = guarded
    raw = {"raw_path": b"/health", "query_string": b"method=GET", "root_path": "/v1"}
    assert status(guard, method, path, bearer(), (b"x-http-method-override", b"GET"), **raw) == 403
    assert not server.reached


@pytest.mark.parametrize(("method", "path", "query"), sorted(SLEEP))
def test_a_server_sleeps_only_on_its_trainers_gpus(monkeypatch, method, path, query):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    for sleeps, expected in (("", 403), ("1", 200)):
        monkeypatch.setenv(SLEEPS, sleeps)
        guard = Guard(Server())
        live(guard)
        assert status(guard, method, path, bearer(), query_string=query) == expected


@pytest.mark.parametrize(
    ("body", "more", "expected"),
    [
        (b"", False, 424),
        (b"[]", False, 424),
        (b'{"url": "file:///etc/passwd", "size": 1}', False, 424),
        (b'{"url": "nothing"}', False, 424),
        (b'{"url": "http://127.0.0.1:port/x", "size": 1}', False, 424),
        (b'{"url": "http://127.0.0.1:9/x", "size": 1' + b"0" * 30 + b"}", False, 424),
        (b"[" * 8000, False, 424),
        (b"[" * 200_000, False, 424),
        (b"\xff", False, 424),
        (b"[" * 1000, True, 424),  # it would go on for ever
        (b"[", True, 408),
    ],
)
def test_what_cannot_be_fetched_is_answered_with_why(guarded, monkeypatch, body, more, expected):
    server, guard = guarded
    monkeypatch.setattr("mt_grpo.vllm_plugin.guard.BODY_TIMEOUT", 0.05 if expected == 408 else 30.0)

    async def receive():
        await asyncio.sleep(0.001)
        return {"type": "http.request", "body": body, "more_body": more}

    head, said = answer(guard, "POST", FETCH, bearer(), receive=receive)
    assert head["status"] == expected and json.loads(said["body"])["error"] and not server.reached
    assert status(guard, "POST", FETCH) == 401


@pytest.mark.parametrize("origin", [b"http://evil.example", b"null", b"http://127.0.0.1:8000", b""])
@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("POST", "/pause"), ("OPTIONS", "/v1/completions")])
def test_web_pages_can_neither_ask_nor_read(guarded, origin, method, path):
    server, guard = guarded
    asked = (b"access-control-request-method", b"POST")
    head, _ = answer(guard, method, path, bearer(), (b"origin", origin), asked)
    assert head["status"] == 403 and not server.reached
    assert not [name for name, _ in head["headers"] if name.startswith(b"access-control")]
    for path in ("/v1/realtime", "/health"):
        (opened,) = answer(guard, "GET", path, bearer(), kind="websocket")
        assert opened["type"] == "websocket.close" and not server.reached


def test_servers_that_are_started_alike_have_names_of_their_own(monkeypatch):
    """Processes of one server share the name that it was given."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    names = {}
    for count in (None, 1, 2):
        for guard in (Guard(Server()), Guard(Server())):
            live(guard, fingerprint_value="all", api_server_count=count)
            for path in ("/v1/completions", "/inference/v1/generate"):
                headers = dict(answer(guard, "POST", path, bearer())[0]["headers"])
                names.setdefault(count, set()).add(headers[IDENTITY.encode()])
    assert len(names[None]) == len(names[1]) == 2 and names[2] == {b"all"}


@pytest.mark.parametrize("end", [None, RuntimeError("a failure")])
def test_a_made_up_key_is_found_while_the_server_runs(root, end):
    guard, found = Guard(Server(end)), []

    def check():
        found.extend(find_key(url) for url in (URL, "http://localhost:8000/", "http://[::1]:8000"))
        assert not find_key("http://127.0.0.1:8001") and not find_key("http://10.0.0.2:8000")
        (folder,) = root.iterdir()
        (file,) = folder.iterdir()
        assert [stat.S_IMODE(one.stat().st_mode) for one in (folder, file)] == [0o700, 0o600]

    for key in ("", "None"):
        assert status(guard, "POST", "/pause", bearer(key)) == 401, "it has not begun"
    assert find_key(URL) is None
    if end is None:
        assert live(guard, check) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    else:
        with pytest.raises(RuntimeError, match="a failure"):
            live(guard, check)
    (key,) = set(found)
    assert len(key) >= 32 and find_key(URL) is None
    statuses = [status(guard, "POST", "/pause", *header) for header in ([bearer(key)], [bearer("None")], [])]
    assert statuses == [200, 401, 401]


@pytest.mark.parametrize("host", [None, "", "0.0.0.0", "::", "localhost", "::1"])
def test_a_server_is_found_on_loopback_whatever_it_listens_on(host):
    found = []
    for _ in range(2):
        live(Guard(Server()), lambda: found.append(find_key(URL)), host=host)
    assert all(found) and len(set(found)) == 2  # every server makes up another


def test_keys_that_are_given_are_written_nowhere(guarded, root):
    """Those of the command line beat that of the environment."""
    _, guard = guarded
    assert find_key("http://10.0.0.2:8000") == KEY
    live(guard, api_key=["first", "second"])
    assert [status(guard, "POST", "/pause", bearer(key)) for key in ("first", "second", KEY)] == [200, 200, 401]
    assert not list(root.iterdir())


def test_the_next_server_replaces_a_key_and_keeps_its_own():
    """One that was killed leaves its key; one that ends slowly has a successor by then."""
    vllm_plugin.StoredKey("127.0.0.1", 8000).write("of a killed server, and longer than the next")
    live(Guard(Server()), lambda: vllm_plugin.StoredKey("127.0.0.1", 8000).write("of the next"))
    assert find_key(URL) == "of the next"


def test_on_a_system_without_namespaces_no_key_is_found(monkeypatch):
    look = os.stat

    def stat_of(path, **options):
        if str(path).startswith("/proc/"):
            raise FileNotFoundError(path)
        return look(path, **options)

    monkeypatch.setattr(os, "stat", stat_of)
    assert find_key("http://node1:8000") is None


@pytest.mark.parametrize("made", ["link", "file", "open", "foreign"])
def test_a_folder_that_others_may_have_made_is_refused(root, monkeypatch, made):
    me = os.geteuid() + (made == "foreign")
    folder = root / f"mt-grpo-keys-{me}"
    if made == "file":
        folder.touch()
    elif made == "link":
        (root / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(root / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o750 if made == "open" else 0o700)
    monkeypatch.setattr(os, "geteuid", lambda: me)
    writing = lambda: vllm_plugin.StoredKey("127.0.0.1", 8000).write(KEY)  # noqa: E731
    for use in (vllm_plugin.check_keys_folder, writing, lambda: find_key(URL), lambda: live(Guard(Server()))):
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

    def during():
        assert status(guard, "GET", "/health") == 200
        os.kill(os.getpid(), signal.SIGTERM)
        asked = [("GET", "/health"), ("POST", "/v1/completions"), ("GET", "/metrics")]
        assert [status(guard, *one, bearer()) for one in asked] == [503, 503, 200]

    live(guard, during)
    assert heard == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is before
