"""The folder of a run that is damaged, of another program, or of somebody who means harm."""

from __future__ import annotations

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
from mt_grpo.runlog.index import written
from mt_grpo.runlog.schema import ROLLOUTS
from mt_grpo.viewer.queries import Queries, as_json

FILE = "train-0-0.rank0.parquet"
SECRET = "what nobody may see"


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("sound") / "run", steps=1, groups=2, group_size=2)


@pytest.fixture
def folder(sound, tmp_path) -> Path:
    (tmp_path / "outside").write_text(SECRET)
    return Path(shutil.copytree(sound, tmp_path / "run"))


TIMES = ("beat", "problem", "read", "version", "written")


def everything(folder: Path, output: Path | None = None) -> list[Any]:
    """What the page, the reader and, where they have a place, exports make of a run; `None` for each refusal."""
    found: list[Any] = []

    def take(action: Callable[[], Any]) -> Any:
        try:
            value = action()
        except UserError as error:
            assert str(error).endswith(".") and "\n" not in str(error) and len(str(error)) < 1000
            assert SECRET not in str(error)
            found.append(None)
            return None
        found.append(value)
        return value

    run = take(lambda: open_run(folder))
    if run is None:
        return found
    found[0] = list(run.rows)
    queries = Queries(run)
    for question in ("run", "overview", "find", "groups", "group", "trajectory", "why", "compare", "panel", "lost"):
        take(lambda question=question: without_times(json.loads(as_json(queries.answer(question, {})))))
    for row in list(run.rows):
        take(lambda row=row: run.trajectory(row["session"]))
    take(lambda: list(run.trajectories()))
    take(lambda: list(run.texts()))
    take(lambda: [run.column(name).tolist() for name in ("reward", "row")])
    for form in ("jsonl", "openinference", "messages", "dataset") if output else ():
        take(lambda form=form: exported(folder, form, output))
    return found


def without_times(answer: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on when it is asked, and on how many words the search has read by then."""
    return {name: value for name, value in answer.items() if name not in TIMES}


def exported(folder: Path, form: str, output: Path) -> Any:
    from mt_grpo.runlog.export import export

    target = output / f"{form}-{random.getrandbits(64)}"
    try:
        export(open_run(folder), form, target)
        return sorted(path.read_bytes() for path in [target, *target.rglob("*")] if path.is_file())
    finally:
        assert not [path for path in output.iterdir() if path.name.endswith(".partial")]


# How a folder may be damaged: each takes the folder


def file(name: str) -> Callable[[Path], Path]:
    return lambda folder: folder / name


index, metrics, tokenizer = map(file, ("rollouts/index.jsonl", "metrics.jsonl", "tokenizer/tokenizer.json"))
rollouts, credit, updates = map(file, (f"rollouts/{name}{FILE}" for name in ("", "credit-", "x")))


def parquets(folder: Path) -> dict[str, Path]:
    return {path.name.split("-")[0]: path for path in sorted((folder / "rollouts").glob("*-0*.parquet"))}


def put(place: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: void((folder / place).write_bytes(content))


def instead(place: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Something else where a file was."""

    def damage(folder: Path) -> None:
        path = folder / place
        path.unlink()
        make(path)

    return damage


def cut(place: str, share: float) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / place, int((folder / place).stat().st_size * share))


def line(kind: str, **fields: Any) -> Callable[[Path], None]:
    """Other values in the lines of a kind, each with the checksum that belongs to it; `...` for none."""

    def damage(folder: Path) -> None:
        lines = [json.loads(each) for each in index(folder).read_text().splitlines()]
        for each in lines:
            each.pop("crc")
            if each["kind"] == kind:
                each |= fields
                for name in [name for name, value in fields.items() if value is ...]:
                    del each[name]
        index(folder).write_bytes(b"".join(map(written, lines)))

    return damage


def raw(text: bytes) -> Callable[[Path], None]:
    return lambda folder: void(index(folder).write_bytes(index(folder).read_bytes() + text + b"\n"))


def table(
    change: Callable[[pa.Table], pa.Table], of: Callable[[Path], Path] = rollouts, **options: Any
) -> Callable[[Path], None]:
    """Another table in the file of conversations, whose lines say that it is the right one."""

    def damage(folder: Path) -> None:
        path = of(folder)
        with path.open("rb") as opened:
            found = pq.ParquetFile(opened).read()
        pq.write_table(change(found), path, **{"row_group_size": 16, **options})
        without_checksums(folder)

    return damage


def without_checksums(folder: Path) -> None:
    lines = [each for each in index(folder).read_text().splitlines() if '"kind":"file"' not in each]
    index(folder).write_text("".join(each.partition(',"crc":')[0] + "}\n" for each in lines))


