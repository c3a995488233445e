"""The server's command follows the recipe."""

import importlib
import inspect
import json
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from peft import LoraConfig, get_peft_model
from support.images import build_processor, build_vision_model
from support.recipes import parse_recipe
from transformers import (
    AutoTokenizer,
    Qwen2_5_VLConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from trl import chat_template_utils as templates

from mt_grpo import vllm_plugin
from mt_grpo.app import commands, serve
from mt_grpo.app.request import read_request
from mt_grpo.cli import _trained, main
from mt_grpo.errors import ConfigError
from mt_grpo.servers.start import share_gpus
from mt_grpo.training import servers
from mt_grpo.training.forward_plan import check_importance_sampling
from mt_grpo.training.model import resolve_model
from mt_grpo.training.servers import server_client, server_urls

QUICKSTART = ["--config", "recipes/quickstart_vllm.yaml"]


def options_of(*options):
    return parse_recipe([*QUICKSTART, *map(str, options)])


def command(*options, transport="auto", on_gpu=False):
    """Words, flags with their values, and environment of the server that a recipe asks for."""
    recipe = options_of(*options)
    recipe.training.weight_sync = transport
    recipe.training.use_cpu = recipe.training.use_cpu and not on_gpu
    words, environment = serve.server_command(recipe)
    flags = {word: words[index + 1] for index, word in enumerate(words[:-1]) if word.startswith("--")}
    return words, flags, environment


def test_the_command_has_what_the_trainer_relies_on():
    words, flags, environment = command("--vllm_server_port", 8123, "--vllm_max_model_length", 300)
    assert words[1:3] == ["-m", "vllm.entrypoints.openai.api_server"] and "--enable-prefix-caching" in words
    assert flags["--model"].endswith("embedded/model")
    expected = {"--dtype": "float32", "--port": "8123", "--max-model-len": "300", "--max-logprobs": "-1"}
    assert flags.items() >= {**expected, "--logprobs-mode": "processed_logprobs"}.items()
    assert json.loads(flags["--weight-transfer-config"]) == {"backend": "safetensors"}
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    _, again, _ = command()
    assert flags["--fingerprint-value"] != again["--fingerprint-value"]  # each has its own


def test_environment_variables_decide_how_a_cpu_is_used(monkeypatch):
    names = ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(servers.torch, "get_num_threads", lambda: 8)
    assert [command()[2][name] for name in names] == ["nobind", "7"]
    for name in names:
        monkeypatch.setenv(name, "0-3")
    assert [command()[2][name] for name in names] == ["0-3", "0-3"]


@pytest.mark.parametrize("transport", ["auto", "nccl", "lora"])
def test_a_transport_changes_flags_and_keeps_the_guard(transport):
    words, flags, environment = command("--lora_r", 20, transport=transport)
    module, name = flags["--middleware"].rsplit(".", 1)
    assert inspect.isclass(getattr(importlib.import_module(module), name))
    if transport == "nccl":
        assert json.loads(flags["--weight-transfer-config"]) == {"backend": "nccl"}
    assert ("--enable-lora" in words) == (transport == "lora")
    if transport == "lora":
        assert flags["--max-lora-rank"] == "32" and environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


@pytest.fixture
def trained(tmp_path):
    """The command and the words for a run with a model of some template, and with some options."""

    def command_of(template=None, adapter=None, **options):
        run = tmp_path / "run"
        AutoTokenizer.from_pretrained(resolve_model("embedded")).save_pretrained(run)
        if template is not None:
            (run / "chat_template.jinja").write_text(template)
        settings = {"base_model_name_or_path": "embedded", "peft_type": "LORA", "r": 20, **(adapter or {})}
        (run / ("config.json" if adapter is None else "adapter_config.json")).write_text(json.dumps(settings))
        recipe = {"model_name_or_path": "gone", "dataset_name": "embedded", "use_cpu": True, "bf16": False, **options}
        (run / "config.yaml").write_text(yaml.safe_dump(recipe))
        request = read_request([str(run), "--vllm_server_port", "8123"])
        words, _, said = serve._trained_command(_trained(request), str(run))
        return " ".join(words), said

    return command_of


NATIVE = {"call_protocol": "native"}


def test_a_trained_model_is_served_for_use_not_for_training(trained):
    words, said = trained(call_protocol="learnt_tags", chat_template_kwargs={"enable_thinking": False})
    assert "run --served-model-name run " in words and "--port 8123" in words and "8123/v1" in said
    assert """--default-chat-template-kwargs {"enable_thinking": false}""" in words
    assert '"stop": ["</tool>", "</answer>"]' in said and "mt-grpo chat" in said
    assert not any(each in words for each in ("--middleware", "--weight-transfer-config", "tool-call-parser"))


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (templates.qwen3_chat_template, "hermes"),
        (templates.qwen3_5_think_chat_template, "qwen3_coder"),
        (templates.llama3_2_chat_template, "llama3_json"),
        (templates.gptoss_chat_template, "openai"),
        (templates.glm4moe_chat_template, "glm45"),
        (templates.gemma4_chat_template, "gemma4"),
        ("{{ messages }}", None),
    ],
)
def test_vllm_reads_the_calls_of_a_template_that_it_knows(trained, template, parser):
    words, said = trained(template, **NATIVE)
    assert (f"--enable-auto-tool-choice --tool-call-parser {parser}" in words) == (parser is not None)
    assert ("No parser of vLLM is known" in said) == (parser is None)


