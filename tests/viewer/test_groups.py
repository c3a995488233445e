"""The groups of a step, with branches and copies, as the server and the page have them."""

from __future__ import annotations

import statistics

import pytest
from support.browser import missing, open_browser, serving, watched
from support.credited_runs import EXAMPLE, Member, write_credited

from mt_grpo.errors import UserError
from mt_grpo.rollout.branching import Branching
from mt_grpo.runlog import open_run
from mt_grpo.viewer.queries import Queries

EQUAL = [Member([1.0, 0.9], [[0.2, 0.5], [None, None]]) for _ in range(8)]
WRONG = [Member([0.0, 0.2], [[0.0, 0.0], [None, None]]) for _ in range(8)]


EARLY = [Member([1.0, 0.9], [[0.2, 0.5], [0.0, 0.0]]) for _ in range(4)]
LATE = [Member([1.0, 0.9], [[0.0, 0.0], [0.2, 0.5]]) for _ in range(4)]
SHORT = [Member([1.0, 0.9], [[0.2, 0.5], [None, None]]) for _ in range(4)]
SHORTER = [Member([1.0, 0.9], [[0.0, 0.0]]) for _ in range(4)]


def branch(root, outcome, turns=2):
    rewards = [[0.2, 0.0], [None, None]][:turns]
    return Member(outcome, rewards, branch_of=root, shared=1)


BRANCHED = [
    Member([1.0, 0.9], [[0.2, 0.0], [None, None]]),
    branch(0, [0.0, 0.9]),
    branch(0, [0.0, 0.4]),
    branch(0, [0.0, 0.2]),
    Member([0.0, 0.1], [[0.2, 0.0]], [False]),  # it ended before it branched
    *(branch(4, [0.0, 0.1], turns=1) for _ in range(3)),
]


def opened(folder):
    queries = Queries(open_run(folder))
    queries.answer("run", {})
    return queries


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return opened(write_credited(tmp_path_factory.mktemp("plain"), [EXAMPLE, EQUAL, WRONG], "gtpo"))


@pytest.fixture(scope="module")
def branched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("branched")
    return opened(write_credited(folder, [BRANCHED], "branch_to_go", Branching(number=4, at=1)))


@pytest.mark.parametrize(
    ("rule", "group", "signal", "says"),
    [
        ("reward_to_go", EARLY + LATE, True, "all right"),
        ("grpo_mr", EARLY + LATE, False, "all earned 2.60, all right"),
        (
            "grpo_or",
            SHORT + [Member([1.0, 0.9], [[0.0, 0.0]])] * 4,
            False,
            "the rule does not use what differs, all right",
        ),
    ],
)
def test_a_signal_is_what_the_rule_makes_of_rewards(tmp_path, rule, group, signal, says):
    queries = opened(write_credited(tmp_path, [group], rule))
    [found] = queries.answer("groups", {})["groups"]
    assert (found["signal"], found["says"]) == (signal, says)
    assert queries.answer("overview", {})["health"]["groups without signal"] == [float(not signal)]
    assert len(queries.select("signal=0")) == (0 if signal else 8)


def test_groups_say_whether_they_teach(plain):
    view = plain.answer("groups", {})
    assert [group["signal"] for group in view["groups"]] == [True, False, False]
    assert [group["says"] for group in view["groups"]] == [
        "2 of 8 right",
        "all earned 2.60, all right",
        "all earned 0.20, all wrong",
    ]
    assert view["steps"] == {"step": [0], "groups": [3], "signal": [1]}
    rewards = [row["reward"] for row in plain.run.rows if row["group"] == 0]
    assert view["groups"][0]["mean"] == pytest.approx(statistics.mean(rewards))
    assert view["groups"][0]["deviation"] == pytest.approx(statistics.stdev(rewards))
    assert view["groups"][0]["stops"] == {"answered": 8}
    with pytest.raises(UserError, match="There is no step 7"):
        plain.answer("groups", {"step": "7"})


def test_branches_are_told_and_copies_not_counted(branched):
    (group,) = branched.answer("groups", {})["groups"]
    assert [member["root"] for member in group["members"]] == [1, 1, 1, 1, 5, 5, 5, 5]
    assert [member["shared"] for member in group["members"]] == [0, 1, 1, 1, 0, 1, 1, 1]
    assert [member["copy"] for member in group["members"]] == [False] * 5 + [True] * 3
    counted = [member["reward"] for member in group["members"][:5]]
    assert group["mean"] == pytest.approx(statistics.mean(counted))
    assert group["says"] == "1 of 5 right, 5 count, 3 are copies"
    one = branched.answer("group", {"step": "0", "k": "0", "group": "0"})
    assert one["mean"] == group["mean"] and one["deviation"] == pytest.approx(statistics.stdev(counted))
    for member in group["members"]:
        whole = branched.answer("trajectory", {"session": member["session"]})
        assert whole["group"]["mean"] == group["mean"] and whole["branch"] == member
    rows = branched.answer("find", {"q": "copy=1"})["rows"]
    assert [row["member"] for row in rows] == [6, 7, 8] and all(row["copy"] for row in rows)
    assert branched.answer("find", {"q": f"spread>{group['deviation'] - 1e-6} spread<{group['deviation'] + 1e-6}"})[
        "matched"
    ] == len(group["members"])
    why = branched.answer("why", {"session": "train-000000-000000-000001"})
    assert [member["copy"] for member in why["members"]] == [False] * 5 + [True] * 3
    assert why["turns"][1]["terms"][0]["of"] == "its other 3 branches"


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_a_step_leads_to_its_groups_branches_and_members(plain, branched):
    with open_browser() as browser:
        with serving(plain) as server, watched(browser, viewport={"width": 1280, "height": 900}) as page:
            page.goto(f"{server.url}#/groups")
            page.wait_for_selector(".grow")
            assert page.locator("a.grow").count() == 3 and "3 groups, 1 with signal" in page.inner_text("h2")
            page.click("button:has-text('none 2')")
            assert page.locator("a.grow").count() == 2 and "show=none" in page.url
            page.click("button:has-text('all 3')")
            page.click("button:text-is('mean')")
            assert page.locator("a.grow .n b").all_inner_texts() == ["2.60", "1.06", "0.20"]
            page.keyboard.press("j")
            page.keyboard.press("j")
            page.keyboard.press("Enter")
            page.wait_for_selector("a.member")
            assert "1.06 ± 0.99" in page.inner_text("main")
            assert page.locator("nav a[aria-current]").inner_text() == "Groups"
        with serving(branched) as server, watched(browser, viewport={"width": 1280, "height": 900}) as page:
            page.goto(f"{server.url}#/groups")
            page.wait_for_selector("svg.branch")
            assert page.locator(".branch circle").count() == 5 and page.locator(".branch .trunk").count() == 2
            assert "3 copies" in page.locator(".branch").text_content()
            page.click("a.grow")
            page.wait_for_selector("a.member")
            assert page.locator("a.member").count() == 5  # copies are in the line of their conversation
            assert "5 conversations and 3 copies" in page.inner_text("main")
            page.focus("button.same")
            assert page.inner_text("button.same") == "▸ 3 copies: members 6, 7, 8"
            page.keyboard.press("Enter")
            assert page.locator("a.member").count() == 8
            page.keyboard.press("Tab")
            page.keyboard.press("Enter")
            page.wait_for_selector(".tokens")
            assert "train-000000-000000-000005" in page.url
            assert "a copy of member 5, which ended before it branched" in page.inner_text("main")
            page.go_back()
            page.wait_for_selector("a.member")
            assert page.locator(".of-branches svg").count() == 1
