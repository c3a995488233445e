// The conversations that answer one prompt, side by side: turns as segments from left to right.

import { ask } from './api.js'
import { diverging, growing } from './colours.js'
import { branches } from './groups.js'
import { chip, choice, groupLink, h, link, number, plural, rightSign, signed } from './dom.js'

const COLOURS = [['advantage', 'advantage'], ['reward', 'turn reward'], ['entropy', 'entropy']]
const WIDTHS = [['tokens', 'tokens'], ['seconds', 'seconds']]
const FULL_ADVANTAGE = 2
const SPARE = 0.97
const REPLY = 0.5
const ROOM_FOR_WORDS = 5
const LEAST = 50, MOST_OF_LEAST = 400

export async function group(main, asked) {
  const view = await ask('group', Object.fromEntries(['mode', 'step', 'k', 'group'].map(name => [name, asked.get(name)])))
  const chosen = { colour: asked.get('colour') ?? 'advantage', width: asked.get('width') ?? 'tokens' }
  const show = () => {
    const extra = { colour: chosen.colour === 'advantage' ? '' : chosen.colour, width: chosen.width === 'tokens' ? '' : chosen.width }
    history.replaceState(null, '', link('group', { ...view.key, ...extra }))
    const branched = view.members.some(member => member.branch.root !== member.row.member + 1)
    main.replaceChildren(head(view, chosen, show), branched ? tree(view) : '', table(view, chosen), ...notes(view.notes))
  }
  show()
  const refresh = async () => {
    const now = await ask('group', view.key)
    if (JSON.stringify(now.members) !== JSON.stringify(view.members)) dispatchEvent(new Event('hashchange'))
  }
  const to = key => { if (key) location.hash = groupLink(key) }
  const move = by => {
    const links = [...main.querySelectorAll('a.member')]
    const next = links[links.indexOf(document.activeElement) + by] ?? links[by > 0 ? 0 : links.length - 1]
    next?.focus()
  }
  return { title: `Group ${view.number} of step ${view.key.step}`, refresh, keys: {
    ArrowLeft: () => to(view.previous), ArrowRight: () => to(view.next), j: () => move(1), k: () => move(-1) } }
}

function head(view, chosen, show) {
  const copies = view.members.filter(member => member.branch.copy).length
  const earned = view.mean === null ? 'no reward' : `reward ${number(view.mean)} ± ${number(view.deviation)}`
  const answers = new Set(view.members.map(member => member.row.answer)).size
  const set = name => value => { chosen[name] = value; show() }
  const step = (key, text) => key ? h('a', { href: groupLink(key) }, text) : h('span', { class: 'dim' }, text)
  const where = { train: '', eval: 'evaluation at ', discarded: 'sampled again, at ' }[view.key.mode]
  return h('div', { class: 'bar' },
    h('div', { class: 'words' },
      h('p', { class: 'dim' }, h('a', { href: link('groups', { mode: view.key.mode === 'train' ? '' : view.key.mode, step: view.key.step }) }, `${where}step ${view.key.step}`), ` · group ${view.number} of ${view.of} · `,
        step(view.previous, '◀ previous'), ' ', step(view.next, 'next ▶')),
      h('h2', {}, view.question),
      h('p', { class: 'dim' }, view.accepted.length > 0 && ['accepted: ', h('b', { class: 'mono ink' }, view.accepted.join(' · ')), ' · '],
        `${plural(view.members.length - copies, 'conversation')}${copies ? ` and ${plural(copies, 'copy', 'copies')}` : ''}, ${earned}, ${plural(answers, 'answer')}`)),
    h('div', { class: 'choices' }, choice('colour', COLOURS, chosen.colour, set('colour')),
      choice('width', WIDTHS, chosen.width, set('width'))))
}

/** How the members of the group branched. */
function tree(view) {
  const members = view.members.map(member => member.branch)
  const roots = new Set(members.map(each => each.root)).size
  return h('section', { class: 'card of-branches' }, h('h3', {}, 'Branches', h('span', { class: 'dim' },
    ` · ${plural(roots, 'conversation')}, ${plural(members.length - roots, 'branch', 'branches')} and copies of them; first turns are shared`)),
  branches({ members, mean: view.mean, signal: view.deviation > 0 }))
}

function table(view, chosen) {
  const size = part => (part === null ? 0 : chosen.width === 'tokens' ? part.tokens : part.seconds)
  const length = member => member.turns.reduce((sum, turn) => sum + size(turn) + REPLY * size(turn.reply), 0)
  const longest = Math.max(...view.members.map(length), 1e-9)
  const highest = Math.max(...view.members.map(member => member.row.reward ?? 0), 1e-9)
  const legend = h('span', { class: 'legend' }, 'turns, left to right', ...meanings(chosen.colour),
    h('span', { class: 'key reply' }, 'environment, at half width'), h('span', { class: 'key reply wrong' }, 'error'))
  const columns = view.rewards.length
  const heat = h('span', { class: 'heat', css: { '--columns': columns } }, view.rewards.map(reward =>
    h('span', { title: reward.name }, brieflyNamed(reward.short, view.rewards))))
  return h('section', { class: 'card group', css: { '--heat': `${Math.max(60, columns * 42)}px` } },
    h('div', { class: 'member th' }, h('span', {}, ''), h('span', {}, 'reward · stop'), legend, h('span', {}, 'answer'), heat,
      h('span', { class: 'n' }, 'time')),
    folded(view.members).map(same => lines(view, same, { size, longest, highest, colour: chosen.colour })))
}

