"""
What a weight transport is: it packs the trainer's weights, and delivers what it packed to a server, in an update of
HTTP calls that leave the server running, whatever fails.
"""

from __future__ import annotations

import contextlib
import shutil
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, is_peft_model
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from trl.generation.vllm_generation import VLLMGeneration

from mt_grpo.errors import UserError, WeightSyncError
from mt_grpo.imports import Registry
from mt_grpo.rollout.engines.vllm import VLLMServerClient
from mt_grpo.servers.http import RequestFailed, Server
from mt_grpo.weights.proof import HALF, with_halved_weights

T = TypeVar("T")

TRANSPORTS: Registry[type[Transport]] = Registry("weight transport", "mt_grpo.weights")
"""The transports that `weight_sync` can name, besides `auto`."""


def weight_transport(name: str) -> Callable[[type[Transport]], type[Transport]]:
    """Registers a subclass of `Transport` under a name; `RegistrationError` if it is no word, or taken."""
    return TRANSPORTS.register(name)


class _FullParameters(VLLMGeneration):
    """
    TRL's walk over a trainer's full parameters, under the names that vLLM loads. It supports FSDP, DeepSpeed ZeRO and
    adapters, which are merged during the walk. Iterating is a collective operation: every process must iterate to the
    end.
    """

    dtype: torch.dtype | None = None
    """The server's dtype. Wider parameters are cast to it: FSDP and mixed precision keep them in float32."""
    changed: set[str] | None = None
    """Names of the parameters that are sent halved, for a proof."""

    def __init__(self, model: nn.Module, accelerator: Accelerator) -> None:
        super().__init__(model, accelerator, None, mode="server")

    def _init_vllm(self) -> None:
        """Does nothing: the walk needs no server."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward without a backward leaves the outermost weights gathered
        model = self.accelerator.unwrap_model(self.model)
        model = model.get_base_model() if is_peft_model(model) else model
        wide = [*model._keep_in_fp32_modules, *model._keep_in_fp32_modules_strict]

        def as_sent(item: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
            name, tensor = item
            wider = self.dtype is not None and tensor.is_floating_point() and tensor.itemsize > self.dtype.itemsize
            if wider and not any(part in name for part in wide):
                tensor = tensor.to(self.dtype)
            return name, tensor * HALF if name in (self.changed or ()) else tensor

        return map(as_sent, self._iter_named_params())  # not a generator: after an error it can be walked on


class Source:
    """The trainer's weights as they are to be sent, and the servers that they are for."""

    def __init__(self, client: VLLMServerClient, get_model: Callable[[], nn.Module], accelerator: Accelerator) -> None:
        self.client, self.get_model, self.accelerator = client, get_model, accelerator
        self.dtype: torch.dtype | None = None
        """The widest dtype of the servers' weights; `None` until it is known."""
        self.changed: set[str] | None = None
        """Names of the weights that are sent halved as a proof; `None` when true weights are sent."""

    @property
    def model(self) -> PreTrainedModel:
        """The trainer's model, unwrapped."""
        return self.accelerator.unwrap_model(self.get_model())

    @property
    def parameters(self) -> _FullParameters:
        """What iterates over the weights, in every process to the end."""
        parameters = _FullParameters(self.get_model(), self.accelerator)
        parameters.dtype, parameters.changed = self.dtype, self.changed
        return parameters

    @contextlib.contextmanager
    def walk(self) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """
        A walk over the weights, in every process. It is finished whatever fails, since it is a collective one and may
        hold a merged adapter. A tensor may change when the walk continues.
        """
        walk = iter(self.parameters)
        try:
            yield walk
        finally:
            deque(walk, maxlen=0)

    def from_main(self, make: Callable[[], T]) -> T:
        """Every process: what the main one makes. If that is refused, every process raises the refusal."""
        found: list[Any] = [None, None]
        if self.accelerator.is_main_process:
            try:
                found[0] = make()
            except UserError as error:
                found[1] = type(error), str(error)
        if self.accelerator.num_processes > 1:
            broadcast_object_list(found)
        made, refusal = found
        if refusal is not None:
            kind, words = refusal
            raise kind(words)
        return made


@dataclass(frozen=True)
class Payload:
    """A file or folder of weights, its checksum and its bytes, and the name by which requests ask for its model."""

    path: Path
    checksum: str
    size: int = 0
    model: str = ""


