// The frame: which view is shown, the run's state above it, and what the run has written since.

import { ask, exported } from './api.js'
import { compare } from './compare.js'
import { h, link, nothing, number, plural } from './dom.js'
import { find } from './find.js'
import { group } from './group.js'
import { overview } from './overview.js'
import { trajectory } from './trajectory.js'

const VIEWS = {
  overview: ['Overview', overview],
  find: ['Find', find],
  group: ['Groups', group],
  trajectory: ['Trajectory', trajectory],
  compare: ['Before / after', compare],
}
const POLL = 2000

const main = document.querySelector('main')
const nav = document.querySelector('nav')
const seen = {}
let shown = { keys: {} }
let version = null
let turn = 0

async function show() {
  const [path, text = ''] = location.hash.replace(/^#\/?/, '').split('?')
  const name = path in VIEWS ? path : 'overview'
  const mine = ++turn
  shown = { keys: {} }
  nav.replaceChildren(...Object.entries(VIEWS).map(([each, [title]]) =>
    h('a', { href: seen[each] ?? link(each), 'aria-current': each === name ? 'page' : null }, title)))
  main.setAttribute('aria-busy', 'true')
  const here = h('div')  // of this view alone: one that is late writes into what is no longer shown
  main.replaceChildren(here)
  let found
  try {
    found = await VIEWS[name][1](here, new URLSearchParams(text))
  } catch (error) {
    here.replaceChildren(nothing(error.message))
    found = { title: VIEWS[name][0] }
    if (error.name !== 'Error') console.error(error)  // a mistake of ours, and no answer of the server
  }
  if (mine !== turn) return
  shown = found
  if (name === 'group' || name === 'trajectory') seen[name] = location.hash || link(name)
  document.title = `${found.title} · mt-grpo view`
  main.removeAttribute('aria-busy')
  window.scrollTo(0, 0)
  performance.mark(`shown ${name}`)
}

async function look() {
  try {
    await follow(await ask('run'))
  } catch (error) {
    document.querySelector('#state').textContent = error.message
  }
}

async function follow(run) {
  document.querySelector('#name').textContent = run.name
  const state = run.seconds === null ? `last written at ${new Date(1000 * run.written).toLocaleTimeString()}` : `finished in ${number(run.seconds, 0)} s`
  document.querySelector('#state').textContent = [`step ${run.steps}`, plural(run.conversations, 'conversation'), state].join(' · ')
  if (version !== null && run.version !== version) await shown.refresh?.()
  version = run.version
}

async function poll() {
  if (!document.hidden) await look()
  setTimeout(poll, POLL)
}

addEventListener('hashchange', show)
addEventListener('keydown', event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest('input')) return
  const act = shown.keys?.[event.key]
  if (!act) return
  if (event.key.startsWith('Arrow')) event.preventDefault()
  act()
})
show()
if (exported) look()
else poll()
