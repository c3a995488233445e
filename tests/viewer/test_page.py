"""The page in a real browser: every view without an error, the paths through it, and hostile text that stays text."""

from __future__ import annotations

import re
import shutil

import orjson
import pytest
from support.browser import missing, open_browser, serving, watched
from support.runs import HOSTILE, REWARDS, write_run

from mt_grpo.cli import main
from mt_grpo.runlog import Batch, RunWriter, open_run
from mt_grpo.trajectory import StopReason, Trajectory, Turn
from mt_grpo.viewer.queries import Queries

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

VIEWS = ("overview", "find", "groups", "group", "trajectory", "compare", "context")


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def window(browser, server):
    with watched(browser, viewport={"width": 1400, "height": 860}) as page:
        page.goto(server.url)
        shown(page, "overview")
        yield page


@pytest.fixture
def page(window):
    """The page, which all tests share; nothing may go wrong in it."""
    yield window
    assert not window.wrong


DRAWN = """
() => [...document.querySelectorAll('.chart, .tree, .overlaid')].every(e => !e.clientWidth || e.childElementCount)
"""
"""A drawing is made when its width is known."""


def shown(page, view):
    page.wait_for_function("name => performance.getEntriesByName('shown ' + name).length", arg=view)
    page.wait_for_function(DRAWN)


def counted(page, matched):
    """Waits until the table says that so many conversations match."""
    says = "n => document.querySelector('#said')?.textContent.startsWith(`${n.toLocaleString('en')} of `)"
    page.wait_for_function(says, arg=matched)


def go(page, where):
    """Opens a view anew."""
    page.evaluate("performance.clearMarks()")
    page.evaluate("where => { location.hash = '#/' + where }", where)
    shown(page, where.split("?")[0])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_is_shown_without_an_error(browser, server, scheme):
    with watched(browser, viewport={"width": 1400, "height": 860}, color_scheme=scheme) as page:
        page.goto(server.url)
        shown(page, "overview")
        for view in VIEWS:
            go(page, view)
            assert len(page.inner_text("main")) > 100 and "[object" not in page.inner_text("main")
            assert page.locator("nav a[aria-current]").count() == 1
            wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide == 0, view
        assert page.evaluate("performance.getEntriesByName('first-contentful-paint').length") == 1


def test_a_narrow_window_is_not_too_narrow(browser, server):
    with watched(browser, viewport={"width": 390, "height": 800}) as page:
        page.goto(server.url)
        shown(page, "overview")
        for view in VIEWS:
            go(page, view)
            wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, view
            assert page.locator("header").bounding_box()["height"] < 60 and page.input_value("#views")
        go(page, "trajectory")
        answer = page.inner_text("aside tr:has(th:text-is('answer')) td")
        assert answer in page.inner_text(".in-short") and page.locator(".in-short").bounding_box()["y"] < 250
        page.select_option("#views", "find")
        shown(page, "find")


RATIO = """names => {
  const probe = document.body.appendChild(document.createElement('i'))
  const of = name => {
    probe.style.color = `var(${name})`
    const parts = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map(x => x / 255)
    const [r, g, b] = parts.map(x => (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b
  }
  const ratios = names.map(([ink, under]) => [of(ink), of(under)].sort((x, y) => y - x))
  return ratios.map(([light, dark]) => (light + 0.05) / (dark + 0.05))
}"""
PAIRS = [
    ["--ok", "--ok-soft"],
    ["--warn", "--warn-soft"],
    ["--bad", "--bad-soft"],
    ["--c1", "--hover"],
    ["--dim", "--bg"],
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_and_tokens_are_reached_by_keys(browser, server, scheme):
    with watched(browser, color_scheme=scheme) as page:
        page.goto(f"{server.url}#/trajectory")
        page.wait_for_selector(".tokens")
        assert min(page.evaluate(RATIO, PAIRS)) >= 4.5
        page.keyboard.press("ArrowRight")
        assert page.locator(".tokens .at").count() == 1
        assert page.evaluate("() => document.querySelector('.tokens span').classList.contains('at')")
        unnamed = (
            "[...document.querySelectorAll('button, a, input, select')].filter(e => e.offsetParent && !e.innerText"
        )
        assert page.evaluate(f"() => {unnamed} && !e.ariaLabel && !e.labels?.length && !e.title).length") == 0


def test_charts_show_values_and_lead_to_groups(page, queries):
    go(page, "overview")
    box = page.locator(".chart svg").first.bounding_box()
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 80)
    step = int(page.inner_text(".tip.on b").split()[1])
    rewards = [row["reward"] for row in queries.run.rows if row["mode"] == "train" and row["step"] == step]
    assert page.inner_text(".tip.on tr:has-text('training batch') td") == f"{sum(rewards) / len(rewards):.2f}"
    page.click("button:text-is('log')")
    assert "axis=log" in page.url
    page.click("text=every metric that was logged")
    page.fill("input[aria-label='Filter metrics by name']", "exact_match")
    assert page.locator("h3:text-is('rewards/exact_match/mean')").count() == 1 and "metric=exact_match" in page.url
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 80)
    step = page.inner_text(".tip.on b").split()[1]
    page.mouse.click(box["x"] + 0.4 * box["width"], box["y"] + 80)
    page.wait_for_selector("a.grow")
    assert f"step={step}" in page.url and page.inner_text("h2").startswith(f"Step {step}:")


