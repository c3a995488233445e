"""
Holds arguments against a JSON schema in bounded time. The schema may come from a stranger's server and the arguments
from a model, so neither may hold up the event loop. RE2 matches patterns in time linear in the text, and a check that
takes long is given up. Apart from `function`, so that what strangers can reach is read on its own.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from itertools import islice
from typing import Any

import attrs
import re2
from jsonschema import Draft202012Validator, FormatChecker, ValidationError
from jsonschema.exceptions import best_match
from jsonschema.validators import extend
from referencing import Registry
from referencing.exceptions import Unresolvable

CHECK_SECONDS = 0.5  # most processor time of one check; a list of 10,000 numbers takes a tenth of it

_SCHEMA_SECONDS = 5.0  # most processor time to check the schema itself, once when a tool is made
_MATCH_WORK = 2 * 10**8  # characters times RE2's instructions in a second, at worst
_MAX_ERRORS = 1_000  # errors of one check that are looked for: one is told

_MAX_UNEVALUATED = 1_000
"""Members that `unevaluatedProperties` and `unevaluatedItems` are held against; their work grows by the square."""


class _TooMuchWork(ValueError):
    """A check that was given up. The message says why."""


_ends_at: ContextVar[float] = ContextVar("_ends_at")


class UnsoundSchema(ValueError):
    """A part of a schema is wrong, or cannot be checked. `where` is its path, empty for the whole schema."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(what)
        self.where = where


def read_schema(schema: object) -> dict[str, str]:
    """Holds a schema against the language it is written in, JSON schema 2020-12."""
    unmatchable: dict[str, str] = {}

    def is_pattern(pattern: object) -> bool:
        if isinstance(pattern, str) and isinstance(compiled := _compiled(pattern), str):
            re.compile(pattern)
            unmatchable[pattern] = compiled
        return True

    formats = FormatChecker(formats=())
    formats.checks("regex", raises=re.error)(is_pattern)
    try:
        found = best_match(_errors(_Bounded(_Bounded.META_SCHEMA, format_checker=formats), schema, _SCHEMA_SECONDS))
    except _TooMuchWork as error:
        raise UnsoundSchema("", "it takes too long to read") from error
    except RecursionError as error:
        raise UnsoundSchema("", "it is nested too deeply") from error
    if found is not None:
        raise UnsoundSchema(found.json_path.removeprefix("$").removeprefix("."), found.message)
    if {"unevaluatedProperties", "patternProperties"} <= names_in(schema):
        raise UnsoundSchema("", "it has both `unevaluatedProperties` and `patternProperties`: leave out one of them")
    return unmatchable


def names_in(schema: object) -> set[str]:
    """All keys of a schema, at any depth."""
    names: set[str] = set()
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            names |= value.keys()
            left += value.values()
        elif isinstance(value, list):
            left += value
    return names


