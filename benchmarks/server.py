"""A real vLLM server for the benchmarks, started with the command that `mt-grpo serve` runs."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from processes import ended_by_sigterm
from support.loopback import free_port
from support.servers import ServerProcess, get, metric

from mt_grpo.app.build import Recipe, build_recipe
from mt_grpo.app.request import read_request
from mt_grpo.app.serve import server_command
from mt_grpo.training.servers import GUARD

__all__ = ["block_size", "metric", "read", "serve"]

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart_vllm.yaml"


def read(model: str, *options: str) -> Recipe:
    """`recipes/quickstart_vllm.yaml` with another model, further options, and a port that is free."""
    port = str(free_port())
    arguments = ["--config", str(RECIPE), "--model_name_or_path", model, "--vllm_server_host", "127.0.0.1"]
    return build_recipe(read_request([*arguments, "--vllm_server_port", port, *options]))


@contextlib.contextmanager
def serve(recipe: Recipe, *flags: str, guard: str = GUARD) -> Iterator[str]:
    """
    The recipe's server, as long as the context lasts; yields its URL. Its last words are shown when anything fails.

    Args:
        recipe (`Recipe`): On this machine.
        flags (`str`): Further flags of vLLM, after those of `mt-grpo serve`.
        guard (`str`): The class that stands before its endpoints.

    Raises:
        RuntimeError: If it ends or is not up in time.
    """
    command, environment = server_command(recipe)
    command[command.index(GUARD)] = guard
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        server = ServerProcess([*command, *flags], recipe.training.vllm_server_port, log, environment)
        with ended_by_sigterm():
            try:
                yield server.start().url
            except Exception:
                print(server.last_words(), file=sys.stderr)
                raise
            finally:
                server.stop()


def block_size(url: str) -> int:
    """Tokens of one block of the server's cache."""
    return int(re.search(r'cache_config_info\{[^}]*block_size="(\d+)"', get(url, "/metrics").text)[1])
