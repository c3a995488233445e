"""
Brings weights, or what changed in them, from the trainer to this machine, over HTTP. It runs in the server's HTTP
process, so that conversations go on meanwhile. The checksum of weights is for both sides. Needs torch and safetensors.

What changed between two files of weights in bfloat16 is told word by word. Where few words changed, it is their places
and values. Else it is how many steps each word went up or down, in the order of the weights' sizes: small weights
change more often and by more steps, so bits that are alike come together and deflate well.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import mmap
import os
import shutil
import socket
import stat
import tempfile
import threading
import time
import zlib
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import torch
from safetensors import safe_open

_ROWS, _COLUMNS = 16, 1024  # of a block of 64-bit words
_PART = 2**25  # bytes of a tensor that are summed together: the second sum over them finds them in a cache


class Checksum:
    """
    A checksum over named tensors in any order: their names, dtypes, shapes and contents, each word in its place. It is
    the same on every device, and made there about as fast as memory is read. It detects failed transfers, not attacks.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Adds one tensor."""
        self.lines.append(_line_of(name, tensor))

    def hexdigest(self) -> str:
        """The checksum as 32 characters."""
        return hashlib.blake2b("\n".join(sorted(self.lines)).encode(), digest_size=16).hexdigest()

    def read(self, path: str | Path) -> Generator[tuple[str, torch.Tensor], None, None]:
        """
        The tensors of a safetensors file. Another thread sums them, ahead of the reader, so that the file is mapped
        where the reader comes to. When the iterator ends or is closed, those that it has yielded are added.
        """
        with safe_open(path, framework="pt", device="cpu") as file, ThreadPoolExecutor(1) as other:
            tensors = [(name, file.get_tensor(name)) for name in file.keys()]
            lines = [other.submit(_line_of, name, tensor) for name, tensor in tensors]
            read = 0
            try:
                for read, item in enumerate(tensors, 1):  # noqa: B007  # how many, when the reader stops
                    yield item
            finally:
                for line in lines[read:]:
                    line.cancel()
                self.lines += [line.result() for line in lines[:read]]

    @classmethod
    def of_file(cls, path: str | Path) -> str:
        """The checksum of a whole safetensors file."""
        checksum = cls()
        for _ in checksum.read(path):
            pass
        return checksum.hexdigest()


def _line_of(name: str, tensor: torch.Tensor) -> str:
    """What a checksum keeps of a tensor."""
    content = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if content.storage_offset() % 8:
        content = content.clone()
    digest = hashlib.blake2b(digest_size=16)
    for part in content.split(_PART):
        digest.update(_summed(part).cpu().numpy().tobytes())
    return f"{name} {tensor.dtype} {tuple(tensor.shape)} {digest.hexdigest()}"


def _summed(content: torch.Tensor) -> torch.Tensor:
    """
    Bytes as fewer words: of each block the sums of its rows and those of its columns, and the latter summed so again.
    Two words that change places are in other rows or other columns, of which a sum changes.
    """
    whole = content.numel() // 8 * 8
    words, kept = content[:whole].view(torch.int64), [content[whole:].to(torch.int64)]
    while number := len(words) // (_ROWS * _COLUMNS):
        blocks, rest = words.split([number * _ROWS * _COLUMNS, len(words) % (_ROWS * _COLUMNS)])
        blocks = blocks.view(number, _ROWS, _COLUMNS)
        kept += [rest, blocks.sum(dim=2).view(-1)]
        words = blocks.sum(dim=1).view(-1)
    return torch.cat([*kept, words])


ROOT = "/dev/shm"
"""Where files are put: shared memory, which all workers of a server see."""

CHUNK = 2**24
"""Bytes that are read at a time."""
READ_TIMEOUT = 30.0
"""Seconds after which a connection that brings nothing counts as broken."""
_ATTEMPTS = 5  # broken connections in a row, after which a file is given up
NUM_FILES = 2
"""Files that take turns: to write to fresh memory takes several times as long as the copy."""
_MAX_SIZE = 2**46  # most bytes of a file
BASE_TIMEOUT = 300.0
"""Seconds that a file of any size may take."""
_SLOWEST = 2**24  # bytes per second that may be waited for beyond them

_WORD = 2  # bytes of a word: those of a weight in bfloat16
BLOCK = 2**16
"""Words in a block, so that a place in it is a word itself."""
STRETCH = 2**22
"""Words that are compared or coded at a time."""
_SPARSE = 0.04  # share of the words up to which places and values are sent
_MOST_CHANGED = 0.6  # share of the words from which on a change is not worth its coding
_PLANES = 6  # steps that are told by a bit each; more are told by a number
_PARTS = _PLANES + 3  # of a stretch: the directions, the planes, and the lower and higher bytes of greater numbers
_PLACES, _STEPS = 0, 1


def time_limit(size: int) -> float:
    """Seconds after which a file of so many bytes is given up, though some of it still comes."""
    return BASE_TIMEOUT + size / _SLOWEST


class FetchError(Exception):
    """A file could not be brought; one sentence."""


class _Ending:
    """Ends, from another thread, what is being fetched."""

    def __init__(self) -> None:
        self.over = False
        self._connection: socket.socket | None = None

    def check(self) -> None:
        """Raises `FetchError` if nothing is to be fetched any more."""
        if self.over:
            raise FetchError("This server is shutting down.")

    def watch(self, connection: socket.socket) -> None:
        """Notes the connection under way. Raises as `check`."""
        self._connection = connection
        self.check()

    def end(self) -> None:
        """Ends it, and lets no other begin."""
        self.over = True
        if self._connection is not None:
            _end(self._connection)


class Fetcher:
    """The files of one server. They are removed when it ends, those of a killed one when the next one begins."""

    def __init__(self, root: str = ROOT) -> None:
        self._root = root
        self._folder: Path | None = None
        self._number = 0
        self._label = ""
        self._lock = threading.Lock()
        self._ending = _Ending()

    def fetch(self, url: str, size: int, label: str = "", base: str = "") -> str:
        """Brings a file that is not here, beside the one before it, and returns its path."""
        _check(url, size, label, base)
        with self._lock:
            self._ending.check()
            # some systems tidy up after a user's last session, and then anybody may make something under its name
            if self._folder is None or not _is_own(self._folder):
                self._folder, self._label = own_folder(_machine(), Path(self._root)), ""
            before = self._folder / f"{self._number}.safetensors"
            held = self._label
            if label and held == label:
                return str(before)
            if base and held != base:
                raise FetchError("This server holds other weights than those that the change starts from.")
            self._label = ""
            self._number = (self._number + 1) % NUM_FILES
            path = self._folder / f"{self._number}.safetensors"
            try:
                if base:
                    change = self._folder / "change"
                    _download(url, change, size, self._ending)
                    _change(before, change, path)
                    if Checksum.of_file(path) != label:
                        raise FetchError("The change does not make the weights that were announced.")
                else:
                    _download(url, path, size, self._ending)
            except OSError as error:
                raise FetchError(f"There is no place for {size / 1e9:.2f} GB in {self._folder}: {error}.") from error
            self._label = label
            return str(path)

    def close(self) -> None:
        """Gives up what is being fetched, and removes all files. Nothing is fetched afterwards."""
        self._ending.end()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _change(before: Path, change: Path, path: Path) -> None:
    """Makes a file of the one before it and a change."""
    size = before.stat().st_size
    with open(path, "ab") as file:
        file.truncate(size)
        os.posix_fallocate(file.fileno(), 0, size)
    old, found = (torch.from_file(str(one), size=one.stat().st_size, dtype=torch.uint8) for one in (before, change))
    new = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    new.copy_(old)
    try:
        apply(found, new)
    except ValueError as error:
        raise FetchError(str(error)) from error


def _download(url: str, path: Path, size: int, ending: _Ending | None = None) -> None:
    """Fills a file from a URL. After a broken connection it goes on where it was."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(descriptor, size)
        os.posix_fallocate(
            descriptor, 0, size
        )  # a full disk is an error here, not a bus error in the middle of a copy
        with mmap.mmap(descriptor, size) as memory, memoryview(memory) as view:
            _fill(url, view, ending or _Ending())
    finally:
        os.close(descriptor)