class ArgumentCheck:
    """Holds arguments against a schema. References to other documents are never fetched."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._validator = _Bounded(schema, registry=Registry())

    def errors(self, arguments: object) -> list[ValidationError]:
        """What is wrong with the arguments, up to `_MAX_ERRORS`."""
        try:
            return _errors(self._validator, arguments, CHECK_SECONDS)
        except (ArithmeticError, RecursionError, Unresolvable) as error:
            raise ValueError(str(error)) from error


def _errors(validator: Any, instance: object, seconds: float) -> list[ValidationError]:
    token = _ends_at.set(time.thread_time() + seconds)
    try:
        return list(islice(validator.iter_errors(instance), _MAX_ERRORS))
    finally:
        _ends_at.reset(token)


def _go_on() -> None:
    # Of this thread's own time: a busy machine refuses no call.
    if time.thread_time() > _ends_at.get():
        raise _TooMuchWork("it takes too long")


@functools.lru_cache(maxsize=1024)
def _compiled(pattern: str) -> Any:
    """A pattern for RE2, or why it cannot be one."""
    options = re2.Options()
    options.log_errors, options.never_capture = False, True
    # ECMAScript writes \u00e9 and Python \Z where RE2 writes \x{00e9} and \z. A pair \\ is read first: \\u is none.
    translated = re.sub(r"\\(?:u([0-9a-fA-F]{4})|(Z)|.)", _translated, pattern, flags=re.DOTALL)
    try:
        return re2.compile(translated, options)
    except re2.error as error:
        reason = error.args[0]
        return reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
    except UnicodeEncodeError as error:
        return str(error)


def _translated(escape: re.Match[str]) -> str:
    if escape[1]:
        return rf"\x{{{escape[1]}}}"
    return r"\z" if escape[2] else escape[0]


def _found(pattern: str, text: str) -> bool:
    _go_on()
    compiled = _compiled(pattern)
    if isinstance(compiled, str):
        return True
    if compiled.programsize * len(text) > _MATCH_WORK * (_ends_at.get() - time.thread_time()):
        raise _TooMuchWork("the text is too long for its pattern")
    return compiled.search(text) is not None


def _pattern(validator: object, pattern: str, instance: object, schema: object) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not _found(pattern, instance):
        yield ValidationError("the text does not match the pattern")


def _pattern_properties(
    validator: Any, patterns: dict[str, Any], instance: object, schema: object
) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    for pattern, subschema in patterns.items():
        if isinstance(_compiled(pattern), str):
            continue  # nobody knows which properties it is about
        for name, value in instance.items():
            if _found(pattern, name):
                yield from validator.descend(value, subschema, path=name, schema_path=pattern)


def _additional_properties(
    validator: Any, subschema: object, instance: object, schema: dict[str, Any]
) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    extra = [name for name in instance if name not in known and not any(_found(each, name) for each in patterns)]
    if isinstance(subschema, dict):
        for name in extra:
            yield from validator.descend(instance[name], subschema, path=name)
    elif extra and not subschema:
        yield ValidationError("there are properties that the schema does not name")


def _unique_items(validator: object, unique: bool, instance: object, schema: object) -> Iterator[ValidationError]:
    if unique and isinstance(instance, list) and len({_as_key(item) for item in instance}) < len(instance):
        yield ValidationError("there are equal items")


def _enum(validator: object, values: list[object], instance: object, schema: object) -> Iterator[ValidationError]:
    key = _as_key(instance)
    if not any(_as_key(value) == key for value in values):
        yield ValidationError("it is none of the values")


def _as_key(value: object) -> object:
    """Equal for equal JSON values alone: 1 and 1.0, not true; numbers as text, whose hashes are safe."""
    _go_on()
    if isinstance(value, list):
        return "list", tuple(_as_key(item) for item in value)
    if isinstance(value, dict):
        return "dict", frozenset((name, _as_key(item)) for name, item in value.items())
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return (type(value).__name__, repr(value)) if isinstance(value, int | float) else value


def _few(keyword: Callable[..., Any]) -> Callable[..., Any]:
    def check(validator: Any, value: Any, instance: object, schema: Any) -> Iterator[ValidationError]:
        if isinstance(instance, dict | list) and len(instance) > _MAX_UNEVALUATED:
            raise _TooMuchWork(f"more than {_MAX_UNEVALUATED:,} members")
        yield from keyword(validator, value, instance, schema) or ()

    return check


def _timed(errors_of: Callable[..., Any]) -> Callable[..., Any]:
    """What yields errors, as long as there is time."""

    def check(*args: Any, **options: Any) -> Iterator[ValidationError]:
        _go_on()
        for error in errors_of(*args, **options) or ():
            _go_on()
            yield error

    return check


def _evolve(self: Any, **changes: Any) -> Any:
    """This validator for another schema, also where that has a `$schema`: other validators have no bound."""
    kept = {each.alias: getattr(self, each.name) for each in attrs.fields(type(self)) if each.init}
    return type(self)(**kept | changes)


_KEYWORDS = {
    **Draft202012Validator.VALIDATORS,
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique_items,
    "enum": _enum,
    "const": lambda validator, value, instance, schema: _enum(validator, [value], instance, schema),
    "unevaluatedProperties": _few(Draft202012Validator.VALIDATORS["unevaluatedProperties"]),
    "unevaluatedItems": _few(Draft202012Validator.VALIDATORS["unevaluatedItems"]),
}

_Bounded: Any = extend(Draft202012Validator, _KEYWORDS)
_Bounded.iter_errors, _Bounded.descend = _timed(_Bounded.iter_errors), _timed(_Bounded.descend)
_Bounded.evolve = _evolve
