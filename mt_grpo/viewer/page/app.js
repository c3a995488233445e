// The frame: which view is shown, the run's state above it, and what the run has written since.

import { ask, current, exported, missing } from './api.js'
import { apart } from './apart.js'
import { beside } from './beside.js'
import { compare } from './compare.js'
import { context } from './context.js'
import { h, link, nothing, number, plural } from './dom.js'
import { find } from './find.js'
import { group } from './group.js'
import { groups } from './groups.js'
import { overview } from './overview.js'
import { DOTS, expect, runs } from './runs.js'
import { run } from './run.js'
import { trajectory } from './trajectory.js'

/** Name and function; those without a name are opened from a view, which stays the current one above. */
const VIEWS = {
  runs: ['Runs', runs],
  overview: ['Overview', overview],
  find: ['Find', find],
  groups: ['Groups', groups],
  group: [null, group, 'groups'],
  trajectory: ['Trajectory', trajectory],
  compare: ['Before / after', compare],
  run: ['Run', run],
  context: [null, context, 'trajectory'],
  apart: [null, apart, 'trajectory'],
  beside: [null, beside, 'runs'],
}
const POLL = 2000
const KEEP = 150

const main = document.querySelector('main')
const nav = document.querySelector('nav')
let seen = {}
let several = []
let shown = { keys: {} }
let version = null
let turn = 0

async function show() {
  const [path, text = ''] = location.hash.replace(/^#\/?/, '').split('?')
  const parameters = new URLSearchParams(text)
  const name = path in VIEWS && (path !== 'runs' || several.length) ? path : several.length ? 'runs' : 'overview'
  const mine = ++turn
  shown = { keys: {} }
  choose(name, parameters.get('run'))
  const above = VIEWS[name][2] ?? name
  const views = Object.entries(VIEWS).filter(([each, [title]]) =>
    title && !(exported && each === 'run') && (each === 'runs' ? several.length : !several.length || current.run))
  nav.replaceChildren(...views.map(([each, [title]]) =>
    h('a', { href: seen[each] ?? link(each), 'aria-current': each === above ? 'page' : null }, title)))
  document.querySelector('#views').replaceChildren(...views.map(([each, [title]]) => h('option', { value: each, selected: each === above }, title)))
  main.setAttribute('aria-busy', 'true')
  const here = h('div')  // of this view alone: one that is late writes into what is no longer shown
  main.replaceChildren(here)
  let found
  try {
    found = await VIEWS[name][1](here, parameters)
  } catch (error) {
    here.replaceChildren(nothing(error.message))
    found = { title: VIEWS[above][0], refresh: show }  // once the run has written more
    if (error.name !== 'Error') console.error(error)  // a mistake of ours, and no answer of the server
  }
  if (mine !== turn) return
  shown = found
  if (here.querySelector('h2, h3, h4')?.tagName !== 'H2') here.before(h('h2', { class: 'unseen' }, found.title))
  if (name === 'groups' || name === 'trajectory') seen[name] = location.hash || link(name)
  document.title = `${found.title} · mt-grpo view`
  main.removeAttribute('aria-busy')
  window.scrollTo(0, history.state?.scrolled ?? 0)  // where one was, if one goes back
  performance.mark(`shown ${name}`)
}

/** The run that the views are of, where there are several: the one that the address names. */
function choose(view, run) {
  if (!several.length) return
  const chosen = run ?? (view === 'runs' ? current.run : several[0])
  if (chosen === current.run) return
  seen = {}
  version = null
  current.run = chosen
  const names = several.includes(chosen) ? several : [chosen, ...several]
  document.querySelector('#name').replaceChildren(h('select', { 'aria-label': 'Run', onchange: event => {
    const [path, text = ''] = location.hash.replace(/^#\/?/, '').split('?')
    const kept = new URLSearchParams(text)
    const view = ['find', 'compare'].includes(path) ? path : 'overview'  // a conversation is of one run alone
    location.hash = link(view, { run: event.target.value, q: kept.get('q'), sort: kept.get('sort') })
  } }, names.map(each => h('option', { value: each, selected: each === chosen }, each))))
  if (view !== 'runs') look()
}

async function look() {
  try {
    if (several.length && (!current.run || location.hash.startsWith('#/runs') || !location.hash)) {
      document.querySelector('#state').textContent = plural(several.length, 'run')
      await shown.refresh?.()
    } else {
      await follow(await ask('run'))
      await shown.beat?.()
    }
  } catch (error) {
    document.querySelector('#state').textContent = error.message
  }
}

async function follow(run) {
  if (!several.length) document.querySelector('#name').replaceChildren(h('span', { title: run.name }, run.name))
  const step = run.of ? `step ${run.steps} of ${run.of}` : `step ${run.steps}`
  const words = { unknown: expect(run), finished: `finished in ${number(run.seconds, 0)} s`, running: `running, ${expect(run)}` }
  const said = [step, plural(run.conversations, 'conversation'), words[run.status] ?? `${run.status}: ${expect(run)}`].join(' · ')
  document.querySelector('#state').replaceChildren(h('span', { class: `dot ${DOTS[run.status]}` }),
    h(exported ? 'span' : 'a', { href: exported ? null : link('run'), title: said }, said))
  const [before, shows] = [version, shown.refresh !== show]
  version = run.version
  if (before !== version && (before !== null || !shows)) await shown.refresh?.()
}

async function poll() {
  if (!document.hidden) await look()
  setTimeout(poll, POLL)
}

history.scrollRestoration = 'manual'
let keeping
addEventListener('scroll', () => {
  clearTimeout(keeping)
  keeping = setTimeout(() => main.hasAttribute('aria-busy') || history.replaceState({ ...history.state, scrolled: scrollY }, ''), KEEP)
}, { passive: true })
document.querySelector('#views').addEventListener('change', event => { location.hash = seen[event.target.value] ?? link(event.target.value) })
document.querySelector('.skip').addEventListener('click', event => { event.preventDefault(); main.focus() })  // the address names the view
addEventListener('keydown', event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest('input, select, textarea')) return
  const act = shown.keys?.[event.key]
  if (!act) return
  if (event.key.startsWith('Arrow')) event.preventDefault()
  act()
})

/** In an exported file, links to what its filter left out lead nowhere, and say so. */
function obeyFilter() {
  for (const each of document.querySelectorAll('a[href^="#/"]')) {
    const why = missing(each.getAttribute('href'))
    if (why === null) continue
    each.removeAttribute('href')
    each.title = why
  }
}

async function begin() {
  if (exported) new MutationObserver(obeyFilter).observe(document.body, { childList: true, subtree: true })
  if (!exported) several = (await ask('runs').catch(() => ({ runs: [] }))).runs.map(run => run.name)
  if (!several.length) VIEWS.beside[2] = 'compare'  // two evaluations of the run
  addEventListener('hashchange', show)
  show()
  if (exported) look()
  else poll()
}
begin()