def test_an_adapter_is_served_on_its_base_or_merged_first(trained, tmp_path):
    words, _ = trained(adapter={})
    assert re.search(r"--model \S+embedded/model --served-model-name run-base .*--max-lora-rank 32", words)
    assert re.search(r"--lora-modules run=(\S+/run) --tokenizer \1", words)
    with pytest.raises(
        ConfigError, match="no adapter with use_dora: run `mt-grpo merge .*` and `mt-grpo serve .*merged`"
    ):
        trained(adapter={"use_dora": True})
    base = {"base_model_name_or_path": str(tmp_path / "base")}
    for layers in (".*language_model.*_proj", "all-linear"):
        seeing = get_peft_model(build_vision_model(build_processor().tokenizer), LoraConfig(target_modules=layers))
        seeing.save_pretrained(tmp_path / "run")
        seeing.config.save_pretrained(tmp_path / "base")
        if layers != "all-linear":
            trained(adapter=base)
    with pytest.raises(ConfigError, match="no adapter with layers that see or hear: run `mt-grpo merge"):
        trained(adapter=base)


@pytest.fixture
def serves(monkeypatch):
    """Runs `mt-grpo serve`: its status, what it became if one server, and the servers that it started if several."""

    def run(*options, config=QUICKSTART[1]):
        became, started = [], []
        monkeypatch.setattr(os, "execve", lambda *arguments: became.append(arguments))
        monkeypatch.setattr(serve, "check_vllm", lambda: None)
        monkeypatch.setattr(serve, "run_replicas", lambda replicas, **_: started.extend(replicas) or 0)
        return main(["serve", "--config", config, *options]), became, started

    return run


