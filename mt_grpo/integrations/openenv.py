"""Servers of OpenEnv (0.10) as environments; `pip install mt-grpo[openenv]`."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import json
import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx

from mt_grpo.envs import Outcome, Policy
from mt_grpo.envs.env import ServedEnv
from mt_grpo.envs.source import environment
from mt_grpo.errors import ConfigError, describe_error
from mt_grpo.imports import need_library
from mt_grpo.integrations.gym import GymEnv, imported
from mt_grpo.options.table import Values
from mt_grpo.servers import expand_addresses
from mt_grpo.servers.external import MAX_STARTING, EnvServerPool, Full, ServerLost, Unreachable, ask, backoff, in_words
from mt_grpo.trajectory import Row

logger = logging.getLogger(__name__)

_KIND = "OpenEnv server"
CHECK_SECONDS = 10.0  # how long servers may take to come up before a run
_BUSY = (429, 502, 503, 504)  # statuses of a server, or of a proxy in front of it, that may take a connection later


def openenv_server(
    url: str | list[str] | None = None,
    *,
    action: Callable[[str], object],
    observe: Callable[[Any], object] | None = None,
    client: Callable[..., Any] | None = None,
    tag: str | None = None,
    max_turns: int | None = None,
    step_timeout: float | None = 60.0,
) -> OpenEnv:
    """
    An environment behind an OpenEnv server, or behind several. Each conversation has its own connection and so its
    own environment, which ends with the connection, also where the trainer dies. `reset` gets the row's `seed`.

    Of several servers a conversation gets the one with the fewest. One that cannot be reached when a conversation
    begins is passed over; one that dies ends the conversations that are on it, and no other. Where all are full,
    conversations wait.

    Args:
        url (`str` or `list[str]`, *optional*): Where the server listens. Several as a list, separated by commas, or as
            a range, `http://node[1-4]:8000`. The run's option `environment_urls` takes its place.
        action (`Callable`): Turns the model's text into an action: a dictionary, or an object that `client` sends.
        observe (`Callable`, *optional*): Turns an observation into what the model reads; by default its JSON.
        client (`Callable`, *optional*): The environment's client class, called with `base_url`; by default OpenEnv's
            `GenericEnvClient`, which sends and receives dictionaries.
        tag, max_turns, step_timeout: See `GymEnv`.

    Raises:
        ConfigError: If OpenEnv is not installed, or an address is none.
    """
    urls = [] if url is None else _addresses(url, "url")
    client = generic_client() if client is None else client
    options = {"parse": action, "tag": tag, "max_turns": max_turns, "step_timeout": step_timeout}
    return OpenEnv(urls, client, observe or (lambda seen: seen), **options)


@environment("openenv")
def _openenv_of_options(options: Values) -> OpenEnv:
    """`openenv_server` with the keys of `env: {type: openenv}`."""
    return openenv_server(**imported(options["env"]))


class OpenEnv(GymEnv, ServedEnv):
    """A conversation with an environment behind OpenEnv servers; `openenv_server` makes it."""

    def __init__(
        self, urls: list[str], client: Callable[..., Any], observe: Callable[[Any], object], **options: Any
    ) -> None:
        super().__init__(self._game, **options)
        self.reset_timeout = None  # the wait for a place counts toward no timeout
        self.client, self.observe, self.option = client, observe, "url"
        self.pool = EnvServerPool(urls, _KIND)

    def at(self, urls: str | list[str]) -> OpenEnv:
        """The same environment at the addresses of `environment_urls`; raises `ConfigError` if one is none."""
        env = copy.copy(self)
        env.make, env.option = env._game, "environment_urls"
        env.pool = EnvServerPool(_addresses(urls, env.option), _KIND)
        return env

    async def run(self, policy: Policy, row: Row) -> Outcome:
        """`GymEnv`'s loop; the connection is closed at its end, since other conversations may wait for room."""
        try:
            return await super().run(policy, row)
        finally:
            if self.user_environment is not None:
                await self.user_environment.close()

    async def check(self) -> dict[str, str]:
        """Connects to each server once. Servers that cannot be reached are named in a warning, unless none can."""
        urls, name = self._urls(), self.option
        limit = asyncio.Semaphore(MAX_STARTING)

        async def reach(url: str) -> Exception | None:
            async with limit:
                return await _fault(self.client, url)

        found = dict(zip(urls, await asyncio.gather(*map(reach, urls)), strict=True))
        faults = {url: fault for url, fault in found.items() if fault is not None}
        for url, fault in faults.items():
            if _is_foreign(fault):
                raise ConfigError(
                    f"`{name}: {url}` is no OpenEnv server ({_why(fault)}): correct the address, or start the "
                    "environment's server there."
                )
        why = {url: _why(fault) for url, fault in faults.items()}
        said = in_words(why)
        if len(why) == len(urls):
            which = f"the server of `{name}`" if len(urls) == 1 else f"any of the {len(urls)} servers of `{name}`"
            raise ConfigError(f"Cannot reach {which} ({said}): start it, or correct the address.")
        await _compare([url for url in urls if url not in why], name)
        if why:
            self.pool.rest(why)
            logger.warning(
                "%d of the %d servers of `%s` cannot be reached (%s). The run goes on with the others; conversations "
                "go there once it answers.",
                len(why),
                len(urls),
                name,
                said,
            )
        return why

    def _urls(self) -> list[str]:
        if not self.pool.urls:
            raise ConfigError(
                "The OpenEnv environment has no address: set `environment_urls`, as `http://HOST:PORT`, or give "
                "`openenv_server` a `url`."
            )
        return self.pool.urls

    def _game(self) -> _Game:
        self._urls()
        return _Game(self.client, self.pool, self.observe, self.call_timeout)


