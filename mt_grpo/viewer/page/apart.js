// Two conversations side by side: their turns aligned, and the first token in which they differ.

import { ask, inFile } from './api.js'
import { sampledIn, textOf, words } from './context_tokens.js'
import { difference } from './difference.js'
import { chip, h, link, number, plural, signed } from './dom.js'
import { folded } from './fold.js'

const LONG = 600

export async function apart(main, asked) {
  const first = await ask('trajectory', { session: asked.get('a') })
  const { sessions } = first.group
  const mine = first.index.session
  const other = asked.get('b') || sessions.find(session => session !== mine && inFile(session))
  if (!other) throw new Error('There is no other conversation in this group: name one as b in the address.')
  const second = await ask('trajectory', { session: other })
  const sides = [first, second]
  const at = firstDifference(first, second)
  const pairs = aligned(first, second)
  const to = (a, b) => { if (a && b) location.hash = link('apart', { a, b }) }
  const field = (n, label) => {
    const input = h('input', { type: 'text', list: 'members', value: sides[n].index.session, 'aria-label': label, spellcheck: 'false', size: '28' })
    input.addEventListener('change', () => (n ? to(mine, input.value.trim()) : to(input.value.trim(), other)))
    return input
  }
  const mark = h('span', {})
  main.replaceChildren(
    h('div', { class: 'bar' }, h('div', { class: 'words' }, h('h2', {}, first.question === second.question ? first.question : 'Two conversations'), verdict(first, second, at, () => mark.scrollIntoView({ block: 'center' }))),
      h('div', { class: 'choices two' }, field(0, 'The one conversation'), h('button', { type: 'button', class: 'as-link', onclick: () => to(other, mine) }, '⇄ swap'), field(1, 'The other conversation'),
        h('datalist', { id: 'members' }, sessions.map(session => h('option', { value: session }))))),
    h('div', { class: 'pairs' }, sides.map(whole => h('p', { class: 'side-head' }, h('a', { href: link('trajectory', { session: whole.index.session }) }, `member ${whole.index.member + 1}`),
      h('span', {}, `step ${whole.index.step}`), h('span', {}, 'reward ', h('b', {}, number(whole.index.reward))), chip(whole.stop_reason), h('bdi', { class: 'mono' }, whole.answer ?? '–'))),
    first.question !== second.question && sides.map(whole => h('div', { class: 'said prompt', dir: 'auto' }, whole.question)),
    pairs.flatMap(([a, b]) => pair(first, second, a, b, at, mark))))
  return { title: 'Difference', keys: { f: () => mark.scrollIntoView({ block: 'center' }), Escape: () => { location.hash = link('trajectory', { session: mine }) } } }
}

/** Where what was sampled differs first: `turn` and `place` in it; null where all is the same. */
function firstDifference(a, b) {
  for (let turn = 0; turn < Math.max(a.turns.length, b.turns.length); turn++) {
    const [left, right] = [ids(a, turn), ids(b, turn)]
    const place = left.findIndex((id, i) => id !== right[i])
    if (place >= 0) return { turn, place }
    if (left.length < right.length) return { turn, place: left.length }
  }
  return null
}

const ids = (whole, turn) => (whole.turns[turn] ? sampledIn(whole, turn).map(i => whole.tokens.ids[i]) : [])

/** Turns that say the same side by side, those between them in their order: `[turn of a, turn of b]`, null for none. */
function aligned(a, b) {
  const said = whole => whole.turns.map((_, turn) => ids(whole, turn).join(' '))
  const pairs = []
  let left = [], right = []
  const flush = () => {
    for (let i = 0; i < Math.max(left.length, right.length); i++) pairs.push([left[i] ?? null, right[i] ?? null])
    left = []
    right = []
  }
  let at = 0
  for (const { kind, from, to } of difference(said(a), said(b)).steps) {
    const size = to - from
    if (kind === 'gone') { for (let i = 0; i < size; i++) left.push(at + i); at += size }
    else if (kind === 'new') for (let i = from; i < to; i++) right.push(i)
    else { flush(); for (let i = 0; i < size; i++) pairs.push([at + i, from + i]); at += size }
  }
  flush()
  return pairs
}

function verdict(a, b, at, go) {
  if (!at) return h('p', { class: 'dim' }, 'Both sampled the same tokens.')
  const shown = whole => {
    const i = whole.turns[at.turn] ? sampledIn(whole, at.turn)[at.place] : undefined
    return i === undefined ? h('span', { class: 'dim' }, 'nothing') : [h('b', { class: 'mono ink' }, JSON.stringify(textOf(whole, i))), ` (log-prob ${number(whole.tokens.logprobs[i])})`]
  }
  const same = at.turn ? (at.turn === 1 ? 'The first turn is the same. ' : `The first ${at.turn} turns are the same. `) : ''
  return h('p', { class: 'dim' }, same, h('button', { type: 'button', class: 'as-link', onclick: go }, `First difference: turn ${at.turn + 1}, token ${at.place + 1}`), ': ', shown(a), ' and ', shown(b), '.')
}

function pair(a, b, left, right, at, mark) {
  const [x, y] = [left === null ? [] : ids(a, left), right === null ? [] : ids(b, right)]
  const { steps } = difference(x, y)
  const gone = new Set(), added = new Set()
  for (const { kind, from, to } of steps) for (let i = from; i < to; i++) if (kind) (kind === 'gone' ? gone : added).add(i)
  return [card(a, left, gone, at, mark, true), card(b, right, added, at, null, false)]
}

function card(whole, turn, changed, at, mark, first) {
  if (turn === null) return h('div', { class: 'no-turn dim' }, 'no such turn')
  const about = whole.turns[turn]
  const block = h('div', { class: 'tokens', dir: 'auto' })
  sampledIn(whole, turn).forEach((i, place) => {
    const here = at && at.turn === turn && at.place === place
    if (here && mark) block.append(mark)
    const kind = [changed.has(place) ? first ? 'differs one' : 'differs other' : '', here ? 'first' : ''].join(' ').trim()
    block.append(h('span', { class: kind || null, title: here ? 'the first difference' : null }, textOf(whole, i)))
  })
  if (mark && at && at.turn === turn && at.place >= sampledIn(whole, turn).length) block.append(mark)
  const side = about.advantage > 0 ? 'above' : about.advantage < 0 ? 'below' : ''
  const replies = about.replies.map(words).join('\n')
  const said = h('span', {}, replies)
  return h('article', { class: `turn ${side}`, 'aria-label': `turn ${turn + 1}` },
    h('h4', { 'aria-level': '3' }, h('b', {}, `turn ${turn + 1}`), h('span', {}, 'advantage ', h('b', {}, signed(about.advantage))), h('span', {}, 'turn reward ', h('b', {}, number(whole.index.turn_rewards[turn]))),
      !changed.size && h('span', { class: 'chip' }, 'the same')), block,
    replies && h('div', { class: 'said', dir: 'auto' }, replies.length > LONG ? folded(said, `all ${plural(replies.length, 'character')}`) : said))
}
