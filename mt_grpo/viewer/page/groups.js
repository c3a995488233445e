// The groups of a step: what each member earned, how conversations branched, and whether the group teaches.

import { ask, exported } from './api.js'
import { chip, choice, groupLink, h, link, number, plural, s } from './dom.js'

const MOST_BARS = 240, WIDEST = 60
const WIDTH = 240, FLOOR = 34, RADIUS = 3.2
const ORDERS = { asked: () => 0, spread: (a, b) => (b.deviation ?? -1) - (a.deviation ?? -1), mean: (a, b) => (b.mean ?? -1e9) - (a.mean ?? -1e9) }

export async function groups(main, asked) {
  const view = await ask('groups', { mode: asked.get('mode'), step: asked.get('step') })
  const state = { show: asked.get('show') ?? 'all', order: asked.get('order') in ORDERS ? asked.get('order') : 'asked' }
  const mode = view.mode === 'train' ? '' : view.mode
  const at = view.steps.step.indexOf(view.step)
  const to = step => { if (step !== undefined) location.hash = link('groups', { mode, step, ...kept() }) }
  const kept = () => ({ show: state.show === 'all' ? '' : state.show, order: state.order === 'asked' ? '' : state.order })
  const list = h('section', { class: 'card groups', tabindex: '0', role: 'region', 'aria-label': `Groups of step ${view.step}` })
  const show = () => {
    const wanted = view.groups.filter(each => state.show === 'all' || each.signal === (state.show === 'signal'))
    const rows = wanted.slice().sort(ORDERS[state.order])
    list.replaceChildren(heading(view), ...rows.map(each => line(view, each)), rows.length ? '' : h('p', { class: 'nothing' }, 'There is none.'))
    top.replaceWith(top = head(view, state, set))
    history.replaceState(null, '', link('groups', { mode, step: view.step, ...kept() }))
  }
  const set = name => value => { state[name] = value; show() }
  let top = head(view, state, set)
  main.replaceChildren(top, scrubber(view, at, to), list, h('p', { class: 'dim note' }, h('kbd', {}, '←'), ' ', h('kbd', {}, '→'), ' step · ', h('kbd', {}, 'j'), ' ', h('kbd', {}, 'k'),
    ' group · ', h('kbd', {}, 'Enter'), ' opens it. Blue is above the group’s mean, orange below, grey where the group has no signal.'))
  show()
  const move = by => {
    const links = [...list.querySelectorAll('a.grow')]
    const next = links[links.indexOf(document.activeElement) + by] ?? links[by > 0 ? 0 : links.length - 1]
    next?.focus()
  }
  const refresh = async () => {
    const now = await ask('groups', { mode: view.mode, step: view.step })
    if (JSON.stringify(now.groups) !== JSON.stringify(view.groups) || now.steps.step.length !== view.steps.step.length) dispatchEvent(new Event('hashchange'))
  }
  return { title: `Groups of step ${view.step}`, refresh, keys: {
    ArrowLeft: () => to(view.steps.step[at - 1]), ArrowRight: () => to(view.steps.step[at + 1]), j: () => move(1), k: () => move(-1) } }
}

function head(view, state, set) {
  const signal = view.groups.filter(each => each.signal).length
  const size = view.groups[0].members.length
  const roots = new Set(view.groups[0].members.map(each => each.root)).size
  const of = roots < size ? `${plural(roots, 'conversation')} per group, ${size / roots} branches each` : `${plural(size, 'conversation')} per group`
  const where = { train: 'Step', eval: 'Evaluation at step', discarded: 'Sampled again, at step' }[view.mode]
  const counts = [['all', `all ${view.groups.length}`], ['signal', `signal ${signal}`], ['none', `none ${view.groups.length - signal}`]]
  return h('div', { class: 'bar' }, h('div', { class: 'words' }, h('p', { class: 'dim' }, of),
    h('h2', {}, `${where} ${view.step}: ${plural(view.groups.length, 'group')}, ${signal} with signal`)),
  h('div', { class: 'choices' }, choice('show', counts, state.show, set('show')),
    choice('order', [['asked', 'as asked'], ['spread', 'spread'], ['mean', 'mean']], state.order, set('order'))))
}

