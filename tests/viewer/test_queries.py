"""What the page is told of a run, held against its index and its files, and filters against a plain reading of it."""

import math
import shutil
from itertools import product
from statistics import mean, stdev

import numpy as np
import pytest
from support.credited_runs import BRANCHED, EQUAL, EXAMPLE, OTHER, WRONG, Member, write_credited
from support.registered import keep_estimators
from support.runs import REWARDS, index_line, queries_of, talk, write_run

from mt_grpo.credit import advantage_estimator, reward_to_go
from mt_grpo.errors import UserError
from mt_grpo.rollout.runner import Branching
from mt_grpo.runlog import Batch, RunWriter, open_run
from mt_grpo.runlog.files import Heartbeat
from mt_grpo.runlog.index import Table
from mt_grpo.viewer.columns import Columns, Condition, FilterError, SearchIndex, parse_filter
from mt_grpo.viewer.overview import POINTS, _covered, findings, metric_curves, overview, status
from mt_grpo.viewer.queries import Queries


def rows_of(queries, **fields):
    return [row for row in queries.run.rows if all(row[name] == value for name, value in fields.items())]


# Filters


def reward(row):
    return float("nan") if row["reward"] is None else row["reward"]


FILTERS = {
    "": lambda row: True,
    "stop=timeout": lambda row: row["stop"] == "timeout",
    "stop=TIMEOUT,length": lambda row: row["stop"] in ("timeout", "length"),
    "stop!=answered": lambda row: row["stop"] != "answered",
    "reward<0.5": lambda row: reward(row) < 0.5,
    "advantage<−0.5": lambda row: any(value < -0.5 for value in row["advantages"] or ()),
    "mode=eval reward>=1": lambda row: row["mode"] == "eval" and reward(row) >= 1,
    "mismatch>.1": lambda row: (row["mismatch"] or 0) > 0.1,
    "turns=2 errors>0": lambda row: row["turns"] == 2 and sum(row["errors"]) > 0,
    "step>=3 step<=4": lambda row: 3 <= row["step"] <= 4,
    "exact_match=1": lambda row: row["rewards"]["exact_match"] == 1,
    "right!=1": lambda row: row["right"] is False,
    "rewards/format>=1": lambda row: (row["rewards"]["format"] or 0) >= 1,
    "reward.exact_match>0.5": lambda row: row["rewards"]["exact_match"] > 0.5,
    "turn_reward>=0.1": lambda row: any(value is not None and value >= 0.1 for value in row["turn_rewards"]),
    "member=2 tokens>20": lambda row: row["member"] == 1 and sum(row["tokens"]) > 20,
    '"capital of Peru"': lambda row: "capital of peru" in row["prompt"].lower(),
    "lima": lambda row: "lima" in (row["answer"] or "").lower(),
    'answer="Lima" mode=train': lambda row: row["answer"] == "Lima" and row["mode"] == "train",
    "session=train-000002-000000-000003": lambda row: row["session"] == "train-000002-000000-000003",
}
OF_WORDS = {
    "tool=search": lambda row: row["calls"] > 0,
    "tool=other": lambda row: False,
    'error="took longer than"': lambda row: sum(row["errors"]) > 0,
}
"""Filters on the words of conversations: all others are of the index alone."""


@pytest.mark.parametrize("text", FILTERS | OF_WORDS)
def test_a_filter_counts_what_a_loop_counts(queries, text):
    columns = Columns(queries.run.rows)
    if text in OF_WORDS:
        index = SearchIndex(queries.run)
        index.read_all(queries.run.rows)
        columns.said = index.where
    wanted = [place for place, row in enumerate(queries.run.rows) if (FILTERS | OF_WORDS)[text](row)]
    assert np.flatnonzero(columns.where(parse_filter(text))).tolist() == wanted
    assert wanted or text in ("turns=2 errors>0", "tool=other")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("reward<", "cannot be read from `reward<` on"),
        ("<3", "cannot be read from `<3` on"),
        ('"open', "a quote that is not closed"),
        ("rewrd<1", "no column 'rewrd'; the nearest is 'reward'"),
        ("stop<3", "compare stop with `=` or `!=`"),
        ("star<3", "compare star with `=` or `!=`"),
        ("reward=high", "compares with no number"),
        ("reward<1,2", "several numbers"),
        ("a=b=c", "no column 'a'"),
    ],
)
def test_a_bad_filter_is_refused_in_one_sentence(queries, text, words):
    with pytest.raises(FilterError) as refused:
        queries.select(text)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_terms_can_be_written_again():
    conditions = parse_filter('stop=length,timeout  answer="two words" "a b" word reward>=-1e-3')
    read = [("stop", "=", "length,timeout"), ("answer", "=", "two words"), ("", "", "a b"), ("", "", "word")]
    assert conditions == [Condition(*each) for each in (*read, ("reward", ">=", "-1e-3"))]
    assert parse_filter(" ".join(condition.written for condition in conditions)) == conditions


