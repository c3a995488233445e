"""Calls all servers from one process, and tells the result to the other processes."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from mt_grpo.rollout.engines.vllm.client import VLLMServerClient
from mt_grpo.rollout.engines.vllm.http import CONNECT_TIMEOUT, RequestFailed, ServerControl, ServerGoneError
from mt_grpo.rollout.engines.vllm.pool import Server
from mt_grpo.weights.update_calls import WeightSyncError

logger = logging.getLogger(__name__)

_POLL = 0.5  # seconds between looks at a server that is down


class _Seen(NamedTuple):
    """What the main process tells the others: its failure, whether each server is up and why not, what was sent."""

    failure: str | None
    states: list[tuple[bool, str]]
    checksum: str
    dtype: torch.dtype | None


class ServerRounds:
    """
    Calls all servers of a client from the main process. Afterwards all processes know the same.

    Args:
        client (`VLLMServerClient`): Its servers.
        accelerator (`Accelerator`): Its processes.
        timeout (`float`): Most seconds of a call.

    Attributes:
        dtype (`torch.dtype`, *optional*): The widest dtype of the servers' weights; `None` until it is known.
        checksum (`str`): Checksum of the weights that were sent last.
    """

    repeatable = True
    """Whether one process can send the weights again by itself."""

    def __init__(self, client: VLLMServerClient, accelerator: Accelerator, timeout: float) -> None:
        self.client = client
        self.accelerator = accelerator
        self.dtype: torch.dtype | None = None
        self.checksum = ""
        self._timeout = timeout

    def _run(self, everywhere: Any, main: Any) -> None:
        """
        Runs `everywhere` in every process, then `main` in the main one. A failure is raised in all processes. A server
        that the main one lost is left out by all, because its weights may differ from the rest. A server that the main
        one uses again, with its weights, is used again by all.
        """
        failure = None
        try:
            everywhere()
            if self.accelerator.is_main_process:
                main()
        except (RequestFailed, WeightSyncError, OSError) as error:
            failure = error
        servers = self.client.pool.servers
        seen = _Seen(
            None if failure is None else str(failure),
            [(server.up, server.fault) for server in servers],
            self.checksum,
            self.dtype,
        )
        if self.accelerator.num_processes > 1:
            told = [seen]
            broadcast_object_list(told)
            (seen,) = told
        self.checksum, self.dtype = seen.checksum, seen.dtype
        for server, (up, fault) in zip(servers, seen.states, strict=True):
            if server.up and not up:
                server.drop(fault)
            elif up and not server.up:
                server.mark_up()
        if isinstance(failure, (WeightSyncError, ServerGoneError)):
            raise failure
        if failure is not None or seen.failure is not None:
            raise WeightSyncError(seen.failure if failure is None else str(failure)) from failure

    def _each_server(self, action: Any, again: Any = None) -> None:
        """
        Does something with every server that is up, concurrently. A server that is down gets its weights when it is
        back. If all servers are lost meanwhile, `again` is done once, with those that come back.
        """
        self._wait_for_one()
        up = [server for server in self.client.pool.servers if server.up]
        if len(up) == 1:  # in this thread, which is the one that CUDA knows the device of
            failures = [self._attempt(up[0], action)]
        else:
            with ThreadPoolExecutor(len(up)) as executor:
                failures = list(executor.map(lambda server: self._attempt(server, action), up))
        if not any(server.up for server in self.client.pool.servers):
            if again is None or not self.repeatable:
                raise next(failure for failure in failures if failure is not None)
            return self._each_server(again)
        for failure in failures:
            if failure is not None and not failure.unreachable:
                raise failure

    def _attempt(self, server: Server, action: Any) -> RequestFailed | None:
        control = self._control(server.url)
        try:
            action(control)
        except RequestFailed as error:
            if error.unreachable:
                server.drop(str(error))
            return error
        finally:
            control.close()
        return None

    def _wait_for_one(self) -> None:
        """Waits until at least one server is up."""
        servers = self.client.pool.servers
        told = 0.0
        while not any(server.up for server in servers):
            for server in servers:
                control = ServerControl(server.url, self.client.api_key, CONNECT_TIMEOUT)
                try:
                    control.get("/health")
                    server.mark_up()
                except RequestFailed as error:
                    server.fault = str(error)
                finally:
                    control.close()
            waited = time.monotonic() - max(
                (one.down_since for one in servers if one.down_since is not None), default=0.0
            )
            if any(server.up for server in servers):
                return
            if waited >= self.client.server_timeout:
                raise ServerGoneError(self.client.gone())
            if waited >= told:
                logger.warning("Waiting for a vLLM server (%.0f of %.0f s).", waited, self.client.server_timeout)
                told = waited + 5.0
            time.sleep(_POLL)

    def _control(self, base_url: str) -> ServerControl:
        return ServerControl(base_url, self.client.api_key, self._timeout)
