"""The worked example, `docs/example.md` and `recipes/sql`: right answers, an agent that only reads, steps that run."""

import io
import json
import re
import runpy
import shlex
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pandas
import pytest
from support.conversations import play

from mt_grpo.cli import main

ROOT = Path(__file__).parents[1]
SQL, PAGE = ROOT / "recipes" / "sql", (ROOT / "docs" / "example.md").read_text()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of the example's files with questions, as the current folder."""
    shutil.copytree(SQL, tmp_path / "sql", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path / "sql")
    monkeypatch.syspath_prepend(tmp_path / "sql")
    subprocess.run([sys.executable, "make_questions.py", "--shops", "5"], check=True, capture_output=True)
    yield tmp_path / "sql"
    sys.modules.pop("sql_agent", None)


def rows_of(*splits: str) -> list[dict]:
    return [json.loads(line) for split in splits for line in Path(f"data/{split}.jsonl").read_text().splitlines()]


def shop(path: str) -> pandas.DataFrame:
    """All sales of a shop with their buyers and goods, in columns of one name each; goods that nobody bought too."""
    with closing(sqlite3.connect(path)) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master ORDER BY rootpage")]
        buyers, goods, sales = (pandas.read_sql(f"SELECT * FROM {name}", database) for name in tables)
    buyers.columns, goods.columns = ["buyer_id", "buyer", "city"], ["item_id", "item", "kind", "price"]
    sales.columns = ["sale", "buyer_id", "item_id", "pieces", "day"]
    whole = sales.merge(buyers, how="outer").merge(goods, how="outer")
    return whole.assign(worth=whole.pieces * whole.price)


GOODS = ["item", "kind", "price"]
ORACLE = {
    "count": lambda all, word: (all.groupby("buyer").city.first() == word).sum(),
    "look up": lambda all, word: all[all.item == word].price.iloc[0],
    "where": lambda all, word: all[all.buyer == word].city.iloc[0],
    "mean": lambda all, word: all[GOODS].drop_duplicates().query("kind == @word").price.mean(),
    "dearest": lambda all, word: all[all.kind == word].sort_values("price").item.iloc[-1],
    "sum": lambda all, word: all[all.item == word].pieces.sum(),
    "month": lambda all, word: all[all.day.fillna("").str[:7] == word].worth.sum(),
    "latest": lambda all, word: all[all.buyer == word].day.max(),
    "distinct": lambda all, word: all[(all.item == word) & all.sale.notna()].buyer.nunique(),
    "never": lambda all, word: all[all.item.notna() & all.sale.isna()].item.nunique(),
    "best buyer": lambda all, word: all.groupby("buyer").worth.sum().idxmax(),
    "best city": lambda all, word: all.groupby("city").worth.sum().idxmax(),
}
"""The answers, computed another way: from a shop's sales and the word that the question asks about."""


def asked(prompt: str) -> str:
    """The name, month or kind in a question."""
    found = re.search(
        r"live in (.+)\?|one (.+) cost|does (.+?) (?:live|order)|category (\w+)|of (\w+) were sold|"
        r"sold in ([\d-]+)|did (.+) order|ordered (\w+)\?",
        prompt,
    )
    return next((each for each in found.groups() if each), "") if found else ""


def test_answers_are_those_of_a_second_computation(folder):
    same, rows = runpy.run_path("sql_agent.py")["same"], rows_of("train", "test")
    assert {row["kind"] for row in rows} == ORACLE.keys() and len(rows) > 60
    for row in rows:
        second = ORACLE[row["kind"]](shop(row["database"]), asked(row["prompt"]))
        assert same(second, row["answer"]), (row, second)
    shops = [{row["database"] for row in rows_of(split)} for split in ("train", "test")]
    assert all(shops) and not shops[0] & shops[1]


PER_TURN = ("Runs", "Finds")


def call(name: str, **arguments: str) -> str:
    return f"<tool>{json.dumps({'name': name, 'args': arguments})}</tool>"