def test_serve_prints_the_command_and_becomes_it_without_the_key(serves, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    _, ((program, words, environment),), _ = serves()
    assert program == words[0] and environment["VLLM_SERVER_DEV_MODE"] == "1" and environment["PATH"]
    printed = capsys.readouterr().out
    assert "VLLM_SERVER_DEV_MODE=1" in printed and "vllm.entrypoints.openai.api_server --model" in printed
    assert "secret" not in " ".join(words) + str(command()[2]) + printed


@pytest.mark.parametrize("replicas", [[], ["--replicas", "2"]], ids=["one", "two"])
def test_serve_uses_the_vllm_of_the_folder_or_says_how_to_get_it(replicas, monkeypatch, tmp_path, capsys):
    """Where the package is installed, and beside it is no clone."""
    (tmp_path / "recipes").symlink_to(Path("recipes").absolute())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mt_grpo.servers._BESIDE", tmp_path / "site-packages")
    monkeypatch.setattr(servers, "find_spec", lambda name: None)
    assert command()[0][0] == sys.executable
    assert main(["serve", "--config", QUICKSTART[1], *replicas]) == 1
    said = capsys.readouterr().err
    assert "vLLM is neither in `.venv-vllm`" in said and ".venv-vllm/bin/pip install 'mt-grpo[vllm]'" in said
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    with pytest.raises(ConfigError, match="vLLM is neither"):
        servers.check_vllm()
    (tmp_path / "elsewhere" / "vllm").mkdir(parents=True)
    servers.check_vllm()
    assert command()[0][0] == str(python)


@pytest.mark.parametrize("replicas", [[], ["--replicas", "2"]], ids=["one", "two"])
def test_a_vllm_of_an_unknown_version_is_named_and_started(serves, replicas, monkeypatch, capsys):
    for version, named in (("0.32.0", False), ("0.99.0", True)):
        monkeypatch.setattr(commands, "version_of", lambda *names, found=version, environment=None: found)
        _, became, started = serves(*replicas)
        assert became or started
        said = "mt-grpo: vLLM 0.99.0 is in .venv-vllm, and mt-grpo is made for 0.31 to 0.33: if it fails, `pip install"
        assert (said in capsys.readouterr().err) == named


def test_the_extra_takes_the_versions_of_vllm_that_are_known():
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    first, *_, last = [int(version.removeprefix("0.")) for version in commands.MADE_FOR]
    assert project["project"]["optional-dependencies"]["vllm"] == [f"vllm>=0.{first},<0.{last + 1}"]


def test_a_server_that_cannot_hide_its_key_does_not_start(serves, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(vllm_plugin, "KEYS_ROOT", str(tmp_path))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    (tmp_path / f"mt-grpo-keys-{os.geteuid()}").symlink_to(tmp_path)
    assert serves() == (1, [], [])
    assert "remove it, or set `VLLM_API_KEY`" in capsys.readouterr().err


URLS = "--vllm_server_base_url"


@pytest.mark.parametrize(
    ("options", "config", "said"),
    [
        ([], "nowhere.yaml", "mt-grpo: The recipe 'nowhere.yaml' does not exist.\n"),
        ([], "recipes/quickstart.yaml", "samples from its own model"),
        (
            [URLS, "http://127.0.0.1:[7001-7002]", "--replicas", "3"],
            QUICKSTART[1],
            "`--replicas 3` starts more servers than `vllm_server_base_url` names, 2",
        ),
        (
            ["--replicas", "7", "--vllm_server_port", "65530"],
            QUICKSTART[1],
            "the last one is 65535: begin with a lower",
        ),
        (["--metrics_address", "9465"], QUICKSTART[1], "one has metrics of its own, at `/metrics`"),
        (["--replicas", "2", "--metrics_address", "x"], QUICKSTART[1], "`metrics_address: x` cannot be listened at"),
        ([URLS, "http://a:1,http://b:2"], QUICKSTART[1], "start each on its own machine"),
        (
            ["--model_name_or_path", "./nowhere"],
            QUICKSTART[1],
            "'./nowhere' cannot be loaded: there is no such folder",
        ),
    ],
)
def test_a_recipe_that_cannot_be_served_is_refused(serves, capsys, options, config, said):
    assert serves(*options, config=config) == (1, [], [])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "urls"),
    [
        (("--vllm_server_host", "10.0.0.2", "--vllm_server_port", "9"), ["http://10.0.0.2:9"]),
        (("--vllm_server_host", "0.0.0.0"), ["http://127.0.0.1:8000"]),
        ((URLS, "http://a:1/, http://b:2"), ["http://a:1", "http://b:2"]),
    ],
)
def test_the_trainer_finds_the_server_where_the_recipe_puts_it(options, urls):
    assert server_urls(options_of(*options).training) == urls
    assert command(URLS, "http://localhost:7001")[1]["--port"] == "7001"


