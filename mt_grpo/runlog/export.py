"""
A run's conversations in the forms that other programs train on and look at: as messages, as the token ids that were
sampled, as pairs of which one is preferred, and as traces of OpenTelemetry, in OTLP's JSON encoding with attributes of
OpenInference (https://github.com/Arize-ai/openinference/blob/main/spec).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mt_grpo.errors import UserError
from mt_grpo.imports import did_you_mean
from mt_grpo.runlog.conversation import Said, messages_of, spans_of, words
from mt_grpo.runlog.files import read_notes, to_json, whole, written_for_users
from mt_grpo.runlog.findings import EQUAL, FAILED, plural
from mt_grpo.runlog.index import is_copy
from mt_grpo.runlog.reader import Run
from mt_grpo.runlog.schema import MODES, ROW_GROUP, Row
from mt_grpo.token_tree import TokenTree

_ROWS = 256  # conversations that are held in memory while a data set is written

_LISTS = ("prompt", "completion", "tools")
"""Columns of a data set that are lists of objects, each with fields of its own."""


def export(
    run: Run, form: str, output: str | Path | None = None, rows: Sequence[Row] | None = None, overwrite: bool = False
) -> str:
    """Writes a run's conversations in another form. See `FORMS`."""
    if form not in FORMS:
        raise UserError(f"The form {form!r} is unknown: give one of {', '.join(FORMS)}{did_you_mean(form, FORMS)}.")
    rows, name = run.rows if rows is None else rows, FORMS[form]
    if name is None:
        return _log_to_trackio(run, output, rows)
    path = run.folder / name if output is None else Path(output)
    with written_for_users(path, overwrite) as partial:
        number = _write_dataset(run, rows, partial) if form == "dataset" else _write_lines(run, form, rows, partial)
        if path.is_dir():
            _remove_data_set(path)
    return f"{number} in {path}"


def lines(run: Run, form: str, rows: Sequence[Row]) -> Iterator[str]:
    """The lines of a form that is a file of lines, of some rows of the index."""
    for line in LINES[form](run, rows):
        yield to_json(line) + "\n"


def _write_lines(run: Run, form: str, rows: Sequence[Row], path: Path) -> str:
    number, sessions = 0, set[str]()
    # half a character, which an environment may write, as the escape that JSON has for it
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for line in LINES[form](run, rows):
            file.write(to_json(line) + "\n")
            number += 1
            sessions.add(line.get("session", ""))
    written = plural(number, {"tokens": "sequence", "preferences": "pair"}.get(form, "conversation"))
    return written + (left_out(rows, sessions) if form == "tokens" else "")


def left_out(rows: Sequence[Row], sessions: Container[str]) -> str:
    """Says how many conversations are in no line of `tokens`, by the sessions of the lines."""
    number = sum(row["session"] not in sessions for row in rows)
    left = plural(number, "conversation")
    return f" ({left} left out: {_NO_IDS}, or nothing was sampled)" if number else ""


_NO_IDS = "an image or a sound has no token ids of its own"


def _remove_data_set(folder: Path) -> None:
    """Removes a folder that an export wrote, and nothing else."""
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    if not found <= {"data", *(f"data/{mode}-00000-of-00001.parquet" for mode in MODES)}:
        raise UserError(f"{folder} has other files than an export writes: remove it, or give another place.")
    shutil.rmtree(folder)


# Each conversation with what it earned


def _whole(run: Run, rows: Sequence[Row]) -> Iterator[Row]:
    by_session = {row["session"]: row for row in rows}
    weights, notes = _weights(run), read_notes(run.folder)
    for record in run.trajectories(rows):
        row = by_session[record["session"]]
        known = {name: row[name] for name in ("k", "member", "reward", "turn_rewards", "advantages", "shared_turns")}
        known["copy"] = is_copy(row)
        yield {**record, "group": _group(row), **known, "weights": weights, **notes.get(row["session"], {})}


def _group(row: Row) -> str:
    """A name that no other group of the run has."""
    return f"{row['mode']}-{row['step']}-{row['k']}-{row['group']}"