class Transport(ABC):
    """
    `pack`, `deliver`, and facts about them; `WeightSync` does the rest. One that is not `repeatable` packs bucket by
    bucket while all processes gather the weights, and no process can send them again by itself.
    """

    server_backend = "safetensors"
    """vLLM's weight-transfer backend, with which the server is started."""
    repeatable = True
    """Whether one process can send by itself what was packed last."""
    sleep_level = 2
    """How deep servers sleep: 1 where they keep weights that no sync sends, else 2."""
    keeps_files = False
    """Whether two files with all weights lie in `weight_sync_folder`."""
    sends_adapter = False
    """Whether servers hold the base model, and get an adapter."""
    folder: Path | None = None
    """A folder of this run, which is removed at its end."""
    on_restart: Callable[[str], None] | None = None
    """What is done when a server was restarted, if the transport is not repeatable."""
    change = staticmethod(with_halved_weights)
    """Context in which a model computes as if its weights were those of the proof."""

    def __init__(self, source: Source) -> None:
        self.source = source

    @staticmethod
    def options(args: object) -> dict[str, Any]:
        """Options of the run (`MTGRPOConfig`) for this transport, as keyword arguments of the constructor."""
        return {}

    @staticmethod
    def server_flags(model_args: object) -> tuple[list[str], dict[str, str]]:
        """Flags and environment variables that the server needs for this transport, from TRL's `ModelConfig`."""
        return [], {}

    def prepare(self, server: Server, config: dict[str, Any]) -> None:  # noqa: B027
        """Before the first sync: makes sure that `server`, which has this configuration, can receive weights."""

    @abstractmethod
    def pack(self, step: int | None) -> Iterable[Any]:
        """Every process: gets the weights ready; with `step` `None` those of the proof. One `Payload`, or buckets."""

    @abstractmethod
    def deliver(self, update: Update, payload: Any) -> None:
        """Brings a server what was packed. A bucket is delivered inside an update that has begun."""

    def delivered(self) -> None:  # noqa: B027
        """Every process: all servers have what was packed last."""

    def close(self) -> None:
        """The run is over."""
        if self.folder is not None and self.source.accelerator.is_main_process:
            shutil.rmtree(self.folder, ignore_errors=True)


# A server that gets weights

_ACTIVE, _INACTIVE = "already active", "without a matching start"
"""What vLLM says of an update that has begun, and of one that has not."""
_VERDICT = "checksum"  # A word in the error of a worker that has other weights; asking again does not help


@dataclass(frozen=True)
class Update:
    """A server that gets weights, its weight version afterwards, and whether it keeps features of media."""

    server: Server
    label: str
    media: bool

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """
        The pause in which a server gets weights. Requests under way continue afterwards. The prefix cache, of other
        weights, is emptied, and so is what the vision tower made of images. A sleep of level 0 is vLLM's `/pause`
        without the 20 ms that this waits afterwards.
        """
        server = self.server
        try:
            server.post("/sleep", level="0", mode="keep")
            yield
            if not server.post("/reset_prefix_cache", read=itemgetter("success"), reset_running_requests="true"):
                raise server.sync_error("could not empty its prefix cache.")
            if self.media:  # after it, which takes every request under way out of the batch that holds some of it
                server.post("/reset_encoder_cache")
        except BaseException:  # Ctrl-C as well: a server that stays paused answers nobody
            server.tidy_up("/wake_up", tags="scheduling")
            raise
        server.post("/wake_up", tags="scheduling")

    @contextlib.contextmanager
    def begun(self) -> Iterator[None]:
        """An update in such a pause, always ended; only a successful one sets the server's weight version."""
        with self.paused():
            try:
                self.server.post("/start_weight_update", {}, final=_ACTIVE)
            except RequestFailed as error:
                if _ACTIVE not in str(error):
                    raise
                # left behind by a trainer that was killed, or begun by a call whose answer was lost
                _end_update(self.server)
                self.server.post("/start_weight_update", {})
            try:
                yield
            except BaseException:
                self.server.tidy_up("/finish_weight_update", {})
                raise
            _end_update(self.server, self.label)

    def load(self, path: Path, checksum: str) -> None:
        """Makes the server load a file of weights, and each of its workers confirm what its model received."""
        with self.begun():
            self.server.post("/update_weights", {"update_info": {"path": str(path)}}, final=_VERDICT)
            confirm(self.server, checksum)


def _end_update(server: Server, version: str | None = None) -> None:
    """Ends an update. With a version, the server then has it."""
    try:
        server.post("/finish_weight_update", {} if version is None else {"weight_version": version}, final=_INACTIVE)
    except RequestFailed as error:  # ended by a call whose answer was lost
        if _INACTIVE not in str(error) or (version is not None and server.weight_version() != version):
            raise


def confirm(server: Server, checksum: str, path: Path | None = None) -> None:
    """Asks every worker of a server whether the file at `path`, or what it loaded last, has a checksum."""
    info = {"checksum": checksum} if path is None else {"checksum": checksum, "path": str(path)}
    try:
        server.post("/init_weight_transfer_engine", {"init_info": info}, final=_VERDICT)
    except RequestFailed as error:
        if error.status is None or error.status < 500:
            raise
        raise WeightSyncError(
            f"The weights did not arrive at the vLLM server at {server.url} as they were sent: {error}"
        ) from error
