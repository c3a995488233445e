"""Every benchmark that has a quick mode runs to its end in it; what they share; the tables of reports."""

import copy
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from support.benchmarks import BENCHMARKS, REPORTS, between
from support.forked import Forked
from support.reward_batches import draw_batch
from support.servers import needs_server
from support.waiting import in_loop, until, until_true
from trl import GRPOTrainer

from mt_grpo.credit import estimate

SOURCES = {path.name: path.read_text() for path in sorted(BENCHMARKS.glob("*.py"))}
MINUTES = {"horizon.py", "designs_train.py"}
"""Whose quick run trains for minutes; `tests/test_horizon.py` and `tests/test_designs.py` test their parts."""
QUICK = [name for name, source in SOURCES.items() if '"--quick"' in source and name not in MINUTES]


def marks(name: str) -> list:
    return [needs_server, pytest.mark.server, pytest.mark.bench] if "\nfrom server import" in SOURCES[name] else []


@pytest.mark.slow
@pytest.mark.parametrize("script", [pytest.param(name, marks=marks(name)) for name in QUICK])
def test_a_quick_run_ends_and_leaves_the_results_alone(script, tmp_path):
    results = BENCHMARKS / "results" / Path(script).with_suffix(".json")
    before = results.read_bytes() if results.exists() else None
    log = tmp_path / "log"
    assert Forked([str(BENCHMARKS / script), "--quick"], log).wait() == 0, log.read_text()
    assert (results.read_bytes() if results.exists() else None) == before


def test_these_have_a_quick_mode():
    served = {name for name in QUICK if marks(name)}
    assert {"history.py", "methods.py", "rollout.py"} <= set(QUICK) - served
    assert served == {"parity.py", "prefix_cache.py", "weight_pause.py", "weight_sync.py"}


# Servers


@pytest.mark.parametrize("cut", [1, 12, -5, -1])
@in_loop
async def test_a_request_that_comes_in_pieces_is_answered(monkeypatch, cut):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import upstream

    request, answered = b"POST /v1 HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", []
    subject = upstream.Upstream(b"said", 0.0, 0.0, random.Random(0))
    subject.connection_made(SimpleNamespace(write=answered.append, is_closing=lambda: False))
    for piece in (request[:cut], request[cut:]):
        subject.data_received(piece)
    await until_true(lambda: answered)
    assert answered[0].endswith(b"said")


