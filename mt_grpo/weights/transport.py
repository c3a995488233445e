"""Sends the trainer's weights to servers, and proves that they arrived."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from trl.distributed import DistributedBackend

from mt_grpo.concurrency import run
from mt_grpo.imports import Registry
from mt_grpo.rollout.engines.vllm.client import VLLMServerClient
from mt_grpo.servers.http import (
    RequestFailed,
    Server,
    ServerControl,
    ServerGoneError,
    wait_for_servers,
)
from mt_grpo.servers.owner import new_run, weight_label
from mt_grpo.weights.newcomers import prove_newcomers, take_in, tell_apart
from mt_grpo.weights.updates import (
    WeightSyncError,
    check_owner,
    check_still_owner,
    fall_asleep,
    give_back,
    paused,
    updating,
    wake_cache,
    wake_weights,
)
from mt_grpo.weights.verification import (
    EXACT,
    PADDING,
    compare,
    halved,
    probe_ids,
    server_logprobs,
    tolerance_for,
    trainer_logprobs,
)

logger = logging.getLogger(__name__)

_GOODBYE = 5.0  # seconds a call may take when the run is over


class _Seen(NamedTuple):
    """
    What a process tells the others: its failure, as the kind and the words of an error, and the state. That of the
    main process counts: which servers are up and why not, and what was sent.
    """

    failure: tuple[type[Exception], str] | None
    states: list[tuple[bool, str]]
    checksum: str
    dtype: torch.dtype | None


def _told(failure: BaseException, rank: int) -> tuple[type[Exception], str]:
    """The kind and the words of the error that other processes raise."""
    if isinstance(failure, (WeightSyncError, ServerGoneError)):
        return type(failure), str(failure)
    return RuntimeError, f"Process {rank} failed:\n{''.join(traceback.format_exception(failure))}"


TRANSPORTS: Registry[type[WeightTransport]] = Registry("weight transport", "mt_grpo.weights.transports")
"""The transports that `weight_sync` can name, besides `auto`."""


def weight_transport(name: str) -> Callable[[type[WeightTransport]], type[WeightTransport]]:
    """
    Registers a subclass of `WeightTransport` under a name.

    Raises:
        RegistrationError: If the name is no word, or another file has registered it.
    """
    return TRANSPORTS.register(name)


class WeightTransport:
    """
    The base class of transports. The main process talks to the servers. Every process learns the result, and which
    servers are left out. Every process calls all public methods except `restore` at the same points.

    Args:
        client (`VLLMServerClient`): Its servers are synced. Its version and `restore` are set.
        get_model (`Callable[[], PreTrainedModel]`): Returns the trainer's model as it is currently wrapped.
        accelerator (`Accelerator`): Its accelerator.
        verify_every (`int`, *optional*, defaults to `50`): The first sync, and then one in this many, is verified.
        tolerance (`float`, *optional*): Largest mean absolute difference of a probe token's log-probability, in nats.
            It is 1e-3 if all is computed in float32, and measured otherwise, see `tolerance_for`.
        timeout (`float`, *optional*, defaults to `300.0`): Most seconds of a call to a server.

    Attributes:
        dtype (`torch.dtype`, *optional*): The widest dtype of the servers' weights; `None` until it is known.
        checksum (`str`): Checksum of the weights that were sent last.
        in_flight (`bool`): Whether conversations go on while weights are sent, see `send_in_flight`.
        asleep (`bool`): Whether the servers have given their memory to training, see `sleep`.
    """

    repeatable: bool = True
    """Whether one process can send the weights again by itself."""

    server_backend: str = "safetensors"
    """vLLM's weight-transfer backend, with which the server is started."""

    sleep_level: int = 2
    """How deep servers sleep: 1 where they keep weights that no sync sends, else 2."""

    _push: Callable[..., None]
    """Sends the weights of `step` to `server`; each transport's own method."""

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
        self.accelerator = accelerator
        self.dtype: torch.dtype | None = None
        self.checksum = ""
        self.in_flight = self.asleep = False
        self._timeout = timeout
        self.get_model = get_model
        self.verify_every = verify_every
        self.tolerance = EXACT if tolerance is None else tolerance
        self.num_syncs = 0
        self.changed: set[str] | None = None
        """Names of the weights that are sent halved as a proof; `None` when true weights are sent."""
        self._measures, self._begun = tolerance is None, False
        self._probe = probe_ids(accelerator.unwrap_model(get_model()).config.get_text_config().vocab_size)
        self._expected: list[float] = []
        backend = DistributedBackend(accelerator)
        # elsewhere a forward is cheap, but takes every process, or a thread that knows its device
        self._computes_late = accelerator.device.type == "cpu" and not (backend.is_fsdp or backend.is_zero3)
        self.end_server: Callable[[], None] | None = None
        """Ends the server that this process started, if it did."""
        self._lock = threading.Lock()  # a server that is restarted is restored from another thread
        name = [new_run()]
        if accelerator.num_processes > 1:
            broadcast_object_list(name)
        self.run = client.run = name[0]
        client.restore = self.restore
        atexit.register(self.close)

    @staticmethod
    def options(args: Any) -> dict[str, Any]:
        """Options of the run (`MTGRPOConfig`) for this transport, as keyword arguments of the constructor."""
        return {}

    @staticmethod
    def server_flags(model_args: Any) -> tuple[list[str], dict[str, str]]:
        """Flags and environment variables that the server needs for this transport, from TRL's `ModelConfig`."""
        return [], {}

    def begin(self) -> None:
        """
        Makes sure that this run can use every server, before anything is sent. If it was not called, `sync` calls it.

        Raises:
            WeightSyncError: In every process, if a server cannot be used, e.g. because another run uses it.
        """
        if self._begun:
            return
        self._run(lambda: self._each_server(self.examine))
        for server in self.client.servers:
            server.awaits_proof = not server.up
        mixed = {"no": torch.float32, "fp16": torch.float16}.get(self.accelerator.mixed_precision, torch.bfloat16)
        assert self.dtype is not None  # every server was asked
        dtypes = (next(self.get_model().parameters()).dtype, mixed, self.dtype)
        self._epsilon = max(torch.finfo(dtype).eps for dtype in dtypes)
        self._measures &= self._epsilon > torch.finfo(torch.float32).eps
        self._begun = True

    def send_in_flight(self) -> None:
        """
        From here on, conversations go on while weights are sent. The probe is then computed at every sync: later the
        model is the main thread's, which trains it.
        """
        self.in_flight, self._computes_late, self.client.salted = True, False, True

    def sleep(self) -> None:
        """
        Has the servers give their memory to training. The next `sync` wakes them: the memory of the weights, the
        weights, then the memory of the cache. A server that sleeps already is left alone.

        Raises:
            WeightSyncError: In every process, if one does not.
        """
        if self.asleep:
            return
        with self._lock:
            self._run(lambda: self._each_server(functools.partial(fall_asleep, level=self.sleep_level)))
            self.asleep = True

    def sync(self, step: int) -> None:
        """
        Makes the servers sample with the trainer's weights as they are after optimiser step `step`.

        Raises:
            WeightSyncError: In every process, if they do not.
        """
        with self._lock:
            if self.in_flight and self.num_syncs:  # before the barrier: no process sends before all know
                self.client.incoming_version = step
            try:
                self._sync(step)
            finally:
                self.client.incoming_version = None

    def _sync(self, step: int) -> None:
        self.accelerator.wait_for_everyone()  # until no process restores a server with the weights of before
        self.begin()
        newcomers = prove_newcomers(self) if self.num_syncs else []
        if self.num_syncs == 0:
            self._run(lambda: tell_apart(self._each_server, self.run, self.client.base_urls))
            self._prove()
        due = bool(newcomers) or self.asleep or self.num_syncs % self.verify_every == 0
        self._send(step, newcomers)
        self._expected = []
        if due or not self._computes_late:  # for servers that are restarted while other processes are busy
            self._expected = self._compute_expected(self.get_model(), measure=due)
        if due:
            self._verify()
        self.num_syncs += 1

    def verify(self) -> None:
        """
        Compares every server's log-probs of a probe sequence with the trainer's.

        Raises:
            WeightSyncError: In every process, if they differ by more than `tolerance`. The message has both numbers.
        """
        with self._lock:
            self._expected = self._compute_expected(self.get_model())
            self._verify()

    def check(self) -> None:
        """
        After rollouts, makes sure that no other run sent weights to the servers meanwhile.

        Raises:
            WeightSyncError: In every process, if another run did.
        """
        with self._lock:
            self._run(self._check_up)

    def _verify(self) -> None:
        self._run(lambda: self._each_server(self._compare, self._push_and_compare))

    def restore(self, base_url: str) -> None:
        """
        Sends the weights of the latest `sync` to a server that was restarted, and verifies them. Any process may call
        it at any time, since the others may be waiting for this process in a collective.
        """
        with self._lock:
            server = self._control(base_url)
            try:
                self._push_and_compare(server)
            except WeightSyncError as error:
                if server.healthy():
                    raise
                raise RequestFailed(str(error), True, unreachable=True) from error

    def close(self) -> None:
        """Gives the servers back to other runs, and ends those that this run started."""
        atexit.unregister(self.close)
        if self.accelerator.is_main_process and self._begun:
            for server in self.client.servers:
                if server.up:
                    give_back(ServerControl(server.url, self.client.api_key, _GOODBYE), self.run)
        if self.end_server is not None:
            self.end_server()

    def _gather(self, step: int | None) -> None:
        """Every process: gets the weights ready to be sent; with `step` `None`, those of the proof."""

    def _pushed(self, step: int | None) -> None:
        """Every process: called when all servers have the weights."""

    def _prepare(self, server: ServerControl, config: dict[str, Any]) -> None:
        """Before the first sync: makes sure that `server`, which has this configuration, can receive weights."""

    _change = staticmethod(halved)
    """Context in which a model computes as if its weights were those of the proof."""

    def prove_at(self, numbers: list[int]) -> list[int]:
        """Every process: which servers answer with weights that were changed on purpose and sent to them alone."""
        with self._change(self.accelerator.unwrap_model(self.get_model())) as self.changed:
            self._expected = trainer_logprobs(self.get_model(), self._probe)
        self._run(lambda: None, everywhere=lambda: self._gather(None))

        def prove(server: ServerControl) -> None:
            self._bring(server, None)
            self._compare(server, self._served_name(None))

        proved = self.those_that(numbers, prove)
        self.changed = None
        return proved

    def _served_name(self, step: int | None) -> str:
        """The name of the model in requests, once the weights of `step` are there."""
        return ""

    def examine(self, server: ServerControl) -> None:
        check_owner(server, self.run)
        config = server.get("/server_info", itemgetter("vllm_config"), config_format="json")
        dtype = getattr(torch, config["model_config"]["dtype"].removeprefix("torch."))
        self.dtype = max(self.dtype or dtype, dtype, key=lambda one: one.itemsize)
        self._prepare(server, config)

    def _prove(self) -> None:
        """Sends weights that were changed on purpose, and checks that every server answers with them."""
        unchanged = self._compute_expected(self.get_model())
        with self._change(self.accelerator.unwrap_model(self.get_model())) as self.changed:
            self._expected = trainer_logprobs(self.get_model(), self._probe)
        if compare(unchanged, self._expected).difference < 2 * self.tolerance:
            logger.warning("Weights are not proved to reach every layer: the model's answers hardly depend on them.")
        self.client.weight_version = None
        self._send(None)
        self._verify()
        self.changed = None

    def _send(self, step: int | None, newcomers: Sequence[int] = ()) -> None:
        bring = functools.partial(self._bring, step=step)
        if self.asleep:
            if self.accelerator.device.type == "cuda":
                torch.cuda.empty_cache()  # what training has kept for itself
            self.accelerator.wait_for_everyone()
            self._run(lambda: self._each_server(wake_weights))
        self._run(lambda: self._each_server(bring, bring), everywhere=lambda: self._gather(step))
        if self.asleep:
            self._run(lambda: self._each_server(wake_cache))
            self.asleep = False
        if newcomers:
            take_in(self, self.those_that(list(newcomers), bring))
        self.client.weight_version = step
        for server in self.client.servers:
            server.fingerprint = None
        self._pushed(step)

    def _bring(self, server: ServerControl, step: int | None) -> None:
        check_owner(server, self.run)
        self._push(server, step)

    def _paused(self, server: ServerControl) -> AbstractContextManager[None]:
        """The pause in which a server gets weights. What was computed with others is forgotten at its end."""
        return paused(server, bool(self.client.media_tokens))

    @contextlib.contextmanager
    def _updating(self, server: ServerControl, step: int | None) -> Iterator[None]:
        """An update in such a pause, through vLLM's weight-transfer engine."""
        with self._paused(server), updating(server, self._label(step)):
            yield

    def _label(self, step: int | None) -> str:
        return weight_label(self.run, "proof" if step is None else step)

    def _check_up(self) -> None:
        """Checks every server that is up. A server that is down is left out."""
        look = functools.partial(check_still_owner, label=self._label(self.client.weight_version))
        for server in self.client.servers:
            failure = self._attempt(server, look) if server.up else None
            if failure is not None and server.up:
                raise failure

    def _compute_expected(self, model: Any, measure: bool = True) -> list[float]:
        """Computes the trainer's answers, and with `measure` how far a server's may be from them."""
        expected = trainer_logprobs(model, self._probe)
        if measure and self._measures:
            padded = trainer_logprobs(model, self._probe, PADDING)
            self.tolerance = tolerance_for(expected, padded, self._epsilon)
        return expected

    def _push_and_compare(self, server: ServerControl) -> None:
        self._bring(server, self.client.weight_version)
        self._compare(server)

    def _compare(self, server: ServerControl, name: str | None = None) -> None:
        self._expected = self._expected or self._compute_expected(self.accelerator.unwrap_model(self.get_model()))
        verdict = compare(
            server_logprobs(server, self.client.model if name is None else name, self._probe), self._expected
        )
        logger.info("Weight sync verified at %s: %.2e nats a token.", server.base_url, verdict.difference)
        if verdict.difference > self.tolerance:
            weights = "" if self.changed is None else ", with weights that were changed to see them arrive"
            raise WeightSyncError(
                f"The vLLM server at {server.base_url} does not compute what the trainer computes{weights}: over the "
                f"same {len(self._probe)} tokens the mean log-probability is {verdict.server:.4f} on the server and "
                f"{verdict.trainer:.4f} in the trainer; they differ by {verdict.difference:.2e} nats a token (at most "
                f"{verdict.largest:.2e}), and {self.tolerance:.1e} is allowed. Likely causes: weights that did not "
                "reach every layer (tied output embeddings, parameter names the server does not know), another run "
                "writing to the same server, a different dtype, quantization or model revision on the server."
            )

    # Calls of all servers

    def _run(self, main: Callable[[], None], everywhere: Callable[[], None] | None = None) -> None:
        """
        Runs `everywhere` in every process, then `main` in the main one. A failure, of whatever kind, is raised in all
        processes. A server that the main one lost is left out by all, because its weights may differ from the rest. A
        server that the main one uses again, with its weights, is used again by all.
        """
        failure: BaseException | None = None
        try:
            if everywhere is not None:
                everywhere()
            if self.accelerator.is_main_process:
                main()
        except (WeightSyncError, ServerGoneError) as error:
            failure = error
        except (RequestFailed, OSError) as error:
            failure = WeightSyncError(str(error))
            failure.__cause__ = error
        except (Exception, SystemExit) as error:  # a defect: the others would wait for this process
            failure = error
        servers = self.client.servers
        seen = _Seen(
            None if failure is None else _told(failure, self.accelerator.process_index),
            [(server.up, server.fault) for server in servers],
            self.checksum,
            self.dtype,
        )
        every = gather_object([seen]) if self.accelerator.num_processes > 1 else [seen]
        seen = every[0]
        self.checksum, self.dtype = seen.checksum, seen.dtype
        for server, (up, fault) in zip(servers, seen.states, strict=True):
            if server.up and not up:
                server.drop(fault)
            elif up and not server.up:
                server.mark_up()
        failures = [(rank, each.failure) for rank, each in enumerate(every) if each.failure is not None]
        if not failures:
            return
        rank, (kind, words) = failures[0]  # also where this process failed as well: all end for the same reason
        if failure is not None and rank == self.accelerator.process_index:
            raise failure
        raise kind(words) from failure

    def those_that(self, numbers: list[int], action: Callable[[ServerControl], None]) -> list[int]:
        """Every process: which servers the main process could do something with. A failure ends nothing."""
        done: list[int] = []

        def each() -> None:
            for number in numbers:
                server = self.client.servers[number]
                try:
                    action(self._control(server.url))
                    done.append(number)
                except (RequestFailed, WeightSyncError) as error:
                    server.fault = str(error)
                    logger.warning("The run goes on without the vLLM server at %s: %s", server.url, error)

        self._run(each)
        box = [done]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(box)
        return box[0]

    def _each_server(
        self, action: Callable[[ServerControl], None], again: Callable[[ServerControl], None] | None = None
    ) -> None:
        """
        Does something with every server that is up, concurrently. A server that is down gets its weights when it is
        back. If all servers are lost meanwhile, `again` is done once, with those that come back.
        """
        self._wait_for_one()
        up = [server for server in self.client.servers if server.up]
        if len(up) == 1:  # in this thread, which is the one that CUDA knows the device of
            failures = [self._attempt(up[0], action)]
        else:
            with ThreadPoolExecutor(len(up)) as executor:
                failures = list(executor.map(lambda server: self._attempt(server, action), up))
        if not any(server.up for server in self.client.servers):
            if again is None or not self.repeatable:
                first = next(failure for failure in failures if failure is not None)
                if self.end_server is not None:  # nobody else starts it again
                    raise WeightSyncError(f"{first} {self.client.remedy}") from first
                raise first
            return self._each_server(again)
        for server, failure in zip(up, failures, strict=True):
            if failure is not None and server.up:
                raise failure

    def _attempt(
        self, server: Server, action: Callable[[ServerControl], None]
    ) -> RequestFailed | WeightSyncError | None:
        """Does something with a server. One that does not answer, or whose health fails then too, is left out."""
        control = self._control(server.url)
        try:
            action(control)
        except (RequestFailed, WeightSyncError) as error:
            if (isinstance(error, RequestFailed) and error.unreachable) or not control.healthy():
                server.drop(str(error))
            return error
        return None

    def _wait_for_one(self) -> None:
        """Waits until at least one server is up."""
        every = self.client.servers
        if any(server.up for server in every):
            return
        servers = [server for server in every if not (self.num_syncs and server.awaits_proof)]
        since = max(server.down_since for server in servers if server.down_since is not None)
        silent = run(wait_for_servers(servers, 1, since, self.client.server_timeout, logger.warning))
        if len(silent) == len(servers):
            raise ServerGoneError(self.client.gone())
        for server in servers:
            if server not in silent:
                server.mark_up()

    def _control(self, base_url: str) -> ServerControl:
        return ServerControl(base_url, self.client.api_key, self._timeout)
