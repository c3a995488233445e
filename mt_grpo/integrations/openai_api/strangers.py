"""Requests that nobody of the run made: counted, and told in one line that holds nothing of them."""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.http import HttpProcessingError

logger = logging.getLogger(__name__)

ANSWERED = (web.RequestPayloadError, ConnectionError)
"""A body that is damaged, and a client that is gone."""


class Strangers:
    """
    Requests without the key of a conversation, and what is no HTTP at all.

    Attributes:
        log (`logging.Logger`): For aiohttp, which would write a traceback with the headers of each such request.
    """

    def __init__(self) -> None:
        self._count, self._told = 0, False
        self.log = logging.Logger(f"{__name__}.http")  # nobody's child: it writes nothing itself
        self.log.addFilter(self._judge)

    def note(self) -> None:
        """Counts one."""
        self._count += 1

    def tell(self) -> None:
        """Says how many there were, unless that was said before."""
        if self._count and not self._told:
            self._told = True
            logger.warning(
                "Requests that the server of the agents refused: %d so far. They are no HTTP, or have no key of a "
                "conversation; agents find theirs in `client.api_key` or `OPENAI_API_KEY`. This is said once.",
                self._count,
            )

    def _judge(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            self.note()
        elif not isinstance(error, ANSWERED) and record.levelno >= logging.ERROR:  # a bug
            logger.error("The server of the agents could not answer a request.", exc_info=error)
        return False
