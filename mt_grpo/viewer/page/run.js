// The run itself: how it is, what it was started with, conversations under way, and a step as it ran.

import { ask } from './api.js'
import { facts, h, link, number, percent, plural } from './dom.js'
import { DOTS, expect, lasting } from './runs.js'

const MOST = 64
const KINDS = { sampling: 'sampling', tools: 'tools', waiting: 'waiting for the engine', done: 'done, the step goes on' }

export async function run(main, asked) {
  const state = { step: asked.get('step'), all: false }
  const left = h('div', { class: 'panel' })
  const right = h('div', { class: 'panel' })
  const below = h('div', { class: 'panel' })
  main.replaceChildren(h('div', { class: 'running' }, left, right, below))
  const options = h('div', {})
  let view = null, about = null
  const flow = async () => {
    try {
      right.replaceChildren(...waterfall(await ask('waterfall', { step: state.step }), view, state, step => {
        state.step = step
        history.replaceState(null, '', link('run', { step }))
        flow()
      }))
    } catch (error) {
      right.replaceChildren(h('section', { class: 'card' }, h('h3', {}, 'A step as it ran'), h('p', { class: 'dim' }, error.message)))
    }
  }
  const show = async () => {
    view = await ask('panel')
    left.replaceChildren(...[how(view), underWay(view)].filter(Boolean))
    const now = JSON.stringify(view.about)
    if (now !== about) options.replaceChildren(started(view))
    about = now
    const young = !view.steps.length  // no step to draw
    const place = young ? right : below
    if (options.parentElement !== place) place.replaceChildren(options)
    if (!young && (state.step === null || !right.children.length)) await flow()
  }
  await show()
  return { title: 'Run', refresh: show, beat: show }
}

function how(view) {
  const { status } = view
  const now = view.waits_for ? `, waiting for ${view.waits_for}` : ''
  return h('section', { class: 'card' }, h('h3', {}, 'State'), facts([
    ['now', h('span', {}, h('span', { class: `dot ${DOTS[status.status]}` }), h('b', {}, status.status), now)],
    [{ running: 'to expect', failed: 'error' }[status.status] ?? 'how', status.status === 'failed' ? h('span', { class: 'problem' }, status.reason ?? 'it does not say why') : expect(status)],
    status.of && ['step', `${view.step} of ${status.of}`],
    status.started && ['started', new Date(1000 * status.started).toLocaleString()],
    status.seconds !== null && ['lasted', lasting(status.seconds)],
    status.beat && ['last sign of life', new Date(1000 * status.beat).toLocaleString()]]))
}

function underWay(view) {
  if (view.status.status !== 'running') return null
  const rows = view.under_way
  return h('section', { class: 'card' }, h('h3', {}, 'Under way', h('span', { class: 'dim' }, ` · ${plural(rows.length, 'conversation')} of the main process`)),
    rows.length ? h('div', { class: 'scrolled' }, h('table', { class: 'asked' }, h('thead', {}, h('tr', {}, ['question', 'turns', 'tokens', 'since', 'waits for'].map(name => h('th', { scope: 'col' }, name)))),
      h('tbody', {}, rows.map(row => h('tr', {}, h('th', { scope: 'row', dir: 'auto' }, row.prompt), h('td', {}, row.turns), h('td', {}, row.tokens),
        h('td', {}, row.seconds === null ? '–' : lasting(row.seconds)), h('td', {}, row.waits_for)))))) : h('p', { class: 'dim' }, 'None is being sampled.'))
}

