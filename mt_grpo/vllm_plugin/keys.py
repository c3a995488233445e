"""Stores the key that a server made for itself, where only its user's trainers on the same machine can read it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

ROOT = "/dev/shm"
"""Shared memory, so that no key is on a disk. Containers that share weight files share the keys too."""

_EVERYWHERE = {None, "", "0.0.0.0", "::", "localhost", "127.0.0.1", "::1"}


def check_folder() -> None:
    """Makes the folder for keys if there is none."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(_path(), 0o700)
    with _folder():
        pass


def write_key(host: str | None, port: int, key: str) -> None:
    """Stores the key of the server at `host` and `port`. It replaces the key of a server that is gone."""
    check_folder()
    name = _name(host, port)
    with _folder() as folder:
        file = os.open(f"{name}.partial", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=folder)
        with open(file, "w") as text:
            text.write(key)
        os.rename(f"{name}.partial", name, src_dir_fd=folder, dst_dir_fd=folder)


def read_key(host: str | None, port: int) -> str | None:
    """
    The key that a server at `host` and `port` stored; `None` if there is none. The key of a server that was killed may
    still be there.
    """
    try:
        with _folder() as folder, open(os.open(_name(host, port), os.O_RDONLY, dir_fd=folder)) as text:
            return text.read()
    except FileNotFoundError:
        return None


def remove_key(host: str | None, port: int, key: str) -> None:
    """Removes the key that `write_key` stored, unless another server has stored its own there."""
    if read_key(host, port) == key:
        with _folder() as folder:
            os.unlink(_name(host, port), dir_fd=folder)


def _path() -> str:
    return f"{ROOT}/mt-grpo-keys-{os.geteuid()}"


@contextlib.contextmanager
def _folder() -> Iterator[int]:
    """
    A descriptor of the folder, through which its files are opened. Anybody may make something under the folder's name
    in shared memory, so the folder that is used must be the one that was checked.
    """
    path = _path()
    refusal = PermissionError(
        f"{path} should hold the servers' keys, but is no folder of this user that others cannot enter: remove it, or "
        "set `VLLM_API_KEY` for server and trainer."
    )
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (NotADirectoryError, PermissionError) as error:
        raise refusal from error
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise refusal
        yield folder
    finally:
        os.close(folder)


def _name(host: str | None, port: int) -> str:
    """Name of a key. It contains the network namespace, because containers may share memory but not the loopback."""
    return f"{os.stat('/proc/self/ns/net').st_ino}-{'localhost' if host in _EVERYWHERE else host}-{port}"
