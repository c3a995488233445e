// Every conversation in a table that draws only the rows in sight. The URL holds filter and order.

import { ask, exported } from './api.js'
import { chip, h, link, number, short } from './dom.js'

const ROW = 30
const BLOCK = 200
const WAIT = 120
const COLUMNS = [
  ['step', 'step', row => String(row.step), 'n'],
  ['mode', '', row => row.mode],
  ['reward', 'reward', row => number(row.reward), 'n'],
  ['stop', 'stop', row => chip(row.stop)],
  ['turns', 'turns', row => String(row.turns), 'n'],
  ['tokens', 'tokens', row => row.tokens.toLocaleString('en'), 'n'],
  ['errors', 'errors', row => String(row.errors), 'n'],
  ['mismatch', 'largest difference of engine and trainer, nats', row => short(row.mismatch), 'n'],
  ['seconds', 'seconds', row => number(row.seconds, 1), 'n'],
  ['answer', 'final answer', row => [mark(row.right), row.answer ?? '–'], 'words mono'],
  ['prompt', 'question', row => row.prompt, 'words'],
]
const EXAMPLES = ['mode=eval right=0', 'stop=length,timeout', 'errors>0 reward<0.5', 'spread=0']

const mark = right => (right === null ? '' : right ? '✓ ' : '✗ ')

export async function find(main, asked) {
  const state = { q: asked.get('q') ?? '', sort: asked.get('sort') ?? '', blocks: new Map(), matched: 0, turn: 0 }
  const input = h('input', { type: 'search', id: 'filter', spellcheck: 'false', autocomplete: 'off', disabled: !!exported,
    placeholder: 'stop=timeout reward<0.5 mismatch>.1 "text"', 'aria-describedby': 'said' })
  input.value = exported ? exported.filter : state.q
  const said = h('p', { id: 'said', role: 'status', class: 'dim' })
  const head = h('div', { class: 'tr th', role: 'row' })
  const body = h('div', { class: 'rows', role: 'rowgroup' })
  const scroll = h('div', { class: 'table', tabindex: '0', role: 'table', 'aria-label': 'Conversations' }, head, body)
  const examples = h('p', { class: 'examples dim' }, 'for example ', EXAMPLES.map(text =>
    h('a', { href: link('find', { q: text, sort: state.sort }) }, text)))
  main.replaceChildren(h('form', { class: 'filter', role: 'search', onsubmit: event => event.preventDefault() },
    h('label', { for: 'filter' }, 'Filter'), input), said, exported ? '' : examples, scroll)

  const url = () => link('find', { q: state.q, sort: state.sort })
  const block = async number => {
    if (state.blocks.has(number)) return
    const turn = state.turn
    state.blocks.set(number, null)
    const answer = await ask('find', { q: state.q, sort: state.sort, offset: number * BLOCK, limit: BLOCK })
    if (turn !== state.turn) return
    state.blocks.set(number, answer.rows)
    state.matched = answer.matched
    const words = `${answer.matched.toLocaleString('en')} of ${answer.total.toLocaleString('en')} conversations`
    said.textContent = exported ? `${words}: those that the filter of this file lets through` : words
    said.className = 'dim'
  }
  const draw = () => {
    body.style.height = `${state.matched * ROW}px`
    const first = Math.max(0, Math.floor(scroll.scrollTop / ROW) - 5)
    const last = Math.min(state.matched, Math.ceil((scroll.scrollTop + scroll.clientHeight) / ROW) + 5)
    const rows = []
    for (let i = first; i < last; i++) {
      const row = state.blocks.get(Math.floor(i / BLOCK))?.[i % BLOCK]
      rows.push(row ? drawn(row, i) : h('div', { class: 'tr', css: { top: `${i * ROW}px` } }, '…'))
    }
    body.replaceChildren(...rows)
    return [Math.floor(first / BLOCK), Math.floor(Math.max(first, last - 1) / BLOCK)]
  }
  const inSight = async () => {
    const [from, to] = draw()
    const missing = [...new Set([from, to])].filter(number => !state.blocks.has(number))
    if (missing.length) {
      await Promise.all(missing.map(block))
      draw()
    }
  }
  const load = async () => {
    state.turn += 1
    state.blocks = new Map()
    drawHead()
    try {
      await block(Math.max(0, Math.floor(scroll.scrollTop / ROW / BLOCK)))
      await inSight()
    } catch (error) {
      said.textContent = error.message
      said.className = 'wrong'
      state.matched = 0
      state.blocks = new Map([[0, []]])
      draw()
    }
    performance.mark('found')
  }
  const sortBy = name => {
    state.sort = state.sort === '-' + name ? name : '-' + name
    history.replaceState(null, '', url())
    scroll.scrollTop = 0
    load()
  }
  const drawHead = () => head.replaceChildren(...COLUMNS.map(([name, title, , kind]) => {
    const order = state.sort === name ? 'ascending' : state.sort === '-' + name ? 'descending' : 'none'
    const arrow = { ascending: ' ▲', descending: ' ▼', none: '' }[order]
    return h('span', { class: `td ${kind ?? ''} col-${name}`, role: 'columnheader', 'aria-sort': order },
      h('button', { type: 'button', title, onclick: () => sortBy(name) }, name + arrow))
  }))

  let timer
  input.addEventListener('input', () => {
    clearTimeout(timer)
    timer = setTimeout(() => {
      state.q = input.value.trim()
      history.replaceState(null, '', url())
      scroll.scrollTop = 0
      load()
    }, WAIT)
  })
  scroll.addEventListener('scroll', () => requestAnimationFrame(inSight), { passive: true })
  await load()
  return { title: 'Find', refresh: load }
}

function drawn(row, i) {
  return h('a', { class: 'tr', role: 'row', 'aria-rowindex': String(i + 2), css: { top: `${i * ROW}px` },
    href: link('trajectory', { session: row.session }) }, COLUMNS.map(([name, , text, kind]) =>
    h('span', { class: `td ${kind ?? ''} col-${name}`, role: 'cell' }, text(row))))
}