def _weights(run: Run) -> dict[str, float]:
    return {reward["name"]: reward["weight"] for reward in run.about.get("rewards", [])}


def _earned(run: Run, row: Row, turns: list[int], way: int, of: int) -> Row:
    """What a way through a conversation is, and what was earned in it."""
    return {
        "session": row["session"],
        "sequence": way,
        "sequences": of,
        **{name: row[name] for name in ("mode", "step", "member")},
        "group": _group(row),
        "stop_reason": row["stop"],
        "reward": row["reward"],
        "rewards": row["rewards"],
        "weights": _weights(run),
        **{
            name: row[name] and [row[name][turn] for turn in turns if turn < len(row[name])]
            for name in ("turn_rewards", "advantages")
        },
        **{name: row[name] for name in ("branch_of", "shared_turns")},
        "copy": is_copy(row),
    }


def _messages(run: Run, rows: Sequence[Row]) -> Iterator[Row]:
    kwargs, notes = run.about.get("chat_template_kwargs"), read_notes(run.folder)
    for row, _, said in run.ways(rows):
        for number, way in enumerate(said):
            line: Row = {"messages": way.messages}
            if way.tools:
                line["tools"] = way.tools
            if kwargs:
                line["chat_template_kwargs"] = kwargs
            yield {**line, **_earned(run, row, way.turns, number, len(said)), **notes.get(row["session"], {})}


def _tokens(run: Run, rows: Sequence[Row]) -> Iterator[Row]:
    all_show = bool(rows)
    for row, record, tree in run.trees(rows):
        found = [] if (media := _has_media(tree)) else _sequences(tree, record)
        all_show = all_show and media
        for number, each in enumerate(found):
            turns = list(dict.fromkeys(turn for turn in each.turns if turn >= 0))
            earned = _earned(run, row, turns, number, len(found))
            yield {"input_ids": each.ids, "assistant_masks": each.trained, **earned}
    if all_show:
        raise UserError(f"There are no tokens, since each conversation has media, and {_NO_IDS}: export `messages`.")


_SHAREGPT = {"system": "system", "user": "human", "assistant": "gpt", "tool": "observation"}


def _sharegpt(run: Run, rows: Sequence[Row]) -> Iterator[Row]:
    for row, _, said in run.ways(rows):
        for number, way in enumerate(said):
            entries: list[dict[str, str]] = []
            for message in way.messages:
                _add_entries(entries, message)
            line: Row = {"conversations": entries}
            if entries and entries[0]["from"] == "system":
                line = {"system": entries[0]["value"], "conversations": entries[1:]}
            if way.tools:
                line["tools"] = to_json([tool.get("function", tool) for tool in way.tools])
            yield {**line, **_earned(run, row, way.turns, number, len(said))}


def _add_entries(entries: list[dict[str, str]], message: Row) -> None:
    text = words(message)
    thoughts = (message.get(name) for name in ("reasoning_content", "thinking", "reasoning"))
    thought = next(filter(None, thoughts), None)
    thinking = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    who: str = _SHAREGPT.get(message["role"]) or message["role"]
    calls = [call.get("function", call) for call in message.get("tool_calls", ())]
    if who == "observation" and entries and entries[-1]["from"] == who:  # one entry for the results of a turn
        entries[-1]["value"] += f"\n{text}"
    elif text or not calls:
        entries.append({"from": who, "value": thinking + text})
        thinking = ""
    if calls:
        written = [{name: call.get(name) for name in ("name", "arguments")} for call in calls]
        value = to_json(written[0] if len(written) == 1 else written)
        entries.append({"from": "function_call", "value": thinking + value})