def column(name: str, value: Any, of: Callable[[Path], Path] = rollouts) -> Callable[[Path], None]:
    def change(found: pa.Table) -> pa.Table:
        number = found.schema.get_field_index(name)
        kind = found.schema.field(name).type
        values = pa.array(
            [value] * found.num_rows,
            kind if pa.types.is_nested(kind) and not isinstance(value, str) or value is None else None,
        )
        return found.set_column(number, pa.field(name, values.type), values)

    return table(change, of)


def record(**fields: Any) -> Callable[[Path], None]:
    def change(found: pa.Table) -> pa.Table:
        changed = [json.dumps(json.loads(text) | fields) for text in found["record"].to_pylist()]
        return found.set_column(found.schema.get_field_index("record"), "record", pa.array(changed))

    return table(change)


def void(_: Any) -> None:
    return None


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path may have a hundred characters
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)


def circle(path: Path) -> None:
    path.symlink_to(path.name)


def outside(path: Path) -> None:
    path.symlink_to(path.parents[2] / "outside" if path.parent.name != "run" else path.parents[1] / "outside")


def linked_rollouts(folder: Path) -> None:
    shutil.move(folder / "rollouts", folder.parent / "elsewhere")
    (folder / "rollouts").symlink_to(folder.parent / "elsewhere")


ONE_TURN = {"index": 0, "message": {"role": "assistant", "content": "x"}}
INDEX, PARQUET, TOKENIZER = "rollouts/index.jsonl", f"rollouts/{FILE}", "tokenizer/tokenizer.json"

