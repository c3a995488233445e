"""Whether weights arrive: each fault that leaves a server with other weights is seen, whatever the learning rate."""

from __future__ import annotations

import shutil

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from support.architectures import build_random
from support.models import build_model

from mt_grpo.errors import WeightSyncError
from mt_grpo.weights.files import LoraTransport, SafetensorsTransport
from mt_grpo.weights.proof import EXACT, with_halved_weights
from mt_grpo.weights.transport import FullParameters


@pytest.fixture
def replica(tokenizer, replicas):
    """A server that holds what the trainer begins with, as at the start of every run."""
    replicas[0].model = build_model(tokenizer)
    return replicas[0]


def learn_a_little(model) -> None:
    """What 50 steps at a learning rate of 1e-6 change: less than any comparison of log-probs allows."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 1e-6


def adapted(model):
    """The model with an adapter as training begins: it changes nothing yet."""
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"]))


@pytest.mark.parametrize("fault", ["nothing", "another file", "no adapter"])
def test_a_push_that_does_not_arrive_is_seen_at_that_sync(replica, sync_of, model, tmp_path, fault):
    lora = fault == "no adapter"
    model = adapted(model) if lora else model
    sync = sync_of(kind=LoraTransport if lora else SafetensorsTransport, model=model)
    sync.sync(0)
    assert sync.proof.tolerance == EXACT == 1e-3
    learn_a_little(model)
    if fault == "another file":
        load, old = replica.load, shutil.copy(next(sync.transport.folder.glob("weights-*")), tmp_path)
        replica.load = lambda path: load(old)
    else:
        replica.deaf = True
    with pytest.raises(WeightSyncError, match="did not load the adapter" if lora else "did not arrive.*checksum"):
        sync.sync(1)


NOT_ALL = "changed to see them arrive.*is -.* on the server"


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        # the server's weights are right all the same: nothing was learnt yet
        ({"skipped": {"model.layers.1.mlp.down_proj.weight"}}, NOT_ALL),
        ({"skipped": {"model.layers.0.self_attn.v_proj.weight"}}, NOT_ALL),
        ({"deaf": True, "agrees": True}, "agrees with whatever it is told.*mt-grpo serve"),
        ({"backend": "nccl"}, "does not load weights from files: start it with `mt-grpo serve`"),
        ({"lora": None}, "was started without LoRA.* `mt-grpo serve`"),
        ({"lora": {"max_lora_rank": 1}}, "up to rank 1.* `mt-grpo serve`"),
    ],
)
def test_a_server_that_cannot_get_all_weights_is_refused(replica, sync_of, model, faults, words):
    for name, value in faults.items():
        setattr(replica, name, value)
    lora = "lora" in faults
    with pytest.raises(WeightSyncError, match=words):
        sync_of(kind=LoraTransport, model=adapted(model)).begin() if lora else sync_of().sync(0)
    assert not replica.http.asked("/v1/load_lora_adapter")


def test_a_server_that_sees_no_files_is_told_of_the_folder(replica, sync_of):
    """At the start, before anything is gathered."""
    replica.blind = True
    sync = sync_of()
    for _ in range(2):
        with pytest.raises(WeightSyncError, match="set `weight_sync_folder` to.*No such file"):
            sync.begin()
    assert not replica.http.asked("/update_weights")


@pytest.mark.parametrize("peft", [False, True], ids=["whole", "merged adapter"])
def test_the_proof_touches_no_weight_and_leaves_the_true_ones(replica, sync_of, model, peft):
    if peft:
        model = adapted(model)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sent, load = [], replica.load
    replica.load = lambda path: (sent.append(load_file(path)), load(path))
    sync_of(model=model).sync(0)
    tolerance = {"rtol": 0, "atol": 1e-6 if peft else 0}  # merging an adapter and taking it out again rounds
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], **tolerance)
    proof, true = sent
    halves = {name for name in true if not torch.equal(proof[name], true[name])}
    assert "model.embed_tokens.weight" in halves and not any("norm" in name for name in halves)
    assert all(torch.equal(proof[name] * 2, true[name]) for name in halves)
    assert len(replica.http.asked("/v1/completions")) == 2


def test_an_adapter_that_changes_nothing_yet_can_be_proven(replica, sync_of, model):
    model = adapted(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sync = sync_of(kind=LoraTransport, model=model)
    sync.sync(0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    learn_a_little(model)
    sync.sync(1)
    assert sync.client.model == "adapter-00000001"


def test_other_weights_of_the_same_step_have_a_name_of_their_own(replica, sync_of, model):
    """Such as those of the best model. A server caches prefixes by the name."""
    model = adapted(model)
    sync = sync_of(kind=LoraTransport, model=model)
    names = []
    for step in (0, 1, 1, 0):
        learn_a_little(model)
        sync.sync(step)
        names.append(sync.client.model)
    assert names == ["adapter-00000000", "adapter-00000001", "adapter-00000001-2", "adapter-00000000-2"]
    assert {"lora_name": "adapter-00000001"} in replica.http.asked("/v1/unload_lora_adapter")


def test_a_server_that_ignores_adapters_is_seen_at_once(replica, sync_of, model):
    scored = replica.scored
    replica.scored = lambda body: scored(body | {"model": "base"})
    with pytest.raises(WeightSyncError, match="changed to see them arrive"):
        sync_of(kind=LoraTransport, model=adapted(model)).sync(0)


# Narrow types


@pytest.fixture
def sharp(tokenizer):
    """A model in bfloat16 that is sure of itself, as trained ones are: its logits are rounded in large steps."""
    model = build_model(tokenizer)
    with torch.no_grad():
        model.model.norm.weight.mul_(8.0)
    return model.to(torch.bfloat16)


def test_rounding_of_a_narrow_type_ends_no_run(replica, sync_of, tokenizer, sharp):
    """A server in float32 computes what the trainer would without rounding: 0.1 nats a token away and more."""
    replica.model.load_state_dict(sharp.state_dict())
    sync = sync_of(model=sharp, verify_every=1)
    sync.sync(0)
    assert 0.25 <= sync.proof.tolerance <= 2.0


def test_weights_that_did_not_arrive_show_in_a_narrow_type(replica, sync_of, tokenizer, sharp):
    replica.model.load_state_dict(sharp.state_dict())
    sync = sync_of(model=sharp)
    sync.sync(0)
    other = build_model(tokenizer, seed=5)
    replica.model.load_state_dict(other.state_dict())
    with pytest.raises(WeightSyncError, match="does not compute what the trainer computes"):
        sync.verify()


def test_weights_travel_in_the_type_of_the_server(replica, sync_of, model):
    """FSDP2 and mixed precision keep float32 weights, which are twice the bytes."""
    replica.dtype = "torch.bfloat16"
    sync = sync_of()
    sync.sync(0)
    dtypes = {tensor.dtype for tensor in load_file(sync.transport.files.files[-1].path).values()}
    assert dtypes == {torch.bfloat16}
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())


def test_wide_and_narrow_parameters_are_sent_as_they_are(model):
    model._keep_in_fp32_modules_strict = {"k_norm"}
    model.lm_head.to(torch.float16)
    walk = FullParameters(model, Accelerator(cpu=True))
    walk.dtype = torch.bfloat16
    sent = {name: tensor.dtype for name, tensor in walk}
    assert sent.pop("model.embed_tokens.weight") is torch.float16  # tied to the output layer
    assert {dtype for name, dtype in sent.items() if "k_norm" in name} == {torch.float32}
    assert {dtype for name, dtype in sent.items() if "k_norm" not in name} == {torch.bfloat16}


def test_a_router_that_returns_more_is_not_halved():
    """Llama 4's is a linear layer, and returns scores and logits."""
    model, ids = build_random("llama 4"), torch.arange(3, 40)[None]
    with with_halved_weights(model) as names:
        found = model(ids).logits
    assert "lm_head.weight" in names and not any("router" in name for name in names)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(0.5 if name in names else 1.0)
        torch.testing.assert_close(model(ids).logits, found)
