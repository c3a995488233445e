"""`mt-grpo serve`: becomes the vLLM server that a recipe's trainer needs."""

from __future__ import annotations

import os
import shlex
from urllib.parse import urlsplit

from mt_grpo.app.recipe import Recipe
from mt_grpo.errors import ConfigError
from mt_grpo.option_rules import check_served
from mt_grpo.training.config import MTGRPOConfig
from mt_grpo.training.server_command import command_at
from mt_grpo.training.servers import server_urls
from mt_grpo.vllm_plugin.keys import check_folder


def server_command(recipe: Recipe) -> tuple[list[str], dict[str, str]]:
    """
    The command that starts a recipe's server, and the environment variables it needs; see `command_at`.

    Raises:
        ConfigError: If the recipe's server is on another machine.
    """
    host, port = _address(recipe.training)
    return command_at(host, port, recipe.training, recipe.model)


def serve(recipe: Recipe) -> None:
    """
    Prints the command and becomes it.

    Raises:
        ConfigError: If the recipe's trainer samples by itself, its server is on another machine, or it has to make up
            a key and there is no place that only this user can read.
    """
    check_served(vars(recipe.training))
    if not os.environ.get("VLLM_API_KEY"):
        try:
            check_folder()
        except PermissionError as error:
            raise ConfigError(str(error)) from error
    command, environment = server_command(recipe)
    print(" ".join([*(f"{name}={value}" for name, value in environment.items()), shlex.join(command)]), flush=True)
    os.execve(command[0], command, {**os.environ, **environment})


def _address(args: MTGRPOConfig) -> tuple[str, int]:
    if not args.vllm_server_base_url:
        return args.vllm_server_host, args.vllm_server_port
    urls = server_urls(args)
    parts = urlsplit(urls[0])
    if len(urls) > 1 or parts.hostname not in ("127.0.0.1", "localhost"):
        raise ConfigError(
            f"`vllm_server_base_url: {args.vllm_server_base_url}` is not one server on this machine: start each on "
            "its own machine, with `--vllm_server_base_url ''`, `--vllm_server_host` and `--vllm_server_port`."
        )
    return parts.hostname, parts.port or 80