def _write_dataset(run: Run, rows: Sequence[Row], folder: Path) -> str:
    """A folder that `datasets.load_dataset` reads, with a split for each mode."""
    names = list(dict.fromkeys(name for row in rows for name in row["rewards"]))
    by_name = pa.struct([pa.field(name, pa.float64()) for name in names])
    schema = pa.schema(
        {
            "session": pa.string(),
            **dict.fromkeys(("sequence", "sequences", "step"), pa.int32()),
            "group": pa.string(),
            "member": pa.int32(),
            **dict.fromkeys(_LISTS, pa.list_(pa.string())),
            **dict.fromkeys(("answer", "stop_reason", "error"), pa.string()),
            "reward": pa.float64(),
            **dict.fromkeys(("rewards", "weights") if names else (), by_name),
            **dict.fromkeys(("turn_rewards", "advantages"), pa.list_(pa.float64())),
            "branch_of": pa.string(),
            "shared_turns": pa.int32(),
            "copy": pa.bool_(),
            "row": pa.string(),
        }
    )
    objects = {"feature": {"_type": "Json"}, "_type": "List"}
    features = dict.fromkeys(_LISTS, objects) | {"row": {"_type": "Json"}}
    about = {"huggingface": to_json({"info": {"features": features}})}
    json = dict.fromkeys(_LISTS, pa.list_(pa.json_())) | {"row": pa.json_()}  # which Arrow cannot make of lists itself
    stored = pa.schema([field.with_type(json.get(field.name, field.type)) for field in schema], about)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    writers: dict[str, pq.ParquetWriter] = {}
    waiting: dict[str, list[Row]] = {mode: [] for mode in MODES}
    number = 0

    def flush(split: str) -> None:
        if waiting[split]:
            if split not in writers:
                path = folder / "data" / f"{split}-00000-of-00001.parquet"
                writers[split] = pq.ParquetWriter(path, stored, compression="zstd")
            table = pa.Table.from_pylist(waiting[split], schema).cast(stored)
            writers[split].write_table(table, row_group_size=ROW_GROUP)
            waiting[split] = []

    try:
        for row, record, said in run.ways(rows):
            for place, way in enumerate(said):
                number += 1
                waiting[row["mode"]].append(_example(run, row, record, way, place, len(said)))
                if len(waiting[row["mode"]]) == _ROWS:
                    flush(row["mode"])
        for split in waiting:
            flush(split)
    finally:
        for writer in writers.values():
            writer.close()
    return plural(number, "conversation")


def _example(run: Run, row: Row, record: Row, said: Said, place: int, of: int) -> Row:
    return {
        **_earned(run, row, said.turns, place, of),
        "prompt": _objects(said.messages[: said.prompt]),
        "completion": _objects(said.messages[said.prompt :]),
        "tools": _objects(said.tools) if said.tools else None,
        "answer": None if record.get("answer") is None else whole(str(record["answer"])),
        "error": record["error"] and whole(record["error"]),
        "row": whole(to_json(record["row"])),
    }


def _objects(values: Iterable[object]) -> list[str]:
    return [whole(to_json(value)) for value in values]


def _log_to_trackio(run: Run, output: str | Path | None, rows: Sequence[Row]) -> str:
    """The metrics of each log step, and a table of each batch's conversations, as `report_to: trackio` sends them."""
    if importlib.util.find_spec("trackio") is None:
        raise UserError("`--to trackio` needs the package trackio: `pip install trackio`.")
    if output is not None:
        os.environ["TRACKIO_DIR"] = str(Path(output).absolute())  # trackio reads it when it is imported
    trackio = importlib.import_module("trackio")
    tracker = trackio.init(
        project="mt-grpo",
        name=run.folder.resolve().name,
        config=run.about or None,
        auto_log_cpu=False,
        auto_log_gpu=False,
        embed=False,
    )
    for line in run.metrics():
        trackio.log({_metric(name): value for name, value in line.items() if name != "step"}, step=line["step"])
    for (step, mode), shown in _by_batch(run, rows):
        table = trackio.Table(columns=list(shown[0]), data=[list(row.values()) for row in shown])
        trackio.log({f"{mode}/conversations": table}, step=step)
    trackio.finish()
    return f"{len(rows)} conversations in trackio, project mt-grpo, run {tracker.name}"


def _metric(name: str) -> str:
    """As the trackers of transformers name it."""
    return f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"


