"""Search tools: BM25 over documents in memory, a retrieval server, and the live Wikipedia."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import bm25s
import httpx
import numpy as np

from mt_grpo.errors import UserError
from mt_grpo.servers.external import WebClient, retry_after
from mt_grpo.tools.loading import tool

_NO_RESULTS = "No results."

_WIKIPEDIA_CONCURRENCY = 4
"""Searches of one process under way at once. Wikipedia asks its users to send few at a time."""

_WIKIPEDIA_WAIT = 15.0  # most seconds that one search waits in all when Wikipedia asks for it

_WIKIPEDIA_TRIES = 5

_LONGEST_PAUSE = 300.0  # seconds after which Wikipedia is asked again, whatever it said

_COME_LATER = (429, 503, "ratelimited", "maxlag")
"""Statuses, and codes in an answer of status 200, by which the API asks to come again later."""
_TEXT_FIELDS = (("contents",), ("title", "text"), ("text",))
"""The fields of a document that are searched, in the forms retrieval corpora have."""


class CorpusError(UserError, ValueError):
    """A file that is no corpus. The message is one sentence fit for the user."""


class CorpusSearch:
    """
    BM25 search over a fixed list of documents, held in memory.

    Args:
        documents (`list[str]`): Texts to search, one or more.
        top_k (`int`, *optional*, defaults to `1`): Documents a search returns at most.
    """

    def __init__(self, documents: list[str], top_k: int = 1) -> None:
        self.documents = documents
        self.top_k = top_k
        self._index = bm25s.BM25()
        self._index.index([_words(document) for document in documents], show_progress=False)

    @classmethod
    def from_jsonl(cls, path: str | Path, fields: Sequence[str] | None = None, top_k: int = 1) -> CorpusSearch:
        """
        Reads a corpus with one JSON object a line.

        Args:
            path (`str`): The file.
            fields (`Sequence[str]`, *optional*): Fields of a document that are searched and shown, one a line. Without
                it `contents`, else `title` and `text`, else `text`, as in the first document.
            top_k (`int`, *optional*, defaults to `1`): Documents a search returns at most.

        Raises:
            CorpusError: If a line is no JSON object, a document lacks a field, or there is none.
        """
        documents: list[str] = []
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    document = json.loads(line)
                    fault = "is JSON but no object: write one object a line"
                except (ValueError, RecursionError) as error:
                    document, fault = None, f"is no JSON ({error}): write one object a line"
                if isinstance(document, dict):
                    fields = fields or _text_fields(document)
                    missing = ", ".join(repr(field) for field in fields if field not in document)
                    if not missing:
                        documents.append("\n".join(str(document[field]) for field in fields))
                        continue
                    there, mend = ", ".join(map(repr, document)), "name the fields that hold text with `fields`"
                    fault = f"has no field {missing}, only {there}: {mend}"
                raise CorpusError(f"Line {number} of {path} {fault}.")
        if not documents:
            raise CorpusError(f"The corpus {path} has no document: write one JSON object a line.")
        return cls(documents, top_k)

    def search(self, query: str) -> str:
        """Search the corpus.

        Args:
            query: What to look for.

        Returns:
            The documents found, best first.
        """
        words = [word for word in _words(query) if word in self._index.vocab_dict]
        if not words:
            return _NO_RESULTS
        scores = self._index.get_scores(words)
        # The rest of a large corpus is not sorted.
        least = np.partition(scores, -self.top_k)[-self.top_k] if self.top_k < len(scores) else 0.0
        found = np.flatnonzero((scores > 0) & (scores >= least))
        # A stable sort leaves equal scores in document order.
        best = found[np.argsort(-scores[found], kind="stable")][: self.top_k]
        return "\n".join(self.documents[i] for i in best) or _NO_RESULTS


class RetrievalSearch:
    """
    Search through a retrieval server in the form of Search-R1 and verl: `POST {"queries": [...], "topk": k,
    "return_scores": true}`, answered with `{"result": [[{"document": {"contents": ...}, "score": ...}, ...]]}`, one
    list a query, best first. A document may also have `title` and `text`, and come without a score.

    Args:
        url (`str`): Address of the endpoint, such as `http://retriever:8000/retrieve`.
        top_k (`int`, *optional*, defaults to `3`): Documents a search returns at most.
        timeout (`float`, *optional*, defaults to `30.0`): Seconds that an answer of the server may take as a whole.
        headers (`Mapping[str, str]`, *optional*): Sent with every request, such as a key.
    """

    def __init__(
        self, url: str, top_k: int = 3, timeout: float = 30.0, headers: Mapping[str, str] | None = None
    ) -> None:
        self.url = url
        self.top_k, self._timeout = top_k, timeout
        self._client = WebClient(headers)

    def search(self, query: str) -> tuple[str, dict[str, Any]]:
        """Search the corpus.

        Args:
            query: What to look for.

        Returns:
            The documents found, best first.

        Raises:
            RuntimeError: The server could not be reached, refused the request or gave no list of documents.
        """
        request = {"queries": [query], "topk": self.top_k, "return_scores": True}
        try:
            answer = self._client.ask("POST", self.url, self._timeout, json=request)
            answer.response.raise_for_status()
            [results] = answer.json()["result"]
            documents = [result.get("document", result) for result in results[: self.top_k]]
            scores = [result.get("score") for result in results[: self.top_k]]
            texts = ["\n".join(str(each[field]) for field in _text_fields(each)) for each in documents]
        except (httpx.HTTPError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise RuntimeError(f"The search at {self.url} failed: {type(error).__name__}: {error}") from error
        text = "\n\n".join(f"[{number}] {text}" for number, text in enumerate(texts, 1))
        return text or _NO_RESULTS, {"documents": documents, "scores": scores}


@tool("wikipedia_search")
class WikipediaSearch:
    """
    Search over the live Wikipedia through the MediaWiki API. Few searches of a process run at once. Where Wikipedia
    answers that there are too many, all of them wait as long as its `Retry-After` says, and try again.

    Args:
        top_k (`int`, *optional*, defaults to `1`): Articles a search returns at most.
        sentences (`int`, *optional*, defaults to `3`): Sentences of each article's introduction that are returned.
        timeout (`float`, *optional*, defaults to `10.0`): Seconds that an answer of the server may take as a whole.
        base_url (`str`, *optional*): Address of the MediaWiki `api.php`, of any Wikipedia.
    """

    def __init__(
        self,
        top_k: int = 1,
        sentences: int = 3,
        timeout: float = 10.0,
        base_url: str = "https://en.wikipedia.org/w/api.php",
    ):
        self.top_k = top_k
        self.sentences = sentences
        self.base_url = base_url
        self._timeout = timeout
        self._client = WebClient({"User-Agent": "mt-grpo (research; httpx)"})
        self._until, self._lock = 0.0, threading.Lock()  # no thread asks before then

    @tool(concurrency=_WIKIPEDIA_CONCURRENCY)
    def search(self, query: str) -> str:
        """Search Wikipedia.

        Args:
            query: What to look for.

        Returns:
            The articles found, best first.

        Raises:
            RuntimeError: The server could not be reached, refused the request, or asks to wait for too long.
        """
        params: dict[str, str | int] = {
            "action": "query",
            "format": "json",
            "formatversion": 2,
            "generator": "search",
            "gsrsearch": query,
            "gsrlimit": self.top_k,
            "prop": "extracts",
            "exintro": 1,
            "explaintext": 1,
            "exsentences": self.sentences,
            "exlimit": "max",
        }
        payload = self._ask(params)
        pages = payload.get("query", {}).get("pages", [])
        # The API lists pages by id; `index` is the rank in the search.
        pages = sorted(pages, key=lambda page: page["index"])
        return "\n".join(f"{page['title']}: {page.get('extract', '').strip()}" for page in pages) or _NO_RESULTS

    def _ask(self, params: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request. It is sent again if Wikipedia asks for that."""
        give_up = time.monotonic() + _WIKIPEDIA_WAIT
        for attempt in range(_WIKIPEDIA_TRIES):
            while (left := self._until - time.monotonic()) > 0:
                if self._until > give_up:
                    raise RuntimeError(
                        f"Wikipedia search failed: too many requests; Wikipedia asks to wait {left:.0f} s."
                    )
                time.sleep(left)
            try:
                answer = self._client.ask("GET", self.base_url, self._timeout, params=params)
                response = answer.response
                if response.status_code not in _COME_LATER:
                    response.raise_for_status()
                    payload = answer.json()
                    # The API reports its own failures, such as an empty search string, with status 200.
                    if "error" not in payload:
                        return payload
                    if payload["error"]["code"] not in _COME_LATER:
                        raise RuntimeError(f"Wikipedia search failed: {payload['error']['info']}")
            except (httpx.HTTPError, ValueError) as error:
                raise RuntimeError(f"Wikipedia search failed: {error}") from error
            backoff = 2.0**attempt * random.uniform(0.5, 1.0)
            asked = retry_after(response)
            pause = min(backoff if asked is None else max(0.02 * backoff, asked), _LONGEST_PAUSE)
            with self._lock:
                self._until = max(self._until, time.monotonic() + pause)
        raise RuntimeError(f"Wikipedia search failed: too many requests, {_WIKIPEDIA_TRIES} times in a row.")


def _text_fields(document: Mapping[str, object]) -> Sequence[str]:
    return next((fields for fields in _TEXT_FIELDS if document.keys() >= set(fields)), _TEXT_FIELDS[0])


def _words(text: str) -> list[str]:
    """Lower-case words. Stop words stay: a chemical symbol may look like one."""
    return re.findall(r"\w+", text.lower())
