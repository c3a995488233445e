"""Whether weights arrive: each fault that leaves a server with other weights is seen, whatever the learning rate."""

import asyncio
import itertools
import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from support.architectures import build_random
from support.forked import run_processes
from support.images import build_processor, build_vision_model
from support.loopback import ScriptedServer
from support.models import build_model
from support.replicas import Remote, sampled_steps, step_of
from support.vision import VISION_FAMILIES
from transformers import AutoModelForImageTextToText

from mt_grpo.errors import ConfigError, WeightSyncError
from mt_grpo.rollout import SamplingParams
from mt_grpo.rollout.engines.vllm import VLLMServerClient
from mt_grpo.servers.http import DELAYS, Server
from mt_grpo.training import MTGRPOConfig
from mt_grpo.training.environment import own_engine
from mt_grpo.weights.files import LoraTransport, SafetensorsTransport
from mt_grpo.weights.network import DeltaTransport, HttpTransport
from mt_grpo.weights.transport import EXACT, Update, _FullParameters, with_halved_weights


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


@pytest.mark.parametrize("fault", ["nothing", "another file", "no adapter"])
def test_a_push_that_does_not_arrive_is_seen_at_that_sync(replica, sync_of, model, adapted, tmp_path, fault):
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


NO_SETTING = "/server_info was answered without what was asked for"
NOT_ALL = "changed to see them arrive.*is -.* on the server"


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        # the server's weights are right all the same: nothing was learnt yet
        ({"skipped": {"model.layers.1.mlp.down_proj.weight"}}, NOT_ALL),
        ({"skipped": {"model.layers.0.self_attn.v_proj.weight"}}, NOT_ALL),
        ({"deaf": True, "agrees": True}, "agrees with whatever it is told.*mt-grpo serve"),
        *(({"dtype": dtype}, NO_SETTING) for dtype in ("strange", "nn", 5)),
        *(({"lora": lora}, NO_SETTING) for lora in (5, "yes", [8], {"rank": 8}, {"max_lora_rank": "many"})),
        ({"backend": "nccl"}, "does not load weights from files: start it with `mt-grpo serve`"),
        ({"lora": None}, "was started without LoRA.* `mt-grpo serve`"),
        ({"lora": {"max_lora_rank": 1}}, "up to rank 1.* `mt-grpo serve`"),
        ({"blind": True}, "set `weight_sync_folder` to.*No such file"),  # at the start, before anything is gathered
    ],
)
def test_a_server_that_cannot_get_all_weights_is_refused(replica, sync_of, model, adapted, faults, words):
    for name, value in faults.items():
        setattr(replica, name, value)
    sync = sync_of(kind=LoraTransport, model=adapted(model)) if "lora" in faults else sync_of()
    early = not {"skipped", "deaf"} & faults.keys()
    for _ in range(1 + early):
        with pytest.raises(WeightSyncError, match=words):
            sync.begin() if early else sync.sync(0)
    assert not replica.http.asked("/v1/load_lora_adapter") and not (early and replica.http.asked("/update_weights"))


@pytest.mark.parametrize("peft", [False, True], ids=["whole", "merged adapter"])
def test_the_proof_touches_no_weight_and_leaves_the_true_ones(replica, sync_of, model, adapted, peft):
    model = adapted(model, learnt=True) if peft else model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sent, load = [], replica.load
    replica.load = lambda path: (sent.append(load_file(path)), load(path))
    sync_of(model=model).sync(0)
    tolerance = {"rtol": 0, "atol": 1e-6 if peft else 0}  # merging an adapter and taking it out again rounds
    torch.testing.assert_close(dict(model.state_dict()), before, **tolerance)
    proof, true = sent
    halves = {name for name in true if not torch.equal(proof[name], true[name])}
    assert "model.embed_tokens.weight" in halves and not any("norm" in name for name in halves)
    assert all(torch.equal(proof[name] * 2, true[name]) for name in halves)
    assert len(replica.http.asked("/v1/completions")) == 2


