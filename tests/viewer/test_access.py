"""What weak eyes and screen readers need of each view: contrast, and a name for whatever can be used."""

from __future__ import annotations

from urllib.parse import urlencode

import pytest
from support.browser import missing, open_browser, serving, watched
from support.runs import write_run

from mt_grpo.viewer.runs import Runs

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

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
  const ids = [...document.querySelectorAll('[id]')].map(e => e.id)
  if (new Set(ids).size < ids.length) faults.push('two elements have one id')
  if (document.querySelectorAll('h1').length !== 1) faults.push('there is not one first heading')
  return faults
}"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for number, name in enumerate(("one", "two")):
        write_run(folder / name, steps=2, groups=2, seed=number)
    return Runs(folder)


def test_every_view_can_be_read_and_named(runs):
    rows = runs.queries("one")
    rows.answer("run", {})
    first, second = (row["session"] for row in rows.run.rows[2:4])
    asked = {
        "overview": {},
        "find": {"q": "capital"},
        "groups": {},
        "group": {"mode": "train", "step": 0, "k": 0, "group": 0},
        "trajectory": {"session": first},
        "context": {"session": first, "turn": 1},
        "apart": {"a": first, "b": second},
        "compare": {},
        "run": {},
    }
    with open_browser() as browser, serving(runs) as server, watched(browser) as page:
        page.goto(server.url)
        page.wait_for_selector(".overlaid .line")
        for view, parameters in {"runs": {}, **asked}.items():
            if view != "runs":
                page.evaluate("performance.clearMarks()")
                page.goto(f"{server.url}#/{view}?{urlencode({'run': 'one', **parameters})}")
                page.wait_for_function("name => performance.getEntriesByName('shown ' + name).length", arg=view)
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                assert page.evaluate(FAULTS) == [], (view, scheme)
