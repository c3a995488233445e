"""Weight sync to several servers, from several processes, and what each way refuses."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from accelerate import Accelerator
from conftest import build_model
from peft import PeftModel
from safetensors.torch import load_file
from support.servers import ScriptedServer

from mt_grpo.errors import ConfigError
from mt_grpo.rollout.engines.vllm.client import VLLMServerClient
from mt_grpo.rollout.engines.vllm.holder import holder
from mt_grpo.rollout.engines.vllm.http import ServerControl
from mt_grpo.training import MTGRPOConfig
from mt_grpo.training.servers import own_engine
from mt_grpo.vllm_plugin import keys
from mt_grpo.vllm_plugin.checksum import file_checksum
from mt_grpo.weights.nccl_client import KeyedClient
from mt_grpo.weights.transports.adapter import LoraSync
from mt_grpo.weights.transports.files import SafetensorsSync
from mt_grpo.weights.transports.nccl import NcclSync
from mt_grpo.weights.update_calls import WeightSyncError, paused
from mt_grpo.weights.verification import trainer_logprobs

SUPPORT = Path(__file__).parents[1] / "support"


class Replica:
    """
    A scripted server that loads weight files and adapters, scores prompts with them, and samples its weights' step.

    Args:
        lost (`int`): The first so many updates break the connection.
    """

    def __init__(self, tokenizer, lost: int = 0, **overrides) -> None:
        self.tokenizer, self.lost, self.refused = tokenizer, lost, None
        self.model, self.version, self.updates = build_model(tokenizer, seed=9, **overrides), "default", 0
        self.dtype, self.backend, self.loaded = "torch.float32", "safetensors", "nothing"
        self.adapters: dict[str, PeftModel] = {}
        self.deaf = False
        """Whether updates are answered as if they had been done."""
        self.agrees = False
        """Whether every checksum is agreed with."""
        self.blind = False
        """Whether the trainer's files are on another machine."""
        self.skipped: set[str] = set()
        """Weights that do not reach their layer."""
        self.http = ScriptedServer(self.answer)

    def answer(self, method, path, body):
        if path == self.refused:
            return 500, "no"
        if path == "/init_weight_transfer_engine":
            return self.confirmed(**body["init_info"])
        if path == "/update_weights":
            self.updates += 1
            if self.updates <= self.lost:
                return None
            if not self.deaf:
                self.load(body["update_info"]["path"])
        if path in ("/finish_weight_update", "/update_weight_version"):
            self.version = body.get("weight_version", body.get("new_version", self.version))
        if path == "/v1/load_lora_adapter" and not self.deaf:
            base = copy.deepcopy(self.model)
            self.adapters[body["lora_name"]] = PeftModel.from_pretrained(base, body["lora_path"])
            self.adapters[body["lora_name"]].folder = body["lora_path"]
        if path == "/v1/completions":
            return 200, self.scored(body) if "prompt_logprobs" in body else self.sampled()
        entries = [{"id": name, "root": adapter.folder} for name, adapter in self.adapters.items()]
        config = {"logprobs_mode": "processed_logprobs", "dtype": self.dtype}
        return 200, {
            "/v1/models": {"data": [{"id": "base", "root": "base", "max_model_len": 64}, *entries]},
            "/server_info": {
                "vllm_config": {"model_config": config, "weight_transfer_config": {"backend": self.backend}}
            },
            "/weight_info": {"weight_version": self.version},
            "/tokenize": {"tokens": self.tokenizer.encode(body.get("prompt", ""), add_special_tokens=False)},
            "/reset_prefix_cache": {"success": True},
        }.get(path, {})

    def confirmed(self, checksum, path=None):
        if self.blind and path is not None:
            return 500, {"error": {"message": f"No such file or directory: {path}"}}
        seen = self.loaded if path is None else file_checksum(path)
        return (200, {}) if self.agrees or seen == checksum else (500, f"The checksum is {seen}, not {checksum}.")

    def load(self, path):
        tensors = load_file(path)
        self.loaded = file_checksum(path)
        self.take(tensors)

    def take(self, tensors):
        self.model.load_state_dict({k: v for k, v in tensors.items() if k not in self.skipped}, strict=False)

    def scored(self, body):
        logprobs = trainer_logprobs(self.adapters.get(body["model"], self.model), body["prompt"])
        rows = [{str(token): {"logprob": value}} for token, value in zip(body["prompt"][1:], logprobs, strict=True)]
        return {"choices": [{"prompt_logprobs": [None, *rows]}]}

    def sampled(self):
        tokens = {"tokens": [f"token_id:{step_of(self.version)}"], "token_logprobs": [-0.5]}
        return {"choices": [{"logprobs": tokens, "finish_reason": "stop"}], "system_fingerprint": self.http.url}


