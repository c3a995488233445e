from urllib.parse import parse_qs, urlparse

import pytest
from support.loopback import ScriptedServer
from transformers.utils import get_json_schema

from mt_grpo.tools import Tool
from mt_grpo.tools.results import read_result
from mt_grpo.tools.search import CorpusError, CorpusSearch, RetrievalSearch, WikipediaSearch

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


def test_the_best_few_of_many_are_those_of_a_full_sort():
    documents = [f"word{number % 7} word{number % 5} same" for number in range(200)]
    whole = CorpusSearch(documents, top_k=200).search("word3 word2 same").split("\n")
    for top_k in (1, 3, 50, 199):
        assert CorpusSearch(documents, top_k).search("word3 word2 same").split("\n") == whole[:top_k]


@pytest.mark.parametrize(
    ("line", "fields", "text"),
    [
        ('{"id": "1", "contents": "Lima\\nis a capital", "title": "Lima"}', None, "Lima\nis a capital"),
        ('{"_id": 1, "title": "Lima", "text": "is a capital"}', None, "Lima\nis a capital"),
        ('{"text": "a capital"}', None, "a capital"),
        ('{"question": "Capital?", "answer": 3}', ["question", "answer"], "Capital?\n3"),
    ],
)
def test_a_jsonl_corpus_is_searched_by_its_text(tmp_path, line, fields, text):
    (tmp_path / "corpus.jsonl").write_text(f"{line}\n\n{line}\n", encoding="utf-8")
    search = CorpusSearch.from_jsonl(tmp_path / "corpus.jsonl", fields, top_k=5)
    assert search.documents == [text, text]
    assert search.search("capital") == f"{text}\n{text}"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"contents": "a"}\n{oops\n', "Line 2 of .*corpus.jsonl is no JSON"),
        ('["a"]\n', "Line 1 of .* is JSON but no object"),
        ('{"body": "a", "id": 1}\n', "Line 1 of .* has no field 'contents', only 'body', 'id': name the fields"),
        ('{"text": "a"}\n{"title": "a"}\n', "Line 2 of .* has no field 'text', only 'title'"),
        ("\n", "has no document: write one JSON object a line"),
    ],
)
def test_a_file_that_is_no_corpus_is_refused(tmp_path, content, says):
    (tmp_path / "corpus.jsonl").write_text(content)
    with pytest.raises(CorpusError, match=says):
        CorpusSearch.from_jsonl(tmp_path / "corpus.jsonl")


@pytest.mark.parametrize("tool", [CorpusSearch(DOCUMENTS), WikipediaSearch(), RetrievalSearch("http://127.0.0.1:1")])
def test_the_schema_describes_the_query(tool):
    function = get_json_schema(tool.search)["function"]
    assert Tool.from_function(tool.search).parameters["required"] == ["query"]
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


# A retrieval server


PASSAGES = [
    {"document": {"id": "7", "contents": '"Peru"\nThe capital of Peru is Lima.'}, "score": 0.9},
    {"document": {"id": "8", "title": "Sol", "text": "The currency of Peru."}, "score": 0.5},
]


def test_a_retrieval_server_is_asked_in_its_form(upstream):
    upstream.reply = 200, {"result": [PASSAGES]}
    search = RetrievalSearch(f"{upstream.url}/retrieve", top_k=2, headers={"X-Key": "k"})
    text, data = read_result(search.search("capital of Peru"), None)
    assert text == '[1] "Peru"\nThe capital of Peru is Lima.\n\n[2] Sol\nThe currency of Peru.'
    assert data == {"documents": [passage["document"] for passage in PASSAGES], "scores": [0.9, 0.5]}
    assert upstream.asked("/retrieve") == [{"queries": ["capital of Peru"], "topk": 2, "return_scores": True}]
    assert upstream.last_headers["X-Key"] == "k"


def test_a_retrieval_server_may_give_no_scores(upstream):
    upstream.reply = 200, {"result": [[passage["document"] for passage in PASSAGES]]}
    text, data = RetrievalSearch(upstream.url, top_k=1).search("Peru")
    assert text == '[1] "Peru"\nThe capital of Peru is Lima.' and data["scores"] == [None]


def test_a_retrieval_server_may_find_nothing(upstream):
    upstream.reply = 200, {"result": [[]]}
    assert RetrievalSearch(upstream.url).search("zxqv") == ("No results.", {"documents": [], "scores": []})


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ((500, {}), "500 Internal Server Error"),
        ((200, "no JSON"), "JSONDecodeError"),
        ((200, {"detail": "no"}), "KeyError: 'result'"),
        ((200, {"result": []}), "ValueError: not enough values"),
        ((200, {"result": None}), "TypeError"),
        ((200, {"result": [["text"]]}), "AttributeError"),
        ((200, {"result": [[{"document": {"id": 1}}]]}), "KeyError: 'contents'"),
        (None, "RemoteProtocolError"),
    ],
)
def test_a_retrieval_server_that_fails_is_an_error(upstream, reply, says):
    upstream.reply = reply
    with pytest.raises(RuntimeError, match=f"The search at {upstream.url} failed: .*{says}"):
        RetrievalSearch(upstream.url).search("Peru")
