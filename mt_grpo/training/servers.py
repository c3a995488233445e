"""
The vLLM servers of a trainer: their addresses, their client, the sync of weights, the command that starts one, and
servers that a trainer starts on its own GPUs (`vllm_mode: colocate`), one for each tensor-parallel group.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from trl import GRPOTrainer, ModelConfig

from mt_grpo.errors import ConfigError, ServerSetupError, WeightSyncError
from mt_grpo.forward.media import media_tokens
from mt_grpo.forward.routes import route_shape
from mt_grpo.media import IMAGE
from mt_grpo.options.rules import check_groups
from mt_grpo.rollout.engines.vllm import VLLMServerClient
from mt_grpo.servers import expand_addresses, host_url, vllm_environment
from mt_grpo.servers.start import OwnServer, check_keys, is_free
from mt_grpo.training.checkpoint import adapter_settings
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.model import resolve_base, resolve_model, source_options, subfolder_of
from mt_grpo.training.ranks import everywhere, run_here, several_hosts
from mt_grpo.vllm_plugin.guard import SLEEPS
from mt_grpo.weights.sync import WeightSync
from mt_grpo.weights.transport import TRANSPORTS, Transport

_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_LAUNCHERS = ("ROLE_", "MASTER_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_", "TORCH_NCCL_", "OMP_")
"""Environment variables of a process that was launched, and the beginnings of others; a server is none."""
GONE_TIMEOUT = 20.0
"""Seconds to wait for a server that was up: nobody starts it again."""
GUARD = "mt_grpo.vllm_plugin.guard.Guard"
"""The middleware that lets only the trainer's requests pass, and only with the key."""
_DRAIN = 30  # seconds that a server which is told to end gives the requests under way


def server_urls(args: MTGRPOConfig, processes: int | None = None) -> list[str]:
    """URLs of a run's servers: the named ones, or those that it starts itself, from `vllm_server_port` on."""
    if colocates(args):
        groups = (processes or args.world_size) // args.vllm_tensor_parallel_size
        return [f"http://127.0.0.1:{args.vllm_server_port + group}" for group in range(groups)]
    urls = expand_addresses(args.vllm_server_base_url or [], "vllm_server_base_url")
    if urls:
        return urls
    return [host_url(args.vllm_server_host, args.vllm_server_port)]


def colocates(args: MTGRPOConfig) -> bool:
    """Whether the trainer starts its servers, on its own GPUs."""
    return args.use_vllm and args.vllm_mode == "colocate" and args.replay is None


def _own_port(args: MTGRPOConfig) -> int:
    """The port of the server that the group of this process shares its GPUs with."""
    return args.vllm_server_port + args.process_index // args.vllm_tensor_parallel_size


def transport_of(args: MTGRPOConfig) -> type[Transport]:
    """The transport of `weight_sync`; `auto` works everywhere, or copies least between processes on one GPU."""
    best = "ipc" if colocates(args) and args.device.type == "cuda" else "safetensors"
    return TRANSPORTS[best if args.weight_sync == "auto" else args.weight_sync]


def server_client(
    args: MTGRPOConfig, tokenizer: PreTrainedTokenizerBase, model: str, media_tokens: Mapping[int, int] | None = None
) -> VLLMServerClient:
    """The client of a run's servers, not yet connected."""
    return VLLMServerClient(
        server_urls(args),
        tokenizer,
        model=_served_model(model, args),
        server_timeout=args.vllm_server_timeout,
        home=f"http://127.0.0.1:{_own_port(args)}" if colocates(args) else None,
        media_tokens=media_tokens,
        min_servers=args.vllm_min_servers,
        by_cache=args.max_concurrent_rollouts is None,
        processes=1 if colocates(args) else args.world_size,
    )


def _weight_sync(
    args: MTGRPOConfig, client: VLLMServerClient, get_model: Callable[[], PreTrainedModel], accelerator: Accelerator
) -> WeightSync:
    """The sync of weights by the transport of the options; `ServerSetupError` if a server cannot be used."""
    transport = transport_of(args)
    try:
        options = transport.options(args)
        sync = WeightSync(transport, client, get_model, accelerator, verify_every=args.verify_sync_every, **options)
        sync.begin()
    except WeightSyncError as error:
        raise ServerSetupError(str(error)) from error
    return sync