def test_groups_without_signal_are_found(queries):
    groups = {}
    for place, row in enumerate(queries.run.rows):
        groups.setdefault((row["mode"], row["step"], row["k"], row["group"]), []).append((place, row["reward"]))
    dead = [
        place for rows in groups.values() if len(rows) > 1 == len({earned for _, earned in rows}) for place, _ in rows
    ]
    assert queries.select("spread=0").tolist() == sorted(dead) and dead
    several = next(rows for rows in groups.values() if len({earned for _, earned in rows}) > 1)
    deviation = stdev(earned for _, earned in several)  # n - 1, as credit rules have it
    assert queries.columns.numbers("spread")[several[0][0]] == pytest.approx(deviation)


def test_the_table_is_sorted_with_missing_values_last(queries):
    for sort, sign in (("reward", 1), ("-reward", -1), ("-mismatch", -1)):
        answer = queries.answer("find", {"sort": sort, "limit": "500"})
        sorted_by = [row[sort.removeprefix("-")] for row in answer["rows"]]
        values = [math.inf if value is None else sign * value for value in sorted_by]
        assert values == sorted(values) and answer["matched"] == answer["total"] == len(queries.run.rows)
    stops = [row["stop"] for row in queries.answer("find", {"sort": "stop", "limit": "500"})["rows"]]
    whole = queries.answer("find", {"limit": "500"})["rows"]
    assert stops == sorted(stops) and queries.answer("find", {"offset": "30", "limit": "7"})["rows"] == whole[30:37]


# Curves and findings


def test_curves_are_means_over_the_conversations_of_a_step(queries):
    view = queries.answer("overview", {})
    assert view["step"] == list(range(12)) and [point["step"] for point in view["held_out"]] == [0, 12]
    for step in view["step"]:
        rows = rows_of(queries, mode="train", step=step)
        health = view["health"]["with a failed turn"], view["health"]["engine − trainer"]
        shown = view["reward"], view["stops"]["timeout"], *health, view["rewards"]["format"]
        formats = [row["rewards"]["format"] for row in rows if row["rewards"]["format"] is not None]
        values = [[row["reward"], row["stop"] == "timeout", sum(row["errors"]) > 0] for row in rows]
        means = [*map(mean, zip(*values, strict=True)), mean(row["mismatch"] for row in rows), mean(formats)]
        assert [curve[step] for curve in shown] == pytest.approx(means)
    assert view["time"]["sampling"] == [step["sampling"] for step in queries.run.steps()]


def test_long_runs_have_fewer_points():
    rows, steps = Table(), 3 * POINTS + 7
    rows.add("rollout", [index_line(f"s{step}", step=step, reward=step) for step in range(steps)])
    view = overview(Columns(rows), [], [])
    assert len(view["reward"]) == len(view["step"]) == POINTS
    assert all(isinstance(step, int) for step in view["step"]) and view["step"][0] == 0
    assert [last + 1 for last in view["last"]] == [*view["step"][1:], steps]
    means = [(first + last) / 2 for first, last in zip(view["step"], view["last"], strict=True)]
    assert view["reward"] == pytest.approx(means)
    assert [view["distribution"][place][0] for place in (0, 3, 6)] == [0, 1, 2]
    said = [each["text"] for each in findings({**view, "reward": [1.0] * POINTS}, Columns(rows), None)]
    assert f"in {steps} steps: it has not risen so far." in said


