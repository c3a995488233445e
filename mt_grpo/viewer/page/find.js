// Every conversation in a table that draws only the rows in sight. The URL holds filter and order.

import { ask, current, exported } from './api.js'
import { chip, h, link, number, plural, rightSign, short } from './dom.js'

const ROW = 30
const HIT = 18
const MOST_HITS = 2
const AGAIN = 1000
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
  ['answer', 'final answer', row => [rightSign(row.right), row.answer ?? '–'], 'words mono'],
  ['prompt', 'question', row => [row.star ? h('span', { class: 'starred', title: row.note || null, role: 'img', 'aria-label': 'starred' }, '★ ') : '', row.copy ? [h('span', { class: 'chip' }, 'copy'), ' '] : '', row.prompt], 'words'],
]
const EXAMPLES = ['mode=eval right=0', 'stop=length,timeout', 'errors>0 reward<0.5', 'spread=0', 'advantage<-1', 'tool=search']
const FORMS = ['messages', 'sharegpt', 'tokens', 'preferences', 'jsonl', 'openinference']

export async function find(main, asked) {
  const state = { q: asked.get('q') ?? '', sort: asked.get('sort') ?? '', blocks: new Map(), matched: 0, turn: 0, row: ROW, hits: new Map(), asked: new Set() }
  const input = h('input', { type: 'search', id: 'filter', spellcheck: 'false', autocomplete: 'off', disabled: !!exported,
    placeholder: 'text, tool=, error=, stop=, reward<, turn_reward<, advantage<', 'aria-describedby': 'said' })
  input.value = exported ? exported.filter : state.q
  const said = h('p', { id: 'said', role: 'status', class: 'dim' })
  const written = h('p', { class: 'exports dim' })
  const head = h('div', { class: 'tr th', role: 'row' })
  const body = h('div', { class: 'rows', role: 'rowgroup' })
  const scroll = h('div', { class: 'table', tabindex: '0', role: 'table', 'aria-label': 'Conversations' }, head, body)
  const examples = h('p', { class: 'examples dim' }, 'for example ', EXAMPLES.map(text =>
    h('a', { href: link('find', { q: text, sort: state.sort }) }, text)))
  main.replaceChildren(h('form', { class: 'filter', role: 'search', onsubmit: event => event.preventDefault() },
    h('label', { for: 'filter' }, 'Filter'), input), h('div', { class: 'bar tight' }, said, written), exported ? '' : examples, scroll)

  const url = () => link('find', { q: state.q, sort: state.sort })
  const block = async number => {
    if (state.blocks.has(number)) return
    const turn = state.turn
    state.blocks.set(number, null)
    const answer = await ask('find', { q: state.q, sort: state.sort, offset: number * BLOCK, limit: BLOCK })
    if (turn !== state.turn) return
    state.blocks.set(number, answer.rows)
    state.matched = answer.matched
    state.row = answer.texts?.length ? ROW + MOST_HITS * HIT : ROW
    const words = `${answer.matched.toLocaleString('en')} of ${answer.total.toLocaleString('en')} conversations`
    said.textContent = exported ? `${words}: those that the filter of this file lets through` : words + read(answer)
    said.className = 'dim'
    clearTimeout(state.later)
    if (answer.texts?.length && answer.read < answer.total && !answer.problem) state.later = setTimeout(() => said.isConnected && load(), AGAIN)
    if (!exported) written.replaceChildren(answer.matched ? `export ${answer.matched === 1 ? 'it' : 'these'} as ` : '', ...FORMS.filter(() => answer.matched).map(form =>
      h('a', { href: `export/${form}?${new URLSearchParams(Object.entries({ run: current.run, q: state.q }).filter(([, value]) => value))}`, download: `${form}.jsonl` }, form)))
  }
  /** Where the text stands, of the rows in sight; they come after the rows. */
  const showHits = async rows => {
    const missing = rows.map(row => row.session).filter(session => !state.asked.has(session))
    if (!missing.length || state.row === ROW) return
    const turn = state.turn
    missing.forEach(session => state.asked.add(session))
    const answer = await ask('hits', { q: state.q, sessions: missing.join(',') })
    if (turn !== state.turn) return
    for (const [session, each] of Object.entries(answer.hits)) state.hits.set(session, each)
    draw()
  }
  const draw = () => {
    body.style.height = `${state.matched * state.row}px`
    const first = Math.max(0, Math.floor(scroll.scrollTop / state.row) - 5)
    const last = Math.min(state.matched, Math.ceil((scroll.scrollTop + scroll.clientHeight) / state.row) + 5)
    const rows = []
    const there = []
    for (let i = first; i < last; i++) {
      const row = state.blocks.get(Math.floor(i / BLOCK))?.[i % BLOCK]
      if (row) there.push(row)
      rows.push(row ? drawn(row, i, state) : h('div', { class: 'tr', css: { top: `${i * state.row}px` } }, '…'))
    }
    if (!exported) showHits(there).catch(() => {})  // where the server has ended, the line above says so
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
    state.hits = new Map()
    state.asked = new Set()
    drawHead()
    try {
      await block(Math.max(0, Math.floor(scroll.scrollTop / state.row / BLOCK)))
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
  const kept = history.state?.table
  if (kept) {
    scroll.scrollTop = kept
    await inSight()
  }
  let keeping
  scroll.addEventListener('scroll', () => {
    clearTimeout(keeping)
    keeping = setTimeout(() => body.isConnected && history.replaceState({ ...history.state, table: scroll.scrollTop }, ''), WAIT)
  }, { passive: true })
  return { title: 'Find', refresh: load }
}

function drawn(row, i, state) {
  const found = state.hits.get(row.session) ?? []
  const way = h('a', { class: 'way', href: link('trajectory', { session: row.session, q: state.q, sort: state.sort, at: i }),
    'aria-label': `${row.prompt}, step ${row.step}, member ${row.member}` })
  const cells = COLUMNS.map(([name, , text, kind], n) => h('span', { class: `td ${kind ?? ''} col-${name}`, role: 'cell', title: typeof row[name] === 'string' ? row[name] : null }, text(row), n ? null : way))
  const lines = state.row > ROW && h('span', { class: 'hits', role: 'cell' }, found.map(each => h('span', { class: 'hit' },
    h('span', { class: 'dim' }, each.turn === null ? each.part : `turn ${each.turn} · ${each.part}`),
    h('span', { class: 'mono', dir: 'auto' }, each.before && `…${each.before}`, h('mark', {}, each.hit), `${each.after}…`))))
  return h('div', { class: `tr ${lines ? 'tall' : ''}`, role: 'row', 'aria-rowindex': String(i + 2),
    css: { top: `${i * state.row}px`, height: `${state.row}px` } }, cells, lines)
}

/** How far the index of words has read, where it is asked and has not read all. */
function read(answer) {
  if (!answer.texts.length) return ''
  if (answer.problem) return ` · not every word is read: ${answer.problem}`
  if (answer.read >= answer.total) return ' · every word read'
  return ` · words of ${plural(answer.read, 'conversation')} read so far`
}