def step_of(version: str) -> str:
    return holder(version).step


@pytest.fixture
def replicas(tokenizer):
    pair = [Replica(tokenizer), Replica(tokenizer, lost=1)]
    yield pair
    for replica in pair:
        replica.http.stop()


@pytest.fixture
def client(tokenizer, replicas):
    return VLLMServerClient(replicas[0].http.url, tokenizer)


def test_a_server_that_missed_an_update_is_left_out_by_every_rank_until_one_of_them_brings_it_the_weights(
    tmp_path, replicas
):
    """Rank 0 loses the second server in the middle of an update; then only rank 1 has anything to sample."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    urls = [replica.http.url for replica in replicas]
    command = [sys.executable, *launch, str(SUPPORT / "ranks_sync.py"), str(tmp_path), *urls]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first["up"] == second["up"] == [True, False]
    assert second["up_afterwards"] == [True, True]
    assert second["sampled"] and {tuple(sample) for sample in second["sampled"]} == {(1, 1)}
    assert [step_of(replica.version) for replica in replicas] == ["1", "1"]
    assert replicas[1].http.asked("/v1/completions")
    assert not list(tmp_path.glob("mt-grpo-weights-*"))


def test_a_restored_server_is_verified_though_the_latest_sync_was_not(tokenizer, replicas, client):
    model, replica = build_model(tokenizer), replicas[0]
    sync = SafetensorsSync(client, lambda: model, Accelerator(cpu=True))
    sync.sync(0)
    model.model.embed_tokens.weight.data *= 1.5
    sync.sync(1)
    assert len(replica.http.asked("/v1/completions")) == 2  # of the first sync, and its proof
    sync.restore(replica.http.url)
    replica.model = build_model(tokenizer, seed=9)
    replica.model.load_state_dict = lambda *args, **kwargs: None
    with pytest.raises(WeightSyncError, match="does not compute what the trainer computes"):
        sync.restore(replica.http.url)
    sync.close()


@pytest.mark.parametrize(
    ("installed", "urls", "words"),
    [(False, 1, "needs vLLM"), (True, 2, "one server")],
)
def test_what_nccl_cannot_do_is_said_at_the_start(tokenizer, monkeypatch, installed, urls, words):
    monkeypatch.setattr("mt_grpo.weights.transports.nccl.is_vllm_available", lambda: installed)
    client = VLLMServerClient([f"http://127.0.0.1:{port}" for port in range(1, 1 + urls)], tokenizer)
    with pytest.raises(ConfigError, match=f"{words}.*weight_sync: safetensors"):
        NcclSync(client, lambda: build_model(tokenizer), Accelerator(cpu=True))


class Session(httpx.Client):
    """What TRL's client needs of `requests`, which comes with vLLM."""

    def mount(self, *args):
        pass


@pytest.mark.parametrize("given", ["given", "from the environment", "made up"])
def test_by_nccl_the_key_is_sent_from_the_first_request_that_needs_it(
    tokenizer, monkeypatch, tmp_path, replicas, given
):
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
    monkeypatch.setattr("mt_grpo.weights.transports.nccl.is_vllm_available", lambda: True)
    seen = []
    monkeypatch.setattr(KeyedClient, "init_communicator", lambda self, device: seen.append(self.get_server_info()))
    http.key = key
    client = VLLMServerClient(http.url, tokenizer, api_key=key if given == "given" else None)
    sync = NcclSync(client, lambda: build_model(tokenizer), Accelerator(cpu=True), group_port=51299)
    assert seen and sync._generation.vllm_client.group_port == 51299
    assert [path for _, path, _ in http.requests] == ["/health", "/v1/models", "/server_info"]


def test_sync_by_adapter_needs_an_adapter(tokenizer, client):
    with pytest.raises(ConfigError, match="use_peft: true"):
        LoraSync(client, lambda: build_model(tokenizer), Accelerator(cpu=True))


def test_a_server_is_resumed_though_the_pause_itself_was_interrupted():
    class Interrupted:
        base_url, said = "", []

        def post(self, path, **params):
            self.said.append(path)
            raise KeyboardInterrupt

        def tidy_up(self, path):
            self.said.append(path)

    with pytest.raises(KeyboardInterrupt), paused(Interrupted()):
        pass
    assert Interrupted.said == ["/pause", "/resume"]


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
