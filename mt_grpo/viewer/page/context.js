// What the model was given at a turn: the whole context as it was rendered, and how it differs from the turn before.

import { ask } from './api.js'
import { folded } from './fold.js'
import { choice, h, link, many, number, plural } from './dom.js'
import { followed, messagesAt, pathTo, sampledIn, textOf } from './context_tokens.js'
import { difference } from './difference.js'

const LONG = 900
const INLINE = 8
const SIGNS = { new: '+', gone: '−', other: '~', '': '' }
const SPOKEN = { new: 'new', gone: 'taken out', other: 'written otherwise' }
const GAP = 400, SCHEMA = 40

export async function context(main, asked) {
  const whole = await ask('trajectory', { session: asked.get('session') })
  const session = whole.index.session
  const state = { turn: Math.min(Math.max(1, Number(asked.get('turn')) || 1), Math.max(1, whole.turns.length)) - 1, show: asked.get('show') ?? 'all' }
  const show = () => {
    history.replaceState(null, '', link('context', { session, turn: state.turn + 1, show: state.show === 'all' ? '' : state.show }))
    main.replaceChildren(...view(whole, state, show))
  }
  const step = by => {
    if (!whole.turns[state.turn + by]) return
    state.turn += by
    show()
  }
  const back = () => { location.hash = link('trajectory', { session }) }
  if (!whole.turns.length) main.replaceChildren(h('p', { class: 'nothing' }, 'The model was never asked in this conversation.'))
  else show()
  return { title: `Turn ${state.turn + 1} of ${session}`, keys: { ArrowRight: () => step(1), ArrowLeft: () => step(-1), Escape: back, c: back } }
}

function view(whole, state, show) {
  const n = state.turn
  const seen = blocksAt(whole, n)
  const set = (name, value) => { state[name] = value; show() }
  const shown = state.show === 'all' ? seen.blocks : seen.blocks.filter(block => block.sign)
  const turns = whole.turns.map((_, i) => [i, String(i + 1)])
  const copy = async event => {
    await navigator.clipboard.writeText(seen.path.map(i => textOf(whole, i)).join(''))
    event.target.textContent = 'copied'
  }
  return [
    h('div', { class: 'bar' }, h('div', { class: 'words' },
      h('p', { class: 'dim' }, `${whole.index.session} · member ${whole.index.member + 1} of ${whole.group.sessions.length} · `,
        h('a', { href: link('trajectory', { session: whole.index.session }) }, '◀ trajectory')),
      h('h2', {}, `What the model saw at turn ${n + 1}`)),
    h('div', { class: 'choices' }, choice('turn', turns, n, value => set('turn', value)),
      choice('show', [['all', 'everything'], ['changed', 'what changed']], state.show, value => set('show', value)),
      navigator.clipboard && h('button', { type: 'button', class: 'as-link', onclick: copy }, 'copy'))),
    makeup(whole, seen, n),
    h('div', { class: 'reading' }, h('aside', {}, since(whole, seen, n), follows(whole, seen, n), legend(whole)),
      h('section', { class: 'card seen', 'aria-label': 'Context' }, shown.length ? shown.map(block => drawn(whole, block, n))
        : h('p', { class: 'nothing' }, 'Nothing changed since the turn before.'))),
  ]
}

