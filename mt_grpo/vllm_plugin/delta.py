"""
What changed between two files of weights in bfloat16, word by word. Where few words changed, it is their places and
values. Else it is how many steps each word went up or down, in the order of the weights' sizes: small weights change
more often and by more steps, so bits that are alike come together and deflate well.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

WORD = 2
"""Bytes of a word: those of a weight in bfloat16."""
BLOCK = 2**16
"""Words in a block, so that a place in it is a word itself."""
STRETCH = 2**22
"""Words that are compared or coded at a time."""
SPARSE = 0.04
"""Share of the words up to which places and values are sent."""
MOST = 0.6
"""Share of the words from which on a change is not worth its coding."""
PLANES = 6
"""Steps that are told by a bit each; more are told by a number."""
PARTS = PLANES + 3
"""Of a stretch: the directions, the planes, and the lower and higher bytes of greater numbers."""
_PLACES, _STEPS = 0, 1


def difference(old: torch.Tensor, new: torch.Tensor, most: float = 0.5) -> torch.Tensor | None:
    """What changed."""
    whole = old.numel() // WORD * WORD
    if old.numel() != new.numel() or not torch.equal(old[whole:], new[whole:]):
        return None
    before, after = old[:whole].view(torch.int16), new[:whole].view(torch.int16)
    found, room = [], MOST * len(after) + 1
    for begin in range(0, len(after), STRETCH):
        end = begin + STRETCH
        found.append((before[begin:end] != after[begin:end]).nonzero()[:, 0] + begin)
        room -= len(found[-1])
        if room < 0:
            return None
    places = torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)
    if len(places) <= SPARSE * len(after):
        counts = torch.bincount(places // BLOCK, minlength=-(-len(after) // BLOCK)).to(torch.int32)
        parts = (counts, (places % BLOCK - BLOCK // 2).to(torch.int16), after[places])
        content = b"".join(part.numpy().tobytes() for part in parts)
        kind = _PLACES
    else:
        content = b"".join(_coded(before.numpy(), after.numpy()))
        kind = _STEPS
    if len(content) > most * new.numel():
        return None
    return torch.frombuffer(bytearray(bytes([kind]) + content), dtype=torch.uint8)


def apply(change: torch.Tensor, file: torch.Tensor) -> None:
    """Makes the new file of the old one, in place."""
    words = file[: file.numel() // WORD * WORD].view(torch.int16)
    try:
        {_PLACES: _place, _STEPS: _step}[int(change[0])](change[1:].numpy().tobytes(), words)
    except (zlib.error, KeyError, IndexError, ValueError) as error:
        raise ValueError("The change is not one of this file.") from error


def _place(content: bytes, words: torch.Tensor) -> None:
    blocks = -(-len(words) // BLOCK)
    counts = torch.from_numpy(np.frombuffer(content[: 4 * blocks], np.int32).astype(np.int64))
    number = int(counts.sum())
    if len(content) != 4 * blocks + 2 * WORD * number:
        raise ValueError
    rest = torch.from_numpy(np.frombuffer(content[4 * blocks :], np.int16).copy())
    first = torch.arange(blocks).repeat_interleave(counts) * BLOCK
    words[first + rest[:number].to(torch.int64) + BLOCK // 2] = rest[number:]


def _step(content: bytes, words: torch.Tensor) -> None:
    parts = list(_parts(content))
    new = words.numpy()
    stretches = [new[begin : begin + STRETCH] for begin in range(0, len(new), STRETCH)]
    if len(parts) != len(stretches) * PARTS:
        raise ValueError
    of_stretch = [parts[first : first + PARTS] for first in range(0, len(parts), PARTS)]
    with ThreadPoolExecutor() as pool:
        for stretch, found in zip(stretches, pool.map(_decode, stretches, of_stretch), strict=True):
            stretch[:] = found


def _coded(old: np.ndarray, new: np.ndarray) -> Iterator[bytes]:
    """Of each stretch: a plane of bits for each number of steps, the directions, and the greater numbers of steps."""
    starts = range(0, len(new), STRETCH)
    with ThreadPoolExecutor() as pool:
        for parts in pool.map(
            lambda begin: _encode(old[begin : begin + STRETCH], new[begin : begin + STRETCH]), starts
        ):
            for part in parts:
                yield len(part).to_bytes(4, "little") + part


def _parts(content: bytes) -> Iterator[bytes]:
    place = 0
    while place < len(content):
        size = int.from_bytes(content[place : place + 4], "little")
        yield content[place + 4 : place + 4 + size]
        place += 4 + size


def _by_size(words: np.ndarray) -> np.ndarray:
    """The order of words by their exponents."""
    return np.argsort(((words.view(np.uint16) >> 7) & 0xFF).astype(np.uint8), kind="stable")


def _ranks(words: np.ndarray) -> np.ndarray:
    """Numbers in the order of the weights, neighbours one apart; the same function takes them back."""
    return np.where(words < 0, words ^ 0x7FFF, words).astype(np.int16)


def _encode(old: np.ndarray, new: np.ndarray) -> list[bytes]:
    order = _by_size(old)
    steps = (_ranks(new) - _ranks(old))[order].astype(np.int32)  # modulo 2 ** 16, as those that are added
    sizes, parts = np.abs(steps), list[bytes]()
    parts.append(_deflate(np.packbits(steps[steps != 0] < 0)))
    for number in range(PLANES):
        parts.append(_deflate(np.packbits(sizes > number)))
        sizes = sizes[sizes > number]
    rest = (sizes - PLANES).astype(np.uint16)
    return [*parts, _deflate((rest & 0xFF).astype(np.uint8)), _deflate((rest >> 8).astype(np.uint8))]


def _decode(old: np.ndarray, parts: list[bytes]) -> np.ndarray:
    order, unpacked = _by_size(old), [np.frombuffer(zlib.decompress(part), np.uint8) for part in parts]
    sizes, places = np.zeros(len(old), np.int32), np.arange(len(old))
    for plane in unpacked[1:-2]:
        places = places[np.unpackbits(plane, count=len(places)).astype(bool)]
        sizes[places] += 1
    sizes[places] += unpacked[-2] + (unpacked[-1].astype(np.int32) << 8)
    changed = sizes.nonzero()[0]
    signs = np.unpackbits(unpacked[0], count=len(changed)).astype(np.int32)
    sizes[changed] *= 1 - 2 * signs
    found = np.empty_like(old)
    found[order] = _ranks((_ranks(old[order]) + sizes).astype(np.int16))
    return found


def _deflate(values: np.ndarray) -> bytes:
    found = list[bytes]()
    for strategy in (zlib.Z_HUFFMAN_ONLY, zlib.Z_DEFAULT_STRATEGY):  # noise, or long runs
        coder = zlib.compressobj(6, zlib.DEFLATED, zlib.MAX_WBITS, 9, strategy)
        found.append(coder.compress(values.tobytes()) + coder.flush())
    return min(found, key=len)
