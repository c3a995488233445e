"""Work that takes long says how far it is."""

from __future__ import annotations

import threading
from collections.abc import Callable

SECONDS = 8.0
"""Of silence at most, by default."""


class Silence:
    """
    Says how far work is whenever nothing was said for a while, from a thread of its own, as long as the block runs.
    """

    def __init__(self, say: Callable[[], object], seconds: float | None = None) -> None:
        self._say, self._seconds = say, SECONDS if seconds is None else seconds
        self._heard = threading.Event()
        self._over = False
        self._thread: threading.Thread | None = None

    @property
    def watched(self) -> bool:
        """Whether the block runs."""
        return self._thread is not None

    def broken(self) -> None:
        """Notes that something was said."""
        self._heard.set()

    def __enter__(self) -> Silence:
        self._over = False
        self._thread = threading.Thread(target=self._watch, name="silence", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over = True
        self._heard.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _watch(self) -> None:
        while not self._over:
            self._heard.clear()
            if not self._heard.wait(self._seconds) and not self._over:
                self._say()
