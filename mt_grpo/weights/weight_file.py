"""
A trainer's full parameters under the names that vLLM loads, and the safetensors file of them. Each tensor is copied
once, to the place where the server reads it.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, is_peft_model
from torch.distributed.fsdp import FSDPModule
from trl.generation.vllm_generation import VLLMGeneration

from mt_grpo.errors import ConfigError
from mt_grpo.vllm_plugin.checksum import Checksum
from mt_grpo.vllm_plugin.fetch import own_folder
from mt_grpo.weights.verification import HALF

SHARED = "/dev/shm"
"""Where files of weights are, unless another folder is named."""


class FullParameters(VLLMGeneration):
    """
    TRL's walk over a trainer's full parameters, under the names that vLLM loads. It supports FSDP, DeepSpeed ZeRO and
    adapters, which are merged during the walk. Iterating is a collective operation: every process must iterate to the
    end.
    """

    dtype: torch.dtype | None = None
    """The server's dtype. Wider parameters are cast to it: FSDP and mixed precision keep them in float32."""
    changed: set[str] | None = None
    """Names of the parameters that are sent halved, for a proof."""

    def __init__(self, model: Any, accelerator: Accelerator) -> None:
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


Layout = list[tuple[str, torch.dtype, tuple[int, ...]]]

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}
_ALIGNMENT = 64  # bytes of a cache line: copies to and from places across two lines take a third longer
_Places = dict[str, tuple[int, int, torch.dtype, tuple[int, ...]]]


def _arranged(layout: Layout) -> tuple[bytes, _Places, int]:
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


def file_size(layout: Layout) -> int:
    """Bytes of a file of weights."""
    return _arranged(layout)[2]


class WeightFile:
    """
    A file that is filled tensor by tensor, and gets its name when it is complete. It can be filled again, because
    writing to fresh memory takes several times as long as the copy. Two files that take turns avoid that.
    """

    def __init__(self, partial: Path, layout: Layout) -> None:
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


def write_weights(file: WeightFile, path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """
    Fills a file from a walk over parameters, names it `path`, and returns the checksum of the parameters.

    The walk is always finished, even if writing fails. It gathers parameters together with other processes, and it
    merges an adapter until its end.
    """
    iterator, checksum = iter(tensors), Checksum()
    try:
        with ThreadPoolExecutor(1) as other:
            for name, tensor in iterator:
                place = file.place(name)
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
        file.publish(path)
    finally:
        exhaust(iterator)
    return checksum.hexdigest()


def exhaust(iterator: Iterable[object]) -> None:
    """Iterates to the end of a walk, as every process must, and ignores its tensors."""
    for _ in iterator:
        pass


def make_folder(shared: str | None) -> Path:
    """
    Makes a folder of this process for weight files, in `shared`, or in shared memory by default. Folders of processes
    of this machine that were killed are removed there.
    """
    root = Path(SHARED if shared is None else shared)
    root.mkdir(parents=True, exist_ok=True)
    # containers may share the host's name and memory, but then number their processes apart
    return own_folder(f"mt-grpo-weights-{socket.gethostname()}.{os.stat('/proc/self/ns/pid').st_ino}", root)


def shared_folder(folder: str | None, accelerator: Accelerator) -> Path:
    """The folder for weight files. The main process makes it, and every process knows its path."""
    made: list[tuple[str, str]] = [("", "")]
    if accelerator.is_main_process:
        try:
            made[0] = str(make_folder(folder)), ""
        except OSError as error:
            made[0] = "", error.strerror or str(error)
    if accelerator.num_processes > 1:
        broadcast_object_list(made)
    path, fault = made[0]
    if fault:
        raise ConfigError(
            f"No folder for weights can be made in {folder or SHARED} ({fault}): set `weight_sync_folder` to one that "
            "trainer and server can write to or read."
        )
    return Path(path)
