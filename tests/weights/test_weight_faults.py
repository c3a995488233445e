"""Control calls that fail, engines that die under a living process, caches, and whose weights a server holds."""

import asyncio
import os

import httpx
import pytest
from accelerate import Accelerator
from support.loopback import Loopback, Proxy, Reply
from support.models import build_model
from support.replicas import sampled_steps, step_of

from mt_grpo.errors import WeightSyncError
from mt_grpo.rollout.engines.vllm import VLLMServerClient
from mt_grpo.servers import fleet, http
from mt_grpo.servers.fleet import Owner
from mt_grpo.servers.http import RequestFailed, ServerSetupError
from mt_grpo.training import MTGRPOConfig
from mt_grpo.training.servers import _weight_sync
from mt_grpo.weights.sync import _told


@pytest.fixture
def both(replicas, sync_of):
    """A sync to both servers, which both have the first weights."""
    sync = sync_of(*replicas, server_timeout=20.0)
    sync.sync(0)
    return sync


def up(sync) -> list[bool]:
    return [server.up for server in sync.client.servers]


def has(replica, sync, step: str = "1") -> bool:
    """Whether a server has the latest weights."""
    return step_of(replica.version) == step and sync.fleet.payload.checksum == replica.loaded


# Calls that fail


@pytest.mark.parametrize("fault", ["500", "404", "204", "garbage", "cut", "closed"])
def test_one_bad_answer_of_each_control_call_ends_no_run(replicas, sync_of, fault):
    """`cut`: done, and not heard. 204 or 404 is no server at the start, and later a proxy."""
    failed, begun = set(), fault not in ("404", "204")

    def first(path, updates, number):
        new = begun and path not in failed
        failed.add(path)
        return fault if new else None

    proxy = Proxy(replicas[0].http.url, first)
    sync = sync_of(proxy.url, server_timeout=20.0)
    sync.verify_every = 1
    asyncio.run(sync.client.connect(lambda words: None))
    begun = True
    sync.sync(0)
    failed.clear()
    sync.sync(1)
    sync.check()
    assert sync.client.servers[0].up and not sync.client.servers[0].drops and has(replicas[0], sync)
    assert {"/sleep", "/update_weights", "/finish_weight_update", "/weight_info", "/v1/completions"} <= failed
    proxy.stop()


@pytest.mark.parametrize(("status", "again"), [(500, len(http.DELAYS)), (404, len(http.DELAYS)), (403, 0)])
def test_a_lasting_fault_of_a_healthy_server_ends_the_run(replicas, both, status, again):
    """A refusal does not pass: the guard's, or that of a proxy with rules."""
    script = replicas[1].answer
    replicas[1].http._script = lambda *asked: (status, "no") if asked[1] == "/update_weights" else script(*asked)
    words = f"{replicas[1].http.url}/update_weights was answered with HTTP {status}: no"
    with pytest.raises(WeightSyncError, match=words):
        both.sync(1)
    assert len(replicas[1].http.asked("/update_weights")) == 2 + 1 + again


# Engines that die


CALLS = ["/weight_info", "/sleep", "/start_weight_update", "/update_weights", "/init_weight_transfer_engine"]
CALLS += ["/finish_weight_update", "/reset_prefix_cache", "/wake_up", "/v1/completions"]


@pytest.mark.parametrize(
    ("path", "in_flight"),
    [*((path, False) for path in CALLS), *((path, True) for path in ("/sleep", "/update_weights", "/v1/completions"))],
)
def test_an_engine_that_dies_is_left_out_and_taken_back(replicas, sync_of, path, in_flight):
    """Its process goes on to answer, with errors only."""
    sync = sync_of(*replicas, server_timeout=20.0)
    sync.verify_every = 1
    if in_flight:
        sync.send_in_flight()
    sync.sync(0)
    replicas[1].dies_at = path
    sync.sync(1)
    sync.check()
    assert up(sync) == [True, False]
    replicas[1].dies_at, replicas[1].dead, replicas[1].active = None, False, False
    replicas[1].version = replicas[1].loaded = "default"
    assert sampled_steps(sync.client, until_all_are_up=True) == {1}
    assert step_of(replicas[0].version) == "1" and has(replicas[1], sync)


@pytest.mark.parametrize("path", ["/update_weights", "/finish_weight_update"])
@pytest.mark.parametrize("status", [503, 404])
def test_a_run_waits_for_its_only_engine(replicas, sync_of, path, status):
    """It gets the weights once more when it is back. A proxy before it may know of no server meanwhile."""
    looks = []

    def answer(method, asked, body):
        if replicas[0].dead and (asked == "/health" or status == 404):
            looks.append(asked)
            replicas[0].dead = looks.count("/health") < 3 + len(http.DELAYS)
            replicas[0].dies_at, replicas[0].active = None, False
            return status, {}
        return replicas[0].answer(method, asked, body)

    replicas[0].http._script = answer
    sync = sync_of(server_timeout=20.0)
    asyncio.run(sync.client.connect(lambda words: None))
    sync.sync(0)
    replicas[0].dies_at = path
    sync.sync(1)
    assert looks and has(replicas[0], sync) and up(sync) == [True]


def test_a_sentence_of_one_process_is_that_of_all():
    assert _told(ServerSetupError("What answers is no server."), 0) == (ServerSetupError, "What answers is no server.")


def test_an_engine_that_died_after_rollouts_ends_no_run(replicas, both):
    replicas[1].dead = True
    both.check()
    assert up(both) == [True, False]