/** Groups with signal by step; a click goes to the step. */
function scrubber(view, at, to) {
  const { step, groups: all, signal } = view.steps
  const width = 1200, height = 62, low = 44
  const bars = Math.min(MOST_BARS, step.length)
  const edge = i => Math.floor(i * step.length / bars)
  const most = Math.max(...all)
  const wide = Math.min(width / bars, WIDEST)
  const svg = s('svg', { viewBox: `0 0 ${width} ${height}`, role: 'img', class: 'scrub-chart', 'aria-label': `Groups with signal by step, from step ${step[0]} to ${step.at(-1)}` })
  for (let i = 0; i < bars; i++) {
    const [from, end] = [edge(i), Math.max(edge(i) + 1, edge(i + 1))]
    const sum = values => values.slice(from, end).reduce((a, b) => a + b, 0) / (end - from)
    const [whole, some] = [sum(all) / most * (low - 4), sum(signal) / most * (low - 4)]
    const here = at >= from && at < end
    const box = { x: i * wide + Math.min(2, wide * 0.1), width: Math.max(1, wide - Math.min(4, wide * 0.2)) }
    svg.append(s('g', { class: 'bin', onclick: () => to(here ? view.step : step[from]) },
      s('title', {}, `step ${step[from]}: ${signal[from]} of ${plural(all[from], 'group')} with signal`),
      s('rect', { class: 'none', ...box, y: low - whole, height: whole }), s('rect', { class: 'signal', ...box, y: low - some, height: some }),
      here && s('rect', { class: 'here', x: i * wide - 1, width: Math.max(5, wide + 2), y: 1, height: low + 2, rx: 3 })))
  }
  const x = place => (Math.floor(place * bars / step.length) + 0.5) * wide
  const marks = [...new Set([0, step.length >> 2, step.length >> 1, 3 * step.length >> 2, step.length - 1])].filter(place => Math.abs(x(place) - x(at)) > 60)
  for (const place of [...marks, at]) {
    const anchor = x(place) < 40 ? 'start' : x(place) > width - 40 ? 'end' : 'middle'
    svg.append(s('text', { class: place === at ? 'on' : null, x: anchor === 'middle' ? x(place) : anchor === 'start' ? 2 : width - 2, y: height - 4, 'text-anchor': anchor }, place === at ? `step ${step[place]}` : String(step[place])))
  }
  const input = h('input', { type: 'number', id: 'to-step', min: step[0], max: step.at(-1), value: view.step, 'aria-label': 'Go to step' })
  input.addEventListener('change', () => to(input.value))
  const button = (by, text, name) => h('button', { type: 'button', 'aria-label': name, disabled: step[at + by] === undefined, onclick: () => to(step[at + by]) }, text)
  return h('section', { class: 'card scrub' }, h('h3', {}, 'Groups with signal, by step', h('span', { class: 'dim' }, ' · grey: no turn has an advantage')),
    h('div', {}, button(-1, '◀', 'Step before'), svg, button(1, '▶', 'Next step'), exported ? null : input))
}

function heading(view) {
  const branched = view.groups.some(hasBranches)
  return h('div', { class: `grow th ${branched ? 'branched' : ''}` }, h('span', {}), h('span', {}, 'question'),
    h('span', {}, `reward of each member, ${number(view.lowest, view.lowest ? 2 : 0)} to ${number(view.highest)}`), h('span', { class: 'n' }, 'mean ± std'),
    branched && h('span', {}, 'branches'), h('span', {}, 'stop'), h('span', {}, 'signal'))
}

const hasBranches = group => group.members.some(each => each.root !== each.member)

function line(view, group) {
  const branched = view.groups.some(hasBranches)
  return h('a', { class: `grow ${branched ? 'branched' : ''}`, href: groupLink(group.key) }, h('span', { class: 'dim' }, String(group.key.group + 1)),
    h('span', { class: 'q' }, group.prompt), spread(view, group),
    h('span', { class: 'n' }, h('b', {}, number(group.mean)), ` ± ${number(group.deviation)}`),
    branched && branches(group), h('span', { class: 'stops' }, Object.entries(group.stops).map(([stop, count]) => chip(stop, count))),
    h('span', { class: 'says' }, h('span', { class: `dot ${group.signal ? 'ok' : 'idle'}` }), h('span', {}, group.signal ? 'yes' : 'no', h('small', {}, group.says))))
}

