"""Tools: described from a function and its docstring, results written for the model, lists of a recipe loaded."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_grpo.imports import ImportPathError
from mt_grpo.tools import Tool, ToolDefinitionError, calculator, load_tools
from mt_grpo.tools.function import _read_docstring, render


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


class AsyncRepeater(Repeater):
    async def __call__(self, text: str) -> str:
        return text * 2

    __call__.__doc__ = Repeater.__call__.__doc__


Two = type("Two", (), {"one": lambda self: "", "two": lambda self: ""})
Wraps = type("Wraps", (Two,), {"func": lambda self: ""})


class Needy:
    def __init__(self, key: str) -> None:
        self.key = key


SEARCH = Tool.from_function(search)


def function(signature: str, docstring: str | None) -> Any:
    """`find` with these arguments."""
    namespace = dict(globals())
    exec(f"def find({signature}): ...", namespace)
    namespace["find"].__doc__ = docstring
    return namespace["find"]


def yields(query: str) -> Iterator[str]:
    """Finds.

    Args:
        query: What to look for.
    """
    yield query


async def yields_later(query: str) -> AsyncIterator[str]:
    """Finds.

    Args:
        query: What to look for.
    """
    yield query


# From a function


def test_a_function_is_described_by_name_docstring_and_hints() -> None:
    tags = {"type": "array", "items": {"type": "string"}, "nullable": True, "description": "Topics to keep."}
    properties = {
        "query": {"type": "string", "description": "What to look for."},
        "k": {"type": "integer", "description": "How many results."},
        "unit": {"type": "string", "enum": ["km", "mi"], "description": "Unit of lengths."},
        "tags": tags,
    }
    parameters = {"type": "object", "properties": properties, "required": ["query"]}
    described = {"name": "search", "description": "Search the corpus.", "parameters": parameters}
    assert json.loads(json.dumps(SEARCH.schema)) == {"type": "function", "function": described}


def test_a_bound_method_and_a_callable_object_are_tools() -> None:
    method, instance = Tool.from_function(Counter().count), Tool.from_function(Repeater())
    assert (method.name, method.function(text="abc")) == ("count", 3)
    made = (instance.name, instance.description, instance.function(text="ab"))
    assert made == ("Repeater", "Repeat a text.", "abab")
    assert list(method.parameters["properties"]) == list(instance.parameters["properties"]) == ["text"]


def test_async_functions_are_told_from_sync_ones() -> None:
    tools = [Tool.from_function(each) for each in (search, fetch, Repeater(), AsyncRepeater())]
    assert [tool.is_async for tool in tools] == [False, True, False, True]
    assert Tool("fetch", "Fetch.", tools[1].parameters, lambda url: fetch(url), is_async=True).is_async
    assert asyncio.run(tools[-1].function(text="a")) == "aa"


ONE = "Find.\n\nArgs:\n    query: What to look for."


@pytest.mark.parametrize(
    ("described", "said"),
    [
        (function("query: str", None), "'find' has no docstring: begin it with"),
        (function("query: str", ONE.removeprefix("Find.\n\n")), "'find' has no docstring"),
        (
            function("query, k: int", f"{ONE}\n    k: How many."),
            "has no type hint for 'query': write one, as in `query: s",
        ),
        (function("query: str, k: int", ONE), "does not describe 'k' in its docstring: add a line `k: what it is`"),
        (function("*queries: str, **options: str", ONE), "has the arguments '*queries: 'str'', '**options: 'str''"),
        (function("query: str, /", ONE), "'find' has the argument 'query: 'str''"),
        (partial(search, k=2), "'partial' has the arguments '*args', '**kwargs'"),
        (yields, "'yields' is a generator, which the model would be shown in place of what it yields: return one res"),
        (yields_later, "'yields_later' is a generator"),
        (function("query: Counter", ONE), "'find' has a type hint that has no JSON form"),
        (function("query: Missing", ONE), "has no JSON form (name 'Missing' is not defined): write one of"),
        (function("query: str", f"{ONE[:-1]} (choices: km, mi)"), "'find' lists `(choices: ...)` that are not JSON"),
    ],
)
def test_a_function_that_cannot_be_described_is_refused(described: Any, said: str) -> None:
    with pytest.raises(ToolDefinitionError) as refusal:
        Tool.from_function(described)
    assert said in str(refusal.value) and "\n" not in str(refusal.value)


# Docstrings in the styles people write lead to the same schema


STYLES = {
    "google": """Args:
    query (str): What to look for,
        in words: a sentence, say.
    k (int, optional): How many.
Returns:
    documents (list): The documents.
Raises:
    ValueError: If there is no query.
""",
    "hugging face": """
Args:
    query (`str`):
        What to look for, in words: a sentence, say.
    k (`int`, *optional*, defaults to `f(3)`):
        How many.

Example:
    k: not an argument
""",
    "numpy": """
Parameters
----------
query : str
    What to look for,
    in words: a sentence, say.
k : int, optional
    How many.

Returns
-------
list
    The documents.
""",
    "numpy without types": """
Parameters
----------
query
    What to look for, in words: a sentence, say.

k
    How many.

Notes
-----
query
    Not this one.
""",
    "rest": """
:param query: What to look for,
    in words: a sentence, say.
:type query: str
:param int k: How many.
:returns: The documents.
:rtype: list
:raises ValueError: If there is no query.
""",
    "epydoc": """
@param query: What to look for, in words: a sentence, say.
@param k: How many.
@return: The documents.
""",
    "sloppy": """
