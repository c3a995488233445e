// Why a turn has its advantage: the terms of its credit rule as an equation, each with the group's values behind it.

import { h, link, number, plural, s, signed } from './dom.js'

const WIDTH = 340, HEIGHT = 74, FLOOR = 50, EDGE = 6, RADIUS = 4.4
const LEAST_PLACES = 4, MOST_PLACES = 8
const MOST_COLUMNS = 6, MOST_SENTENCES = 4
const EPSILON = 1e-4

/** The panel of a turn; `view` is what the server says of its conversation. */
export function whyPanel(whole, view, n) {
  const turn = view.turns[n]
  const title = `Why the advantage of turn ${n + 1} is ${signed(turn.advantage)}`
  return h('section', { class: 'why', id: `why-${n + 1}`, 'aria-label': title },
    ruleLine(view), turn.terms.length ? equation(whole, view, turn, n) : groupAlone(whole, view, n),
    sentences(view, turn, n))
}

function ruleLine(view) {
  if (!view.rule) return h('p', { class: 'rule' }, 'This run did not record its credit rule.')
  const { name, ...options } = view.rule
  return h('p', { class: 'rule' }, h('span', {}, 'rule'), h('b', {}, name),
    Object.entries(options).map(([option, value]) => h('span', { class: 'chip' }, `${option} ${value}`)),
    view.says && h('span', {}, view.says))
}

function equation(whole, view, turn, n) {
  const places = placesFor(turn.terms.map(term => term.value))
  const boxes = turn.terms.flatMap((term, i) =>
    [i ? h('span', { class: 'op', 'aria-hidden': 'true' }, '+') : null, termBox(whole, view, term, n, places)])
  return h('div', { class: `equation ${turn.terms.length === 1 ? 'single' : ''}` }, boxes,
    h('span', { class: 'op', 'aria-hidden': 'true' }, '='), sumBox(whole, turn, n, places))
}

/** As few digits as show terms that add up to the sum that is shown, four at least. */
function placesFor(values) {
  const sum = values.reduce((a, b) => a + b, 0)
  for (let places = LEAST_PLACES; places <= MOST_PLACES; places++) {
    const shown = values.reduce((a, b) => a + +b.toFixed(places), 0)
    if (shown.toFixed(places).replace(/^-(0\.0*)$/, '$1') === sum.toFixed(places).replace(/^-(0\.0*)$/, '$1')) return places
  }
  return LEAST_PLACES
}

const side = value => (value > 0 ? 'above' : value < 0 ? 'below' : '')

function termBox(whole, view, term, n, places) {
  const coefficient = term.rewards.find(row => row.kind === 'turn')?.coefficient ?? 1
  return h('div', { class: 'part' },
    h('h5', { 'aria-level': '4' }, h('span', {}, term.name, coefficient !== 1 && h('span', { class: 'dim' }, ` × turn_coef ${coefficient}`)),
      h('b', { class: side(term.value) }, signed(term.value, places))),
    formula(term), h('div', { class: 'behind' },
      term.values.length > 0 && h('div', {}, strip(term, view, whole), h('p', { class: 'dim of' }, whose(term))),
      table(whole, term, n)))
}

/** A reward with two digits where these are all, else with up to four. */
const exact = x => number(x, [2, 3].find(places => Math.abs(x - +x.toFixed(places)) < 1e-6) ?? LEAST_PLACES)

function formula(term) {
  const { earned, baseline, scale, deviation } = term
  if (baseline === null && scale === null) return null
  const from = baseline === null ? [] : [baseline < 0 ? ' + ' : ' − ', number(Math.abs(baseline), LEAST_PLACES)]
  const over = scale === null || scale === 1 ? '' : deviation ? ` / (${number(deviation.value, LEAST_PLACES)} + ${EPSILON})`
    : ` / ${number(scale, LEAST_PLACES)}`
  const [open, close] = over && from.length ? ['(', ')'] : ['', '']
  return h('p', { class: 'formula' }, open, h('b', {}, exact(earned)), from, close, over)
}

function whose({ of, deviation, scale }) {
  const mean = of ? `mean of ${of}` : ''
  if (deviation && deviation.of === of) return `mean and deviation (n − 1) of ${of}`
  if (deviation) return `${mean}, deviation (n − 1) of ${deviation.of}`
  return scale === 1 ? `${mean}, not divided` : mean
}

