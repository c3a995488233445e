"""The checksum of weights, for both sides of a transfer. Needs torch and safetensors only."""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import safe_open

_BLOCKS = 64


class Checksum:
    """
    A checksum over named tensors in any order: their names, dtypes, shapes and contents. A tensor is read once, on its
    device, at the speed of memory. Sums of 64-bit words over blocks detect failed transfers, not attacks.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Adds one tensor."""
        self.lines.append(line_of(name, tensor))

    def hexdigest(self) -> str:
        """The checksum as 32 characters."""
        return hashlib.blake2b("\n".join(sorted(self.lines)).encode(), digest_size=16).hexdigest()


def line_of(name: str, tensor: torch.Tensor) -> str:
    """What a checksum keeps of a tensor."""
    content = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if content.storage_offset() % 8:
        content = content.clone()
    length = content.numel() // (8 * _BLOCKS)  # words of a block
    whole = 8 * _BLOCKS * length
    sums = content[:whole].view(torch.int64).view(_BLOCKS, length).sum(dim=1).tolist()
    return f"{name} {tensor.dtype} {tuple(tensor.shape)} {sums} {content[whole:].tolist()}"


def read_tensors(path: str | Path, checksum: Checksum) -> Generator[tuple[str, torch.Tensor], None, None]:
    """
    The tensors of a safetensors file. Another thread sums them, ahead of the reader, so that the file is mapped where
    the reader comes to. When the iterator ends or is closed, those that it has yielded are added to `checksum`.
    """
    with safe_open(path, framework="pt", device="cpu") as file, ThreadPoolExecutor(1) as other:
        tensors = [(name, file.get_tensor(name)) for name in file.keys()]
        lines = [other.submit(line_of, name, tensor) for name, tensor in tensors]
        read = 0
        try:
            for read, item in enumerate(tensors, 1):  # noqa: B007  # how many, when the reader stops
                yield item
        finally:
            for line in lines[read:]:
                line.cancel()
            checksum.lines += [line.result() for line in lines[:read]]


def file_checksum(path: str | Path) -> str:
    """The checksum of a whole safetensors file."""
    checksum = Checksum()
    for _ in read_tensors(path, checksum):
        pass
    return checksum.hexdigest()
