"""Training against a real server that is killed, hangs or answers nonsense, and training that is killed itself."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.forked import Forked
from support.loopback import Proxy, free_port
from support.marks import needs_server
from support.models import build_model, build_tokenizer
from support.servers import ROOT, START_LIMIT, RealServer
from support.waiting import until
from transformers import AutoTokenizer

from mt_grpo.cli import main
from mt_grpo.rollout import SamplingParams
from mt_grpo.rollout.engines.vllm.client import VLLMServerClient
from mt_grpo.runlog import read_trajectories
from mt_grpo.servers.http import ServerControl
from mt_grpo.token_tree import TokenTree

pytestmark = [needs_server, pytest.mark.server]
MODEL = ROOT / "mt_grpo" / "data" / "embedded" / "model"
LENGTH = 224
STEPS = 3
BATCH = 8
COMPLETIONS = "/v1/completions"
HANGS_AT = 7
"""The request of a rollout, from 0, that hangs where the middle of a rollout is wanted, and all after it."""


def options(url: str, folder: Path, *more: str, recipe: str = "quickstart_vllm") -> list[str]:
    """A short run of a recipe, without evaluation."""
    return [
        *("train", "--config", str(ROOT / "recipes" / f"{recipe}.yaml"), "--vllm_server_base_url", url),
        *("--output_dir", str(folder), "--max_steps", str(STEPS), "--do_eval", "false"),
        *("--num_generations", "4", "--per_device_train_batch_size", str(BATCH), *more),
    ]


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


def nobody_left(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


class Run:
    """`mt-grpo train` as a process of its own."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self.folder = folder
        self._log = folder.with_suffix(".log")
        self.process = Forked(["-m", "mt_grpo", *arguments], self._log)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def until(self, condition: Callable[[], object]) -> None:
        until(condition, lambda: self.process.poll() is None, lambda: self.log, START_LIMIT)

    def wait(self, limit: float = START_LIMIT) -> int:
        return self.process.wait(limit)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = RealServer("embedded", tmp_path_factory.mktemp("server") / "log", "--vllm_max_model_length", str(LENGTH))
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


def test_a_trainer_that_is_started_first_waits_for_its_server(undisturbed):
    assert f"of {START_LIMIT:.0f} s)." in undisturbed.log
    rows = trajectories(undisturbed.folder)
    assert len(rows) == STEPS * BATCH
    assert all(turn["weight_version"] == row["step"] for row in rows for turn in row["turns"])
    assert (undisturbed.folder / "model.safetensors").exists()


def test_a_full_context_ends_conversations_and_is_never_sent(undisturbed, server):
    reasons = [row["stop_reason"] for row in trajectories(undisturbed.folder)]
    assert "context_full" in reasons and "engine_error" not in reasons
    assert server.metric("http_requests_total", status="4xx") == 0


def test_without_a_server_one_sentence_names_the_command(tmp_path, capsys):
    url = f"http://127.0.0.1:{free_port()}"
    assert main(options(url, tmp_path / "run", "--vllm_server_timeout", "1")) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("mt-grpo: No vLLM server answered for 1 s")
    assert url in line and "`mt-grpo serve --config R.yaml`" in line


@pytest.mark.parametrize(("name", "words"), [("other", "serves"), ("model", "encodes text differently")])
def test_a_server_with_another_model_or_vocabulary_is_refused(undisturbed, server, tmp_path, capsys, name, words):
    folder = tmp_path / name
    if name == "other":
        shutil.copytree(MODEL, folder)
    else:
        tokenizer = build_tokenizer()
        tokenizer.save_pretrained(folder)
        build_model(tokenizer, max_position_embeddings=1024).save_pretrained(folder)
    assert main(options(server.url, tmp_path / "run", "--model_name_or_path", str(folder))) == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("mt-grpo: ") and server.url in line and words in line
    assert not any((tmp_path / "run").iterdir())


