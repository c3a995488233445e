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
from mt_grpo.rollout.engines.vllm.http import ServerControl
from mt_grpo.weights.transport import WeightTransport
from mt_grpo.weights.updates import check_lease
from mt_grpo.weights.weight_file import FullParameters, exhaust

BUCKET = 2**28
"""Bytes that are gathered before they are sent. The server needs as much memory beside its model."""

Walk = Iterator[tuple[str, torch.Tensor]]
"""Names and whole tensors. A tensor may change when the walk continues."""


class BucketTransport(WeightTransport):
    """
    Sends weights in buckets. All processes finish gathering a bucket before the main one has the servers take it. A
    failure ends all processes at the same bucket.
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
    def _deliver(self, servers: list[ServerControl], bucket: Any) -> None:
        """The main process: has the servers take a bucket."""

    def _gather(self, step: int | None) -> None:
        """Also sends the weights."""
        servers: list[ServerControl] = []
        with contextlib.ExitStack() as update:

            def begin_update() -> None:
                self._wait_for_one()
                servers.extend(self._control(server.url) for server in self.client.pool.servers)
                for server in servers:
                    check_lease(server, self.run)
                    update.enter_context(self._updating(server, step))

            # before anyone walks over the parameters, which all must do or none
            self._run(begin_update)
            self._parameters.model, self._parameters.dtype = self.get_model(), self.dtype
            self._parameters.changed = self.changed
            walk = iter(self._parameters)
            try:
                while bucket := self._take(walk):
                    self._run(functools.partial(self._deliver, servers, bucket))
            finally:  # gathering the rest takes all processes
                exhaust(walk)

    def _finish(self) -> None:
        """Every process: waits until all of them have their part of a bucket."""
        if self.accelerator.device.type == "cuda":
            torch.accelerator.synchronize()
        self.accelerator.wait_for_everyone()

    def _push(self, server: ServerControl, step: int | None) -> None:
        """Does nothing: `_gather`, in which every process takes part, has sent the weights."""
