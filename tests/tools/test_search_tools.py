from urllib.parse import parse_qs, urlparse

import pytest
from support.loopback import ScriptedServer
from transformers.utils import get_json_schema

from mt_grpo.tools.search import CorpusSearch, WikipediaSearch

DOCUMENTS = [
    "Peru: The capital of Peru is Lima.",
    "Peru: The currency of Peru is the sol.",
    "Indium: The chemical symbol of Indium is In.",
]


def test_the_best_document_comes_first():
    assert CorpusSearch(DOCUMENTS).search("currency Peru") == DOCUMENTS[1]
    assert CorpusSearch(DOCUMENTS).search("capital LIMA?") == DOCUMENTS[0]


def test_short_words_count():
    assert CorpusSearch(DOCUMENTS).search("in") == DOCUMENTS[2]


def test_top_k_documents_are_joined_by_newlines():
    assert CorpusSearch(DOCUMENTS, top_k=2).search("peru sol").split("\n") == [DOCUMENTS[1], DOCUMENTS[0]]


def test_documents_without_a_common_word_are_left_out():
    assert CorpusSearch(DOCUMENTS, top_k=3).search("lima") == DOCUMENTS[0]


@pytest.mark.parametrize("query", ["", "  ?!", "zebra"])
def test_nothing_found(query):
    assert CorpusSearch(DOCUMENTS).search(query) == "No results."


def test_equal_scores_keep_document_order():
    documents = ["b same", "a same", "c same"]
    assert CorpusSearch(documents, top_k=3).search("same").split("\n") == documents


@pytest.mark.parametrize("tool", [CorpusSearch(DOCUMENTS), WikipediaSearch()])
def test_the_schema_describes_the_query(tool):
    function = get_json_schema(tool.search)["function"]
    assert function["name"] == "search"
    assert function["parameters"]["properties"] == {"query": {"type": "string", "description": "What to look for."}}
    assert function["parameters"]["required"] == ["query"]


@pytest.fixture
def upstream():
    """A loopback server that gives the reply it is told to."""
    server = ScriptedServer(lambda method, path, body: server.reply)
    yield server
    server.stop()


def test_wikipedia_pages_come_in_search_order(upstream):
    pages = [
        {"pageid": 1, "index": 2, "title": "Peru", "extract": "Peru is a country.\n"},
        {"pageid": 2, "index": 1, "title": "Lima", "extract": "Lima is the capital."},
    ]
    upstream.reply = 200, {"query": {"pages": pages}}
    result = WikipediaSearch(top_k=2, sentences=1, base_url=upstream.url).search("capital Peru")
    assert result == "Lima: Lima is the capital.\nPeru: Peru is a country."
    parameters, agent = parse_qs(urlparse(upstream.last.path).query), upstream.last_headers["User-Agent"]
    assert parameters["gsrsearch"] == ["capital Peru"]
    assert parameters["gsrlimit"] == ["2"]
    assert parameters["exsentences"] == ["1"]
    assert "mt-grpo" in agent


def test_wikipedia_without_results(upstream):
    upstream.reply = 200, {"batchcomplete": True}
    assert WikipediaSearch(base_url=upstream.url).search("zxqv") == "No results."


def test_wikipedia_http_failure(upstream):
    upstream.reply = 500, {}
    with pytest.raises(RuntimeError, match="Wikipedia search failed.*500"):
        WikipediaSearch(base_url=upstream.url).search("Peru")


def test_wikipedia_failure_told_in_the_body(upstream):
    upstream.reply = 200, {"error": {"code": "missingparam", "info": "The parameter must be set."}}
    with pytest.raises(RuntimeError, match="must be set"):
        WikipediaSearch(base_url=upstream.url).search("")


def test_wikipedia_unreachable():
    with pytest.raises(RuntimeError, match="Wikipedia search failed"):
        WikipediaSearch(timeout=1.0, base_url="http://127.0.0.1:1/").search("Peru")
