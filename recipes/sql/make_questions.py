"""
Makes questions over small databases of shops, and their answers, from a seed.

    python make_questions.py            # data/train.jsonl, data/test.jsonl, data/shops/*.sqlite

Each shop draws its names of tables and columns, so an agent has to look. No shop is in both files.
"""

from __future__ import annotations

import argparse
import json
import random
import sqlite3
from contextlib import closing
from datetime import date, timedelta
from pathlib import Path

NAMES = {
    "buyers": ("customers", "clients", "buyers"),
    "goods": ("products", "articles", "items"),
    "sales": ("orders", "sales", "purchases"),
    "city": ("city", "town", "place"),
    "kind": ("category", "kind", "department"),
    "price": ("price", "unit_price", "cost"),
    "pieces": ("quantity", "pieces", "amount"),
    "day": ("day", "ordered_on", "date"),
}
"""What a shop calls its tables and columns: one of each."""

TABLES = """
CREATE TABLE {buyers} (id INTEGER PRIMARY KEY, name TEXT, {city} TEXT);
CREATE TABLE {goods} (id INTEGER PRIMARY KEY, name TEXT, {kind} TEXT, {price} REAL);
CREATE TABLE {sales} (id INTEGER PRIMARY KEY, buyer_id INTEGER REFERENCES {buyers}(id),
    item_id INTEGER REFERENCES {goods}(id), {pieces} INTEGER, {day} TEXT);
"""
SALE = "{sales} JOIN {goods} ON {goods}.id = item_id"
SOLD = "{sales} JOIN {buyers} ON {buyers}.id = buyer_id JOIN {goods} ON {goods}.id = item_id"
WORTH = "SUM({pieces} * {price})"
QUESTIONS = {
    "count": ("How many customers live in CITY?", "SELECT COUNT(*) FROM {buyers} WHERE {city} = 'CITY'"),
    "look up": ("What does one ITEM cost?", "SELECT {price} FROM {goods} WHERE name = 'ITEM'"),
    "where": ("In which city does BUYER live?", "SELECT {city} FROM {buyers} WHERE name = 'BUYER'"),
    "mean": (
        "What do products of the category KIND cost on average, to two decimals?",
        "SELECT ROUND(AVG({price}), 2) FROM {goods} WHERE {kind} = 'KIND'",
    ),
    "dearest": (
        "Which product of the category KIND costs most?",
        "SELECT name, {price} FROM {goods} WHERE {kind} = 'KIND' ORDER BY {price} DESC",
    ),
    "sum": (
        "How many pieces of ITEM were sold?",
        f"SELECT COALESCE(SUM({{pieces}}), 0) FROM {SALE} WHERE {{goods}}.name = 'ITEM'",
    ),
    "month": (
        "For how much was sold in MONTH, to two decimals?",
        f"SELECT ROUND(COALESCE({WORTH}, 0), 2) FROM {SALE} WHERE {{day}} LIKE 'MONTH-%'",
    ),
    "latest": (
        "On which day did BUYER order last?",
        "SELECT MAX({day}) FROM {sales} JOIN {buyers} ON {buyers}.id = buyer_id WHERE name = 'BUYER'",
    ),
    "distinct": (
        "How many different customers ordered ITEM?",
        f"SELECT COUNT(DISTINCT buyer_id) FROM {SALE} WHERE {{goods}}.name = 'ITEM'",
    ),
    "never": (
        "How many products were never ordered?",
        "SELECT COUNT(*) FROM {goods} WHERE id NOT IN (SELECT item_id FROM {sales})",
    ),
    "best buyer": (
        "Which customer spent most?",
        f"SELECT {{buyers}}.name, {WORTH} FROM {SOLD} GROUP BY {{buyers}}.id ORDER BY 2 DESC",
    ),
    "best city": (
        "Customers of which city spent most?",
        f"SELECT {{city}}, {WORTH} FROM {SOLD} GROUP BY 1 ORDER BY 2 DESC",
    ),
}
"""Kinds of questions, and the query that answers each; a second column is what the rows compete by."""

