"""What the page is told of a run, held against its index and its files."""

from __future__ import annotations

import json
import math
import shutil
import statistics

import orjson
import pytest
from support.runs import REWARDS, index_line, write_run

from mt_grpo.errors import UserError
from mt_grpo.runlog import Batch, RunWriter, open_run
from mt_grpo.runlog.index import Table
from mt_grpo.token_tree import TokenTree
from mt_grpo.trajectory import StopReason, Trajectory, Turn
from mt_grpo.viewer.columns import Columns
from mt_grpo.viewer.overview import POINTS, findings, metric_curves, overview
from mt_grpo.viewer.queries import Queries


def rows_of(queries, mode="train", step=None):
    return [row for row in queries.run.rows if row["mode"] == mode and step in (None, row["step"])]


def test_curves_are_means_over_the_conversations_of_a_step(queries):
    view = queries.answer("overview", {})
    assert view["step"] == list(range(12))
    for step in view["step"]:
        rows = rows_of(queries, step=step)
        rewards = [row["reward"] for row in rows]
        assert view["reward"][int(step)] == pytest.approx(statistics.mean(rewards))
        timeouts = sum(row["stop"] == "timeout" for row in rows) / len(rows)
        assert view["stops"]["timeout"][int(step)] == pytest.approx(timeouts)
        mismatch = [row["mismatch"] for row in rows]
        assert view["health"]["engine − trainer"][int(step)] == pytest.approx(statistics.mean(mismatch))
        format_ = [row["rewards"]["format"] for row in rows if row["rewards"]["format"] is not None]
        assert view["rewards"]["format"][int(step)] == pytest.approx(statistics.mean(format_))
    assert [point["step"] for point in view["held_out"]] == [0, 12]
    assert view["time"]["sampling"] == [step["sampling"] for step in queries.run.steps()]


def test_long_runs_have_fewer_points():
    rows = Table()
    steps = 3 * POINTS + 7
    lines = [index_line(f"s{step}", step=step, reward=step) for step in range(steps)]
    rows.add("rollout", lines)
    columns = Columns(rows)
    view = overview(columns, [], [])
    assert len(view["reward"]) == len(view["step"]) == POINTS
    assert all(isinstance(step, int) for step in view["step"]) and view["step"][0] == 0
    assert [last + 1 for last in view["last"]] == [*view["step"][1:], steps]
    means = [(first + last) / 2 for first, last in zip(view["step"], view["last"], strict=True)]
    assert view["reward"] == pytest.approx(means)
    assert [view["distribution"][place][0] for place in (0, 3, 6)] == [0, 1, 2]


def test_metrics_and_conversations_count_steps_alike():
    lines = [
        {"step": 1, "loss": 0.5, "epoch": 0.1, "note": "x"},
        {"step": 2, "loss": 0.25},
        {"step": 2, "eval_loss": 3},
    ]
    curves = metric_curves([*lines, {"step": 3, "loss": float("nan")}])["curves"]
    assert curves == {
        "loss": {"step": [0, 1], "values": [0.5, 0.25]},
        "eval_loss": {"step": [2], "values": [3.0]},
    }


def test_the_table_is_sorted_with_missing_values_last(queries):
    for sort, sign in (("reward", 1), ("-reward", -1), ("-mismatch", -1)):
        name = sort.removeprefix("-")
        answer = queries.answer("find", {"sort": sort, "limit": "500"})
        values = [math.inf if row[name] is None else sign * row[name] for row in answer["rows"]]
        assert values == sorted(values) and answer["matched"] == answer["total"] == len(queries.run.rows)
    texts = [row["stop"] for row in queries.answer("find", {"sort": "stop", "limit": "500"})["rows"]]
    assert texts == sorted(texts)
    whole = queries.answer("find", {"limit": "500"})["rows"]
    assert queries.answer("find", {"offset": "30", "limit": "7"})["rows"] == whole[30:37]


def test_a_group_has_its_members_best_first(queries):
    view = queries.answer("group", {"mode": "train", "step": "3", "k": "0", "group": "1"})
    rows = [row for row in rows_of(queries, step=3) if row["group"] == 1]
    assert [member["row"]["reward"] for member in view["members"]] == sorted(
        (row["reward"] for row in rows), reverse=True
    )
    assert (view["number"], view["of"], view["accepted"]) == (2, 4, ["Santiago"])
    assert view["previous"] == {"mode": "train", "step": 3, "k": 0, "group": 0}
    assert view["next"]["group"] == 2
    for member in view["members"]:
        assert [turn["advantage"] for turn in member["turns"]] == pytest.approx(member["row"]["advantages"], abs=1e-5)
        assert [turn["tokens"] for turn in member["turns"]] == member["row"]["tokens"]
        assert member["turns"][-1]["label"] == "answer" and member["turns"][-1]["reply"] is None


