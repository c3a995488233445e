"""The folder of a run that is damaged, of another program, or of somebody who means harm."""

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.runs import write_run

from mt_grpo.cli import main
from mt_grpo.errors import UserError
from mt_grpo.runlog import open_run
from mt_grpo.runlog.export import export
from mt_grpo.runlog.index import written
from mt_grpo.runlog.schema import ROLLOUTS
from mt_grpo.viewer.queries import Queries, as_json

FILE = "train-0-0.rank0.parquet"
INDEX, PARQUET, CREDIT = "rollouts/index.jsonl", f"rollouts/{FILE}", f"rollouts/credit-{FILE}"
METRICS, TOKENIZER = "metrics.jsonl", "tokenizer/tokenizer.json"
SECRET = "what nobody may see"
QUESTIONS = ("run", "overview", "find", "groups", "group", "trajectory", "why", "compare", "panel", "lost")
TIMES = ("beat", "problem", "read", "version", "written")
"""What depends on when it is asked, and on how many words the search has read by then."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("sound") / "run", steps=1, groups=2, group_size=2)


@pytest.fixture
def folder(sound, tmp_path) -> Path:
    (tmp_path / "outside").write_text(SECRET)
    return Path(shutil.copytree(sound, tmp_path / "run"))


def everything(folder: Path, output: Path | None = None) -> list[Any]:
    """What the page, the reader and, where they have a place, exports make of a run; `None` for each refusal."""
    found: list[Any] = []

    def take(action: Callable[..., Any], *given: Any) -> Any:
        try:
            found.append(action(*given))
        except UserError as error:
            assert str(error).endswith(".") and "\n" not in str(error) and len(str(error)) < 1000
            assert SECRET not in str(error)
            found.append(None)
        return found[-1]

    def answer(question: str) -> dict[str, Any]:
        answered = json.loads(as_json(queries.answer(question, {})))
        return {name: value for name, value in answered.items() if name not in TIMES}

    def exported(form: str) -> list[bytes]:
        target = output / f"{form}-{random.getrandbits(64)}"
        try:
            export(open_run(folder), form, target)
            return sorted(path.read_bytes() for path in [target, *target.rglob("*")] if path.is_file())
        finally:
            assert not list(output.glob("*.partial"))

    run = take(open_run, folder)
    if run is None:
        return found
    found[0] = list(run.rows)
    queries = Queries(run)
    for question in QUESTIONS:
        take(answer, question)
    for row in found[0]:
        take(run.trajectory, row["session"])
    for column in (run.trajectories, run.texts):
        take(lambda column=column: list(column()))
    take(lambda: [run.column(name).tolist() for name in ("reward", "row")])
    for form in (
        ("jsonl", "openinference", "messages", "sharegpt", "dataset", "tokens", "preferences") if output else ()
    ):
        take(exported, form)
    return found


# How a folder may be damaged: each takes the folder

Damage = Callable[[Path], Any]


def edit(place: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: (folder / place).write_bytes(change((folder / place).read_bytes()))


def instead(place: str, make: Damage) -> Damage:
    """Something else where a file was."""
    return lambda folder: ((folder / place).unlink(), make(folder / place))


def other(whole: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """With other values in some fields; `...` for none."""
    return {name: value for name, value in (whole | fields).items() if value is not ...}


def line(kind: str, **fields: Any) -> Damage:
    """Other values in the lines of a kind, each with the checksum that belongs to it."""

    def changed(each: dict[str, Any]) -> dict[str, Any]:
        return other(each, **(fields if each["kind"] == kind else {}), crc=...)

    return edit(INDEX, lambda text: b"".join(written(changed(json.loads(each))) for each in text.splitlines()))


def table(change: Callable[[pa.Table], pa.Table], place: str = PARQUET, size: int = 16) -> Damage:
    """Another table in a file, whose lines say that it is the right one; `size` rows are a row group."""

    def damage(folder: Path) -> None:
        with (folder / place).open("rb") as opened:
            found = pq.ParquetFile(opened).read()
        pq.write_table(change(found), folder / place, row_group_size=size)
        without_checksums(folder)

    return damage


def without_checksums(folder: Path) -> None:
    lines = [each for each in (folder / INDEX).read_text().splitlines() if '"kind":"file"' not in each]
    (folder / INDEX).write_text("".join(each.partition(',"crc":')[0] + "}\n" for each in lines))


def column(name: str, value: Any, place: str = PARQUET) -> Damage:
    def change(found: pa.Table) -> pa.Table:
        kind = found.schema.field(name).type
        kept = pa.types.is_nested(kind) and not isinstance(value, str) or value is None
        values = pa.array([value] * found.num_rows, kind if kept else None)
        return replaced(found, name, values)

    return table(change, place)


def replaced(found: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return found.set_column(found.schema.get_field_index(name), pa.field(name, values.type), values)


def record(name: str, value: Any) -> Damage:
    def change(found: pa.Table) -> pa.Table:
        texts = [json.dumps(other(json.loads(text), **{name: value})) for text in found["record"].to_pylist()]
        return replaced(found, "record", pa.array(texts))

    return table(change)


def turns(**fields: Any) -> Damage:
    """Other values in each turn of the records."""

    def changed(text: str) -> str:
        whole = json.loads(text)
        return json.dumps(whole | {"turns": [other(turn, **fields) for turn in whole["turns"]]})

    return table(lambda found: replaced(found, "record", pa.array(map(changed, found["record"].to_pylist()))))


def no_text(found: pa.Table) -> pa.Table:
    return replaced(found, "record", pa.array([b"\xff\xfe"] * found.num_rows).view(pa.string()))


def socket_at(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path may have a hundred characters
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def outside(path: Path) -> None:
    path.symlink_to(next(above for above in path.parents if above.name == "run").parent / "outside")


def linked_rollouts(folder: Path) -> None:
    shutil.move(folder / "rollouts", folder.parent / "elsewhere")
    (folder / "rollouts").symlink_to(folder.parent / "elsewhere")


OTHER_THINGS: dict[str, Damage] = {
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a socket": socket_at,
    "a link out": outside,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path: path.symlink_to("gone"),
    "gone": lambda path: None,
}
CONTENTS = {
    INDEX: [b"", bytes(5000), b"\n\n\n"],
    PARQUET: [b"", bytes(5000), SECRET.encode(), b"PAR1" + bytes(100) + b"\xff\xff\xff\x7fPAR1"],
    METRICS: [b"hello\n", b"[1]\n", b"{}\n", b'{"step":"1"}\n', b'{"step":1,"train_runtime":"x","grad_norm":"y"}\n'],
    TOKENIZER: [b"", b"\xff\xfe" * 100, b'{"version":"1.0"}'],
}
LINES = [b'{"kind":"rollout","prompt":"\xff\xfe"}', b'{"kind":"run","model":"\\ud800"}', b'{"kind":["rollout"]}']
LINES += [b'{"kind":"rollout"}', b'{"kind":"rollout","reward":NaN}', b'{"kind":"rollout","reward":1e999}']
LINES += [b"[" * 100_000, b"[1, 2]", b"7", b"{}"]
FIELDS = {
    "run": [("rule", "mt_grpo"), ("options", [1]), ("tools", [7]), ("rewards", "exact_match")],
    "rollout": [
        *[("step", value) for value in ("1", 2**40, 10**30, -1, True)],
        *[("row", value) for value in (10**6, -1, 1)],
        *[
            ("file", value)
            for value in ("../../outside", "/etc/passwd", "a\0b", "a" * 5000, ".", f"credit-{FILE}", None)
        ],
        *[("sampled", "x"), ("branch_of", 7), ("mode", "trian"), ("tokens", 3), ("tokens", ["3"]), ("rewards", [1.0])],
        *[("prompt", 7), ("session", ["s"]), ("start", 1e300), ("stop", ...)],
    ],
    "credit": [("advantages", []), ("advantages", [0.5]), ("advantages", "1")],
    "step": [("sampling", ...)],
}
COLUMNS = [("tip", "x"), ("tokens", [1, None]), ("tokens", []), ("node_size", [-1]), ("node_parent", [1, 0])]
COLUMNS += [("record", value) for value in (5, None, "no JSON", "[" * 100_000, "9" * 5000, "{}")]
PARTS = [
    [{"name": "outcome", "values": [], "scales": None}],
    [{"name": "outcome", "values": [1.0] * 9, "scales": [1.0]}],
    [{"name": "outcome", "values": [None] * 9, "scales": None}],
    [None],
    "outcome",
]
RECORDS = [
    *[("seconds", float("nan")), ("turns", []), ("turns", ["x"]), ("prompt", "What?"), ("row", "x"), ("start", "x")],
    *[("row", {"answer": value}) for value in (10**30, "\ud800", json.loads("[" * 300 + "]" * 300))],
    ("turns", [{"index": 0, "message": {"role": "assistant", "content": "x"}}]),
    ("prompt", [{"role": "user", "content": 7}]),
    *[("rewards", {"turn": {"tool_execution": value}}) for value in (0.5, [], ["x"])],
    *[("rewards", value) for value in ({"outcome": {"exact_match": "x"}}, {"other": 1.0})],
    *[("answer", ...), ("stop_reason", ...)],
]
CALLS = [7, {}, [7], [{"function": 7, "arguments": "{"}]]
TURNS = [("mask", value) for value in ([], [1], [1] * 999, [2] * 999, ["x"], 7)]
TURNS += [("message", {"role": "assistant", "content": "x", "tool_calls": calls}) for calls in CALLS]
TURNS += [("reward", ...), ("answer", ...), ("error", ...)]
DAMAGES: dict[str, Damage] = {
    "index cut": edit(INDEX, lambda content: content[: len(content) // 2]),
    "index of another process a pipe": lambda folder: os.mkfifo(folder / "rollouts/index.rank1.jsonl"),
    "rollouts a link out": linked_rollouts,
    "rollouts a file": lambda folder: (shutil.rmtree(folder / "rollouts"), (folder / "rollouts").touch()),
    "parquet cut": edit(PARQUET, lambda content: content[: int(len(content) * 0.7)]),
    "parquet of another program": table(lambda found: pa.table({"a": [1, 2, 3, 4]})),
    "parquet without a column": table(lambda found: found.drop_columns(["record"])),
    "parquet with a column twice": table(lambda found: found.append_column("record", found["record"])),
    "parquet without rows": table(lambda found: found.slice(0, 0)),
    "parquet with one row": table(lambda found: found.slice(0, 1)),
    "parquet in other row groups": table(lambda found: found, size=1),
    "records of bytes that are no text": table(no_text),
}


def add(about: str, value: Any, damage: Damage) -> None:
    DAMAGES[f"{about} {ascii(value)[:40]} {len(DAMAGES)}"] = damage


for _place, _contents in CONTENTS.items():
    for _name, _make in OTHER_THINGS.items():
        add(_place, _name, instead(_place, _make))
    for _content in _contents:
        add(_place, _content, edit(_place, lambda old, new=_content: new))
for _text in LINES:
    add("line", _text, edit(INDEX, lambda old, text=_text: old + text + b"\n"))
for _kind, _fields in FIELDS.items():
    for _name, _value in _fields:
        add(f"{_kind} {_name}", _value, line(_kind, **{_name: _value}))
for _name, _value in COLUMNS:
    add(f"column {_name}", _value, column(_name, _value))
for _value in PARTS:
    add("parts", _value, column("parts", _value, CREDIT))
for _name, _value in TURNS:
    add(f"turn {_name}", _value, turns(**{_name: _value}))
for _name, _value in RECORDS:
    add(f"record {_name}", _value, record(_name, _value))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_sentence_or_does_no_harm(folder, tmp_path, damage):
    DAMAGES[damage](folder)
    before = time.monotonic()
    everything(folder, tmp_path)
    assert time.monotonic() - before < 120


@pytest.mark.parametrize("change", [lambda folder: None, without_checksums], ids=["sound", "without checksums"])
def test_a_sound_run_is_refused_nowhere(folder, tmp_path, change):
    change(folder)
    assert None not in everything(folder, tmp_path)


def test_other_bytes_are_never_shown_as_what_was_written(sound, tmp_path):
    right = everything(sound)
    names = [path.relative_to(sound) for path in sorted(sound.rglob("*")) if path.is_file() and path.name != METRICS]
    draw = random.Random(0)
    for _ in range(60):
        name = draw.choice(names)
        folder = Path(shutil.copytree(sound, tmp_path / "run"))
        content = bytearray((folder / name).read_bytes())
        place = draw.choice([draw.randrange(len(content)), len(content) - 1 - draw.randrange(min(len(content), 64))])
        content[place] ^= draw.randrange(1, 256)
        (folder / name).write_bytes(content)
        found = everything(folder)
        assert None in found, (name, place)
        assert all(value is None or value == expected for value, expected in zip(found, right, strict=False)), name
        shutil.rmtree(folder)


@pytest.mark.parametrize("place", [PARQUET, CREDIT])
def test_pages_have_checksums_of_their_own(folder, place):
    """So that other programs find damage, and runs whose index has no line of the file."""
    without_checksums(folder)
    content = bytearray((folder / place).read_bytes())
    number = 0 if place == CREDIT else ROLLOUTS.names.index("record")
    about = pq.read_metadata(folder / place).row_group(0).column(number)
    content[(about.dictionary_page_offset or about.data_page_offset) + about.total_compressed_size - 3] ^= 1
    (folder / place).write_bytes(content)
    run = open_run(folder)
    with pytest.raises(UserError, match="is damaged .*CRC"):
        [run.trajectory(row["session"]) for row in run.rows]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("place", [INDEX, PARQUET, TOKENIZER, METRICS, "rollouts"])
def test_what_may_not_be_read_is_one_sentence(folder, tmp_path, place):
    (folder / place).chmod(0)
    assert None in everything(folder, tmp_path)
    (folder / place).chmod(0o700)


def test_what_fills_the_memory_is_refused(folder, monkeypatch):
    table(lambda found: pa.concat_tables([found] * 10), size=100)(folder)
    run = open_run(folder)
    sessions = [row["session"] for row in run.rows]
    with pytest.raises(UserError, match="larger than any that a run writes"):
        [run.trajectory(session) for session in sessions]
    for limit in ("_MOST_BYTES", "_MOST_VALUES"):
        with monkeypatch.context() as patched, pytest.raises(UserError, match="larger than any that a run writes"):
            patched.setattr(f"mt_grpo.runlog.reader.{limit}", 10)
            run.trajectory(sessions[0])
    os.truncate(folder / INDEX, 2**40)  # has holes, and takes no room
    with pytest.raises(UserError, match="more than a run writes"):
        open_run(folder)


@pytest.mark.parametrize("command", ["export RUN --to jsonl", "view RUN --export RUN.html"])
def test_commands_that_read_a_run_never_hang(folder, command):
    instead(PARQUET, os.mkfifo)(folder)
    command = [sys.executable, "-m", "mt_grpo", *command.replace("RUN", str(folder)).split()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1 and "is a named pipe" in ended.stderr


@pytest.mark.parametrize("command", ["export RUN --to dataset --output FILE", "view RUN --export FILE"])
def test_an_export_overwrites_nothing_through_a_link(folder, tmp_path, capsys, command):
    (folder / "link").symlink_to(tmp_path / "outside")
    assert main(command.replace("RUN", str(folder)).replace("FILE", str(folder / "link")).split()) == 1
    assert "is a link, and what it leads to is not overwritten" in capsys.readouterr().err
    assert (tmp_path / "outside").read_text() == SECRET


def test_an_export_writes_at_no_name_that_can_be_guessed(folder, tmp_path):
    for name in ("trajectories.jsonl.partial", ".trajectories.jsonl.partial", "trajectories.jsonl.tmp"):
        (folder / name).symlink_to(tmp_path / "outside")
    assert main(["export", str(folder), "--to", "jsonl"]) == 0
    assert (tmp_path / "outside").read_text() == SECRET and not (folder / "trajectories.jsonl").is_symlink()