def test_replicas_have_ports_and_identities_of_their_own(serves, capsys):
    status, became, started = serves("--replicas", "3", "--vllm_server_port", "8100")
    assert (status, became) == (0, [])
    assert [replica.url for replica in started] == [f"http://127.0.0.1:{port}" for port in (8100, 8101, 8102)]
    assert len({each.command[each.command.index("--fingerprint-value") + 1] for each in started}) == 3
    assert f"{URLS} http://127.0.0.1:[8100-8102]" in capsys.readouterr().out
    _, _, named = serves(URLS, "http://127.0.0.1:[7001-7002]", "http://localhost:80")
    assert [replica.url.rpartition(":")[2] for replica in named] == ["7001", "7002", "80"]


def test_each_replica_has_gpus_of_its_own():
    assert share_gpus(2, 2, ["0", "1", "4", "5"]) == ["0,1", "4,5"]
    with pytest.raises(ConfigError, match="3 servers take 6 GPUs, 2 each, and 4 are visible"):
        share_gpus(3, 2, ["0", "1", "2", "3"])


def test_the_server_of_an_adapter_holds_its_base_and_its_rank(tmp_path):
    settings = {"base_model_name_or_path": "embedded", "r": 40}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    _, flags, _ = command("--model_name_or_path", tmp_path, transport="lora")
    assert flags["--model"].endswith("embedded/model") and flags["--max-lora-rank"] == "64"


def test_the_server_of_a_model_in_a_subfolder_is_given_that(tmp_path, monkeypatch):
    Qwen3Config().save_pretrained(tmp_path / "inner")
    options = ["--model_init_kwargs", json.dumps({"subfolder": "inner"}), "--model_name_or_path"]
    assert command(*options, tmp_path)[1]["--model"] == str(tmp_path / "inner")
    client = server_client(options_of(*options, tmp_path).training, None, str(tmp_path))
    assert client.expected_model == str(tmp_path / "inner")
    monkeypatch.setattr("mt_grpo.training.model.check_hub", lambda what: None)
    with pytest.raises(ConfigError, match="no subfolder of a repository of the Hub .*hf download org/name"):
        command(*options, "org/name")


def test_a_loss_that_corrects_per_token_is_refused_another_way():
    options = ["--loss_type", "vespo", "--vllm_importance_sampling_mode"]
    with pytest.raises(ConfigError, match="token_truncate, token_mask"):
        check_importance_sampling(options_of(*options, "sequence_mask").training)
    check_importance_sampling(options_of(*options, "token_mask").training)


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("config", "on_gpu", "replay", "returned"),
    [
        (Qwen3MoeConfig(**EXPERTS), True, True, True),
        (Qwen3MoeConfig(**EXPERTS), True, False, False),
        (Qwen3Config(), True, True, False),
        (Qwen3MoeConfig(**EXPERTS), False, True, True),
        (Qwen3MoeConfig(**EXPERTS), False, False, False),
        (Qwen3NextConfig(**EXPERTS), False, True, False),  # has no prefix cache there, which routes need
    ],
)
def test_a_mixture_says_which_experts_tokens_went_to(config, on_gpu, replay, returned, tmp_path, monkeypatch):
    config.save_pretrained(tmp_path)
    monkeypatch.setattr(servers.torch.cuda, "is_available", lambda: on_gpu)
    options = ("--model_name_or_path", tmp_path, "--router_replay", str(replay).lower())
    words, _, environment = command(*options, on_gpu=on_gpu)
    assert ("--enable-return-routed-experts" in words) == returned
    if on_gpu:
        assert environment.get("VLLM_USE_V2_MODEL_RUNNER") == ("1" if returned else None)
    else:
        assert ("--no-async-scheduling" in words) == ("MT_GRPO_ROUTES" in environment) == returned


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (Qwen3Config(), set()),
        # vLLM caches the states of such layers only where prompts are split, which its CPU build cannot
        (Qwen3_5TextConfig(num_hidden_layers=4), {"--no-enable-prefix-caching"}),
        (Qwen2_5_VLConfig(), {"--enable-scale-out", "--no-mm-device-do-normalize"}),
    ],
)
def test_the_kind_of_a_model_decides_flags(config, flags, tmp_path):
    config.save_pretrained(tmp_path)
    found = set(command("--model_name_or_path", tmp_path)[0])
    assert found & {"--no-enable-prefix-caching", "--enable-scale-out", "--no-mm-device-do-normalize"} == flags
