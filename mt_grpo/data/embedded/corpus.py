"""
The embedded corpus, true facts about real entities, told one sentence at a time; and questions over it that take one
or two searches to answer.

A two-hop question names its subject only indirectly. Either by one of its values ("the country whose capital is
Lima": the first search finds the subject as a title) or through a link ("the homeland of Kafka": the first search
finds the subject as a value). Entities are split by the root of their links (a book by the homeland of its author), so
that no entity is a subject or a bridge in both splits.
"""

from __future__ import annotations

import functools
import json
import random
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

LABELS = {
    "capital": "capital",
    "currency": "currency",
    "continent": "continent",
    "language": "official language",
    "symbol": "chemical symbol",
    "number": "atomic number",
    "planet": "planet",
    "discoverer": "discoverer",
    "city": "largest city",
    "code": "postal code",
    "country": "country",
    "range": "mountain range",
    "mouth": "mouth",
    "homeland": "homeland",
    "author": "author",
    "painter": "painter",
    "composer": "composer",
    "inventor": "inventor",
}
"""How each relation is worded, in sentences and in good search queries."""


@dataclass(frozen=True)
class _Entity:
    """A subject of facts."""

    name: str
    family: str
    facts: dict[str, tuple[str, ...]]


@functools.cache
def entities() -> dict[str, _Entity]:
    """All entities by name, in file order."""
    rows = json.loads(Path(__file__).with_name("facts.json").read_text())
    return {
        row["name"]: _Entity(row["name"], row["family"], {key: tuple(value) for key, value in row["facts"].items()})
        for row in rows
    }


def passage(relation: str, subject: str, value: str) -> str:
    """One searchable passage: the subject as title, then the sentence that states its `relation`."""
    article = "the " if relation == "currency" else ""
    return f"{subject}: The {LABELS[relation]} of {subject} is {article}{value}."


def passages() -> list[str]:
    """Every fact of every entity as a passage of its own, prefixed by the name of the entity."""
    return [
        passage(key, entity.name, value[0]) for entity in entities().values() for key, value in entity.facts.items()
    ]


SYSTEM_PROMPT = "Search, then answer."

LINKS = ("country", "homeland", "author", "painter", "composer", "inventor")
"""Relations whose values are entities themselves."""

KEYS = {"country": ("capital", "currency"), "state": ("capital", "code"), "element": ("symbol", "number")}
"""Relations per family whose value, where it is unique, can stand for the entity."""

_PERSON_ASKED = {
    "author": "Who wrote {}?",
    "painter": "Who painted {}?",
    "composer": "Who composed {}?",
    "inventor": "Who invented {}?",
    "discoverer": "Who discovered {}?",
}
_ASKED = {
    "currency": "Which currency is used in {}?",
    "continent": "On which continent is {}?",
    "language": "Which language is official in {}?",
    "planet": "Which planet does {} orbit?",
    "country": "In which country is {}?",
    "range": "To which mountain range does {} belong?",
}


def _asked(relation: str) -> list[str]:
    """Question texts for one relation, with `{}` in place of the subject."""
    label = LABELS[relation]
    texts = [f"What is the {label} of {{}}?", f"Name the {label} of {{}}."]
    if relation in _PERSON_ASKED:
        return [f"Who is the {label} of {{}}?", _PERSON_ASKED[relation]]
    return [*texts, _ASKED[relation]] if relation in _ASKED else texts


@dataclass(frozen=True)
class Form:
    """A kind of question."""

    text: str
    relations: tuple[str, ...]
    inverse: bool = False

    @classmethod
    def one_hop(cls, relation: str) -> list[Form]:
        """Forms which ask for `relation` of a named subject."""
        return [cls(text, (relation,)) for text in _asked(relation)]

    @classmethod
    def by_key(cls, family: str, key: str, relation: str) -> list[Form]:
        """Forms which ask for `relation` of the `family` member whose `key` is given."""
        article = "the " if key == "currency" else ""
        described = f"the {family} whose {LABELS[key]} is {article}{{}}"
        return [cls(text.format(described), (key, relation), inverse=True) for text in _asked(relation)]

    @classmethod
    def by_link(cls, link: str, relation: str) -> list[Form]:
        """Forms which ask for `relation` of the entity that `link` leads to."""
        described = f"the {LABELS[link]} of {{}}"
        return [cls(text.format(described), (link, relation)) for text in _asked(relation)]


