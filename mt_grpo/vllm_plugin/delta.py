"""What changed between two files of weights, word by word: in bfloat16 most weights keep all their bits."""

from __future__ import annotations

import torch

WORD = 2
"""Bytes of a word: those of a weight in bfloat16."""
BLOCK = 2**16
"""Words in a block, so that a place in it is a word itself."""
STRETCH = 2**26
"""Words that are compared at a time."""


def difference(old: torch.Tensor, new: torch.Tensor, most: float = 0.5) -> torch.Tensor | None:
    """
    The words in which two files differ: how many there are in each block, their places there, and their new values.

    Args:
        old, new (`torch.Tensor`): Bytes of both files, as many of one as of the other.
        most (`float`, *optional*, defaults to `0.5`): Share of the file that a difference may take.

    Returns:
        `torch.Tensor`, *optional*: Its bytes; `None` where it takes more, or a half word differs.
    """
    whole = old.numel() // WORD * WORD
    if old.numel() != new.numel() or not torch.equal(old[whole:], new[whole:]):
        return None
    before, after = old[:whole].view(torch.int16), new[:whole].view(torch.int16)
    found, room = [], most * new.numel() / (2 * WORD)
    for begin in range(0, len(after), STRETCH):
        end = begin + STRETCH
        found.append((before[begin:end] != after[begin:end]).nonzero()[:, 0] + begin)
        room -= len(found[-1])
        if room < 0:
            return None
    places = torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)
    counts = torch.bincount(places // BLOCK, minlength=-(-len(after) // BLOCK)).to(torch.int32)
    parts = (counts, (places % BLOCK - BLOCK // 2).to(torch.int16), after[places])
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts])


def apply(change: torch.Tensor, file: torch.Tensor) -> None:
    """
    Makes the new file of the old one, in place.

    Args:
        change (`torch.Tensor`): A `difference`.
        file (`torch.Tensor`): Bytes of the old file.

    Raises:
        ValueError: If the change is not one of such a file.
    """
    words = file[: file.numel() // WORD * WORD].view(torch.int16)
    blocks = -(-len(words) // BLOCK)
    counts = change[: 4 * blocks].view(torch.int32).to(torch.int64)
    number = int(counts.sum())
    if change.numel() != 4 * blocks + 2 * WORD * number:
        raise ValueError("The change is not one of this file.")
    rest = change[4 * blocks :].view(torch.int16)
    low, values = rest[:number], rest[number:]
    first = torch.arange(blocks).repeat_interleave(counts) * BLOCK
    words[first + low.to(torch.int64) + BLOCK // 2] = values
