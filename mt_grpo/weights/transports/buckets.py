"""What transports have in common that send weights bucket by bucket, while all processes gather them."""

from __future__ import annotations

import contextlib
import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator

from mt_grpo.rollout.engines.vllm.client import VLLMServerClient
from mt_grpo.servers.http import RequestFailed, ServerControl
from mt_grpo.weights.transport import WeightTransport
from mt_grpo.weights.updates import check_owner
from mt_grpo.weights.weight_file import FullParameters, exhaust

BUCKET = 2**28
"""Bytes that are gathered before they are sent. The server needs as much memory beside its model."""

Walk = Iterator[tuple[str, torch.Tensor]]
"""Names and whole tensors. A tensor may change when the walk continues."""


class BucketTransport(WeightTransport):
    """
    Sends weights in buckets. All processes finish gathering a bucket before the main one has the servers take it. A
    failure ends all processes at the same bucket. No process can send the weights again by itself.
    """

    repeatable = False

    def __init__(
        self, client: VLLMServerClient, get_model: Callable[[], Any], accelerator: Accelerator, **options: Any
    ) -> None:
        super().__init__(client, get_model, accelerator, **options)
        self._parameters = FullParameters(get_model(), accelerator)

    @abstractmethod
    def _take(self, walk: Walk) -> Any:
        """Every process: gathers the next bucket; something false at the end of the walk."""

    @abstractmethod
    def _deliver(self, server: ServerControl, bucket: Any) -> None:
        """The main process: has a server take a bucket."""

    def _gather(self, step: int | None) -> None:
        """
        Also sends the weights. Of several servers, one that dies meanwhile is left out, and taken back at a later sync
        if it is well: not where servers sleep, as nobody knows which memory it has, or while conversations go on.
        """
        updates: dict[str, contextlib.ExitStack] = {}

        def begin_all() -> None:
            for server in [] if self.asleep or self.in_flight else self.client.servers:
                if not (server.up or server.awaits_proof) and self._control(server.url).healthy(repeat=False):
                    server.mark_up()
            self._each_server(begin)

        def begin(server: ServerControl) -> None:
            check_owner(server, self.run)
            with contextlib.ExitStack() as update:
                update.enter_context(self._updating(server, step))
                updates[server.base_url] = update.pop_all()

        def end(server: ServerControl) -> None:
            updates.pop(server.base_url).close()

        failure: BaseException = RequestFailed("It is left out.", True)
        try:
            # before anyone walks over the parameters, which all must do or none
            self._run(begin_all)
            self._parameters.model, self._parameters.dtype = self.get_model(), self.dtype
            self._parameters.changed = self.changed
            walk = iter(self._parameters)
            try:
                while bucket := self._take(walk):
                    self._run(functools.partial(self._each_server, functools.partial(self._deliver, bucket=bucket)))
            finally:  # gathering the rest takes all processes
                exhaust(walk)
            self._run(lambda: self._each_server(end))
        except BaseException as error:
            failure = error
            raise
        finally:
            for update in updates.values():  # a server that is left in a pause would answer nobody
                with contextlib.suppress(type(failure)):
                    update.__exit__(type(failure), failure, failure.__traceback__)

    def _finish(self) -> None:
        """Every process: waits until all of them have their part of a bucket."""
        if self.accelerator.device.type == "cuda":
            torch.accelerator.synchronize()
        self.accelerator.wait_for_everyone()

    def _push(self, server: ServerControl, step: int | None) -> None:
        """Does nothing: `_gather`, in which every process takes part, has sent the weights."""