def test_an_engine_that_dies_while_it_is_restored_is_awaited(replicas, both):
    replicas[1].dies_at = "/init_weight_transfer_engine"
    with pytest.raises(RequestFailed) as caught:
        both.restore(replicas[1].http.url)
    assert caught.value.unreachable


def test_no_cache_on_the_way_answers_for_the_server(replicas, sync_of, monkeypatch):
    """One that keeps whatever it was told, whatever the headers say. Nor does a proxy of the environment."""
    kept = {}
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    def answer(request):
        if request.path not in kept or request.method != "GET":
            url = replicas[0].http.url + request.path
            with httpx.Client(trust_env=False, verify=False, timeout=60) as client:
                found = client.request(request.method, url, content=request.content, headers=request.headers)
            kept[request.path] = Reply(found.status_code, found.content, len(found.content))
        return kept[request.path]

    cache = Loopback(answer)
    sync = sync_of(cache.url, server_timeout=20.0)
    asyncio.run(sync.client.connect(lambda words: None))
    for step in range(2):
        sync.sync(step)
        sync.check()
    replicas[0].dead = True
    sync.check()
    assert up(sync) == [False] and "no-store" in replicas[0].http.last_headers["Cache-Control"]
    cache.stop()


# Whose weights a server holds: two runs on one server notice each other, and a run that is gone blocks nobody


@pytest.fixture
def run_of_other(other):
    """The name a run of another process has."""
    own = f"-{os.getpid()}-{fleet._start(os.getpid())}-"
    return Owner.new_run().replace(own, f"-{other.pid}-{fleet._start(other.pid)}-")


def test_a_run_of_another_process_is_refused_while_it_lives(
    replicas, sync_of, tokenizer, model, other, run_of_other, tmp_path
):
    """On whatever server, and before its trainer is made."""
    version = replicas[1].version = Owner.label(run_of_other, 7)
    words = rf"{replicas[1].http.url} holds the weights of another run \(process {other.pid} on .*, step 7\)"
    with pytest.raises(WeightSyncError, match=rf"{words}.*`vllm_server_port`.*end it first\.$"):
        sync_of(*replicas).sync(0)
    assert replicas[1].version == version and [replica.updates for replica in replicas] == [0, 0]
    client = VLLMServerClient(replicas[1].http.url, tokenizer)
    args = MTGRPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(ServerSetupError, match="another run"):
        _weight_sync(args, client, lambda: model, Accelerator(cpu=True))


@pytest.mark.parametrize("end", ["unnoticed", "gone", "another of its number"])
def test_a_run_that_was_killed_blocks_nobody(replicas, sync_of, other, run_of_other, end):
    if end == "another of its number":
        start = fleet._start(other.pid)
        run_of_other = run_of_other.replace(f"-{start}-", f"-{start - 1}-")
    else:
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    if end == "gone":
        other.wait()
    replicas[0].version = Owner.label(run_of_other, 7)
    sync_of().sync(0)
    assert step_of(replicas[0].version) == "0"


def test_a_server_held_by_another_machine_is_refused_until_freed(replicas, sync_of):
    there = Owner.new_run().replace(fleet._machine(), "0a1b2c3d.4026531836")
    replicas[0].version = Owner.label(there, "proof")
    with pytest.raises(WeightSyncError, match="step proof.*or restart the server if that run was killed"):
        sync_of().sync(0)
    replicas[0].version = Owner.released(replicas[0].version)
    sync_of().sync(0)


@pytest.mark.parametrize("version", ["default", "12", "a-b:3"])
def test_versions_that_no_run_of_ours_set_name_nobody(replicas, sync_of, version):
    assert Owner.read(version) is None
    replicas[0].version = version
    sync_of().sync(0)


def test_a_run_that_ends_gives_its_servers_back(replicas, sync_of):
    first, second = sync_of(*replicas), sync_of(*replicas)
    first.sync(4)
    for _ in range(2):
        first.close()
        assert [replica.version for replica in replicas] == [f"{first.run}:4:released"] * 2
    second.sync(0)
    first.close()
    assert [replica.version for replica in replicas] == [f"{second.run}:0"] * 2


def test_weights_another_run_sends_during_rollouts_are_noticed(replicas, both, run_of_other):
    """Or those that never arrived, though a proxy said so: nobody can tell which of the two it was."""
    both.check()
    for run, step in ((both.run, 3), (run_of_other, 7)):
        replicas[1].version = Owner.label(run, step)
        words = f"others .process .*, step {step}.*while this run sampled from it, or a proxy answered a call"
        with pytest.raises(WeightSyncError, match=words):
            both.check()
    with pytest.raises(WeightSyncError, match="holds the weights of another run"):
        both.sync(1)


def test_a_second_trainer_takes_over_and_the_first_one_notices(sync_of):
    first, second = sync_of(), sync_of()
    first.sync(0)
    second.sync(0)
    with pytest.raises(WeightSyncError, match="while this run sampled from it"):
        first.check()
    first.sync(1)
    first.check()


def test_a_server_that_was_restarted_during_rollouts_ends_no_run(replicas, both, tokenizer):
    replicas[1].version, replicas[1].model = "default", build_model(tokenizer, seed=9)
    both.check()
    assert up(both) == [True, False]
    both.restore(replicas[1].http.url)
    assert step_of(replicas[1].version) == "0"
