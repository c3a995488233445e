"""`mt-grpo serve`: becomes the vLLM server that a recipe's trainer needs, or starts several."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

import torch

from mt_grpo.app.recipe import Recipe
from mt_grpo.errors import ConfigError
from mt_grpo.options.rules import check_served
from mt_grpo.servers.addresses import EVERYWHERE, expand_addresses, host_url, is_local
from mt_grpo.servers.start import Replica, check_keys, run_replicas, share_gpus
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.servers import command_at, visible_gpus


def server_command(recipe: Recipe) -> tuple[list[str], dict[str, str]]:
    """The command that starts a recipe's server, and the environment variables it needs; see `command_at`."""
    host, port = _addresses(recipe.training, None)[0]
    return command_at(host, port, recipe.training, recipe.model)


def serve(recipe: Recipe, replicas: int | None = None) -> int:
    """
    Prints the command and becomes it; of several servers prints all commands, and waits until the servers have ended.
    """
    args = recipe.training
    check_served(vars(args))
    check_keys()
    addresses = _addresses(args, replicas)
    if len(addresses) == 1:
        command, environment = server_command(recipe)
        print(Replica("", command, environment).line, flush=True)
        os.execve(command[0], command, {**os.environ, **environment})
        return 1
    found = []
    shares = _shares(args, len(addresses))
    for (host, port), share in zip(addresses, shares, strict=True):
        command, environment = command_at(host, port, args, recipe.model)
        found.append(Replica(host_url(host, port, "vllm_server_host"), command, environment | share))
    if not expand_addresses(args.vllm_server_base_url or [], "vllm_server_base_url"):
        host, first = addresses[0]
        host = "THIS_MACHINE" if host in EVERYWHERE else f"[{host}]" if ":" in host else host
        print(f"The trainer finds them with `--vllm_server_base_url http://{host}:[{first}-{addresses[-1][1]}]`.")
    return run_replicas(found)


def _addresses(args: MTGRPOConfig, replicas: int | None) -> list[tuple[str, int]]:
    """Hosts and ports of the servers that are started here."""
    urls = expand_addresses(args.vllm_server_base_url or [], "vllm_server_base_url")
    if not urls:
        host = args.vllm_server_host.strip("[]")
        return [(host, args.vllm_server_port + number) for number in range(replicas or 1)]
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