def test_adapters_are_proven_and_have_names_of_their_own(replica, sync_of, model, adapted):
    """Also one that changes nothing yet, and other weights of a step, as of the best model: servers cache by name."""
    model = adapted(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sync = sync_of(kind=LoraTransport, model=model)
    names = []
    for step in (0, 1, 1, 0):
        sync.sync(step)
        names.append(sync.client.model)
        if len(names) == 1:
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        learn_a_little(model)
    assert names == ["adapter-00000000", "adapter-00000001", "adapter-00000001-2", "adapter-00000000-2"]
    assert {"lora_name": "adapter-00000001"} in replica.http.asked("/v1/unload_lora_adapter")


def test_a_server_that_ignores_adapters_is_seen_at_once(replica, sync_of, model, adapted):
    scored = replica.scored
    replica.scored = lambda body: scored(body | {"model": "base"})
    with pytest.raises(WeightSyncError, match="changed to see them arrive"):
        sync_of(kind=LoraTransport, model=adapted(model)).sync(0)


def test_a_restored_server_is_verified_though_the_sync_was_not(tokenizer, model, replicas, sync_of):
    replica, sync = replicas[0], sync_of()
    for step in range(2):
        model.model.embed_tokens.weight.data *= 1.5
        sync.sync(step)
    assert len(replica.http.asked("/v1/completions")) == 2  # of the first sync, and its proof
    sync.restore(replica.http.url)
    replica.model = build_model(tokenizer, seed=9)
    replica.model.load_state_dict = lambda *args, **kwargs: None
    with pytest.raises(WeightSyncError, match="does not compute what the trainer computes"):
        sync.restore(replica.http.url)


@pytest.mark.parametrize("kind", [SafetensorsTransport, HttpTransport, DeltaTransport, LoraTransport])
def test_after_each_update_no_features_of_older_weights_stay(tokenizer, sync_of, tmp_path, model, adapted, kind):
    replica = Remote(tokenizer, None if kind in (SafetensorsTransport, LoraTransport) else tmp_path)
    if kind is LoraTransport:
        replica.model, model = build_model(tokenizer), adapted(model)
    sync = sync_of(replica, kind=kind, model=model, media={-1: 7})
    for step in range(2):
        sync.sync(step)
    posts = [path for _, path, _ in replica.http.requests if path in ("/sleep", "/reset_encoder_cache", "/wake_up")]
    assert posts == ["/sleep", "/reset_encoder_cache", "/wake_up"] * 3  # of the proof, and two steps
    replica.close()


# Narrow types


@pytest.fixture
def sharp(tokenizer, replica):
    """A model in bfloat16 that is sure of itself, as trained ones are: its logits are rounded in large steps."""
    model = build_model(tokenizer)
    with torch.no_grad():
        model.model.norm.weight.mul_(8.0)
    model.to(torch.bfloat16)
    replica.model.load_state_dict(model.state_dict())
    return model


def test_rounding_of_a_narrow_type_ends_no_run_other_weights_do(replica, sync_of, tokenizer, sharp):
    """A server in float32 computes what the trainer would without rounding: 0.1 nats a token away and more."""
    sync = sync_of(model=sharp, verify_every=1)
    sync.sync(0)
    assert 0.25 <= sync.proof.tolerance <= 2.0
    replica.model.load_state_dict(build_model(tokenizer, seed=5).state_dict())
    with pytest.raises(WeightSyncError, match="does not compute what the trainer computes"):
        sync.verify()


def test_weights_travel_in_the_type_of_the_server(replica, sync_of, model):
    """FSDP2 and mixed precision keep float32 weights, which are twice the bytes."""
    replica.dtype = "torch.bfloat16"
    sync = sync_of()
    sync.sync(0)
    sent = load_file(sync.transport.files.files[-1].path)
    assert {tensor.dtype for tensor in sent.values()} == {torch.bfloat16}
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())


