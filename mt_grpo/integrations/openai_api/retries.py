"""Which requests are a client's second attempt at the same, so that nothing is sampled and trained twice."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any


@dataclass(eq=False)
class Attempt:
    """
    A request and its answer.

    Args:
        answer (`asyncio.Future`): What it is answered with, in the end.
        delivered (`bool`): Whether the answer went out while the client was still connected.
    """

    answer: asyncio.Future[Any]
    delivered: bool = False


class Retries:
    """
    The requests of one conversation. A request is a retry of an earlier one if

    - it has the same `Idempotency-Key` and the same body;
    - it says so (`x-stainless-retry-count` above 0, as OpenAI's clients do) and has the same body;
    - it does not say which attempt it is, and the same body is being answered, or its answer reached nobody.
    """

    def __init__(self) -> None:
        self._attempts: dict[str, list[Attempt]] = {}

    def find(self, content: bytes, headers: Mapping[str, str]) -> tuple[str, Attempt | None]:
        """The key of a request, and the attempt that it repeats."""
        given = headers.get("Idempotency-Key")
        key = blake2b(content, digest_size=16).hexdigest() + ("" if given is None else f" {given}")
        attempts = self._attempts.get(key, [])
        if given is not None:
            return key, attempts[-1] if attempts else None
        count = headers.get("x-stainless-retry-count")
        lost = [attempt for attempt in attempts if not attempt.delivered]
        if count is None:
            return key, lost[-1] if lost else None
        if count == "0":
            return key, None
        return key, (lost or attempts)[-1] if attempts else None

    def begin(self, key: str, answer: asyncio.Future[Any]) -> Attempt:
        """Takes note of a request. One that ends with an error is forgotten: its retry is asked anew."""
        attempt = Attempt(answer)
        self._attempts.setdefault(key, []).append(attempt)
        answer.add_done_callback(lambda done: self._end(key, attempt))
        return attempt

    def _end(self, key: str, attempt: Attempt) -> None:
        if attempt.answer.cancelled() or attempt.answer.exception() is not None:
            self._attempts[key].remove(attempt)

    def cancel(self) -> None:
        """Ends what is still being answered."""
        for attempts in self._attempts.values():
            for attempt in attempts:
                attempt.answer.cancel()