def test_steps_and_questions_of_a_long_run_are_counted_singly():
    rows, steps, lines = Table(), 2 * POINTS, []
    for step, member in product(range(steps), range(2)):
        lines.append(index_line(f"s{step}-{member}", step=step, member=member, reward=float(step < 3 and member)))
    for group, member in product(range(3), range(4)):
        lines.append(index_line(f"e{group}-{member}", mode="eval", group=group, member=member, right=True))
    lines.append(index_line("e3-0", mode="eval", group=3, right=None))  # nothing judged it
    rows.add("rollout", lines)
    view = overview(Columns(rows), [], [])
    assert view["silent"] == {"steps": steps - 3, "of": steps, "most": 1.0}
    assert [point["questions"] for point in view["held_out"]] == [3]


def test_metrics_and_conversations_count_steps_alike():
    lines = [{"step": 1, "loss": 0.5, "epoch": 0.1, "note": "x"}, {"step": 2, "loss": 0.25}]
    lines += [{"step": 2, "eval_loss": 3}, {"step": 3, "loss": float("nan")}]
    loss, eval_loss = {"step": [0, 1], "values": [0.5, 0.25]}, {"step": [2], "values": [3.0]}
    assert metric_curves(lines)["curves"] == {"loss": loss, "eval_loss": eval_loss}


def test_findings_name_what_is_wrong_and_lead_there(queries):
    view = queries.answer("overview", {})
    odd = {**view, "reward": [1.0] * 12, "stops": {"length": [0.5] * 12}}
    odd["health"] = {name: [0.0] * 12 for name in view["health"]} | {
        "engine − trainer": [0.01] * 4 + [0.4] * 2 + [0.01] * 6,
        "entropy": [1.0] * 8 + [0.001] * 4,
        "groups without signal": [0.9] * 12,
    }
    found = findings(odd, queries.columns, {"counts": {"fixed": 3, "broken": 2}, "from": 0, "to": 12})
    said = [f"{each['strong']} {each['text']}" for each in found]
    assert said[0].startswith("2 of 5 held-out questions were right at step 0")
    parts = ["Entropy 1 → 0.001", "Steps 4–5: engine and trainer", "Stop reason length:", "No turn has an advantage"]
    assert all(any(part in each for each in said) for part in (*parts, "has not risen"))
    levels = ["bad warn ok".split().index(each["level"]) for each in found]
    assert levels == sorted(levels)
    links = [each["link"] for each in found if each["link"] and each["link"]["view"] == "find"]
    for link in links:
        queries.answer("find", {"q": link["q"], "sort": link.get("sort", "")})
    assert links


def test_a_finding_leads_to_those_that_it_counts():
    rows = Table()
    modes = ["train", "train", "eval", "eval", "eval"]
    rows.add("rollout", [index_line(f"s{i}", mode=mode, member=i, stop="length") for i, mode in enumerate(modes)])
    columns = Columns(rows)
    said = {each["strong"]: each["link"] for each in findings(overview(columns, [], []), columns, None)}
    link = said["2 of 2 conversations were cut off by length:"]
    assert columns.where(parse_filter(link["q"])).tolist() == [mode == "train" for mode in modes]


def test_answers_that_were_lost_are_found(tmp_path):
    queries = queries_of(write_run(tmp_path, steps=1))
    assert queries.answer("lost", {})["sessions"] == []
    turns = ([1], [2, 3], "<answer>Lima"), ([1, 2, 3, 4], [5], "<answer>Paris</answer>")
    lost = talk(*turns, answer="Paris", row={"answer": ["Lima"]}, start=0.0)
    lost.turns[0].error, lost.turns[1].answer = "The answer is not closed.", "Paris"
    lost.rewards = {"turn": {"tool_execution": [0.0, None]}, "outcome": {"exact_match": 0.0, "format": 1.0}}
    writer, batch = RunWriter(tmp_path), Batch("train", 9, 0, 1, [0], [lost], REWARDS)
    writer.append(writer.write(batch))
    assert queries.answer("lost", {})["sessions"] == batch.sessions
    (note,) = queries.answer("group", {"mode": "train", "step": "9", "k": "0", "group": "0"})["notes"]
    assert (note["member"], note["turn"], note["answer"]) == (1, 1, "Lima")


# Groups, conversations, evaluations, and a step as it ran