def _check(url: object, size: object, label: object, base: object) -> None:
    if not all(isinstance(text, str) for text in (url, label, base)):
        raise FetchError("An address, a label and a base are texts.")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= _MAX_SIZE:
        raise FetchError(f"A file has 1 to {_MAX_SIZE} bytes.")


def _fill(url: str, view: memoryview, ending: _Ending) -> None:
    done, broken, limit = 0, 0, time_limit(len(view))
    deadline = time.monotonic() + limit
    while done < len(view):
        before, fault = done, "the connection ended early"
        try:
            done = _go_on(url, view, done, deadline, ending)
        except (OSError, http.client.HTTPException) as error:
            fault = str(error) or type(error).__name__
        ending.check()
        if done < len(view) and time.monotonic() >= deadline:
            raise FetchError(f"{url} brought {done} of {len(view)} bytes in {limit:.0f} s, and is given up.")
        broken = 0 if done > before else broken + 1
        if broken == _ATTEMPTS:
            raise FetchError(f"{url} could not be read from byte {done} of {len(view)}: {fault}.")
        if done < len(view):
            time.sleep(0.1 * 2**broken)


def _go_on(url: str, view: memoryview, done: int, deadline: float, ending: _Ending) -> int:
    """Reads from byte `done` to the end, or as far as one connection goes until the deadline."""
    parts = urlsplit(url)
    if parts.hostname is None or parts.scheme != "http":
        raise FetchError(f"{url!r} is no address of a file.")
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=READ_TIMEOUT)
    with contextlib.closing(connection):
        connection.connect()
        ending.watch(connection.sock)
        end = threading.Timer(deadline - time.monotonic(), _end, [connection.sock])
        end.daemon = True
        end.start()
        try:
            connection.request("GET", parts.path, headers={"Range": f"bytes={done}-"})
            answer = connection.getresponse()
            if answer.status != http.client.PARTIAL_CONTENT:
                raise FetchError(f"{url} was answered with HTTP {answer.status}.")
            try:
                while count := answer.readinto(view[done : done + CHUNK]):
                    done += count
            except (OSError, http.client.HTTPException):
                pass  # what came is kept, and the next connection goes on from there
            return done
        finally:
            end.cancel()


