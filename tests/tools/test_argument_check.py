"""The check of a tool's arguments: bounded, whatever schema a server gives and whatever a model writes."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from mt_grpo.tools.argument_check import CHECK_SECONDS
from mt_grpo.tools.function import Tool, ToolDefinitionError


def of(schema: Any, **beside: Any) -> dict[str, Any]:
    """Parameters with an `x` of a schema."""
    return {"type": "object", "properties": {"x": schema}, **beside}


def tool(schema: Any, **beside: Any) -> Tool:
    return Tool("f", "F.", of(schema, **beside), lambda x: x)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"c": value}
    return value


DOUBLED = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}
TREE = {"$defs": {"a": {"type": "object", "properties": {"c": DOUBLED}, "required": ["c"]}}}
DOUBLINGS = {f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(40)} | {"a40": {}}
TEXT = "a" * 40 + "!"
SAME_HASH = [n * (2**61 - 1) for n in range(40_000)]
LONG = list(range(100_000))
NAMES = {f"n{n}": n for n in range(300_000)}

HOSTILE = {
    "pattern": (lambda: tool({"pattern": "^(a+)+$"}), {"x": TEXT}),
    "pattern of names": (
        lambda: tool({"patternProperties": {"^(a+)+$": {}}, "additionalProperties": False}),
        {"x": {TEXT: 1}},
    ),
    "pattern of names at the top": (lambda: tool({}, patternProperties={"^(a|a)+$": {}}), {TEXT: 1}),
    "pattern in propertyNames": (lambda: tool({"propertyNames": {"pattern": "(.*)*b"}}), {"x": {TEXT: 1}}),
    "pattern with many states": (lambda: tool({"pattern": "[ab]*a[ab]{999}[ab]{999}c"}), {"x": "ab" * 200_000}),
    "many patterns and names": (
        lambda: tool({"patternProperties": {f"^{n}$": {} for n in range(200)}, "additionalProperties": False}),
        {"x": {f"n{n}": n for n in range(20_000)}},
    ),
    "unique objects": (lambda: tool({"uniqueItems": True}), {"x": [{"n": n} for n in range(30_000)]}),
    "unique numbers of one hash": (lambda: tool({"uniqueItems": True}), {"x": SAME_HASH}),
    "unique lists of one hash": (lambda: tool({"uniqueItems": True}), {"x": [[n] for n in SAME_HASH]}),
    "unique objects of one hash": (lambda: tool({"uniqueItems": True}), {"x": [{"n": n} for n in SAME_HASH]}),
    "long values of an enum": (lambda: tool({"enum": [[*LONG, n] for n in range(4)]}), {"x": [*LONG, -1]}),
    "a long constant": (lambda: tool({"const": [LONG] * 4}), {"x": [LONG] * 3 + [[]]}),
    "many items, nothing said of them": (lambda: tool({"items": {"title": "t"}}), {"x": [1] * 1_000_000}),
    "many items, none contained": (lambda: tool({"contains": {"type": "string"}}), {"x": [1] * 3_000_000}),
    "many wrong items": (lambda: tool({"items": {"type": "string"}}), {"x": [1] * 1_000_000}),
    "many names": (lambda: tool({"propertyNames": {"title": "t"}}), {"x": NAMES}),
    "many additional values": (lambda: tool({"additionalProperties": {"title": "t"}}), {"x": NAMES}),
    "many missing names": (lambda: tool({"required": list(NAMES)[:50_000]}), {"x": {}}),
    "a schema of another dialect": (
        lambda: tool({"items": {"$schema": "http://json-schema.org/draft-07/schema#", "pattern": "^(a+)+$"}}),
        {"x": [TEXT]},
    ),
    "references that double": (lambda: tool(DOUBLED, **TREE), {"x": nested(40)}),
    "definitions that double": (lambda: tool({"$ref": "#/$defs/a0"}, **{"$defs": DOUBLINGS}), {"x": 1}),
    "a reference to itself": (
        lambda: tool({"$ref": "#/$defs/a"}, **{"$defs": {"a": {"$ref": "#/$defs/a"}}}),
        {"x": 1},
    ),
    "unevaluated properties": (
        lambda: tool({"allOf": [{"additionalProperties": True}], "unevaluatedProperties": False}),
        {"x": {f"n{n}": n for n in range(30_000)}},
    ),
    "long text in many branches": (lambda: tool({"allOf": [{"type": "integer"}] * 300}), {"x": "a" * 5_000_000}),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_no_schema_and_argument_keep_the_loop(case: str) -> None:
    make, arguments = HOSTILE[case]
    subject = make()
    start = time.thread_time()
    subject.check(arguments)
    assert time.thread_time() - start < 2 * CHECK_SECONDS


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"pattern": r"^\d{3}-[A-Z]+$"}, "123-AB", "123-ab"),
        ({"pattern": "b"}, "abc", "ac"),
        ({"pattern": r"^\u00e9\/$"}, "é/", "e/"),
        ({"pattern": r"\\u00e9"}, r"\u00e9", "é"),
        ({"pattern": r"\Aa\Z"}, "a", "a\n"),
        ({"pattern": r"^\p{L}+$"}, "Ärger", "1"),
        ({"pattern": "^(?<year>[0-9]{4})$"}, "2024", "24"),
        ({"patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": False}, {"n_a": 1}, {"n_a": "1"}),
        ({"patternProperties": {"^n_": {}}, "additionalProperties": False}, {"n_a": 1}, {"m": 1}),
        ({"patternProperties": {"^n_": {}}, "additionalProperties": {"type": "string"}}, {"m": "1"}, {"m": 1}),
        ({"uniqueItems": True}, [1, True, "1", [1], [True], {"a": 1}], [{"a": [1]}, {"a": [1.0]}]),
        ({"uniqueItems": False}, [1, 1], None),
        ({"uniqueItems": True}, [2**53, 2**53 + 1, 0.5, "2", 2, None, "None"], [10**20, 1e20]),
        ({"enum": [[1, {"a": True}], "x"]}, [1.0, {"a": True}], [1, {"a": 1}]),
        ({"const": {"a": [0]}}, {"a": [0.0]}, {"a": [False]}),
        ({"properties": {"a": {}}, "unevaluatedProperties": False}, {"a": 1}, {"b": 1}),
    ],
)
def test_keywords_mean_what_json_schema_says(schema: Any, good: Any, bad: Any) -> None:
    subject = tool({"type": ["string", "array", "object"], **schema})
    assert subject.check({"x": good}) is None
    assert "argument 'x" in subject.check({"x": bad})


def test_a_long_list_of_plain_values_is_checked() -> None:
    subject = tool({"type": "array", "items": {"type": "integer", "minimum": 0}, "uniqueItems": True})
    assert subject.check({"x": list(range(10_000))}) is None
    assert subject.check({"x": [*range(10_000), -1]}).startswith("f: argument 'x[10000]' must satisfy")


def test_what_is_wrong_is_told_at_bounded_length() -> None:
    said = tool({"enum": ["x" * 1_000_000]}).check({"x": "y"})
    assert said.startswith("f: argument 'x' must satisfy") and len(said) < 3000
    assert len(tool({}).check({"y" * 1_000_000: 1})) < 3000


@pytest.mark.parametrize("pattern", ["(?=.*[0-9])a", r"(a)\1", "^.{1,2000}$"])
def test_an_unmatchable_pattern_is_told_once_and_left_out(pattern: str, caplog: pytest.LogCaptureFixture) -> None:
    parameters = {"type": "object", "properties": {"x": {"pattern": pattern}, "n": {"type": "integer"}}}
    with caplog.at_level(logging.WARNING):
        subject, _ = (Tool(f"f{len(pattern)}", "F.", parameters, lambda x: x) for _ in range(2))
    [record] = caplog.records
    assert repr(pattern) in record.getMessage() and "arguments are not held against it" in record.getMessage()
    assert subject.check({"x": "zz"}) is None
    assert "'n' must be of type integer" in subject.check({"x": "zz", "n": "1"})


def deep(depth: int) -> Any:
    schema: Any = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        (of({"pattern": "(["}), "no JSON schema at 'properties.x.pattern': '([' is not a 'regex'"),
        (of({"type": "image"}), "no JSON schema at 'properties.x.type': 'image'"),
        (of(deep(5_000)), "it is nested too deeply"),
        (of({"unevaluatedProperties": False, "patternProperties": {"a": {}}}), "leave out one of them"),
        *((parameters, "not of `type: object`") for parameters in (True, {"type": "array"}, {})),
    ],
)
def test_parameters_that_cannot_be_checked_are_refused(parameters: Any, said: str) -> None:
    with pytest.raises(ToolDefinitionError, match="The tool 'f' has parameters") as refusal:
        Tool("f", "F.", parameters, lambda x: x)
    assert said in str(refusal.value) and "\n" not in str(refusal.value)


# In words that a model can act on


SEARCH = Tool(
    "search",
    "Search.",
    {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "k": {"type": "integer"},
            "unit": {"type": "string", "enum": ["km", "mi"]},
            "tags": {"type": "array", "items": {"type": "string"}, "nullable": True},
        },
        "required": ["query"],
    },
    lambda **arguments: "",
)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"query": "x"}, None),
        ({"query": "x", "k": 2, "unit": "mi", "tags": ["a"]}, None),
        ({"query": "x", "tags": None}, None),
        ({}, "missing argument 'query'"),
        ({"q": "x"}, "unknown argument 'q'; it takes 'query', 'k', 'unit', 'tags'"),
        ({"k": "x", "q": 1, "p": 1}, "unknown arguments 'q', 'p'; it takes 'query', 'k', 'unit', 'tags'"),
        ({"k": "x"}, "missing argument 'query'"),
        ({"query": "x", "k": "3"}, "argument 'k' must be of type integer, not string"),
        ({"query": "x", "k": True}, "argument 'k' must be of type integer, not boolean"),
        ({"query": None}, "argument 'query' must be of type string, not null"),
        ({"query": "x", "tags": "a"}, "argument 'tags' must be of type array or null, not string"),
        ({"query": "x", "tags": ["a", 1]}, "argument 'tags[1]' must be of type string, not integer"),
        ({"query": "x", "unit": "m"}, 'argument \'unit\' must satisfy {"enum": ["km", "mi"]}'),
        (["x"], "the arguments must be a JSON object, not array"),
        ("x", "the arguments must be a JSON object, not string"),
        (None, "the arguments must be a JSON object, not null"),
    ],
)
def test_a_call_is_checked_in_words_a_model_can_act_on(arguments: Any, problem: str | None) -> None:
    assert SEARCH.check(arguments) == (problem and f"search: {problem}")


NEEDS_N = {"type": "object", "properties": {"n": {"minimum": 1}}, "required": ["n"]}
BRANCHES = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}], "nullable": True}


@pytest.mark.parametrize(
    ("parameters", "arguments", "problem"),
    [
        (of(NEEDS_N), {"x": {}}, 'argument \'x\' must satisfy {"required": ["n"]}'),
        (of(NEEDS_N), {"x": {"n": 0}}, "argument 'x.n' must satisfy {\"minimum\": 1}"),
        (of(NEEDS_N, minProperties=1), {}, 'the arguments must satisfy {"minProperties": 1}'),
        ({"type": "object"}, {}, None),
        ({"type": "object"}, {"now": True}, "unknown argument 'now'; it takes none"),
        (of({}, anyOf=[{"required": ["x"]}]), {"x": 1, "y": 1}, "unknown argument 'y'; it takes 'x'"),
        *(
            ({"type": "object", **schema}, {"x": value}, None if value == 1 else "")
            for schema in (
                {"oneOf": [of({"type": "integer"}), {"required": ["y"]}]},
                {"allOf": [{"properties": {"x": {"type": "integer"}}}]},
                {"$ref": "#/$defs/x", "$defs": {"x": of({"type": "integer"})}},
            )
            for value in (1, "1")
        ),
        (of({}, additionalProperties={"type": "string"}), {"y": "1"}, None),
        (
            of({}, additionalProperties={"type": "string"}),
            {"y": 1},
            "argument 'y' must be of type string, not integer",
        ),
        *(
            (of(schema), {"x": value}, "" if value == {} else None)
            for schema in (
                BRANCHES,
                {"enum": ["a"], "nullable": True},
                {"type": ["string", "integer"], "nullable": True},
            )
            for value in (None, "a", {})
        ),
        (of({"type": "number", "multipleOf": 0.5}), {"x": float("nan")}, "the arguments cannot be checked ("),
        (of({"type": "number", "multipleOf": 0.5}), {"x": 10**400}, "the arguments cannot be checked ("),
        (of({"$ref": "http://127.0.0.1:1/schema.json"}), {"x": 1}, "the arguments cannot be checked ("),
        (of({"$ref": "#/$defs/nowhere"}), {"x": 1}, "the arguments cannot be checked ("),
    ],
)
def test_a_hand_written_schema_is_checked_as_it_says(parameters: Any, arguments: Any, problem: str | None) -> None:
    said = Tool("f", "F.", parameters, lambda **arguments: "").check(arguments)
    assert said is None if problem is None else said.startswith(f"f: {problem}")
