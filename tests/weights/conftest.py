"""Servers that hold weights, and syncs to them."""

import subprocess
import sys

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from support.replicas import Replica

from mt_grpo.rollout.engines.vllm import VLLMServerClient
from mt_grpo.servers import http
from mt_grpo.weights.files import SafetensorsTransport
from mt_grpo.weights.sync import WeightSync


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Repeats are not waited for."""
    monkeypatch.setattr(http, "DELAYS", (0.01, 0.01, 0.01))
    monkeypatch.setattr(http, "POLL", 0.01)


@pytest.fixture
def replicas(tokenizer):
    """Two servers with weights of their own."""
    pair = [Replica(tokenizer), Replica(tokenizer)]
    yield pair
    for replica in pair:
        replica.http.stop()


@pytest.fixture
def sync_of(replicas, tokenizer, model):
    """Makes syncs to servers, by default of one model to the first replica, and closes them."""
    made = []

    def make(*servers, kind=SafetensorsTransport, model=model, client=None, server_timeout=5.0, media=None, **options):
        urls = [getattr(server, "http", server) for server in servers or replicas[:1]]
        urls = [getattr(server, "url", server) for server in urls]
        client = client or VLLMServerClient(urls, tokenizer, server_timeout=server_timeout, media_tokens=media)
        made.append(WeightSync(kind, client, lambda: model, Accelerator(cpu=True), **options))
        return made[-1]

    yield make
    for sync in made:
        sync.close()


@pytest.fixture
def adapted():
    """Gives a model an adapter: as training begins, when it changes nothing yet, or one that is `learnt`."""

    def adapt(model, learnt=False):
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"]))
        for name, parameter in model.named_parameters():
            if learnt and "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        return model

    return adapt


@pytest.fixture
def other():
    """A process that does something else."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