def test_after_one_step_charts_are_not_blank(browser, tmp_path):
    with serving(Queries(open_run(write_run(tmp_path / "one", steps=1)))) as server, watched(browser) as page:
        page.goto(f"{server.url}#/overview?metric=loss")
        shown(page, "overview")
        page.wait_for_selector(".single")
        titles = page.locator(".chart:has(.single)").locator("xpath=..").locator("h3").all_inner_texts()
        assert titles[0].startswith("Reward") and titles[1].startswith("Reward components") and "loss" in titles
        areas = page.locator(".area, .band").evaluate_all("all => all.map(each => each.getBBox().width)")
        assert len(areas) > 5 and min(areas) > 10  # a bar each
        assert page.locator(".health svg:not(:has(.point))").count() == 0
        assert page.inner_text("h3:has-text('Cut off')").endswith("at step 0")


def test_a_finding_leads_to_its_conversations(page):
    go(page, "overview")
    page.click("text=compare")
    shown(page, "compare")
    assert page.get_attribute(".kinds button:has-text('broken')", "aria-pressed") == "true"
    count = int(page.inner_text(".kinds button:has-text('broken') b"))
    assert page.locator(".questions a").count() == count
    assert page.locator(".sides section").count() == 2
    page.click(".kinds button:has-text('broken')")
    assert page.locator(".questions a").count() == 4


@pytest.mark.parametrize("text", ["stop=timeout", "reward<0.5 errors>0", '"capital of Peru"', "mismatch>.1"])
def test_the_table_counts_what_a_loop_counts(page, queries, text):
    peru = {row["session"] for row in queries.run.rows if "capital of Peru" in row["prompt"]}
    rules = {
        "stop=timeout": lambda row: row["stop"] == "timeout",
        "reward<0.5 errors>0": lambda row: row["reward"] < 0.5 and sum(row["errors"]) > 0,
        '"capital of Peru"': lambda row: row["session"] in peru,
        "mismatch>.1": lambda row: (row["mismatch"] or 0) > 0.1,
    }
    wanted = sum(map(rules[text], queries.run.rows))
    go(page, "find")
    page.fill("#filter", text)
    counted(page, wanted)
    assert page.evaluate("new URLSearchParams(location.hash.split('?')[1]).get('q')") == text
    page.reload()
    counted(page, wanted)
    assert page.input_value("#filter") == text


def test_a_bad_filter_is_explained(page):
    go(page, "find")
    page.fill("#filter", "rewrd<1")
    page.wait_for_selector("#said.wrong")
    assert "the nearest is 'reward'" in page.inner_text("#said")
    page.wrong.clear()  # the browser notes the status 400


