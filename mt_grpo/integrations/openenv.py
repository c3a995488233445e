"""Servers of OpenEnv (0.10) as environments; `pip install mt-grpo[openenv]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mt_grpo.errors import ConfigError
from mt_grpo.integrations.gym import GymEnv


def openenv_server(
    url: str,
    action: Callable[[str], Any],
    observe: Callable[[Any], Any] | None = None,
    client: Callable[..., Any] | None = None,
    tag: str | None = None,
    max_turns: int | None = None,
    step_timeout: float | None = 60.0,
) -> GymEnv:
    """
    An environment behind an OpenEnv server. Each conversation has its own connection and so its own environment.
    `reset` gets the row's `seed`.

    Args:
        url (`str`): Where the server listens.
        action (`Callable`): Turns the model's text into an action: a dictionary, or an object that `client` sends.
        observe (`Callable`, *optional*): Turns an observation into what the model reads; by default its JSON.
        client (`Callable`, *optional*): The environment's client class, called with `base_url`; by default OpenEnv's
            `GenericEnvClient`, which sends and receives dictionaries.
        tag, max_turns, step_timeout: See `GymEnv`.

    Raises:
        ConfigError: If OpenEnv is not installed.
    """
    client = generic_client() if client is None else client
    return GymEnv(lambda: Server(client, url, observe or (lambda seen: seen)), action, tag, max_turns, step_timeout)


class Server:
    """An environment of the server in Gym's form. Methods are `async`, since its client belongs to one event loop."""

    def __init__(self, client: Callable[..., Any], url: str, observe: Callable[[Any], Any]) -> None:
        self._client, self._observe = client(base_url=url), observe

    async def reset(self, seed: int) -> Any:
        """Begins an episode."""
        return self._read(await self._client.reset(seed=seed))[0]

    async def step(self, action: Any) -> tuple[Any, float, bool]:
        """Sends an action."""
        return self._read(await self._client.step(action))

    async def close(self) -> None:
        """Closes the connection, which ends the environment on the server."""
        await self._client.close()

    def _read(self, result: Any) -> tuple[Any, float, bool]:
        return self._observe(result.observation), float(result.reward or 0.0), bool(result.done)


def generic_client() -> Callable[..., Any]:
    """OpenEnv's client class for any server; raises `ConfigError` if OpenEnv is not installed."""
    try:
        from openenv.core import GenericEnvClient
    except ImportError as error:
        raise ConfigError(f"OpenEnv is not installed ({error}): `pip install mt-grpo[openenv]`.") from error
    return GenericEnvClient
