"""The page in a real browser: every view of runs, the paths through them, and hostile text that stays text."""

import shutil
import statistics
import time
from contextlib import suppress

import orjson
import pytest
from support.browser import address_has, count, go, opened, shown, texts, watched
from support.credited_runs import BRANCHED, EQUAL, EXAMPLE, WRONG, write_credited
from support.runs import HOSTILE, REWARDS, queries_of, write_begun, write_run

from mt_grpo.cli import main
from mt_grpo.rollout.runner import Branching
from mt_grpo.runlog import Batch, RunWriter, open_run
from mt_grpo.runlog.files import Heartbeat
from mt_grpo.trajectory import StopReason, Trajectory
from mt_grpo.viewer.runs import Runs

POISON = f"_{'w' * 90} {HOSTILE} \u202eside\u202c {'long words of a name ' * 8}"
VIEWS = ("overview", "find", "groups", "group", "trajectory", "compare", "context", "beside")
UNDER_WAY = {"session": "s", "turns": 2, "tokens": 31, "start": 0.0, "waits_for": "tools"}
UNDER_WAY["prompt"] = "What <b>now</b>?"
AT = {"step": 3, "of": 40, "waits_for": "sampling", "under_way": [UNDER_WAY]}

LINES = """cell => {
        const range = document.createRange()
        range.selectNodeContents(cell)
        return range.getClientRects().length
    }"""
"""How many lines the text of a cell takes."""

BOXES = """() => {
  const wrong = new Set()
  const style = e => getComputedStyle(e)
  const clips = e => { for (let p = e; (p = p.parentElement);) if (style(p).overflowX !== 'visible') return true }
  const name = e => `${e.tagName.toLowerCase()}.${e.getAttribute('class')}`
  if (document.documentElement.scrollWidth > innerWidth) wrong.add('the page is wider than the window')
  for (const e of document.querySelectorAll('body *')) {
    const box = e.getBoundingClientRect(), outer = e.parentElement.getBoundingClientRect()
    if (!box.width || e.closest('.unseen, .skip, svg svg, svg > *')) continue
    if (e.matches('.dot') && Math.max(box.width, box.height) > 10) wrong.add(`${name(e)} is ${box.width} wide`)
    if (clips(e)) continue
    if (box.right > innerWidth + 1 || box.left < -1) wrong.add(`${name(e)} leaves the window`)
    if (box.width > outer.width + 1.5 && [e, e.parentElement].every(each => style(each).display !== 'inline'))
      wrong.add(`${name(e)} is wider than its ${name(e.parentElement)}`)
  }
  const header = document.querySelector('header').getBoundingClientRect()
  if (header.height >= (innerWidth < 700 ? 60 : 96)) wrong.add(`the header is ${header.height} high`)
  return [...wrong]
}"""
"""What is wider than its parent or the window, unless it is cut off or scrolled there."""

