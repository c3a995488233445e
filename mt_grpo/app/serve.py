"""
`mt-grpo serve`: becomes the vLLM server that a recipe's trainer needs, or starts several; or becomes one that serves
what a run trained, to anybody who speaks OpenAI's API.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import torch
from transformers import AutoTokenizer
from trl.chat_template_utils import add_response_schema

from mt_grpo.app.chat import served_name
from mt_grpo.app.recipe import Recipe
from mt_grpo.app.request import Request
from mt_grpo.errors import ConfigError
from mt_grpo.options.rules import check_served
from mt_grpo.options.values import HAS_A_USER, env_type
from mt_grpo.servers import EVERYWHERE, expand_addresses, host_url, is_local
from mt_grpo.servers.start import Replica, check_keys, run_replicas, share_gpus, vitals
from mt_grpo.training.checkpoint import adapter_settings
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.model import resolve_base, resolve_model
from mt_grpo.training.servers import check_vllm, command_at, cpu_defaults, interpreter, server_dtype, visible_gpus
from mt_grpo.training.step_log import serving
from mt_grpo.weights.files import LoraTransport


def server_command(recipe: Recipe) -> tuple[list[str], dict[str, str]]:
    """The command that starts a recipe's server, and the environment variables it needs; see `command_at`."""
    host, port = _addresses(recipe.training, None)[0]
    return command_at(host, port, recipe.training, recipe.model)


def serve(recipe: Recipe, request: Request) -> int:
    """
    Prints the command and becomes it; of several servers prints all, and waits until they have ended. Prometheus is
    told meanwhile, at `--metrics_address`, which of them live. Of a run it serves what was trained, and says on
    standard error what whoever asks it has to do.
    """
    args, replicas, metrics_address = recipe.training, request.own["replicas"], request.own["metrics_address"]
    if request.run is not None and replicas is not None:
        raise ConfigError("`--replicas` starts servers for a trainer: for a trained model start one on each port.")
    if request.run is None:
        check_served(vars(args))
        check_keys()
    addresses = _addresses(args, replicas)
    if request.run is not None or len(addresses) == 1:
        if metrics_address is not None:
            raise ConfigError(
                "`--metrics_address` says which of several servers live (`--replicas`): one has metrics of its own, "
                "at `/metrics`."
            )
        command, environment, *words = (
            server_command(recipe) if request.run is None else _trained_command(recipe, request.run)
        )
        print(Replica("", command, environment).line, flush=True)
        for line in words:
            print(f"mt-grpo: {line}", file=sys.stderr, flush=True)
        check_vllm()
        os.execve(command[0], command, {**os.environ, **environment})
        return 1
    found = []
    shares = _shares(args, len(addresses))
    for (host, port), share in zip(addresses, shares, strict=True):
        command, environment = command_at(host, port, args, recipe.model)
        found.append(Replica(host_url(host, port), command, environment | share))
    if not expand_addresses(args.vllm_server_base_url or [], "vllm_server_base_url"):
        host, first = addresses[0]
        host = "THIS_MACHINE" if host in EVERYWHERE else f"[{host}]" if ":" in host else host
        print(f"The trainer finds them with `--vllm_server_base_url http://{host}:[{first}-{addresses[-1][1]}]`.")
    check_vllm()
    if metrics_address is None:
        return run_replicas(found)
    with serving(metrics_address, "server", lambda: vitals(found)):
        return run_replicas(found, listens=True)


_PARSERS = {
    "<function=": "qwen3_coder",
    "<tool_call>(?P<name>": "glm45",
    "<tool_call>": "hermes",
    "<|tool_call_start|>": "lfm2",
    "<|tool_call>": "gemma4",
    "<|channel|>commentary": "openai",
    '"parameters"': "llama3_json",
}
"""vLLM's parsers of tool calls, by what begins a call in a response template; the first that is there."""