def test_a_group_has_its_members_best_first(queries):
    view = queries.answer("group", {"mode": "train", "step": "3", "k": "0", "group": "1"})
    rewards = [row["reward"] for row in rows_of(queries, mode="train", step=3, group=1)]
    assert [member["row"]["reward"] for member in view["members"]] == sorted(rewards, reverse=True)
    assert (view["number"], view["of"], view["accepted"]) == (2, 4, ["Santiago"])
    assert view["previous"] == {"mode": "train", "step": 3, "k": 0, "group": 0} and view["next"]["group"] == 2
    for member in view["members"]:
        row, turns = member["row"], member["turns"]
        assert [turn["advantage"] for turn in turns] == pytest.approx(row["advantages"], abs=1e-5)
        assert [turn["tokens"] for turn in turns] == row["tokens"]
        assert (turns[-1]["label"], turns[-1]["reply"]) == ("answer", None)


def test_a_conversation_says_what_its_group_earned(queries):
    row = rows_of(queries, mode="train", step=2)[5]
    view = queries.answer("trajectory", {"session": row["session"]})
    mates = rows_of(queries, mode="train", step=2, group=row["group"])
    assert view["group"]["sessions"] == [each["session"] for each in mates]
    assert view["group"]["mean"] == pytest.approx(mean(each["reward"] for each in mates))
    assert view["question"] == row["prompt"] and "row" not in view
    assert "".join(view["tokens"]["texts"]).count("<answer>") == 1


def of_one_turn(values, *more):
    return Member([1.0, 0.9], [values, *more])


BOTH = [of_one_turn([0.2, 0.5], [0.0, 0.0])] * 4 + [of_one_turn([0.0, 0.0], [0.2, 0.5])] * 4
SHORT = [of_one_turn([0.2, 0.5], [None, None])] * 4 + [of_one_turn([0.0, 0.0])] * 4


@pytest.mark.parametrize(
    ("rule", "group", "signal", "says"),
    [
        ("reward_to_go", BOTH, True, "all right"),
        ("grpo_mr", BOTH, False, "all earned 2.60, all right"),
        ("grpo_or", SHORT, False, "the rule does not use what differs, all right"),
    ],
)
def test_a_signal_is_what_the_rule_makes_of_rewards(tmp_path, rule, group, signal, says):
    queries = queries_of(write_credited(tmp_path, [group], rule))
    [found] = queries.answer("groups", {})["groups"]
    assert (found["signal"], found["says"]) == (signal, says)
    assert queries.answer("overview", {})["health"]["groups without signal"] == [float(not signal)]
    assert len(queries.select("signal=0")) == (0 if signal else 8)


def test_groups_say_whether_they_teach(tmp_path):
    queries = queries_of(write_credited(tmp_path, [EXAMPLE, EQUAL, WRONG], "gtpo"))
    view = queries.answer("groups", {})
    said = ["2 of 8 right", "all earned 2.60, all right", "all earned 0.20, all wrong"]
    assert [group["says"] for group in view["groups"]] == said
    assert [group["signal"] for group in view["groups"]] == [True, False, False]
    assert view["steps"] == {"step": [0], "groups": [3], "signal": [1]}
    rewards = [row["reward"] for row in rows_of(queries, group=0)]
    first = view["groups"][0]
    assert [first["mean"], first["deviation"]] == pytest.approx([mean(rewards), stdev(rewards)])
    assert first["stops"] == {"answered": 8}


def test_branches_are_told_and_copies_not_counted(tmp_path):
    queries = queries_of(write_credited(tmp_path, [BRANCHED], "branch_to_go", Branching(number=4, at=1)))
    (group,) = queries.answer("groups", {})["groups"]
    copies = [False] * 5 + [True] * 3
    assert [(member["root"], member["shared"], member["copy"]) for member in group["members"]] == list(
        zip([1] * 4 + [5] * 4, [0, 1, 1, 1] * 2, copies, strict=True)
    )
    counted = [member["reward"] for member in group["members"][:5]]
    one = queries.answer("group", {"step": "0", "k": "0", "group": "0"})
    shown = [group["mean"], group["deviation"], one["mean"], one["deviation"]]
    assert shown == pytest.approx([mean(counted), stdev(counted)] * 2)
    assert group["says"] == "1 of 5 right, 5 count, 3 are copies"
    for member in group["members"]:
        whole = queries.answer("trajectory", {"session": member["session"]})
        assert whole["group"]["mean"] == group["mean"] and whole["branch"] == member
    rows = queries.answer("find", {"q": "copy=1"})["rows"]
    assert [(row["member"], row["copy"]) for row in rows] == [(6, True), (7, True), (8, True)]
    spread = f"spread>{group['deviation'] - 1e-6} spread<{group['deviation'] + 1e-6}"
    assert len(queries.select(spread)) == len(group["members"])
    why = queries.answer("why", {"session": "train-000000-000000-000001"})
    assert [member["copy"] for member in why["members"]] == copies
    assert why["turns"][1]["terms"][0]["of"] == "its other 3 branches"


