"""Servers of OpenEnv (0.10) as environments; `pip install mt-grpo[openenv]`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from mt_grpo.addresses import expand_addresses
from mt_grpo.concurrency import ConcurrencyLimit
from mt_grpo.errors import ConfigError
from mt_grpo.integrations.gym import GymEnv

STARTS = 16
"""Environments that a server makes at once; others wait for their turn."""
REST = 30.0
"""Seconds in which a server that could not be reached is asked only if no other is left."""


def openenv_server(
    url: str | list[str],
    action: Callable[[str], Any],
    observe: Callable[[Any], Any] | None = None,
    client: Callable[..., Any] | None = None,
    tag: str | None = None,
    max_turns: int | None = None,
    step_timeout: float | None = 60.0,
) -> GymEnv:
    """
    An environment behind an OpenEnv server, or behind several. Each conversation has its own connection and so its
    own environment, which ends with the connection, also where the trainer dies. `reset` gets the row's `seed`.

    Of several servers a conversation gets the one with the fewest. One that cannot be reached when a conversation
    begins is passed over; one that dies ends the conversations that are on it, and no other.

    Args:
        url (`str` or `list[str]`): Where the server listens. Several as a list, separated by commas, or as a range,
            `http://node[1-4]:8000`.
        action (`Callable`): Turns the model's text into an action: a dictionary, or an object that `client` sends.
        observe (`Callable`, *optional*): Turns an observation into what the model reads; by default its JSON.
        client (`Callable`, *optional*): The environment's client class, called with `base_url`; by default OpenEnv's
            `GenericEnvClient`, which sends and receives dictionaries.
        tag, max_turns, step_timeout: See `GymEnv`.

    Raises:
        ConfigError: If OpenEnv is not installed, or an address is none.
    """
    pool = Pool(expand_addresses(url, "url"))
    client = generic_client() if client is None else client
    return GymEnv(lambda: Server(client, pool, observe or (lambda seen: seen)), action, tag, max_turns, step_timeout)


class Pool:
    """
    Servers of one environment, for all event loops of the process.

    Args:
        urls (`Iterable[str]`): Their addresses, at least one.

    Raises:
        ConfigError: If there is none.
    """

    def __init__(self, urls: Iterable[str]) -> None:
        self._open = dict.fromkeys(urls, 0)
        if not self._open:
            raise ConfigError("`openenv_server` was given no address: give one as `http://HOST:PORT`.")
        self._rests: dict[str, float] = {}
        self._lock = threading.Lock()
        self.starts = {url: ConcurrencyLimit(STARTS) for url in self._open}

    def take(self, tried: Iterable[str] = ()) -> str | None:
        """The server with the fewest environments that is none of `tried`; `None` if there is no other."""
        with self._lock:
            left = [url for url in self._open if url not in set(tried)]
            if not left:
                return None
            now = time.monotonic()
            chosen = min(left, key=lambda url: (self._rests.get(url, 0.0) > now, self._open[url]))
            self._open[chosen] += 1
            return chosen

    def give(self, url: str, lost: bool = False) -> None:
        """An environment on a server is over; `lost`: since the server could not be reached."""
        with self._lock:
            self._open[url] -= 1
            if lost:
                self._rests[url] = time.monotonic() + REST


class Server:
    """An environment of a server in Gym's form. Methods are `async`, since its client belongs to one event loop."""

    def __init__(self, make: Callable[..., Any], pool: Pool, observe: Callable[[Any], Any]) -> None:
        self._make, self._pool, self._observe = make, pool, observe
        self._client: Any = None
        self._url: str | None = None

    async def reset(self, seed: int) -> Any:
        """Begins an episode on the server with the fewest that can be reached."""
        tried: list[str] = []
        failure: OSError | None = None
        while (url := self._pool.take(tried)) is not None:
            tried.append(url)
            self._url, self._client = url, self._make(base_url=url)
            async with self._pool.starts[url]:
                try:
                    return self._read(await self._client.reset(seed=seed))[0]
                except OSError as error:  # no connection: nothing has begun there
                    failure = error
            with contextlib.suppress(OSError):
                await self._client.close()
            self._pool.give(url, lost=True)
            self._url = self._client = None
        assert failure is not None
        raise failure

    async def step(self, action: Any) -> tuple[Any, float, bool]:
        """Sends an action."""
        return self._read(await self._client.step(action))

    async def close(self) -> None:
        """Closes the connection, which ends the environment on the server."""
        url, self._url = self._url, None
        if url is not None:
            self._pool.give(url)
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