def test_wide_and_narrow_parameters_are_sent_as_they_are(model):
    model._keep_in_fp32_modules_strict = {"k_norm"}
    model.lm_head.to(torch.float16)
    walk = _FullParameters(model, Accelerator(cpu=True))
    walk.dtype = torch.bfloat16
    sent = {name: tensor.dtype for name, tensor in walk}
    assert sent.pop("model.embed_tokens.weight") is torch.float16  # tied to the output layer
    assert sent == {name: torch.float32 if "k_norm" in name else torch.bfloat16 for name in sent}


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


# Several servers, and several processes


@pytest.fixture
def late(tokenizer, replicas):
    """A run on the first server, whose second is up from a moment on."""
    client = VLLMServerClient([replica.http.url for replica in replicas], tokenizer, min_servers=1)
    replicas[1].http.stopped = True
    asyncio.run(client.connect(lambda words: None))
    return client


def hear(replica, client) -> None:
    """Rollouts during which the late server is found to be up."""
    replica.http.stopped = False

    async def go():
        while not client.servers[1].context_length:
            await client.generate([1], SamplingParams(max_tokens=1), "one")
            await asyncio.sleep(0.01)
        await client.close()

    asyncio.run(asyncio.wait_for(go(), 60))


@pytest.mark.parametrize("kind", [SafetensorsTransport, LoraTransport])
def test_a_late_server_is_proved_before_it_samples(tokenizer, replicas, late, sync_of, adapted, kind):
    model = build_model(tokenizer)
    if kind is LoraTransport:
        model = adapted(model)
        for replica in replicas:
            replica.model = build_model(tokenizer)
    sync = sync_of(kind=kind, client=late, model=model)
    sync.sync(0)
    hear(replicas[1], late)
    assert not replicas[1].http.asked("/v1/completions") and not late.servers[1].up
    sync.sync(1)
    assert late.servers[1].up and [step_of(replica.version) for replica in replicas] == ["1", "1"]
    scored = replicas[1].http.asked("/v1/completions")
    assert len(scored) == 2 and all("prompt_logprobs" in body for body in scored)  # changed weights, and true ones
    assert sampled_steps(late) == {1}
    assert all(len(replica.http.asked("/v1/completions")) > 2 for replica in replicas)


@pytest.mark.parametrize("fault", ["deaf", "blind"])
def test_a_late_server_that_takes_no_weights_is_left_out(tokenizer, replicas, late, sync_of, caplog, fault):
    replicas[1].model = build_model(tokenizer)  # what the trainer holds: equal answers would prove nothing
    sync = sync_of(client=late)
    sync.sync(0)
    setattr(replicas[1], fault, True)
    replicas[1].agrees = fault == "deaf"
    hear(replicas[1], late)
    sync.sync(1)
    assert not late.servers[1].up and sampled_steps(late) == {1}
    assert f"The run goes on without the vLLM server at {replicas[1].http.url}" in caplog.text


def test_addresses_lead_to_one_server_each(replicas, sync_of):
    other = ScriptedServer(replicas[0].answer)
    with pytest.raises(WeightSyncError, match=f"{other.url} (and .* )?lead to the same vLLM server"):
        sync_of(replicas[0], other.url).sync(0)
    updates, turns = replicas[0].updates, itertools.cycle(replicas)
    proxy = ScriptedServer(lambda *request: next(turns).answer(*request))
    with pytest.raises(WeightSyncError, match=f"What answers at {proxy.url} is several servers in turn"):
        sync_of(proxy.url).sync(0)
    assert [replica.updates for replica in replicas] == [updates, 0]
    for server in (other, proxy):
        server.stop()


