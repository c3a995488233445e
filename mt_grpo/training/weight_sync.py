"""From the trainer's weights to the server's, and the proof that they arrived."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from trl.distributed import DistributedBackend

from mt_grpo.rollout.vllm_client import VLLMServerClient
from mt_grpo.rollout.vllm_http import CONNECT_TIMEOUT, RequestFailed, ServerControl, ServerGoneError
from mt_grpo.rollout.vllm_pool import Server
from mt_grpo.training.weight_probe import compare, probe_ids, server_logprobs, trainer_logprobs
from mt_grpo.training.weight_push import WeightSyncError

logger = logging.getLogger(__name__)

_POLL = 0.5  # seconds between looks at a server that is down


class WeightSync(Protocol):
    """Brings weights to the servers of a client. Every process calls `sync` and `verify` at the same points."""

    def sync(self, step: int) -> None:
        """
        Makes the servers sample with the trainer's weights as they are after optimiser step `step`.

        Raises:
            WeightSyncError: If they do not, in every process.
        """
        ...

    def restore(self, base_url: str) -> None:
        """
        Brings the weights of the latest `sync` to a server that was restarted, and verifies them. Any process calls
        it, whenever it finds such a server: the others may be waiting for it in a collective.
        """
        ...

    def close(self) -> None:
        """Removes what the transfer left behind."""
        ...


class ServerSync:
    """
    What all ways have in common: rank 0 talks to the servers, every rank learns how it went and who is left out.

    Args:
        client (`VLLMServerClient`): Its servers are synced; its version and `restore` are set.
        get_model (`Callable[[], PreTrainedModel]`): Returns the trainer's model as it is wrapped at the moment.
        accelerator (`Accelerator`): Its accelerator.
        verify_every (`int`, *optional*, defaults to `50`): The first sync and then every so many are verified.
        tolerance (`float`, *optional*): Largest mean absolute difference of a probe token's log-probability, in nats;
            1e-3 where all is computed in float32, 0.1 elsewhere.
        timeout (`float`, *optional*, defaults to `300.0`): Seconds one call of a server may take.
    """

    _push: Callable[..., None]
    """Sends the weights of `step` to `server`; each way's own method."""

    repeatable = True
    """Whether one process can send the weights again by itself."""

    def __init__(
        self,
        client: VLLMServerClient,
        get_model: Callable[[], Any],
        accelerator: Accelerator,
        *,
        verify_every: int = 50,
        tolerance: float | None = None,
        timeout: float = 300.0,
    ) -> None:
        self.client = client
        self.get_model = get_model
        self.accelerator = accelerator
        self.verify_every = verify_every
        if tolerance is None:
            wide = next(get_model().parameters()).dtype.itemsize >= 4 and accelerator.mixed_precision == "no"
            tolerance = 1e-3 if wide else 0.1
        self.tolerance = tolerance
        self.num_syncs = 0
        self._probe = probe_ids(accelerator.unwrap_model(get_model()).config.get_text_config().vocab_size)
        self._expected: list[float] = []
        backend = DistributedBackend(accelerator)
        # elsewhere a forward takes every process, or a thread that knows its device, and costs little
        self._scores_late = accelerator.device.type == "cpu" and not (backend.is_fsdp or backend.is_zero3)
        self._timeout = timeout
        self._lock = threading.Lock()  # a server that is restarted is restored from another thread
        client.restore = self.restore

    def sync(self, step: int) -> None:
        """See `WeightSync.sync`."""
        with self._lock:
            self.accelerator.wait_for_everyone()  # until no process brings a server the weights of before
            push = functools.partial(self._push, step=step)
            self._run(lambda: self._gather(step), lambda: self._each_server(push, push))
            self.client.weight_version = step
            for server in self.client.pool.servers:
                server.fingerprint = None
            self._pushed(step)
            self._expected = []
            due = self.num_syncs % self.verify_every == 0
            if due or not self._scores_late:  # a server that is restarted is verified while other processes are busy
                self._expected = trainer_logprobs(self.get_model(), self._probe)
            if due:
                self._verify()
            self.num_syncs += 1

    def verify(self) -> None:
        """
        Scores a probe sequence with the trainer and with every server.

        Raises:
            WeightSyncError: In every process, if they differ by more than `tolerance`; with both numbers.
        """
        with self._lock:
            self._expected = trainer_logprobs(self.get_model(), self._probe)
            self._verify()

    def _verify(self) -> None:
        self._run(lambda: None, lambda: self._each_server(self._compare, self._push_and_compare))

    def restore(self, base_url: str) -> None:
        """See `WeightSync.restore`."""
        control = self._control(base_url)
        try:
            with self._lock:
                self._push_and_compare(control)
        finally:
            control.close()

    def close(self) -> None:
        """See `WeightSync.close`."""

    def _gather(self, step: int) -> None:
        """Every process: gets the weights ready to be sent."""

    def _pushed(self, step: int) -> None:
        """Every process: all servers have them."""

    def _push_and_compare(self, server: ServerControl) -> None:
        self._push(server, self.client.weight_version)
        self._compare(server)

    def _compare(self, server: ServerControl) -> None:
        if not self._expected:
            self._expected = trainer_logprobs(self.accelerator.unwrap_model(self.get_model()), self._probe)
        verdict = compare(server_logprobs(server, self.client.model, self._probe), self._expected)
        logger.info("Weight sync verified at %s: %.2e nats a token.", server.base_url, verdict.difference)
        if verdict.difference > self.tolerance:
            raise WeightSyncError(
                f"The vLLM server at {server.base_url} does not compute what the trainer computes: over the same "
                f"{len(self._probe)} tokens the mean log-probability is {verdict.server:.4f} on the server and "
                f"{verdict.trainer:.4f} in the trainer; they differ by {verdict.difference:.2e} nats a token (at most "
                f"{verdict.largest:.2e}), and {self.tolerance:.1e} is allowed. Likely causes: weights that did not "
                "reach every layer (tied output embeddings, parameter names the server does not know), another run "
                "writing to the same server, a different dtype, quantization or model revision on the server."
            )

    def _run(self, everywhere: Any, main: Any) -> None:
        """
        Runs `everywhere` in every process, then `main` in the main one; a failure is raised in all of them, and a
        server that the main one lost is left out by all: it may hold other weights than the rest. One that it took
        back, with its weights, is taken back by all.
        """
        failure = None
        try:
            everywhere()
            if self.accelerator.is_main_process:
                main()
        except (RequestFailed, WeightSyncError, OSError) as error:
            failure = error
        servers = self.client.pool.servers
        shared = [None if failure is None else str(failure), [(server.up, server.fault) for server in servers]]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(shared)
        for server, (up, fault) in zip(servers, shared[1], strict=True):
            if server.up and not up:
                server.drop(fault)
            elif up and not server.up:
                server.take_back()
        if isinstance(failure, (WeightSyncError, ServerGoneError)):
            raise failure
        if failure is not None or shared[0] is not None:
            raise WeightSyncError(shared[0] if failure is None else str(failure)) from failure

    def _each_server(self, action: Any, again: Any = None) -> None:
        """
        Does something with every server that is up, at once; one that is down gets its weights when it is back. Where
        all are lost meanwhile, `again` is done, once, with those that come back.
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
                raise failures[0]
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

    def _wait_for_one(self) -> None:
        """Waits for a server while all are down."""
        servers = self.client.pool.servers
        told = 0.0
        while not any(server.up for server in servers):
            for server in servers:
                control = ServerControl(server.url, self.client.api_key, CONNECT_TIMEOUT)
                try:
                    control.get("/health")
                    server.take_back()
                except RequestFailed as error:
                    server.fault = str(error)
                finally:
                    control.close()
            waited = time.monotonic() - max((one.down_since for one in servers if not one.up), default=0.0)
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