def _by_batch(run: Run, rows: Sequence[Row]) -> Iterator[tuple[tuple[int, str], list[Row]]]:
    """Rows of the tables, by the number of steps that were taken and the mode."""
    batches: dict[tuple[int, str], list[Row]] = {}
    for row, record in run.records(rows):
        step = row["step"] + (row["mode"] != "eval")
        shown = {
            "session": row["session"],
            "prompt": row["prompt"],
            "conversation": "\n".join(f"{message['role']}: {words(message)}" for message in messages_of(record)),
            "answer": row["answer"],
            "stop_reason": row["stop"],
            "reward": row["reward"],
            **row["rewards"],
            "advantages": row["advantages"] and ", ".join(f"{value:.3g}" for value in row["advantages"]),
        }
        batches.setdefault((step, row["mode"]), []).append(shown)
    yield from batches.items()


@dataclass(frozen=True)
class _Tokens:
    """A root-to-leaf sequence of a conversation's token tree."""

    ids: list[int]
    own: list[int]
    trained: list[int]
    turns: list[int]

    def after(self, turn: int) -> tuple[list[int], list[int], list[int]]:
        """The tokens before a turn, those from it on to the last of the model's own, and which of them are its own."""
        begin, end = self.turns.index(turn), len(self.own) - [*self.own[::-1], 1].index(1)
        return self.ids[:begin], self.ids[begin:end], self.own[begin:end]


def _has_media(tree: TokenTree) -> bool:
    """Whether a conversation shows images or sounds, whose places in its tokens have negative numbers."""
    return any(min(node.tokens, default=0) < 0 for node in tree.nodes)


def _sequences(tree: TokenTree, record: Row) -> list[_Tokens]:
    """The sequences of a conversation in which the model sampled something."""
    masks = {turn["index"]: turn["mask"] for turn in record["turns"] if turn.get("mask") is not None}
    found = []
    for sequence in tree.sequences():
        places = {turn: count() for turn in masks}
        left = [masks[turn][next(places[turn])] if turn in masks else int(turn >= 0) for turn in sequence.turns]
        trained = [a * b for a, b in zip(left, sequence.mask, strict=True)]
        if any(sequence.mask):
            found.append(_Tokens(sequence.tokens, left, trained, sequence.turns))
    return found


def _pairs(run: Run, rows: Sequence[Row]) -> Iterator[Row]:
    """
    Pairs of a group's conversations: the best with the worst, the second best with the second worst, and so on, while
    their rewards differ, if both have the same tokens up to the first turn in which they differ.
    """
    if run.tokenizer is None:
        raise UserError(f"{run.folder} has no tokenizer, so that pairs have no text: export `tokens`.")
    begins = run.tokenizer.encode("").ids  # what TRL puts before every text
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        if row["reward"] is not None and row["stop"] not in FAILED and not is_copy(row):
            groups.setdefault(tuple(row[name] for name in ("mode", "step", "k", "group")), []).append(row)
    none = True
    for members in groups.values():
        if max(each["reward"] for each in members) - min(each["reward"] for each in members) <= EQUAL:
            continue
        found = {
            row["session"]: _sequences(tree, record)
            for row, record, tree in run.trees(members)
            if not _has_media(tree)
        }
        ranked = sorted(
            (row for row in members if row["session"] in found), key=lambda row: row["reward"], reverse=True
        )
        for chosen, rejected in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False):
            at = _difference(found[chosen["session"]], found[rejected["session"]])
            if chosen["reward"] - rejected["reward"] <= EQUAL or at is None:
                continue
            none = False
            yield _pair(run, chosen, rejected, *at, begins)
    if none:
        raise UserError(
            "There is no pair: it takes two conversations of a group that earned different rewards, and that sampled "
            "different tokens after the same context, without images or sounds."
        )


def _difference(one: list[_Tokens], other: list[_Tokens]) -> tuple[int, _Tokens, _Tokens] | None:
    """The first turn in which two conversations differ, and the sequence of each that has it."""
    for turn in count():
        ways = [[each for each in ways if turn in each.turns] for ways in (one, other)]
        if not all(ways):
            return None
        a, b = (max(found, key=lambda each: each.turns.count(turn)) for found in ways)
        if a.after(turn)[0] != b.after(turn)[0]:
            return None
        if _of_turn(a, turn) != _of_turn(b, turn):
            return (turn, a, b) if any(a.after(turn)[2]) and any(b.after(turn)[2]) else None
    raise AssertionError


