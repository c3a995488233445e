"""
What a weight transport is: it packs the trainer's weights, and delivers what it packed to a server, in an update of
HTTP calls that leave the server running, whatever fails. And the proof that weights arrived.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
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
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from trl.generation.vllm_generation import VLLMGeneration

from mt_grpo.errors import UserError, WeightSyncError
from mt_grpo.forward.probe import without_dropout
from mt_grpo.imports import Registry
from mt_grpo.rollout.engines.vllm import VLLMServerClient
from mt_grpo.servers.http import RequestFailed, Server

T = TypeVar("T")

logger = logging.getLogger(__name__)
_LENGTH = 64  # tokens of the probe sequence
_PADDING = 7  # padding tokens before it, to measure what padding alone changes
EXACT = 1e-3
"""Largest mean difference, in nats per token, if trainer and server compute in float32."""
NARROW = 0.25
"""The least that is allowed, in nats per token, if one of them computes in a narrower type."""


@dataclass(frozen=True)
class _Verdict:
    """How far two computations of the probe's log-probs are apart."""

    server: float
    trainer: float
    difference: float
    largest: float


def probe_ids(vocab_size: int) -> list[int]:
    """Random token ids of the whole vocabulary, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (_LENGTH,), generator=generator).tolist()


def server_likeliest(server: Server, model: str, ids: list[int], top: int) -> list[dict[int, float]]:
    """
    The server's log-probs of each token of `ids` but the first, and of the `top` likeliest there, or `RequestFailed`.
    """
    body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top}

    def read(answer: Any) -> list[dict[int, float]]:
        read = []
        for token, entry in zip(ids[1:], answer["choices"][0]["prompt_logprobs"][1:], strict=True):
            logprobs = {int(name): value["logprob"] for name, value in entry.items()}
            if token not in logprobs or len(logprobs) < top:
                raise KeyError(token)
            read.append(dict(sorted(logprobs.items(), key=lambda each: -each[1])))
        return read

    found: list[dict[int, float]] = server.post("/v1/completions", body, read)
    return found


@torch.no_grad()
def trainer_logprobs(model: nn.Module, ids: list[int], padding: int = 0) -> list[float]:
    """The same by the trainer's model. With sharded weights every process must call it."""
    tokens = torch.tensor([ids[:1] * padding + ids], device=next(model.parameters()).device)
    mask = torch.ones_like(tokens)
    mask[:, :padding] = 0
    options = {"position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)} if padding else {}
    with without_dropout(model):
        logits = model(input_ids=tokens, attention_mask=mask, **options).logits[0, padding:]
    logprobs = torch.log_softmax(logits[:-1].float(), dim=-1)
    return logprobs.gather(1, tokens[0, padding + 1 :].unsqueeze(1))[:, 0].tolist()


def _tolerance_for(expected: list[float], padded: list[float], epsilon: float) -> float:
    """
    The mean difference, in nats per token, that narrow types explain: ten times the larger of what padding alone
    changes in the trainer and what rounding would; 0.25 to 2, below the 7 to 16 of weights that did not arrive.
    """
    rounding = epsilon / 2 * sum(abs(value) for value in expected) / len(expected)
    return min(2.0, max(NARROW, 10.0 * rounding, 10.0 * compare(padded, expected).difference))


def compare(server: list[float], trainer: list[float]) -> _Verdict:
    """The distance between two lists of log-probs. A NaN counts as infinitely far away."""
    differences = [abs(one - other) for one, other in zip(server, trainer, strict=True)]
    differences = [math.inf if math.isnan(value) else value for value in differences]
    count = len(differences)
    return _Verdict(sum(server) / count, sum(trainer) / count, sum(differences) / count, max(differences))


class Proof:
    """
    Holds the trainer's answers against those of servers. `tolerance` is the largest mean absolute difference of a
    probe token's log-probability, in nats: 1e-3 if all is computed in float32, and measured otherwise, see
    `_tolerance_for`.
    """

    def __init__(self, get_model: Callable[[], nn.Module], vocab_size: int, tolerance: float | None) -> None:
        self.tolerance = EXACT if tolerance is None else tolerance
        self.expected: list[float] = []
        """The trainer's answers to hold a server against; empty until they are computed."""
        self._get_model, self._ids = get_model, probe_ids(vocab_size)
        self._measures, self._epsilon = tolerance is None, 0.0

    def use_dtypes(self, *dtypes: torch.dtype) -> None:
        """Those that trainer and servers compute in."""
        self._epsilon = max(torch.finfo(dtype).eps for dtype in dtypes)
        self._measures &= self._epsilon > torch.finfo(torch.float32).eps

    def compute(self, model: nn.Module | None = None, measure: bool = True) -> list[float]:
        """Computes the trainer's answers, and with `measure` how far a server's may be from them."""
        model = self._get_model() if model is None else model
        expected = trainer_logprobs(model, self._ids)
        if measure and self._measures:
            padded = trainer_logprobs(model, self._ids, _PADDING)
            self.tolerance = _tolerance_for(expected, padded, self._epsilon)
        return expected

    def compute_changed(self) -> None:
        """Computes what is expected of servers with weights that were changed on purpose."""
        self.expected = trainer_logprobs(self._get_model(), self._ids)

    def compare(self, server: Server, model: str, what: str) -> None:
        """Holds a server's answers, by a model of this name, against those that are expected."""
        found = server_likeliest(server, model, self._ids, 0)
        answers = [logprobs[token] for logprobs, token in zip(found, self._ids[1:], strict=True)]
        verdict = compare(answers, self.expected)
        logger.info("Weight sync verified at %s: %.2e nats a token.", server.url, verdict.difference)
        if verdict.difference > self.tolerance:
            raise server.sync_error(
                f"does not compute what the trainer computes{what}: over the same {len(self._ids)} tokens the mean "
                f"log-probability is {verdict.server:.4f} on the server and {verdict.trainer:.4f} in the trainer; "
                f"they differ by {verdict.difference:.2e} nats a token (at most {verdict.largest:.2e}), and "
                f"{self.tolerance:.1e} is allowed. Likely causes: weights that did not reach every layer (tied output "
                "embeddings, parameter names the server does not know), another run writing to the same server, a "
                "different dtype, quantization or model revision on the server."
            )


HALF = 0.5

_WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "modules_to_save.default.")


