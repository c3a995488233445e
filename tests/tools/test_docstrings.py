"""Docstrings in the styles people write lead to the same schema."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_grpo.tools import Tool, ToolDefinitionError
from mt_grpo.tools.function import read_docstring

GOOGLE = """
Find documents.

The best come first.

Args:
    query: What to look for,
        in words: a sentence, say.
    k: How many.

Returns:
    The documents: a list.
"""
GOOGLE_WITH_TYPES = """
Find documents.

The best come first.
Args:
    query (str): What to look for,
        in words: a sentence, say.
    k (int, optional): How many.
Returns:
    documents (list): The documents.
Raises:
    ValueError: If there is no query.
"""
HUGGING_FACE = """
Find documents.

The best come first.

Args:
    query (`str`):
        What to look for, in words: a sentence, say.
    k (`int`, *optional*, defaults to `f(3)`):
        How many.

Example:
    k: not an argument
"""
NUMPY = """
Find documents.

The best come first.

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
"""
NUMPY_BARE = """
Find documents.

The best come first.

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
"""
REST = """
Find documents.

The best come first.

:param query: What to look for,
    in words: a sentence, say.
:type query: str
:param int k: How many.
:returns: The documents.
:rtype: list
:raises ValueError: If there is no query.
"""
EPYDOC = """
Find documents.

The best come first.

@param query: What to look for, in words: a sentence, say.
@param k: How many.
@return: The documents.
"""
SLOPPY = """
    Find documents.

    The best come first.

    Parameters:
    - query (Optional[dict[str, tuple(int, str)]]): What to look for, in words: a sentence, say.
    - `k` (int): How many.
    """


def described_by(docstring: str):
    def find(query: str, k: int = 3) -> list:
        return []

    find.__doc__ = docstring
    return find


@pytest.mark.parametrize(
    "docstring", [GOOGLE, GOOGLE_WITH_TYPES, HUGGING_FACE, NUMPY, NUMPY_BARE, REST, EPYDOC, SLOPPY]
)
def test_every_style_leads_to_the_same_schema(docstring):
    tool = Tool.from_function(described_by(docstring))
    assert (tool.name, tool.description) == ("find", "Find documents.\n\nThe best come first.")
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to look for, in words: a sentence, say."},
            "k": {"type": "integer", "description": "How many."},
        },
        "required": ["query"],
    }


def test_methods_and_several_names_of_one_line_are_described():
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


@pytest.mark.parametrize("rest", ["\n\n:returns: The time.", "\n\nReturns\n-------\nstr\n    The time."])
def test_a_function_without_arguments_needs_no_arguments_section(rest):
    def now() -> str:
        return ""

    now.__doc__ = f"Tell the time.{rest}"
    assert Tool.from_function(now).description == "Tell the time."


@pytest.mark.parametrize("docstring", [NUMPY, REST, GOOGLE_WITH_TYPES])
def test_an_argument_that_no_style_describes_is_refused(docstring):
    with pytest.raises(ToolDefinitionError, match="'find' does not describe 'k' in its docstring"):
        Tool.from_function(described_by(docstring.replace("How many.", "")))


@pytest.mark.parametrize("docstring", [NUMPY[NUMPY.index("Parameters") :], REST[REST.index(":param") :]])
def test_arguments_alone_do_not_say_what_a_tool_does(docstring):
    with pytest.raises(ToolDefinitionError, match="'find' has no docstring"):
        Tool.from_function(described_by(docstring))


LINES = st.sampled_from(
    [
        "Args:",
        "Parameters",
        "----",
        ":param k: x",
        ":param",
        "    k (int): x",
        "k : int",
        "    text",
        "",
        "Returns:",
        "@param",
    ]
) | st.text(max_size=12)


@given(st.lists(LINES, max_size=12).map("\n".join))
def test_any_docstring_is_read_or_refused(docstring):
    description, arguments = read_docstring(inspect.cleandoc(docstring))
    assert isinstance(description, str) and all(arguments.values())
    try:
        Tool.from_function(described_by(docstring))
    except ToolDefinitionError as error:
        assert "\n" not in str(error)
