"""The file of MCP servers that `mcp_servers_config_path` names: `{"mcpServers": {name: server}}`."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean
from mt_grpo.servers.addresses import expand_addresses

TRANSPORTS = {"stdio": "stdio", "sse": "sse", "http": "http", "streamable-http": "http", "streamable_http": "http"}


@dataclass(frozen=True)
class McpServerConfig:
    """
    How one MCP server is reached: by a command, over its standard input and output, or at a URL. At several URLs there
    are as many servers of the same tools.

    Args:
        name (`str`): What the file calls it.
        command (`str`, *optional*): Program to start.
        args (`list[str]`): Its arguments.
        env (`dict[str, str]`): Variables for it, beside `HOME`, `PATH` and the few others that the library passes on.
        cwd (`str`, *optional*): The folder it runs in.
        url (`str` or `list[str]`, *optional*): Where a server listens. Several as a list, or as a range,
            `http://node[1-4]:8000/mcp`.
        auth_token (`str`, *optional*): Sent as `Authorization: Bearer ...`.
        headers (`dict[str, str]`): Sent with every request.
        transport (`str`, *optional*): `"stdio"`, `"sse"` or `"http"` (streamable HTTP). Where it is not given, a URL
            that ends in `/sse` is SSE; any other is tried as streamable HTTP, then as SSE, as the specification says.
    """

    name: str
    command: str | None = None
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str | list[str] | None = None
    auth_token: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    transport: str | None = None

    @property
    def members(self) -> list[McpServerConfig]:
        """Each server by itself; raises `ConfigError` where several addresses are wrong."""
        if self.url is None or (isinstance(self.url, str) and not _SEVERAL.search(self.url)):
            return [self]
        urls = expand_addresses(self.url, f"url of the MCP server {self.name}")
        if not urls:
            raise ConfigError(f"The MCP server {self.name!r} has an empty list as its `url`: give an address.")
        return [replace(self, url=url) for url in urls]

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports to try, in this order."""
        if self.transport is not None:
            return (self.transport,)
        if self.url is None:
            return ("stdio",)
        assert isinstance(self.url, str)  # that of one of `members`
        return ("sse",) if self.url.partition("?")[0].rstrip("/").endswith("/sse") else ("http", "sse")

    @property
    def key(self) -> str:
        """Equal for servers that are one."""
        return json.dumps([getattr(self, part.name) for part in fields(self)], sort_keys=True)


_SEVERAL = re.compile(r"\[\d[\d,-]*\]|,\s*https?://")
"""What a text has that is several addresses."""

_KEYS: dict[str, Any] = {
    "command": str,
    "args": list,
    "env": dict,
    "cwd": str,
    "url": str | list,
    "auth_token": str,
    "headers": dict,
    "transport": str,
    "type": str,
}


def read_servers(path: str) -> list[McpServerConfig]:
    """
    Reads a file of MCP servers. Keys that only other programs know are left alone.

    Raises:
        ConfigError: If there is no such file, or it does not describe servers.
    """
    if not Path(path).is_file():
        raise ConfigError(f"The file of MCP servers {path!r} (`mcp_servers_config_path`) does not exist.")
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"The file of MCP servers {path!r} is not valid JSON: {error}.") from error
    servers = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ConfigError(
            f'The file of MCP servers {path!r} names no server: write `{{"mcpServers": {{"a name": {{...}}}}}}`.'
        )
    return [_server(name, entry, path) for name, entry in servers.items()]


def _server(name: str, entry: Any, path: str) -> McpServerConfig:
    where = f"The MCP server {name!r} in {path}"
    if not isinstance(entry, dict) or ("command" in entry) == ("url" in entry):
        raise ConfigError(f"{where} needs either a `command` to start it with or the `url` it listens at.")
    for key, value in entry.items():
        if key not in _KEYS:
            if difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.8):
                raise ConfigError(f"{where} has the unknown key {key!r}{did_you_mean(key, _KEYS)}.")
        elif not isinstance(value, _KEYS[key]) or (
            key == "url" and not all(isinstance(url, str) for url in value)  # a text's characters are texts
        ):
            kind = "str or list of str" if key == "url" else _KEYS[key].__name__
            raise ConfigError(f"{where} has a `{key}` that is no {kind}: {value!r}.")
    known = {key: value for key, value in entry.items() if key in _KEYS}
    transport = known.pop("type", None)
    transport = known.pop("transport", transport)
    if transport is not None:
        if transport not in TRANSPORTS:
            raise ConfigError(
                f"{where} has the transport {transport!r}{did_you_mean(transport, TRANSPORTS)}: write one of "
                f"{', '.join(TRANSPORTS)}."
            )
        if (transport == "stdio") != ("command" in entry):
            raise ConfigError(f"{where} has the transport {transport!r}: `stdio` needs a `command`, others a `url`.")
        known["transport"] = TRANSPORTS[transport]
    for key in ("env", "headers"):
        if key in known:
            known[key] = {part: str(value) for part, value in known[key].items()}
    if "args" in known:
        known["args"] = [str(argument) for argument in known["args"]]
    config = McpServerConfig(name, **known)
    config.members  # noqa: B018  # it refuses addresses that are none
    return config
