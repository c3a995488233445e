"""Calls of all servers of a run: concurrent, with failures that every process learns of."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from accelerate.utils import gather_object

from mt_grpo.concurrency import run as wait
from mt_grpo.errors import ServerGoneError, WeightSyncError
from mt_grpo.servers.http import RequestFailed, Server, ServerControl, wait_for_servers
from mt_grpo.weights.transport import Payload, Source

logger = logging.getLogger(__name__)

Action = Callable[[ServerControl], None]


class _Report(NamedTuple):
    """
    What a process tells the others: its failure, as the kind and the words of an error, and the state. That of the
    main process counts: which servers are up and why not, and what was packed.
    """

    failure: tuple[type[Exception], str] | None
    states: list[tuple[bool, str]]
    payload: Payload | None
    dtype: torch.dtype | None


def _told(failure: BaseException, rank: int) -> tuple[type[Exception], str]:
    """The kind and the words of the error that other processes raise."""
    if isinstance(failure, (WeightSyncError, ServerGoneError)):
        return type(failure), str(failure)
    return RuntimeError, f"Process {rank} failed:\n{''.join(traceback.format_exception(failure))}"


class Fleet:
    """
    The servers of a run as the main process calls them. Every process calls `run` and `those_that` at the same points,
    and knows afterwards what failed, which servers are left out, and what was packed.
    """

    def __init__(self, source: Source, repeatable: bool) -> None:
        self._repeatable = repeatable
        self._source, self._client, self._accelerator = source, source.client, source.accelerator
        self.payload: Payload | None = None
        """What was packed last."""
        self.synced = False
        """Whether servers have weights: one that came up later is proved before it counts."""
        self.end_server: Callable[[], None] | None = None
        """Ends the server that this process started, if it did."""

    def run(self, main: Callable[[], None], everywhere: Callable[[], None] | None = None) -> None:
        """
        Runs `everywhere` in every process, then `main` in the main one. A failure, of whatever kind, is raised in all
        processes. A server that the main one lost is left out by all, because its weights may differ from the rest. A
        server that the main one uses again, with its weights, is used again by all.
        """
        failure: BaseException | None = None
        try:
            if everywhere is not None:
                everywhere()
            if self._accelerator.is_main_process:
                main()
        except (WeightSyncError, ServerGoneError) as error:
            failure = error
        except (RequestFailed, OSError) as error:
            failure = WeightSyncError(str(error))
            failure.__cause__ = error
        except (Exception, SystemExit) as error:  # a defect: the others would wait for this process
            failure = error
        servers = self._client.servers
        seen = _Report(
            None if failure is None else _told(failure, self._accelerator.process_index),
            [(server.up, server.fault) for server in servers],
            self.payload,
            self._source.dtype,
        )
        every = gather_object([seen]) if self._accelerator.num_processes > 1 else [seen]
        seen = every[0]
        self.payload, self._source.dtype = seen.payload, seen.dtype
        for server, (up, fault) in zip(servers, seen.states, strict=True):
            if server.up and not up:
                server.drop(fault)
            elif up and not server.up:
                server.mark_up()
        failures = [(rank, each.failure) for rank, each in enumerate(every) if each.failure is not None]
        if not failures:
            return
        rank, (kind, words) = failures[0]  # also where this process failed as well: all end for the same reason
        if failure is not None and rank == self._accelerator.process_index:
            raise failure
        raise kind(words) from failure

    def those_that(self, numbers: Iterable[int], action: Action) -> list[int]:
        """Every process: which servers the main process could do something with. A failure ends nothing."""
        done: list[int] = []

        def each() -> None:
            for number in numbers:
                server = self._client.servers[number]
                try:
                    action(self._source.control(server.url))
                    done.append(number)
                except (RequestFailed, WeightSyncError) as error:
                    server.fault = str(error)
                    logger.warning("The run goes on without the vLLM server at %s: %s", server.url, error)

        self.run(each)
        return self._source.from_main(lambda: done)

    def each(self, action: Action, again: Action | None = None) -> None:
        """
        Does something with every server that is up, concurrently. A server that is down gets its weights when it is
        back. If all servers are lost meanwhile, `again` is done once, with those that come back.
        """
        self._wait_for_one()
        up = [server for server in self._client.servers if server.up]
        if len(up) == 1:  # in this thread, which is the one that CUDA knows the device of
            failures = [self.attempt(up[0], action)]
        else:
            with ThreadPoolExecutor(len(up)) as executor:
                failures = list(executor.map(lambda server: self.attempt(server, action), up))
        if not any(server.up for server in self._client.servers):
            if again is None or not self._repeatable:
                first = next(failure for failure in failures if failure is not None)
                if self.end_server is not None:  # nobody else starts it again
                    raise WeightSyncError(f"{first} {self._client.remedy}") from first
                raise first
            return self.each(again)
        for server, failure in zip(up, failures, strict=True):
            if failure is not None and server.up:
                raise failure

    def attempt(self, server: Server, action: Action) -> RequestFailed | WeightSyncError | None:
        """Does something with a server. One that does not answer, or whose health fails then too, is left out."""
        control = self._source.control(server.url)
        try:
            action(control)
        except (RequestFailed, WeightSyncError) as error:
            if (isinstance(error, RequestFailed) and error.unreachable) or not control.healthy():
                server.drop(str(error))
            return error
        return None

    def _wait_for_one(self) -> None:
        """Waits until at least one server is up."""
        every = self._client.servers
        if any(server.up for server in every):
            return
        servers = [server for server in every if not (self.synced and server.awaits_proof)]
        since = max(server.down_since for server in servers if server.down_since is not None)
        silent = wait(wait_for_servers(servers, 1, since, self._client.server_timeout, logger.warning))
        if len(silent) == len(servers):
            raise ServerGoneError(self._client.gone())
        for server in servers:
            if server not in silent:
                server.mark_up()