def _trained_command(recipe: Recipe, run: str) -> tuple[list[str], dict[str, str], str]:
    """The command that serves a recipe's model to clients of OpenAI's API, its environment, and words for clients."""
    args, model = recipe.training, recipe.model
    name = resolve_model(model.model_name_or_path)
    ((host, port),) = _addresses(args, 1)
    served, base, settings = served_name(name), resolve_base(name), adapter_settings(name)
    command = [
        *(str(interpreter()), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", base, "--served-model-name", f"{served}-base" if settings else served),
        *("--host", host, "--port", str(port), "--dtype", server_dtype(args, model)),
        *("--tensor-parallel-size", str(args.vllm_tensor_parallel_size)),
    ]
    environment = {"VLLM_NO_USAGE_STATS": "1"}
    if settings is not None:
        _check_adapter(settings, run)
        model.lora_r = settings["r"]
        flags, _ = LoraTransport.server_flags(model)
        command += [*flags, "--lora-modules", f"{served}={name}", "--tokenizer", name]
    if args.vllm_max_model_length:
        command += ["--max-model-len", str(args.vllm_max_model_length)]
    if args.trust_remote_code:
        command.append("--trust-remote-code")
    if args.chat_template_kwargs:
        command += ["--default-chat-template-kwargs", json.dumps(args.chat_template_kwargs)]
    if args.use_cpu or not torch.cuda.is_available():
        command += ["--enforce-eager", "--no-enable-chunked-prefill"]
        environment |= {name: os.environ.get(name, value) for name, value in cpu_defaults().items()}
    url = host_url(host, port)
    words = [f"{served!r} will be at {url}/v1."]
    if not os.environ.get("VLLM_API_KEY"):
        words.append("Who reaches the port may use it, unless `VLLM_API_KEY` is set.")
    protocol = args.call_protocol or ("tags" if env_type(vars(args)) in HAS_A_USER else "native")
    loop = f"`mt-grpo chat {shlex.quote(run)} --server {url}` does this, with the run's tools."
    if protocol == "native":
        parser = _parser_of(name, args)
        if parser is None:
            words.append(
                "No parser of vLLM is known for the tool calls of its chat template: start the command above with "
                "`--enable-auto-tool-choice --tool-call-parser NAME`, if vLLM has one."
            )
        else:
            command += ["--enable-auto-tool-choice", "--tool-call-parser", parser]
        words.append(f"A client sends system prompt and tools, and runs the calls. {loop}")
    elif protocol.endswith("tags"):
        words.append(
            "It calls tools by tags in its text, which vLLM does not read. A client sends the system prompt of the "
            'training, with `"stop": ["</tool>", "</answer>"]` and `"include_stop_str_in_output": true`, runs the '
            f"call and sends `<result>...</result>` as the user's next message. {loop}"
        )
    return command, environment, " ".join(words)


def _check_adapter(settings: dict[str, Any], run: str) -> None:
    """Refuses an adapter that vLLM cannot put on its base."""
    unknown = [name for name in ("modules_to_save", "use_dora", "target_parameters") if settings.get(name)]
    if settings.get("peft_type") != "LORA" or unknown:
        raise ConfigError(
            f"vLLM takes no adapter with {', '.join(unknown) or settings.get('peft_type')}: run "
            f"`{shlex.join(['mt-grpo', 'merge', run])}` and `{shlex.join(['mt-grpo', 'serve', f'{run}/merged'])}`."
        )


def _parser_of(name: str, args: MTGRPOConfig) -> str | None:
    """vLLM's name for what reads the tool calls of a model's chat template; `None` where none is known."""
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=args.trust_remote_code)
    if tokenizer.response_template is None:
        with suppress(ValueError):
            add_response_schema(tokenizer)
    calls = ((tokenizer.response_template or {}).get("fields") or {}).get("tool_calls") or {}
    begins = (calls.get("open") or calls.get("open_pattern") or "").replace("\\", "")
    return next((parser for text, parser in _PARSERS.items() if text in begins), None)


def _addresses(args: MTGRPOConfig, replicas: int | None) -> list[tuple[str, int]]:
    """Hosts and ports of the servers that are started here."""
    urls = expand_addresses(args.vllm_server_base_url or [], "vllm_server_base_url")
    if not urls:
        host, first = args.vllm_server_host.strip("[]"), args.vllm_server_port
        if first + (replicas or 1) > 2**16:
            raise ConfigError(
                f"`--replicas {replicas}` takes ports from `vllm_server_port: {first}` on, and the last one is 65535: "
                "begin with a lower one."
            )
        return [(host, port) for port in range(first, first + (replicas or 1))]
    parts = [urlsplit(url) for url in urls]
    if not all(is_local(part.hostname) for part in parts):
        raise ConfigError(
            f"`vllm_server_base_url: {', '.join(args.vllm_server_base_url)}` names servers on other machines: start "
            "each on its own machine, with `--vllm_server_base_url ''`, `--vllm_server_host` and `--vllm_server_port`."
        )
    if replicas is not None and replicas > len(parts):
        raise ConfigError(
            f"`--replicas {replicas}` starts more servers than `vllm_server_base_url` names, {len(parts)}: name the "
            "others too, or leave `--replicas` out."
        )
    return [(str(part.hostname), part.port or 80) for part in parts][:replicas]


def _shares(args: MTGRPOConfig, servers: int) -> list[dict[str, str]]:
    """What of the machine each of several servers gets, as environment variables."""
    if args.use_cpu or not torch.cuda.is_available():
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (torch.get_num_threads() - 1) // servers))
        return [{"OMP_NUM_THREADS": threads}] * servers
    shares = share_gpus(servers, args.vllm_tensor_parallel_size, visible_gpus())
    return [{"CUDA_VISIBLE_DEVICES": gpus} for gpus in shares]