function started(view) {
  const { about } = view
  const text = value => (typeof value === 'object' && value !== null ? JSON.stringify(value) : String(value))
  const table = (title, values) => values && Object.keys(values).length > 0 && [h('h3', { class: 'apart' }, title),
    facts(Object.entries(values).map(([name, value]) => [name, text(value)]))]
  const rule = about.rule ?? about.estimator
  return h('section', { class: 'card started' }, h('h3', {}, 'What it was started with'),
    about.command && h('p', { class: 'command mono' }, about.command),
    facts([['model', about.model ?? '–'], ['rule', typeof rule === 'object' && rule ? text(rule) : rule ?? '–'], ['conversations of a prompt', text(about.group_size ?? '–')],
      ['processes', text(about.processes ?? '–')], about.tools?.length && ['tools', about.tools.join(', ')]]),
    table('Rewards, and their weights', Object.fromEntries((about.rewards ?? []).map(each => [each.name, each.weight]))),
    table('Options that differ from their defaults', about.options), table('Versions', about.versions),
    view.config && h('details', { open: !about.rewards }, h('summary', {}, 'config.yaml'), h('pre', { class: 'mono', tabindex: '0' }, view.config)))
}

/** A row per conversation: full bars sampling, thin bars tools, dots waiting, hatching done while the step goes on. */
function waterfall(view, panel, state, choose) {
  const steps = panel.steps
  const at = steps.indexOf(view.step)
  const step = place => place >= 0 && place < steps.length && h('button', { type: 'button', class: 'as-link', onclick: () => choose(steps[place]) }, place < at ? '◀ step before' : 'next step ▶')
  const share = seconds => `${100 * seconds / view.seconds}%`
  const rows = view.rows.slice(0, state.all ? undefined : MOST)
  const bars = rows.map(row => h('a', { class: 'flow', href: link('trajectory', { session: row.session }), 'aria-label': `${row.group + 1}.${row.member + 1} ${row.prompt}, ended after ${number(row.end, 1)} s` },
    h('span', { class: 'n dim' }, `${row.group + 1}.${row.member + 1}`), h('span', { class: 'lane' },
      h('span', { class: 'waits', css: { left: share(row.start), width: share(row.end - row.start) } }),
      row.parts.map(([kind, start, seconds, name]) => h('span', { class: kind, title: `${name}, ${number(seconds)} s`, css: { left: share(start), width: share(seconds) } })),
      h('span', { class: 'over', css: { left: share(row.end), width: share(view.seconds - row.end) } }))))
  const marks = h('span', { class: 'flow marks' }, h('span'), h('span', { class: 'lane' }, [0, 0.5, 1].map(part => h('span', { class: 'dim', css: { left: share(part * view.seconds) } }, `${number(part * view.seconds, 1)} s`))))
  return [h('section', { class: 'card' }, h('div', { class: 'bar tight' }, h('h3', {}, `Step ${view.step} as it ran`,
    h('span', { class: 'dim' }, ` · ${plural(view.conversations, 'conversation')}, those that ended last first`)), h('span', { class: 'choices' }, step(at - 1), step(at + 1))),
  h('p', {}, straggler(view)), marks, bars,
  view.rows.length > rows.length && h('p', {}, h('button', { type: 'button', class: 'as-link', onclick: () => { state.all = true; choose(view.step) } }, `all ${view.rows.length}`)),
  h('p', { class: 'reading-line' }, Object.entries(KINDS).map(([kind, words]) => h('span', {}, h('span', { class: `lane sample ${kind}` }, h('span', { class: { waiting: 'waits', done: 'over' }[kind] ?? kind })), `${words} `, h('b', {}, percent(view.shares[kind]))))))]
}

/** What the step waited for at its end. */
function straggler(view) {
  const [last, before] = view.rows
  if (!before) return `It took ${number(view.seconds, 1)} s.`
  const longest = last.parts.reduce((a, b) => (b[2] > a[2] ? b : a), ['', 0, 0, ''])
  const after = last.end - before.end
  if (after < 0.02 * view.seconds) return `The last of them ended together, after ${number(view.seconds, 1)} s.`
  const what = longest[0] === 'tools' ? `one call of ${longest[3]} of ${number(longest[2], 1)} s` : `a turn of ${number(longest[2], 1)} s`
  return [`Conversation ${last.group + 1}.${last.member + 1} had `, h('b', {}, what), ` and ended ${number(after, 1)} s after all others.`]
}