SERVING = """
import sys, time
from types import SimpleNamespace
sys.path.insert(0, sys.argv[1])
import server

fake = '''
import http.server, os, sys
if os.fork() == 0:
    import time
    time.sleep(1000)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
'''
port = server.free_port()
server.server_command = lambda recipe: ([sys.executable, "-c", fake, str(port), server.GUARD], {})
with server.serve(SimpleNamespace(training=SimpleNamespace(vllm_server_port=port))):
    print("up", flush=True)
    time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "ends"),
    [
        ([signal.SIGTERM], [128 + signal.SIGTERM]),
        # the second signal may come while the process ends by the first
        ([signal.SIGTERM] * 2, [128 + signal.SIGTERM, -signal.SIGTERM]),
        ([signal.SIGKILL], [-signal.SIGKILL]),
    ],
    ids=["once", "twice", "killed"],
)
def test_a_server_ends_with_its_benchmark(how, ends, tmp_path):
    """`timeout` sends SIGTERM two times. A server is in a group of its own, and has processes."""
    log, script = tmp_path / "log", tmp_path / "serving.py"
    script.write_text(SERVING)
    run = Forked([str(script), str(BENCHMARKS)], log)
    until(lambda: log.read_text() == "up\n", lambda: run.poll() is None, seen=log.read_text)
    started = psutil.Process(run.pid).children(recursive=True)
    assert len(started) == 3  # one watches
    for number in how:
        run.send_signal(number)
    assert run.wait(60) in ends and not psutil.wait_procs(started, 60)[1]


@pytest.mark.parametrize("block", [1, 4])
def test_a_cache_reuses_the_longest_prefix_in_whole_blocks(bench, block):
    draw = random.Random(0)
    seen, prefixes = [], bench.prefix_cache.Prefixes(block)
    for _ in range(200):
        base = draw.choice(seen)[: draw.randrange(40)] if seen else []
        tokens = base + [draw.randrange(3) for _ in range(draw.randrange(1, 20))]
        shared = max((len(os.path.commonprefix([tokens, other])) // block * block for other in seen), default=0)
        assert prefixes.match(tokens) == shared
        prefixes.add(tokens)
        seen.append(tokens)


# Results

RESULTS = {
    "rows": [
        {"workload": "long", "ratio": {"median": 4.0, "minimum": 3.0}, "seconds": {"ours": [1.0]}},
        {"label": "lag", "target": "<= 5", "values": [1.0, 9.0, 2.0]},
        {"turns": 12, "ratio": {"median": 7.0, "minimum": 6.0}},
    ]
}


def changed(ratio: float, lag: float) -> dict:
    rows = copy.deepcopy(RESULTS["rows"])
    rows[0]["ratio"]["median"], rows[1]["values"] = ratio, [lag]
    return {"rows": rows}


@pytest.mark.parametrize(
    ("measured", "verdicts"),
    [
        (RESULTS, ["the same"] * 3),
        (changed(3.3, 2.3), ["the same"] * 3),
        (changed(2.0, 1.0), ["worse", "better", "the same"]),
        (changed(8.0, 4.0), ["better", "worse", "the same"]),
        ({"rows": RESULTS["rows"][1:]}, ["gone", "the same", "the same"]),
    ],
)
def test_ratios_and_targets_are_held_against_the_committed_ones(bench, measured, verdicts):
    assert [row.verdict for row in bench.compare.compare(RESULTS, measured, 0.25)] == verdicts


def test_every_committed_result_can_be_compared(bench):
    files = (BENCHMARKS / "results").glob("*.json")
    known = {path.stem: bench.compare.figures(json.loads(path.read_text())) for path in files}
    assert {"packing", "rollout", "viewer", "weight_sync"} <= {name for name, found in known.items() if found}


def test_a_worse_figure_fails_the_comparison(bench, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench.compare, "RESULTS", tmp_path)

    def status(results: dict, *options: str) -> int:
        (tmp_path / "packing.json").write_text(json.dumps(results))
        return bench.compare.main([*options])

    (tmp_path / "packing.json").write_text(json.dumps(RESULTS))
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "Results"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    worse = changed(2.0, 2.0)
    assert [status(RESULTS), status(worse, "packing"), status(worse, "packing", "--tolerance", "0.6")] == [0, 1, 0]
    assert status({"rows": RESULTS["rows"][1:]}, "packing") == 1 and "gone" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="HEAD has no results 'step'"):
        bench.compare.main(["step"])


# Measures without room

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 7.42 GiB. GPU 0 has a total capacity of 79.11 GiB."


@pytest.fixture
def measured(bench, monkeypatch, tmp_path):
    """Runs a benchmark's `main` in this process; returns the rows it recorded."""
    monkeypatch.setattr(bench.common, "RESULTS", tmp_path)

    def run(name: str, recorded: str, *options: str) -> list[dict]:
        monkeypatch.setattr(sys, "argv", [name, *options])
        try:
            getattr(bench, name).main()
        finally:  # also where it ends with a sentence
            rows = json.loads((tmp_path / f"{recorded}.json").read_text())["rows"]
        return rows

    return run


@pytest.mark.slow
def test_a_workload_without_room_ends_for_itself_and_says_so(bench, measured, monkeypatch, capsys):
    loss, rows_of = GRPOTrainer._compute_loss, bench.measure.extension_rows

    def scripted(self, model, inputs):
        if type(self) is GRPOTrainer and inputs["prompt_ids"].size(1) > 20:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return loss(self, model, inputs)

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", scripted)
    sizes = {"small": 16, "large": 32, "small again": 16}
    workloads = {name: lambda size=size: rows_of(size, 2, 1, action=8) for name, size in sizes.items()}
    monkeypatch.setattr(bench.step, "WORKLOADS", workloads)
    rows = measured("step", "step_teacher_cpu", "--repeats", "1", "--teacher")
    sentence = "trl ran out of memory, so that nothing is compared: CUDA out of memory. Tried to allocate 7.42 GiB."
    assert [row["workload"] for row in rows] == list(sizes)
    assert rows[1] == {"workload": "large", "out_of_memory": sentence}
    assert all(row["gradient_difference"] < 1e-5 for row in (rows[0], rows[2]))
    assert f"| large | {sentence} |" in capsys.readouterr().out


