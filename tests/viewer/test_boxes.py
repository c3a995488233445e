"""The page of a run that goes on, in windows of three sizes: what is drawn stays in its box, whatever names hold."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
from support.browser import missing, open_browser, serving, watched
from support.runs import HOSTILE, write_run

from mt_grpo.runlog import open_run
from mt_grpo.runlog.heartbeat import Heartbeat
from mt_grpo.viewer.queries import Queries
from mt_grpo.viewer.runs import Runs

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

POISON = f"_{'w' * 90} {HOSTILE} \u202eside\u202c {'long words of a name ' * 8}"
VIEWS = (
    "overview",
    "find",
    "groups",
    "group",
    "trajectory",
    "trajectory?read=1",
    "context",
    "apart",
    "compare",
    "run",
)

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
  if (header.height > (innerWidth < 700 ? 60 : 96)) wrong.add(`the header is ${header.height} high`)
  return [...wrong]
}"""
"""What is wider than its parent or the window, unless it is cut off or scrolled there."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    under_way = {"session": "s", "turns": 2, "tokens": 31, "start": time.time(), "waits_for": "tools"}
    at = {"step": 3, "of": 40, "waits_for": "sampling", "under_way": [{**under_way, "prompt": "What?" + POISON}]}
    write_run(folder / "second", steps=1)
    with suppress(ValueError), Heartbeat(folder / "failed", lambda: at).beating():
        raise ValueError(POISON)
    (folder / "failed" / "config.yaml").write_text(f"model_name_or_path: {POISON!r}\n{POISON}")
    live = write_run(folder / f"<img src=x onerror=alert(1)>{'n' * 150}", steps=3, poison=POISON)
    with Heartbeat(live, lambda: at).beating():
        yield folder


@pytest.mark.parametrize("width", [1440, 1024, 390])
def test_nothing_of_a_live_run_leaves_its_box(folder, width):
    live = next(each for each in folder.iterdir() if each.name.startswith("<"))
    with (
        open_browser() as browser,
        serving(Queries(open_run(live))) as one,
        serving(Runs(folder)) as several,
        watched(browser, viewport={"width": width, "height": 860}) as page,
    ):
        wrong = {}
        for server, views in ((one, VIEWS), (several, ("runs", "overview?run=failed", f"overview?run={live.name}"))):
            page.goto(server.url)
            page.wait_for_function("() => document.querySelector('main:not([aria-busy]) *')")
            for view in views:
                page.evaluate("performance.clearMarks()")
                page.evaluate("where => { location.hash = '#/' + where }", view)
                page.wait_for_function(
                    "name => performance.getEntriesByName('shown ' + name).length", arg=view.split("?")[0]
                )
                if view not in ("runs", "overview?run=failed"):
                    page.wait_for_selector("#state .dot.run", state="attached")
                wrong |= {f"{view[:12]}: {words}": width for words in page.evaluate(BOXES)}
        assert not wrong, "\n".join(wrong)