def test_a_conversation_says_what_its_group_earned(queries):
    row = rows_of(queries, step=2)[5]
    view = queries.answer("trajectory", {"session": row["session"]})
    mates = [each for each in rows_of(queries, step=2) if each["group"] == row["group"]]
    assert view["group"]["sessions"] == [each["session"] for each in mates]
    assert view["group"]["mean"] == pytest.approx(statistics.mean(each["reward"] for each in mates))
    assert view["question"] == row["prompt"] and "row" not in view
    assert "".join(view["tokens"]["texts"]).count("<answer>") == 1


def test_questions_are_compared_between_evaluations(queries):
    view = queries.answer("compare", {})
    before, after = rows_of(queries, "eval", 0), rows_of(queries, "eval", 12)
    kinds = {(False, True): "fixed", (True, True): "still right", (False, False): "still wrong"}
    wanted = [kinds.get((a["right"], b["right"]), "broken") for a, b in zip(before, after, strict=True)]
    assert view["counts"] == {kind: wanted.count(kind) for kind in view["counts"]}
    assert {row["prompt"] for row in view["rows"]} == {row["prompt"] for row in before}
    assert (view["from"], view["to"], view["steps"]) == (0, 12, [0, 12])
    with pytest.raises(UserError, match="no evaluation at step 5: there are some at 0, 12"):
        queries.answer("compare", {"from": "5"})


def test_same_questions_are_told_apart_by_their_order(tmp_path):
    run = open_run(write_run(tmp_path / "run", steps=1, groups=9))
    view = Queries(run).answer("compare", {})
    assert len(view["rows"]) == 9 and len({tuple(row["sessions"]) for row in view["rows"]}) == 9


def test_one_evaluation_is_not_compared(tmp_path):
    folder = write_run(tmp_path / "run", steps=1)
    index = folder / "rollouts" / "index.jsonl"
    index.write_bytes(b"".join(line for line in index.open("rb") if b'"eval-000001' not in line))
    with pytest.raises(UserError, match="one evaluation, at step 0"):
        Queries(open_run(folder)).answer("compare", {})


def test_findings_name_what_is_wrong_and_lead_there(queries):
    view = queries.answer("overview", {})
    flat = {name: [0.0] * 12 for name in view["health"]}
    burst = [0.01] * 12
    burst[4] = burst[5] = 0.4
    odd = {**view, "reward": [1.0] * 12, "stops": {"length": [0.5] * 12}}
    odd["health"] = {**flat, "engine − trainer": burst, "entropy": [1.0] * 8 + [0.001] * 4}
    odd["health"]["groups without signal"] = [0.9] * 12
    found = findings(odd, queries.columns, {"counts": {"fixed": 3, "broken": 2}, "from": 0, "to": 12})
    words = [f"{each['strong']} {each['text']}" for each in found]
    assert words[0].startswith("2 of 5 held-out questions were right at step 0")
    for part in (
        "Entropy 1 → 0.001",
        "Steps 4–5: engine and trainer",
        "Stop reason length:",
        "No turn has an advantage",
    ):
        assert any(part in each for each in words)
    assert any("nothing is learnt" in each for each in words)
    for each in found:
        if each["link"] and each["link"]["view"] == "find":
            queries.answer("find", {"q": each["link"]["q"], "sort": each["link"].get("sort", "")})
    assert [each["level"] for each in found] == sorted(
        (each["level"] for each in found), key="bad warn ok".split().index
    )


