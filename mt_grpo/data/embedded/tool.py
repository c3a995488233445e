"""The search tool of the embedded task."""

import functools

from mt_grpo.data.embedded.corpus import passages
from mt_grpo.tools.search import CorpusSearch


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
    return _index().search(query)