def _end(connection: socket.socket) -> None:
    """Ends a connection under its reader, however little it brings at a time."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _machine() -> str:
    """How names of folders on this machine begin. Containers may share its memory, but number processes apart."""
    return f"mt-grpo-fetched-{os.stat('/proc/self/ns/pid').st_ino}"


def own_folder(name: str, root: Path) -> Path:
    """
    Makes a folder of this process, which nobody else can enter, and whose name nobody can know before: anybody may
    make something under a name in shared memory. Folders of this user's processes that were killed are removed.
    """
    for folder in root.glob(f"{name}-*"):
        process = folder.name.removeprefix(f"{name}-").split("-")[0]
        if _is_own(folder) and not Path(f"/proc/{process}").exists():
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{name}-{os.getpid()}-", dir=root))


def _is_own(folder: Path) -> bool:
    """Whether a folder is there, and this user has made it."""
    try:
        status = folder.lstat()
    except OSError:  # it may be removed by others meanwhile
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


# What changed in a file


def difference(old: torch.Tensor, new: torch.Tensor, most: float = 0.5) -> torch.Tensor | None:
    """What changed."""
    whole = old.numel() // _WORD * _WORD
    if old.numel() != new.numel() or not torch.equal(old[whole:], new[whole:]):
        return None
    before, after = old[:whole].view(torch.int16), new[:whole].view(torch.int16)
    found, room = [], _MOST_CHANGED * len(after) + 1
    for begin in range(0, len(after), STRETCH):
        end = begin + STRETCH
        found.append((before[begin:end] != after[begin:end]).nonzero()[:, 0] + begin)
        room -= len(found[-1])
        if room < 0:
            return None
    places = torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)
    if len(places) <= _SPARSE * len(after):
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
    words = file[: file.numel() // _WORD * _WORD].view(torch.int16)
    try:
        {_PLACES: _place, _STEPS: _step}[int(change[0])](change[1:].numpy().tobytes(), words)
    except (zlib.error, KeyError, IndexError, ValueError) as error:
        raise ValueError("The change is not one of this file.") from error


def _place(content: bytes, words: torch.Tensor) -> None:
    blocks = -(-len(words) // BLOCK)
    counts = torch.from_numpy(np.frombuffer(content[: 4 * blocks], np.int32).astype(np.int64))
    number = int(counts.sum())
    if len(content) != 4 * blocks + 2 * _WORD * number:
        raise ValueError
    rest = torch.from_numpy(np.frombuffer(content[4 * blocks :], np.int16).copy())
    first = torch.arange(blocks).repeat_interleave(counts) * BLOCK
    words[first + rest[:number].to(torch.int64) + BLOCK // 2] = rest[number:]


def _step(content: bytes, words: torch.Tensor) -> None:
    parts = list(_parts(content))
    new = words.numpy()
    stretches = [new[begin : begin + STRETCH] for begin in range(0, len(new), STRETCH)]
    if len(parts) != len(stretches) * _PARTS:
        raise ValueError
    of_stretch = [parts[first : first + _PARTS] for first in range(0, len(parts), _PARTS)]
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
    for number in range(_PLANES):
        parts.append(_deflate(np.packbits(sizes > number)))
        sizes = sizes[sizes > number]
    rest = (sizes - _PLANES).astype(np.uint16)
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
