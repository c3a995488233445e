// One conversation: its token tree, its turns with every token shaded, and a card for the token that is pointed at.

import { ask, inFile } from './api.js'
import { chip, choice, facts, groupLink, h, link, number, plural, signed } from './dom.js'
import { noteOf } from './notes.js'
import { large, shadesOf } from './shades.js'
import { treeCard } from './tree.js'
import { conversation, placesByTurn } from './turns.js'
import { whyPanel } from './why.js'

const NAMES = ['advantage', 'log-prob', 'engine − trainer', 'ratio', 'entropy']

export async function trajectory(main, asked) {
  const whole = await ask('trajectory', { session: asked.get('session') })
  const shades = shadesOf(whole.tokens, whole.updates)
  const places = placesByTurn(whole)
  const spans = []
  const state = { shade: NAMES.includes(asked.get('shade')) ? asked.get('shade') : 'advantage', at: null, pinned: false, why: null,
    reading: asked.get('read') === '1' }
  const list = { q: asked.get('q'), sort: asked.get('sort'), at: asked.get('at') }
  const tokenCard = h('section', { class: 'card' })
  const bar = h('div', { class: 'choices' })
  const session = whole.index.session

  const keepAddress = () => history.replaceState(null, '', link('trajectory',
    { session, shade: state.shade === 'advantage' ? '' : state.shade, why: state.why === null ? '' : state.why + 1, read: state.reading ? 1 : '', ...list }))
  const modes = choice('show', [[false, 'tokens'], [true, 'reading']], state.reading, value => {
    state.reading = value
    keepAddress()
    dispatchEvent(new Event('hashchange'))
  })
  const paint = () => {
    const shade = shades[state.shade]
    if (state.reading) return bar.replaceChildren(modes)
    performance.mark('shade')
    for (const turn of places) {
      for (const i of turn) {
        const kind = shade.shade(shade.values[i])
        if (spans[i].className !== kind) spans[i].className = kind
      }
    }
    if (state.at !== null) spans[state.at].classList.add('at')
    bar.replaceChildren(modes, choice('shade tokens by', NAMES.map(name => [name, name]), state.shade, name => {
      state.shade = name
      keepAddress()
      paint()
    }), legend(shade))
  }
  const point = (i, pinned) => {
    if (state.reading) return
    if (state.at !== null) spans[state.at].classList.remove('at')
    state.at = i
    state.pinned = pinned
    if (i !== null) spans[i].classList.add('at')
    tokenCard.setAttribute('aria-live', pinned ? 'polite' : 'off')
    tokenCard.replaceChildren(...ofToken(whole, shades, i, state.pinned))
  }
  const jump = direction => {
    if (state.reading) return
    const stops = large(shades[state.shade], places.flat())
    const from = state.at ?? (direction > 0 ? -1 : Infinity)
    const next = direction > 0 ? stops.find(i => i > from) ?? stops[0] : stops.findLast(i => i < from) ?? stops.at(-1)
    if (next === undefined) return
    point(next, true)
    spans[next].scrollIntoView({ block: 'center' })
  }
  let reasons = null
  const openWhy = async (n, keep = false) => {
    const close = state.why === n && !keep
    state.why = close ? null : n
    keepAddress()
    main.querySelector('.talk .why')?.remove()
    for (const button of main.querySelectorAll('.talk .open')) {
      const open = !close && button.closest('article').id === `turn-${n + 1}`
      button.setAttribute('aria-expanded', String(open))
      if (open) button.setAttribute('aria-controls', `why-${n + 1}`)
      else button.removeAttribute('aria-controls')
    }
    if (close) return
    const head = main.querySelector(`#turn-${n + 1} h4`)
    let panel
    try {
      reasons ??= await ask('why', { session })
      panel = whyPanel(whole, reasons, n)
    } catch (error) {
      panel = h('section', { class: 'why wrong' }, error.message)
    }
    if (state.why !== n) return
    main.querySelector('.talk .why')?.remove()
    head.after(panel)
    performance.mark('why')
  }
  /** The turn that a key is about: that of the token that is kept, the one that is open, or the first in sight. */
  const current = () => {
    if (state.at !== null && whole.tokens.turn[state.at] >= 0) return whole.tokens.turn[state.at]
    if (state.why !== null) return state.why
    const cards = [...main.querySelectorAll('.talk .turn')]
    return Math.max(0, cards.findIndex(card => card.getBoundingClientRect().bottom > 90))
  }
  const go = number => {
    const card = main.querySelector(`#turn-${number + 1}`)
    card.scrollIntoView({ block: 'start' })
  }

  const cards = h('div', { class: 'talk' }, conversation(whole, places, spans, openWhy, state.reading))
  cards.addEventListener('mouseover', event => {
    const i = event.target.closest('.tokens span')?.place
    if (i !== undefined && !state.pinned) point(i, false)
  })
  cards.addEventListener('click', event => {
    const i = event.target.closest('.tokens span')?.place
    if (i !== undefined) point(i, !(state.pinned && state.at === i))
  })
  main.replaceChildren(head(whole, bar), treeCard(whole, go), h('div', { class: 'reading' },
    h('aside', {}, outcome(whole), state.reading ? null : tokenCard, turnList(whole, go),
      toldBeside('Environment', whole.info), toldBeside('Teacher', whole.teacher_hint && { hint: whole.teacher_hint }), keys(state.reading)), cards))
  point(null, false)
  paint()
  const first = Number(asked.get('why')) - 1
  if (whole.turns[first]?.advantage !== undefined && whole.turns[first]?.advantage !== null) {
    await openWhy(first, true)
    if (first) setTimeout(() => go(first))
  }
  const turn = Number(asked.get('turn')) - 1
  if (whole.turns[turn]) setTimeout(() => go(turn))
  const refresh = async () => {
    const now = await ask('trajectory', { session })
    if (JSON.stringify(now.index) !== JSON.stringify(whole.index)) dispatchEvent(new Event('hashchange'))
  }
  return { title: session, refresh, keys: {
    d: () => { if (beside(whole)) location.hash = link('apart', { a: session, b: beside(whole) }) },
    j: () => follow(1), k: () => follow(-1), r: () => modes.querySelector('[aria-pressed=false]').click(), w: () => whole.turns.length && whole.index.mode !== 'eval' && openWhy(current()),
    c: () => { if (whole.turns.length) location.hash = link('context', { session, turn: current() + 1 }) }, n: () => jump(1), p: () => jump(-1), Escape: () => point(null, false),
    ArrowRight: () => step(1), ArrowLeft: () => step(-1) } }

  /** The next conversation of the list that this one was opened from; of its group, where there is none. */
  async function follow(by) {
    const kept = { shade: state.shade === 'advantage' ? '' : state.shade, read: state.reading ? 1 : '' }
    if (list.at === null) {
      const { sessions } = whole.group
      const next = sessions[sessions.indexOf(session) + by]
      if (next) location.replace(link('trajectory', { session: next, ...kept }))
      return
    }
    const at = Number(list.at) + by
    if (at < 0) return
    const { rows } = await ask('find', { q: list.q, sort: list.sort, offset: at, limit: 1 })
    if (rows.length) location.replace(link('trajectory', { session: rows[0].session, ...kept, ...list, at }))
  }

  function step(by) {
    const all = places.flat()
    const next = state.at === null ? places[current()]?.[0] : all[all.indexOf(state.at) + by]
    if (next === undefined || state.reading) return
    point(next, true)
    spans[next].scrollIntoView({ block: 'nearest' })
  }
}

