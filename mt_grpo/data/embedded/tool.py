"""The search tool of the embedded task."""

import functools
import threading

from mt_grpo.data.embedded.corpus import passages
from mt_grpo.tools.search import CorpusSearch

_BUILDING = threading.Lock()


@functools.cache
def _index() -> CorpusSearch:
    return CorpusSearch(passages())


def search(query: str) -> str:
    """Search the corpus.

    Args:
        query: What to look for.

    Returns:
        The passage that fits best.
    """
    with _BUILDING:  # the first searches come from many threads at once, and one index is enough
        index = _index()
    return index.search(query)
