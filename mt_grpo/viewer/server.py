"""Serves the page and its questions on this machine, from the standard library alone."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from mt_grpo.errors import UserError
from mt_grpo.runlog.files import written_for_users
from mt_grpo.runlog.schema import Row, misfit
from mt_grpo.viewer.queries import Queries, as_json, searched, to_write

_HOST = "127.0.0.1"

PORT = 8431  # the first port that is tried

_TRIES = 50  # ports that are tried where none is asked for
_MOST_POSTED = 100_000  # bytes of a request that writes

_HERE = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d*)?")
"""Names of this machine that a browser may call the page by. Any other one is of a page of somebody else."""

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}

TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


def _page_files() -> dict[str, bytes]:
    """The page's files by name."""
    folder = files("mt_grpo.viewer") / "page"
    return {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.name.endswith(tuple(TYPES))}


class Answers(Protocol):
    """What answers the page's questions: about one run, or about several."""

    def answer(self, question: str, asked: dict[str, str]) -> Row: ...

    def export(self, form: str, asked: dict[str, str]) -> Iterator[str]: ...

    def note(self, asked: dict[str, str], star: bool, note: str) -> Row: ...


class Server(ThreadingHTTPServer):
    """Serves the page of a run, or of several."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # a browser asks for all files of the page at once, on several connections
    allow_reuse_address = True

    def __init__(self, queries: Answers, port: int | None = None) -> None:
        self.queries = queries
        self.files = _page_files()
        ports = [port] if port is not None else range(PORT, PORT + _TRIES)
        fault = f"Port {port} is taken: name another one with `--port`, or leave it out."
        if port is None:
            fault = f"No port from {PORT} to {PORT + _TRIES - 1} is free: name another one with `--port`."
        for each in ports:
            try:
                super().__init__((_HOST, each), _Handler)
                return
            except OSError as error:
                if error.errno == errno.EACCES:
                    fault = f"Port {each} may not be used by this user: name one above 1023."
                    break
                if error.errno != errno.EADDRINUSE:
                    raise
        raise UserError(fault)

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{_HOST}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is no error; any other error shows its traceback."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version = "mt-grpo"
    sys_version = ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        asked, host = urlsplit(self.path), self.headers.get("Host", "")
        parameters = dict(parse_qsl(asked.query, True))
        if not _HERE.fullmatch(host):
            words = f"The page is called 127.0.0.1 or localhost, and not {host!r}."
            return self._send(HTTPStatus.FORBIDDEN, "text/plain", words.encode(errors="replace"))
        if asked.path.startswith("/api/"):
            question = asked.path.removeprefix("/api/")
            return self._reply(lambda: self.server.queries.answer(question, parameters))
        if asked.path.startswith("/export/"):
            return self._export(asked.path.removeprefix("/export/"), parameters)
        name = asked.path.removeprefix("/") or "index.html"
        if name not in self.server.files:
            return self._send(HTTPStatus.NOT_FOUND, "text/plain", b"There is nothing here.")
        kind = TYPES[name[name.rindex(".") :]]
        self._send(HTTPStatus.OK, kind, self.server.files[name])

    def do_POST(self) -> None:
        """A star or a note, from the page alone: a page of somebody else has another origin, and may not send JSON."""
        asked, host = urlsplit(self.path), self.headers.get("Host", "")
        size = self.headers.get("Content-Length", "")
        if asked.path != "/api/note" or not (size.isdecimal() and len(size) < 9 and int(size) <= _MOST_POSTED):
            return self.send_error(HTTPStatus.NOT_IMPLEMENTED)
        body = self.rfile.read(int(size))  # what is left unread would be taken for the next request
        own = _HERE.fullmatch(host) and self.headers.get("Origin") == f"http://{host}"
        if not own or self.headers.get("Content-Type") != "application/json":
            return self._send(HTTPStatus.FORBIDDEN, "text/plain", b"Notes are written by the page alone.")
        try:  # a browser may send half a character, which orjson does not take
            posted = json.loads(body)
            wrong = misfit("note", posted)
        except (ValueError, RecursionError) as error:
            wrong = str(error)
        if wrong is not None:
            refusal = as_json({"error": f"This is no note: {wrong}."})
            return self._send(HTTPStatus.BAD_REQUEST, "application/json", refusal)
        parameters = dict(parse_qsl(asked.query, True))
        self._reply(lambda: self.server.queries.note(parameters, posted["star"], posted["note"]))

    def _reply(self, find: Callable[[], Row]) -> None:
        try:
            status, answer = HTTPStatus.OK, find()
        except UserError as error:
            status, answer = HTTPStatus.BAD_REQUEST, {"error": str(error)}
        self._send(status, "application/json", as_json(answer))

    def _export(self, form: str, asked: dict[str, str]) -> None:
        """A file of lines, sent as it is made."""
        try:
            lines = self.server.queries.export(form, asked)
            first = next(lines, "")
        except UserError as error:
            return self._send(HTTPStatus.BAD_REQUEST, "text/plain", str(error).encode(errors="replace"))
        disposition = f'attachment; filename="{form}.jsonl"'
        headers = {"Content-Disposition": disposition, "Transfer-Encoding": "chunked"}
        self._begin(HTTPStatus.OK, "application/jsonl", headers)
        try:
            for line in chain([first], lines):
                data = line.encode("utf-8", "backslashreplace")
                if data:
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        except UserError as error:  # without its end, the browser tells that the file is not whole
            print(f"{form}.jsonl ends early: {error}", file=sys.stderr)
            self.close_connection = True
            return
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self._begin(status, kind, {"Content-Length": str(len(body))})
        self.wfile.write(body)

    def _begin(self, status: HTTPStatus, kind: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8", **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal has the address, and keeps it."""


