"""Why a turn has its advantage: as the server says it, and as the page shows it."""

from __future__ import annotations

import re

import numpy as np
import pytest
from support.browser import missing, open_browser, serving, watched
from support.credited_runs import EXAMPLE, Member, write_credited
from support.registered import keep_estimators

from mt_grpo.credit import advantage_estimator, reward_to_go
from mt_grpo.runlog import open_run
from mt_grpo.viewer.queries import Queries

FIRST = "train-000000-000000-000000"
OTHER = [Member([float(number % 2), 0.2 * number], [[0.1 * number, None], [0.0, 0.3]]) for number in range(8)]


def opened(folder):
    queries = Queries(open_run(folder))
    queries.answer("run", {})
    return queries


def asked(tmp_path, rule, number=0, groups=(EXAMPLE, OTHER), **options):
    queries = opened(write_credited(tmp_path / "run", list(groups), rule, **options))
    return queries.answer("why", {"session": queries.run.rows[number]["session"]})


RULES = [
    "mt_grpo",
    "reward_to_go",
    "gdpo",
    "leave_one_out",
    {"name": "gtpo", "gamma": 0.5},
    "turn_gae",
    "lambda_to_go",
]
RULES += ["mt_grpo_discounted", "grpo_or", "grpo_mr", "gigpo", "gtpo"]
RULES += [{"name": "gigpo", "gamma": 0.5, "turn_coef": 0.25}, {"name": "reward_to_go", "turn_coef": 0.5}]


def worth(reward):
    """What the page shows of a reward: its values, times what counts of them, times its weight."""
    if reward["kind"] == "outcome":
        return (reward["value"] or 0.0) * reward["weight"] * (1.0 if reward["factor"] is None else reward["factor"])
    counted = [(value or 0.0) * factor for value, factor in zip(reward["values"], reward["factors"], strict=True)]
    return sum(counted) * reward["weight"] * reward["coefficient"]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_terms_sum_to_the_advantage(tmp_path, rule):
    queries = opened(write_credited(tmp_path / "run", [EXAMPLE, OTHER], rule))
    for row in queries.run.rows:
        for number, turn in enumerate(queries.answer("why", {"session": row["session"]})["turns"]):
            assert sum(term["value"] for term in turn["terms"]) == pytest.approx(row["advantages"][number], abs=2e-6)
            assert turn["sum"] == pytest.approx(row["advantages"][number], abs=2e-6)
            for term in turn["terms"]:
                rest = (term["earned"] - term["baseline"]) / (term["scale"] or 1)
                assert term["value"] == pytest.approx(rest, abs=1e-6)
                known = [each["earned"] for each in term["rewards"]] + [each["value"] for each in term["others"]]
                assert sum(known) == pytest.approx(term["earned"], abs=1e-6)
                shown = [each for each in term["rewards"] if each.get("factors", []) is not None]
                assert shown == term["rewards"] or rule == "mt_grpo_discounted"  # a scale per turn
                for each in shown:
                    assert worth(each) == pytest.approx(each["earned"], abs=1e-5), (term["name"], each)


def test_the_group_is_behind_each_term_of_the_example(tmp_path):
    why = asked(tmp_path, "mt_grpo")
    outcome, turns = why["turns"][0]["terms"]
    assert [outcome["name"], turns["name"]] == ["outcome", "turn rewards"]
    assert [round(term["value"], 4) for term in (outcome, turns)] == [-0.4734, -0.3738]
    assert round(why["turns"][0]["sum"], 4) == -0.8472
    assert [value for _, value in outcome["values"]] == pytest.approx([0.4, 0.345, 1.9, 0.4, 0.18, 0.4, 1.9, 0.4])
    for term in (outcome, turns):
        values = [value for _, value in term["values"]]
        assert term["baseline"] == pytest.approx(np.mean(values))
        assert term["deviation"]["value"] == pytest.approx(np.std(values, ddof=1), abs=1e-6)
        assert term["scale"] == pytest.approx(term["deviation"]["value"] + 1e-4) and term["of"] == "the group’s 8"
    assert [each["values"] for each in turns["rewards"]] == [[0.2, 0.0, None], [0.0, 0.0, None]]
    assert why["rule"] == {"name": "mt_grpo", "turn_coef": 1.0, "scales": "each", "scale_rewards": "group"}
    assert why["says"].startswith("The position-aware rule of MT-GRPO")


def test_a_deviation_of_the_batch_names_its_step(tmp_path):
    outcome = asked(tmp_path, "mt_grpo", scale_rewards="batch")["turns"][0]["terms"][0]
    assert outcome["of"] == "the group’s 8" and outcome["deviation"]["of"] == "step 0’s 16"
    assert asked(tmp_path / "none", "mt_grpo", scale_rewards="none")["turns"][0]["terms"][0]["deviation"] is None


