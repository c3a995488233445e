"""
A run's conversations in the forms that other programs read. A trace is one of OpenTelemetry in OTLP's JSON encoding,
with the attributes of OpenInference (https://github.com/Arize-ai/openinference/blob/main/spec).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mt_grpo.errors import UserError
from mt_grpo.imports import did_you_mean
from mt_grpo.runlog.conversation import messages_of, words
from mt_grpo.runlog.files import check_target, to_json, whole, written_whole
from mt_grpo.runlog.reader import Run, open_run
from mt_grpo.runlog.schema import MODES, ROW_GROUP

ROWS = 256
"""Conversations that are held in memory while a data set is written."""

_MESSAGES = pa.list_(
    pa.struct(
        [
            pa.field("role", pa.string()),
            pa.field("content", pa.string()),
            pa.field("tool_calls", pa.string()),
            pa.field("tool_call_id", pa.string()),
        ]
    )
)


def export(folder: str | Path, form: str, output: str | Path | None = None) -> str:
    """
    Writes a run's conversations in another form. See `FORMS`.

    Args:
        folder (`str` or `Path`): The run's `output_dir`.
        form (`str`): One of `FORMS`.
        output (`str` or `Path`, *optional*): Where to; a place in the run's folder where none is given, and trackio's
            own folder for `trackio`.

    Returns:
        `str`: What was written and where, in words.

    Raises:
        UserError: If the form is unknown, the folder has no conversations, or the output is there already.
    """
    if form not in FORMS:
        raise UserError(f"The form {form!r} is unknown: give one of {', '.join(FORMS)}{did_you_mean(form, FORMS)}.")
    run = open_run(folder)
    write, name = FORMS[form]
    if name is None:
        return write(run, output)
    path = run.folder / name if output is None else Path(output)
    try:
        check_target(path)
        if path.exists():
            raise UserError(f"{path} is there already: remove it, or give another place with `--output`.")
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as partial:
            write(run, partial)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from error
    return f"{len(run.rows)} conversations in {path}"


def _write_jsonl(run: Run, path: Path) -> None:
    _write_lines(path, (to_json(record) for record in run.trajectories()))


def _write_openinference(run: Run, path: Path) -> None:
    _write_lines(path, (json.dumps(trace(row, record, run)) for row, record in run.records()))


def _write_lines(path: Path, lines: Iterator[str]) -> None:
    # half a character, which an environment may write, as the escape that JSON has for it
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(line + "\n" for line in lines)


def _write_dataset(run: Run, folder: Path) -> None:
    """A folder that `datasets.load_dataset` reads, with a split for each mode."""
    names = list(dict.fromkeys(name for row in run.rows for name in row["rewards"]))
    schema = pa.schema(
        [
            pa.field("session", pa.string()),
            pa.field("step", pa.int32()),
            pa.field("group", pa.string()),
            pa.field("member", pa.int32()),
            pa.field("prompt", _MESSAGES),
            pa.field("completion", _MESSAGES),
            pa.field("answer", pa.string()),
            pa.field("stop_reason", pa.string()),
            pa.field("error", pa.string()),
            pa.field("reward", pa.float64()),
            *([pa.field("rewards", pa.struct([(name, pa.float64()) for name in names]))] if names else []),
            pa.field("turn_rewards", pa.list_(pa.float64())),
            pa.field("advantages", pa.list_(pa.float64())),
            pa.field("row", pa.string()),
        ]
    )
    (folder / "data").mkdir(parents=True, exist_ok=True)
    writers: dict[str, pq.ParquetWriter] = {}
    waiting: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}

    def flush(split: str) -> None:
        if waiting[split]:
            if split not in writers:
                path = folder / "data" / f"{split}-00000-of-00001.parquet"
                writers[split] = pq.ParquetWriter(path, schema, compression="zstd")
            writers[split].write_table(pa.Table.from_pylist(waiting[split], schema), row_group_size=ROW_GROUP)
            waiting[split] = []

    try:
        for row, record in run.records():
            waiting[row["mode"]].append(_example(row, record))
            if len(waiting[row["mode"]]) == ROWS:
                flush(row["mode"])
        for split in waiting:
            flush(split)
    finally:
        for writer in writers.values():
            writer.close()


def _example(row: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    return {
        "session": row["session"],
        "step": row["step"],
        "group": f"{row['mode']}-{row['step']}-{row['k']}-{row['group']}",
        "member": row["member"],
        "prompt": list(map(_message, record["prompt"])),
        "completion": list(map(_message, messages_of(record)[len(record["prompt"]) :])),
        "answer": None if record["answer"] is None else whole(str(record["answer"])),
        "stop_reason": row["stop"],
        "error": record["error"] and whole(record["error"]),
        "reward": row["reward"],
        "rewards": row["rewards"],
        "turn_rewards": row["turn_rewards"],
        "advantages": row["advantages"],
        "row": whole(to_json(record["row"])),
    }


def _message(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return {
        "role": message["role"],
        "content": whole(words(message)),
        "tool_calls": whole(to_json(calls)) if calls else None,
        "tool_call_id": message.get("tool_call_id"),
    }


def _log_to_trackio(run: Run, output: str | Path | None) -> str:
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
    for (step, mode), rows in _by_batch(run):
        table = trackio.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        trackio.log({f"{mode}/conversations": table}, step=step)
    trackio.finish()
    return f"{len(run.rows)} conversations in trackio, project mt-grpo, run {tracker.name}"


def _metric(name: str) -> str:
    """As the trackers of transformers name it."""
    return f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"


def _by_batch(run: Run) -> Iterator[tuple[tuple[int, str], list[dict[str, Any]]]]:
    """Rows of the tables, by the number of steps that were taken and the mode."""
    batches: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row, record in run.records():
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


FORMS: dict[str, tuple[Callable[..., Any], str | None]] = {
    "jsonl": (_write_jsonl, "trajectories.jsonl"),
    "dataset": (_write_dataset, "dataset"),
    "trackio": (_log_to_trackio, None),
    "openinference": (_write_openinference, "openinference.jsonl"),
}
"""
Each form: the function that writes it, and its name in the run's folder.