def test_a_comparison_of_rows_without_room_says_so(bench, measured, monkeypatch):
    def scripted(model, batch):
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    rows_of = bench.measure.stripped_rows
    monkeypatch.setattr(bench.tree_row, "their_step", scripted)
    monkeypatch.setattr(bench.tree_row, "stripped_rows", lambda prompt, group, turns: rows_of(16, 2, 2))
    with pytest.raises(SystemExit, match="^trl ran out of memory"):
        measured("tree_row", "tree_row")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there may be a kernel for this GPU")
def test_a_kernel_that_cannot_be_had_is_asked_for_in_a_sentence(tmp_path):
    run = Forked([str(BENCHMARKS / "tree_row.py"), "--device", "cuda"], tmp_path / "log")
    status, said = run.wait(), (tmp_path / "log").read_text()
    assert status == 1 and "`pip install kernels`" in said and "`--gathered`" in said and "Traceback" not in said


# Reports


@pytest.mark.parametrize(
    ("page", "begin", "end", "module", "of", "results"),
    [
        ("designs.md", "<!-- grid -->", "<!-- end of the grid -->", "designs_toy", "text", "designs_toy"),
        ("designs.md", "<!-- measured -->", "<!-- end of what", "designs_report", "text", "designs_train"),
        (
            "designs.md",
            "<!-- second -->",
            "<!-- end of second",
            "designs_report",
            "text_of_variants",
            "designs_second",
        ),
        ("horizon.md", "<!-- measured -->", "<!-- end of what", "horizon_report", "text", "horizon"),
        ("teaching.md", "<!-- measured -->", "<!-- end of what", "teaching", "text", "teaching"),
        ("success_probe.md", "<!-- measured -->", "<!-- end of what", "success_probe", "text", "success_probe"),
        ("success_probe.md", "<!-- tables -->", "<!-- end of the tables", "success_toy", "text", "success_toy"),
    ],
)
def test_a_report_has_the_tables_of_its_results(bench, page, begin, end, module, of, results):
    found = json.loads((BENCHMARKS / "results" / f"{results}.json").read_text())
    plan = [found["plan"]] if results == "horizon" else []
    assert between(REPORTS / page, begin, end) == getattr(getattr(bench, module), of)(found["rows"], *plan)


def test_the_report_on_credit_has_the_table_of_its_command(bench):
    """Rows of rules that are measured on drawn groups may differ from one torch to another."""
    page, rows = (REPORTS / "credit.md").read_text().splitlines(), bench.credit.table()
    assert len(rows) > 10
    for row in rows:
        name = row.split(" | ")[0]
        assert row in page or ("state_baseline" in name and any(line.startswith(name) for line in page)), row


def cells(lines: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def numbers(row: list[str]) -> list[float]:
    return [float(number) for cell in row[2:] for number in cell.split(" / ")]


def test_the_report_on_credit_has_the_tables_of_one_scale(bench):
    """Some columns of the first; where batches are drawn, numbers may differ a little from one torch to another."""
    scales = bench.credit_scales
    page = between(REPORTS / "credit.md", scales.BEGIN, scales.END)
    committed, of_designs = (cells(part.splitlines()) for part in page.split("\n\n"))
    found = cells(scales.bias_table(("stopper", "one_search", "late")))
    held = [[row[place] for place in (0, 1, 2, 3, 6)] for row in committed]
    for ours, theirs in ((found, held), (cells(scales.designs_table()), of_designs)):
        assert [row[:2] for row in ours] == [row[:2] for row in theirs] and ours[0] == theirs[0]
        for row, other in zip(ours[2:], theirs[2:], strict=True):
            assert numbers(row) == pytest.approx(numbers(other), abs=0.03), row


def test_rules_that_were_tried_still_run(bench, monkeypatch):
    for rule, _ in bench.credit_tried.TRIED:
        for group_size in (1, 4):
            assert estimate(rule, draw_batch(3, group_size)).isfinite().all()
    monkeypatch.setattr(bench.credit_toy, "STEPS", 2)
    assert bench.credit_toy.train("lambda_to_go", bench.credit_toy.LESSONS["delayed"], seed=0)[0] is None
