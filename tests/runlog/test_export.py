"""What is exported is read back by the programs that it is for."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from base64 import b64encode
from importlib.util import find_spec
from pathlib import Path

import pytest
from datasets import load_dataset
from support.runs import HOSTILE, REWARDS, write_conversations, write_run

from mt_grpo.cli import main
from mt_grpo.runlog import Batch, RunWriter, open_run
from mt_grpo.runlog.export import FORMS
from mt_grpo.trajectory import StopReason, Trajectory, Turn

RECORDS = (Path(__file__).parents[2] / "docs" / "records.md").read_text()
TRACKIO = """
import sys
from trackio.sqlite_storage import SQLiteStorage
for name in SQLiteStorage.get_runs("mt-grpo"):
    for entry in SQLiteStorage.get_logs("mt-grpo", name):
        for key in entry:
            if key.endswith("/conversations"):
                print(name, key, entry["step"], len(entry[key]["_value"]), sorted(entry[key]["_value"][0]))
        if "train/loss" in entry:
            print(name, "loss", entry["step"], entry["train/loss"])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def export(tmp_path):
    """The text of a run in a form of a file, or the splits of its data set."""

    def export(folder: Path, form: str, output: str = "exported"):
        assert main(["export", str(folder), "--to", form, f"--output={tmp_path / output}"]) == 0
        if form == "dataset":
            return load_dataset(str(tmp_path / output), cache_dir=str(tmp_path / "cache"))
        return (tmp_path / output).read_text()

    return export


def test_jsonl_holds_whole_trajectories(folder, tmp_path, capsys, export):
    records = [json.loads(line) for line in export(folder, "jsonl", "a/all.jsonl").splitlines()]
    assert capsys.readouterr().out == f"56 conversations in {tmp_path}/a/all.jsonl\n"
    run = open_run(folder)
    for row, record, whole in zip(run.rows, records, run.trajectories(), strict=True):
        assert whole.items() <= record.items() and Trajectory.from_dict(record).to_dict().items() <= record.items()
        for name in ("session", "mode", "step", "k", "member", "reward", "turn_rewards", "advantages"):
            assert record[name] == row[name], name
        assert record["weights"] == {reward["name"]: reward["weight"] for reward in REWARDS}
    assert len({record["session"] for record in records}) == 56
    assert len({record["group"] for record in records}) == 4 * (3 + 1 + 1)


def test_datasets_loads_a_data_set_of_it(folder, export):
    loaded, run = export(folder, "dataset"), open_run(folder)
    assert {name: len(split) for name, split in loaded.items()} == {"train": 48, "eval": 8}
    for row, example in zip((row for row in run.rows if row["mode"] == "train"), loaded["train"], strict=True):
        for name in ("session", "step", "member", "reward", "rewards", "turn_rewards", "advantages"):
            assert example[name] == row[name], name
        whole = run.trajectory(row["session"])
        seen = [*whole["prompt"], *(each for turn in whole["turns"] for each in (turn["message"], *turn["replies"]))]
        said = [message["content"] for message in (*example["prompt"], *example["completion"])]
        assert said == [message["content"] for message in seen]
        assert (example["row"], example["stop_reason"]) == (whole["row"], whole["stop_reason"])
    assert len(set(loaded["train"]["group"])) == 12


def test_what_was_discarded_is_a_split_of_its_own(tmp_path, export):
    folder = write_run(tmp_path / "run", steps=1, groups=1)
    record = next(open_run(folder).trajectories())
    trajectory = Trajectory.from_dict({name: record[name] for name in record if name not in ("step", "mode")})
    writer = RunWriter(folder)
    writer.append(writer.write(Batch("discarded", 0, 1, 4, [2], [trajectory], REWARDS)))
    assert export(folder, "dataset")["discarded"]["session"] == ["discarded-000000-000001-000002"]


def test_otlp_reads_traces_with_the_names_of_openinference(folder, export):
    from google.protobuf import json_format
    from openinference.semconv import trace
    from opentelemetry.proto.trace.v1.trace_pb2 import Status, TracesData

    classes = (trace.SpanAttributes, trace.MessageAttributes, trace.ToolCallAttributes)
    names = {value for each in classes for key, value in vars(each).items() if key.isupper()}
    said = f"{trace.SpanAttributes.LLM_OUTPUT_MESSAGES}.0.{trace.MessageAttributes.MESSAGE_CONTENT}"
    run, traces = open_run(folder), set()
    for row, line in zip(run.rows, export(folder, "openinference").splitlines(), strict=True):
        data = json.loads(line)
        (spans,) = (scope["spans"] for scope in data["resourceSpans"][0]["scopeSpans"])
        for span in spans:  # OTLP's JSON has ids in hexadecimal, protobuf's in base 64
            for key in {"traceId", "spanId", "parentSpanId"} & span.keys():
                span[key] = b64encode(bytes.fromhex(span[key])).decode()
        agent, *rest = json_format.ParseDict(data, TracesData()).resource_spans[0].scope_spans[0].spans
        whole = run.trajectory(row["session"])
        traces.add(agent.trace_id)
        kinds = []
        for span in (agent, *rest):
            values = {each.key: each.value for each in span.attributes}
            assert "None" not in [each.string_value for each in values.values()]
            for key in values:
                parts = [part for part in key.split(".") if not part.isdigit()]
                assert key in names or ".".join(parts[:2]) in names and ".".join(parts[2:4]) in names, key
            kind = values[trace.SpanAttributes.OPENINFERENCE_SPAN_KIND].string_value
            kinds.append(trace.OpenInferenceSpanKindValues(kind).name)
            assert span is agent or (span.parent_span_id, span.trace_id) == (agent.span_id, agent.trace_id)
            assert (len(span.span_id), len(span.trace_id)) == (8, 16)
            assert agent.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
            if kind == "LLM":
                turn = whole["turns"][kinds.count("LLM") - 1]
                assert values[trace.SpanAttributes.LLM_TOKEN_COUNT_COMPLETION].int_value == turn["num_tokens"]
                assert values[said].string_value == turn["message"]["content"]
            if kind == "TOOL":
                output = values["output.value"].string_value
                assert (span.status.code == Status.STATUS_CODE_ERROR) == ("Error" in output) and HOSTILE in output
        calls = [["TOOL"] * len(turn["tool_calls"]) for turn in whole["turns"]]
        assert kinds == ["AGENT", *(kind for tools in calls for kind in ("LLM", *tools))]
        values = {each.key: each.value.string_value for each in agent.attributes}
        assert json.loads(values["metadata"])["advantages"] == row["advantages"]
        assert (values["session.id"], values["output.value"]) == (row["session"], whole["answer"])
    assert len(traces) == 56


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed; see tests/app/test_trackers.py")
def test_trackio_has_metrics_and_conversations(folder, tmp_path):
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "mt_grpo", "export", folder, "--to", "trackio", "--output", tmp_path / "trackio"]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    read = subprocess.run([sys.executable, "-c", TRACKIO], env=environment, capture_output=True, text=True, check=True)
    lines = read.stdout.splitlines()
    tables = [line for line in lines if "conversations" in line]
    assert sorted(line.split()[1:4] for line in tables) == [
        *(["eval/conversations", step, "4"] for step in "03"),
        *(["train/conversations", step, "16"] for step in "123"),
    ]
    assert [line.split()[2] for line in lines if " loss " in line] == ["1", "2", "3"]
    assert all(name in tables[0] for name in ("conversation", "exact_match", "advantages", "stop_reason"))


