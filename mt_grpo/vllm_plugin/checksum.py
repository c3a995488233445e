"""The checksum of weights, for both sides of a transfer. Needs torch and safetensors only."""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import safe_open

_BLOCKS = 64
_CACHED = 1 << 19
"""Bytes per thread that are summed while they are in the cache, because they were just copied."""


class Checksum:
    """
    A checksum over named tensors in any order: their names, dtypes, shapes and contents. A tensor is read once, on its
    device, at the speed of memory. Sums of 64-bit words over blocks detect failed transfers, not attacks.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, name: str, tensor: torch.Tensor, copy: torch.Tensor | None = None) -> None:
        """
        Adds one tensor.

        Args:
            name (`str`): Its name.
            tensor (`Tensor`): The tensor.
            copy (`Tensor`, *optional*): Gets the contents in the same pass over memory. Contiguous, of the same dtype
                and shape; both are on the CPU.

        Raises:
            ValueError: If `copy` has another dtype or shape.
        """
        if copy is not None and (tensor.shape, tensor.dtype) != (copy.shape, copy.dtype):
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} of {tensor.dtype}; its place has the size {tuple(copy.shape)} and "
                f"holds {copy.dtype}."
            )
        content = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if content.storage_offset() % 8:
            content = content.clone()
        length = content.numel() // (8 * _BLOCKS)  # words of a block
        whole = 8 * _BLOCKS * length
        blocks = content[:whole].view(torch.int64).view(_BLOCKS, length)
        # as many blocks at a time as fit into the cache
        rows = _BLOCKS if copy is None else max(1, _CACHED * torch.get_num_threads() // max(1, 8 * length))
        sums: list[int] = []
        target = None if copy is None else copy.view(-1).view(torch.uint8)
        for first in range(0, _BLOCKS, rows):
            begin, end = (8 * length * block for block in (first, min(first + rows, _BLOCKS)))
            if target is not None:
                target[begin:end].copy_(content[begin:end])
            sums += blocks[first : first + rows].sum(dim=1).tolist()
        if target is not None:
            target[whole:].copy_(content[whole:])
        self._lines.append(f"{name} {tensor.dtype} {tuple(tensor.shape)} {sums} {content[whole:].tolist()}")

    def hexdigest(self) -> str:
        """The checksum as 32 characters."""
        return hashlib.blake2b("\n".join(sorted(self._lines)).encode(), digest_size=16).hexdigest()


def read_tensors(path: str | Path, checksum: Checksum) -> Generator[tuple[str, torch.Tensor], None, None]:
    """
    The tensors of a safetensors file. Each is added to `checksum` when it is yielded, in another thread, while the
    reader uses it. Once the iterator ends or is closed, all are added.
    """
    pending: list[Future[None]] = []
    with safe_open(path, framework="pt", device="cpu") as file, ThreadPoolExecutor(1) as other:
        for name in file.keys():
            tensor = file.get_tensor(name)
            pending.append(other.submit(checksum.add, name, tensor))
            yield name, tensor
    for added in pending:
        added.result()  # raises what went wrong there


def file_checksum(path: str | Path) -> str:
    """The checksum of a whole safetensors file."""
    checksum = Checksum()
    for _ in read_tensors(path, checksum):
        pass
    return checksum.hexdigest()