# The command of a server


def command_at(host: str, port: int, args: MTGRPOConfig, model: ModelConfig) -> tuple[list[str], dict[str, str]]:
    """The command that starts a server, and its environment variables; no command line shows the key."""
    name = resolve_model(model.model_name_or_path, model.model_revision, subfolder_of(args))
    adapter = adapter_settings(name)
    if adapter is not None:  # the server holds its base
        if "r" not in adapter:
            raise ConfigError(
                f"The adapter in {name} is no LoRA adapter (`peft_type: {adapter.get('peft_type')}`), and a vLLM "
                "server takes no other: name another model, or set `use_vllm: false`."
            )
        model = replace(model, lora_r=adapter["r"])
    transport = transport_of(args)
    command = [
        str(interpreter()),
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", _served_model(resolve_base(name), args)),
        *("--host", host, "--port", str(port)),
        *("--dtype", server_dtype(args, model)),
        *("--tensor-parallel-size", str(args.vllm_tensor_parallel_size)),
        *("--middleware", GUARD),
        "--enable-prefix-caching",
        *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"),
        *("--weight-transfer-config", json.dumps({"backend": transport.server_backend})),
        # for requests under way at SIGTERM; the guard sends others away meanwhile
        *("--shutdown-timeout", str(_DRAIN)),
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
    if config is not None and IMAGE in media_tokens(config):
        # the endpoint that takes token ids with images, of pixels as the trainer's processor makes them
        command += ["--enable-scale-out", "--no-mm-device-do-normalize"]
    routes = args.replays_routes and config is not None and route_shape(config) is not None
    if args.use_cpu or not torch.cuda.is_available():
        # a seeded prompt split over two steps ends vLLM's CPU build ("CPU Generator does not use offset")
        command += ["--enforce-eager", "--no-enable-chunked-prefill"]
        layers = [] if config is None else getattr(config.get_text_config(), "layer_types", None) or []
        # with layers of linear attention, state spaces or convolutions
        stateless = ("mlp", "moe")
        if any(kind == "linear_attention" or "attention" not in kind and kind not in stateless for kind in layers):
            command.append("--no-enable-prefix-caching")  # states are cached where prompts are split only
        elif routes:
            command += ["--enable-return-routed-experts", "--no-async-scheduling"]
            environment["MT_GRPO_ROUTES"] = "1"  # see mt_grpo.vllm_plugin
        for name, value in cpu_defaults().items():
            environment[name] = os.environ.get(name, value)
    elif routes:
        command.append("--enable-return-routed-experts")
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    return command, environment


def _served_model(name: str, args: MTGRPOConfig) -> str:
    """A resolved name as a vLLM server takes it, which looks into no subfolder."""
    subfolder = subfolder_of(args)
    if subfolder is None:
        return name
    if not Path(name).is_dir():
        raise ConfigError(
            f"A vLLM server loads no subfolder of a repository of the Hub ({subfolder!r} of {name!r}): fetch it (`hf "
            f"download {name} --local-dir FOLDER`), and name the folder as the model."
        )
    return str(Path(name, subfolder))


def server_dtype(args: MTGRPOConfig, model: ModelConfig) -> str:
    """The dtype in which a server computes as the trainer does."""
    return "bfloat16" if args.bf16 else "float16" if args.fp16 else model.dtype or "auto"


def _read_config(name: str, args: MTGRPOConfig, model: ModelConfig) -> PreTrainedConfig | None:
    """The configuration of a model; `None` where none is known here: the server says what is wrong with its model."""
    try:
        where = source_options(args, model.model_revision)
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, **where)
    except (OSError, ValueError):
        return None
    return config


def check_vllm() -> None:
    """Whether servers can be started."""
    own = interpreter()
    if own == Path(sys.executable):
        found = find_spec("vllm") is not None
    else:  # wherever it has it from
        asked = "from importlib.util import find_spec; raise SystemExit(find_spec('vllm') is None)"
        found = own.exists() and subprocess.run([own, "-c", asked]).returncode == 0
    if not found:
        raise ConfigError(f"{NO_VLLM}: {INSTALL_VLLM}.")


