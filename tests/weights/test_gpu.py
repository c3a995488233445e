"""
The transfers between GPUs and within one, without GPUs: what is between the two ends is scripted, the rest is as in a
run.
"""

from __future__ import annotations

import base64
import json
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.forked import run_processes
from support.models import build_model
from support.replicas import Receiver, Replica, ScriptedGroup, step_of

from mt_grpo.errors import WeightSyncError
from mt_grpo.weights import gpu
from mt_grpo.weights.gpu import BUCKET, IpcTransport, NcclTransport, Shared, take_bucket

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
    monkeypatch.setattr(gpu, "NcclGroup", ScriptedGroup)
    monkeypatch.setattr(ScriptedGroup, "server", receiver, raising=False)

    def make(model):
        size = sum(parameter.nbytes for parameter in model.parameters()) // 2
        monkeypatch.setattr("mt_grpo.weights.gpu.take_bucket", lambda walk, keep: take_bucket(walk, keep, size))
        return sync_of(receiver, kind=NcclTransport, model=model)

    return make


def posts(receiver) -> list[str]:
    return [path for method, path, _ in receiver.http.requests if method == "POST"]


def adapted(model):
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("peft", [False, True], ids=["whole", "merged adapter"])
def test_by_nccl_the_server_is_paused_while_the_weights_travel(receiver, nccl, model, peft):
    model = adapted(model) if peft else model
    sync = nccl(model)
    sync.sync(3)
    push = ["/sleep", *UPDATE, "/reset_prefix_cache", "/wake_up"]
    assert posts(receiver)[1:] == [*push, "/v1/completions"] * 2  # halved ones first, as a proof
    assert sync.client.weight_version == 3 and step_of(receiver.version) == "3"


def test_by_nccl_a_layer_without_weights_is_seen_at_once(receiver, nccl, model):
    receiver.model = build_model(receiver.tokenizer)
    receiver.skipped = {"model.layers.1.mlp.down_proj.weight"}
    with pytest.raises(WeightSyncError, match="changed to see them arrive"):
        nccl(model).sync(0)


def test_by_nccl_weights_travel_in_the_type_of_the_server(receiver, nccl, model):
    receiver.dtype = "torch.bfloat16"
    nccl(model).sync(0)
    sent = receiver.http.asked("/update_weights")
    assert {dtype for body in sent for dtype in body["update_info"]["dtype_names"]} == {"bfloat16"}


def test_by_nccl_parameters_are_gathered_only_under_a_pause(receiver, nccl, model):
    receiver.refused = "/sleep"
    with pytest.raises(WeightSyncError, match="/sleep.*HTTP 500"):
        nccl(model).sync(3)
    assert "/update_weights" not in posts(receiver)


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_a_server_that_fails_in_its_update_ends_the_run(receiver, nccl, model, failing):
    """The broadcast would wait for it for ever; an adapter that was merged for it is taken out again."""
    receiver.failing, model = failing, adapted(model)
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


@pytest.mark.slow
@pytest.mark.parametrize("failing", [None, 3])
def test_all_ranks_gather_a_bucket_before_any_of_it_is_sent(tmp_path, failing):
    """Sharded weights on two ranks; a failure in the middle ends both."""
    sharded = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
    }
    run_processes(["-m", "support.ranks_nccl", str(tmp_path), str(failing)], 2, tmp_path / "log", sharded)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert all(rank["sharded"] for rank in ranks)
    sends = [time for event, time in ranks[0]["log"] if event in ("send", "sent")]
    pairs = list(zip(sends[::2], sends[1::2], strict=True))
    gathers = [time for rank in ranks for event, time in rank["log"] if event in ("gather", "gathered")]
    assert len(pairs) >= 3 and len(gathers) >= 4 * len(pairs)
    assert not [time for time in gathers for begin, end in pairs if begin < time < end]
    failures = {rank["failure"] for rank in ranks}
    (failure,) = failures
    assert failure is None if failing is None else "HTTP 500: CUDA out of memory" in failure


def test_a_bucket_keeps_its_weights_while_the_walk_goes_on():
    weights = [("a", torch.ones(4)), ("b", torch.ones(4)), ("c", torch.ones(4))]

    def walk():
        yield from weights
        for _, tensor in weights:
            tensor.zero_()  # as when an adapter is taken out again

    kept, left = walk(), walk()
    assert [len(take_bucket(kept, True, 32)), len(take_bucket(left, False, 32))] == [2, 2]
    (last,) = take_bucket(kept, True, 32)
    assert last[1].tolist() == [1.0] * 4 and take_bucket(kept, True) == []
    assert BUCKET == 2**28


# Within a GPU

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
    sync = sync_of(mapping, kind=IpcTransport, media={-1: 7})
    sync.sync(3)
    asked = posts(mapping)
    assert asked[0] == "/init_weight_transfer_engine" and mapping.packed
    updates = asked.count("/update_weights") // 2
    push = ["/sleep", "/start_weight_update", *["/update_weights"] * updates, "/finish_weight_update"]
    push += ["/reset_prefix_cache", "/reset_encoder_cache", "/wake_up"]
    assert asked[2:] == [*push, "/v1/completions"] * 2 and updates > 2  # halved ones first, as a proof
    assert step_of(mapping.version) == "3"
    for name, weight in model.state_dict().items():
        assert torch.equal(mapping.model.state_dict()[name], weight)


@pytest.mark.parametrize(
    ("faults", "words", "last"),
    [
        ({"skipped": {"model.layers.1.mlp.down_proj.weight"}}, "changed to see them arrive", "/v1/completions"),
        ({"lost": 1}, "CUDA out of memory", "/wake_up"),  # it is resumed
        ({"backend": "safetensors"}, "for servers that the trainer starts", None),
    ],
)
def test_a_server_that_gets_no_weights_ends_the_run(mapping, sync_of, model, tokenizer, faults, words, last):
    mapping.model = build_model(tokenizer)
    for name, value in faults.items():
        setattr(mapping, name, value)
    with pytest.raises(WeightSyncError, match=words):
        sync_of(mapping, kind=IpcTransport).sync(0)
    assert (posts(mapping) or [None])[-1] == last
    if last == "/wake_up":
        assert posts(mapping)[-2] == "/finish_weight_update"


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


def test_tensors_begin_where_their_type_can_be_read(mapping):
    walk = iter([("a", torch.ones(3, dtype=torch.bfloat16)), ("b", torch.ones(2)), ("c", torch.ones(50_000))])
    shared = Shared(torch.device("cpu"))
    names = []
    while (packed := shared.take(walk)) is not None:
        names.append(packed.names)
    assert names == [["a"], ["b"], ["c"]]  # 6 bytes are no whole number of floats, and the last needs more memory
    assert EXPORTED["GPU 0"].numel() == 200_000
