"""The command of the vLLM server that a trainer needs."""

from __future__ import annotations

import json
import os
import sys
import uuid
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig
from trl import ModelConfig

import mt_grpo
from mt_grpo.errors import ConfigError
from mt_grpo.forward.images import image_token
from mt_grpo.forward.routes import route_shape
from mt_grpo.training.checkpoint import adapter_settings
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.model import resolve_base, resolve_model, served_model, source_options, subfolder_of
from mt_grpo.training.servers import colocates, replays_routes, transport_of

GUARD = "mt_grpo.vllm_plugin.guard.Guard"
"""The middleware that lets only the trainer's requests pass, and only with the key."""

DRAIN = 30
"""Seconds that a server which is told to end gives the requests under way."""


def command_at(host: str, port: int, args: MTGRPOConfig, model: ModelConfig) -> tuple[list[str], dict[str, str]]:
    """
    The command that starts a server, and the environment variables it needs beside those of this process.

    The interpreter is that of `.venv-vllm` in the checkout, where it has been made, else this one. The key is taken
    from `VLLM_API_KEY`, by the server as by the trainer, or made up by the server, so that no command line shows it.
    """
    name = resolve_model(model.model_name_or_path, model.model_revision, subfolder_of(args))
    adapter = adapter_settings(name)
    if adapter is not None:  # the server holds its base
        model = replace(model, lora_r=adapter["r"])
    transport = transport_of(args)
    command = [
        str(interpreter()),
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", served_model(resolve_base(name), args)),
        *("--host", host, "--port", str(port)),
        *("--dtype", "bfloat16" if args.bf16 else "float16" if args.fp16 else model.dtype or "auto"),
        *("--tensor-parallel-size", str(args.vllm_tensor_parallel_size)),
        *("--middleware", GUARD),
        "--enable-prefix-caching",
        *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"),
        *("--weight-transfer-config", json.dumps({"backend": transport.server_backend})),
        # for requests under way at SIGTERM; the guard sends others away meanwhile
        *("--shutdown-timeout", str(DRAIN)),
        # answers carry it: a client sees by it that the server was restarted and has lost its weights
        *("--fingerprint-mode", "custom", "--fingerprint-value", f"mt-grpo-{uuid.uuid4().hex[:12]}"),
    ]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "MT_GRPO_SERVER": "1"}
    if args.vllm_max_model_length:
        command += ["--max-model-len", str(args.vllm_max_model_length)]
    if model.model_revision and model.model_revision != "main":
        command += ["--revision", model.model_revision]
    if args.trust_remote_code:
        command.append("--trust-remote-code")
    if colocates(args) and args.device.type == "cuda":
        command += ["--gpu-memory-utilization", str(args.vllm_gpu_memory_utilization)]
        command += ["--enable-sleep-mode"] if args.vllm_enable_sleep_mode else []  # the CPU build refuses the flag
    flags, variables = transport.server_flags(model)
    command += flags
    environment |= variables
    config = _read_config(resolve_base(name), args, model)
    if config is not None and image_token(config) is not None:
        # the endpoint that takes token ids with images, of pixels as the trainer's processor makes them
        command += ["--enable-scale-out", "--no-mm-device-do-normalize"]
    routes = replays_routes(args) and config is not None and route_shape(config) is not None
    if args.use_cpu or not torch.cuda.is_available():
        # a seeded prompt split over two steps ends vLLM's CPU build ("CPU Generator does not use offset")
        command += ["--enforce-eager", "--no-enable-chunked-prefill"]
        if config is not None and _carries_state(config):
            command.append("--no-enable-prefix-caching")  # states are cached where prompts are split only
        elif routes:
            command += ["--enable-return-routed-experts", "--no-async-scheduling"]
            environment["MT_GRPO_ROUTES"] = "1"  # see mt_grpo.vllm_plugin.routes
        for name, value in _cpu_defaults().items():
            environment[name] = os.environ.get(name, value)
    elif routes:
        command.append("--enable-return-routed-experts")
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    return command, environment


def _read_config(name: str, args: MTGRPOConfig, model: ModelConfig) -> PreTrainedConfig | None:
    """The configuration of a model; `None` where there is none, since the server says what is wrong with its model."""
    try:
        where = source_options(args, model.model_revision)
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, **where)
    except OSError:
        return None
    return config


def _carries_state(config: PreTrainedConfig) -> bool:
    """Whether a model has layers of linear attention, state spaces or convolutions."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or []
    return any(kind == "linear_attention" or "attention" not in kind and kind not in ("mlp", "moe") for kind in kinds)


def check_vllm() -> None:
    """Whether servers can be started."""
    own = interpreter()
    here = own == Path(sys.executable)
    if not (find_spec("vllm") if here else list(own.parents[1].glob("lib/python*/site-packages/vllm"))):
        raise ConfigError(
            "`vllm_mode: colocate` starts a vLLM server, and vLLM is neither in `.venv-vllm` nor in this environment: "
            'install it (`TORCH="" scripts/install.sh .venv-vllm ".[vllm]"`, or on a CPU `make server-cpu`).'
        )


def interpreter() -> Path:
    """The Python that servers run with."""
    own = Path(mt_grpo.__file__).parents[1] / ".venv-vllm" / "bin" / "python"
    return own if own.exists() else Path(sys.executable)


def _cpu_defaults() -> dict[str, str]:
    """
    Environment variables for a server on a CPU, as far as the user did not set them. By default vLLM binds the threads
    of every server to the same cores, where they spin, and other processes on these cores may never run.
    """
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() - 1)),
    }
