"""Why a turn has its advantage, as the server says it."""

from __future__ import annotations

import numpy as np
import pytest
from support.credited_runs import EXAMPLE, OTHER, write_credited
from support.registered import keep_estimators
from support.runs import queries_of

from mt_grpo.credit import advantage_estimator, reward_to_go

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
        assert [term["baseline"], deviation] == pytest.approx([np.mean(values), np.std(values, ddof=1)], abs=1e-6)
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