def _of_turn(tokens: _Tokens, turn: int) -> list[int]:
    return [token for token, of in zip(tokens.ids, tokens.turns, strict=True) if of == turn]


def _pair(run: Run, chosen: Row, rejected: Row, turn: int, a: _Tokens, b: _Tokens, begins: list[int]) -> Row:
    def text(ids: list[int]) -> str:
        return run.tokenizer.decode(ids, skip_special_tokens=False)  # type: ignore[union-attr]

    prompt, ids, own = a.after(turn)
    _, other_ids, other_own = b.after(turn)
    skipped = len(begins) if prompt[: len(begins)] == begins else 0
    return {
        "prompt": text(prompt[skipped:]),
        "chosen": text(ids),
        "rejected": text(other_ids),
        "prompt_tokens": prompt,
        "chosen_tokens": ids,
        "chosen_mask": own,
        "rejected_tokens": other_ids,
        "rejected_mask": other_own,
        "score_chosen": chosen["reward"],
        "score_rejected": rejected["reward"],
        "chosen_session": chosen["session"],
        "rejected_session": rejected["session"],
        "turn": turn,
        **{name: chosen[name] for name in ("mode", "step")},
        "group": _group(chosen),
    }


_INTERNAL, _OK, _ERROR = 1, 1, 2  # OTLP's kind of a span, and codes of its status


def _trace(row: Row, record: Row, run: Run) -> Row:
    """The spans of a conversation as OTLP's JSON has them."""
    trace, ids, made = f"{run.folder.resolve().name}/{row['session']}", [], []
    for number, span in enumerate(spans_of(row, record, run.about.get("model"))):
        ids.append(_hash(f"{trace}/{number}", 8))
        made.append(
            {
                "traceId": _hash(trace, 16),
                "spanId": ids[-1],
                "name": span.name,
                "kind": _INTERNAL,
                "startTimeUnixNano": str(span.start),
                "endTimeUnixNano": str(span.end),
                "attributes": _attributes(span.attributes),
                "status": {"code": _OK} if span.error is None else {"code": _ERROR, "message": whole(span.error)},
                **({"parentSpanId": ids[0]} if number else {}),
            }
        )
    resource = {"attributes": _attributes({"service.name": "mt-grpo", "openinference.project.name": "mt-grpo"})}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {"name": "mt_grpo"}, "spans": made}]}]}


def _hash(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


def _attributes(values: Row) -> list[Row]:
    kinds = {key: "intValue" if isinstance(value, int) else "stringValue" for key, value in values.items()}
    return [{"key": key, "value": {kinds[key]: whole(str(value))}} for key, value in values.items()]


LINES: dict[str, Callable[[Run, Sequence[Row]], Iterator[Row]]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "tokens": _tokens,
    "preferences": _pairs,
    "jsonl": _whole,
    "openinference": lambda run, rows: (_trace(row, record, run) for row, record in run.records(rows)),
}
"""The forms that are a file of lines: what each line holds."""

FORMS: dict[str, str | None] = {
    "messages": "messages.jsonl",
    "sharegpt": "sharegpt.jsonl",
    "tokens": "tokens.jsonl",
    "preferences": "preferences.jsonl",
    "dataset": "dataset",
    "jsonl": "trajectories.jsonl",
    "openinference": "openinference.jsonl",
    "trackio": None,
}
"""
Each form and its name in the run's folder:

- `messages`: a line per conversation with `messages` and `tools`, as TRL's trainers take them.
- `sharegpt`: a line per conversation with `conversations`, as LLaMA-Factory takes them.
- `tokens`: a line per sequence of the token tree with `input_ids` and `assistant_masks`, for TRL's `SFTTrainer`.
- `preferences`: a line per pair of a group's conversations, for TRL's `DPOTrainer`.
- `dataset`: a folder for `datasets.load_dataset`, with `prompt`, `completion` and `tools`.
- `jsonl`: a line per conversation, `Trajectory.to_dict()` with what it earned.
- `openinference`: a trace per conversation in OTLP's JSON, with attributes of OpenInference's conventions.
- `trackio`: metrics and tables of conversations.
"""
