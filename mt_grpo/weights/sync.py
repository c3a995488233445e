"""Sends the trainer's weights to the servers of a run, and proves that they arrived."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from trl.distributed import DistributedBackend

from mt_grpo.concurrency import run as wait
from mt_grpo.errors import ServerGoneError, UserError, WeightSyncError
from mt_grpo.rollout.engines.vllm import VLLMServerClient
from mt_grpo.servers.fleet import Owner
from mt_grpo.servers.http import RequestFailed, Server, router_words, wait_for_servers
from mt_grpo.weights.transport import Payload, Proof, Source, Transport, Update, compare

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT = 5.0  # seconds that a call may take when the run is over
_ROUTER_PROBES = 8  # requests that tell one server from several that answer in turn


class WeightSync:
    """
    Sends the weights of the model that `get_model` returns to the client's servers. The main process talks to them;
    every process calls all methods but `restore` at the same points, learns the result, and raises the same
    `WeightSyncError`.
    """

    def __init__(
        self,
        transport: type[Transport],
        client: VLLMServerClient,
        get_model: Callable[[], nn.Module],
        accelerator: Accelerator,
        *,
        verify_every: int = 50,
        tolerance: float | None = None,
        **options: object,
    ) -> None:
        self.client, self.accelerator, self.verify_every = client, accelerator, verify_every
        self.source = Source(client, get_model, accelerator)
        self.transport = transport(self.source, **options)
        self.proof = Proof(get_model, self.source.model.config.get_text_config().vocab_size, tolerance)
        self.fleet = _Fleet(self.source, self.transport.repeatable)
        self.in_flight = False
        """Whether conversations go on while weights are sent."""
        self.asleep = False
        """Whether the servers have given their memory to training."""
        self._num_syncs, self._begun = 0, False
        backend = DistributedBackend(accelerator)
        # elsewhere a forward is cheap, but takes every process, or a thread that knows its device
        self._computes_late = accelerator.device.type == "cpu" and not (backend.is_fsdp or backend.is_zero3)
        self._lock = threading.Lock()  # a server that is restarted is restored from another thread
        self.run = client.run = self.source.from_main(Owner.new_run)
        client.restore = self.restore if self.transport.repeatable else self.transport.on_restart
        atexit.register(self.close)

    # What a trainer calls

    def begin(self) -> None:
        """Makes sure, before anything is sent, that no other run uses the servers. `sync` calls it if need be."""
        if self._begun:
            return
        self.fleet.run(lambda: self.fleet.each(self._examine))
        for server in self.client.servers:
            server.awaits_proof = not server.up
        mixed = {"no": torch.float32, "fp16": torch.float16}.get(self.accelerator.mixed_precision, torch.bfloat16)
        assert self.source.dtype is not None  # every server was asked
        self.proof.use_dtypes(next(self.source.get_model().parameters()).dtype, mixed, self.source.dtype)
        self._begun = True

    def send_in_flight(self) -> None:
        """Lets conversations go on while weights are sent; the probe is then computed at every sync."""
        self.in_flight, self._computes_late, self.client.salted = True, False, True

    def sleep(self) -> None:
        """Has the servers give their memory to training; the next `sync` wakes them."""
        if self.asleep:
            return

        def fall_asleep(server: Server) -> None:
            server.post("/sleep", level="0", mode="keep")  # requests are paused before (vLLM issue 28714)
            server.post("/sleep", level=str(self.transport.sleep_level), mode="abort")

        with self._lock:
            self.fleet.run(lambda: self.fleet.each(fall_asleep))
            self.asleep = True

    def sync(self, step: int) -> None:
        """Makes the servers sample with the trainer's weights as they are after optimiser step `step`."""
        with self._lock:
            if self.in_flight and self._num_syncs:  # before the barrier: no process sends before all know
                self.client.incoming_version = step
            try:
                self._sync(step)
            finally:
                self.client.incoming_version = None

    def verify(self) -> None:
        """Compares every server's log-probs of a probe sequence with the trainer's."""
        with self._lock:
            self.proof.expected = self.proof.compute()
            self._verify()

    def check(self) -> None:
        """After rollouts: no other run may have sent weights meanwhile; a server that is down is left out."""

        def check_each() -> None:
            for server in self.client.servers:
                failure = self.fleet.attempt(server, look) if server.up else None
                if failure is not None and server.up:
                    raise failure

        with self._lock:
            look = functools.partial(Owner.check_still, label=self._label(self.client.weight_version))
            self.fleet.run(check_each)

    def restore(self, base_url: str) -> None:
        """
        Sends a restarted server the weights of the latest `sync`, and verifies them, from any process at any time.
        """
        with self._lock:
            server = next(each for each in self.client.servers if each.url == base_url)
            try:
                self._bring_and_compare(server)
            except WeightSyncError as error:
                if server.healthy():
                    raise
                raise RequestFailed(str(error), True, unreachable=True) from error

    def close(self) -> None:
        """Gives the servers back to other runs, and ends those that this run started."""
        atexit.unregister(self.close)
        self.transport.close()
        if self.accelerator.is_main_process and self._begun:
            for server in self.client.servers:
                if server.up:
                    Owner.give_back(replace(server, timeout=_CLOSE_TIMEOUT), self.run)
        if self.fleet.end_server is not None:
            self.fleet.end_server()

    # A sync

    def _sync(self, step: int) -> None:
        self.accelerator.wait_for_everyone()  # until no process restores a server with the weights of before
        self.begin()
        late = self._prove_late() if self._num_syncs else []
        if self._num_syncs == 0:
            self.fleet.run(self._tell_apart)
            self._prove()
        due = bool(late) or self.asleep or self._num_syncs % self.verify_every == 0
        self._send(step)
        self._take_in(late, step)
        self._note_sent(step)
        self.proof.expected = []
        if due or not self._computes_late:  # for servers that are restarted while other processes are busy
            self.proof.expected = self.proof.compute(measure=due)
        if due:
            self._verify()
        self._num_syncs += 1
        self.fleet.synced = True

    def _prove(self) -> None:
        """Sends weights that were changed on purpose, and checks that every server answers with them."""
        unchanged = self.proof.compute()
        with self._changed():
            if compare(unchanged, self.proof.expected).difference < 2 * self.proof.tolerance:
                logger.warning(
                    "Weights are not proved to reach every layer: the model's answers hardly depend on them."
                )
            self.client.weight_version = None
            self._send(None)
            self._note_sent(None)
            self._verify()

    @contextlib.contextmanager
    def _changed(self) -> Iterator[None]:
        """A block in which changed weights are sent, whose answers the proof expects."""
        with self.transport.change(self.source.model) as self.source.changed:
            self.proof.compute_changed()
        yield
        self.source.changed = None

    def _verify(self) -> None:
        self.fleet.run(lambda: self.fleet.each(self._compare, self._bring_and_compare))

    def _send(self, step: int | None) -> None:
        bring = functools.partial(self._bring, step=step)
        if self.asleep:
            if self.accelerator.device.type == "cuda":
                torch.cuda.empty_cache()  # what training has kept for itself
            self.accelerator.wait_for_everyone()
            # the memory of the weights, whose contents are gone at level 2; it stays paused
            self.fleet.run(lambda: self.fleet.each(lambda server: server.post("/wake_up", tags="weights")))
        self.fleet.run(lambda: self.fleet.each(bring, bring), everywhere=lambda: self._pack(step))
        if self.asleep:
            self.fleet.run(lambda: self.fleet.each(lambda server: server.post("/wake_up", tags="kv_cache")))
            self.asleep = False

    def _note_sent(self, step: int | None) -> None:
        self.client.weight_version = step
        self.client.model = "" if self.fleet.payload is None else self.fleet.payload.model
        for server in self.client.servers:
            server.fingerprint = None
        self.transport.delivered()

    def _pack(self, step: int | None) -> None:
        """Every process: packs the weights; buckets are delivered at once."""
        if self.transport.repeatable:
            (self.fleet.payload,) = self.transport.pack(step)
        else:
            self._stream(step)

    def _bring(self, server: Server, step: int | None) -> None:
        Owner.check(server, self.run)
        if self.transport.repeatable:
            self._deliver(server, step, self.fleet.payload)

    def _deliver(self, server: Server, step: int | None, payload: object) -> None:
        self.transport.deliver(self._update(server, step), payload)

    def _stream(self, step: int | None) -> None:
        """
        Every process: packs bucket by bucket, and the main one has the servers take each. A server that dies meanwhile
        is left out, and taken back at a later sync: not where servers sleep, or while conversations go on.
        """
        updates: dict[str, contextlib.ExitStack] = {}

        def begin_all() -> None:
            for server in [] if self.asleep or self.in_flight else self.client.servers:
                if not (server.up or server.awaits_proof) and server.healthy(repeat=False):
                    server.mark_up()
            self.fleet.each(begin)

        def begin(server: Server) -> None:
            Owner.check(server, self.run)
            with contextlib.ExitStack() as update:
                update.enter_context(self._update(server, step).begun())
                updates[server.url] = update.pop_all()

        def end(server: Server) -> None:
            updates.pop(server.url).close()

        failure: BaseException = RequestFailed("It is left out.", True)
        try:
            # before anyone walks over the parameters, which all must do or none
            self.fleet.run(begin_all)
            packed: Any = self.transport.pack(step)  # a generator, which takes all processes to its end
            with contextlib.closing(packed) as buckets:
                for bucket in buckets:
                    deliver = functools.partial(self._deliver, step=step, payload=bucket)
                    self.fleet.run(functools.partial(self.fleet.each, deliver))
            self.fleet.run(lambda: self.fleet.each(end))
        except BaseException as error:
            failure = error
            raise
        finally:
            for update in updates.values():  # a server that is left in a pause would answer nobody
                with contextlib.suppress(type(failure)):
                    update.__exit__(type(failure), failure, failure.__traceback__)

    def _update(self, server: Server, step: int | None) -> Update:
        return Update(server, self._label(step), bool(self.client.media_tokens))

    def _label(self, step: int | None) -> str:
        return Owner.label(self.run, "proof" if step is None else step)

    def _bring_and_compare(self, server: Server) -> None:
        self._bring(server, self.client.weight_version)
        self._compare(server)

    def _compare(self, server: Server, model: str | None = None) -> None:
        self.proof.expected = self.proof.expected or self.proof.compute(self.source.model)
        what = "" if self.source.changed is None else ", with weights that were changed to see them arrive"
        self.proof.compare(server, self.client.model if model is None else model, what)

    # Servers that join

    def _examine(self, server: Server) -> None:
        Owner.check(server, self.run)

        def read(answer: Any) -> tuple[Any, torch.dtype]:
            config = answer["vllm_config"]
            name = config["model_config"]["dtype"].removeprefix("torch.")
            return config, torch.empty(0, dtype=getattr(torch, name)).dtype

        config, dtype = server.get("/server_info", read, config_format="json")
        self.source.dtype = max(self.source.dtype or dtype, dtype, key=lambda one: one.itemsize)
        self.transport.prepare(server, config)

    def _tell_apart(self) -> None:
        """Makes sure that each address leads to one server of its own, by a weight version for each."""
        labels = {url: Owner.label(self.run, f"start{number}") for number, url in enumerate(self.client.base_urls)}

        def look(server: Server) -> None:
            for _ in range(_ROUTER_PROBES):
                seen = server.weight_version()
                other = next((url for url, label in labels.items() if label == seen), None)
                if other is None:
                    raise WeightSyncError(router_words(server.url, "is several servers in turn, as behind a router"))
                if other != server.url:
                    raise WeightSyncError(
                        f"{server.url} and {other} lead to the same vLLM server, or to a router: name each "
                        "server once in `vllm_server_base_url`."
                    )

        def mark(server: Server) -> None:
            server.post("/update_weight_version", {"new_version": labels[server.url]})

        def mark_and_look(server: Server) -> None:
            mark(server)
            look(server)

        self.fleet.each(mark, mark)
        self.fleet.each(look, mark_and_look)

    def _prove_late(self) -> list[int]:
        """Every process: proves servers that came up late before they are used, or leaves them out."""

        def examine(server: Server) -> None:
            held = Owner.read(server.weight_version())
            if held is not None and held.run == self.run and held.step != "proof":
                raise WeightSyncError(f"{server.url} leads to a server that this run uses already.")
            dtype = self.source.dtype
            self._examine(server)
            if self.source.dtype != dtype:
                wider, self.source.dtype = self.source.dtype, dtype
                raise server.sync_error(f"holds weights in {wider}, not {dtype}.")

        def prove(server: Server) -> None:
            self._bring(server, None)
            self._compare(server, "" if self.fleet.payload is None else self.fleet.payload.model)

        servers = self.client.servers
        if not any(server.awaits_proof for server in servers):
            return []
        # a context length is known of those that the client has heard and found to fit
        waiting = [number for number, server in enumerate(servers) if server.awaits_proof and server.context_length]
        found = self.fleet.those_that(waiting, examine)
        if not found:
            return []
        with self._changed():
            self.fleet.run(lambda: None, everywhere=lambda: self._pack(None))
            return self.fleet.those_that(found, prove)

    def _take_in(self, late: list[int], step: int) -> None:
        """Every process: late servers get the weights, and conversations are sent to them from here on."""
        for number in self.fleet.those_that(late, functools.partial(self._bring, step=step)) if late else []:
            server = self.client.servers[number]
            server.awaits_proof = False
            server.mark_up()
            if self.accelerator.is_main_process:
                logger.warning("The vLLM server at %s has joined.", server.url)