class _Game:
    """An environment of a server in Gym's form. Methods are `async`, since its client belongs to one event loop."""

    def __init__(
        self, make: Callable[..., Any], pool: EnvServerPool, observe: Callable[[Any], object], timeout: float | None
    ) -> None:
        self._make, self._pool, self._observe, self._timeout = make, pool, observe, timeout
        self._client: Any = None
        self._connection: object = None
        self._url: str | None = None
        self._lost: str | None = None

    async def reset(self, seed: int) -> object:
        """Begins an episode on the server with the fewest that can be reached and has room."""
        self._url, (self._client, result) = await self._pool.begin(partial(self._begin, seed), self._timeout)
        self._connection = _connection(self._client)
        return self._read(result)[0]

    async def _begin(self, seed: int, url: str) -> tuple[Any, Any]:
        client = self._make(base_url=url)
        begun = False
        try:
            async with asyncio.timeout(self._timeout) as limit:
                result = await client.reset(seed=seed)
            begun = True
            return client, result
        except TimeoutError as error:
            if not limit.expired():
                raise Unreachable(_why(error)) from error
            raise TimeoutError(f"`reset` of the {_KIND} at {url} took longer than {self._timeout:g} s.") from error
        except _connection_errors() as error:  # nothing has begun there
            raise Unreachable(_why(error)) from error
        except RuntimeError as error:  # what the client makes of an error that the server answers
            if "CAPACITY_REACHED" in str(error):
                raise Full from error
            if any(code in str(error) for code in ("FACTORY_ERROR", "SESSION_ERROR")):
                raise Unreachable(str(error)) from error
            raise
        finally:
            if not begun:
                with contextlib.suppress(*_connection_errors()):
                    await client.close()

    async def step(self, action: object) -> tuple[object, object, bool]:
        """Sends an action; raises `ServerLost` if the connection is gone, and the environment with it."""
        try:
            result = await self._client.step(action)
        except _connection_errors() as error:
            raise self._gone(_why(error)) from error
        except RuntimeError:  # what the environment raised
            self._check_connection()
            raise
        self._check_connection()
        return self._read(result)

    async def close(self) -> None:
        """Closes the connection, which ends the environment on the server."""
        url, self._url = self._url, None
        if url is not None:
            try:
                with contextlib.suppress(*_connection_errors()):  # the server has ended it
                    await self._client.close()
            finally:
                self._pool.give(url, self._lost)

    def _check_connection(self) -> None:
        """A client whose connection was closed connects again by itself: to an environment without a reset."""
        if _connection(self._client) is not self._connection:
            raise self._gone("it closed the connection")

    def _gone(self, why: str) -> ServerLost:
        self._lost = why
        return ServerLost(f"The {_KIND} at {self._url}, which this conversation used, is gone: {why}.")

    def _read(self, result: Any) -> tuple[object, object, bool]:
        try:
            seen = self._observe(result.observation)
        except Exception as error:  # the user's function; the action is not to blame
            raise RuntimeError(f"`observe` raised {describe_error(error)}") from error
        return seen, result.reward, bool(result.done)