/** The group's values on a line, this conversation's filled. */
function strip({ values, baseline, deviation, name }, view, whole) {
  const mine = whole.index.member + 1
  const numbers = values.map(([, value]) => value)
  const spread = deviation?.here ? deviation.value : null
  const low = Math.min(0, ...numbers), high = nice(Math.max(...numbers, low + 1e-9))
  const x = value => EDGE + (Math.min(Math.max(value, low), high) - low) / (high - low || 1) * (WIDTH - 2 * EDGE)
  const me = numbers[values.findIndex(([member]) => member === mine)]
  const text = `mean ${number(baseline)}${spread === null ? '' : ` ± ${number(spread)}`}`
  const svg = s('svg', { class: 'strip', viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: 'img',
    'aria-label': `${name}: the values of ${plural(values.length, 'conversation')}, this one at ${exact(me)}, ${text}` })
  if (spread !== null) {
    const from = x(baseline - spread)
    svg.append(s('rect', { class: 'range', x: from, y: 8, width: x(baseline + spread) - from, height: FLOOR - 8, rx: 3 }))
  }
  svg.append(s('path', { class: 'axis', d: `M${EDGE} ${FLOOR}H${WIDTH - EDGE}` }),
    s('path', { class: 'mean', d: `M${x(baseline)} 8V${FLOOR + 4}` }))
  const stacks = new Map()
  const highest = Math.max(...[...count(numbers.map(value => Math.round(x(value) / RADIUS))).values()])
  const step = Math.min(10.4, (FLOOR - 14) / Math.max(1, highest - 1))
  const dots = values.map(([member, value]) => [member === mine, value]).sort((a, b) => b[0] - a[0])
  for (const [own, value] of dots) {
    const place = Math.round(x(value) / RADIUS)
    const level = stacks.get(place) ?? 0
    stacks.set(place, level + 1)
    svg.append(s('circle', { class: own ? `me ${side(value - baseline)}` : '', cx: x(value), cy: FLOOR - 6 - level * step, r: RADIUS },
      s('title', {}, exact(value))))
  }
  const at = Math.min(Math.max(x(baseline), 70), WIDTH - 70)
  svg.append(s('text', { class: 'me', x: at, y: 68, 'text-anchor': 'middle' }, text))
  if (at > 110) svg.append(s('text', { x: EDGE, y: 68 }, number(low, low ? 2 : 0)))
  if (at < WIDTH - 110) svg.append(s('text', { x: WIDTH - EDGE, y: 68, 'text-anchor': 'end' }, String(+high.toPrecision(3))))
  return svg
}

function count(keys) {
  const found = new Map()
  for (const key of keys) found.set(key, (found.get(key) ?? 0) + 1)
  return found
}

/** The next number that reads well. */
function nice(x) {
  const unit = 10 ** Math.floor(Math.log10(Math.max(x, 1e-9)))
  return unit * [1, 2, 3, 4, 5, 6, 8, 10].find(step => step * unit >= x * 0.999)
}

/** Every reward × weight, turn rewards with a column for each turn. */
function table(whole, term, n) {
  const outcomes = term.rewards.filter(row => row.kind === 'outcome')
  const turns = term.rewards.filter(row => row.kind === 'turn')
  const parts = []
  if (outcomes.length) parts.push(outcomeTable(outcomes))
  if (turns.length) parts.push(turnTable(turns, n))
  if (term.others.length) {
    parts.push(h('table', { class: 'terms' }, h('tbody', {}, term.others.map(({ name, value }) =>
      h('tr', {}, h('th', { scope: 'row' }, name), h('td', {}, exact(value)))))))
  }
  return h('div', { class: 'tables', tabindex: '0', role: 'group', 'aria-label': 'rewards and weights' }, parts)
}

const weight = x => `× ${+x.toPrecision(4)}`
const value = x => (x === null || x === undefined ? '–' : exact(x))

function outcomeTable(rows) {
  const discounted = rows.some(row => row.factor !== null && Math.abs(row.factor - 1) > 1e-6)
  const sum = rows.every(row => row.earned !== null) && rows.reduce((total, row) => total + row.earned, 0)
  const factor = rows.find(row => row.factor !== null)?.factor
  return h('table', { class: 'terms' },
    h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, 'outcome'), ['value', 'weight', ...(discounted ? ['counts'] : []), '='].map(name => h('td', {}, name)))),
    h('tbody', {}, rows.map(row => h('tr', {}, h('th', { scope: 'row' }, row.name), h('td', {}, value(row.value)),
      h('td', { class: 'x' }, weight(row.weight)), discounted && h('td', { class: 'x' }, weight(row.factor ?? factor)),
      h('td', {}, row.earned === null ? '' : exact(row.earned))))),
    rows.length > 1 && sum !== false && h('tfoot', {}, h('tr', {}, h('th', { scope: 'row' }, 'this conversation'),
      h('td', { colspan: discounted ? 3 : 2 }), h('td', { class: 'got' }, exact(sum)))))
}