def test_a_run_learns_the_same_through_failing_requests(undisturbed, proxy, tmp_path):
    faults = {3: "500", 4: "garbage", 5: "cut", 6: "closed", 11: "500", 12: "garbage", 13: "cut"}
    faulty = proxy(lambda path, updates, number: faults.get(number) if path == COMPLETIONS else None)
    assert main(options(faulty.url, tmp_path / "run")) == 0
    assert set(faulty.faults) == set(faults.values())
    assert sampled(tmp_path / "run") == sampled(undisturbed.folder)


def test_a_request_that_hangs_is_repeated_on_the_same_server(undisturbed, proxy):
    """Two addresses of one server: a conversation that leaves its server is seen at the other address."""
    hanging = proxy(lambda path, updates, number: "hang" if path == COMPLETIONS and number == 4 else None)
    other = proxy()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    client = VLLMServerClient([hanging.url, other.url], tokenizer, request_timeout=3.0)
    prompts = [tokenizer.encode(f"user What is the capital of {name}") for name in ("Peru", "Chile")]

    async def converse(group: int, member: int) -> None:
        context = list(prompts[group])
        for turn in range(4):
            sampling = SamplingParams(max_tokens=8, seed=4 * member + turn)
            context += (await client.generate(list(context), sampling, f"{group}-{member}")).ids

    async def go() -> None:
        await client.connect()
        await asyncio.gather(*(converse(group, member) for group in range(2) for member in range(3)))
        await client.close()

    asyncio.run(go())
    assert hanging.faults == ["hang"]
    groups = [
        {group for context in one.contexts for group in range(2) if context[: len(prompts[group])] == prompts[group]}
        for one in (hanging, other)
    ]
    assert sorted(groups, key=sorted) == [{0}, {1}]


def test_a_server_that_hangs_as_a_whole_is_waited_for(undisturbed, server):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    client = VLLMServerClient(server.url, tokenizer, request_timeout=1.0)
    context = tokenizer.encode("user What is the capital of Peru")

    async def go() -> None:
        await client.connect()
        (one,) = client.servers
        group = server._process.pid
        os.killpg(group, signal.SIGSTOP)
        try:
            asking = asyncio.ensure_future(client.generate(context, SamplingParams(max_tokens=4), "a"))
            await asyncio.to_thread(until, lambda: not one.up)
        finally:
            os.killpg(group, signal.SIGCONT)
        assert (await asking).ids and one.up
        await client.close()

    asyncio.run(go())


@pytest.mark.parametrize("moment", ["sync", "evaluation"])
def test_a_server_lost_after_a_step_leaves_a_checkpoint(undisturbed, server, proxy, tmp_path, capsys, moment):
    paths = {"sync": ("/sleep", 2), "evaluation": (COMPLETIONS, 3)}  # the first update is a proof
    dying = proxy(lambda path, updates, number: "dead" if (path, updates) == paths[moment] else None)
    folder = tmp_path / "run"
    more = ["--max_steps", "1", "--do_eval", "true", "--eval_on_start", "false"]
    more += ["--dataset_test_split", "validation[:8]", "--per_device_eval_batch_size", "8"]
    arguments = options(dying.url, folder, "--vllm_server_timeout", "1", *more)
    assert main(arguments) == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    checkpoint = folder / "checkpoint-1"
    assert line.startswith("mt-grpo: No vLLM server answered") and f"--resume_from_checkpoint {checkpoint}" in line
    assert main(options(server.url, folder, *more, "--resume_from_checkpoint", str(checkpoint))) == 0
    assert json.loads((folder / "summary.json").read_text())["after"]


SLOW_DISK = """
import time
from pathlib import Path
{imports}

write = {target}

def slow(*args, **kwargs):
    write(*args, **kwargs)
    Path({marker!r}).touch()
    time.sleep(1800)

{target} = slow
"""


def slow_disk(folder: Path, marker: Path, target: str, imports: str) -> list[str]:
    """Options that make a run stand still in the middle of writing files."""
    plugin = folder / "slow_disk.py"
    plugin.write_text(SLOW_DISK.format(imports=imports, target=target, marker=str(marker)))
    return ["--external_plugins", str(plugin)]