- `jsonl`: a line per conversation, `Trajectory.to_dict()` with `step` and `mode`.
- `dataset`: a folder for `datasets.load_dataset`.
- `trackio`: metrics and tables of conversations.
- `openinference`: a trace per conversation in OTLP's JSON, with attributes of OpenInference's conventions.
"""

INTERNAL, OK, ERROR = 1, 1, 2
"""OTLP's kind of a span, and codes of its status."""


def trace(row: dict[str, Any], record: dict[str, Any], run: Run) -> dict[str, Any]:
    """
    The trace of a conversation: a span of kind `AGENT`, in it one of kind `LLM` per turn and `TOOL` per call.

    Args:
        row (`dict`): Its row of the index.
        record (`dict`): Its `record`.
        run (`Run`): Its run.

    Returns:
        `dict`: OTLP's `TracesData`; a trace's id depends on the run's folder name and the session alone.
    """
    spans = _Spans(f"{run.folder.resolve().name}/{row['session']}", record["start"] or 0.0)
    known = {name: row[name] for name in ("mode", "step", "k", "group", "member", "reward", "rewards", "turn_rewards")}
    agent = spans.add(
        "conversation",
        "AGENT",
        record["start"],
        record["seconds"],
        record["error"],
        {
            "session.id": row["session"],
            "input.value": row["prompt"],
            "output.value": record["answer"],
            "metadata": to_json(
                {**known, "stop_reason": row["stop"], "advantages": row["advantages"], "row": record["row"]}
            ),
        },
    )
    model = run.about.get("model")
    past = [_flat(message) for message in record["prompt"]]
    for turn in record["turns"]:
        message = _flat(turn["message"], turn["tool_calls"])
        end = None if turn["start"] is None else turn["start"] + turn["seconds"]
        spans.add(
            f"turn {turn['index'] + 1}",
            "LLM",
            turn["start"],
            turn["seconds"],
            turn["error"],
            {
                "session.id": row["session"],
                "llm.model_name": model,
                "llm.token_count.prompt": turn["context_length"],
                "llm.token_count.completion": turn["num_tokens"],
                "llm.token_count.total": turn["context_length"] + turn["num_tokens"],
                "metadata": to_json(
                    {"advantage": row["advantages"] and row["advantages"][turn["index"]], "reward": turn["reward"]}
                ),
                **_numbered("llm.input_messages", past),
                **_numbered("llm.output_messages", [message]),
            },
            agent,
        )
        for call in turn["tool_calls"]:
            spans.add(
                call["name"],
                "TOOL",
                call["start"] if call["start"] is not None else end,
                call["seconds"],
                call["error"],
                {
                    "session.id": row["session"],
                    "tool.name": call["name"],
                    "tool.parameters": to_json(call["arguments"]),
                    "input.value": to_json(call["arguments"]),
                    "input.mime_type": "application/json",
                    "output.value": call["result"],
                },
                agent,
            )
        past += [message, *map(_flat, turn["replies"])]
    resource = {"attributes": _attributes({"service.name": "mt-grpo", "openinference.project.name": "mt-grpo"})}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {"name": "mt_grpo"}, "spans": spans}]}]}


class _Spans(list[dict[str, Any]]):
    """The spans of one trace."""

    def __init__(self, name: str, start: float) -> None:
        super().__init__()
        self._name, self._start = name, start

    def add(
        self,
        name: str,
        kind: str,
        start: float | None,
        seconds: float,
        error: str | None,
        attributes: dict[str, Any],
        parent: str | None = None,
    ) -> str:
        """Adds a span. Returns its id."""
        start = self._start if start is None else start
        identity = _hash(f"{self._name}/{len(self)}", 8)
        span = {
            "traceId": _hash(self._name, 16),
            "spanId": identity,
            "name": name,
            "kind": INTERNAL,
            "startTimeUnixNano": str(int(start * 1e9)),
            "endTimeUnixNano": str(int((start + seconds) * 1e9)),
            "attributes": _attributes({"openinference.span.kind": kind, **attributes}),
            "status": {"code": OK} if error is None else {"code": ERROR, "message": whole(error)},
        }
        self.append(span if parent is None else {**span, "parentSpanId": parent})
        return identity


def _hash(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


def _flat(message: dict[str, Any], calls: list[dict[str, Any]] | None = None) -> dict[str, str]:
    flat = {"message.role": message["role"], "message.content": words(message)}
    if message.get("tool_call_id"):
        flat["message.tool_call_id"] = message["tool_call_id"]
    for number, call in enumerate(calls or []):
        prefix = f"message.tool_calls.{number}.tool_call"
        flat[f"{prefix}.function.name"] = call["name"]
        flat[f"{prefix}.function.arguments"] = to_json(call["arguments"])
        if call["id"]:
            flat[f"{prefix}.id"] = call["id"]
    return flat


def _numbered(prefix: str, messages: list[dict[str, str]]) -> dict[str, str]:
    return {
        f"{prefix}.{number}.{key}": value for number, message in enumerate(messages) for key, value in message.items()
    }


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    return {"intValue": str(value)} if isinstance(value, int) else {"stringValue": whole(str(value))}