DAMAGES: dict[str, Callable[[Path], Any]] = {
    "index empty": put(INDEX, b""),
    "index of zeros": put(INDEX, bytes(5000)),
    "index of newlines": put(INDEX, b"\n\n\n"),
    "index not UTF-8": raw(b'{"kind":"rollout","prompt":"\xff\xfe"}'),
    "index with half a character": raw(b'{"kind":"run","model":"\\ud800"}'),
    "index with NaN": raw(b'{"kind":"rollout","reward":NaN}'),
    "index with 1e999": raw(b'{"kind":"rollout","reward":1e999}'),
    "index as deep as one likes": raw(b"[" * 100_000),
    "index line a list": raw(b"[1, 2]"),
    "index line a number": raw(b"7"),
    "index line of no kind": raw(b"{}"),
    "index line of another kind": raw(b'{"kind":["rollout"]}'),
    "index line without fields": raw(b'{"kind":"rollout"}'),
    "index cut": cut(INDEX, 0.5),
    "index in a folder": instead(INDEX, Path.mkdir),
    "index a pipe": instead(INDEX, os.mkfifo),
    "index a socket": instead(INDEX, a_socket),
    "index a link out": instead(INDEX, outside),
    "index a link to itself": instead(INDEX, circle),
    "index a link to a device": instead(INDEX, lambda path: path.symlink_to("/dev/zero")),
    "index of another process a pipe": lambda folder: os.mkfifo(folder / "rollouts/index.rank1.jsonl"),
    "rollouts a link out": linked_rollouts,
    "rollouts a file": lambda folder: (shutil.rmtree(folder / "rollouts"), (folder / "rollouts").touch()),
    "a run with a rule of text": line("run", rule="mt_grpo"),
    "a run with options in a list": line("run", options=[1]),
    "a run with a tool that is a number": line("run", tools=[7]),
    "a run with rewards of text": line("run", rewards="exact_match"),
    "sampled a text": line("rollout", sampled="x"),
    "branch of a number": line("rollout", branch_of=7),
    "step a text": line("rollout", step="1"),
    "step huge": line("rollout", step=2**40),
    "step of 30 digits": line("rollout", step=10**30),
    "step negative": line("rollout", step=-1),
    "step true": line("rollout", step=True),
    "mode of nobody": line("rollout", mode="trian"),
    "tokens a number": line("rollout", tokens=3),
    "tokens of texts": line("rollout", tokens=["3"]),
    "rewards a list": line("rollout", rewards=[1.0]),
    "prompt a number": line("rollout", prompt=7),
    "session a list": line("rollout", session=["s"]),
    "start out of time": line("rollout", start=1e300),
    "no `stop`": line("rollout", stop=...),
    "row out of the file": line("rollout", row=10**6),
    "row negative": line("rollout", row=-1),
    "row of another": line("rollout", row=1),
    "file above": line("rollout", file="../../outside"),
    "file absolute": line("rollout", file="/etc/passwd"),
    "file with NUL": line("rollout", file="a\0b"),
    "file of 5,000 letters": line("rollout", file="a" * 5000),
    "file a folder": line("rollout", file="."),
    "file of credit": line("rollout", file=f"credit-{FILE}"),
    "file null": line("rollout", file=None),
    "advantages too few": line("credit", advantages=[]),
    "advantages a text": line("credit", advantages="1"),
    "parts too few": column("parts", [{"name": "outcome", "values": [], "scales": None}], credit),
    "parts of fewer scales": column("parts", [{"name": "outcome", "values": [1.0] * 9, "scales": [1.0]}], credit),
    "parts with gaps": column("parts", [{"name": "outcome", "values": [None] * 9, "scales": None}], credit),
    "parts that are none": column("parts", [None], credit),
    "parts of text": column("parts", "outcome", credit),
    "steps without times": line("step", sampling=...),
    "parquet empty": put(PARQUET, b""),
    "parquet cut": cut(PARQUET, 0.7),
    "parquet of zeros": put(PARQUET, bytes(5000)),
    "parquet of text": put(PARQUET, SECRET.encode()),
    "parquet without its end": put(PARQUET, b"PAR1" + bytes(100) + b"\xff\xff\xff\x7fPAR1"),
    "parquet a pipe": instead(PARQUET, os.mkfifo),
    "parquet a folder": instead(PARQUET, Path.mkdir),
    "parquet a link out": instead(PARQUET, outside),
    "parquet a link to nothing": instead(PARQUET, lambda path: path.symlink_to("gone")),
    "parquet gone": instead(PARQUET, void),
    "parquet of another program": table(lambda found: pa.table({"a": [1, 2, 3, 4]})),
    "parquet without a column": table(lambda found: found.drop_columns(["record"])),
    "parquet with a column twice": table(lambda found: found.append_column("record", found["record"])),
    "parquet without rows": table(lambda found: found.slice(0, 0)),
    "parquet with one row": table(lambda found: found.slice(0, 1)),
    "parquet in other row groups": table(lambda found: found, row_group_size=1),
    "a text where ids are": column("tip", "x"),
    "numbers where a record is": column("record", 5),
    "no records": column("record", None),
    "gaps in the tokens": column("tokens", [1, None]),
    "a tree without tokens": column("tokens", []),
    "a tree of negative sizes": column("node_size", [-1]),
    "a tree in a circle": column("node_parent", [1, 0]),
    "records of text": column("record", "no JSON"),
    "records of bytes that are no text": table(
        lambda found: found.set_column(
            found.schema.get_field_index("record"),
            "record",
            pa.array([b"\xff\xfe"] * found.num_rows).view(pa.string()),
        )
    ),
    "records as deep as one likes": column("record", "[" * 100_000),
    "records with a number of 5,000 digits": column("record", "9" * 5000),
    "records empty": column("record", "{}"),
    "records with NaN": record(seconds=float("nan")),
    "records with a huge number": record(row={"answer": 10**30}),
    "records with half a character": record(row={"answer": "\ud800"}),
    "records with a deep row": record(row={"answer": json.loads("[" * 300 + "]" * 300)}),
    "records without turns": record(turns=[]),
    "records with turns of texts": record(turns=["x"]),
    "records with a bare turn": record(turns=[ONE_TURN]),
    "records with prompts of texts": record(prompt="What?"),
    "records with prompts of numbers": record(prompt=[{"role": "user", "content": 7}]),
    "records with a row of text": record(row="x"),
    "records with a start of text": record(start="x"),
    "metrics of text": put("metrics.jsonl", b"hello\n"),
    "metrics a list": put("metrics.jsonl", b"[1]\n"),
    "metrics without a step": put("metrics.jsonl", b"{}\n"),
    "metrics with a step of text": put("metrics.jsonl", b'{"step":"1"}\n'),
    "metrics with other numbers": put("metrics.jsonl", b'{"step":1,"train_runtime":"x","grad_norm":"y"}\n'),
    "metrics a pipe": instead("metrics.jsonl", os.mkfifo),
    "metrics a link out": instead("metrics.jsonl", outside),
    "tokenizer empty": put(TOKENIZER, b""),
    "tokenizer of text": put(TOKENIZER, b"\xff\xfe" * 100),
    "tokenizer another's": put(TOKENIZER, b'{"version":"1.0"}'),
    "tokenizer a pipe": instead(TOKENIZER, os.mkfifo),
    "tokenizer a link out": instead(TOKENIZER, outside),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_sentence_or_does_no_harm(folder, tmp_path, damage):
    DAMAGES[damage](folder)
    before = time.monotonic()
    everything(folder, tmp_path)
    assert time.monotonic() - before < 120


def test_a_sound_run_is_refused_nowhere(folder, tmp_path):
    assert not [value for value in everything(folder, tmp_path) if value is None]


def test_other_bytes_are_never_shown_as_what_was_written(sound, tmp_path):
    right = everything(sound)
    names = [path.relative_to(sound) for path in sorted(sound.rglob("*")) if path.is_file()]
    draw = random.Random(0)
    for _ in range(60):
        name = draw.choice([name for name in names if name.name != "metrics.jsonl"])
        folder = Path(shutil.copytree(sound, tmp_path / "run"))
        content = bytearray((folder / name).read_bytes())
        place = draw.choice([draw.randrange(len(content)), len(content) - 1 - draw.randrange(min(len(content), 64))])
        content[place] ^= draw.randrange(1, 256)
        (folder / name).write_bytes(content)
        found = everything(folder)
        assert None in found, (name, place)
        assert all(value is None or value == expected for value, expected in zip(found, right, strict=False)), name
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["", "credit-"])
def test_pages_have_checksums_of_their_own(folder, name):
    """So that other programs find damage, and runs whose index has no line of the file."""
    path = folder / "rollouts" / f"{name}{FILE}"
    without_checksums(folder)
    content = bytearray(path.read_bytes())
    about = pq.read_metadata(path).row_group(0).column(0 if name else ROLLOUTS.names.index("record"))
    content[(about.dictionary_page_offset or about.data_page_offset) + about.total_compressed_size - 3] ^= 1
    path.write_bytes(content)
    run = open_run(folder)
    with pytest.raises(UserError, match="is damaged .*CRC"):
        [run.trajectory(row["session"]) for row in run.rows]


