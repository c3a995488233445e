"""The transfer within a GPU, without one: how memory is mapped is scripted, the rest is as in a run."""

from __future__ import annotations

import base64
import pickle

import pytest
import torch
from support.models import build_model
from support.replicas import Replica, step_of

from mt_grpo.errors import WeightSyncError
from mt_grpo.weights.transports import gpu
from mt_grpo.weights.transports.gpu import IpcTransport, Shared

EXPORTED: dict[str, torch.Tensor] = {}
"""Memory that was handed out, by the name of its GPU."""


def exported(memory):
    EXPORTED["GPU 0"] = memory
    return {"GPU 0": "GPU 0"}


class Mapping(Replica):
    """A server that reads memory of the trainer, as vLLM's worker of a GPU does."""

    def __init__(self, tokenizer) -> None:
        super().__init__(tokenizer)
        self.backend, self.packed = "ipc", None

    def answer(self, method, path, body):
        self.dead |= path == self.dies_at
        if self.dead:
            return super().answer(method, path, body)
        if path == "/init_weight_transfer_engine":
            self.packed = body["init_info"]["packed"]
            return 200, {}
        if path != "/update_weights":
            return super().answer(method, path, body)
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
def mapping(tokenizer, monkeypatch):
    monkeypatch.setattr(gpu, "exported", exported)
    monkeypatch.setattr(Shared.__init__, "__defaults__", (40_000,))
    server = Mapping(tokenizer)
    yield server
    server.http.stop()


def test_weights_arrive_in_buckets_while_the_server_is_paused(mapping, sync_of, model):
    sync = sync_of(mapping, kind=IpcTransport)
    sync.sync(3)
    posts = [path for method, path, _ in mapping.http.requests if method == "POST"]
    assert posts[0] == "/init_weight_transfer_engine" and mapping.packed
    updates = posts.count("/update_weights") // 2
    push = ["/sleep", "/start_weight_update", *["/update_weights"] * updates, "/finish_weight_update"]
    push += ["/reset_prefix_cache", "/wake_up"]
    assert posts[2:] == [*push, "/v1/completions"] * 2 and updates > 2  # halved ones first, as a proof
    assert step_of(mapping.version) == "3"
    for name, weight in model.state_dict().items():
        assert torch.equal(mapping.model.state_dict()[name], weight)


def test_buckets_leave_no_features_of_older_weights(mapping, sync_of, model):
    sync = sync_of(mapping, kind=IpcTransport, media={-1: 7})
    sync.sync(3)
    posts = [path for method, path, _ in mapping.http.requests if method == "POST"]
    assert posts.count("/reset_encoder_cache") == posts.count("/finish_weight_update") == 2


def test_a_layer_without_weights_is_seen_at_once(mapping, sync_of, model, tokenizer):
    mapping.model = build_model(tokenizer)
    mapping.skipped = {"model.layers.1.mlp.down_proj.weight"}
    with pytest.raises(WeightSyncError, match="changed to see them arrive"):
        sync_of(mapping, kind=IpcTransport).sync(0)


def test_a_server_that_fails_is_resumed_and_ends_the_run(mapping, sync_of, model):
    mapping.lost = 1
    with pytest.raises(WeightSyncError, match="CUDA out of memory"):
        sync_of(mapping, kind=IpcTransport).sync(0)
    posts = [path for method, path, _ in mapping.http.requests if method == "POST"]
    assert posts[-2:] == ["/finish_weight_update", "/wake_up"]


@pytest.mark.parametrize("place", ["/sleep", "/start_weight_update", "/update_weights", "/finish_weight_update"])
def test_one_of_several_that_dies_is_left_out_and_taken_back(mapping, sync_of, model, tokenizer, place):
    other = Mapping(tokenizer)
    sync = sync_of(mapping, other, kind=IpcTransport)
    client = sync.client
    sync.sync(0)
    other.dies_at = place
    sync.sync(1)
    assert [server.up for server in client.servers] == [True, False] and step_of(mapping.version) == "1"
    asked = len(other.http.requests)
    sync.sync(2)
    assert [path for _, path, _ in other.http.requests[asked:]] == ["/health"]  # nothing else
    other.dead = other.active = False
    other.dies_at, other.model = None, build_model(tokenizer, seed=8)
    sync.verify_every = 1
    sync.sync(3)
    assert [server.up for server in client.servers] == [True, True] and step_of(other.version) == "3"
    mapping.dies_at = other.dies_at = place
    with pytest.raises(WeightSyncError):
        sync.sync(4)
    sync.close()
    other.http.stop()


def test_a_server_that_maps_no_memory_is_refused(mapping, sync_of, model):
    mapping.backend = "safetensors"
    with pytest.raises(WeightSyncError, match="for servers that the trainer starts"):
        sync_of(mapping, kind=IpcTransport).sync(0)


def test_tensors_begin_where_their_type_can_be_read(mapping):
    walk = iter([("a", torch.ones(3, dtype=torch.bfloat16)), ("b", torch.ones(2)), ("c", torch.ones(50_000))])
    shared = Shared(torch.device("cpu"))
    names = []
    while (packed := shared.take(walk)) is not None:
        names.append(packed.names)
    assert names == [["a"], ["b"], ["c"]]  # 6 bytes are no whole number of floats, and the last needs more memory
    assert EXPORTED["GPU 0"].numel() == 200_000