FAULTS = """() => {
  const parsed = text => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number)
    return [r, g, b, a]
  }
  const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a), 1]
  const ancestors = e => (e ? [e, ...ancestors(e.parentElement)] : [])
  const light = color => {
    const [r, g, b] = color.map(x => (x /= 255) <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b
  }
  const contrast = e => {
    const chain = ancestors(e).map(each => getComputedStyle(each))
    if (chain.some(style => style.backgroundImage !== 'none')) return Infinity  // a pattern: there is no one colour
    const page = chain.reverse().reduce((below, style) => over(parsed(style.backgroundColor), below), [255, 255, 255])
    const [r, g, b, a] = parsed(getComputedStyle(e).color)
    const text = over([r, g, b, chain.reduce((a, style) => a * style.opacity, a)], page)
    const [high, low] = [light(text), light(page)].sort((a, b) => b - a)
    return (high + 0.05) / (low + 0.05)
  }
  const said = e => [...e.childNodes].some(node => node.nodeType === 3 && node.data.trim())
  const named = e => e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length || e.title ||
    e.querySelector('[aria-label], title')
  const seen = e => e.checkVisibility({ opacityProperty: true, visibilityProperty: true }) && e.getClientRects().length
  const used = 'a[href], button, input, select, textarea, summary, [role=columnheader], [tabindex="0"], svg[role=img]'
  const short = e => e.outerHTML.slice(0, 160)
  const faults = []
  for (const e of document.body.querySelectorAll('*')) {
    if (!seen(e)) continue
    const read = said(e) && !e.closest('svg, :disabled, .unseen')
    if (read && contrast(e) < 4.49) faults.push(`${contrast(e)} ${short(e)}`)
    if (e.matches(used) && !named(e)) faults.push(`no name: ${short(e)}`)
    if (e.closest('[aria-hidden=true]') && e.matches('a[href], button, input')) faults.push(`hidden: ${short(e)}`)
  }
  const probe = document.body.appendChild(document.createElement('i'))
  for (const pair of ['ok ok-soft', 'warn warn-soft', 'bad bad-soft', 'c1 hover', 'dim bg']) {
    const [ink, under] = pair.split(' ')
    probe.style = `color: var(--${ink}); background-color: var(--${under})`
    if (contrast(probe) < 4.5) faults.push(`${contrast(probe)} of ${pair}`)
  }
  probe.remove()
  const ids = [...document.querySelectorAll('[id]')].map(e => e.id)
  if (new Set(ids).size < ids.length) faults.push('two elements have one id')
  if (document.querySelectorAll('h1').length !== 1) faults.push('there is not one first heading')
  const main = document.querySelector('main').innerText
  if (main.length < 100 || main.includes('[object')) faults.push(`it says ${main}`)
  return faults
}"""
"""What weak eyes and screen readers need: contrast, and a name for whatever can be used. And there must be words."""


