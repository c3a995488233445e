"""The embedded corpus: true facts about real entities, told one sentence at a time."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

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
class Entity:
    """A subject of facts."""

    name: str
    family: str
    facts: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Article:
    """A short text about one entity."""

    title: str
    text: str


@functools.cache
def entities() -> dict[str, Entity]:
    """All entities by name, in file order."""
    rows = json.loads(Path(__file__).with_name("facts.json").read_text())
    return {
        row["name"]: Entity(row["name"], row["family"], {key: tuple(value) for key, value in row["facts"].items()})
        for row in rows
    }


def sentence(relation: str, subject: str, value: str) -> str:
    """The sentence which states that `relation` of `subject` is `value`."""
    article = "the " if relation == "currency" else ""
    return f"The {LABELS[relation]} of {subject} is {article}{value}."


def passage(relation: str, subject: str, value: str) -> str:
    """One searchable passage: the subject as title, then the sentence."""
    return f"{subject}: {sentence(relation, subject, value)}"


def articles() -> list[Article]:
    """One article per entity, made of the sentences of all its facts."""
    return [
        Article(entity.name, " ".join(sentence(key, entity.name, value[0]) for key, value in entity.facts.items()))
        for entity in entities().values()
    ]


def passages() -> list[str]:
    """Every sentence of every article as a passage of its own, prefixed by the title."""
    return [
        passage(key, entity.name, value[0]) for entity in entities().values() for key, value in entity.facts.items()
    ]