Parameters:
- query (Optional[dict[str, tuple(int, str)]]): What to look for, in words: a sentence, say.
- `k` (int): How many.
""",
}
HEAD = "\nFind documents.\n\nThe best come first.\n"


@pytest.mark.parametrize("style", STYLES)
def test_every_style_leads_to_the_same_schema(style: str) -> None:
    docstring = HEAD + STYLES[style]
    indented = docstring.replace("\n", "\n    ")
    for text in (docstring, indented):
        tool = Tool.from_function(function("query: str, k: int = 3", text))
        assert (tool.name, tool.description) == ("find", "Find documents.\n\nThe best come first.")
        assert tool.parameters["required"] == ["query"]
        assert tool.parameters["properties"] == {
            "query": {"type": "string", "description": "What to look for, in words: a sentence, say."},
            "k": {"type": "integer", "description": "How many."},
        }
    wrongs = {STYLES[style]: "has no docstring"}
    if style != "hugging face":  # there the next line would be the description
        wrongs[docstring.replace("How many.", "")] = "does not describe 'k' in its docstring"
    for wrong, said in wrongs.items():
        with pytest.raises(ToolDefinitionError, match=f"'find' {said}"):
            Tool.from_function(function("query: str, k: int = 3", wrong))


def test_methods_and_several_names_of_one_line_are_described() -> None:
    class Screen:
        def move(self, x: int, y: int, speed: str = "slow") -> None:
            """
            Move.

            Parameters
            ----------
            x, y : int
                A coordinate.
            speed : {"slow", "fast"}
                How (choices: ["slow", "fast"])
            """

    tool = Tool.from_function(Screen().move)
    assert tool.description == "Move."
    assert tool.parameters["properties"]["y"] == {"type": "integer", "description": "A coordinate."}
    assert tool.parameters["properties"]["speed"] == {"type": "string", "enum": ["slow", "fast"], "description": "How"}


@pytest.mark.parametrize("rest", [":returns: The time.", "Returns\n-------\nstr\n    The time."])
def test_a_function_without_arguments_needs_no_arguments_section(rest: str) -> None:
    assert Tool.from_function(function("", f"Tell the time.\n\n{rest}")).description == "Tell the time."


PIECES = "Args:|Parameters|----|:param k: x|:param|    k (int): x|k : int|    text||Returns:|@param".split("|")


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=12), max_size=12).map("\n".join))
def test_any_docstring_is_read_or_refused(docstring: str) -> None:
    description, arguments = _read_docstring(inspect.cleandoc(docstring))
    assert isinstance(description, str) and all(arguments.values())
    try:
        Tool.from_function(function("query: str, k: int = 3", docstring))
    except ToolDefinitionError as error:
        assert "\n" not in str(error)


# Results


@dataclass
class Point:
    x: int
    tags: frozenset[str]


class Page:
    """As far as it matters here, a pydantic model."""

    def model_dump(self) -> dict[str, Any]:
        return {"title": "Lima", "point": None}


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
        ({"page": Page()}, '{"page": {"title": "Lima", "point": null}}'),
        (np.array([1, 2]), "[1, 2]"),
        (np.float32(0.5), "0.5"),
        (ValueError("x"), '"x"'),
        ("half a pair: \ud83d", "half a pair: ?"),
    ],
)
def test_a_result_is_shown_as_text_or_json(result: Any, text: str) -> None:
    assert render(result) == text


# Lists of a recipe


MY_TOOLS = '''
def shout(text: str) -> str:
    """Shout.

    Args:
        text: What.
    """
    return text.upper()

class Box:
    def open(self, key: str) -> str:
        """Open.

        Args:
            key: Which.
        """
        return key
'''


def test_tools_are_names_paths_callables_objects_or_tools(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the folder is put into it
    (tmp_path / "my_tools.py").write_text(MY_TOOLS)
    entries = ["calculator", "wikipedia_search", "my_tools.py:shout", "my_tools.Box", Counter(), Repeater, fetch]
    tools = load_tools(entries)
    sys.modules.pop("my_tools")
    names = ["calculator", "search", "shout", "open", "count", "Repeater", "fetch"]
    assert [tool.name for tool in tools] == names
    assert tools[0].function is calculator and list(tools[1].parameters["properties"]) == ["query"]
    assert (tools[2].function(text="a"), tools[3].function(key="k")) == ("A", "k")
    assert load_tools([SEARCH]) == [SEARCH]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (["calculater"], "no built-in tool 'calculater'; the nearest is 'calculator': use one of calculator,"),
        (["search"], "a path such as `my_tools.py:search`"),
        ([search, SEARCH], "Two tools are named 'search'"),
        ([Two()], "An object of 'Two' is no tool: it is not callable and has 2 public methods instead of one"),
        (["math.pi"], "'math.pi' is no tool: it is not callable"),
        ([Wraps()], "has 3 public methods instead of one; name the function that it wraps, its `func`."),
        ([Two], "An object of 'Two' is no tool"),
        ([Needy], "'Needy' does not start without arguments (TypeError: "),
        ([function("query: str", None)], "'find' has no docstring"),
        (["mt_grpo.tools.calculater"], "The tool 'mt_grpo.tools.calculater' does not exist"),
    ],
)
def test_entries_that_are_no_tools_are_refused(entries: list[Any], said: str) -> None:
    with pytest.raises((ToolDefinitionError, ImportPathError)) as refusal:
        load_tools(entries)
    assert said in str(refusal.value)
