"""A real server that is killed or hangs, strangers at its port, and training that is killed itself."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.forked import Forked
from support.loopback import Proxy
from support.servers import ROOT, START_LIMIT, RealServer, needs_server, nobody_left
from support.waiting import until
from transformers import AutoTokenizer

from mt_grpo.cli import main
from mt_grpo.rollout import SamplingParams
from mt_grpo.rollout.engines.vllm import VLLMServerClient
from mt_grpo.runlog import read_trajectories
from mt_grpo.servers.http import Server, find_key
from mt_grpo.token_tree import TokenTree
from mt_grpo.training.servers import GUARD

pytestmark = [needs_server, pytest.mark.server]
MODEL = ROOT / "mt_grpo" / "data" / "embedded" / "model"
LENGTH, STEPS, BATCH = 224, 3, 8
COMPLETIONS = "/v1/completions"
HANGS_AT = 7
"""The request of a rollout, from 0, that hangs where the middle of a rollout is wanted, and all after it."""
ONE_AT_A_TIME = ("--max_concurrent_rollouts", "1")


def options(url: str, folder: Path, *more: str) -> list[str]:
    """A short run of a recipe, without evaluation."""
    return [
        *("train", "--config", str(ROOT / "recipes/quickstart_vllm.yaml"), "--vllm_server_base_url", url),
        *("--output_dir", str(folder), "--max_steps", str(STEPS), "--do_eval", "false"),
        *("--num_generations", "4", "--per_device_train_batch_size", str(BATCH), *more),
    ]


@pytest.fixture
def failing(capsys) -> Callable[[list[str]], str]:
    """Runs a command that fails, and tells its last line."""

    def run(arguments: list[str]) -> str:
        assert main(arguments) == 1
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert line.startswith("mt-grpo: ")
        return line

    return run


def trajectories(folder: Path) -> list[dict]:
    return list(read_trajectories(folder))


def sampled(folder: Path, *steps: int) -> dict[str, list]:
    """Tokens and stop reason of every training conversation, by session."""
    return {
        row["session"]: (TokenTree.from_dict(row["tree"]).path(), row["stop_reason"])
        for row in trajectories(folder)
        if row["mode"] == "train" and row["step"] in (steps or range(STEPS))
    }


def weight_folders(pid: int) -> list[Path]:
    return list(Path("/dev/shm").glob(f"mt-grpo-weights-*-{pid}-*"))


def conversations(contexts: list[list[int]]) -> int:
    """Conversations begun by the requests of a run that holds one at a time."""
    pairs = zip([[], *contexts], contexts, strict=False)
    return sum(not before or len(now) <= len(before) or now[: len(before)] != before for before, now in pairs)


class Run:
    """`mt-grpo train` as a process of its own."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self.folder, self._log = folder, folder.with_suffix(".log")
        self.process = Forked(["-m", "mt_grpo", *arguments], self._log)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def until(self, condition: Callable[[], object]) -> None:
        until(condition, lambda: self.process.poll() is None, lambda: self.log, START_LIMIT)

    def wait(self) -> int:
        return self.process.wait(START_LIMIT)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """It makes up a key, and is started by its command the first time."""
    log = tmp_path_factory.mktemp("server") / "log"
    server = RealServer("embedded", log, "--vllm_max_model_length", str(LENGTH), by_command=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_API_KEY", raising=False)
        yield server
    server.stop()


@pytest.fixture(scope="module")
def undisturbed(server, tmp_path_factory):
    """A run that is started before its server."""
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    run = Run(options(server.url, folder, "--vllm_server_timeout", str(START_LIMIT)), folder)
    run.until(lambda: "Waiting for the vLLM server" in run.log)
    server.start()
    assert run.wait() == 0, run.log
    run.refused = server.metric("http_requests_total", status="4xx")
    return run


@pytest.fixture
def proxy(server):
    """Starts proxies in front of the server."""
    proxies = []

    def start(*fault):
        proxies.append(Proxy(server.url, *fault))
        return proxies[-1]

    yield start
    for one in proxies:
        one.stop()


def hanging(path: str, updates: int, number: int) -> Callable[[str, int, int], str | None]:
    """A fault: after so many weight updates, the request for a path with this number hangs, and all after it."""
    return lambda asked, sent, count: "hang" if (asked, sent) == (path, updates) and count >= number else None


def test_a_trainer_that_is_started_first_waits_for_its_server(undisturbed):
    assert f"of {START_LIMIT:.0f} s)." in undisturbed.log
    rows = trajectories(undisturbed.folder)
    assert len(rows) == STEPS * BATCH
    assert all(turn["weight_version"] == row["step"] for row in rows for turn in row["turns"])
    assert (undisturbed.folder / "model.safetensors").exists()


def test_a_full_context_ends_conversations_and_is_never_sent(undisturbed):
    reasons = [row["stop_reason"] for row in trajectories(undisturbed.folder)]
    assert "context_full" in reasons and "engine_error" not in reasons
    assert undisturbed.refused == 0


def test_only_its_user_can_read_the_key_and_it_is_in_no_log(undisturbed, server):
    key, log = find_key(server.url), server.log.read_text()
    (file,) = Path("/dev/shm").glob(f"mt-grpo-keys-{os.geteuid()}/*-localhost-{server.port}")
    assert [stat.S_IMODE(each.stat().st_mode) for each in (file, file.parent)] == [0o600, 0o700]
    assert file.read_text() == key and len(key) >= 32
    assert key not in log and GUARD in log
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert key.encode() not in process.read_bytes()
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue


def ask(server, key: str | None, method: str, path: str, body=None, **more: str) -> tuple[int, list[str]]:
    """Status, and names of headers for other origins, of the answer to a request whose path goes out to the letter."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    sent = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in more.items()}}
    sent |= {"Authorization": f"Bearer {key}"} if key else {}
    try:
        connection.request(method, path, None if body is None else json.dumps(body), sent)
        answer = connection.getresponse()
        return answer.status, [name for name, _ in answer.getheaders() if name.lower().startswith("access-control")]
    finally:
        connection.close()


@pytest.fixture
def unharmed(undisturbed, server):
    """The server, which is as it was before."""
    control = Server(server.url)
    yield server
    assert control.get("/is_paused") == {"is_paused": False}
    assert control.get("/weight_info")["weight_version"] != "stolen"


WORKER = [
    *("/collective_rpc", "//collective_rpc", "/collective_rpc/", "/v1/../collective_rpc", "/%63ollective_rpc"),
    *("/health/../collective_rpc", "/v1/%2e%2e/collective_rpc", "/health%2f..%2fcollective_rpc"),
    *("/collective_rpc?/health", "http://127.0.0.1/collective_rpc"),
]
"""Ways to any method of a worker."""
GUARDED = {
    "POST": [
        *("/pause?mode=keep", "//pause", "/resume", "/sleep", "/reset_prefix_cache", "/init_weight_transfer_engine"),
        *("/start_weight_update", "/update_weights", "/finish_weight_update", "/update_weight_version"),
        *("/v1/load_lora_adapter", COMPLETIONS, "/v1/chat/completions", "/invocations", "/tokenize"),
        "/abort_requests",
    ],
    "GET": ["/server_info", "/v1/models", "/metrics", "/metrics/x", "/weight_info", "/openapi.json", "/ping"],
    "HEAD": ["/metrics"],
}
ORIGIN = {"Origin": "http://evil.example"}
PREFLIGHT = ORIGIN | {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "content-type"}
UPGRADE = {"Connection": "Upgrade", "Upgrade": "websocket"}
UPGRADE |= {"Sec_WebSocket_Version": "13", "Sec_WebSocket_Key": "dGhlIHNhbXBsZSBub25jZQ=="}
PAGES = [
    *(("OPTIONS", path, PREFLIGHT) for path in ("/pause", COMPLETIONS)),
    *(("GET", path, ORIGIN) for path in ("/v1/models", "/health")),
    *(("POST", "/pause", ORIGIN), ("GET", "/health", {"Origin": "null"})),
    *(("GET", "/v1/realtime", UPGRADE), ("GET", "/health", UPGRADE | ORIGIN)),
]


@pytest.mark.parametrize(
    ("method", "path", "headers", "everyone"),
    [
        *(("POST", path, {}, True) for path in WORKER),
        *((method, path, {}, False) for method in GUARDED for path in GUARDED[method]),
        *((*page, True) for page in PAGES),
    ],
)
def test_a_server_refuses_strangers(unharmed, tmp_path, method, path, headers, everyone):
    """Methods of a worker, and web pages, are refused to everyone: to whoever has the key as well."""
    saving = {"path": str(tmp_path / "out"), "pattern": None, "max_size": None}
    body = {"method": "save_sharded_state", "kwargs": saving, "weight_version": "stolen", "new_version": "stolen"}
    body = body | {"prompt": [1, 2], "max_tokens": 1} if method == "POST" else None
    known = find_key(unharmed.url)
    for key in (None, "x" * 43, *([known] * everyone)):
        status, names = ask(unharmed, key, method, path, body, **headers)
        assert status in ([403] if key == known else [401, 403]) and not names
        assert ask(unharmed, key, "GET", "/health")[0] == 200
    assert ask(unharmed, known, "GET", "/v1/models") == (200, [])
    assert not list(tmp_path.iterdir())


def test_a_server_that_hangs_as_a_whole_is_waited_for(undisturbed, server):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    client = VLLMServerClient(server.url, tokenizer, request_timeout=1.0)
    context = tokenizer.encode("user What is the capital of Peru")

    async def go() -> None:
        await client.connect()
        (one,) = client.servers
        os.killpg(server.pid, signal.SIGSTOP)
        try:
            asking = asyncio.ensure_future(client.generate(context, SamplingParams(max_tokens=4), "a"))
            await asyncio.to_thread(until, lambda: not one.up)
        finally:
            os.killpg(server.pid, signal.SIGCONT)
        assert (await asking).ids and one.up
        await client.close()

    asyncio.run(go())


def test_a_server_lost_in_an_evaluation_leaves_a_checkpoint(undisturbed, server, proxy, tmp_path, failing):
    dying = proxy(lambda path, updates, number: "dead" if (path, updates) == (COMPLETIONS, 3) else None)
    folder = tmp_path / "run"
    more = ["--max_steps", "1", "--do_eval", "true", "--eval_on_start", "false"]
    more += ["--dataset_test_split", "validation[:1]"]
    line = failing(options(dying.url, folder, "--vllm_server_timeout", "1", *more))
    resuming = ("--resume_from_checkpoint", str(folder / "checkpoint-1"))
    assert line.startswith("mt-grpo: No vLLM server answered") and " ".join(resuming) in line
    assert main(options(server.url, folder, *more, *resuming)) == 0
    assert json.loads((folder / "summary.json").read_text())["after"]


SLOW_DISK = """
import time
from pathlib import Path
import torch
from mt_grpo.weights.files import _WeightFile

write = {target}

def slow(*args, **kwargs):
    write(*args, **kwargs)
    Path({marker!r}).touch()
    time.sleep(1800)

{target} = slow
"""
SAVES = ("--save_strategy", "steps", "--save_steps", "1")
INTERRUPTED = {
    "rollout": ("", ONE_AT_A_TIME),
    "weight file": ("_WeightFile.place", ()),
    "checkpoint": ("torch.save", (*SAVES, "--use_vllm", "false", "--max_turn_length", "4")),
}
"""What stands still for half an hour at a moment, once it has written its file, and options that lead there."""


@pytest.mark.parametrize(
    ("moment", "how"),
    [("rollout", signal.SIGTERM), ("weight file", signal.SIGTERM), ("checkpoint", signal.SIGINT)],
)
def test_an_interrupted_run_ends_at_once_with_one_line(undisturbed, proxy, tmp_path, how, moment):
    folder, marker, plugin = (tmp_path / name for name in ("run", "marker", "slow_disk.py"))
    faulty, (target, more) = proxy(hanging(COMPLETIONS, 2, HANGS_AT)), INTERRUPTED[moment]
    if target:
        plugin.write_text(SLOW_DISK.format(target=target, marker=str(marker)))
        more = (*more, "--external_plugins", str(plugin))
    run = Run(options(faulty.url, folder, *more), folder)
    run.until(lambda: "hang" in faulty.faults or marker.exists())
    assert moment != "weight file" or weight_folders(run.process.pid)
    run.process.send_signal(how)
    assert run.wait() == 128 + how
    words = {signal.SIGINT: "interrupted by Ctrl-C", signal.SIGTERM: "ended by SIGTERM"}[how]
    assert run.log.splitlines()[-1].startswith(f"mt-grpo: {words}. ")
    assert "Traceback" not in run.log and "Exception" not in run.log and "Task" not in run.log
    assert nobody_left(run.process.pid)
    assert not weight_folders(run.process.pid)
    assert not list(folder.rglob("*.safetensors")) and not list(folder.glob("checkpoint-*"))
    if moment == "rollout":
        finished = trajectories(folder)
        assert len(finished) == conversations(faulty.contexts[2:]) - 1 >= 3  # the first are the probes of the sync
        assert all(row["stop_reason"] for row in finished)


def test_a_server_left_paused_by_a_killed_run_is_usable(undisturbed, server, proxy, tmp_path):
    faulty = proxy(lambda path, updates, number: "hang" if path == "/finish_weight_update" else None)
    run = Run(options(faulty.url, tmp_path / "killed"), tmp_path / "killed")
    run.until(lambda: "hang" in faulty.faults)
    run.process.kill()
    assert run.wait() == -signal.SIGKILL
    assert weight_folders(run.process.pid)
    assert Server(server.url).get("/is_paused") == {"is_paused": True}
    assert main(options(server.url, tmp_path / "next", "--max_steps", "1")) == 0
    assert sampled(tmp_path / "next", 0) == sampled(undisturbed.folder, 0)
    assert not weight_folders(run.process.pid)


@pytest.fixture(scope="module")
def outage(undisturbed, server, tmp_path_factory):
    """Two runs whose server is killed in their second rollout: one gives up before it is back, one does not."""
    folder, found = tmp_path_factory.mktemp("outage"), SimpleNamespace(keys=[])
    server.by_command = False  # its command was tested enough
    for name, timeout, more in (("impatient", "2", ONE_AT_A_TIME), ("patient", str(START_LIMIT), ())):
        faulty = Proxy(server.url, hanging(COMPLETIONS, 3, HANGS_AT))
        run = Run(options(faulty.url, folder / name, "--vllm_server_timeout", timeout, *more), folder / name)
        setattr(found, name, run)
        run.until(lambda: "hang" in faulty.faults)  # noqa: B023
        found.keys.append(find_key(server.url))
        server.stop(signal.SIGKILL)
        found.keys.append(find_key(server.url))
        faulty.go.set()
        if name == "impatient":
            run.wait()
            found.begun = conversations(faulty.contexts[-HANGS_AT - 1 :])
            found.saved = trajectories(run.folder)
        server.start()
        run.wait()
        faulty.stop()
    return found


def test_the_key_of_a_killed_server_opens_nothing(outage, server):
    first, left, second, left_again = outage.keys
    assert first == left != second == left_again != find_key(server.url) is not None
    statuses = [ask(server, key, "GET", "/v1/models")[0] for key in (first, second, find_key(server.url))]
    assert statuses == [401, 401, 200]


def test_a_server_restart_does_not_change_the_result_of_a_run(outage, undisturbed):
    run = outage.patient
    assert run.process.returncode == 0, run.log
    assert "was restarted: sending it the weights again" in run.log
    rows = trajectories(run.folder)
    assert len(rows) == STEPS * BATCH
    assert all(turn["weight_version"] == row["step"] for row in rows for turn in row["turns"])
    assert sampled(run.folder) == sampled(undisturbed.folder)


def test_a_run_that_loses_its_server_saves_its_work(outage, undisturbed):
    run = outage.impatient
    assert run.process.returncode == 1
    line = run.log.splitlines()[-1]
    assert line.startswith("mt-grpo: No vLLM server answered for 2 s") and "`mt-grpo serve --config R.yaml`" in line
    assert f"`--resume_from_checkpoint {run.folder / 'checkpoint-1'}`" in line
    assert "Traceback" not in run.log and not weight_folders(run.process.pid)
    finished = [row for row in outage.saved if row["step"] == 1]
    assert len(outage.saved) - len(finished) == BATCH and len(finished) == outage.begun - 1 > 0
    complete = sampled(undisturbed.folder, 1)
    assert all(sampled(run.folder, 1)[row["session"]] == complete[row["session"]] for row in finished)


def test_a_run_resumes_from_the_checkpoint_of_an_outage(outage, undisturbed, server):
    folder = outage.impatient.folder
    assert main(options(server.url, folder, "--resume_from_checkpoint", str(folder / "checkpoint-1"))) == 0
    assert sampled(folder) == sampled(undisturbed.folder)


def test_a_server_interrupted_at_work_leaves_no_process(undisturbed, server):
    """The last test: it ends the server of this module."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    client = VLLMServerClient(server.url, tokenizer, server_timeout=0.5, request_timeout=60.0)

    async def ask_on(index: int) -> None:
        while True:
            await client.generate([index] * 8, SamplingParams(max_tokens=200), str(index))

    async def go() -> None:
        await client.connect()
        jobs = [asyncio.ensure_future(ask_on(index)) for index in range(32)]
        await asyncio.to_thread(until, partial(server.metric, "vllm:num_requests_running"))
        os.kill(server.pid, signal.SIGINT)
        await asyncio.gather(*jobs, return_exceptions=True)
        await client.close()

    asyncio.run(go())
    server.wait_gone(START_LIMIT)
    assert find_key(server.url) is None