def counted(page, matched):
    """Waits until the table says that so many conversations match."""
    says = "n => document.querySelector('#said')?.textContent.startsWith(`${n.toLocaleString('en')} of `)"
    page.wait_for_function(says, arg=matched)


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """A folder of runs, and one of them: it goes on, and all its names are hostile and long."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "second", steps=1)
    at = {**AT, "under_way": [{**UNDER_WAY, "start": time.time(), "prompt": "What?" + POISON}]}
    write_begun(folder / "failed", POISON, f"model_name_or_path: {POISON!r}\n{POISON}")
    live = write_run(folder / f"<img src=x onerror=alert(1)>{'n' * 150}", steps=3, poison=POISON)
    with Heartbeat(live, lambda: at).beating():
        yield folder, live


@pytest.mark.parametrize("width", [1440, 1024, 390])
def test_all_stays_in_its_box_and_can_be_read_and_named(browser, poisoned, width):
    folder, live = poisoned
    poisoned_run = queries_of(live)
    calls = next(row["session"] for row in poisoned_run.run.rows if row["calls"])
    one = ("overview", "find?q=capital", *VIEWS[2:], "apart", "run", f"trajectory?read=1&session={calls}")
    one += (f"beside?a={calls}",)
    several = ("runs", "overview?run=failed", f"overview?run={live.name}", "find?run=second", "trajectory?run=second")
    several += (f"beside?run=second&other={live.name}&with=second%0A{live.name}",)
    wrong = []
    for queries, views in ((poisoned_run, one), (Runs(folder), several)):
        with opened(browser, queries, views[0], viewport={"width": width, "height": 860}) as page:
            for view in views:
                go(page, view)
                if view not in ("runs", "overview?run=failed") and "second" not in view:
                    page.wait_for_selector("#state .dot.run", state="attached")
                wrong += [(view[:12], words) for words in page.evaluate(BOXES)]
                for scheme in ("light", "dark"):
                    page.emulate_media(color_scheme=scheme)
                    wrong += [(view[:12], scheme, words) for words in page.evaluate(FAULTS)]
                if view != "runs":
                    assert count(page, "nav a[aria-current]") == 1 and (width > 390 or page.input_value("#views"))
                assert page.title() != "broken" and count(page, "main script, main img") == 0
    assert not wrong, "\n".join(map(str, wrong))


def test_a_narrow_window_has_the_answer_in_short(browser, queries):
    with opened(browser, queries, "trajectory", viewport={"width": 390, "height": 800}) as page:
        answer = page.inner_text("aside tr:has(th:text-is('answer')) td")
        assert answer in page.inner_text(".in-short") and page.locator(".in-short").bounding_box()["y"] < 250
        page.select_option("#views", "find")
        shown(page, "find")


def test_charts_show_values_and_lead_to_groups(page, queries):
    go(page, "overview")
    box = page.locator(".chart svg").first.bounding_box()
    at = box["x"] + 0.4 * box["width"], box["y"] + 80
    page.mouse.move(*at)
    step = int(page.inner_text(".tip.on b").split()[1])
    rewards = [row["reward"] for row in queries.run.rows if (row["mode"], row["step"]) == ("train", step)]
    assert page.inner_text(".tip.on tr:has-text('training batch') td") == f"{statistics.mean(rewards):.2f}"
    page.click("button:text-is('log')")
    page.click("text=every metric that was logged")
    page.fill("input[aria-label='Filter metrics by name']", "exact_match")
    address_has(page, "axis=log", "metric=exact_match")
    assert count(page, "h3:text-is('rewards/exact_match/mean')") == 1
    page.mouse.move(*at)
    step = page.inner_text(".tip.on b").split()[1]
    page.mouse.click(*at)
    page.wait_for_selector("a.grow")
    address_has(page, f"step={step}")
    assert page.inner_text("h2").startswith(f"Step {step}:")


def test_after_one_step_charts_are_not_blank(browser, tmp_path):
    with opened(browser, queries_of(write_run(tmp_path, steps=1)), "overview?metric=loss") as page:
        page.wait_for_selector(".single")
        titles = page.locator(".chart:has(.single)").locator("xpath=..").locator("h3").all_inner_texts()
        assert titles[0].startswith("Reward") and titles[1].startswith("Reward components") and "loss" in titles
        areas = page.locator(".area, .band").evaluate_all("all => all.map(each => each.getBBox().width)")
        assert len(areas) > 5 and min(areas) > 10  # a bar each
        assert count(page, ".health svg:not(:has(.point))") == 0
        assert page.inner_text("h3:has-text('Cut off')").endswith("at step 0")
        zeros = "chart('zeros', '', { steps: [0, 1], curves: [['a', [0, 0]]] })"
        page.evaluate(f"import('./charts.js').then(({{ chart }}) => document.querySelector('main').append({zeros}))")
        page.wait_for_selector("h3:has-text('zeros') + .chart text")
        shown_at = page.locator("h3:has-text('zeros') + .chart text").all_text_contents()
        assert shown_at[:3] == ["0.00", "0.50", "1.00"]


def test_a_finding_leads_to_its_conversations(page):
    go(page, "overview")
    page.click("text=compare")
    shown(page, "compare")
    broken = ".kinds button:has-text('broken')"
    assert page.get_attribute(broken, "aria-pressed") == "true" and count(page, ".sides section") == 2
    assert count(page, ".questions a") == int(page.inner_text(f"{broken} b"))
    page.click(broken)
    assert count(page, ".questions a") == 4
    figures = page.locator(".questions a span:last-child")
    figures.first.evaluate("each => { each.textContent = '−300.0 → −300.0' }")
    assert len(set(figures.evaluate_all("all => all.map(each => each.clientHeight)"))) == 1  # of one line


@pytest.mark.parametrize("text", ["reward<0.5 errors>0", '"capital of Peru"'])
def test_the_table_shows_what_a_filter_selects(page, queries, text):
    wanted = len(queries.select(text))
    go(page, "find")
    page.fill("#filter", text)
    counted(page, wanted)
    assert page.evaluate("new URLSearchParams(location.hash.split('?')[1]).get('q')") == text
    page.reload()
    counted(page, wanted)
    assert page.input_value("#filter") == text


def test_what_is_not_there_is_said(page):
    go(page, "find")
    page.fill("#filter", "rewrd<1")
    page.wait_for_selector("#said.wrong")
    assert "the nearest is 'reward'" in page.inner_text("#said")
    go(page, "trajectory?session=none")
    assert "no conversation 'none'" in page.inner_text("main")
    page.wrong.clear()  # the browser notes each status 400


def test_the_table_sorts_scrolls_and_opens(page, queries):
    go(page, "find")
    page.click(".th button:has-text('reward')")
    page.wait_for_selector("[aria-sort=descending]")
    best, total = max(row["reward"] for row in queries.run.rows), len(queries.run.rows)
    page.wait_for_selector(f".rows .tr:first-child .col-reward:text-is('{best:.2f}')")
    assert count(page, ".rows .tr") < 60 < total
    page.evaluate("document.querySelector('.table').scrollTop = 1e6")
    page.click(f".rows .tr[aria-rowindex='{total + 1}']")
    shown(page, "trajectory")
    page.go_back()
    page.wait_for_selector("[aria-sort=descending]")


def test_hits_are_marked_and_can_be_downloaded(page, queries):
    wanted = len(queries.select('"The capital of Peru is"'))
    go(page, "find?q=%22The+capital+of+Peru+is%22")
    page.wait_for_function("() => document.querySelector('#said').textContent.endsWith('every word read')")
    counted(page, wanted)
    assert page.inner_text(".hit mark >> nth=0") == "The capital of Peru is"
    assert "turn 1 · result" in page.inner_text(".hits >> nth=0")
    with page.expect_download() as download:
        page.click(".exports a:text-is('messages')")
    assert len(download.value.path().read_text().splitlines()) == wanted


def test_a_group_leads_to_its_neighbours_and_members(page):
    go(page, "group?mode=train&step=3&k=0&group=1")
    rewards = [float(text) for text in texts(page, "a.member .reward")]
    assert rewards == sorted(rewards, reverse=True) and len(rewards) == count(page, "a.member") == 4
    before = page.get_attribute(".turn-part >> nth=0", "class")
    page.click("button:has-text('entropy')")
    assert page.get_attribute(".turn-part >> nth=0", "class") != before
    page.click("button:has-text('seconds')")
    address_has(page, "colour=entropy", "width=seconds")
    page.click("text=next ▶")
    page.wait_for_function("() => document.title.startsWith('Group 3 of step 3')")
    page.locator("a.member").first.click()
    shown(page, "trajectory")
    page.click("text=◀ group")
    page.wait_for_function("() => document.title.startsWith('Group 3 of step 3')")


def test_what_the_server_found_is_linked(page, queries):
    """The run has no such conversations: the server's answers get some."""
    sessions = [row["session"] for row in queries.run.rows[30:33]]
    note = {"session": sessions[0], "member": 3, "turn": 2, "answer": "<b>Lima</b>"}
    page.route("**/api/group?*", lambda route: route.fulfill(json={**route.fetch().json(), "notes": [note]}))
    page.route("**/api/lost*", lambda route: route.fulfill(json={"sessions": sessions, "read": 9}))
    go(page, "group?mode=train&step=2&k=0&group=0")
    assert page.inner_text(".note").startswith("Member 3 had it: turn 2 has <b>Lima</b>")
    page.click(".note a")
    shown(page, "trajectory")
    address_has(page, sessions[0])
    go(page, "overview")
    page.click(".findings li:has-text('3 conversations') a")
    page.unroute_all()
    counted(page, 3)


