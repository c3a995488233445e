"""Transfers between GPUs and within one, without GPUs: only what is between the two ends is scripted."""

import base64
import json
import pickle
from types import SimpleNamespace

import httpx
import pytest
import torch
from support.forked import run_processes
from support.models import build_model
from support.replicas import Receiver, Replica, ScriptedGroup, step_of

from mt_grpo import vllm_plugin
from mt_grpo.errors import ConfigError, WeightSyncError
from mt_grpo.weights import gpu
from mt_grpo.weights.gpu import BUCKET, IpcTransport, NcclTransport, _KeyedClient, _NcclGroup, _Shared, _take_bucket

UPDATE = ["/start_weight_update", "/update_weights", "/update_weights", "/finish_weight_update"]


@pytest.fixture
def receiver(tokenizer):
    receiver = Receiver(tokenizer)
    yield receiver
    receiver.http.stop()


@pytest.fixture
def nccl(receiver, sync_of, monkeypatch):
    """Makes the sync of a model in two buckets."""
    monkeypatch.setattr(gpu, "is_vllm_available", lambda: True)
    monkeypatch.setattr(gpu, "_NcclGroup", ScriptedGroup)
    monkeypatch.setattr(ScriptedGroup, "server", receiver, raising=False)

    def make(model):
        size = sum(parameter.nbytes for parameter in model.parameters()) // 2
        monkeypatch.setattr("mt_grpo.weights.gpu._take_bucket", lambda walk, keep: _take_bucket(walk, keep, size))
        return sync_of(receiver, kind=NcclTransport, model=model)

    return make


def posts(receiver) -> list[str]:
    return [path for method, path, _ in receiver.http.requests if method == "POST"]


@pytest.mark.parametrize("peft", [False, True], ids=["whole", "merged adapter"])
def test_by_nccl_the_server_is_paused_while_the_weights_travel(receiver, nccl, model, adapted, peft):
    sync = nccl(adapted(model, learnt=True) if peft else model)
    sync.sync(3)
    push = ["/sleep", *UPDATE, "/reset_prefix_cache", "/wake_up"]
    assert posts(receiver)[1:] == [*push, "/v1/completions"] * 2  # halved ones first, as a proof
    assert sync.client.weight_version == 3 and step_of(receiver.version) == "3"


def test_by_nccl_what_goes_wrong_before_the_update_ends_the_run(receiver, nccl, model):
    """A layer without weights is seen at once; and parameters are gathered only under a pause."""
    receiver.model = build_model(receiver.tokenizer)
    receiver.skipped = {"model.layers.1.mlp.down_proj.weight"}
    with pytest.raises(WeightSyncError, match="changed to see them arrive"):
        nccl(model).sync(0)
    receiver.refused, before = "/sleep", posts(receiver).count("/update_weights")
    with pytest.raises(WeightSyncError, match="/sleep.*HTTP 500"):
        nccl(model).sync(3)
    assert posts(receiver).count("/update_weights") == before


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_a_server_that_fails_in_its_update_ends_the_run(receiver, nccl, model, adapted, failing):
    """The broadcast would wait for it for ever; an adapter that was merged for it is taken out again."""
    receiver.failing, model = failing, adapted(model, learnt=True)
    sync = nccl(model)
    with pytest.raises(WeightSyncError, match="HTTP 500: CUDA out of memory"):
        sync.sync(3)
    assert sync.transport.group.aborted
    assert posts(receiver)[-2:] == ["/finish_weight_update", "/wake_up"]
    assert receiver.http.asked("/finish_weight_update")[-1] == {}
    assert not any(layer.merged for layer in model.modules() if hasattr(layer, "merged"))


def test_a_broadcast_that_fails_does_not_wait_for_the_server(receiver, nccl, model, monkeypatch):
    def broken(self, bucket):
        receiver.offered.append(bucket)
        raise RuntimeError("NCCL error: unhandled cuda error")

    monkeypatch.setattr(ScriptedGroup, "send", broken)
    sync = nccl(model)
    with pytest.raises(WeightSyncError, match="could not be broadcast by NCCL: NCCL error"):
        sync.sync(3)
    assert sync.transport.group.aborted
    receiver.offer.release()  # lets the server go


def test_a_group_that_cannot_be_made_is_said_at_the_start(receiver, nccl, model, monkeypatch):
    def broken(self, *args):
        raise Exception("Request failed: 500")

    monkeypatch.setattr(ScriptedGroup, "__init__", broken)
    with pytest.raises(WeightSyncError, match="No NCCL group.*Request failed: 500.*weight_sync: safetensors"):
        nccl(model).begin()