def test_the_table_sorts_scrolls_and_opens(page, queries):
    go(page, "find")
    page.click(".th button:has-text('reward')")
    page.wait_for_selector("[aria-sort=descending]")
    best = max(row["reward"] for row in queries.run.rows)
    page.wait_for_function(
        "best => document.querySelector('.rows .col-reward')?.textContent === best", arg=f"{best:.2f}"
    )
    total = len(queries.run.rows)
    drawn = page.locator(".rows .tr").count()
    assert drawn < 60 < total
    page.evaluate("document.querySelector('.table').scrollTop = 1e6")
    page.wait_for_selector(f".rows .tr[aria-rowindex='{total + 1}']")
    page.click(f".rows .tr[aria-rowindex='{total + 1}']")
    shown(page, "trajectory")
    page.go_back()
    page.wait_for_selector("[aria-sort=descending]")


def test_a_group_leads_to_its_neighbours_and_members(page):
    go(page, "group?mode=train&step=3&k=0&group=1")
    assert page.locator("a.member").count() == 4
    rewards = [float(text) for text in page.locator("a.member .reward").all_inner_texts()]
    assert rewards == sorted(rewards, reverse=True)
    before = page.locator(".turn-part").first.evaluate("part => part.className")
    page.click("button:has-text('entropy')")
    assert page.locator(".turn-part").first.evaluate("part => part.className") != before
    page.click("button:has-text('seconds')")
    assert "colour=entropy" in page.url and "width=seconds" in page.url
    page.click("text=next ▶")
    page.wait_for_function("() => document.title.startsWith('Group 3 of step 3')")
    page.locator("a.member").first.click()
    shown(page, "trajectory")
    page.click("text=◀ group")
    page.wait_for_function("() => document.title.startsWith('Group 3 of step 3')")


def test_a_member_that_had_the_answer_is_named(page, queries):
    """The run has no such member: the server's answer gets one."""
    row = queries.run.rows[20]

    def add_note(route):
        note = {"session": row["session"], "member": 3, "turn": 2, "answer": "<b>Lima</b>"}
        route.fulfill(json={**route.fetch().json(), "notes": [note]})

    page.route("**/api/group*", add_note)
    go(page, "group?mode=train&step=2&k=0&group=0")
    page.unroute("**/api/group*")
    assert page.inner_text(".note").startswith("Member 3 had it: turn 2 has <b>Lima</b>")
    page.click(".note a")
    shown(page, "trajectory")
    assert row["session"] in page.url


def test_answers_that_were_lost_are_in_the_overview(page, queries):
    """The run has none: the server's answer gets some."""
    sessions = [row["session"] for row in queries.run.rows[30:33]]
    page.route("**/api/lost*", lambda route: route.fulfill(json={"sessions": sessions, "read": 9}))
    go(page, "overview")
    page.click(".findings li:has-text('3 conversations') a")
    page.unroute("**/api/lost*")
    counted(page, 3)


def test_a_token_is_pointed_at_kept_and_left(page, queries):
    row = next(row for row in queries.run.rows if (row["mismatch"] or 0) > 0.3)
    whole = queries.answer("trajectory", {"session": row["session"]})
    go(page, f"trajectory?session={row['session']}")
    spans = page.locator(".tokens span")
    assert spans.count() == sum(row["tokens"])
    written = [text for text, turn in zip(whole["tokens"]["texts"], whole["tokens"]["turn"], strict=True) if turn >= 0]
    assert "".join(spans.all_text_contents()).replace("⏎", "") == "".join(written)
    spans.nth(1).hover()
    page.wait_for_selector("aside td:has-text('turn 1'), aside th:has-text('id · position')")
    page.click("button:has-text('engine − trainer')")
    page.keyboard.press("n")
    difference = page.inner_text("tr:has(th:text-is('engine − trainer')) td")
    assert abs(float(difference.replace("−", "-"))) == pytest.approx(row["mismatch"], abs=2e-3)
    at = page.locator(".tokens .at")
    assert at.count() == 1 and at.evaluate("span => span.className") != "at"  # it is shaded
    page.keyboard.press("ArrowRight")
    assert page.inner_text("tr:has(th:text-is('engine − trainer')) td") != difference
    page.keyboard.press("Escape")
    assert page.locator(".tokens .at").count() == 0


COPIED = """selector => {
  getSelection().selectAllChildren(document.querySelector(selector))
  return getSelection().toString()
}"""


