"""Search tools: BM25 over documents in memory, and the live Wikipedia."""

import re

import bm25s
import httpx
import numpy as np

from mt_grpo.tools.loading import tool

NO_RESULTS = "No results."


class CorpusSearch:
    """BM25 search over a fixed list of documents.

    Args:
        documents: texts to search.
        top_k: how many documents a search returns at most.
    """

    def __init__(self, documents: list[str], top_k: int = 1):
        self.documents = documents
        self.top_k = top_k
        self._index = bm25s.BM25()
        self._index.index([_words(document) for document in documents], show_progress=False)

    def search(self, query: str) -> str:
        """Search the corpus.

        Args:
            query: What to look for.

        Returns:
            The documents found, best first.
        """
        words = [word for word in _words(query) if word in self._index.vocab_dict]
        if not words:
            return NO_RESULTS
        scores = self._index.get_scores(words)
        # A stable sort leaves equal scores in document order.
        best = np.argsort(-scores, kind="stable")[: self.top_k]
        return "\n".join(self.documents[i] for i in best if scores[i] > 0) or NO_RESULTS


@tool("wikipedia_search")
class WikipediaSearch:
    """Search over the live Wikipedia through the MediaWiki API.

    Args:
        top_k: how many articles a search returns at most.
        sentences: how many sentences of each article's introduction are returned.
        timeout: seconds to wait for the server.
        base_url: address of the MediaWiki `api.php`.
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
        self._client = httpx.Client(timeout=timeout, headers={"User-Agent": "mt-grpo (research; httpx)"})

    def search(self, query: str) -> str:
        """Search Wikipedia.

        Args:
            query: What to look for.

        Returns:
            The articles found, best first.

        Raises:
            RuntimeError: The server could not be reached or refused the request.
        """
        params = {
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
        try:
            response = self._client.get(self.base_url, params=params)
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise RuntimeError(f"Wikipedia search failed: {error}") from error
        payload = response.json()
        # The API reports its own failures, such as an empty search string, with status 200.
        if "error" in payload:
            raise RuntimeError(f"Wikipedia search failed: {payload['error']['info']}")
        pages = payload.get("query", {}).get("pages", [])
        # The API lists pages by id; `index` is the rank in the search.
        pages = sorted(pages, key=lambda page: page["index"])
        return "\n".join(f"{page['title']}: {page.get('extract', '').strip()}" for page in pages) or NO_RESULTS


def _words(text: str) -> list[str]:
    """Lower-case words. Nothing is dropped: a chemical symbol may well look like a stop word."""
    return re.findall(r"\w+", text.lower())
