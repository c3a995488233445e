"""A stranger at the port of a real server, and the trainer beside him."""

from __future__ import annotations

import http.client
import json
import os
import signal
import stat
from pathlib import Path

import pytest
from support.marks import needs_server
from support.servers import ROOT, RealServer
from support.waiting import until

from mt_grpo.cli import main
from mt_grpo.servers.http import ServerControl, find_key
from mt_grpo.training.servers import GUARD

pytestmark = [needs_server, pytest.mark.server]
KEYS = ("no key", "a wrong key", "the key")
ORIGIN = {"Origin": "http://evil.example"}
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}
PREFLIGHT = ORIGIN | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("guarded") / "log"
    server = RealServer("embedded", log, "--vllm_max_model_length", "256", by_command=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_API_KEY", raising=False)
        yield server.start()
    server.stop()


def ask(server, method, path, headers=None, body=None) -> tuple[int, dict[str, str]]:
    """Status and headers of the answer to a request whose path goes out to the letter."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        content = None if body is None else json.dumps(body)
        sent = {"Content-Type": "application/json"} | (headers or {})
        connection.request(method, path, content, sent)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}
    finally:
        connection.close()


def authorization(server, key: str) -> dict[str, str]:
    value = {"a wrong key": "x" * 43, "the key": find_key(server.url)}.get(key)
    return {"Authorization": f"Bearer {value}"} if value else {}


def unchanged(server) -> None:
    control = ServerControl(server.url)
    assert control.get("/is_paused") == {"is_paused": False}
    assert control.get("/weight_info")["weight_version"] != "stolen"


def save(path: str) -> dict:
    return {"method": "save_sharded_state", "kwargs": {"path": path, "pattern": None, "max_size": None}}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    "path",
    [
        "/collective_rpc",
        "//collective_rpc",
        "/collective_rpc/",
        "/v1/../collective_rpc",
        "/health/../collective_rpc",
        "/v1/%2e%2e/collective_rpc",
        "/%63ollective_rpc",
        "/collective_rpc?/health",
        "/health%2f..%2fcollective_rpc",
        "http://127.0.0.1/collective_rpc",
    ],
)
def test_no_worker_method_runs_for_whoever_asks(server, tmp_path, key, path):
    status, _ = ask(server, "POST", path, authorization(server, key), save(str(tmp_path / "out")))
    assert status in (401, 403)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", KEYS[:2])
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/pause?mode=keep", None),
        ("POST", "//pause", None),
        ("POST", "/resume", None),
        ("POST", "/reset_prefix_cache", None),
        ("POST", "/init_weight_transfer_engine", {"init_info": {}}),
        ("POST", "/start_weight_update", {}),
        ("POST", "/update_weights", {"update_info": {"path": "/etc/passwd"}}),
        ("POST", "/finish_weight_update", {"weight_version": "stolen"}),
        ("POST", "/update_weight_version", {"new_version": "stolen"}),
        ("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/etc"}),
        ("POST", "/v1/completions", {"prompt": [1, 2], "max_tokens": 1}),
        ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
        ("POST", "/invocations", {"prompt": "a", "max_tokens": 1}),
        ("POST", "/tokenize", {"prompt": "a"}),
        ("POST", "/abort_requests", {}),
        ("POST", "/sleep", None),
        ("GET", "/server_info", None),
        ("GET", "/v1/models", None),
        ("GET", "/metrics", None),
        ("GET", "/metrics/x", None),
        ("GET", "/weight_info", None),
        ("GET", "/openapi.json", None),
        ("GET", "/ping", None),
        ("HEAD", "/metrics", None),
    ],
)
def test_without_the_key_only_the_health_check_is_answered(server, method, path, body, key):
    assert ask(server, method, path, authorization(server, key), body)[0] in (401, 403)
    assert ask(server, "GET", "/health", authorization(server, key))[0] == 200
    unchanged(server)


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("OPTIONS", "/pause", PREFLIGHT),
        ("OPTIONS", "/v1/completions", PREFLIGHT),
        ("POST", "/pause", ORIGIN),
        ("GET", "/v1/models", ORIGIN),
        ("GET", "/health", ORIGIN),
        ("GET", "/health", {"Origin": "null"}),
        ("GET", "/v1/realtime", UPGRADE),
        ("GET", "/health", UPGRADE | ORIGIN),
    ],
)
def test_a_web_page_is_refused_though_it_knew_the_key(server, method, path, headers):
    status, answered = ask(server, method, path, headers | authorization(server, "the key"))
    assert status == 403
    assert not [name for name in answered if name.startswith("access-control")]
    unchanged(server)


def test_no_answer_is_open_to_other_origins(server):
    _, answered = ask(server, "GET", "/v1/models", authorization(server, "the key"))
    assert not [name for name in answered if name.startswith("access-control")]


def test_a_trainer_finds_the_key_and_trains(server, tmp_path):
    arguments = ["train", "--config", str(ROOT / "recipes" / "quickstart_vllm.yaml"), "--do_eval", "false"]
    arguments += ["--vllm_server_port", str(server.port), "--vllm_server_host", "127.0.0.1", "--max_steps", "2"]
    arguments += ["--vllm_max_model_length", "256", "--num_generations", "4", "--per_device_train_batch_size", "8"]
    assert main([*arguments, "--output_dir", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_trainer_with_another_key_is_told_so(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_API_KEY", "another")
    arguments = ["rollout", "--config", str(ROOT / "recipes" / "quickstart_vllm.yaml")]
    arguments += ["--vllm_server_port", str(server.port), "--output_dir", str(tmp_path / "run")]
    assert main(arguments) == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("mt-grpo: ") and "refuses the API key" in said and "VLLM_API_KEY" in said


def test_only_its_user_can_read_the_key_and_it_is_in_no_log(server):
    key = find_key(server.url)
    (file,) = Path("/dev/shm").glob(f"mt-grpo-keys-{os.geteuid()}/*-localhost-{server.port}")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert file.read_text() == key and len(key) >= 32
    assert key not in server.log.read_text() and GUARD in server.log.read_text()
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert key.encode() not in process.read_bytes()
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue


def test_the_key_of_a_killed_server_opens_nothing(server):
    """The last test: it ends the server of this module."""
    before = find_key(server.url)
    server.stop(signal.SIGKILL)
    assert find_key(server.url) == before
    server.by_command = False  # its command was tested enough
    server.start()
    assert find_key(server.url) not in (None, before)
    assert ask(server, "GET", "/v1/models", {"Authorization": f"Bearer {before}"})[0] == 401
    os.kill(server._process.pid, signal.SIGTERM)
    until(lambda: server._process.poll() is not None)
    assert find_key(server.url) is None
