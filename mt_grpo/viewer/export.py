"""A page of a run as one file: its scripts, its style and the conversations of a filter inside it."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

from mt_grpo.errors import UserError
from mt_grpo.runlog.files import check_target, written_whole
from mt_grpo.viewer.queries import Queries, as_json, searched
from mt_grpo.viewer.server import page_files

MOST = 2000
"""Conversations of a file."""

_IMPORT = re.compile(r"^import (\{.*?\}) from '\./([\w.]+)'$", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const) (\w+))", re.MULTILINE)


class ExportError(UserError, ValueError):
    """The file cannot be written. The message is one sentence fit for the user."""


def export(queries: Queries, path: Path, filter: str, overwrite: bool = False) -> int:
    """
    Writes the file. It has the overview of the whole run, the conversations that the filter lets through, the groups
    that these are of, and the comparison of the first and the last evaluation.
    """
    check_target(path)
    if path.exists() and not overwrite:
        raise ExportError(f"{path} is there already: give another name, or `--overwrite` to replace it.")
    queries.answer("run", {})
    if searched(filter):
        queries.words.read_all(queries.run.rows)
    places = queries.select(filter).tolist()
    if not places:
        raise ExportError(f"No conversation fulfils the filter {filter!r}, so that there is nothing to write.")
    if len(places) > MOST:
        raise ExportError(
            f"{len(places)} conversations are too many for a file, which takes {MOST}: narrow it with "
            "`--filter 'step>=40 reward<0.5'`."
        )
    data = _data(queries, places, filter)
    try:
        with written_whole(path) as partial:
            partial.write_text(page(data), encoding="utf-8", errors="replace")
    except OSError as error:
        raise ExportError(f"{path} cannot be written: {error.strerror}.") from error
    return len(places)


def page(data: dict[str, Any]) -> str:
    """The whole file."""
    files = {name: content.decode() for name, content in page_files().items()}
    script, style = bundle(files, "app.js"), files["style.css"]
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    html = files["index.html"]
    replaced = {
        '<meta charset="utf-8">': (
            f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
        ),
        '<link rel="stylesheet" href="style.css">': f"<style>{style}</style>",
        '<script type="module" src="app.js"></script>': (
            f'<script type="application/json" id="data">{as_data(data)}</script>\n'
            f'<script type="module">{script}</script>'
        ),
    }
    for old, new in replaced.items():
        if html.count(old) != 1:
            raise AssertionError(f"index.html has no {old}")
        html = html.replace(old, new)
    return html


def bundle(files: dict[str, str], name: str) -> str:
    """The modules that one imports, and itself last, as one script: a function each, which returns what it exports."""
    order: list[str] = []

    def visit(module: str) -> None:
        for _, needed in _IMPORT.findall(files[module]):
            if needed not in order:
                visit(needed)
        if module not in order:
            order.append(module)

    visit(name)
    parts = ["const modules = {}"]
    for module in order:
        body = _IMPORT.sub(r"const \1 = modules['\2']", files[module])
        exports = ", ".join(_EXPORT.findall(body))
        parts.append(f"modules['{module}'] = (() => {{\n{_EXPORT.sub('', body)}\nreturn {{ {exports} }}\n}})()")
    return "\n".join(parts)


def as_data(data: dict[str, Any]) -> str:
    """JSON that may stand in a script element: no text in it can end the element or begin a comment."""
    text = as_json(data).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _data(queries: Queries, places: list[int], filter: str) -> dict[str, Any]:
    rows = [queries.table_row(place) for place in places]
    answers: dict[str, dict[str, Any]] = {"run": {"": queries.answer("run", {})}}
    for name in ("overview", "metrics", "lost"):
        answers[name] = {"": queries.answer(name, {})}
    for name, keys in (("trajectory", ("session",)), ("why", ("session",)), ("group", ("mode", "step", "k", "group"))):
        answers[name] = {}
        for row in rows:
            asked = {key: str(row[key]) for key in keys}
            key = " ".join(asked.values())
            if key not in answers[name]:
                answers[name][key] = queries.answer(name, asked)
    answers["groups"] = {}
    for row in rows:
        key = f"{row['mode']} {row['step']}"
        if key not in answers["groups"]:
            view = queries.answer("groups", {"mode": row["mode"], "step": str(row["step"])})
            inside = [each for each in view["groups"] if " ".join(map(str, each["key"].values())) in answers["group"]]
            answers["groups"][key] = {**view, "groups": inside}
    shown = {row["session"] for row in rows}
    noted = {session: note for session, note in queries.columns.notes.items() if session in shown}
    answers["notes"] = {"": {"notes": noted}}
    answers["compare"] = {"": _compare(queries)}
    answers["finds"] = _finds(queries, answers["overview"][""], rows)
    return {"filter": filter, "total": len(queries.columns.rows), "rows": rows, "answers": answers}


def _finds(queries: Queries, overview: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, list[int]]:
    """By the filter of each finding, which of the file's rows it lets through: its link leads to these alone."""
    asked = [finding["link"]["q"] for finding in overview["findings"] if "q" in (finding["link"] or {})]
    place = {row["session"]: number for number, row in enumerate(rows)}
    all_rows = queries.columns.rows
    return {
        q: [place[name] for each in queries.select(q).tolist() if (name := all_rows[each]["session"]) in place]
        for q in asked
    }


def _compare(queries: Queries) -> dict[str, Any]:
    try:
        return queries.answer("compare", {})
    except UserError as error:  # fewer than two evaluations
        return {"error": str(error)}


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