def test_a_step_leads_to_its_groups_branches_and_members(browser, tmp_path):
    wide = {"viewport": {"width": 1280, "height": 900}}
    plain = queries_of(write_credited(tmp_path / "plain", [EXAMPLE, EQUAL, WRONG], "gtpo"))
    with opened(browser, plain, "groups", **wide) as page:
        assert count(page, "a.grow") == 3 and "3 groups, 1 with signal" in page.inner_text("h2")
        page.click("button:has-text('none 2')")
        address_has(page, "show=none")
        page.focus(".skip")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main" and count(page, "a.grow") == 2
        address_has(page, "show=none")
        page.click("button:has-text('all 3')")
        page.click("button:text-is('mean')")
        assert texts(page, "a.grow .n b") == ["2.60", "1.06", "0.20"]
        for key in ("j", "j", "Enter"):
            page.keyboard.press(key)
        page.wait_for_selector("a.member")
        assert "1.06 ± 0.99" in page.inner_text("main") and texts(page, "nav a[aria-current]") == ["Groups"]
        go(page, "overview")
        assert count(page, ".health tr:has-text('–') .dot.idle") == count(page, ".health tr:has-text('–')") > 0
    branched = write_credited(tmp_path / "branched", [BRANCHED], "branch_to_go", Branching(number=4, at=1))
    with opened(browser, queries_of(branched), "groups", **wide) as page:
        page.wait_for_selector("svg.branch")
        assert (count(page, ".branch circle"), count(page, ".branch .trunk")) == (5, 2)
        assert "3 copies" in page.text_content(".branch")
        page.click("a.grow")
        page.wait_for_selector("a.member")
        assert count(page, "a.member") == 5  # copies are in the line of their conversation
        assert "5 conversations and 3 copies" in page.inner_text("main")
        page.focus("button.same")
        assert page.inner_text("button.same") == "▸ 3 copies: members 6, 7, 8"
        page.keyboard.press("Enter")
        assert count(page, "a.member") == 8
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.wait_for_selector(".tokens")
        address_has(page, "train-000000-000000-000005")
        assert "a copy of member 5, which ended before it branched" in page.inner_text("main")
        page.go_back()
        page.wait_for_selector("a.member")
        assert count(page, ".of-branches svg") == 1