function keys(reading) {
  const each = [['w', 'why this advantage'], ['c', 'what it saw'], ['d', 'difference'], ['r', reading ? 'tokens' : 'reading'], ...(reading ? [] : [['n', ''], ['p', 'next large token']]), ['j', ''], ['k', 'next conversation']]
  return h('section', { class: 'card' }, h('h3', {}, 'Keys'), h('p', { class: 'dim' }, each.map(([key, does], i) => [h('kbd', {}, key), does && ` ${does}`, does && i + 1 < each.length ? ' · ' : ' '])))
}

/** The conversation of the group that this one is set beside: the next, the one before, or any other. */
function beside({ group: { sessions }, index: { session } }) {
  const here = sessions.indexOf(session)
  return [sessions[here + 1], sessions[here - 1], ...sessions].find(each => each && each !== session && inFile(each))
}

/** Of a branch, whose. */
function ofBranch({ branch: { root, member, copy, shared }, branch_of }) {
  if (root === member) return null
  const whose = h('a', { href: link('trajectory', { session: branch_of }) }, `member ${root}`)
  return copy ? ['a copy of ', whose, ', which ended before it branched · '] : ['branches from ', whose, ` after ${plural(shared, 'turn')} · `]
}

function head(whole, bar) {
  const { sessions } = whole.group
  const here = sessions.indexOf(whole.index.session)
  const other = (n, text) => sessions[n] && h('a', { href: link('trajectory', { session: sessions[n] }) }, text)
  return h('div', { class: 'bar' }, h('div', { class: 'words' },
    h('p', { class: 'dim' }, `${whole.index.session} · member ${whole.index.member + 1} of ${sessions.length} · `, ofBranch(whole),
      h('a', { href: groupLink(whole.group) }, '◀ group'), ' ', other(here - 1, 'previous'), ' ', other(here + 1, 'next'),
      beside(whole) && [' · ', h('a', { href: link('apart', { a: whole.index.session, b: beside(whole) }) }, 'difference to another')]),
    h('h2', {}, whole.question),
    h('p', { class: 'in-short dim' }, 'reward ', h('b', { class: 'ink' }, number(whole.index.reward)), ' · ', h('bdi', { class: `mono ${{ true: 'right', false: 'wrong' }[whole.index.right] ?? 'ink'}` }, whole.answer ?? '–'),
      whole.accepted.length > 0 && [' · accepted ', h('b', { class: 'mono ink' }, whole.accepted.join(' · '))], ' ', chip(whole.stop_reason)), noteOf(whole.index.session)), bar)
}