/** Members in a line each, those that sampled the same tokens in one. */
function folded(members) {
  const lines = new Map()
  for (const member of members) {
    const key = member.row.sampled === null ? member.row.session : `${member.row.sampled} ${member.row.turns} ${member.row.reward}`
    lines.set(key, [...(lines.get(key) ?? []), member])
  }
  return [...lines.values()]
}

/** A line, and below it those that are folded into it, behind a button. */
function lines(view, members, drawn) {
  const [first, ...others] = members
  if (!others.length) return line(view, first, drawn)
  const words = same(members)
  const button = h('button', { type: 'button', class: 'as-link same', 'aria-expanded': 'false', onclick: () => {
    const open = box.classList.toggle('open')
    button.setAttribute('aria-expanded', String(open))
    button.textContent = `${open ? '▾' : '▸'} ${words}`
    inside.replaceChildren(...(open ? others.map(member => line(view, member, drawn)) : []))
  } }, `▸ ${words}`)
  const inside = h('div', {})
  const box = h('div', { class: 'folded' }, line(view, first, drawn), button, inside)
  return box
}

/** Who is folded into a line: copies of its conversation, and others that sampled the same. */
function same(members) {
  const others = members.slice(1)
  const copies = others.filter(member => member.branch.copy).length
  const equal = others.length - copies
  const words = [copies && plural(copies, 'copy', 'copies'), equal && `${equal} the same`].filter(Boolean)
  return `${words.join(', ')}: ${plural(others.length, 'member').replace(/^\d+ /, '')} ${others.map(member => member.row.member + 1).join(', ')}`
}

/** The first words of a name, as many as tell it apart from the others. */
function brieflyNamed(name, rewards) {
  const words = name.split('_')
  for (let n = 1; n < words.length; n++) {
    const start = words.slice(0, n).join('_')
    if (rewards.filter(other => other.short === start || other.short.startsWith(start + '_')).length === 1) return words.slice(0, n).join(' ')
  }
  return words.join(' ')
}

function meanings(colour) {
  if (colour === 'entropy') return [h('span', { class: 'key t6' }, 'uncertain')]
  const name = colour === 'advantage' ? ['above the group', 'below'] : ['rewarded', 'punished']
  return [h('span', { class: 'key p6' }, name[0]), h('span', { class: 'key m6' }, name[1])]
}

function line(view, member, { size, longest, highest, colour }) {
  const { row, turns } = member
  const of = member.branch.root === row.member + 1 ? '' : ` of ${member.branch.root}`
  const kind = { true: 'right', false: 'wrong' }[row.right] ?? ''
  return h('a', { class: 'member', href: link('trajectory', { session: row.session }) },
    h('span', { class: 'dim', title: of && `branch${of}, which shares ${plural(member.branch.shared, 'turn')}` }, String(row.member + 1), of && h('small', {}, of)),
    h('span', {}, h('b', { class: 'reward' }, number(row.reward)), ' ', chip(row.stop),
      h('span', { class: 'gauge' }, h('span', { css: { width: `${Math.max(0, (row.reward ?? 0) / highest) * 100}%` } }))),
    h('span', { class: 'turns' }, turns.flatMap(turn => segments(turn, size, longest, colour, turns.length))),
    h('span', { class: `mono answer ${kind}`, title: row.answer ?? '' }, rightSign(row.right), row.answer ?? '–'),
    h('span', { class: 'heat' }, view.rewards.map(reward => {
      const value = row.rewards[reward.name]
      return h('span', { class: growing(value, reward.largest * 1.6, 'g') }, value === null || value === undefined ? '–' : brief(value))
    })),
    h('span', { class: 'dim n' }, `${number(row.seconds, 1)} s`, h('br'), `${row.tokens.reduce((a, b) => a + b, 0)} tok`))
}

const brief = x => (Number.isInteger(x) ? String(x) : number(x)).replace(/^(−?)0\./, '$1.')

function segments(turn, size, longest, colour, count) {
  const share = part => size(part) / longest * SPARE * 100
  const value = turn[colour]
  const shade = { advantage: () => diverging(value, FULL_ADVANTAGE), reward: () => diverging(value, 1),
    entropy: () => growing(value, 1.5, 't') }[colour]()
  const least = Math.min(LEAST, MOST_OF_LEAST / count)  // of many turns none shows words
  const wide = least === LEAST || share(turn) > ROOM_FOR_WORDS
  const text = colour === 'advantage' ? signed(value) : number(value)
  const drawn = [h('span', { class: `turn-part ${shade} ${wide ? '' : 'thin'}`, css: { width: `${share(turn)}%`, 'min-width': `${least}px` },
    title: `${text}\n${turn.text}` }, wide && [h('em', {}, text), turn.label])]
  if (turn.reply) {
    const wrong = turn.reply.error !== null
    drawn.push(h('span', { class: `reply ${wrong ? 'wrong' : ''}`, css: { width: `${REPLY * share(turn.reply)}%` },
      title: turn.reply.text }))
  }
  return drawn
}

function notes(found) {
  return found.map(note => h('p', { class: 'dim note' }, 'Member ', h('a', { href: link('trajectory', { session: note.session }) },
    String(note.member)), ` had it: turn ${note.turn} has `, h('b', { class: 'mono' }, note.answer),
  ', but could not be read. It went on, and ended without it.'))
}
