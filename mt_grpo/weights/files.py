"""Transports of files that the servers read: all weights, or each version of an adapter to the base model."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import _TYPES, load_file, save, save_file
from torch import nn
from trl.distributed import DistributedBackend

from mt_grpo.errors import ConfigError, WeightSyncError
from mt_grpo.forward.interface import base_model
from mt_grpo.forward.media import media_tokens
from mt_grpo.servers.http import RequestFailed, Server
from mt_grpo.vllm_plugin import BACKEND
from mt_grpo.vllm_plugin.fetch import Checksum, own_folder
from mt_grpo.weights.transport import Payload, Source, Transport, Update, confirm, weight_transport

_SHARED = "/dev/shm"  # where files of weights are, unless another folder is named

_Layout = list[tuple[str, torch.dtype, tuple[int, ...]]]

_DTYPES = {dtype: name for name, dtype in _TYPES.items()}
_ALIGNMENT = 64  # bytes of a cache line: copies to and from places across two lines take a third longer
_Places = dict[str, tuple[int, int, torch.dtype, tuple[int, ...]]]


def _arranged(layout: _Layout) -> tuple[bytes, _Places, int]:
    """The header of a file, the place of each tensor behind it (offset, bytes, dtype, shape), and the file's bytes."""
    # wide dtypes first, so that every tensor begins at a multiple of its element's size
    ordered = sorted(layout, key=lambda entry: -entry[1].itemsize)
    header, offset, places = {}, 0, {}
    for name, dtype, shape in ordered:
        size = dtype.itemsize * torch.Size(shape).numel()
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        places[name] = (offset, size, dtype, shape)
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, places, 8 + len(text) + offset


class _WeightFile:
    """
    A file that is filled tensor by tensor, and gets its name when it is complete. It can be filled again, because
    writing to fresh memory takes several times as long as the copy. Two files that take turns avoid that.
    """

    def __init__(self, partial: Path, layout: _Layout) -> None:
        self.path = self._partial = partial
        header, self._places, size = _arranged(layout)
        self._begin = len(header)
        try:
            with open(partial, "wb") as file:
                file.write(header)
                # reserves the room: a full disk is an error here, not a bus error in the middle of a copy
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise OSError(
                f"There is no room for {size / 1e9:.1f} GB of weights in {partial.parent} "
                f"({error.strerror}): free some (two such files are kept), or set `weight_sync_folder` to another "
                "folder that the server sees too."
            ) from error
        self._bytes = torch.from_file(str(partial), shared=True, size=size, dtype=torch.uint8)

    @property
    def content(self) -> torch.Tensor:
        """Its bytes."""
        return self._bytes

    def withdraw(self) -> None:
        """Removes its name, before it is filled again."""
        self.path = self.path.replace(self._partial)

    def place(self, name: str) -> torch.Tensor:
        """The memory of one tensor in the file, to copy it to."""
        offset, size, dtype, shape = self._places[name]
        begin = self._begin + offset
        return self._bytes[begin : begin + size].view(dtype).view(shape)

    def publish(self, path: Path) -> None:
        """Gives the complete file its name, atomically."""
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())
        self.path = self.path.replace(path)

    def fill(self, path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
        """Fills it from a walk over parameters, names it `path`, and returns their checksum."""
        checksum = Checksum()
        with ThreadPoolExecutor(1) as other:
            for name, tensor in tensors:
                place = self.place(name)
                if (tensor.shape, tensor.dtype) != (place.shape, place.dtype):
                    raise ValueError(
                        f"{name} is {tuple(tensor.shape)} of {tensor.dtype}; its place has the size "
                        f"{tuple(place.shape)} and holds {place.dtype}."
                    )
                if tensor.device.type == "cpu":
                    summed = other.submit(checksum.add, name, tensor)
                    place.copy_(tensor)
                    summed.result()  # the tensor may change when the walk goes on
                else:
                    place.copy_(tensor)
                    checksum.add(name, tensor)
        self.publish(path)
        return checksum.hexdigest()


def make_folder(shared: str | None) -> Path:
    """Makes this process's folder for weight files, and removes those of processes that were killed."""
    root = Path(_SHARED if shared is None else shared)
    try:
        root.mkdir(parents=True, exist_ok=True)
        # containers may share the host's name and memory, but then number their processes apart
        return own_folder(f"mt-grpo-weights-{socket.gethostname()}.{os.stat('/proc/self/ns/pid').st_ino}", root)
    except OSError as error:
        raise ConfigError(
            f"No folder for weights can be made in {root} ({error.strerror or error}): set `weight_sync_folder` to "
            "one that trainer and server can write to or read."
        ) from error


def check_folder(
    server: Server,
    config: dict[str, Any],
    folder: Path,
    bring: Callable[[Path], Path] = lambda file: file,
) -> None:
    """Makes sure that a server sees the trainer's files."""
    if server.setting(config, "weight_transfer_config", "backend", str) != BACKEND:
        raise server.sync_error(
            "does not load weights from files: start it with `mt-grpo serve` and this run's recipe."
        )
    nonce = folder / f"{uuid.uuid4().hex}.nonce"
    nonce.write_bytes(save({"nonce": torch.randn(8)}))
    seen = bring(nonce)
    try:
        confirm(server, Checksum.of_file(nonce), seen)
    except WeightSyncError as error:
        raise server.sync_error(
            f"does not see the files in {folder}, where the trainer hands weights over: set `weight_sync_folder` to a "
            f"folder that trainer and server see under one path, and both may read ({error.__cause__})."
        ) from error
    try:
        confirm(server, "wrong on purpose", seen)
    except WeightSyncError:
        nonce.unlink()
        return
    raise server.sync_error(
        "agrees with whatever it is told about weights, even with what is wrong on purpose: start it with `mt-grpo "
        "serve` and this run's recipe."
    )


class WeightFiles:
    """Packs all weights into one of two files, which take turns."""

    def __init__(self, source: Source, folder: Path) -> None:
        self.files: list[_WeightFile] = []
        self._source, self._folder = source, folder
        self._layout: _Layout | None = None

    def pack(self, step: int | None) -> Payload:
        """Every process: writes the weights. Only the main one knows their checksum and size."""
        path = self._folder / f"weights-{'proof' if step is None else f'{step:08d}'}.safetensors"
        if self._layout is None:
            self._layout = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._source.parameters]
        with self._source.walk() as walk:
            if not self._source.accelerator.is_main_process:
                return Payload(path, "")
            if len(self.files) < 2:
                self.files.insert(0, _WeightFile(self._folder / f"{len(self.files)}.partial", self._layout))
            for file in self.files:
                file.withdraw()
            checksum = self.files[0].fill(path, walk)
        self.files.reverse()
        return Payload(path, checksum, path.stat().st_size)


