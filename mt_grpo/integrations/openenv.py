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
    An environment behind an OpenEnv server. Each conversation has a connection, and with it an environment, of its
    own; the row's `seed` is passed to `reset`.

    Args:
        url (`str`): Where the server listens.
        action (`Callable`): Makes an action of the model's text: a dictionary, or what `client` sends.
        observe (`Callable`, *optional*): Makes of an observation what the model reads; JSON of it without.
        client (`Callable`, *optional*): The client class of the environment, called with `base_url`; OpenEnv's
            `GenericEnvClient`, which sends and receives dictionaries, without.
        tag, max_turns, step_timeout: See `GymEnv`.

    Raises:
        ConfigError: If OpenEnv is not installed.
    """
    if client is None:
        try:
            from openenv.core import GenericEnvClient as client
        except ImportError as error:
            raise ConfigError(f"OpenEnv is not installed ({error}): `pip install mt-grpo[openenv]`.") from error
    return GymEnv(lambda: Server(client, url, observe or (lambda seen: seen)), action, tag, max_turns, step_timeout)


class Server:
    """An environment of a server in Gym's form. Its client is used in one event loop, and its calls awaited."""

    def __init__(self, client: Callable[..., Any], url: str, observe: Callable[[Any], Any]) -> None:
        self._client, self._observe = client(base_url=url), observe

    async def reset(self, seed: int) -> Any:
        """Begins an episode."""
        return self._read(await self._client.reset(seed=seed))[0]

    async def step(self, action: Any) -> tuple[Any, float, bool]:
        """Sends an action."""
        return self._read(await self._client.step(action))

    async def close(self) -> None:
        """Ends the connection, and with it the environment on the server."""
        await self._client.close()

    def _read(self, result: Any) -> tuple[Any, float, bool]:
        return self._observe(result.observation), float(result.reward or 0.0), bool(result.done)