@pytest.mark.parametrize(("installed", "urls", "words"), [(False, 1, "needs vLLM"), (True, 2, "one server")])
def test_what_nccl_cannot_do_is_said_at_the_start(sync_of, monkeypatch, installed, urls, words):
    monkeypatch.setattr(gpu, "is_vllm_available", lambda: installed)
    with pytest.raises(ConfigError, match=f"{words}.*weight_sync: safetensors"):
        sync_of(*(f"http://127.0.0.1:{port}" for port in range(1, 1 + urls)), kind=NcclTransport)


class Session(httpx.Client):
    """What TRL's client needs of `requests`, which comes with vLLM."""

    def mount(self, *args):
        pass


@pytest.mark.parametrize("given", ["given", "from the environment", "made up"])
def test_by_nccl_the_key_goes_with_the_first_request(monkeypatch, tmp_path, replicas, given):
    """TRL's own client, as far as it gets without a GPU."""
    http, key = replicas[0].http, f"key {given}"
    monkeypatch.setattr(vllm_plugin, "KEYS_ROOT", str(tmp_path))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if given == "from the environment":
        monkeypatch.setenv("VLLM_API_KEY", key)
    if given == "made up":
        vllm_plugin.StoredKey("127.0.0.1", http.port).write(key)
    requests, yes = SimpleNamespace(Session=Session, get=httpx.get, exceptions=httpx), lambda: True
    stand_ins = {"is_vllm_available": yes, "is_requests_available": yes, "requests": requests}
    for name, value in {**stand_ins, "Retry": dict, "HTTPAdapter": dict}.items():
        monkeypatch.setattr(f"trl.generation.vllm_client.{name}", value, raising=False)
    seen = []
    monkeypatch.setattr(_KeyedClient, "init_communicator", lambda self, device: seen.append(self.get_server_info()))
    http.key = key
    group = _NcclGroup(http.url, key if given == "given" else None, 51299, 5.0, torch.device("cpu"))
    assert seen and group._client.group_port == 51299
    assert [path for _, path, _ in http.requests] == ["/health", "/v1/models", "/server_info"]


@pytest.mark.slow
def test_all_ranks_gather_a_bucket_before_any_of_it_is_sent(tmp_path):
    """Sharded weights on two ranks; a failure in the middle of the next sync ends both."""
    sharded = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    sharded |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_RESHARD_AFTER_FORWARD": "true"}
    run_processes(["-m", "support.ranks_nccl", str(tmp_path)], 2, tmp_path / "log", sharded)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert all(rank["sharded"] for rank in ranks)
    sends = [time for event, time in ranks[0]["log"] if event in ("send", "sent")]
    pairs = list(zip(sends[::2], sends[1::2], strict=True))
    gathers = [time for rank in ranks for event, time in rank["log"] if event in ("gather", "gathered")]
    assert len(pairs) >= 3 and len(gathers) >= 4 * len(pairs)
    assert not [time for time in gathers for begin, end in pairs if begin < time < end]
    (failure,) = {rank["failure"] for rank in ranks}
    assert "HTTP 500: CUDA out of memory" in failure


def test_a_bucket_keeps_its_weights_while_the_walk_goes_on():
    weights = [("a", torch.ones(4)), ("b", torch.ones(4)), ("c", torch.ones(4))]

    def walk():
        yield from weights
        for _, tensor in weights:
            tensor.zero_()  # as when an adapter is taken out again

    kept, left = walk(), walk()
    assert [len(_take_bucket(kept, True, 32)), len(_take_bucket(left, False, 32))] == [2, 2]
    (last,) = _take_bucket(kept, True, 32)
    assert last[1].tolist() == [1.0] * 4 and _take_bucket(kept, True) == []
    assert BUCKET == 2**28


# Within a GPU

EXPORTED: dict[str, torch.Tensor] = {}
"""Memory that was handed out, by the name of its GPU."""