# Calls of all servers

_Action = Callable[[Server], None]


class _Report(NamedTuple):
    """What a process tells the others: its failure and state; that of the main process counts."""

    failure: tuple[type[Exception], str] | None
    states: list[tuple[bool, str]]
    payload: Payload | None
    dtype: torch.dtype | None


def _told(failure: BaseException, rank: int) -> tuple[type[Exception], str]:
    """The kind and the words of the error that other processes raise."""
    if isinstance(failure, UserError):
        return type(failure), str(failure)
    return RuntimeError, f"Process {rank} failed:\n{''.join(traceback.format_exception(failure))}"


class _Fleet:
    """The run's servers as the main process calls them; all processes call it alike and learn the result."""

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
        Runs `everywhere` in every process, then `main` in the main one. A failure is raised in all processes; a server
        that the main one lost or uses again is left out or used again by all.
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

    def those_that(self, numbers: Iterable[int], action: _Action) -> list[int]:
        """Every process: which servers the main process could do something with. A failure ends nothing."""
        done: list[int] = []

        def each() -> None:
            for number in numbers:
                server = self._client.servers[number]
                try:
                    action(server)
                    done.append(number)
                except (RequestFailed, WeightSyncError) as error:
                    server.fault = str(error)
                    logger.warning("The run goes on without the vLLM server at %s: %s", server.url, error)

        self.run(each)
        return self._source.from_main(lambda: done)

    def each(self, action: _Action, again: _Action | None = None) -> None:
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

    def attempt(self, server: Server, action: _Action) -> RequestFailed | WeightSyncError | None:
        """Does something with a server. One that does not answer, or whose health fails then too, is left out."""
        try:
            action(server)
        except (RequestFailed, WeightSyncError) as error:
            if (isinstance(error, RequestFailed) and error.unreachable) or not server.healthy():
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