def conversations(contexts: list[list[int]]) -> int:
    """Conversations begun by the requests of a run that holds one at a time."""
    pairs = zip([[], *contexts], contexts, strict=False)
    return sum(not before or len(now) <= len(before) or now[: len(before)] != before for before, now in pairs)


ONE_AT_A_TIME = ("--max_concurrent_rollouts", "1")


@pytest.mark.parametrize(
    ("moment", "how"),
    [
        ("rollout", signal.SIGINT),
        ("rollout", signal.SIGTERM),
        ("weight file", signal.SIGTERM),
        ("checkpoint", signal.SIGINT),
    ],
)
def test_an_interrupted_run_ends_at_once_with_one_line(undisturbed, server, proxy, tmp_path, how, moment):
    folder, marker = tmp_path / "run", tmp_path / "marker"
    hanging = proxy(
        lambda path, updates, number: "hang" if (path, updates) == (COMPLETIONS, 2) and number >= HANGS_AT else None
    )
    more = {
        "rollout": lambda: ONE_AT_A_TIME,
        "weight file": lambda: slow_disk(
            tmp_path, marker, "WeightFile.place", "from mt_grpo.weights.files import WeightFile"
        ),
        "checkpoint": lambda: [
            *slow_disk(tmp_path, marker, "torch.save", "import torch"),
            *("--save_strategy", "steps", "--save_steps", "1", "--use_vllm", "false"),
        ],
    }[moment]()
    run = Run(options(hanging.url, folder, *more), folder)
    run.until(lambda: "hang" in hanging.faults or marker.exists())
    if moment == "weight file":
        assert weight_folders(run.process.pid)
    run.process.send_signal(how)
    assert run.wait() == 128 + how  # a file takes half an hour, a request that hangs for ever
    words = {signal.SIGINT: "interrupted by Ctrl-C", signal.SIGTERM: "ended by SIGTERM"}[how]
    assert run.log.splitlines()[-1].startswith(f"mt-grpo: {words}. ")
    assert "Traceback" not in run.log and "Exception" not in run.log and "Task" not in run.log
    assert nobody_left(run.process.pid)
    assert not weight_folders(run.process.pid)
    assert not list(folder.rglob("*.safetensors")) and not list(folder.glob("checkpoint-*"))
    if moment == "rollout":
        finished = trajectories(folder)
        assert len(finished) == conversations(hanging.contexts[2:]) - 1 >= 3  # the first are the probes of the sync
        assert all(row["stop_reason"] for row in finished)


def test_a_server_left_paused_by_a_killed_run_is_usable(undisturbed, server, proxy, tmp_path):
    hanging = proxy(lambda path, updates, number: "hang" if path == "/finish_weight_update" else None)
    run = Run(options(hanging.url, tmp_path / "killed"), tmp_path / "killed")
    run.until(lambda: "hang" in hanging.faults)
    run.process.kill()
    assert run.wait() == -signal.SIGKILL
    assert weight_folders(run.process.pid)
    assert ServerControl(server.url).get("/is_paused") == {"is_paused": True}
    assert main(options(server.url, tmp_path / "next", "--max_steps", "1")) == 0
    assert sampled(tmp_path / "next", 0) == sampled(undisturbed.folder, 0)
    assert not weight_folders(run.process.pid)


def test_a_second_run_is_refused_and_does_not_disturb_the_first(undisturbed, server, proxy, tmp_path, capsys):
    hanging = proxy(
        lambda path, updates, number: "hang" if (path, updates) == (COMPLETIONS, 2) and number >= HANGS_AT else None
    )
    run = Run(options(hanging.url, tmp_path / "first"), tmp_path / "first")
    run.until(lambda: "hang" in hanging.faults)
    assert main(options(server.url, tmp_path / "second")) == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith(f"mt-grpo: The vLLM server at {server.url} holds the weights of another run (process ")
    assert f"process {run.process.pid} on" in line and "`vllm_server_port`" in line
    hanging.go.set()
    assert run.wait() == 0, run.log
    assert sampled(run.folder) == sampled(undisturbed.folder)