def test_a_run_without_checksums_is_read(folder, tmp_path):
    without_checksums(folder)
    assert None not in everything(folder, tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("place", [INDEX, PARQUET, TOKENIZER, "metrics.jsonl", "rollouts"])
def test_what_may_not_be_read_is_one_sentence(folder, tmp_path, place):
    (folder / place).chmod(0)
    assert None in everything(folder, tmp_path)
    (folder / place).chmod(0o700)


def test_what_fills_the_memory_is_refused(folder, monkeypatch):
    table(lambda found: pa.concat_tables([found] * 10), row_group_size=100)(folder)
    run = open_run(folder)
    sessions = [row["session"] for row in run.rows]
    with pytest.raises(UserError, match="larger than any that a run writes"):
        [run.trajectory(session) for session in sessions]
    for limit in ("_MOST_BYTES", "_MOST_VALUES"):
        monkeypatch.undo()
        monkeypatch.setattr(f"mt_grpo.runlog.reader.{limit}", 10)
        with pytest.raises(UserError, match="larger than any that a run writes"):
            run.trajectory(sessions[0])


def test_a_huge_index_is_refused_unread(folder):
    os.truncate(index(folder), 2**40)  # has holes, and takes no room
    with pytest.raises(UserError, match="more than a run writes"):
        open_run(folder)


def test_the_command_that_exports_never_hangs(folder):
    instead(PARQUET, os.mkfifo)(folder)
    for arguments in (["export", "--to", "jsonl", str(folder)], ["view", str(folder), "--export", f"{folder}.html"]):
        ended = subprocess.run(
            [sys.executable, "-m", "mt_grpo", *arguments], capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 1 and ended.stderr.count("\n") == 1 and "is a named pipe" in ended.stderr


@pytest.mark.parametrize("name", ["trajectories.jsonl", "dataset", "openinference.jsonl", "page.html"])
def test_an_export_overwrites_nothing_through_a_link(folder, tmp_path, capsys, name):
    (folder / name).symlink_to(tmp_path / "outside")
    form = {"trajectories.jsonl": "jsonl", "dataset": "dataset", "openinference.jsonl": "openinference"}.get(name)
    arguments = (
        ["export", str(folder), "--to", form] if form else ["view", str(folder), "--export", str(folder / name)]
    )
    assert main(arguments) == 1
    assert "is a link, and what it leads to is not overwritten" in capsys.readouterr().err
    assert (tmp_path / "outside").read_text() == SECRET


def test_an_export_writes_at_no_name_that_can_be_guessed(folder, tmp_path):
    for name in ("trajectories.jsonl.partial", ".trajectories.jsonl.partial", "trajectories.jsonl.tmp"):
        (folder / name).symlink_to(tmp_path / "outside")
    assert main(["export", str(folder), "--to", "jsonl"]) == 0
    assert (tmp_path / "outside").read_text() == SECRET and not (folder / "trajectories.jsonl").is_symlink()