def _addresses(given: str | list[str], option: str) -> list[str]:
    urls = expand_addresses(given, option)
    if not urls:
        raise ConfigError(f"`{option}` gives `openenv_server` no address: write one as `http://HOST:PORT`.")
    return urls


async def _fault(make: Callable[..., Any], url: str) -> Exception | None:
    """Why no connection to a server could be made; `None` if one could."""
    deadline = time.monotonic() + CHECK_SECONDS
    for attempt in itertools.count():
        client = make(base_url=url)
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await client.connect()
        except _connection_errors() as error:
            pause = backoff(attempt)
            if _is_foreign(error) or time.monotonic() + pause > deadline:
                return error
            await asyncio.sleep(pause)
        else:
            await client.close()
            return None
    return None


async def _compare(urls: list[str], option: str) -> None:
    """Refuses servers of different environments, as far as they show what they take."""
    async with httpx.AsyncClient(headers={"Accept-Encoding": "gzip"}) as http:

        async def schema(url: str) -> str | None:
            try:
                answer = await ask(http, "GET", f"{url}/schema", CHECK_SECONDS)
                return json.dumps(answer.json(), sort_keys=True) if answer.response.status_code == 200 else None
            # such as behind a door that only the client's headers open; or brackets that are too deep
            except (httpx.HTTPError, ValueError, RecursionError):
                return None

        schemas = await asyncio.gather(*map(schema, urls))
    shown = [(url, text) for url, text in zip(urls, schemas, strict=True) if text is not None]
    for url, text in shown[1:]:
        if text != shown[0][1]:
            raise ConfigError(
                f"`{option}` names servers of different environments: {shown[0][0]} and {url} take other actions or "
                "show other observations; name servers of one."
            )


def _connection(client: object) -> object:
    """The connection of OpenEnv's client, which has no public name."""
    return vars(client).get("_ws")


def _of_websockets(name: str) -> tuple[type[Exception], ...]:
    """An exception of the library that OpenEnv's clients connect with; none if no client has imported it."""
    module = sys.modules.get("websockets.exceptions")
    return () if module is None else (vars(module)[name],)


def _connection_errors() -> tuple[type[Exception], ...]:
    return (OSError, *_of_websockets("WebSocketException"))


def _is_foreign(error: Exception) -> bool:
    """Whether a connection failed since something else answered."""
    cause = error.__cause__
    if isinstance(cause, _of_websockets("InvalidStatus")):
        refusal: Any = cause
        return refusal.response.status_code not in _BUSY
    return isinstance(cause, _of_websockets("InvalidHandshake"))


def _why(error: Exception) -> str:
    cause = error.__cause__
    return describe_error(cause if type(error) is ConnectionError and cause is not None else error)


def generic_client() -> Callable[..., Any]:
    """OpenEnv's client class for any server; raises `ConfigError` if OpenEnv is not installed."""
    need_library("openenv", "A server of OpenEnv", "mt-grpo[openenv]")
    from openenv.core import GenericEnvClient

    return GenericEnvClient