@pytest.fixture(scope="module")
def outage(undisturbed, server, tmp_path_factory):
    """
    Two runs, one after the other, in the middle of their second rollout when the server is killed. One gives up before
    the server is started again, with the same command, the other does not.
    """
    folder = tmp_path_factory.mktemp("outage")
    runs, proxies = [], []

    def fault(path: str, updates: int, number: int) -> str | None:
        return "hang" if (path, updates) == (COMPLETIONS, 3) and number >= HANGS_AT else None

    for name, timeout in (("impatient", "2"), ("patient", str(START_LIMIT))):
        proxies.append(Proxy(server.url, fault))
        more = (*ONE_AT_A_TIME, "--vllm_server_timeout", timeout)
        runs.append(Run(options(proxies[-1].url, folder / name, *more), folder / name))
        runs[-1].until(lambda: "hang" in proxies[-1].faults)
        server.stop(signal.SIGKILL)
        proxies[-1].go.set()
        if name == "impatient":
            runs[0].wait()
        server.start()
    begun = conversations(proxies[0].contexts[-HANGS_AT - 1 :])
    saved = trajectories(runs[0].folder)
    runs[1].wait()
    for one in proxies:
        one.stop()
    return *runs, begun, saved


def test_a_server_restart_does_not_change_the_result_of_a_run(outage, undisturbed):
    _, run, _, _ = outage
    assert run.process.returncode == 0, run.log
    assert "was restarted: sending it the weights again" in run.log
    rows = trajectories(run.folder)
    assert len(rows) == STEPS * BATCH
    assert all(turn["weight_version"] == row["step"] for row in rows for turn in row["turns"])
    assert sampled(run.folder) == sampled(undisturbed.folder)


def test_a_run_that_loses_its_server_saves_its_work(outage, undisturbed):
    run, _, begun, saved = outage
    assert run.process.returncode == 1
    line = run.log.splitlines()[-1]
    checkpoint = run.folder / "checkpoint-1"
    assert line.startswith("mt-grpo: No vLLM server answered for 2 s")
    assert "`mt-grpo serve --config R.yaml`" in line and f"`--resume_from_checkpoint {checkpoint}`" in line
    assert "Traceback" not in run.log and not weight_folders(run.process.pid)
    finished = [row for row in saved if row["step"] == 1]
    assert len(saved) - len(finished) == BATCH and len(finished) == begun - 1 > 0
    complete = sampled(undisturbed.folder, 1)
    assert all(sampled(run.folder, 1)[row["session"]] == complete[row["session"]] for row in finished)


def test_a_run_resumes_from_the_checkpoint_of_an_outage(outage, undisturbed, server):
    run, _, _, _ = outage
    more = ("--resume_from_checkpoint", str(run.folder / "checkpoint-1"))
    assert main(options(server.url, run.folder, *more)) == 0
    assert sampled(run.folder) == sampled(undisturbed.folder)


def test_a_server_interrupted_at_work_leaves_no_process(undisturbed, server):
    """The last test: it ends the server of this module."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    client = VLLMServerClient(server.url, tokenizer, server_timeout=0.5, request_timeout=60.0)
    group = server._process.pid

    async def ask_on(index: int) -> None:
        while True:
            await client.generate([index] * 8, SamplingParams(max_tokens=200), str(index))

    async def go() -> list:
        await client.connect()
        jobs = [asyncio.ensure_future(ask_on(index)) for index in range(32)]
        await asyncio.to_thread(until, lambda: server.metric("vllm:num_requests_running"))
        os.kill(group, signal.SIGINT)
        return await asyncio.gather(*jobs, return_exceptions=True)

    asyncio.run(go())
    server._process.wait(60)
    until(lambda: nobody_left(group))