NO_VLLM = "vLLM is neither in `.venv-vllm`, of the clone or of the current folder, nor in this environment"
INSTALL_VLLM = (
    "`python3 -m venv .venv-vllm && .venv-vllm/bin/pip install 'mt-grpo[vllm]'`; in a clone `TORCH=\"\" "
    'scripts/install.sh .venv-vllm ".[vllm]"`, or without a GPU `make server-cpu`'
)


def interpreter() -> Path:
    """The Python that servers run with."""
    own = vllm_environment() / "bin" / "python"
    return own if own.exists() else Path(sys.executable)


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(number) for number in range(torch.cuda.device_count())]


def cpu_defaults() -> dict[str, str]:
    """Variables of a server on a CPU that the user did not set; vLLM's threads would spin on the same cores."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() - 1)),
    }


# Servers on the trainer's own GPUs


def check_own_servers(args: MTGRPOConfig) -> None:
    """Whether this machine can hold the servers that a run starts. This is a collective call."""

    def check() -> None:
        check_groups(vars(args), args.world_size)
        if several_hosts(args):
            raise ConfigError(
                "`vllm_mode: colocate` starts servers for the processes of one machine, and these are on several: set "
                "`vllm_mode: server`, and start the servers with `mt-grpo serve`."
            )
        check_vllm()
        check_keys()
        if _leads(args) and not is_free(_own_port(args)):
            raise ConfigError(
                f"Port {_own_port(args)} is taken, and `vllm_mode: colocate` starts a server on it: give the run "
                "another `vllm_server_port`; its servers take that one and those after it."
            )

    if colocates(args):
        everywhere(check)


def _leads(args: MTGRPOConfig) -> bool:
    """Whether this process starts a server: the first one of each group."""
    return args.process_index % args.vllm_tensor_parallel_size == 0


def _start_own_server(args: MTGRPOConfig, model: PreTrainedModel) -> OwnServer | None:
    """Starts this process group's server, and returns when all of the run answer. This is a collective call."""

    def start() -> OwnServer | None:
        if not _leads(args):
            return None
        name = model.config.name_or_path
        if not name:
            raise ConfigError(
                "`vllm_mode: colocate` starts a server with the model, which was made without a name: save it to a "
                "folder, and give that folder as the model."
            )
        peft = model.peft_config["default"] if is_peft_model(model) else None
        kwargs = args.model_init_kwargs or {}
        about = ModelConfig(
            model_name_or_path=name,
            model_revision=kwargs.get("revision") or "main",
            dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
            lora_r=16 if peft is None else peft.r,
        )
        command, environment = command_at("127.0.0.1", _own_port(args), args, about)
        if args.device.type == "cuda":  # those of the group, for the server alone
            size = args.vllm_tensor_parallel_size
            first = args.local_process_index // size * size
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus()[first : first + size])
        if args.vllm_enable_sleep_mode:
            environment[SLEEPS] = "1"
        launched = {name for name in os.environ if name in _LAUNCHER or name.startswith(_LAUNCHERS)}
        around = {name: value for name, value in os.environ.items() if name not in launched}
        server = OwnServer(command, {**around, **environment}, f"http://127.0.0.1:{_own_port(args)}")
        try:
            server.wait(args.vllm_server_timeout)
        except BaseException:
            server.close()
            raise
        return server

    return everywhere(start)


def connect(trainer: GRPOTrainer) -> tuple[VLLMServerClient, WeightSync]:
    """The client and the sync of a trainer's servers; its own are started here, and end with the sync. Collective."""
    args, accelerator, config = trainer.args, trainer.accelerator, trainer.model.config
    client = server_client(args, trainer._tokenizer, config.name_or_path, media_tokens(config))
    own = _start_own_server(args, accelerator.unwrap_model(trainer.model)) if colocates(args) else None
    try:
        everywhere(lambda: run_here(client.connect(), accelerator.device))
        sync = _weight_sync(args, client, lambda: trainer.model, accelerator)
    except BaseException:
        if own is not None:
            own.close()
        raise
    if colocates(args):  # nobody else starts a server that is gone
        sync.client.server_timeout = GONE_TIMEOUT
        sync.client.remedy = "The run that started it has to be started again."
        if own is not None:
            sync.fleet.end_server = own.close
            sync.client.remedy += f" {own.where}"
    return client, sync