def test_questions_are_compared_between_evaluations(queries):
    view = queries.answer("compare", {})
    before, after = (rows_of(queries, mode="eval", step=step) for step in (0, 12))
    kinds = {(False, True): "fixed", (True, True): "still right", (False, False): "still wrong"}
    wanted = [kinds.get((a["right"], b["right"]), "broken") for a, b in zip(before, after, strict=True)]
    assert view["counts"] == {kind: wanted.count(kind) for kind in view["counts"]}
    assert {row["prompt"] for row in view["rows"]} == {row["prompt"] for row in before}
    assert (view["from"], view["to"], view["steps"]) == (0, 12, [0, 12])


def test_same_questions_are_told_apart_by_their_order(tmp_path):
    view = queries_of(write_run(tmp_path, steps=1, groups=9)).answer("compare", {})
    assert len(view["rows"]) == len({tuple(row["sessions"]) for row in view["rows"]}) == 9


def test_one_evaluation_is_not_compared(tmp_path):
    index = write_run(tmp_path, steps=1) / "rollouts" / "index.jsonl"
    index.write_bytes(b"".join(line for line in index.open("rb") if b'"eval-000001' not in line))
    with pytest.raises(UserError, match="one evaluation, at step 0"):
        queries_of(tmp_path).answer("compare", {})


def test_a_step_is_divided_among_what_its_conversations_did(queries):
    flow = queries.answer("waterfall", {"step": "3"})
    rows = rows_of(queries, mode="train", step=3)
    assert {row["session"] for row in flow["rows"]} == {row["session"] for row in rows} and len(rows) == 16
    ends = [row["end"] for row in flow["rows"]]
    assert ends == sorted(ends, reverse=True)
    assert flow["seconds"] == pytest.approx(max(row["seconds"] for row in rows), abs=2e-3)
    sampling = sum(sum(row["turn_seconds"]) for row in rows) / (16 * flow["seconds"])
    assert [flow["shares"]["sampling"], sum(flow["shares"].values())] == pytest.approx([sampling, 1], abs=2e-3)
    at_once = [["tools", 0, 2, "a"], ["tools", 1, 2, "b"], ["tools", 5, 1, "c"]]
    assert _covered(at_once) == 4  # calls of a turn that run at once count once


@pytest.mark.parametrize(
    ("question", "asked", "words"),
    [
        ("secrets", {}, "nothing at 'secrets'"),
        *[("find", {"sort": name}, f"not sorted by {name}:") for name in ("star", "tool", "advantage")],
        ("group", {"step": "x", "k": "0", "group": "0"}, "`step` is a whole number of up to 15 digits; 'x' is none"),
        ("group", {"step": "77", "k": "0", "group": "0"}, "no group 0 of step 77"),
        ("groups", {"step": "77"}, "There is no step 77"),
        ("trajectory", {"session": "none"}, "no conversation 'none'"),
        ("compare", {"from": "5"}, "no evaluation at step 5: there are some at 0, 12"),
        ("waterfall", {"step": "999"}, "Step 999 has no conversation"),
    ],
)
def test_what_is_not_there_is_said(queries, question, asked, words):
    with pytest.raises(UserError, match=words):
        queries.answer(question, asked)


# Why a turn has its advantage

RULES = ["mt_grpo", "reward_to_go", "gdpo", "leave_one_out", "turn_gae", "lambda_to_go", "mt_grpo_discounted"]
RULES += ["grpo_or", "grpo_mr", "gigpo", "gtpo", {"name": "gtpo", "gamma": 0.5}]
RULES += [{"name": "gigpo", "gamma": 0.5, "turn_coef": 0.25}, {"name": "reward_to_go", "turn_coef": 0.5}]


@pytest.fixture
def asked(tmp_path):
    """Why the turns of a conversation have their advantages under a rule."""

    def ask(rule, number=0, **options):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        queries = queries_of(write_credited(folder, [EXAMPLE, OTHER], rule, **options))
        return queries.answer("why", {"session": queries.run.rows[number]["session"]})

    return ask


