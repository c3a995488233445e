"""
Brings weights from the trainer to this machine, over HTTP. It runs in the server's HTTP process, so that conversations
go on meanwhile.
"""

from __future__ import annotations

import http.client
import mmap
import os
import shutil
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import torch

from mt_grpo.vllm_plugin.delta import apply

ROOT = "/dev/shm"
"""Where files are put: shared memory, which all workers of a server see."""

CHUNK = 2**24
"""Bytes that are read at a time."""
SILENCE = 30.0
"""Seconds after which a connection that brings nothing counts as broken."""
ATTEMPTS = 5
"""Broken connections in a row, after which a file is given up."""
FILES = 2
"""Files that take turns: to write to fresh memory takes several times as long as the copy."""


class FetchError(Exception):
    """A file could not be brought; one sentence."""


class Fetcher:
    """
    The files of one server. They are removed when it ends, those of a killed one when the next one begins.

    Args:
        root (`str`, *optional*): Where their folder is made.
    """

    def __init__(self, root: str = ROOT) -> None:
        self._root = root
        self._folder: Path | None = None
        self._number = 0
        self._label = ""
        self._lock = threading.Lock()

    def fetch(self, url: str, size: int, label: str = "", base: str = "") -> str:
        """
        Brings a file, and returns its path here. The file before it stays.

        Args:
            url (`str`): Where it is.
            size (`int`): Its bytes.
            label (`str`, *optional*): What to know the file by.
            base (`str`, *optional*): Label of the file before it. What is brought is then the change from that one.

        Raises:
            FetchError: If it cannot be had.
        """
        with self._lock:
            if self._folder is None:
                self._folder = _make_folder(self._root)
            held, self._label = self._label, ""
            before = self._folder / f"{self._number}.safetensors"
            self._number = (self._number + 1) % FILES
            path = self._folder / f"{self._number}.safetensors"
            if base and held != base:
                raise FetchError("This server holds other weights than those that the change starts from.")
            try:
                if base:
                    change = self._folder / "change"
                    download(url, change, size)
                    _change(before, change, path)
                else:
                    download(url, path, size)
            except OSError as error:
                raise FetchError(f"There is no room for {size / 1e9:.2f} GB in {self._folder} ({error}).") from error
            self._label = label
            return str(path)

    def close(self) -> None:
        """Removes all files."""
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


def download(url: str, path: Path, size: int) -> None:
    """
    Fills a file from a URL. After a broken connection it goes on where it was.

    Raises:
        FetchError: If it is refused, or `ATTEMPTS` connections in a row bring nothing.
        OSError: If there is no room.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, size)
        os.posix_fallocate(
            descriptor, 0, size
        )  # a full disk is an error here, not a bus error in the middle of a copy
        with mmap.mmap(descriptor, size) as memory, memoryview(memory) as view:
            _fill(url, view)
    finally:
        os.close(descriptor)


def _fill(url: str, view: memoryview) -> None:
    done, broken = 0, 0
    while done < len(view):
        before, fault = done, "the connection ended early"
        try:
            done = _go_on(url, view, done)
        except (OSError, http.client.HTTPException) as error:
            fault = str(error) or type(error).__name__
        broken = 0 if done > before else broken + 1
        if broken == ATTEMPTS:
            raise FetchError(f"{url} could not be read from byte {done} of {len(view)}: {fault}.")
        if done < len(view):
            time.sleep(0.1 * 2**broken)


def _go_on(url: str, view: memoryview, done: int) -> int:
    """Reads from byte `done` to the end, or as far as one connection goes."""
    parts = urlsplit(url)
    if parts.hostname is None or parts.scheme != "http":
        raise FetchError(f"{url!r} is no address of a file.")
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=SILENCE)
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
        connection.close()


def machine() -> str:
    """How names of folders on this machine begin. Containers may share its memory, but number processes apart."""
    return f"mt-grpo-fetched-{os.stat('/proc/self/ns/pid').st_ino}"


def _make_folder(root: str) -> Path:
    for folder in Path(root).glob(f"{machine()}-*"):
        if not Path(f"/proc/{folder.name.rsplit('-', 1)[1]}").exists():
            shutil.rmtree(folder, ignore_errors=True)
    folder = Path(root) / f"{machine()}-{os.getpid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