/** The context of a turn as blocks, each with its items in order; `gone` items were there at the turn before. */
function blocksAt(whole, n) {
  const path = pathTo(whole, n)
  const before = followed(whole, n)
  const old = before < 0 ? [] : [...pathTo(whole, before), ...sampledIn(whole, before)]
  const ids = whole.tokens.ids
  const { prefix, steps } = difference(old.map(i => ids[i]), path.map(i => ids[i]))
  const forked = before >= 0 && prefix < old.length
  const items = []
  for (const { kind, from, to } of steps) {
    const source = kind === 'gone' ? old : path
    for (let at = from; at < to; at++) items.push({ place: source[at], at, kind: kind === 'new' && before < 0 ? '' : kind })
  }
  const blocks = cut(whole, path, n)
  const found = []
  let block = -1
  const open = (values) => { found.push({ items: [], ...values }); return found.at(-1) }
  for (let i = 0; i < items.length; i++) {
    if (items[i].kind === 'gone') {
      let end = i
      while (items[end + 1]?.kind === 'gone') end++
      const run = items.slice(i, end + 1)
      const alone = run.length >= INLINE && items[end + 1]?.kind !== 'new' && items[i - 1]?.kind !== 'new'
      if (alone) open({ gone: true, role: run.some(item => whole.tokens.turn[item.place] >= 0) ? 'assistant' : 'context', note: noteOfGone(whole, run), part: block }).items = run
      else (found.at(-1) ?? open({ ...blocks[0], part: 0 })).items.push(...run)
      i = end
      continue
    }
    while (block + 1 < blocks.length && items[i].at >= blocks[block + 1].from) {
      block++
      open({ ...blocks[block], part: block })
    }
    if (found.at(-1)?.gone) open({ ...blocks[block], part: block })
    found.at(-1).items.push(items[i])
  }
  for (const each of found) each.sign = signOf(each.items)
  const count = kind => items.filter(item => item.kind === kind).length
  return { blocks: found.filter(each => each.items.length), path, before, prefix, forked, added: count('new'), gone: count('gone'), old: old.length }
}

function signOf(items) {
  const kinds = new Set(items.map(item => item.kind))
  if (kinds.size === 1) return kinds.has('new') ? 'new' : kinds.has('gone') ? 'gone' : ''
  if (kinds.has('gone')) return 'other'
  return items.filter(item => item.kind === 'new').length * 2 > items.length ? 'new' : ''  // else only its end is new
}

function noteOfGone(whole, run) {
  const turn = whole.tokens.turn[run.find(item => whole.tokens.turn[item.place] >= 0)?.place] ?? -1
  const thinking = /<think|reasoning/.test(run.slice(0, 4).map(item => textOf(whole, item.place)).join('')) ? ', thinking' : ''
  return turn >= 0 ? `turn ${turn + 1}${thinking}` : 'context'
}

// Where a message begins in what was rendered

/** The blocks of a context: `from` (place in the path), `role`, `note`. */
function cut(whole, path, n) {
  const special = new Set(whole.special)
  const isSpecial = at => special.has(whole.tokens.ids[path[at]])
  const starts = [], text = []
  let length = 0
  for (const i of path) { starts.push(length); const words = textOf(whole, i); text.push(words); length += words.length }
  const rendered = text.join('')
  const tokenAt = position => { let low = 0, high = starts.length; while (low < high) { const half = (low + high) >> 1; if (starts[half] <= position) low = half + 1; else high = half } return low - 1 }
  const spans = []
  let position = 0
  for (const message of messagesAt(whole, n)) {
    const own = message.turn === undefined ? [] : sampledIn(whole, message.turn)
    const at = own.length ? path.indexOf(own[0]) : -1
    if (at >= 0) {
      spans.push({ from: at, to: at + own.length, role: 'assistant', note: `turn ${message.turn + 1}` })
      position = (starts[at + own.length] ?? length)
      continue
    }
    const answer = message.turn === undefined ? '' : message.text.split('</think>').at(-1)  // where thinking is taken out
    const words = [message.text.trim(), answer.trim()].find(each => each && rendered.indexOf(each, position) >= 0)
    if (!words) continue
    const found = rendered.indexOf(words, position)
    spans.push({ from: tokenAt(found), to: tokenAt(found + words.length - 1) + 1, role: message.role, note: message.note })
    position = found + words.length
  }
  const blocks = []
  spans.forEach((span, i) => {
    const end = i ? spans[i - 1].to : 0
    blocks.push({ from: i ? splitOf(isSpecial, text, end, span.from) : 0, role: span.role, note: span.note, span })
  })
  const last = spans.at(-1)?.to ?? 0
  const end = last ? splitOf(isSpecial, text, last, path.length) : 0
  if (end < path.length) blocks.push({ from: end, role: 'assistant', note: `turn ${n + 1} begins`, next: true })
  return withTools(whole, headed(blocks, text, path, whole), path, rendered, starts, tokenAt, isSpecial, n)
}