MAX_EXPORTED = 2000  # conversations of a file

_IMPORT = re.compile(r"^import (\{.*?\}) from '\./([\w.]+)'$", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const) (\w+))", re.MULTILINE)


def export(queries: Queries, path: Path, filter: str, overwrite: bool = False) -> int:
    """
    Writes the file: the overview, the conversations that the filter lets through, their groups, and the comparison.
    """
    with written_for_users(path, overwrite) as partial:
        queries.answer("run", {})
        if searched(filter):
            queries.words.read_all(queries.run.rows)
        places = to_write(queries.columns, filter)
        if len(places) > MAX_EXPORTED:
            raise UserError(
                f"{len(places)} conversations are too many for a file, which takes {MAX_EXPORTED}: narrow it with "
                "`--filter 'step>=40 reward<0.5'`."
            )
        partial.write_text(_page(_data(queries, places, filter)), encoding="utf-8", errors="replace")
    return len(places)


def _page(data: Row) -> str:
    """The whole file."""
    files = {name: content.decode() for name, content in _page_files().items()}
    script, style = _bundle(files, "app.js"), files["style.css"]
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
            f'<script type="application/json" id="data">{_as_data(data)}</script>\n'
            f'<script type="module">{script}</script>'
        ),
    }
    for old, new in replaced.items():
        if html.count(old) != 1:
            raise AssertionError(f"index.html has no {old}")
        html = html.replace(old, new)
    return html


def _bundle(files: dict[str, str], name: str) -> str:
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


def _as_data(data: Row) -> str:
    """JSON that may stand in a script element: no text in it can end the element or begin a comment."""
    text = as_json(data).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _data(queries: Queries, places: np.ndarray, filter: str) -> Row:
    rows = queries.table_rows(places)
    answers: dict[str, Row] = {"run": {"": queries.answer("run", {})}}
    for name in ("overview", "metrics", "lost"):
        answers[name] = {"": queries.answer(name, {})}
    for name, keys in (("trajectory", ("session",)), ("why", ("session",)), ("group", ("mode", "step", "k", "group"))):
        answers[name] = {}
        for row in rows:
            asked = {key: str(row[key]) for key in keys}
            key = " ".join(asked.values())
            if key not in answers[name]:  # a conversation without credit has no `why`
                answers[name][key] = _or_error(queries, name, asked) if name == "why" else queries.answer(name, asked)
    answers["groups"] = {}
    for row in rows:  # of a step's groups, those that the file has
        key = f"{row['mode']} {row['step']}"
        if key not in answers["groups"]:
            view = queries.answer("groups", {"mode": row["mode"], "step": str(row["step"])})
            inside = [each for each in view["groups"] if " ".join(map(str, each["key"].values())) in answers["group"]]
            answers["groups"][key] = {**view, "groups": inside}
    shown = {row["session"] for row in rows}
    noted = {session: note for session, note in queries.columns.notes.items() if session in shown}
    answers["notes"] = {"": {"notes": noted}}
    answers["compare"] = {"": _or_error(queries, "compare", {})}  # there may be fewer than two evaluations
    answers["finds"] = _finds(queries, answers["overview"][""], rows)
    return {"filter": filter, "total": len(queries.columns.rows), "rows": rows, "answers": answers}


def _finds(queries: Queries, overview: Row, rows: list[Row]) -> dict[str, list[int]]:
    """By the filter of each finding, which of the file's rows it lets through: its link leads to these alone."""
    asked = [finding["link"]["q"] for finding in overview["findings"] if "q" in (finding["link"] or {})]
    place = {row["session"]: number for number, row in enumerate(rows)}
    sessions = queries.columns.rows.sessions
    return {
        q: [place[name] for each in queries.select(q).tolist() if (name := sessions[each]) in place] for q in asked
    }


def _or_error(queries: Queries, question: str, asked: dict[str, str]) -> Row:
    """An answer, or in `error` why there is none, which the page says where it is asked."""
    try:
        return queries.answer(question, asked)
    except UserError as error:
        return {"error": str(error)}


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
