"""What a model might write instead of a call, and calls it might write well; the same for the same seed."""

from __future__ import annotations

import json
import random
from typing import Any

WRITTEN_WELL = {
    "tags": lambda name, arguments: f"<tool>{json.dumps({'name': name, 'args': arguments})}</tool>",
    "native": lambda name, arguments: (
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    ),
}
"""A call as each protocol asks for it."""

PIECES = [
    "<tool>", "</tool>", "<answer>", "</answer>", "<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_end|>",
    "<reasoning>", "<result>", "\n", '{"name": "work", ', '"args": {', '"arguments": {', "}", "{", "[", "]", '"', "\\",
    ":", ",", "null", "true", "1e999", "-0", "NaN", "Infinity", "\\ud800", "\\u0000", "\ufeff", "\u202e", "'",
    "```json\n", '{"name": "work", "args": {"n": 1}}', '{"name": "work", "arguments": {"n": 1}}', "work(n=1)",
    "é", "漢", "🙂", "\x00",
]  # fmt: skip
NUMBERS = [0, -1, 3, 2.5, -0.0, 1e308, 5e-324, float("inf"), float("-inf"), float("nan"), 10**18, 10**400, -(10**400)]
NAMES = ["n", "half", "unit", "tags", "tree", "any", "name", "args", "x", "", "é", "n\n", "$ref", "__class__"]


def garbage(draw: random.Random) -> str:
    """Pieces of calls in any order."""
    return "".join(
        draw.choice(PIECES)
        if draw.random() < 0.7
        else chr(draw.choice([draw.randrange(32, 127), draw.randrange(0xD800)]))
        for _ in range(draw.randrange(1, 30))
    )


def repeated(draw: random.Random) -> str:
    """A few pieces again and again, which slow patterns do not bear."""
    return "".join(draw.choices(PIECES, k=draw.randrange(1, 4))) * draw.randrange(50, 1000)


def spoilt(draw: random.Random) -> str:
    """A call written well, and then changed in a few places."""
    text = WRITTEN_WELL[draw.choice(list(WRITTEN_WELL))](draw.choice(["work", "wrok", ""]), arguments(draw))
    for _ in range(draw.randrange(1, 4)):
        start, length = draw.randrange(len(text) + 1), draw.randrange(4)
        text = text[:start] + draw.choice(["", draw.choice(PIECES), text[:length]]) + text[start + length :]
    return text


def odd(draw: random.Random) -> str:
    """A call of the right form with anything as its name and arguments."""
    marks = draw.choice([("<tool>", "</tool>"), ("<tool_call>\n", "\n</tool_call>")])
    call = {"name": value(draw, 1), draw.choice(["args", "arguments"]): value(draw, 4)}
    return marks[0] + json.dumps(call, ensure_ascii=draw.random() < 0.5) + marks[1]


def deep(draw: random.Random) -> str:
    """Brackets within brackets, and numbers without end."""
    depth = draw.choice([10, 100, 900, 5000])
    inner = draw.choice(["[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "9" * depth, "[" * depth])
    return f'{draw.choice(["<tool>", "<tool_call>"])}{{"name": "work", "args": {{"any": {inner}}}}}</tool>'


def value(draw: random.Random, depth: int) -> Any:
    """Any JSON."""
    kind = draw.randrange(8) if depth else draw.randrange(5)
    if kind == 0:
        return draw.choice(NUMBERS)
    if kind <= 3:
        return draw.choice([None, True, False, "", "km", "a" * draw.randrange(50), garbage(draw)])
    if kind == 4:
        return draw.randrange(-100, 100)
    if kind == 5:
        return [value(draw, depth - 1) for _ in range(draw.randrange(4))]
    return {draw.choice(NAMES): value(draw, depth - 1) for _ in range(draw.randrange(4))}


def arguments(draw: random.Random) -> dict[str, Any]:
    """Arguments, some of them as `SCHEMA` wants them."""
    return {name: value(draw, 2) for name in draw.sample(NAMES, draw.randrange(5))}


def good_arguments(draw: random.Random) -> dict[str, Any]:
    """Arguments as `SCHEMA` wants them."""
    text = "".join(chr(draw.choice([draw.randrange(32, 127), draw.randrange(161, 0xD800)])) for _ in range(8))
    optional = {
        "half": draw.randrange(-100, 100) / 2,
        "unit": draw.choice(["km", "mi", None]),
        "tags": draw.sample(["a", "b", text, '"', "\\", "\n"], draw.randrange(4)),
        "tree": {"children": [{"children": []}] * draw.randrange(3)},
        "any": {text: [1, 2.5, None, True, {"x": text}]},
    }
    return {
        "n": draw.randrange(10),
        **{name: optional[name] for name in draw.sample(list(optional), draw.randrange(6))},
    }


SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0},
        "half": {"type": "number", "multipleOf": 0.5},
        "unit": {"type": "string", "enum": ["km", "mi"], "nullable": True},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "uniqueItems": True},
        "tree": {"$ref": "#/$defs/tree"},
        "any": {},
    },
    "required": ["n"],
    "$defs": {"tree": {"type": "object", "properties": {"children": {"items": {"$ref": "#/$defs/tree"}}}}},
}
KINDS = [garbage, garbage, spoilt, spoilt, spoilt, odd, odd, odd, deep, repeated]


def text(seed: int) -> str:
    """What a model might write."""
    draw = random.Random(seed)
    kinds = KINDS[:-2] if draw.random() < 0.97 else KINDS  # the long ones are slow to read
    return draw.choice(kinds)(draw).encode("utf-8", "replace").decode()