@pytest.mark.slow
def test_a_server_without_the_update_is_left_out_until_restored(tmp_path, replicas):
    """Rank 0 loses the second server in the middle of an update; then only rank 1 has anything to sample."""
    replicas[1].lost = 1 + len(DELAYS)
    urls = [replica.http.url for replica in replicas]
    run_processes(["-m", "support.ranks_sync", str(tmp_path), *urls], 2, tmp_path / "log", {})
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first["up"] == second["up"] == [True, False]
    assert second["up_afterwards"] == [True, True]
    assert second["sampled"] and {tuple(sample) for sample in second["sampled"]} == {(1, 1)}
    assert [step_of(replica.version) for replica in replicas] == ["1", "1"]
    assert replicas[1].http.asked("/v1/completions")
    assert first["failure"] == "KeyError: 'a defect'" and "KeyError" in second["failure"]
    assert second["failure"].startswith("RuntimeError: Process 0 failed:\nTraceback")
    assert not list(tmp_path.glob("mt-grpo-weights-*"))


# Without a sync


def test_sync_by_adapter_needs_an_adapter(sync_of):
    with pytest.raises(ConfigError, match="use_peft: true"):
        sync_of(kind=LoraTransport)


def test_a_tower_is_sent_by_the_names_of_its_checkpoint(tmp_path):
    """vLLM loads no others, and those of transformers' CLIP and SigLIP have become shorter."""
    VISION_FAMILIES["llava"][0]()[1].save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = {re.sub("^vision_tower.", "vision_tower.vision_model.", name): w for name, w in load_file(file).items()}
    save_file(stored, file, metadata={"format": "pt"})
    sent = dict(_FullParameters(AutoModelForImageTextToText.from_pretrained(tmp_path), Accelerator(cpu=True)))
    tower = {name: weight for name, weight in stored.items() if "vision_tower" in name}
    torch.testing.assert_close({name: sent[name].data for name in tower}, tower, rtol=0, atol=0)


def test_an_adapter_of_layers_that_see_is_not_sent(sync_of):
    """vLLM would leave them out, and the probe shows no image."""
    whole, text = (
        get_peft_model(build_vision_model(build_processor().tokenizer), LoraConfig(target_modules=layers))
        for layers in ("all-linear", ".*language_model.*_proj")
    )
    with pytest.raises(ConfigError, match=r"is of model.visual.blocks.0.attn.qkv too: .*`weight_sync: safetensors`"):
        sync_of(kind=LoraTransport, model=whole)
    sync_of(kind=LoraTransport, model=text)


def test_a_server_is_resumed_though_the_pause_was_interrupted():
    said = []

    def interrupted(path, **params):
        said.append(path)
        raise KeyboardInterrupt

    control = SimpleNamespace(url="", post=interrupted, tidy_up=lambda path, **params: said.append(path))
    with pytest.raises(KeyboardInterrupt), Update(control, "1", False).paused():
        pass
    assert said == ["/sleep", "/wake_up"]


def test_control_calls_send_the_key(replicas):
    Server(replicas[0].http.url, "secret").post("/pause")
    assert replicas[0].http.last_headers["Authorization"] == "Bearer secret"


ZERO3 = {"deepspeed_plugin": SimpleNamespace(zero_stage=3)}


@pytest.mark.parametrize(
    ("plugins", "gathers", "refused"),
    [({"fsdp_plugin": SimpleNamespace(fsdp_version=2)}, True, True), (ZERO3, False, True), (ZERO3, True, False)]
    + [({}, True, False)],
    ids=["FSDP", "ZeRO-3", "ZeRO-3 that gathers", "whole"],
)
def test_sharded_weights_do_not_sample_by_themselves(tmp_path, tokenizer, model, plugins, gathers, refused):
    """Each forward would be a collective, and ranks do not make the same number of them."""
    args = MTGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, ds3_gather_for_generation=gathers)
    state = SimpleNamespace(**{"deepspeed_plugin": None, "fsdp_plugin": None, **plugins})
    accelerator = SimpleNamespace(state=state, num_processes=2, unwrap_model=lambda model: model)
    if refused:
        with pytest.raises(ConfigError, match="use_vllm: true"):
            own_engine(args, tokenizer, model, accelerator)
    else:
        assert own_engine(args, tokenizer, model, accelerator).model is model