/** The blocks, and those of messages that were not found, which begin with the same special token as the first one. */
function headed(blocks, text, path, whole) {
  const special = new Set(whole.special)
  const ids = path.map(i => whole.tokens.ids[i])
  const first = special.has(ids[0]) && special.has(ids[1]) ? 1 : 0  // behind one that begins the whole text
  if (!special.has(ids[first])) return blocks
  const known = new Set(blocks.map(block => block.from))
  const more = []
  ids.forEach((id, at) => {
    if (id !== ids[first] || at === first || known.has(at)) return
    let end = at + 1
    while (end < ids.length && !special.has(ids[end]) && !text[end].includes('\n')) end++
    const role = text.slice(at + 1, end).join('').trim()
    if (/^[a-z]{2,12}$/.test(role)) more.push({ from: at, role, note: '' })
  })
  const all = [...blocks, ...more].sort((a, b) => a.from - b.from)
  return all.filter((block, i) => !more.includes(block) || !all[i + 1] || all[i + 1].from > block.from)
}

/** Where, between two messages, the second begins: behind what ends the first. */
function splitOf(isSpecial, text, from, to) {
  const marks = []
  for (let at = from; at < to; at++) if (isSpecial(at)) marks.push(at)
  if (!marks.length) return to
  let at = marks.length > 1 || to === text.length ? marks[0] + 1 : marks[0]
  while (marks.length > 1 && at < to && text[at].trim() === '') at++
  return at
}

/** The schemas of tools, which templates write into the system message, as a block of their own. */
function withTools(whole, blocks, path, rendered, starts, tokenAt, isSpecial, n) {
  const tools = whole.turns[n].tools ?? whole.tools ?? []
  const names = tools.map(tool => tool.function?.name ?? tool.name).filter(Boolean)
  if (!names.length) return blocks
  return blocks.flatMap((block, i) => {
    const to = blocks[i + 1]?.from ?? path.length
    if (!block.span || block.span.role === 'assistant' || to - block.span.to < 4) return [block]
    let end = block.span.to
    while (end < to && !isSpecial(end)) end++
    const words = rendered.slice(starts[block.span.to], starts[end] ?? rendered.length)
    if (words.trim().length < SCHEMA || !names.some(name => words.includes(name))) return [block]
    const rest = end < to ? [{ from: end, role: block.role, note: 'end' }] : []
    return [block, { from: block.span.to, role: 'tools', note: plural(names.length, 'function'), schema: true }, ...rest]
  })
}

// Drawing

function makeup(whole, seen, n) {
  const total = seen.path.length
  const more = seen.before >= 0 ? [` · ${number(Math.abs(total - pathTo(whole, seen.before).length), 0)} ${total >= pathTo(whole, seen.before).length ? 'more' : 'fewer'} than at turn ${seen.before + 1}`] : []
  const words = block => (block.gone ? `${block.note} −${block.items.length}` : `${block.next ? '' : block.note && block.role === 'assistant' ? block.note : block.role} ${block.items.length}`)
  return h('section', { class: 'card' }, h('h3', {}, plural(total, 'token'), h('span', { class: 'dim' }, more)),
    h('div', { class: 'makeup', role: 'img', 'aria-label': seen.blocks.map(words).join(', ') }, seen.blocks.map(block =>
      h('span', { class: block.sign, title: `${words(block)}`, css: { flex: `${block.items.length} 1 0` } }, words(block)))))
}

function since(whole, seen, n) {
  const rows = []
  const other = seen.blocks.filter(block => block.sign === 'other').length
  if (seen.before < 0) return h('section', { class: 'card' }, h('h3', {}, 'Since the turn before'), h('p', { class: 'dim' }, n ? 'This context was begun anew.' : 'This is the first turn.'))
  const row = (sign, words) => rows.push(h('li', {}, h('span', { class: `sign ${sign}`, 'aria-hidden': 'true' }, SIGNS[sign]), h('span', {}, words)))
  if (seen.added) row('new', [h('b', {}, many(seen.added)), ` ${seen.added === 1 ? 'token is' : 'tokens are'} new`])
  if (seen.gone) row('gone', [h('b', {}, many(seen.gone)), ` ${seen.gone === 1 ? 'token is' : 'tokens are'} gone`])
  if (other) row('other', [h('b', {}, many(other)), ` ${other === 1 ? 'message is' : 'messages are'} written otherwise`])
  return h('section', { class: 'card' }, h('h3', {}, `Since turn ${seen.before + 1}`), h('ul', { class: 'signs' }, rows))
}

