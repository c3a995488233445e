"""A model that a run trained, behind a real vLLM server that is no trainer's."""

import io
from pathlib import Path

import httpx
import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from support.loopback import free_port
from support.servers import ServerProcess, needs_server
from transformers import AutoModelForCausalLM, AutoTokenizer

from mt_grpo.app.request import read_request
from mt_grpo.app.serve import _trained_command
from mt_grpo.cli import _trained, main
from mt_grpo.training.model import resolve_model

pytestmark = [needs_server, pytest.mark.server]

QUESTION = "In which country is Lima?"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The embedded model with an adapter that changes what it says, as a run leaves both."""
    folder, base = tmp_path_factory.mktemp("trained") / "run", resolve_model("embedded")
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    recipe = yaml.safe_load(Path("recipes/quickstart.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump({**recipe, "temperature": 0.0}))
    return folder


def test_a_run_is_served_and_asked_as_in_this_process(run, tmp_path, monkeypatch, capsys):
    port = free_port()
    request = read_request([str(run), "--vllm_server_port", str(port), "--vllm_max_model_length", "512", "--trust"])
    command, environment, words = _trained_command(_trained(request), str(run))
    assert "by tags in its text" in words
    server = ServerProcess(command, port, tmp_path / "log", environment).start()
    try:
        shown = []
        for options in ((), ("--server", f"{server.url}/v1")):
            monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUESTION}\n"))
            capsys.readouterr()
            assert main(["chat", str(run), "--trust", *options]) == 0
            shown.append(capsys.readouterr().out)
        assert shown[0] == shown[1] and shown[0]
        body = {"model": "run", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60.0)
        assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"]
        assert httpx.post(f"{server.url}/pause", timeout=60.0).status_code == 404  # it is no trainer's
    finally:
        server.stop()