function turnTable(rows, n) {
  const length = rows[0].values.length
  const factors = rows[0].factors
  const shown = columns(rows, n)
  const known = rows.every(row => row.earned !== null)
  const counts = factors && shown.some(k => factors[k] !== 1)
  const left = length - shown.length
  return h('table', { class: 'terms' },
    h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, 'turn reward', left > 0 && h('span', {}, ` · ${plural(left, 'turn')} more`)),
      shown.map(k => h('td', { class: k === n ? 'ink' : null }, `turn ${k + 1}`)), h('td', {}, 'weight'), h('td', {}, '='))),
    h('tbody', {}, rows.map(row => h('tr', {}, h('th', { scope: 'row' }, row.name), shown.map(k => h('td', {}, value(row.values[k]))),
      h('td', { class: 'x' }, weight(row.weight)), h('td', {}, row.earned === null ? '' : exact(row.earned))))),
    h('tfoot', {}, counts && h('tr', { class: 'counts' }, h('th', { scope: 'row' }, `counts at turn ${n + 1}`),
      shown.map(k => h('td', {}, weight(factors[k]))), h('td', {}), h('td', {})),
    known && rows.length > 1 && h('tr', {}, h('th', { scope: 'row' }, counts || !factors ? `to turn ${n + 1}` : `all turns, to turn ${n + 1}`),
      shown.map(() => h('td', {})), h('td', {}), h('td', { class: 'got' }, exact(rows.reduce((sum, row) => sum + row.earned, 0))))))
}

/** The turns that have a column: this one, those with a reward, then those before and after it. */
function columns(rows, n) {
  const length = rows[0].values.length
  const earns = k => rows.some(row => row.values[k])
  const order = [...Array(length).keys()].sort((a, b) => (b === n) - (a === n) || earns(b) - earns(a) || Math.abs(a - n) - Math.abs(b - n))
  return order.slice(0, MOST_COLUMNS).sort((a, b) => a - b)
}

function sumBox(whole, turn, n, places) {
  const masked = (whole.turns[n].mask ?? []).filter(each => !each).length
  const tokens = whole.turns[n].num_tokens
  const words = masked ? `On ${tokens - masked} of the turn’s ${plural(tokens, 'token')}; ${masked} are taken out of training.`
    : `On each of the turn’s ${plural(tokens, 'token')}; none is masked.`
  return h('div', { class: 'part sum' },
    h('h5', { 'aria-level': '4' }, `turn ${n + 1}`, h('b', { class: side(turn.sum) }, signed(turn.sum, places))),
    h('p', { class: 'formula' }, 'shown as ', h('b', {}, signed(turn.advantage))), fall(turn), h('p', { class: 'dim' }, words))
}