def test_words_that_no_file_can_hold_do_not_end_an_export(tmp_path, export):
    words = {"content": "half \ud800"}
    said = [Turn(0, {"role": "assistant", **words})]
    made = Trajectory([{"role": "user", **words}], said, stop_reason=StopReason.ENV_ERROR, error="\udc00")
    folder = write_conversations(tmp_path / "run", [made])
    assert json.loads(export(folder, "jsonl", "a.jsonl"))["error"] == "\udc00"
    assert "half" in export(folder, "openinference", "b.jsonl")
    (example,) = export(folder, "dataset", "c")["train"]
    assert (example["prompt"][0]["content"], example["error"]) == ("half ?", "?")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("RUN --to jsnl", "The form 'jsnl' is unknown: give one of messages, sharegpt, tokens, preferences, dataset,"),
        ("RUN --too jsonl", "`mt-grpo export` has no option --too; the nearest is '--to'."),
        ("RUN --to", "`mt-grpo export` needs a value after `--to`."),
        ("RUN", "Write `mt-grpo export RUN --to FORM`, where FORM is one of messages, sharegpt, tokens, preferences,"),
        ("RUN RUN --to jsonl", "Write `mt-grpo export RUN --to FORM`"),
        ("RUN --to jsonl --output RUN", "is there already: give another place, or `--overwrite` to replace it."),
        ("RUN --to jsonl --output . --overwrite", ". is a folder: name a file or another folder in it."),
        ("RUN --to dataset --output RUN --overwrite", "has other files than an export writes: remove it, or give"),
        ("RUN --to jsonl --filter rewrd<1", "There is no column 'rewrd'; the nearest is 'reward'."),
        ("RUN --to jsonl --filter reward>99", "No conversation fulfils the filter 'reward>99', so that there is"),
        ("nowhere --to jsonl", "There is no folder nowhere: name the `output_dir` of a run."),
        (". --to jsonl", ". is not the folder of a run: name its `output_dir`, which has `metrics.jsonl`."),
        ("RUN --to jsonl --output /dev/null/a", "/dev/null/a cannot be written: "),
        pytest.param(
            "RUN --to trackio",
            "`--to trackio` needs the package trackio: `pip install trackio`.",
            marks=pytest.mark.skipif(find_spec("trackio") is not None, reason="it is installed"),
        ),
    ],
)
def test_what_cannot_be_exported_is_refused(folder, tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert main(["export", *arguments.replace("RUN", str(folder)).split()]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mt-grpo: ") and words in line


def test_commands_work_as_help_and_page_document_them(tmp_path, monkeypatch, capsys):
    assert main(["export", "--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n  {form}" in printed for form in FORMS)
    write_run(tmp_path / "runs" / "NAME", steps=1)
    monkeypatch.chdir(tmp_path)
    commands = [line.strip() for line in RECORDS.splitlines() if line.startswith("    mt-grpo export ")]
    assert [command.split()[4] for command in commands] == [*FORMS, "messages"]
    for command in (*commands[:5], commands[-1]):  # trackio's has a test of its own
        assert main(shlex.split(command)[1:]) == 0
        assert Path(capsys.readouterr().out.split(" in ")[1].strip()).exists()


def test_the_documented_reader_and_fields_are_those_of_a_run(folder):
    rows, namespace = open_run(folder).rows, {}
    exec(RECORDS.split("```python\n")[1].split("```")[0], namespace)
    pairs = [(engine, trainer) for _, engine, trainer in namespace["worst"](folder) if trainer is not None]
    largest = max(row["mismatch"] or 0.0 for row in rows)
    assert max(abs(engine - trainer) for engine, trainer in pairs) == pytest.approx(largest, rel=1e-3)
    assert not [name for name in rows[0].keys() - {"credit_file", "credit_row"} if f"`{name}`" not in RECORDS]