const kindOf = (group, reward) => (!group.signal || reward === null ? 'same' : reward > group.mean ? 'hi' : reward < group.mean ? 'lo' : 'same')

/** Rewards on the axis that all groups of the step share; copies are no dots. */
function spread(view, group) {
  const counted = group.members.filter(each => !each.copy && each.reward !== null)
  const x = value => 6 + (value - view.lowest) / (view.highest - view.lowest || 1) * (WIDTH - 12)
  const svg = s('svg', { class: 'spread', viewBox: `0 0 ${WIDTH} ${FLOOR + 4}`, role: 'img', 'aria-label': `rewards ${counted.map(each => number(each.reward)).join(', ')}` },
    s('path', { class: 'base', d: `M2 ${FLOOR}H${WIDTH - 2}` }))
  if (group.deviation) {
    const [from, to] = [group.mean - group.deviation, group.mean + group.deviation].map(value => Math.min(Math.max(x(value), 2), WIDTH - 2))
    svg.append(s('rect', { class: 'range', x: from, y: 6, width: to - from, height: FLOOR - 6 }))
  }
  if (group.mean !== null) svg.append(s('path', { class: 'mean', d: `M${x(group.mean)} 4V${FLOOR + 3}` }))
  const stacks = new Map()
  for (const each of counted) {
    const place = Math.round(x(each.reward) / (2 * RADIUS))
    const level = stacks.get(place) ?? 0
    stacks.set(place, level + 1)
    const [column, row] = [Math.floor(level / 4), level % 4]
    svg.append(s('circle', { class: kindOf(group, each.reward), cx: x(each.reward) + (x(each.reward) > WIDTH / 2 ? -1 : 1) * column * 2 * RADIUS, cy: FLOOR - 4 - row * 2.1 * RADIUS, r: RADIUS }))
  }
  return svg
}

/** Conversations with the branches that share their first turns. */
export function branches(group) {
  const roots = [...new Set(group.members.map(each => each.root))]
  const trees = roots.map(root => group.members.filter(each => each.root === root))
  const rows = trees.map(tree => (tree.every(each => each.copy || each.root === each.member) ? 1 : tree.length))
  const row = 11, gap = 8, width = 268
  const height = rows.reduce((a, b) => a + b, 0) * row + gap * (roots.length - 1) + 8
  const svg = s('svg', { class: 'branch', viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label':
    trees.map((tree, i) => (rows[i] > 1 ? `${plural(tree.length, 'branch', 'branches')}: ${rewardsOf(tree)}` : `one conversation: ${number(tree[0].reward)}`)).join('; ') })
  const middle = height / 2
  let top = 4
  trees.forEach((tree, i) => {
    const size = rows[i] * row, y = top + size / 2
    const alone = rows[i] === 1
    svg.append(s('path', { d: `M2 ${middle}C14 ${middle} 8 ${y} 22 ${y}` }), s('path', { class: 'trunk', d: `M22 ${y}H66` }))
    if (alone) {
      const copies = tree.length - 1
      svg.append(s('circle', { class: kindOf(group, tree[0].reward), cx: 74, cy: y, r: 4.2 }),
        s('text', { x: 84, y: y + 4 }, `${number(tree[0].reward)}${copies ? `, did not branch: ${plural(copies, 'copy', 'copies')}` : ''}`))
    } else {
      const sorted = tree.slice().sort((a, b) => (b.reward ?? -1e9) - (a.reward ?? -1e9))
      sorted.forEach((each, n) => {
        const to = top + (n + 0.5) * row
        svg.append(s('path', { d: `M66 ${y}C82 ${y} 78 ${to} 94 ${to}H126` }), s('circle', { class: kindOf(group, each.reward), cx: 129, cy: to, r: 3.4 }))
      })
      svg.append(s('text', { x: 140, y: y + 4 }, rewardsOf(sorted)))
    }
    top += size + gap
  })
  return svg
}

/** Rewards with how often each occurs. */
function rewardsOf(tree) {
  const counts = new Map()
  for (const each of tree) counts.set(number(each.reward), (counts.get(number(each.reward)) ?? 0) + 1)
  return [...counts].map(([reward, count]) => (count > 1 ? `${reward} × ${count}` : reward)).join(' · ')
}