def test_a_mean_of_others_is_called_so(tmp_path):
    (term,) = asked(tmp_path, "leave_one_out")["turns"][0]["terms"]
    assert term["of"] == "the other 7" and len(term["values"]) == 8


def test_rewards_that_count_at_another_turn_are_told(tmp_path):
    moved = asked(tmp_path, "mt_grpo", number=2)["turns"]
    here = next(each for each in moved[0]["moved"] if each["kind"] == "here")
    assert (here["from"], here["to"], here["amount"]) == (2, [1], 0.5)
    assert [each["kind"] for each in moved[1]["moved"]] == ["away"] and moved[1]["moved"][0]["to"] == [1]
    later = asked(tmp_path / "to-go", {"name": "gtpo", "gamma": 0.5}, number=2)["turns"][0]
    told = next(each for each in later["moved"] if each["kind"] == "later")
    assert (told["from"], told["amount"], told["share"]) == (2, 0.5, 0.25)
    assert later["terms"][0]["rewards"][-1]["factors"] == [1.0, 0.5, 0.25]
    assert not any(turn["moved"] for turn in asked(tmp_path / "or", "grpo_or", number=2)["turns"])


def test_a_coefficient_is_told_apart_from_weights(tmp_path):
    why = asked(tmp_path, "reward_to_go", number=2, turn_coef=0.5)
    rows = why["turns"][0]["terms"][1]["rewards"]
    assert [row["coefficient"] for row in rows] == [0.5, 0.5]
    assert sum(row["earned"] for row in rows) == pytest.approx(0.5 * 0.7)


def test_a_rule_without_parts_has_the_groups_values(tmp_path, monkeypatch):
    keep_estimators(monkeypatch)

    @advantage_estimator("twice")
    def twice(batch):
        return 2 * reward_to_go(batch)

    why = asked(tmp_path, "twice")
    assert why["turns"][0]["terms"] == [] and why["turns"][0]["sum"] is None
    assert [member["reward"] for member in why["members"]][:2] == pytest.approx([0.6, 0.411667])


def number(text):
    return float(re.sub(r"[^\d.−-]", "", text).replace("−", "-"))


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_a_click_on_an_advantage_opens_its_parts(tmp_path):
    queries = opened(write_credited(tmp_path / "run", [EXAMPLE, OTHER], "mt_grpo"))
    with open_browser() as browser, serving(queries) as server, watched(browser) as page:
        page.goto(f"{server.url}#/trajectory?session={FIRST}")
        page.click("#turn-1 .open")
        panel = page.locator("#why-1")
        panel.wait_for()
        assert page.get_attribute("#turn-1 .open", "aria-expanded") == "true" and "why=1" in page.url
        shown = [number(text) for text in panel.locator(".part h5 > b").all_inner_texts()]
        assert shown == [-0.4734, -0.3738, -0.8472]
        assert shown[0] + shown[1] == pytest.approx(shown[2])
        text = panel.inner_text()
        assert "(0.40 − 0.7406) / (0.7194 + 0.0001)" in text and "shown as −0.85" in text
        assert "mt_grpo" in text and "turn_coef 1" in text and "none is masked" in text
        assert "members 3, 4 and 7 earned 0.50 at turn 2, and mt_grpo gives it to their turn 1" in text
        assert panel.locator(".strip").first.locator("circle").count() == 8
        panel.locator("a:text-is('3')").click()
        page.wait_for_function(
            "() => document.querySelector('#why-1')?.innerText.includes('Turn 2’s reward counts here')"
        )
        assert "mt_grpo gives turn 2’s 0.50 to turn 1" in page.inner_text("#why-1")
        page.keyboard.press("w")
        page.wait_for_selector(".why", state="detached")
        page.keyboard.press("w")
        page.wait_for_selector("#why-1")


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_names_of_rewards_stay_whole_beside_many_turns(tmp_path):
    members = [Member([float(number % 2), 0.2], [[0.1 * number, 0.3]] * 12) for number in range(4)]
    queries = opened(write_credited(tmp_path, [members], "reward_to_go"))
    with open_browser() as browser, serving(queries) as server, watched(browser) as page:
        page.goto(f"{server.url}#/trajectory?session={FIRST}&why=1")
        heads = page.locator("#why-1 .terms tbody th")
        heads.first.wait_for()
        lines = heads.evaluate_all("all => all.map(each => each.getBoundingClientRect().height / 15)")
        assert lines and max(lines) <= 7  # of at most one word each
