"""Weight sync to several servers, from several processes, and what each way refuses."""

from __future__ import annotations

import json
from types import SimpleNamespace

import httpx
import pytest
import torch
from support.forked import run_processes
from support.models import build_model
from support.replicas import step_of

from mt_grpo.errors import ConfigError, WeightSyncError
from mt_grpo.servers.http import DELAYS, ServerControl
from mt_grpo.training import MTGRPOConfig
from mt_grpo.training.environment import own_engine
from mt_grpo.vllm_plugin import keys
from mt_grpo.weights.files import LoraTransport
from mt_grpo.weights.gpu import KeyedClient, NcclGroup, NcclTransport
from mt_grpo.weights.transport import Update


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
    assert first["failure"] == "KeyError: 'a defect'"
    assert (
        second["failure"].startswith("RuntimeError: Process 0 failed:\nTraceback") and "KeyError" in second["failure"]
    )
    assert not list(tmp_path.glob("mt-grpo-weights-*"))


def test_a_restored_server_is_verified_though_the_sync_was_not(tokenizer, model, replicas, sync_of):
    replica, sync = replicas[0], sync_of()
    sync.sync(0)
    model.model.embed_tokens.weight.data *= 1.5
    sync.sync(1)
    assert len(replica.http.asked("/v1/completions")) == 2  # of the first sync, and its proof
    sync.restore(replica.http.url)
    replica.model = build_model(tokenizer, seed=9)
    replica.model.load_state_dict = lambda *args, **kwargs: None
    with pytest.raises(WeightSyncError, match="does not compute what the trainer computes"):
        sync.restore(replica.http.url)


@pytest.mark.parametrize(
    ("installed", "urls", "words"),
    [(False, 1, "needs vLLM"), (True, 2, "one server")],
)
def test_what_nccl_cannot_do_is_said_at_the_start(sync_of, monkeypatch, installed, urls, words):
    monkeypatch.setattr("mt_grpo.weights.gpu.is_vllm_available", lambda: installed)
    with pytest.raises(ConfigError, match=f"{words}.*weight_sync: safetensors"):
        sync_of(*(f"http://127.0.0.1:{port}" for port in range(1, 1 + urls)), kind=NcclTransport)


class Session(httpx.Client):
    """What TRL's client needs of `requests`, which comes with vLLM."""

    def mount(self, *args):
        pass


@pytest.mark.parametrize("given", ["given", "from the environment", "made up"])
def test_by_nccl_the_key_goes_with_the_first_request(tokenizer, monkeypatch, tmp_path, replicas, given):
    """TRL's own client, as far as it gets without a GPU."""
    http, key = replicas[0].http, f"key {given}"
    monkeypatch.setattr(keys, "ROOT", str(tmp_path))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if given == "from the environment":
        monkeypatch.setenv("VLLM_API_KEY", key)
    if given == "made up":
        keys.write_key("127.0.0.1", http.port, key)
    requests = SimpleNamespace(Session=Session, get=httpx.get, exceptions=httpx)
    for name in ("is_vllm_available", "is_requests_available"):
        monkeypatch.setattr(f"trl.generation.vllm_client.{name}", lambda: True)
    for name, value in (("requests", requests), ("Retry", dict), ("HTTPAdapter", dict)):
        monkeypatch.setattr(f"trl.generation.vllm_client.{name}", value, raising=False)
    seen = []
    monkeypatch.setattr(KeyedClient, "init_communicator", lambda self, device: seen.append(self.get_server_info()))
    http.key = key
    group = NcclGroup(http.url, key if given == "given" else None, 51299, 5.0, torch.device("cpu"))
    assert seen and group._client.group_port == 51299
    assert [path for _, path, _ in http.requests] == ["/health", "/v1/models", "/server_info"]


def test_sync_by_adapter_needs_an_adapter(sync_of):
    with pytest.raises(ConfigError, match="use_peft: true"):
        sync_of(kind=LoraTransport)


def test_a_server_is_resumed_though_the_pause_was_interrupted():
    class Interrupted:
        base_url, said = "", []

        def post(self, path, **params):
            self.said.append(path)
            raise KeyboardInterrupt

        def tidy_up(self, path, **params):
            self.said.append(path)

    with pytest.raises(KeyboardInterrupt), Update(Interrupted(), "1", False).paused():
        pass
    assert Interrupted.said == ["/sleep", "/wake_up"]


def test_control_calls_send_the_key(replicas):
    ServerControl(replicas[0].http.url, "secret").post("/pause")
    assert replicas[0].http.last_headers["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("plugins", "gathers", "refused"),
    [
        ({"fsdp_plugin": SimpleNamespace(fsdp_version=2)}, True, True),
        ({"deepspeed_plugin": SimpleNamespace(zero_stage=3)}, False, True),
        ({"deepspeed_plugin": SimpleNamespace(zero_stage=3)}, True, False),
        ({}, True, False),
    ],
    ids=["FSDP", "ZeRO-3", "ZeRO-3 that gathers", "whole"],
)
def test_sharded_weights_do_not_sample_by_themselves(tmp_path, tokenizer, plugins, gathers, refused):
    """Each forward would be a collective, and ranks do not make the same number of them."""
    args = MTGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, ds3_gather_for_generation=gathers)
    state = SimpleNamespace(**{"deepspeed_plugin": None, "fsdp_plugin": None, **plugins})
    accelerator = SimpleNamespace(state=state, num_processes=2, unwrap_model=lambda model: model)
    model = build_model(tokenizer)
    if refused:
        with pytest.raises(ConfigError, match="use_vllm: true"):
            own_engine(args, tokenizer, model, accelerator)
    else:
        assert own_engine(args, tokenizer, model, accelerator).model is model