class Mapping(Replica):
    """A server that reads memory of the trainer, as vLLM's worker of a GPU does."""

    def __init__(self, tokenizer) -> None:
        super().__init__(tokenizer)
        self.backend, self.packed = "ipc", None

    def answer(self, method, path, body):
        self.dead |= path == self.dies_at
        if self.dead or path not in ("/init_weight_transfer_engine", "/update_weights"):
            return super().answer(method, path, body)
        if path == "/init_weight_transfer_engine":
            self.packed = body["init_info"]["packed"]
            return 200, {}
        self.updates += 1
        if self.updates <= self.lost:
            return 500, "CUDA out of memory"
        info = body["update_info"]
        memory = EXPORTED[pickle.loads(base64.b64decode(info["ipc_handles_pickled"]))["GPU 0"]]
        parts = memory[: sum(info["tensor_sizes"])].split(info["tensor_sizes"])
        about = zip(info["names"], info["dtype_names"], info["shapes"], parts, strict=True)
        self.take({name: part.view(getattr(torch, dtype)).view(shape).clone() for name, dtype, shape, part in about})
        return 200, {}


@pytest.fixture
def mappings(tokenizer, monkeypatch):
    """Two servers that read what is handed out."""
    monkeypatch.setattr(gpu, "_exported", lambda memory: EXPORTED.update({"GPU 0": memory}) or {"GPU 0": "GPU 0"})
    monkeypatch.setattr(_Shared.__init__, "__defaults__", (40_000,))
    servers = [Mapping(tokenizer), Mapping(tokenizer)]
    yield servers
    for server in servers:
        server.http.stop()


def test_weights_arrive_in_buckets_while_the_server_is_paused(mappings, sync_of, model):
    mapping = mappings[0]
    sync_of(mapping, kind=IpcTransport, media={-1: 7}).sync(3)
    asked = posts(mapping)
    assert asked[0] == "/init_weight_transfer_engine" and mapping.packed
    updates = asked.count("/update_weights") // 2
    push = ["/sleep", "/start_weight_update", *["/update_weights"] * updates, "/finish_weight_update"]
    push += ["/reset_prefix_cache", "/reset_encoder_cache", "/wake_up"]
    assert asked[2:] == [*push, "/v1/completions"] * 2 and updates > 2  # halved ones first, as a proof
    assert step_of(mapping.version) == "3"
    torch.testing.assert_close(dict(mapping.model.state_dict()), dict(model.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("faults", "words", "last"),
    [
        ({"skipped": {"model.layers.1.mlp.down_proj.weight"}}, "changed to see them arrive", ["/v1/completions"]),
        ({"lost": 1}, "CUDA out of memory", ["/finish_weight_update", "/wake_up"]),  # it is resumed
        ({"backend": "safetensors"}, "for servers that the trainer starts", []),
    ],
)
def test_a_server_that_gets_no_weights_ends_the_run(mappings, sync_of, tokenizer, faults, words, last):
    mapping = mappings[0]
    mapping.model = build_model(tokenizer)
    for name, value in faults.items():
        setattr(mapping, name, value)
    with pytest.raises(WeightSyncError, match=words):
        sync_of(mapping, kind=IpcTransport).sync(0)
    assert posts(mapping)[-len(last) :] == last


@pytest.mark.parametrize("place", ["/sleep", "/start_weight_update", "/update_weights", "/finish_weight_update"])
def test_one_of_several_that_dies_is_left_out_and_taken_back(mappings, sync_of, tokenizer, place):
    mapping, other = mappings
    sync = sync_of(*mappings, kind=IpcTransport)
    sync.sync(0)
    other.dies_at = place
    sync.sync(1)
    assert [server.up for server in sync.client.servers] == [True, False] and step_of(mapping.version) == "1"
    asked = len(other.http.requests)
    sync.sync(2)
    assert [path for _, path, _ in other.http.requests[asked:]] == ["/health"]  # nothing else
    other.dead = other.active = False
    other.dies_at, other.model = None, build_model(tokenizer, seed=8)
    sync.verify_every = 1
    sync.sync(3)
    assert [server.up for server in sync.client.servers] == [True, True] and step_of(other.version) == "3"
    mapping.dies_at = other.dies_at = place
    with pytest.raises(WeightSyncError):
        sync.sync(4)
    sync.close()


def test_tensors_begin_where_their_type_can_be_read(mappings):
    walk = iter([("a", torch.ones(3, dtype=torch.bfloat16)), ("b", torch.ones(2)), ("c", torch.ones(50_000))])
    shared = _Shared(torch.device("cpu"))
    names = [packed.names for packed in iter(lambda: shared.take(walk), None)]
    assert names == [["a"], ["b"], ["c"]]  # 6 bytes are no whole number of floats, and the last needs more memory
    assert EXPORTED["GPU 0"].numel() == 200_000