@contextlib.contextmanager
def with_halved_weights(model: nn.Module) -> Iterator[set[str]]:
    """A context in which `model` computes as if its linear layers and embeddings had half their weights and biases."""
    names: set[str] = set()

    def halve(module: nn.Module, inputs: object, output: object, name: str) -> torch.Tensor | None:
        if not isinstance(output, torch.Tensor):
            return None
        names.update((f"{name}.weight", f"{name}.bias"))
        return output * HALF

    with contextlib.ExitStack() as hooks:
        for name, layer in _layers(model):
            hooks.enter_context(layer.register_forward_hook(functools.partial(halve, name=name)))
        yield names


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Linear layers and embeddings by their names in a checkpoint; a layer and its merged adapter are one."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside:
            continue
        base = module
        if isinstance(module, BaseTunerLayer):
            inside.update(module.modules())
            base = module.get_base_layer()
        if isinstance(base, (nn.Linear, nn.Embedding)):
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "")
            yield name.removeprefix("base_model.model."), module


TRANSPORTS: Registry[type[Transport]] = Registry("weight transport", "mt_grpo.weights")
"""The transports that `weight_sync` can name, besides `auto`."""


weight_transport = TRANSPORTS.register
"""Registers a subclass of `Transport` under a name; `RegistrationError` if it is no word, or taken."""


class _FullParameters(VLLMGeneration):
    """
    TRL's walk over a trainer's full parameters, under the names that vLLM loads, with FSDP, DeepSpeed ZeRO and merged
    adapters. It is a collective operation: every process must iterate to the end.
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
            tensor = tensor * HALF if name in (self.changed or ()) else tensor
            if "vision_tower." in name:  # vLLM loads it by the names of checkpoints, which CLIP and SigLIP have cut
                ((stored, same),) = revert_weight_conversion(model, {name: tensor}).items()
                name = stored if same is tensor else name  # not where it is stored as a part of another
            return name, tensor

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
        A walk over the weights, in every process, which is finished whatever fails. A tensor may change as it goes on.
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
        The pause in which a server gets weights, at whose end its caches, of other weights, are emptied. A sleep of
        level 0 is vLLM's `/pause` without the 20 ms that this waits afterwards.
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
