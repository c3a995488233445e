"""The last line of a server that ended: mostly the reason."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TextIO

logger = logging.getLogger(__name__)


class LastWords:
    """
    Reads what a server writes to its standard error, logs it, and keeps the last line.

    Args:
        name (`str`): The server.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._line = ""
        self._rest = b""
        self._reading: int | None = None
        self._closed = asyncio.Event()

    def pipe(self) -> TextIO:
        """A file for the server to write to."""
        self._reading, writing = os.pipe()
        os.set_blocking(self._reading, False)
        asyncio.get_running_loop().add_reader(self._reading, self._read)
        return os.fdopen(writing, "w")

    async def last(self) -> str:
        """The last line, of all that a server that ends has still to say."""
        if self._reading is not None:
            await asyncio.wait([asyncio.ensure_future(self._closed.wait())], timeout=1.0)
        return self._line

    def close(self) -> None:
        """Reads what is there, and closes the file, which a process that the server left behind may hold open."""
        while self._reading is not None and self._read():
            pass
        self._end()

    def _read(self) -> bool:
        """Reads once; whether there was something."""
        assert self._reading is not None  # nothing calls it after the end
        try:
            data = os.read(self._reading, 65536)
        except BlockingIOError:
            return False
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-1000:] if data else b""
        for line in lines if data else [rest]:
            if text := line.decode("utf-8", "replace").strip():
                logger.debug("%s: %s", self._name, text)
                self._line = text[:1000]
        if not data:
            self._end()
        return bool(data)

    def _end(self) -> None:
        if self._reading is not None:
            asyncio.get_running_loop().remove_reader(self._reading)
            os.close(self._reading)
            self._reading = None
        self._closed.set()