def test_a_conversation_that_failed_at_once_is_shown(browser, tmp_path):
    folder = write_run(tmp_path / "run", steps=1)
    prompt = [{"role": "user", "content": [{"type": "text", "text": "What is <b>it</b>?"}, {"type": "image"}]}]
    failed = Trajectory(prompt, stop_reason=StopReason.ENGINE_ERROR, error="The engine <i>failed</i>.", start=0.0)
    failed.where, failed.traceback = "env.py, line 3, in step", 'File "env.py", line 3, in step\n    return <b>'
    went_on = Trajectory(prompt, stop_reason=StopReason.ANSWERED, answer="", start=0.0)
    went_on.refusals = {"`seed` is <b>not</b> understood: leave it out.": 2}
    writer, batch = RunWriter(folder), Batch("train", 5, 0, 1, [0, 1], [failed, went_on], REWARDS)
    writer.append(writer.write(batch))
    first, second = (f"trajectory?session={session}" for session in batch.sessions)
    with opened(browser, queries_of(folder), first) as page:
        text = page.inner_text("main")
        for words in ("What is <b>it</b>?", "[image]", failed.error, 'File "env.py", line 3, in step', "return <b>"):
            assert words in text
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
        assert page.input_value("#filter") == "mode=train refused>0"
        go(page, second)
        assert "2 requests refused: `seed` is <b>not</b> understood: leave it out." in page.inner_text("main")


