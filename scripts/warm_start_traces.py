"""Made-up conversations of the embedded task, from which `warm_start.py` teaches its model."""

import json
import random

from mt_grpo.data.embedded.corpus import (
    KEYS,
    LABELS,
    LINKS,
    SYSTEM_PROMPT,
    Form,
    entities,
    passage,
    query,
)

PROMPT = f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n{{}}<|im_end|>\n<|im_start|>assistant\n"
REPLY = "<|im_end|>\n<|im_start|>user\n<result>{}</result><|im_end|>\n<|im_start|>assistant\n"

Trace = list[tuple[str, bool]]
"""Pieces of a conversation in order, each with whether the assistant wrote it."""


def names() -> list[str]:
    """Every subject and canonical value of the corpus, sorted."""
    values = {value[0] for entity in entities().values() for value in entity.facts.values()}
    return sorted(values | set(entities()))


def forms(hops: int) -> list[Form]:
    """All kinds of questions with that many hops."""
    relations: dict[str, set[str]] = {}
    for entity in entities().values():
        relations.setdefault(entity.family, set()).update(entity.facts)
    if hops == 1:
        return [form for relation in LABELS for form in Form.one_hop(relation)]
    found = [
        form
        for family, keys in KEYS.items()
        for key in keys
        for relation in sorted(relations[family] - {key})
        for form in Form.by_key(family, key, relation)
    ]
    for link in LINKS:
        target = "country" if link in ("country", "homeland") else "person"
        found += [form for relation in sorted(relations[target]) for form in Form.by_link(link, relation)]
    return found


FORMS = {hops: forms(hops) for hops in (1, 2)}
NAMES = names()


def call(text: str, reasoning: str) -> str:
    """A well-formed search."""
    body = json.dumps({"name": "search", "args": {"query": text}})
    return f"<reasoning>{reasoning}</reasoning>\n<tool>{body}</tool>"


def malformed_call(rng: random.Random, text: str, reasoning: str) -> tuple[str, str]:
    """A call that cannot be executed, and an error message for it."""
    body, error = rng.choice(
        [
            (f'{{"name": "search", "args": {{"query": "{text}"}}', "invalid JSON"),
            (f'{{"name": "search", "args": {{"query": {text}}}}}', "the call is not valid JSON"),
            (f'{{"name": "lookup", "args": {{"query": "{text}"}}}}', "unknown tool 'lookup'"),
            (f'{{"name": "lookup", "args": {{"query": "{text}"}}}}', "there is no tool named lookup"),
            (f'{{"name": "search", "args": {{"text": "{text}"}}}}', "missing argument 'query'"),
            ('{"name": "search", "args": {}}', "missing a required argument: 'query'"),
        ]
    )
    return f"<reasoning>{reasoning}</reasoning>\n<tool>{body}</tool>", f"Error: {error}"


def answer(text: str, reasoning: str = "done") -> str:
    """A well-formed final action."""
    return f"<reasoning>{reasoning}</reasoning>\n<answer>{text}</answer>"


def make_trace(rng: random.Random, hops: tuple[int, ...], habits: bool) -> Trace:
    """One conversation about names drawn at random.

    Args:
        rng: source of all choices.
        hops: numbers of hops to choose from.
        habits: whether mistakes are mixed in, at most one search of a conversation going wrong.
    """
    form = rng.choice(FORMS[rng.choice(hops)])
    given, bridge, value, other = rng.sample(NAMES, 4)
    steps = [(form.relations[0], given, passage(form.relations[0], given, value))]
    if len(form.relations) == 2:
        first = (bridge, given) if form.inverse else (given, bridge)
        steps = [
            (form.relations[0], given, passage(form.relations[0], *first)),
            (form.relations[1], bridge, passage(form.relations[1], bridge, value)),
        ]
    trace = [(PROMPT.format(form.text.format(given)), False)]
    slipped = not habits
    for hop, (relation, name, found) in enumerate(steps):
        thought = f"find {LABELS[relation]}"
        luck = rng.random()
        if habits and hop == 0 and luck < 0.17:
            return [*trace, (answer(other, "guess"), True)]
        if habits and hop == 1 and luck < 0.09:
            return [*trace, (answer(bridge), True)]
        if not slipped and luck < (0.48, 0.20)[hop]:
            slipped = True
            wrong, seen = rng.choice(sorted(LABELS.keys() - {relation})), rng.choice(NAMES)
            kind = rng.random()
            if kind < 0.5:
                action, result = malformed_call(rng, query(relation, name), thought)
            elif kind < 0.75:
                action, result = call(query(wrong, name), f"find {LABELS[wrong]}"), passage(wrong, name, seen)
            else:
                action = call(query(relation, other), thought)
                result = rng.choice([passage(relation, other, seen), passage(wrong, other, seen), "No results."])
            trace += [(action, True), (REPLY.format(result), False)]
            if rng.random() < 0.6:
                return [*trace, (answer(other if kind < 0.5 else seen), True)]
        trace += [(call(query(relation, name), thought), True), (REPLY.format(found), False)]
    if habits and rng.random() < 0.12:
        return [*trace, (f"<reasoning>done</reasoning>\n{value}<|im_end|>", True)]
    return [*trace, (answer(value), True)]
