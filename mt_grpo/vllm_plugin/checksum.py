"""The checksum of weights, for both sides of a transfer. Needs torch and safetensors only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
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
        self._lines: list[str] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Adds one tensor."""
        content = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if content.storage_offset() % 8:
            content = content.clone()
        length = content.numel() // (8 * _BLOCKS)  # words of a block
        whole = 8 * _BLOCKS * length
        sums = content[:whole].view(torch.int64).view(_BLOCKS, length).sum(dim=1).tolist()
        self._lines.append(f"{name} {tensor.dtype} {tuple(tensor.shape)} {sums} {content[whole:].tolist()}")

    def hexdigest(self) -> str:
        """The checksum as 32 characters."""
        return hashlib.blake2b("\n".join(sorted(self._lines)).encode(), digest_size=16).hexdigest()


def read_tensors(path: str | Path, checksum: Checksum) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a safetensors file. Each is added to `checksum` when it is yielded."""
    with safe_open(path, framework="pt", device="cpu") as file:
        for name in file.keys():
            tensor = file.get_tensor(name)
            checksum.add(name, tensor)
            yield name, tensor


def file_checksum(path: str | Path) -> str:
    """The checksum of a whole safetensors file."""
    checksum = Checksum()
    for _ in read_tensors(path, checksum):
        pass
    return checksum.hexdigest()
