"""Addresses of several servers: lists, and ranges as schedulers of clusters write them; where vLLM is."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from mt_grpo.errors import ConfigError

LIMIT = 1024
"""Most addresses of one option: more are a mistyped range."""

_RANGE = re.compile(r"\[(\d{1,18}(?:-\d{1,18})?(?:,\d{1,18}(?:-\d{1,18})?)*)\]")
_COMMA = re.compile(r",(?![^\[\]]*\])")  # not inside a range
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_URL = re.compile(r"https?://[^\s?#]+", re.IGNORECASE)
_NAME = re.compile(r"[\w.-]+")
EVERYWHERE = ("0.0.0.0", "::")
"""What a server listens on to be reached at all addresses of its machine."""


def expand_addresses(given: str | Iterable[str], option: str) -> list[str]:
    """The addresses that an option names, each once and without a trailing slash."""
    found: dict[tuple[str, str, int, str], str] = {}
    for text in [given] if isinstance(given, str) else given:
        for part in filter(None, (piece.strip() for piece in _COMMA.split(text))):
            for url in _expand(part, option):
                key = _identity(url, option)
                if key in found:
                    raise ConfigError(
                        f"`{option}` names {url} twice{'' if found[key] == url else f', also as {found[key]}'}: leave "
                        "one of the two out."
                    )
                found[key] = url
                if len(found) > LIMIT:
                    raise ConfigError(f"`{option}: {part}` names more than {LIMIT} servers: shorten its range.")
    return list(found.values())


def host_url(host: str, port: int) -> str:
    """The URL of a server by its host and port; one that listens everywhere is asked on this machine."""
    bare = host.removeprefix("[").removesuffix("]")
    if not _NAME.fullmatch(bare) and not _is_ipv6(bare):
        raise ConfigError(
            f"`vllm_server_host: {host}` is no host: give its name or number alone, such as `node1`, and the port by "
            "itself; an address as a whole goes to `vllm_server_base_url`."
        )
    if bare in EVERYWHERE:
        bare = "127.0.0.1"
    return f"http://{f'[{bare}]' if ':' in bare else bare}:{port}"


def is_local(host: str | None) -> bool:
    """Whether a host is this machine by its loopback."""
    return host in (*_LOOPBACK, *EVERYWHERE)


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def _expand(text: str, option: str) -> Iterable[str]:
    match = _RANGE.search(text)
    if match is None:
        yield text.rstrip("/")
        return
    for part in match[1].split(","):
        first, _, last = part.partition("-")
        last = last or first
        if int(last) < int(first):
            raise ConfigError(
                f"`{option}: {text}` has a range that runs from {first} to {last}: write the smaller number first."
            )
        width = len(first) if first.startswith("0") else 0
        for number in range(int(first), int(last) + 1):
            yield from _expand(f"{text[: match.start()]}{number:0{width}d}{text[match.end() :]}", option)


def _identity(url: str, option: str) -> tuple[str, str, int, str]:
    """What two spellings of one address have in common."""
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError:
        scheme, host, port = "", None, None
    if not _URL.fullmatch(url) or not host or port == 0:
        raise ConfigError(
            f"`{option}: {url}` is no address of a server: write it as `http://HOST:PORT`, several in a list, or as a "
            "range such as `http://node[1-4]:8000`."
        )
    return (
        scheme,
        "localhost" if is_local(host) else host.rstrip("."),
        port or (443 if scheme == "https" else 80),
        parts.path,
    )


_BESIDE = Path(__file__).parents[2]
"""The folder that the package is in: the clone, if it is not installed."""


def vllm_environment() -> Path:
    """The environment that vLLM is looked for in first: `.venv-vllm` of the clone, or else of the current folder."""
    of_clone = _BESIDE / ".venv-vllm"
    return of_clone if of_clone.exists() else Path.cwd() / ".venv-vllm"
