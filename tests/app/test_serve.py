"""The server's command follows the recipe."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys

import pytest
from support.recipes import parse_recipe
from transformers import Qwen2_5_VLConfig, Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig, Qwen3NextConfig

from mt_grpo.app import serve
from mt_grpo.cli import main
from mt_grpo.errors import ConfigError
from mt_grpo.servers.start import share_gpus
from mt_grpo.training import servers
from mt_grpo.training.forward_plan import check_importance_sampling
from mt_grpo.training.servers import server_client, server_urls
from mt_grpo.vllm_plugin import keys

QUICKSTART = ["--config", "recipes/quickstart_vllm.yaml"]


def command(*options, transport="auto"):
    recipe = parse_recipe([*QUICKSTART, *options])
    recipe.training.weight_sync = transport
    words, environment = serve.server_command(recipe)
    flags = {word: words[index + 1] for index, word in enumerate(words[:-1]) if word.startswith("--")}
    return words, flags, environment


def test_the_command_has_what_the_trainer_relies_on():
    words, flags, environment = command("--vllm_server_port", "8123", "--vllm_max_model_length", "300")
    assert words[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert flags["--model"].endswith("embedded/model") and flags["--dtype"] == "float32"
    assert flags["--port"] == "8123" and flags["--max-model-len"] == "300"
    assert flags["--logprobs-mode"] == "processed_logprobs" and flags["--max-logprobs"] == "-1"
    assert json.loads(flags["--weight-transfer-config"]) == {"backend": "safetensors"}
    assert "--enable-prefix-caching" in words
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"


def test_environment_variables_decide_how_a_cpu_is_used(monkeypatch):
    names = ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(servers.torch, "get_num_threads", lambda: 8)
    assert [command()[2][name] for name in names] == ["nobind", "7"]
    for name in names:
        monkeypatch.setenv(name, "0-3")
    assert [command()[2][name] for name in names] == ["0-3", "0-3"]


def test_each_server_has_an_identity_of_its_own():
    identities = {command()[1]["--fingerprint-value"] for _ in range(2)}
    assert len(identities) == 2


def test_weights_by_nccl_and_by_adapter_change_the_flags():
    assert json.loads(command(transport="nccl")[1]["--weight-transfer-config"]) == {"backend": "nccl"}
    words, flags, environment = command("--lora_r", "20", transport="lora")
    assert flags["--max-lora-rank"] == "32" and "--enable-lora" in words
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_the_key_is_on_no_command_line(monkeypatch, capsys):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setattr(os, "execve", lambda *arguments: None)
    main(["serve", *QUICKSTART])
    assert "secret" not in " ".join(command()[0]) + str(command()[2]) + capsys.readouterr().out


def test_the_guard_stands_before_every_server():
    for transport in ("auto", "nccl", "lora"):
        _, flags, _ = command("--lora_r", "8", transport=transport)
        module, name = flags["--middleware"].rsplit(".", 1)
        assert inspect.isclass(getattr(importlib.import_module(module), name))


def test_a_server_that_cannot_hide_its_key_does_not_start(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(keys, "ROOT", str(tmp_path))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr(os, "execve", lambda *arguments: pytest.fail("it was started"))
    (tmp_path / f"mt-grpo-keys-{os.geteuid()}").symlink_to(tmp_path)
    assert main(["serve", *QUICKSTART]) == 1
    assert "remove it, or set `VLLM_API_KEY`" in capsys.readouterr().err


def test_the_trainer_finds_the_server_where_the_recipe_puts_it():
    def urls(*options):
        return server_urls(parse_recipe([*QUICKSTART, *options]).training)

    assert urls("--vllm_server_host", "10.0.0.2", "--vllm_server_port", "9") == ["http://10.0.0.2:9"]
    assert urls("--vllm_server_host", "0.0.0.0") == ["http://127.0.0.1:8000"]
    assert urls("--vllm_server_base_url", "http://a:1/, http://b:2") == ["http://a:1", "http://b:2"]


def test_servers_on_other_machines_are_not_started_from_here():
    with pytest.raises(ConfigError, match="start each on its own machine"):
        command("--vllm_server_base_url", "http://a:1,http://b:2")
    assert command("--vllm_server_base_url", "http://localhost:7001")[1]["--port"] == "7001"


def started(monkeypatch, *options) -> list:
    """The servers that `mt-grpo serve` would start at once."""
    found = []
    monkeypatch.setattr(serve, "run_replicas", lambda replicas: found.extend(replicas) or 0)
    monkeypatch.setattr(os, "execve", lambda *arguments: pytest.fail("it became one server"))
    assert main(["serve", *QUICKSTART, *options]) == 0
    return found


def test_replicas_have_ports_and_identities_of_their_own(monkeypatch, capsys):
    found = started(monkeypatch, "--replicas", "3", "--vllm_server_port", "8100")
    assert [replica.url for replica in found] == [f"http://127.0.0.1:{port}" for port in (8100, 8101, 8102)]
    values = [replica.command[replica.command.index("--fingerprint-value") + 1] for replica in found]
    assert len(set(values)) == 3
    assert "--vllm_server_base_url http://127.0.0.1:[8100-8102]" in capsys.readouterr().out


def test_all_servers_that_a_recipe_names_here_are_started(monkeypatch):
    found = started(monkeypatch, "--vllm_server_base_url", "http://127.0.0.1:[7001-7002]", "http://localhost:80")
    assert [replica.url.rpartition(":")[2] for replica in found] == ["7001", "7002", "80"]


def test_more_replicas_than_addresses_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(os, "execve", lambda *arguments: pytest.fail("it was started"))
    arguments = ["--vllm_server_base_url", "http://127.0.0.1:[7001-7002]", "--replicas", "3"]
    assert main(["serve", *QUICKSTART, *arguments]) == 1
    assert "`--replicas 3` starts more servers than `vllm_server_base_url` names, 2" in capsys.readouterr().err


def test_each_replica_has_gpus_of_its_own():
    assert share_gpus(2, 2, ["0", "1", "4", "5"]) == ["0,1", "4,5"]
    with pytest.raises(ConfigError, match="3 servers take 6 GPUs, 2 each, and 4 are visible"):
        share_gpus(3, 2, ["0", "1", "2", "3"])


def test_serve_prints_the_command_and_becomes_it(monkeypatch, capsys):
    became = []
    monkeypatch.setattr(os, "execve", lambda *arguments: became.append(arguments))
    main(["serve", *QUICKSTART])
    ((program, words, environment),) = became
    assert program == words[0] and environment["VLLM_SERVER_DEV_MODE"] == "1" and environment["PATH"]
    printed = capsys.readouterr().out
    assert "VLLM_SERVER_DEV_MODE=1" in printed and "vllm.entrypoints.openai.api_server --model" in printed


def test_serve_says_in_one_sentence_what_is_wrong(capsys):
    assert main(["serve", "--config", "nowhere.yaml"]) == 1
    assert capsys.readouterr().err == "mt-grpo: The recipe 'nowhere.yaml' does not exist.\n"


def test_serve_refuses_a_recipe_whose_trainer_asks_no_server(monkeypatch, capsys):
    monkeypatch.setattr(os, "execve", lambda *arguments: pytest.fail("it was started"))
    assert main(["serve", "--config", "recipes/quickstart.yaml"]) == 1
    assert "samples from its own model" in capsys.readouterr().err


def test_the_server_of_an_adapter_holds_its_base_and_its_rank(tmp_path):
    settings = {"base_model_name_or_path": "embedded", "r": 40}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    _, flags, _ = command("--model_name_or_path", str(tmp_path), transport="lora")
    assert flags["--model"].endswith("embedded/model") and flags["--max-lora-rank"] == "64"


def test_the_server_of_a_model_in_a_subfolder_is_given_that(tmp_path, monkeypatch):
    Qwen3Config().save_pretrained(tmp_path / "inner")
    options = ["--model_init_kwargs", json.dumps({"subfolder": "inner"}), "--model_name_or_path"]
    assert command(*options, str(tmp_path))[1]["--model"] == str(tmp_path / "inner")
    client = server_client(parse_recipe([*QUICKSTART, *options, str(tmp_path)]).training, None, str(tmp_path))
    assert client.expected_model == str(tmp_path / "inner")
    monkeypatch.setattr("mt_grpo.training.model.check_hub", lambda what: None)
    with pytest.raises(ConfigError, match="no subfolder of a repository of the Hub .*hf download org/name"):
        command(*options, "org/name")


def test_a_server_of_a_model_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="'./nowhere' cannot be loaded: there is no such folder"):
        command("--model_name_or_path", "./nowhere")


def test_without_a_server_environment_this_interpreter_is_used(monkeypatch, tmp_path):
    monkeypatch.setattr(servers.mt_grpo, "__file__", str(tmp_path / "mt_grpo" / "__init__.py"))
    assert command()[0][0] == sys.executable


def test_a_loss_that_corrects_per_token_is_refused_another_way(tmp_path):
    options = ["--loss_type", "vespo", "--vllm_importance_sampling_mode"]
    with pytest.raises(ConfigError, match="token_truncate, token_mask"):
        check_importance_sampling(parse_recipe([*QUICKSTART, *options, "sequence_mask"]).training)
    check_importance_sampling(parse_recipe([*QUICKSTART, *options, "token_mask"]).training)


@pytest.mark.parametrize(
    "experts, replay, returned", [(True, "true", True), (True, "false", False), (False, "true", False)]
)
def test_a_mixture_on_a_gpu_says_which_experts_tokens_went_to(experts, replay, returned, tmp_path, monkeypatch):
    if experts:
        Qwen3MoeConfig(num_experts=8, num_experts_per_tok=2).save_pretrained(tmp_path)
    else:
        Qwen3Config().save_pretrained(tmp_path)
    recipe = parse_recipe([*QUICKSTART, "--model_name_or_path", str(tmp_path), "--router_replay", replay])
    recipe.training.use_cpu = False
    monkeypatch.setattr(servers.torch.cuda, "is_available", lambda: True)
    words, environment = serve.server_command(recipe)
    assert ("--enable-return-routed-experts" in words) == returned
    assert environment.get("VLLM_USE_V2_MODEL_RUNNER") == ("1" if returned else None)


@pytest.mark.parametrize("hybrid", [True, False])
def test_a_hybrid_on_a_cpu_caches_no_prefixes(hybrid, tmp_path):
    """vLLM caches the states of such layers only where prompts are split, which its CPU build cannot."""
    (Qwen3_5TextConfig(num_hidden_layers=4) if hybrid else Qwen3Config()).save_pretrained(tmp_path)
    words, _, _ = command("--model_name_or_path", str(tmp_path))
    assert ("--no-enable-prefix-caching" in words) == hybrid


@pytest.mark.parametrize(
    ("replay", "hybrid", "returned"), [("true", False, True), ("false", False, False), ("true", True, False)]
)
def test_a_mixture_on_a_cpu_says_which_experts_tokens_went_to(replay, hybrid, returned, tmp_path):
    config = Qwen3NextConfig if hybrid else Qwen3MoeConfig  # a hybrid has no prefix cache there, which routes need
    config(num_experts=8, num_experts_per_tok=2).save_pretrained(tmp_path)
    options = ["--model_name_or_path", str(tmp_path), "--router_replay", replay]
    words, environment = serve.server_command(parse_recipe([*QUICKSTART, *options]))
    assert ("--enable-return-routed-experts" in words) == ("--no-async-scheduling" in words) == returned
    assert ("MT_GRPO_ROUTES" in environment) == returned


@pytest.mark.parametrize("images", [True, False])
def test_the_server_of_a_vision_model_takes_images(images, tmp_path):
    (Qwen2_5_VLConfig if images else Qwen3Config)().save_pretrained(tmp_path)
    words, _ = serve.server_command(parse_recipe([*QUICKSTART, "--model_name_or_path", str(tmp_path)]))
    assert ("--enable-scale-out" in words) == ("--no-mm-device-do-normalize" in words) == images
