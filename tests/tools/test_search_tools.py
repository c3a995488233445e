import asyncio
import threading
import time
from urllib.parse import parse_qs, urlparse

import pytest
from support.loopback import ScriptedServer
from transformers.utils import get_json_schema

from mt_grpo.envs.tool_env import execute_calls
from mt_grpo.tools import Tool
from mt_grpo.tools.function import read_result
from mt_grpo.tools.search import CorpusError, CorpusSearch, RetrievalSearch, WikipediaSearch
from mt_grpo.trajectory import ToolCall

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
    """A loopback server that gives the reply it is told to, or that of a function."""
    server = ScriptedServer(lambda *request: server.reply() if callable(server.reply) else server.reply)
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


BUSY = {"error": {"code": "ratelimited", "info": "You have exceeded your rate limit."}}
FOUND = {"query": {"pages": [{"pageid": 1, "index": 1, "title": "Lima", "extract": "The capital."}]}}


@pytest.mark.parametrize(
    "refusal",
    [
        (429, "slow down", {"Retry-After": "0"}),
        (503, {}, {"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"}),
        (200, BUSY, {"Retry-After": "0"}),
    ],
)
def test_wikipedia_is_asked_again_where_it_says_later(upstream, refusal):
    replies = iter([refusal, refusal, (200, FOUND)])
    upstream.reply = lambda: next(replies)
    assert WikipediaSearch(base_url=upstream.url).search("Lima") == "Lima: The capital."
    assert len(upstream.requests) == 3


def test_wikipedia_is_not_asked_for_ever(upstream):
    upstream.reply = 429, {}, {"Retry-After": "0"}
    with pytest.raises(RuntimeError, match="too many requests, 5 times in a row"):
        WikipediaSearch(base_url=upstream.url).search("Lima")
    assert len(upstream.requests) == 5


@pytest.mark.parametrize("later", ["120", "1e9", "Fri, 01 Jan 2100 00:00:00 GMT"])
def test_a_long_wait_is_told_and_kept_by_every_search(upstream, later):
    upstream.reply = 429, {}, {"Retry-After": later}
    search = WikipediaSearch(base_url=upstream.url)
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"too many requests; Wikipedia asks to wait (120|119|300|299) s"):
            search.search("Lima")
    assert len(upstream.requests) == 1


def test_wikipedia_is_waited_for_as_long_as_it_says(upstream, monkeypatch):
    replies = iter([(429, {}, {"Retry-After": "7"}), (429, {}), (200, FOUND)])
    upstream.reply = lambda: next(replies)
    clock, slept = [time.monotonic()], []

    def sleep(seconds):
        slept.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", sleep)
    assert WikipediaSearch(base_url=upstream.url).search("Lima") == "Lima: The capital."
    assert slept[0] == pytest.approx(7.0) and 1.0 <= slept[1] <= 2.0


def test_few_searches_of_wikipedia_run_at_once(upstream):
    running, most, gate, lock = 0, 0, threading.Event(), threading.Lock()

    def answer():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == 4:
                gate.set()
        gate.wait(10)
        with lock:
            running -= 1
        return 200, FOUND

    upstream.reply = answer
    tool = Tool.from_function(WikipediaSearch(base_url=upstream.url).search)
    calls = [ToolCall("search", {"query": str(number)}) for number in range(48)]

    async def conversations():
        await asyncio.gather(*(execute_calls([call], {"search": tool}, 30.0) for call in calls))

    asyncio.run(conversations())
    assert most == 4
    assert [call.result for call in calls] == ["Lima: The capital."] * 48


# A retrieval server


PASSAGES = [
    {"document": {"id": "7", "contents": '"Peru"\nThe capital of Peru is Lima.'}, "score": 0.9},
    {"document": {"id": "8", "title": "Sol", "text": "The currency of Peru."}, "score": 0.5},
]


def test_a_retrieval_server_is_asked_in_its_form(upstream):
    upstream.reply = 200, {"result": [PASSAGES]}
    search = RetrievalSearch(f"{upstream.url}/retrieve", top_k=2, headers={"X-Key": "k"})
    text, data, *_ = read_result(search.search("capital of Peru"), None)
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