function follows(whole, seen, n) {
  const turn = whole.turns[n]
  if (seen.before < 0) return null
  const words = seen.forked ? forkWords(whole, seen, n)
    : [`Turn ${n + 1} goes on where turn ${seen.before + 1} ended: the ${plural(seen.path.length, 'token')} before it are computed once.`]
  const cause = turn.fork_cause && h('p', { class: 'dim' }, 'cause: ', h('b', { class: 'mono ink' }, turn.fork_cause === 'messages' ? 'messages were rewritten' : `history: ${turn.fork_cause}`))
  return h('section', { class: 'card' }, h('h3', {}, 'What follows from it'), h('p', {}, words), cause)
}

/** What a fork costs, in tokens. */
export function forkWords(whole, seen, n) {
  const after = seen.path.length - seen.prefix
  const again = Math.max(0, after - seen.added)
  return [`Turn ${n + 1} does not continue turn ${seen.before + 1}’s tokens. It is trained on `, h('b', {}, 'a sequence of its own'),
    ` that forks after ${plural(seen.prefix, 'token')}, which are shared and computed once. The ${after.toLocaleString('en')} behind the fork are computed for it`,
    again ? [', ', h('b', {}, again.toLocaleString('en')), ' of them a second time.'] : '.']
}

function legend(whole) {
  const masked = whole.turns.some(turn => turn.mask?.includes(0))
  return h('section', { class: 'card' }, h('h3', {}, 'How it reads'), h('p', { class: 'dim keys' },
    h('span', { class: 'sp' }, 'mark'), ' a special token ', h('br'), h('span', { class: 'own' }, 'sampled'), ' by the model in an earlier turn ', h('br'),
    masked && [h('span', { class: 'masked' }, 'sampled'), ' and taken out of training ', h('br')], 'all else was given to it', h('br'),
    h('kbd', {}, '←'), ' ', h('kbd', {}, '→'), ' turn · ', h('kbd', {}, 'Esc'), ' trajectory'))
}

function drawn(whole, block, n) {
  const text = h('div', { class: 'text', dir: 'auto' })
  const masks = whole.turns.map(turn => turn.mask)
  const begins = whole.turns.map((_, k) => sampledIn(whole, k)[0])
  const special = new Set(whole.special)
  let run = null, kind = null
  for (const item of block.items) {
    const turn = whole.tokens.turn[item.place]
    const words = textOf(whole, item.place)
    const own = turn >= 0 && (masks[turn]?.[sampledIn(whole, turn).indexOf(item.place)] === 0 ? 'masked' : 'own')
    const is = special.has(whole.tokens.ids[item.place]) ? 'sp' : own || ''
    const mark = item.kind === 'gone' ? 'del' : item.kind === 'new' && block.sign === 'other' ? 'ins' : 'span'
    if (!run || kind !== mark + is || is === 'sp') {
      run = h(mark, { class: is })
      text.append(run)
      kind = mark + is
    }
    run.append(words)
  }
  if (block.next) text.append(h('span', { class: 'caret', 'aria-hidden': 'true' }), h('a', { class: 'on', href: link('trajectory', { session: whole.index.session, turn: n + 1 }) },
    `${plural(whole.turns[n].num_tokens, 'token')} were sampled from here`))
  const length = block.items.length
  const body = length > LONG || block.schema && length > 60 ? folded(text, `all ${length.toLocaleString('en')} tokens`) : text
  return h('div', { class: `block ${block.next ? 'next' : ''}` },
    h('div', { class: `sign ${block.sign}` }, block.sign && h('span', { role: 'img', 'aria-label': SPOKEN[block.sign] }, SIGNS[block.sign])),
    h('div', { class: 'role' }, block.role, block.note && h('small', {}, block.note), block.gone && h('small', {}, 'not in this context')),
    body, h('div', { class: 'count' }, `${block.gone ? '−' : ''}${length.toLocaleString('en')}`))
}