def test_what_is_copied_has_none_of_the_pages_signs(browser, tmp_path):
    tokens = [each for each in range(300, 4000, 7)][:60]
    made = Trajectory([{"role": "user", "content": "?"}], stop_reason=StopReason.ANSWERED, answer="Lima")
    newline = open_run(write_run(tmp_path / "other", steps=1)).tokenizer.encode("one\n\ntwo\n").ids
    made.tree.add_turn([5, 6], [*newline, *tokens], [-0.1] * (len(newline) + len(tokens)))
    made.turns = [Turn(0, {"role": "assistant", "content": "one"}, num_tokens=len(newline) + len(tokens))]
    made.rewards = {"outcome": {"exact_match": 1.0}}
    writer, batch = RunWriter(tmp_path / "run"), Batch("train", 0, 0, 1, [0], [made], REWARDS)
    saved = writer.save_tokenizer(lambda folder: shutil.copytree(tmp_path / "other" / "tokenizer", folder))
    writer.append([*saved, *writer.write(batch)])
    with serving(Queries(open_run(tmp_path / "run"))) as server, watched(browser) as page:
        page.goto(f"{server.url}#/trajectory")
        page.wait_for_selector(".tokens i")
        assert page.evaluate(COPIED, ".tokens").startswith("one\n\ntwo\n")
        assert page.evaluate("getComputedStyle(document.querySelector('.tokens i'), '::before').content") == '"⏎"'
        page.goto(f"{server.url}#/context?turn=1")
        page.wait_for_selector(".seen .block")
        assert "+" not in page.evaluate(COPIED, ".seen")
        page.goto(f"{server.url}#/find")
        page.wait_for_selector(".rows .col-answer")
        assert page.inner_text(".rows .col-answer") == "✓ Lima"
        assert page.evaluate(COPIED, ".rows .col-answer").strip() == "Lima"


def test_tokens_are_shaded_by_each_number(page, queries):
    row = next(row for row in queries.run.rows if row["turns"] == 3 and row["mode"] == "train")
    for shade in ("log-prob", "engine − trainer", "ratio", "entropy", "advantage"):
        go(page, f"trajectory?session={row['session']}&shade={shade}")
        assert page.get_attribute(f".choice button:text-is('{shade}')", "aria-pressed") == "true"
        classes = page.evaluate("[...document.querySelectorAll('.tokens span')].map(span => span.className)")
        assert any(classes) and all(re.fullmatch(r"[pmvtg]\d|", each) for each in classes)


def test_a_fork_is_drawn_in_a_lane_of_its_own(page, queries):
    row = next(row for row in queries.run.rows if row["forks"])
    go(page, f"trajectory?session={row['session']}")
    assert page.locator(".tree .fork").count() == row["forks"]
    page.locator(".tree .of-turn").last.click()
    assert page.locator(".turn").last.is_visible()


def test_hostile_text_stays_text(page, queries):
    row = next(row for row in queries.run.rows if row["calls"] and row["mode"] == "train")
    for where in (
        f"trajectory?session={row['session']}",
        f"group?mode=train&step={row['step']}&k=0&group={row['group']}",
    ):
        go(page, where)
        assert "broken" != page.title()
        assert page.locator("main script, main img").count() == 0
    go(page, f"trajectory?session={row['session']}")
    assert HOSTILE in page.inner_text(".said:not(.prompt)")