function legend(shade) {
  if (shade.empty) return h('span', { class: 'dim' }, shade.missing)
  return h('span', { class: 'scale' }, shade.ends[0], h('span', { class: `ramp ${shade.kind}` }), shade.ends[1])
}

/** What it earned, and how it ended. */
export function outcome(whole) {
  const { index, rewards, short: names } = whole
  const each = Object.entries(rewards.outcome ?? {}).map(([name, value]) => [names[name].replaceAll('_', ' '), number(value)])
  const turns = Object.entries(rewards.turn ?? {}).map(([name, values]) =>
    [names[name].replaceAll('_', ' '), h('span', { title: `per turn: ${values.map(value => number(value)).join('  ')}` }, number(index.rewards[name]))])
  const mean = whole.group.sessions.length > 1 ? ` (group ${number(whole.group.mean)})` : ''
  return h('section', { class: 'card' }, h('h3', {}, 'Outcome'), facts([
    ['reward', h('span', { class: 'fit' }, h('b', {}, number(index.reward)), mean), 'ink'],
    ['stop', chip(whole.stop_reason), 'ink'],
    ['answer', h('span', { class: 'mono' }, whole.answer ?? '–'), 'ink'],
    whole.accepted.length > 0 && ['accepted', h('span', { class: 'mono' }, whole.accepted.join(' · ')), 'ink'],
    ...each,
    ...turns,
    ['seconds', number(whole.seconds)],
    whole.render_mismatch && ['tokenised otherwise', whole.render_mismatch],
  ]))
}

/** What is told beside the conversation, by the environment say; a log is folded. */
function toldBeside(title, told) {
  const entries = Object.entries(told ?? {})
  if (!entries.length) return null
  return h('section', { class: 'card' }, h('h3', {}, title), entries.map(([name, value]) => {
    const words = typeof value === 'string' ? value : JSON.stringify(value)
    if (words.length < 60 && !words.includes('\n')) return h('p', {}, h('span', { class: 'dim' }, `${name.replaceAll('_', ' ')} `), words)
    return h('details', {}, h('summary', {}, name.replaceAll('_', ' ')), h('pre', { class: 'code', dir: 'ltr' }, words))
  }))
}

function turnList(whole, go) {
  return h('section', { class: 'card' }, h('h3', {}, 'Turns'), h('table', { class: 'facts' }, h('tbody', {}, whole.turns.map((turn, n) => {
    const call = turn.tool_calls[0]
    const first = call && Object.values(call.arguments).find(value => typeof value === 'string')
    const what = call ? [call.name, ' ', h('span', { class: 'dim' }, first ?? '')]
      : turn.error !== null ? h('span', { class: 'problem' }, 'malformed') : n + 1 === whole.turns.length ? 'answer' : 'message'
    const side = turn.advantage > 0 ? 'above' : turn.advantage < 0 ? 'below' : ''
    return h('tr', {}, h('th', { scope: 'row' }, h('button', { type: 'button', class: 'as-link', onclick: () => go(n) }, String(n + 1)), ' ', what),
      h('td', { class: 'fit' }, h('b', { class: side }, signed(turn.advantage))))
  }))))
}

function ofToken(whole, shades, i, pinned) {
  const title = h('h3', {}, 'Token', h('span', { class: 'dim' }, pinned ? ' · kept; Esc lets go' : ''))
  if (i === null) {
    return [title, h('p', { class: 'dim' }, 'Point at one. A click keeps it; ', h('kbd', {}, 'n'), ' and ', h('kbd', {}, 'p'),
      ' go to the next with a large value.')]
  }
  const { tokens, updates, nodes } = whole
  const update = updates.at(-1)
  const depth = depthOf(nodes, i)
  const clipped = update?.clipped[i] ? ' · clipped' : ''
  const rows = [
    ['text', h('span', { class: 'mono' }, tokens.texts ? JSON.stringify(tokens.texts[i]) : '–')],
    ['id · position', `${tokens.ids[i]} · ${depth}, turn ${tokens.turn[i] + 1}`],
    ['advantage', h('b', {}, signed(tokens.advantages[i]))],
    ['log-prob, engine', number(tokens.logprobs[i], 4)],
    ['log-prob, trainer', number(tokens.trainer[i], 4)],
    ['engine − trainer', signed(shades['engine − trainer'].values[i], 4)],
    ['ratio new / old', update ? number(update.ratios[i], 3) + clipped : '–'],
    ['entropy', number(tokens.entropies[i], 3)],
  ]
  return [title, facts(rows)]
}

/** How many tokens the model had before this one. */
function depthOf(nodes, i) {
  let place = nodes.findIndex(node => node.begin <= i && i < node.end)
  let depth = i - nodes[place].begin
  while (nodes[place].parent >= 0) {
    place = nodes[place].parent
    depth += nodes[place].end - nodes[place].begin
  }
  return depth
}
