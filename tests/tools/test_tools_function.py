"""Tools: described from a function, calls checked, results written for the model, lists of a recipe loaded."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest

from mt_grpo.imports import ImportPathError
from mt_grpo.tools import Tool, ToolDefinitionError, calculator, load_tools
from mt_grpo.tools.function import render


def search(query: str, k: int = 3, unit: Literal["km", "mi"] = "km", tags: list[str] | None = None) -> str:
    """Search the corpus.

    Args:
        query: What to look for.
        k: How many results.
        unit: Unit of lengths.
        tags: Topics to keep.

    Returns:
        The results.
    """
    return query


async def fetch(url: str) -> str:
    """Fetch a page.

    Args:
        url: Its address.
    """
    return url


class Counter:
    """An object with one public method."""

    def count(self, text: str) -> int:
        """Count characters.

        Args:
            text: What to count.
        """
        return len(text)


class Repeater:
    def __call__(self, text: str) -> str:
        """Repeat a text.

        Args:
            text: What to repeat.
        """
        return text * 2


class AsyncRepeater:
    async def __call__(self, text: str) -> str:
        """Repeat a text.

        Args:
            text: What to repeat.
        """
        return text * 2


SEARCH = Tool.from_function(search)


def test_a_function_is_described_by_name_docstring_and_hints() -> None:
    assert SEARCH.schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the corpus.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for."},
                    "k": {"type": "integer", "description": "How many results."},
                    "unit": {"type": "string", "enum": ["km", "mi"], "description": "Unit of lengths."},
                    "tags": {
                        "type": "array",
                        "items": {"type": "string"},
                        "nullable": True,
                        "description": "Topics to keep.",
                    },
                },
                "required": ["query"],
            },
        },
    }
    json.dumps(SEARCH.schema)


def test_a_bound_method_and_a_callable_object_are_tools() -> None:
    method, instance = Tool.from_function(Counter().count), Tool.from_function(Repeater())
    assert (method.name, method.function(text="abc")) == ("count", 3)
    assert (instance.name, instance.description, instance.function(text="ab")) == (
        "Repeater",
        "Repeat a text.",
        "abab",
    )
    assert list(method.parameters["properties"]) == list(instance.parameters["properties"]) == ["text"]


def test_async_functions_are_told_from_sync_ones() -> None:
    assert [Tool.from_function(fn).is_async for fn in (search, fetch, Repeater(), AsyncRepeater())] == [
        False,
        True,
        False,
        True,
    ]
    assert Tool("fetch", "Fetch.", fetch_parameters(), lambda url: fetch(url), is_async=True).is_async
    assert asyncio.run(Tool.from_function(AsyncRepeater()).function(text="a")) == "aa"


def fetch_parameters() -> dict[str, Any]:
    return {"type": "object", "properties": {"url": {"type": "string"}}, "required": ["url"]}


def bare(query: str) -> str:
    return query


def only_arguments(query: str) -> str:
    """
    Args:
        query: What to look for.
    """
    return query


def unhinted(query, k: int) -> str:
    """Search.

    Args:
        query: What to look for.
        k: How many.
    """
    return query


def undocumented(query: str, k: int) -> str:
    """Search.

    Args:
        query: What to look for.
    """
    return query


def variadic(*queries: str, **options: str) -> str:
    """Search.

    Args:
        queries: What to look for.
        options: How.
    """
    return queries[0]


def positional(query: str, /) -> str:
    """Search.

    Args:
        query: What to look for.
    """
    return query


def custom_type(query: Counter) -> str:
    """Search.

    Args:
        query: What to look for.
    """
    return str(query)


def unknown_type(query: Missing) -> str:  # noqa: F821
    """Search.

    Args:
        query: What to look for.
    """
    return str(query)


def bad_choices(unit: str) -> str:
    """Search.

    Args:
        unit: A unit (choices: km, mi)
    """
    return unit


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (bare, "'bare' has no docstring: begin it with"),
        (only_arguments, "'only_arguments' has no docstring"),
        (unhinted, "'unhinted' has no type hint for 'query': write one, as in `query: str`"),
        (undocumented, "'undocumented' does not describe 'k' in its docstring: add a line `k: what it is`"),
        (variadic, "'variadic' has the arguments '*queries: 'str'', '**options: 'str''"),
        (positional, "'positional' has the argument 'query: 'str''"),
        (partial(search, k=2), "'partial' has the arguments '*args', '**kwargs'"),
        (custom_type, "'custom_type' has a type hint that has no JSON form"),
        (unknown_type, "'unknown_type' has a type hint that has no JSON form: name 'Missing' is not defined"),
        (bad_choices, "'bad_choices' lists `(choices: ...)` that are not JSON"),
    ],
)
def test_a_function_that_cannot_be_described_is_refused(function: Any, said: str) -> None:
    with pytest.raises(ToolDefinitionError) as refusal:
        Tool.from_function(function)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"type": "object", "properties": {"k": {"type": "image"}}}, "no JSON schema at 'properties.k.type': 'image'"),
        ({"type": "array"}, "not of `type: object`"),
        ({}, "not of `type: object`"),
    ],
)
def test_parameters_that_are_no_schema_of_an_object_are_refused(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(ToolDefinitionError, match="The tool 'draw' has parameters") as refusal:
        Tool("draw", "Draw.", parameters, bare)
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"query": "x"}, None),
        ({"query": "x", "k": 2, "unit": "mi", "tags": ["a"]}, None),
        ({"query": "x", "tags": None}, None),
        ({}, "search: missing argument 'query'"),
        ({"q": "x"}, "search: unknown argument 'q'; it takes 'query', 'k', 'unit', 'tags'"),
        ({"k": "x", "q": 1, "p": 1}, "search: unknown arguments 'q', 'p'; it takes 'query', 'k', 'unit', 'tags'"),
        ({"k": "x"}, "search: missing argument 'query'"),
        ({"query": "x", "k": "3"}, "search: argument 'k' must be of type integer, not string"),
        ({"query": "x", "k": True}, "search: argument 'k' must be of type integer, not boolean"),
        ({"query": None}, "search: argument 'query' must be of type string, not null"),
        ({"query": "x", "tags": "a"}, "search: argument 'tags' must be of type array or null, not string"),
        ({"query": "x", "tags": ["a", 1]}, "search: argument 'tags[1]' must be of type string, not integer"),
        ({"query": "x", "unit": "m"}, 'search: argument \'unit\' must satisfy {"enum": ["km", "mi"]}'),
        (["x"], "search: the arguments must be a JSON object, not array"),
        ("x", "search: the arguments must be a JSON object, not string"),
        (None, "search: the arguments must be a JSON object, not null"),
    ],
)
def test_a_call_is_checked_in_words_a_model_can_act_on(arguments: Any, problem: str | None) -> None:
    assert SEARCH.check(arguments) == problem


def test_a_hand_written_schema_is_checked_as_it_says() -> None:
    options = {"type": "object", "properties": {"n": {"minimum": 1}}, "required": ["n"]}
    closed = Tool("run", "Run.", {"type": "object", "properties": {"options": options}, "minProperties": 1}, bare)
    assert closed.check({"options": {}}) == 'run: argument \'options\' must satisfy {"required": ["n"]}'
    assert closed.check({"options": {"n": 0}}) == "run: argument 'options.n' must satisfy {\"minimum\": 1}"
    assert closed.check({}) == 'run: the arguments must satisfy {"minProperties": 1}'
    without = Tool("stop", "Stop.", {"type": "object"}, bare)
    assert without.check({}) is None
    assert without.check({"now": True}) == "stop: unknown argument 'now'; it takes none"
    open_ended = Tool("any", "Any.", {"type": "object", "additionalProperties": {"type": "string"}}, bare)
    assert open_ended.check({"x": "1"}) is None
    assert open_ended.check({"x": 1}) == "any: argument 'x' must be of type string, not integer"


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "number", "multipleOf": 0.5}, float("nan")),
        ({"type": "number", "multipleOf": 0.5}, 10**400),
        ({"$ref": "http://127.0.0.1:1/schema.json"}, 1),
        ({"$ref": "#/$defs/nowhere"}, 1),
    ],
)
def test_what_cannot_be_checked_is_told_to_the_model(schema: dict[str, Any], value: Any) -> None:
    tool = Tool("f", "F.", {"type": "object", "properties": {"x": schema}}, bare)
    assert tool.check({"x": value}).startswith("f: the arguments cannot be checked (")


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}], "nullable": True},
        {"enum": ["a"], "nullable": True},
        {"type": ["string", "integer"], "nullable": True},
    ],
)
def test_a_nullable_argument_takes_null(schema: dict[str, Any]) -> None:
    tool = Tool("f", "F.", {"type": "object", "properties": {"x": schema}}, bare)
    assert tool.check({"x": None}) is None
    assert tool.check({"x": "a"}) is None
    assert tool.check({"x": {}}) is not None


@dataclass
class Point:
    x: int
    tags: frozenset[str]


class Page:
    """As far as it matters here, a pydantic model."""

    def __init__(self, title: str) -> None:
        self.title = title

    def model_dump(self) -> dict[str, Any]:
        return {"title": self.title, "point": None}


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("plain 'text'\n", "plain 'text'\n"),
        ("", ""),
        (None, "null"),
        (True, "true"),
        (3, "3"),
        ({"city": "São Paulo", "found": None}, '{"city": "São Paulo", "found": null}'),
        (["a", ("b", 1)], '["a", ["b", 1]]'),
        ([Point(1, frozenset("hgfedcba"))], '[{"x": 1, "tags": ["a", "b", "c", "d", "e", "f", "g", "h"]}]'),
        ({"page": Page(title="Lima")}, '{"page": {"title": "Lima", "point": null}}'),
        (np.array([1, 2]), "[1, 2]"),
        (np.float32(0.5), "0.5"),
        (ValueError("x"), '"x"'),
        ("half a pair: \ud83d", "half a pair: ?"),
    ],
)
def test_a_result_is_shown_as_text_or_json(result: Any, text: str) -> None:
    assert render(result) == text


def test_tools_are_names_paths_callables_objects_or_tools(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the folder is put into it
    (tmp_path / "my_tools.py").write_text(
        'def shout(text: str) -> str:\n    """Shout.\n\n    Args:\n        text: What.\n    """\n'
        "    return text.upper()\n\n\nclass Box:\n    def open(self, key: str) -> str:\n"
        '        """Open.\n\n        Args:\n            key: Which.\n        """\n        return key\n'
    )
    tools = load_tools(["calculator", "my_tools.py:shout", "my_tools.Box", Counter(), Repeater, fetch, SEARCH])
    sys.modules.pop("my_tools")
    assert [tool.name for tool in tools] == ["calculator", "shout", "open", "count", "Repeater", "fetch", "search"]
    assert tools[0].function is calculator
    assert tools[1].function(text="a") == "A"
    assert tools[2].function(key="k") == "k"
    assert tools[-1] is SEARCH


def test_wikipedia_search_is_a_built_in_tool_named_search() -> None:
    (tool,) = load_tools(["wikipedia_search"])
    assert (tool.name, list(tool.parameters["properties"])) == ("search", ["query"])


class Two:
    def one(self) -> str:
        return ""

    def two(self) -> str:
        return ""


class Needy:
    def __init__(self, key: str) -> None:
        self.key = key


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (["calculater"], "no built-in tool 'calculater'; the nearest is 'calculator': use one of calculator,"),
        (["search"], "a path such as `my_tools.py:search`"),
        ([search, SEARCH], "Two tools are named 'search'"),
        ([Two()], "A Two is no tool: it is not callable and has 2 public methods instead of one"),
        ([Two], "A Two is no tool"),
        ([Needy], "'Needy' does not start without arguments (TypeError: "),
        ([bare], "'bare' has no docstring"),
    ],
)
def test_entries_that_are_no_tools_are_refused(entries: list[Any], said: str) -> None:
    with pytest.raises(ToolDefinitionError) as refusal:
        load_tools(entries)
    assert said in str(refusal.value)


def test_a_path_that_does_not_import_is_refused_as_a_tool() -> None:
    with pytest.raises(ImportPathError, match="The tool 'mt_grpo.tools.calculator.calculater' does not exist"):
        load_tools(["mt_grpo.tools.calculator.calculater"])