def test_a_run_is_followed_while_it_goes_on(browser, run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    index = folder / "rollouts" / "index.jsonl"
    lines = index.read_bytes().splitlines(keepends=True)
    first = next(place for place, line in enumerate(lines) if b'"credit"' in line and b'"train-' in line)
    index.write_bytes(b"".join(lines[:first]))  # the first batch is sampled, and not credited yet
    queries, total = queries_of(folder), len(open_run(run_folder).rows)
    with opened(browser, queries, "trajectory") as page, opened(browser, queries, "find") as table:
        assert "No advantage is written" in page.inner_text("main")
        index.write_bytes(b"".join(lines))
        counted(table, total)
        page.wait_for_selector(".turn.above, .turn.below")
        assert "No advantage" not in page.inner_text("main")
        assert f"{total} conversations" in page.inner_text("#state")


def test_a_run_under_way_is_shown_and_then_its_end(browser, run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    sampling = {**UNDER_WAY, "waits_for": "sampling", "prompt": UNDER_WAY["prompt"] + " and then" * 20}
    with opened(browser, queries_of(folder), viewport={"width": 1024, "height": 860}) as page:
        with Heartbeat(folder, lambda: {**AT, "under_way": [sampling]}).beating():
            go(page, "run")
            page.wait_for_selector(".flow .sampling")
            text = page.inner_text("main")
            for words in ("What <b>now</b>?", "running, waiting for sampling", "3 of 40"):
                assert words in text
            page.wait_for_selector("#state:has-text('running')")
            assert page.locator(".asked td").last.evaluate(LINES) == 1  # no word is broken
            assert count(page, "a.flow") == 16
            page.click("text=◀ step before")
            page.wait_for_function("() => location.hash.includes('step=10')")
        page.wait_for_selector("#state:has-text('stopped')")
        page.wait_for_selector("main:has-text('before its last step')")
        with suppress(KeyboardInterrupt), Heartbeat(folder, lambda: AT).beating():
            raise KeyboardInterrupt
        page.wait_for_function("() => document.querySelector('#state').textContent.endsWith('stopped: Ctrl-C')")
        page.locator("a.flow").first.click()
        shown(page, "trajectory")


def test_the_page_shows_a_run_from_its_first_second(browser, tmp_path):
    runs = tmp_path / "runs"
    failed = write_begun(runs / "failed", "no reward for row 3")
    with opened(browser, Runs(runs), "overview?run=failed") as page:
        page.wait_for_selector("main:has-text('no reward for row 3')")
        text = page.inner_text("main")
        assert "org/small" in text and "learning_rate: 0.00123" in text and "failed" in text
        with write_begun(runs / "young"):
            go(page, "overview?run=young")
            page.wait_for_selector("main:has-text('waiting for sampling')")
            assert "gtpo" in page.inner_text("main")
            write_run(tmp_path / "whole", steps=1)
            shutil.copytree(tmp_path / "whole", runs / "young", dirs_exist_ok=True)
            page.wait_for_selector("main:has-text('Reward components')")
    with opened(browser, queries_of(failed)) as page:
        for view, words in (("", "no reward for row 3"), ("find", "0 of 0 conversations"), ("run", "no reward")):
            page.goto(f"{page.address}#/{view}")
            page.wait_for_selector(f"main:has-text('{words}')")


def test_runs_are_compared_and_opened(browser, several_runs):
    with opened(browser, Runs(several_runs), "runs") as page:
        page.wait_for_selector(".overlaid .line")
        assert count(page, ".run-row:not(.th)") == 3
        assert count(page, ".overlaid .line:not(.faint)") == 2
        assert texts(page, ".asked thead th")[1:] == ["sweep/second", "first"]
        newest_first = texts(page, ".run-row:not(.th) .run-name a")
        assert newest_first == ["sweep/second", "first", "broken"]
        page.click(".th button:has-text('last 5')")
        best_first = texts(page, ".run-name a")
        page.click(".th button:has-text('last 5')")
        address_has(page, "sort=last")
        assert texts(page, ".run-name a") == [*best_first[1::-1], "broken"]
        page.click(".th button:text-is('run')")
        assert texts(page, ".run-name a") == ["sweep/second", "first", "broken"]
        page.keyboard.press("Enter")
        assert texts(page, ".run-name a") == ["broken", "first", "sweep/second"]
        page.reload()
        page.wait_for_selector(".overlaid .line")
        assert texts(page, ".run-name a") == ["broken", "first", "sweep/second"]
        page.click("button:has-text('finished')")
        assert count(page, ".run-row:not(.th)") == 1
        page.uncheck(".run-row input")
        page.wait_for_function("() => document.querySelectorAll('.overlaid .line:not(.faint)').length === 1")
        page.click(".run-row a:has-text('first')")
        shown(page, "overview")
        address_has(page, "run=first")
        assert page.get_by_label("Run", exact=True).input_value() == "first"
        page.click("nav a:has-text('Find')")
        page.fill("#filter", "mode=eval")
        counted(page, 8)
        page.reload()
        counted(page, 8)
        page.get_by_label("Run", exact=True).select_option("sweep/second")
        page.wait_for_function(
            "location.hash.includes('second') && document.querySelector('#filter')?.value === 'mode=eval'"
        )
        page.goto(f"{page.address}#/find?run=nowhere")
        page.wait_for_selector("#said.wrong:has-text(\"There is no run 'nowhere'\")")
        page.wrong.clear()  # the browser notes the status 400


def test_two_models_are_read_side_by_side(browser, tmp_path):
    for seed, name in enumerate(("third", "second", "first")):  # the latest comes first
        write_run(tmp_path / name, steps=1, groups=5, seed=seed, group_size_eval=3)
        (tmp_path / name / "metrics.jsonl").unlink()  # models that were evaluated have none
    with opened(browser, Runs(tmp_path), "runs") as page:
        page.check("[aria-label='compare third']")
        page.wait_for_selector(".asked thead th:text-is('third')")
        asked = Runs(tmp_path).answer("questions", {"runs": "first\nsecond\nthird"})["rows"]
        assert texts(page, ".asked tbody th") == [row["prompt"] for row in asked] and not count(page, ".overlaid")
        assert {each[-1] for each in texts(page, ".asked td")} == {"3"}  # `2 of 3`
        page.click(".asked th a >> nth=1")
        shown(page, "beside")

        def reads(side, name, session):
            whole = open_run(tmp_path / name).trajectory(session)
            said = page.locator(".sides > section").nth(side)
            words = " ".join(said.inner_text().split())
            turns = [turn["message"]["content"].partition(" <tool>")[0] for turn in whole["turns"]]
            replies = [reply["content"] for turn in whole["turns"] for reply in turn["replies"]]
            prompt = [f"{message['role']} {message['content']}" for message in whole["prompt"]]
            for each in (*prompt, *turns, *replies, whole["stop_reason"], f"reward {whole['index']['reward']:.2f}"):
                assert " ".join(each.split()) in words
            assert said.get_by_role("combobox").input_value() == name
            assert said.locator("[aria-pressed=true]").inner_text().startswith(f"{whole['index']['member'] + 1}: ")

        one, two, three = (cell["session"] for cell in asked[1]["cells"])
        reads(0, "first", one)
        reads(1, "second", two)
        page.locator(".sides > section").nth(1).locator("button:has-text('3: ')").click()
        address_has(page, f"a={one}", f"b={two[:-1]}{int(two[-1]) + 2}")
        page.wait_for_selector(".sides > section:nth-child(2) [aria-pressed=true]:has-text('3: ')")
        reads(1, "second", f"{two[:-1]}{int(two[-1]) + 2}")
        page.get_by_label("The other model").select_option("third")
        page.wait_for_selector(".sides > section[aria-label=third]")
        reads(1, "third", three)
        page.keyboard.press("ArrowRight")
        page.wait_for_selector("main:has-text('3 of 5')")
        reads(0, "first", asked[2]["cells"][0]["session"])
        reads(1, "third", asked[2]["cells"][2]["session"])
        left, right = (page.locator(".sides > section").nth(n).bounding_box() for n in (0, 1))
        assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]
        page.set_viewport_size({"width": 390, "height": 800})
        left, right = (page.locator(".sides > section").nth(n).bounding_box() for n in (0, 1))
        assert left["y"] + left["height"] <= right["y"] and left["x"] == right["x"]
        page.click("text=◀ questions")
        page.wait_for_selector(".asked thead th:text-is('third')")
        earlier = f"run=first&a=train-000000-000000-000000&other=second&b={two}&with=first%0Asecond"
        page.goto(f"{page.address}#/beside?{earlier}")  # of no question that all were asked last
        page.wait_for_selector(".sides > section[aria-label=second]")
        assert not count(page, ".sides select")


@pytest.fixture
def exported(run_folder, tmp_path):
    """The path of a file of what a filter lets through."""

    def export(text):
        path = tmp_path / "file.html"
        assert main(["view", str(run_folder), "--export", str(path), "--filter", text]) == 0
        return path

    return export


def test_the_exported_file_opens_offline_and_says_the_same(browser, exported, page):
    with watched(browser, offline=True) as file:
        file.address = exported("mode=train step<=2").as_uri()
        said = {}
        for view in VIEWS:
            go(file, view)
            said[view] = file.text_content("main")  # whatever of it is drawn
        assert file.title() != "broken" and count(file, "main script, main img") == 0
        go(file, "trajectory?session=train-000001-000000-000000&why=1")
        assert count(file, "#why-1 .part")  # a rule that records no parts: the group's values
        go(file, "find?sort=-reward")
        counted(file, 48)
        best = file.inner_text(".rows .col-reward >> nth=0")
    for view in ("overview", "group", "trajectory"):
        go(page, view)
        assert page.text_content("main") == said[view]
    go(page, "compare")
    assert page.text_content("main section >> nth=0") in said["compare"]
    go(page, "find?q=mode%3Dtrain+step%3C%3D2&sort=-reward")
    counted(page, 48)
    assert page.inner_text(".rows .col-reward >> nth=0") == best


def test_links_of_a_file_obey_its_filter(browser, exported, queries):
    text = "mode=train step=3 errors>0"
    rows = [queries.run.rows[place] for place in queries.select(text).tolist()]
    inside = {row["session"] for row in rows}
    of_group = [row for row in rows if row["group"] == rows[0]["group"]]
    with watched(browser, offline=True) as page:
        page.address = exported(text).as_uri()
        go(page, "overview")
        page.wait_for_selector(".findings a")
        for view in ("overview", "find", "groups", "trajectory"):
            go(page, view)
            hrefs = page.locator("main a[href^='#/']").evaluate_all("all => all.map(a => a.getAttribute('href'))")
            sessions = [href.split("session=")[1].split("&")[0] for href in hrefs if "#/trajectory?session=" in href]
            assert set(sessions) <= inside and (view != "find" or len(sessions) == len(inside)), view
        go(page, "beside")
        same = page.evaluate("document.querySelectorAll('.sides > section:first-child .choice button').length")
        assert same == (len(of_group) if len(of_group) > 1 else 0)
        go(page, "trajectory")
        apart = page.locator("a:text-is('difference to another')")
        if apart.count():  # where another of its group is in the file
            assert apart.get_attribute("href").split("b=")[1] in inside
        page.click("a.saw[href^='#/context?session='] >> nth=0")
        page.wait_for_selector(".seen .block")
        assert count(page, "#state a") == 0 and "conversations" in page.inner_text("#state")
        page.goto(f"{page.address}#/run")
        page.wait_for_selector("main:has-text('not how the run itself went')")
        page.goto(f"{page.address}#/context?session=train-000000-000000-000000")
        page.wait_for_selector("main:has-text('its filter leaves it out')")


def test_data_in_a_file_cannot_end_its_element(exported):
    text = exported("errors>0").read_text()
    data = text.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    assert "<" not in data and HOSTILE in str(orjson.loads(data))
    assert text.count("<script") == 2 and "http-equiv" in text