def test_a_conversation_that_failed_at_once_is_shown(browser, tmp_path):
    folder = write_run(tmp_path / "run", steps=1)
    prompt = [{"role": "user", "content": [{"type": "text", "text": "What is <b>it</b>?"}, {"type": "image"}]}]
    failed = Trajectory(prompt, stop_reason=StopReason.ENGINE_ERROR, error="The engine <i>failed</i>.", start=0.0)
    went_on = Trajectory(prompt, stop_reason=StopReason.ANSWERED, answer="", start=0.0)
    went_on.refusals = {"`seed` is <b>not</b> understood: leave it out.": 2}
    failed.where, failed.traceback = "env.py, line 3, in step", 'File "env.py", line 3, in step\n    return <b>'
    writer, batch = RunWriter(folder), Batch("train", 5, 0, 1, [0, 1], [failed, went_on], REWARDS)
    writer.append(writer.write(batch))
    with serving(Queries(open_run(folder))) as server, watched(browser) as page:
        page.goto(f"{server.url}#/trajectory?session={batch.sessions[0]}")
        shown(page, "trajectory")
        text = page.inner_text("main")
        assert "What is <b>it</b>?" in text and "[image]" in text and "The engine <i>failed</i>." in text
        assert 'File "env.py", line 3, in step' in text and "return <b>" in text
        go(page, "group?mode=train&step=5&k=0&group=0")
        assert "no reward" in page.inner_text("main")
        go(page, "overview")
        page.click("text=show them >> nth=0")
        counted(page, 1)
        go(page, "overview")
        refused = page.locator("li:has-text('Requests were refused in 1 of ')")
        assert "`seed` is <b>not</b> understood" in refused.inner_text()
        refused.locator("text=show them").click()
        counted(page, 1)
        assert page.input_value("#filter") == "refused>0"
        go(page, f"trajectory?session={batch.sessions[1]}")
        assert "2 requests refused: `seed` is <b>not</b> understood: leave it out." in page.inner_text("main")


def test_what_is_not_there_is_said(page):
    go(page, "trajectory?session=none")
    assert "no conversation 'none'" in page.inner_text("main")
    page.wrong.clear()  # the browser notes the status 400


def test_a_run_is_followed_while_it_goes_on(browser, tmp_path):
    whole, folder = write_run(tmp_path / "whole", steps=2), tmp_path / "run"
    shutil.copytree(whole, folder)
    index = folder / "rollouts" / "index.jsonl"
    lines = index.read_bytes().splitlines(keepends=True)
    first = next(place for place, line in enumerate(lines) if b'"credit"' in line and b'"train-' in line)
    index.write_bytes(b"".join(lines[:first]))  # the first batch is sampled, and not credited yet
    with serving(Queries(open_run(folder))) as server, watched(browser) as page, watched(browser) as table:
        page.goto(f"{server.url}#/trajectory")
        table.goto(f"{server.url}#/find")
        shown(page, "trajectory")
        shown(table, "find")
        assert "No advantage is written" in page.inner_text("main")
        index.write_bytes(b"".join(lines))
        counted(table, len(open_run(whole).rows))
        page.wait_for_selector(".turn.above, .turn.below")
        assert "No advantage" not in page.inner_text("main")
        assert f"{len(open_run(whole).rows)} conversations" in page.inner_text("#state")


def test_the_exported_file_opens_offline_and_says_the_same(browser, run_folder, server, tmp_path):
    path = tmp_path / "file.html"
    assert main(["view", str(run_folder), "--export", str(path), "--filter", "mode=train step<=2"]) == 0
    with watched(browser, offline=True) as page:
        page.goto(path.as_uri())
        shown(page, "overview")
        texts = {}
        for view in VIEWS:
            go(page, view)
            texts[view] = page.text_content("main")  # whatever of it is drawn
        assert page.title() != "broken" and page.locator("main script, main img").count() == 0
        go(page, "trajectory?session=train-000001-000000-000000&why=1")
        assert page.locator("#why-1 .part").count()  # a rule that records no parts: the group's values
        go(page, "find?sort=-reward")
        counted(page, 48)
        best = page.inner_text(".rows .col-reward >> nth=0")
    with watched(browser) as page:
        page.goto(server.url)
        shown(page, "overview")
        assert page.text_content("main") == texts["overview"]
        for view in ("group", "trajectory"):
            go(page, view)
            assert page.text_content("main") == texts[view]
        go(page, "compare")
        assert page.text_content("main section >> nth=0") in texts["compare"]
        go(page, "find?q=mode%3Dtrain+step%3C%3D2&sort=-reward")
        counted(page, 48)
        assert page.inner_text(".rows .col-reward >> nth=0") == best


def test_data_in_a_file_cannot_end_its_element(run_folder, tmp_path):
    path = tmp_path / "file.html"
    main(["view", str(run_folder), "--export", str(path), "--filter", "errors>0"])
    text = path.read_text()
    data = text.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    assert "<" not in data and HOSTILE in str(orjson.loads(data))
    assert text.count("<script") == 2 and "http-equiv" in text