FIRST = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gita", "Hugo", "Ines", "Jon", "Kim", "Lea")
LAST = ("Abel", "Berg", "Cruz", "Diaz", "Egan", "Ford", "Gray", "Hale")
CITIES = ("Lima", "Oslo", "Rome", "Cairo", "Quito", "Delhi", "Paris", "Perth")
GOODS = {
    "tools": ("hammer", "saw", "drill", "wrench", "chisel"),
    "kitchen": ("kettle", "pan", "whisk", "grater", "jug"),
    "garden": ("spade", "rake", "hose", "shears", "bench"),
    "office": ("stapler", "lamp", "desk", "folder", "clock"),
}


def make_shop(rng: random.Random, path: Path) -> dict[str, str]:
    """Writes the database of a shop; returns what it calls its tables and columns."""
    names = {name: rng.choice(choices) for name, choices in NAMES.items()}
    people = rng.sample([f"{first} {last}" for first in FIRST for last in LAST], rng.randint(8, 20))
    goods = [(item, kind) for kind, items in GOODS.items() for item in rng.sample(items, rng.randint(2, 5))]
    start = date(2024, 1, 1)
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(TABLES.format(**names))
        buyers = [(None, person, rng.choice(CITIES[:5])) for person in people]
        database.executemany("INSERT INTO {buyers} VALUES (?, ?, ?)".format(**names), buyers)
        items = [(None, item, kind, rng.randint(200, 9999) / 100) for item, kind in goods]
        database.executemany("INSERT INTO {goods} VALUES (?, ?, ?, ?)".format(**names), items)
        for _ in range(rng.randint(30, 120)):
            day = start + timedelta(days=rng.randrange(366))
            sale = (rng.randint(1, len(people)), rng.randint(1, len(goods)), rng.randint(1, 9), day.isoformat())
            database.execute("INSERT INTO {sales} VALUES (NULL, ?, ?, ?, ?)".format(**names), sale)
    return names


def ask(rng: random.Random, path: Path, names: dict[str, str], kind: str) -> dict[str, object] | None:
    """A row with a question of a kind, or `None` where its answer would be a tie, or nothing."""
    question, query = QUESTIONS[kind]
    query = query.format(**names)
    with closing(sqlite3.connect(path)) as database:
        said = {"KIND": rng.choice(list(GOODS)), "MONTH": f"2024-{rng.randint(1, 12):02}"}
        columns = {"BUYER": ("name", "buyers"), "ITEM": ("name", "goods"), "CITY": (names["city"], "buyers")}
        for word, (column, table) in columns.items():
            (said[word],) = rng.choice(database.execute(f"SELECT {column} FROM {names[table]}").fetchall())
        for word, value in said.items():
            question, query = question.replace(word, value), query.replace(word, value)
        best, *others = database.execute(query).fetchall()
    if best[0] is None or any(other[1:] == best[1:] for other in others):
        return None
    return {"prompt": question, "answer": str(best[0]), "database": str(path), "kind": kind, "query": query}


def make(folder: Path, shops: int, seed: int) -> None:
    """Two questions of each kind for each shop; a fifth of the shops, and at least one, are for the test."""
    rng = random.Random(seed)
    (folder / "shops").mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[dict[str, object]]] = {"test": [], "train": []}
    for number in range(shops):
        path = folder / "shops" / f"{number:03}.sqlite"
        names = make_shop(rng, path)
        made = [ask(rng, path, names, kind) for kind in QUESTIONS for _ in range(2)]
        one_each = {str(row["prompt"]): row for row in made if row is not None}
        rows["test" if number < max(1, shops // 5) else "train"] += one_each.values()
    for split, each in rows.items():
        rng.shuffle(each)
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each), encoding="utf-8")
        print(f"{folder / split}.jsonl: {len(each)} questions")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("data"))
    parser.add_argument("--shops", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(arguments.folder, arguments.shops, arguments.seed)