def test_answers_that_were_lost_are_found(tmp_path):
    folder = write_run(tmp_path / "run", steps=1)
    queries = Queries(open_run(folder))
    assert queries.answer("lost", {})["sessions"] == []
    prompt = [{"role": "user", "content": "What is the capital of Peru?"}]
    turns = [
        Turn(0, {"role": "assistant", "content": "<answer>Lima"}, error="The answer is not closed.", num_tokens=2)
    ]
    turns.append(Turn(1, {"role": "assistant", "content": "<answer>Paris</answer>"}, num_tokens=1, answer="Paris"))
    tree = TokenTree()
    tree.add_turn([1], [2, 3], [-0.1, -0.1])
    tree.add_turn([1, 2, 3, 4], [5], [-0.1])
    lost = Trajectory(prompt, turns, tree, "Paris", StopReason.ANSWERED, row={"answer": ["Lima"]}, start=0.0)
    lost.rewards = {"turn": {"tool_execution": [0.0, None]}, "outcome": {"exact_match": 0.0, "format": 1.0}}
    writer, batch = RunWriter(folder), Batch("train", 9, 0, 1, [0], [lost], REWARDS)
    writer.append(writer.write(batch))
    assert queries.answer("lost", {})["sessions"] == batch.sessions
    (note,) = queries.answer("group", {"mode": "train", "step": "9", "k": "0", "group": "0"})["notes"]
    assert (note["member"], note["turn"], note["answer"]) == (1, 1, "Lima")


def test_a_run_that_goes_on_is_seen(tmp_path):
    whole, folder = write_run(tmp_path / "whole", steps=3), tmp_path / "run"
    shutil.copytree(whole, folder)
    index = folder / "rollouts" / "index.jsonl"
    lines = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(b"".join(lines[:20]))
    queries = Queries(open_run(folder))
    before = queries.answer("run", {})
    assert queries.answer("run", {})["version"] == before["version"]
    index.write_bytes(b"".join(lines) + b'{"kind":"rollout","sess')  # half a line, as while it is written
    after = queries.answer("run", {})
    assert after["version"] > before["version"]
    assert after["conversations"] == len(open_run(whole).rows) > before["conversations"]
    credited = {row["session"]: row["advantages"] for row in queries.columns.rows}
    assert credited == {row["session"]: row["advantages"] for row in open_run(whole).rows}


def test_another_run_in_the_same_folder_is_read_anew(tmp_path):
    folder = write_run(tmp_path / "run", steps=3)
    queries = Queries(open_run(folder))
    before = queries.answer("run", {})
    shutil.rmtree(folder)
    write_run(folder, steps=1, seed=1)
    after = queries.answer("run", {})
    assert after["conversations"] == len(open_run(folder).rows) < before["conversations"]
    assert after["version"] > before["version"]


def test_an_empty_run_has_answers(tmp_path):
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "index.jsonl").touch()
    queries = Queries(open_run(tmp_path))
    assert queries.answer("overview", {})["reward"] == [] and queries.answer("find", {})["rows"] == []
    for question in ("group", "trajectory"):
        with pytest.raises(UserError, match="No conversation is written yet"):
            queries.answer(question, {})


@pytest.mark.parametrize(
    ("question", "asked", "words"),
    [
        ("secrets", {}, "nothing at 'secrets'"),
        ("group", {"step": "x", "k": "0", "group": "0"}, "`step` is a whole number of up to 15 digits; 'x' is none"),
        ("group", {"step": "77", "k": "0", "group": "0"}, "no group 0 of step 77"),
        ("trajectory", {"session": "none"}, "no conversation 'none'"),
    ],
)
def test_what_is_not_there_is_said(queries, question, asked, words):
    with pytest.raises(UserError, match=words):
        queries.answer(question, asked)


@pytest.mark.parametrize("question", ["run", "overview", "find", "group", "trajectory", "compare", "lost"])
def test_every_answer_is_json(queries, question):
    json.loads(orjson.dumps(queries.answer(question, {})))


def test_metrics_are_read_on_and_read_anew_when_replaced(tmp_path):
    folder = write_run(tmp_path / "run", steps=2, groups=1)
    run, path = open_run(folder), folder / "metrics.jsonl"
    assert [line["step"] for line in run.metrics()] == [1, 2] and run.metrics() is run.metrics()
    with path.open("ab") as file:
        file.write(b'{"step":3,"reward":0.5}\n{"step":4,"rew')
    assert [line["step"] for line in run.metrics()] == [1, 2, 3]
    with path.open("ab") as file:
        file.write(b'ard":1}\n')
    assert run.metrics()[-1] == {"step": 4, "reward": 1} and len(run.metrics()) == 4
    path.with_name("other").write_bytes(b'{"step":9}\n')
    path.with_name("other").replace(path)
    assert run.metrics() == [{"step": 9}]
    path.unlink()
    assert run.metrics() == []
