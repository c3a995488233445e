// Two evaluations, question by question.

import { ask } from './api.js'
import { chip, choice, h, link, number, plural } from './dom.js'
import { shadesOf } from './shades.js'
import { placesByTurn, turnCard } from './turns.js'

const KINDS = ['fixed', 'still right', 'still wrong', 'broken']
const ROW = 28
const name = kind => kind.replace(' ', '-')

export async function compare(main, asked) {
  const view = await ask('compare', { from: asked.get('from'), to: asked.get('to') })
  const state = { show: asked.get('show') ?? '', text: '', session: asked.get('session') }
  const given = { from: asked.get('from'), to: asked.get('to') }
  const url = change => link('compare', { ...given, show: state.show, session: state.session, ...change })
  const list = h('div', { class: 'questions', tabindex: '0', 'aria-label': 'Questions' })
  const inner = h('div', {})
  list.append(inner)
  const sides = h('div', { class: 'sides' })
  const title = h('div', { class: 'words' })
  let rows = []
  const input = h('input', { type: 'search', placeholder: 'text of the question', 'aria-label': 'Filter questions' })

  const draw = () => {
    inner.style.height = `${rows.length * ROW}px`
    const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 4)
    const last = Math.min(rows.length, Math.ceil((list.scrollTop + (list.clientHeight || 600)) / ROW) + 4)
    inner.replaceChildren(...rows.slice(first, last).map((row, n) => h('a', { href: url({ session: row.sessions[0] }),
      class: row.sessions[0] === state.session ? 'on' : '', css: { top: `${(first + n) * ROW}px` }, title: row.kind,
      onclick: event => { event.preventDefault(); choose(row) } },
    h('span', { class: 'words' }, row.prompt),
    h('span', { class: `${row.after >= row.before ? 'right' : 'wrong'}` }, `${number(row.before, 1)} → ${number(row.after, 1)}`))))
  }
  const filter = () => {
    const text = state.text.toLowerCase()
    rows = view.rows.filter(row => (!state.show || row.kind === state.show) && row.prompt.toLowerCase().includes(text))
    list.scrollTop = 0
    draw()
  }
  let turn = 0
  const choose = async row => {
    state.session = row.sessions[0]
    history.replaceState(null, '', url({}))
    draw()
    const mine = ++turn
    try {
      const wholes = await Promise.all(row.sessions.map(session => ask('trajectory', { session })))
      if (mine !== turn) return
      title.replaceChildren(h('h2', {}, wholes[0].question), h('p', { class: 'dim' }, h('span', { class: `kind ${name(row.kind)}` }, row.kind),
        ' · ', h('a', { href: link('apart', { a: row.sessions[0], b: row.sessions[1] }) }, 'token by token'), ' · ',
        h('a', { href: link('beside', { a: row.sessions[0], b: row.sessions[1] }) }, 'to read'),
        wholes[0].accepted.length > 0 && [' accepted: ', h('b', { class: 'mono ink' }, wholes[0].accepted.join(' · '))]))
      sides.replaceChildren(...wholes.map((whole, n) => side(whole, n ? view.to : view.from)))
    } catch (error) {
      sides.replaceChildren(h('p', { class: 'wrong' }, error.message))
    }
  }
  const show = kind => {
    state.show = state.show === kind ? '' : kind
    history.replaceState(null, '', url({}))
    top.replaceWith(top = summary(view, state, show))
    filter()
  }
  let top = summary(view, state, show)
  input.addEventListener('input', () => { state.text = input.value; filter() })
  list.addEventListener('scroll', draw, { passive: true })
  main.replaceChildren(top, title, h('div', { class: 'comparing' }, h('section', { class: 'card' }, input, list), sides))
  filter()
  const chosen = view.rows.find(row => row.sessions[0] === state.session) ?? rows[0] ?? view.rows[0]
  if (chosen) await choose(chosen)
  return { title: 'Before / after' }
}

function summary(view, state, show) {
  const steps = view.steps.map(step => [step, String(step)])
  const to = (which, step) => { location.hash = link('compare', { from: view.from, to: view.to, [which]: step }) }
  const all = KINDS.reduce((sum, kind) => sum + view.counts[kind], 0)
  return h('section', { class: 'card' }, h('div', { class: 'bar tight' },
    h('h3', {}, `${plural(all, 'held-out question')}, step ${view.from} → step ${view.to}`),
    h('span', { class: 'kinds' }, KINDS.map(kind => h('button', { type: 'button', 'aria-pressed': String(state.show === kind),
      onclick: () => show(kind) }, h('span', { class: `dot ${name(kind)}` }), `${kind} `, h('b', {}, view.counts[kind].toLocaleString('en'))))),
    h('span', { class: 'choices' }, choice('from', steps.slice(0, -1), view.from, step => to('from', step)),
      choice('to', steps.slice(1), view.to, step => to('to', step)))),
  h('div', { class: 'shares', role: 'img', 'aria-label': KINDS.map(kind => `${kind} ${view.counts[kind]}`).join(', ') },
    KINDS.filter(kind => view.counts[kind]).map(kind => h('span', { class: name(kind), title: kind, css: { flex: String(view.counts[kind]) } }))))
}

function side(whole, step) {
  const spans = []
  const places = placesByTurn(whole)
  const shade = shadesOf(whole.tokens, whole.updates)['log-prob']
  const cards = whole.turns.map((_, n) => turnCard(whole, n, places[n], spans))
  for (const i of places.flat()) spans[i].className = shade.shade(shade.values[i])
  const tokens = whole.index.tokens.reduce((a, b) => a + b, 0)
  return h('section', { 'aria-label': `step ${step}` }, h('p', { class: 'side-head' }, h('b', {}, `step ${step}`),
    h('span', {}, 'reward ', h('b', {}, number(whole.index.reward))), chip(whole.stop_reason),
    h('span', { class: 'mono', title: whole.answer }, whole.answer ?? '–'),
    h('a', { href: link('trajectory', { session: whole.index.session }) }, `${plural(whole.turns.length, 'turn')} · ${plural(tokens, 'token')}`)), cards)
}