def test_a_right_conversation_is_paid_at_the_turn_that_finds(folder):
    agent, rows = runpy.run_path("sql_agent.py"), rows_of("train")
    said = [
        [call("schema"), call("query", sql="SELECT nothing"), call("query", sql=row["query"]), answer(row["answer"])]
        for row in rows
    ]
    played, _ = play(agent["SQLAgent"](max_steps=3), said, rows, tokenizer=None)
    for trajectory, row in zip(played, rows, strict=True):
        names = {key: value for key, value in row.items() if key != "prompt"}
        scores = [[agent[name]().score(turn, trajectory, **names) for turn in trajectory.turns] for name in PER_TURN]
        assert scores == [[None, 0, 1, None], [0, 0, 1, 0]], row
        assert agent["Right"]().score(trajectory, **names) == 1
        assert "CREATE TABLE" in trajectory.turns[0].tool_calls[0].result
        trajectory.answer = "another"
        assert agent["Right"]().score(trajectory, **names) == 0


def answer(text: str) -> str:
    return f"<answer>{text}</answer>"


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT COUNT(*) FROM n"


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        ("DELETE FROM sqlite_master", "not authorized|may not be modified"),
        ("CREATE TABLE t (x)", "not authorized"),
        ("ATTACH DATABASE 'other.sqlite' AS other", "not authorized"),
        ("PRAGMA query_only = 0", "not authorized"),
        ("SELECT hex(zeroblob(1000000000))", "too big"),
        (ENDLESS, "interrupted"),
    ],
)
def test_a_query_only_reads_and_ends(folder, sql, why):
    agent, (row, *_) = runpy.run_path("sql_agent.py"), rows_of("train")
    agent["read"].__globals__["SECONDS"] = 0.2
    before = Path(row["database"]).read_bytes()
    with pytest.raises(sqlite3.Error, match=why):
        agent["read"](Path(row["database"]).resolve(), sql)
    assert Path(row["database"]).read_bytes() == before and not Path("other.sqlite").exists()


def test_code_on_the_page_is_that_of_the_files():
    blocks, code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL), (SQL / "sql_agent.py").read_text()
    assert blocks and [block for block in blocks if block not in code] == []
    weights = dict(re.findall(r"\| `(\w+)` \| .*? \| ([\d.]+) \|", PAGE))
    agent = runpy.run_path(str(SQL / "sql_agent.py"))
    assert {name: agent[name]().weight for name in weights} == {name: float(text) for name, text in weights.items()}


COMMANDS = [line.strip() for line in re.findall(r"^    (?=\w+=|mt-grpo |python |cd ).*$", PAGE, re.MULTILINE)]
"""What the page says to type, in its order."""
EMBEDDED = "--model_name_or_path embedded --use_peft false --bf16 false --use_cpu --dtype float32 --max_turn_length 24"
SHORT = {"train": f"{EMBEDDED} --max_steps 1 --gradient_accumulation_steps 2 --dataset_test_split test[:4]"}
SHORT |= {
    "eval": f"{EMBEDDED} --dataset_test_split test[:4]",
    "doctor": EMBEDDED,
    "rollout": f"{EMBEDDED} --num_prompts 2",
    "view": "--export page.html",
}


@pytest.mark.slow
def test_the_steps_of_the_page_run_in_their_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS:
        program, *words = shlex.split(command)
        if "=" in program:
            monkeypatch.setenv(*program.split("="))
            program, *words = words
        if program == "cd":
            monkeypatch.chdir(words[0])
            monkeypatch.syspath_prepend(Path(words[0]).resolve())
        elif words[0] == "serve":  # vLLM is tested where it is installed
            continue
        elif program == "python":
            subprocess.run([sys.executable, *words, "--shops", "2"], check=True, capture_output=True)
        else:
            monkeypatch.setattr(sys, "stdin", io.StringIO("How many customers live in Lima?"))
            if words[0] == "eval":
                words[words.index("--model") + 1] = "embedded"
            assert main([*words, *shlex.split(SHORT.get(words[0], ""))]) == 0, command
    sys.modules.pop("sql_agent", None)