/** From 0 to the sum in steps. */
function fall(turn) {
  const steps = turn.terms.length > 1 ? turn.terms.map(term => [term.name, term.value]) : stepsOf(turn.terms[0])
  let at = 0
  const bars = steps.map(([name, size]) => [name, at, at += size])
  bars.push(['sum', 0, turn.sum])
  const ends = bars.flatMap(([, from, to]) => [from, to])
  const low = Math.min(0, ...ends), high = Math.max(0, ...ends)
  const width = 190, row = 31
  const x = size => 10 + (size - low) / (high - low || 1) * (width - 20)
  const height = row * bars.length + 18
  const spoken = steps.map(([name, size]) => `${name} ${signed(size, 4)}`).join(', then ')
  const svg = s('svg', { class: 'fall', viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': `${spoken}, sum ${signed(turn.sum, 4)}` })
  svg.append(s('path', { class: 'zero', d: `M${x(0)} 2V${height - 14}` }))
  bars.forEach(([name, from, to], i) => {
    const y = i * row
    const kind = `${side(to - from)} ${name === 'sum' ? 'all' : ''}`
    svg.append(s('text', x(0) < width / 2 ? { x: width - 2, y: y + 12, 'text-anchor': 'end' } : { x: 2, y: y + 12 }, name),
      s('rect', { class: kind, x: Math.min(x(from), x(to)), y: y + 17, width: Math.max(1, Math.abs(x(to) - x(from))), height: 9, rx: 2 }))
    if (i + 1 < bars.length) svg.append(s('path', { class: 'join', d: `M${x(to)} ${y + 26}V${y + row + 17}` }))
  })
  svg.append(s('text', { x: x(0), y: height - 3, 'text-anchor': x(0) > width - 30 ? 'end' : x(0) < 30 ? 'start' : 'middle' }, '0'))
  return svg
}

function stepsOf(term) {
  const scale = term.scale ?? 1
  const sum = kind => term.rewards.filter(row => row.kind === kind).reduce((total, row) => total + (row.earned ?? 0), 0)
  const whole = term.rewards.some(row => row.earned === null)
  const steps = whole ? [['earned', term.earned / scale]]
    : [['outcome', sum('outcome') / scale], ['turn rewards', sum('turn') / scale], ...term.others.map(({ name, value }) => [name, value / scale])]
  return [...steps, ['baseline', term.baseline === null ? 0 : -term.baseline / scale]].filter(([, size]) => Math.abs(size) > 1e-9)
}

/** What stands for the parts where the rule gives none. */
function groupAlone(whole, view, n) {
  const counted = view.members.filter(each => !each.copy)
  const rewards = counted.filter(each => each.reward !== null).map(each => [each.member, each.reward])
  const credited = counted.filter(each => each.advantages[n] !== undefined).map(each => [each.member, each.advantages[n]])
  const box = (name, values) => values.length > 0 && h('div', { class: 'part' }, h('h5', { 'aria-level': '4' }, name), alone(name, values, view, whole))
  return [h('p', { class: 'rule' }, 'This rule does not say what its advantages are the sum of; these are the group’s values.'),
    h('div', { class: 'equation' }, box('reward', rewards), box(`advantage at turn ${n + 1}`, credited))]
}

function alone(name, values, view, whole) {
  const numbers = values.map(([, each]) => each)
  const mean = numbers.reduce((a, b) => a + b, 0) / numbers.length
  const squares = numbers.reduce((sum, each) => sum + (each - mean) ** 2, 0)
  const deviation = numbers.length > 1 ? { value: Math.sqrt(squares / (numbers.length - 1)), here: true } : null
  const mine = values.some(([member]) => member === whole.index.member + 1)
  return [mine && strip({ values, baseline: mean, deviation, name }, view, whole),
    h('p', { class: 'dim of' }, `${plural(values.length, 'conversation')}, mean ${number(mean, 4)}${deviation ? ` ± ${number(deviation.value, 4)}` : ''}`)]
}

// What is credited to another turn

function sentences(view, turn, n) {
  const rule = view.rule?.name ?? 'the rule'
  const own = turn.moved.filter(each => each.kind !== 'group').map(each => sentence(each, rule, n))
  const group = turn.moved.filter(each => each.kind === 'group').sort((a, b) => b.members.length - a.members.length)
  const all = [...own, ...group.slice(0, MOST_SENTENCES).map(each => ofGroup(each, rule))]
  return all.map(words => h('p', { class: 'moved' }, s('svg', { width: 18, height: 16, viewBox: '0 0 18 16', 'aria-hidden': 'true' },
    s('path', { d: 'M16 13V7H3M7 3 3 7l4 4', fill: 'none', stroke: 'currentColor', 'stroke-width': 1.6 })), h('span', {}, words)))
}

function sentence({ kind, from, to, amount, share }, rule, n) {
  const counts = share !== undefined && Math.abs(share - amount) > 1e-9 ? `, counted as ${exact(share)}` : ''
  return {
    away: [h('b', {}, `This turn’s reward counts at ${turnsNamed(to)}, not here.`), ` ${rule} gives turn ${from}’s ${exact(amount)} to ${turnsNamed(to)}.`],
    here: [h('b', {}, `Turn ${from}’s reward counts here, not at turn ${from}.`), ` ${rule} gives turn ${from}’s ${exact(amount)} to turn ${n + 1}${counts}.`],
    later: [`${rule} gives turn ${from}’s ${exact(amount)} to turn ${n + 1} too${counts}.`],
    earlier: [`${rule} gives turn ${from}’s ${exact(amount)}, which was earned before, to turn ${n + 1} too${counts}.`],
  }[kind]
}

function ofGroup({ from, to, members, amount }, rule) {
  const links = members.map((each, i) => [i ? (i + 1 < members.length ? ', ' : ' and ') : '',
    h('a', { href: link('trajectory', { session: each.session, why: to[0] }) }, String(each.member))])
  return [`In this group ${members.length === 1 ? 'member' : 'members'} `, links,
    ` earned ${exact(amount)} at turn ${from}, and ${rule} gives it to ${members.length === 1 ? 'its' : 'their'} ${turnsNamed(to)}.`]
}

function turnsNamed(numbers) {
  if (numbers.length === 1) return `turn ${numbers[0]}`
  const run = numbers.every((each, i) => !i || each === numbers[i - 1] + 1)
  return run && numbers.length > 2 ? `turns ${numbers[0]} to ${numbers.at(-1)}` : `turns ${numbers.slice(0, -1).join(', ')} and ${numbers.at(-1)}`
}
