"""Search tools, and the connections of tools that ask a server."""

import asyncio
import gc
import threading
import time
import warnings
from urllib.parse import parse_qs, urlparse

import pytest
from support.loopback import ScriptedServer
from transformers.utils import get_json_schema

from mt_grpo.envs.tool_env import execute_calls
from mt_grpo.tools import Tool
from mt_grpo.tools.function import _read_result
from mt_grpo.tools.search import CorpusError, CorpusSearch, RetrievalSearch, WikipediaSearch
from mt_grpo.trajectory import ToolCall

DOCUMENTS = [
    "Peru: The capital of Peru is Lima.",
    "Peru: The currency of Peru is the sol.",
    "Indium: The chemical symbol of Indium is In.",
]


@pytest.mark.parametrize(
    ("query", "top_k", "found"),
    [
        ("currency Peru", 1, [1]),
        ("capital LIMA?", 1, [0]),
        ("in", 1, [2]),  # short words count
        ("peru sol", 2, [1, 0]),
        ("lima", 3, [0]),  # documents without a common word are left out
        *((query, 3, []) for query in ("", "  ?!", "zebra")),
    ],
)
def test_the_best_documents_come_first(query, top_k, found):
    documents = [DOCUMENTS[index] for index in found] or ["No results."]
    assert CorpusSearch(DOCUMENTS, top_k).search(query).split("\n") == documents


def test_the_best_few_of_many_are_those_of_a_full_sort():
    """Documents of equal scores keep their order."""
    assert CorpusSearch(["b same", "a same", "c same"], 3).search("same").split("\n") == ["b same", "a same", "c same"]
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
    query = {"type": "string", "description": "What to look for."}
    function = get_json_schema(tool.search)["function"]
    assert function["name"] == "search" and Tool.from_function(tool.search).parameters == function["parameters"]
    assert function["parameters"] == {"type": "object", "properties": {"query": query}, "required": ["query"]}


@pytest.fixture
def upstream():
    """A loopback server that gives the reply it is told to, or that of a function."""
    server = ScriptedServer(lambda *request: server.reply() if callable(server.reply) else server.reply)
    yield server
    server.stop()


FOUND = {"query": {"pages": [{"pageid": 1, "index": 1, "title": "Lima", "extract": "The capital."}]}}


@pytest.fixture
def wikipedia(upstream):
    """Searches it; what it replies are `upstream.reply`."""
    return WikipediaSearch(top_k=2, sentences=1, base_url=upstream.url).search


def test_wikipedia_pages_come_in_search_order(upstream, wikipedia):
    pages = [
        {"pageid": 1, "index": 2, "title": "Peru", "extract": "Peru is a country.\n"},
        {"pageid": 2, "index": 1, "title": "Lima", "extract": "Lima is the capital."},
    ]
    upstream.reply = 200, {"query": {"pages": pages}}
    assert wikipedia("capital Peru") == "Lima: Lima is the capital.\nPeru: Peru is a country."
    parameters = parse_qs(urlparse(upstream.last.path).query)
    asked = [parameters[name] for name in ("gsrsearch", "gsrlimit", "exsentences")]
    assert asked == [["capital Peru"], ["2"], ["1"]] and "mt-grpo" in upstream.last_headers["User-Agent"]
    upstream.reply = 200, {"batchcomplete": True}
    assert wikipedia("zxqv") == "No results."


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ((500, {}), "Wikipedia search failed.*500"),
        ((200, {"error": {"code": "missingparam", "info": "The parameter must be set."}}), "must be set"),
        (None, "Wikipedia search failed"),
    ],
)
def test_a_wikipedia_that_fails_is_an_error(upstream, wikipedia, reply, says):
    upstream.reply = reply
    with pytest.raises(RuntimeError, match=says):
        wikipedia("Peru")


BUSY = {"error": {"code": "ratelimited", "info": "You have exceeded your rate limit."}}


@pytest.mark.parametrize(
    "refusal",
    [
        (429, "slow down", {"Retry-After": "0"}),
        (503, {}, {"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"}),
        (200, BUSY, {"Retry-After": "0"}),
    ],
)
def test_wikipedia_is_asked_again_where_it_says_later(upstream, wikipedia, refusal):
    replies = iter([refusal, refusal, (200, FOUND)])
    upstream.reply = lambda: next(replies)
    assert wikipedia("Lima") == "Lima: The capital."
    assert len(upstream.requests) == 3


def test_wikipedia_is_not_asked_for_ever(upstream, wikipedia):
    upstream.reply = 429, {}, {"Retry-After": "0"}
    with pytest.raises(RuntimeError, match="too many requests, 5 times in a row"):
        wikipedia("Lima")
    assert len(upstream.requests) == 5


@pytest.mark.parametrize("later", ["120", "1e9", "Fri, 01 Jan 2100 00:00:00 GMT"])
def test_a_long_wait_is_told_and_kept_by_every_search(upstream, wikipedia, later):
    upstream.reply = 429, {}, {"Retry-After": later}
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"too many requests; Wikipedia asks to wait (120|119|300|299) s"):
            wikipedia("Lima")
    assert len(upstream.requests) == 1


def test_wikipedia_is_waited_for_as_long_as_it_says(upstream, wikipedia, monkeypatch):
    replies = iter([(429, {}, {"Retry-After": "7"}), (429, {}), (200, FOUND)])
    upstream.reply = lambda: next(replies)
    clock, slept = [time.monotonic()], []

    def sleep(seconds):
        slept.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", sleep)
    assert wikipedia("Lima") == "Lima: The capital."
    assert slept[0] == pytest.approx(7.0) and 1.0 <= slept[1] <= 2.0


def test_few_searches_of_wikipedia_run_at_once(upstream, wikipedia):
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
    tool = Tool.from_function(wikipedia)
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
    text, data, *_ = _read_result(search.search("capital of Peru"), None)
    assert text == '[1] "Peru"\nThe capital of Peru is Lima.\n\n[2] Sol\nThe currency of Peru.'
    assert data == {"documents": [passage["document"] for passage in PASSAGES], "scores": [0.9, 0.5]}
    assert upstream.asked("/retrieve") == [{"queries": ["capital of Peru"], "topk": 2, "return_scores": True}]
    assert upstream.last_headers["X-Key"] == "k"


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (
            [passage["document"] for passage in PASSAGES],  # without scores
            ('[1] "Peru"\nThe capital of Peru is Lima.', {"documents": [PASSAGES[0]["document"]], "scores": [None]}),
        ),
        ([], ("No results.", {"documents": [], "scores": []})),
    ],
)
def test_a_retrieval_server_may_give_less(upstream, result, found):
    upstream.reply = 200, {"result": [result]}
    assert RetrievalSearch(upstream.url, top_k=1).search("Peru") == found


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


def test_a_tool_that_nobody_has_closes_its_connections():
    """They stay open between calls."""
    server = ScriptedServer(lambda *request: (200, {"result": [[]]}))
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", ResourceWarning)
            RetrievalSearch(server.url).search("Peru")
            gc.collect()
    finally:
        server.stop()
    assert len(server.requests) == 1
    assert not [warning.message for warning in warned if f"raddr=('127.0.0.1', {server.port})" in str(warning.message)]
