"""
The servers of a run: each address leads to one, and to one of its own; one that comes up late joins at a weight sync.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from mt_grpo.rollout.engines.vllm.client import VLLMServerClient
from mt_grpo.servers.http import ServerControl, router_words
from mt_grpo.servers.owner import read_owner, weight_label
from mt_grpo.weights.updates import WeightSyncError, weight_version

logger = logging.getLogger(__name__)
LOOKS = 8
"""Requests that tell one server from several that answer in turn."""


class Transport(Protocol):
    """What a `WeightTransport` does for servers that join; its members are explained there."""

    client: VLLMServerClient
    run: str
    dtype: Any
    accelerator: Any

    def examine(self, server: ServerControl) -> None: ...

    def those_that(self, numbers: list[int], action: Callable[[ServerControl], None]) -> list[int]: ...

    def prove_at(self, numbers: list[int]) -> list[int]: ...


def tell_apart(each_server: Callable[..., None], run: str, urls: Iterable[str]) -> None:
    """
    Makes sure that each address leads to one server, and to one of its own: each is given a weight version of its own,
    and asked for it several times.
    """
    labels = {url: weight_label(run, f"start{number}") for number, url in enumerate(urls)}

    def look(server: ServerControl) -> None:
        for _ in range(LOOKS):
            seen = weight_version(server)
            other = next((url for url, label in labels.items() if label == seen), None)
            if other is None:
                raise WeightSyncError(router_words(server.base_url, "is several servers in turn, as behind a router"))
            if other != server.base_url:
                raise WeightSyncError(
                    f"{server.base_url} and {other} lead to the same vLLM server, or to a router: name each server "
                    "once in `vllm_server_base_url`."
                )

    def mark(server: ServerControl) -> None:
        server.post("/update_weight_version", {"new_version": labels[server.base_url]})

    def mark_and_look(server: ServerControl) -> None:
        mark(server)
        look(server)

    each_server(mark, mark)
    each_server(look, mark_and_look)


def prove_newcomers(transport: Transport) -> list[int]:
    """
    Every process: proves that weights reach servers that came up after the start, before any conversation is sent to
    them. One that cannot be used is left out.
    """
    servers = transport.client.servers
    if not any(server.awaits_proof for server in servers):
        return []
    # a context length is known of those that the client has heard and found to fit
    waiting = [number for number, server in enumerate(servers) if server.awaits_proof and server.context_length]

    def examine(server: ServerControl) -> None:
        held = read_owner(weight_version(server))
        if held is not None and held.run == transport.run and held.step != "proof":
            raise WeightSyncError(f"{server.base_url} leads to a server that this run uses already.")
        dtype = transport.dtype
        transport.examine(server)
        if transport.dtype != dtype:
            wider, transport.dtype = transport.dtype, dtype
            raise WeightSyncError(f"The vLLM server at {server.base_url} holds weights in {wider}, not {dtype}.")

    found = transport.those_that(waiting, examine)
    return transport.prove_at(found) if found else []


def take_in(transport: Transport, numbers: Iterable[int]) -> None:
    """Every process: conversations are sent to these servers from here on."""
    for number in numbers:
        server = transport.client.servers[number]
        server.awaits_proof = False
        server.mark_up()
        if transport.accelerator.is_main_process:
            logger.warning("The vLLM server at %s has joined.", server.url)