@weight_transport("safetensors")
class SafetensorsTransport(Transport):
    """Sends a safetensors file, in shared memory on one host or in a folder that all hosts see. Any device."""

    keeps_files = True
    folder: Path

    def __init__(self, source: Source, *, folder: str | None = None) -> None:
        super().__init__(source)
        self.folder = source.from_main(lambda: make_folder(folder))
        self.files = WeightFiles(source, self.folder)

    @staticmethod
    def options(args: Any) -> dict[str, Any]:
        return {"folder": args.weight_sync_folder}

    def prepare(self, server: Server, config: dict[str, Any]) -> None:
        check_folder(server, config, self.folder)

    def pack(self, step: int | None) -> list[Payload]:
        return [self.files.pack(step)]

    def deliver(self, update: Update, payload: Payload) -> None:
        update.load(payload.path, payload.checksum)


_SHIFT = 0.0625
"""Added to the weights of an adapter's second factors. They begin at 0, so halving would change nothing."""


@contextlib.contextmanager
def _with_shifted_adapter(model: nn.Module) -> Iterator[set[str]]:
    """A context in which `model` computes as if `_SHIFT` were added to all weights of its adapter's second factors."""

    def shift(module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return output + _SHIFT * inputs[0].sum(dim=-1, keepdim=True)

    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    factors = [factor for layer in layers for factor in layer.lora_B.values() if isinstance(factor, nn.Linear)]
    with contextlib.ExitStack() as hooks:
        for factor in factors:
            hooks.enter_context(factor.register_forward_hook(shift))
        yield set()


def _shift_file(path: Path) -> None:
    """Changes a saved adapter as `_with_shifted_adapter` does."""
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(".lora_B.weight"):
            tensors[name] = tensor + _SHIFT
    save_file(tensors, path, metadata={"format": "pt"})


@weight_transport("lora")
class LoraTransport(Transport):
    """
    Sends only the adapter. The server keeps the base model and loads each version of the adapter under a name of its
    own, which requests then ask for. The server must be started for it, as `mt-grpo serve` does.
    """

    sleep_level = 1
    sends_adapter = True
    folder: Path
    change = staticmethod(_with_shifted_adapter)

    def __init__(self, source: Source, *, folder: str | None = None) -> None:
        if not is_peft_model(source.model):
            raise ConfigError("`weight_sync: lora` sends an adapter, and there is none: set `use_peft: true`.")
        base = base_model(source.model)
        of_text = {*base.get_decoder().modules(), base.get_output_embeddings()}
        for name, layer in base.named_modules():
            if media_tokens(base.config) and isinstance(layer, LoraLayer) and layer not in of_text:
                raise ConfigError(
                    f"`weight_sync: lora` sends an adapter of layers of text, as vLLM leaves out others, and this one "
                    f"is of {name} too: choose layers of text (`lora_target_modules: .*language_model.*_proj`), or "
                    "set `weight_sync: safetensors`."
                )
        super().__init__(source)
        self.folder = source.from_main(lambda: make_folder(folder))
        self._served: Path | None = None  # the adapter that all servers have
        self._packed: Path | None = None
        self._written: Counter[int | None] = Counter()  # versions by their step, which the best model shares

    options = staticmethod(SafetensorsTransport.options)

    @staticmethod
    def server_flags(model_args: Any) -> tuple[list[str], dict[str, str]]:
        # vLLM knows certain ranks only; the next one up holds the adapter
        rank = next(size for size in (1, 8, 16, 32, 64, 128, 256, 320, 512) if size >= model_args.lora_r)
        flags = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", str(rank)]
        return flags, {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}

    def prepare(self, server: Server, config: dict[str, Any]) -> None:
        check_folder(server, config, self.folder)
        loads = server.get(
            "/server_info", lambda it: it["vllm_env"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"], config_format="json"
        )
        most = server.setting(config, "lora_config", "max_lora_rank", int)
        if most is None or not loads:
            raise server.sync_error(
                "was started without LoRA, and `weight_sync: lora` sends it an adapter: start it again with `mt-grpo "
                "serve` and this run's recipe."
            )
        rank = self.source.model.peft_config["default"].r
        if rank > most:
            raise server.sync_error(
                f"takes adapters up to rank {most}, and this run's has {rank}: start it again with `mt-grpo "
                "serve` and this run's recipe."
            )

    def pack(self, step: int | None) -> list[Payload]:
        self._written[step] += 1
        again = f"-{self._written[step]}" if self._written[step] > 1 else ""
        path = self._packed = self.folder / f"adapter-{'proof' if step is None else f'{step:08d}'}{again}"
        model, accelerator, checksum = self.source.model, self.source.accelerator, ""
        backend = DistributedBackend(accelerator)
        # under DeepSpeed accelerate gathers through the engine only, and the whole model
        state = accelerator.get_state_dict(self.source.get_model()) if backend.is_fsdp else None
        with backend.gather_params([parameter for parameter in model.parameters() if parameter.requires_grad]):
            if accelerator.is_main_process:
                # embeddings that are trained are saved all the same; to guess whether others changed asks the Hub
                try:
                    model.save_pretrained(path, state_dict=state, save_embedding_layers=False)
                except SafetensorError as error:
                    raise OSError(
                        f"The adapter could not be written to {self.folder} ({error}): free some room, or set "
                        "`weight_sync_folder` to another folder that the server sees too."
                    ) from error
                file = path / "adapter_model.safetensors"
                if self.source.changed is not None:
                    _shift_file(file)
                checksum = Checksum.of_file(file)
        return [Payload(path, checksum, model=path.name)]

    def deliver(self, update: Update, payload: Payload) -> None:
        """Has the server load the adapter under the name of its folder, then forget the previous one."""
        server, path = update.server, payload.path
        with update.paused():
            confirm(server, payload.checksum, path / "adapter_model.safetensors")
            server.post(
                "/v1/load_lora_adapter", {"lora_name": path.name, "lora_path": str(path), "load_inplace": True}
            )
            served = server.get("/v1/models", lambda it: {(entry["id"], entry["root"]) for entry in it["data"]})
            if (path.name, str(path)) not in served:
                raise server.sync_error(
                    f"did not load the adapter {path}: it serves {', '.join(sorted(name for name, _ in served))}."
                )
            server.post("/update_weight_version", {"new_version": update.label})
            if self._served not in (None, path):
                with contextlib.suppress(RequestFailed):  # a server that was restarted does not know it
                    server.post("/v1/unload_lora_adapter", {"lora_name": self._served.name}, final="cannot be found")

    def delivered(self) -> None:
        if self.source.accelerator.is_main_process and self._served not in (None, self._packed):
            shutil.rmtree(self._served)
        self._served = self._packed