@dataclass(frozen=True)
class Problem:
    """A question with its solution."""

    question: str
    answer: tuple[str, ...]
    searches: tuple[str, ...]
    passages: tuple[str, ...]
    entities: tuple[str, ...]


def query(relation: str, name: str) -> str:
    """The ideal query for `relation` of or with `name`."""
    return f"{LABELS[relation]} {name}"


def _root(entity: _Entity) -> str:
    """Name at the end of the chain of links that starts at `entity`."""
    for link in LINKS:
        if link in entity.facts and entity.facts[link][0] in entities():
            return _root(entities()[entity.facts[link][0]])
    return entity.name


def _pick(forms: list[Form], *names: str) -> Form:
    """A form chosen by a hash of the names, so that wordings alternate but never change between runs."""
    return forms[zlib.crc32("|".join(names).encode()) % len(forms)]


def _one_hop(entity: _Entity) -> Iterator[Problem]:
    for relation, values in entity.facts.items():
        text = _pick(Form.one_hop(relation), entity.name, relation).text
        yield Problem(
            text.format(entity.name),
            values,
            (query(relation, entity.name),),
            (passage(relation, entity.name, values[0]),),
            (entity.name,),
        )


def _inverse(entity: _Entity, holders: Counter) -> Iterator[Problem]:
    for key in KEYS.get(entity.family, ()):
        given = entity.facts.get(key, ("",))[0]
        if holders[entity.family, key, given] != 1 or entity.name in given:
            continue
        for relation, values in entity.facts.items():
            if relation == key or values[0] == given:
                continue
            text = _pick(Form.by_key(entity.family, key, relation), given, relation).text
            yield Problem(
                text.format(given),
                values,
                (query(key, given), query(relation, entity.name)),
                (passage(key, entity.name, given), passage(relation, entity.name, values[0])),
                (entity.name,),
            )


def _linked(entity: _Entity) -> Iterator[Problem]:
    for link in LINKS:
        bridge = entities().get(entity.facts.get(link, ("",))[0])
        if bridge is None or bridge.name in entity.name:
            continue
        for relation, values in bridge.facts.items():
            text = _pick(Form.by_link(link, relation), entity.name, relation).text
            yield Problem(
                text.format(entity.name),
                values,
                (query(link, entity.name), query(relation, bridge.name)),
                (passage(link, entity.name, bridge.name), passage(relation, bridge.name, values[0])),
                (entity.name, bridge.name),
            )


@functools.cache
def problems(split: Literal["train", "validation"]) -> tuple[Problem, ...]:
    """All questions of a split, in a fixed order; a hash of its root decides to which split an entity belongs."""
    holders = Counter(
        (entity.family, key, entity.facts[key][0])
        for entity in entities().values()
        for key in KEYS.get(entity.family, ())
        if key in entity.facts
    )
    return tuple(
        problem
        for entity in entities().values()
        if (zlib.crc32(_root(entity).encode()) % 4 == 0) == (split == "validation")
        for source in (_one_hop(entity), _inverse(entity, holders), _linked(entity))
        for problem in source
    )


def questions(split: Literal["train", "validation"]) -> list[dict]:
    """The questions of a split, shuffled the same way every time, so that a slice is a fair sample."""
    rows = [
        {"question": problem.question, "answer": list(problem.answer), "hops": len(problem.searches)}
        for problem in problems(split)
    ]
    random.Random(0).shuffle(rows)
    return rows