def worth(reward):
    """What the page shows of a reward: its values, times what counts of them, times its weight."""
    if reward["kind"] == "outcome":
        return (reward["value"] or 0.0) * reward["weight"] * (1.0 if reward["factor"] is None else reward["factor"])
    counted = [(value or 0.0) * factor for value, factor in zip(reward["values"], reward["factors"], strict=True)]
    return sum(counted) * reward["weight"] * reward["coefficient"]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_terms_sum_to_the_advantage(tmp_path, rule):
    queries = queries_of(write_credited(tmp_path, [EXAMPLE, OTHER], rule))
    for row in queries.run.rows:
        turns = queries.answer("why", {"session": row["session"]})["turns"]
        assert [turn["sum"] for turn in turns] == pytest.approx(row["advantages"], abs=2e-6)
        sums = [sum(term["value"] for term in turn["terms"]) for turn in turns]
        assert sums == pytest.approx(row["advantages"], abs=2e-6)
        for term in (term for turn in turns for term in turn["terms"]):
            rest = (term["earned"] - term["baseline"]) / (term["scale"] or 1)
            known = [each["earned"] for each in term["rewards"]] + [each["value"] for each in term["others"]]
            assert [rest, sum(known)] == pytest.approx([term["value"], term["earned"]], abs=1e-6)
            shown = [each for each in term["rewards"] if each.get("factors", []) is not None]
            assert shown == term["rewards"] or rule == "mt_grpo_discounted"  # a scale per turn
            assert [*map(worth, shown)] == pytest.approx([each["earned"] for each in shown], abs=1e-5), term["name"]


def test_the_group_is_behind_each_term_of_the_example(asked):
    why = asked("mt_grpo")
    outcome, turns = why["turns"][0]["terms"]
    values = [outcome["value"], turns["value"], why["turns"][0]["sum"]]
    assert values == pytest.approx([-0.4734, -0.3738, -0.8472], abs=5e-5)
    assert [value for _, value in outcome["values"]] == pytest.approx([0.4, 0.345, 1.9, 0.4, 0.18, 0.4, 1.9, 0.4])
    for term in (outcome, turns):
        values = [value for _, value in term["values"]]
        deviation = term["deviation"]["value"]
        assert [term["baseline"], deviation] == pytest.approx([mean(values), stdev(values)], abs=1e-6)
        assert term["scale"] == pytest.approx(deviation + 1e-4) and term["of"] == "the group’s 8"
    assert [outcome["name"], turns["name"]] == ["outcome", "turn rewards"]
    assert [each["values"] for each in turns["rewards"]] == [[0.2, 0.0, None], [0.0, 0.0, None]]
    assert why["rule"] == {"name": "mt_grpo", "turn_coef": 1.0, "scales": "each", "scale_rewards": "group"}
    assert why["says"].startswith("The position-aware rule of MT-GRPO")


def test_whose_mean_and_deviation_count_is_said(asked):
    outcome = asked("mt_grpo", scale_rewards="batch")["turns"][0]["terms"][0]
    assert (outcome["of"], outcome["deviation"]["of"]) == ("the group’s 8", "step 0’s 16")
    assert asked("mt_grpo", scale_rewards="none")["turns"][0]["terms"][0]["deviation"] is None
    (term,) = asked("leave_one_out")["turns"][0]["terms"]
    assert term["of"] == "the other 7" and len(term["values"]) == 8


def test_rewards_that_count_at_another_turn_are_told(asked):
    moved = asked("mt_grpo", number=2)["turns"]
    here = next(each for each in moved[0]["moved"] if each["kind"] == "here")
    assert (here["from"], here["to"], here["amount"]) == (2, [1], 0.5)
    assert [(each["kind"], each["to"]) for each in moved[1]["moved"]] == [("away", [1])]
    later = asked({"name": "gtpo", "gamma": 0.5}, number=2)["turns"][0]
    told = next(each for each in later["moved"] if each["kind"] == "later")
    assert (told["from"], told["amount"], told["share"]) == (2, 0.5, 0.25)
    assert later["terms"][0]["rewards"][-1]["factors"] == [1.0, 0.5, 0.25]
    assert not any(turn["moved"] for turn in asked("grpo_or", number=2)["turns"])


def test_a_coefficient_is_told_apart_from_weights(asked):
    rows = asked("reward_to_go", number=2, turn_coef=0.5)["turns"][0]["terms"][1]["rewards"]
    assert [row["coefficient"] for row in rows] == [0.5, 0.5]
    assert sum(row["earned"] for row in rows) == pytest.approx(0.5 * 0.7)


def test_a_rule_without_parts_has_the_groups_values(asked, monkeypatch):
    keep_estimators(monkeypatch)
    advantage_estimator("twice")(lambda batch: 2 * reward_to_go(batch))
    why = asked("twice")
    assert (why["turns"][0]["terms"], why["turns"][0]["sum"]) == ([], None)
    assert [member["reward"] for member in why["members"]][:2] == pytest.approx([0.6, 0.411667])


# A run that goes on


def test_a_run_that_goes_on_is_seen(run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    index = folder / "rollouts" / "index.jsonl"
    lines = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(b"".join(lines[:20]))
    queries, rows = Queries(open_run(folder)), open_run(run_folder).rows
    before, again = (queries.answer("run", {}) for _ in range(2))
    index.write_bytes(b"".join(lines) + b'{"kind":"rollout","sess')  # half a line, as while it is written
    after = queries.answer("run", {})
    assert before["version"] == again["version"] < after["version"]
    assert before["conversations"] < after["conversations"] == len(rows)
    assert [row["advantages"] for row in queries.columns.rows] == [row["advantages"] for row in rows]


def test_another_run_in_the_same_folder_is_read_anew(tmp_path):
    queries = Queries(open_run(write_run(tmp_path / "run", steps=3)))
    before = queries.answer("run", {})
    shutil.rmtree(tmp_path / "run")
    write_run(tmp_path / "run", steps=1, seed=1)
    after = queries.answer("run", {})
    assert before["conversations"] > after["conversations"] == 24 and after["version"] > before["version"]


def test_the_run_says_its_state_in_the_header(run_folder, tmp_path):
    queries = queries_of(shutil.copytree(run_folder, tmp_path / "run"))
    assert queries.answer("run", {})["status"] == "unknown"
    at = {"step": 3, "of": 40, "waits_for": "sampling", "under_way": []}
    with Heartbeat(tmp_path / "run", lambda: at).beating():
        about = queries.answer("run", {})
        assert (about["status"], about["of"]) == ("running", 40) and about["left"] is not None
    assert queries.answer("run", {})["status"] == "stopped"


@pytest.mark.parametrize(
    ("first", "left"), [({}, 100 / 30 * 10), ({"first": 28}, 100 / 2 * 10), ({"first": 30}, None)]
)
def test_the_time_left_is_that_of_the_steps_since_it_began(tmp_path, monkeypatch, first, left):
    monkeypatch.setattr("mt_grpo.viewer.overview.time.time", lambda: 1100.0)
    at = {"state": "running", "reason": None, "started": 1000.0, "beat": 1099.0, "step": 30, "of": 40, **first}
    assert status(at, None, tmp_path)["left"] == pytest.approx(left)


def test_an_empty_run_has_answers(tmp_path):
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "index.jsonl").touch()
    queries = Queries(open_run(tmp_path))
    assert queries.answer("overview", {})["reward"] == [] and queries.answer("find", {})["rows"] == []
    for question in ("group", "trajectory"):
        with pytest.raises(UserError, match="No conversation is written yet"):
            queries.answer(question, {})


def test_metrics_are_read_on_and_read_anew_when_replaced(tmp_path):
    run, path = open_run(write_run(tmp_path, steps=2, groups=1)), tmp_path / "metrics.jsonl"
    assert [line["step"] for line in run.metrics()] == [1, 2] and run.metrics() is run.metrics()
    for written, last in (
        (b'{"step":3,"reward":0.5}\n{"step":4,"rew', {"step": 3, "reward": 0.5}),
        (b'ard":1}\n', {"step": 4, "reward": 1}),
    ):
        with path.open("ab") as file:
            file.write(written)
        assert run.metrics()[last["step"] - 1 :] == [last]
    path.with_name("other").write_bytes(b'{"step":9}\n')
    path.with_name("other").replace(path)
    assert run.metrics() == [{"step": 9}]
    path.unlink()
    assert run.metrics() == []
