// Several runs: a list with the state of each, and those that are ticked against each other.

import { ask } from './api.js'
import { h, link, nothing, number, percent, plural, rightSign, s, short } from './dom.js'

const MOST = 7, MOST_ROWS = 500
/** The colour of each state. */
export const DOTS = { running: 'run', finished: 'ok', stopped: 'off', failed: 'bad', died: 'bad', unknown: 'off' }
const STATES = ['running', 'finished', 'stopped', 'failed', 'died']
const HEIGHT = 260

export async function runs(main, asked) {
  const state = { ticked: (asked.get('with') ?? '').split('\n').filter(Boolean), metric: asked.get('metric') ?? 'reward',
    by: asked.get('by') ?? 'step', sort: asked.get('sort') ?? '', show: '', text: '' }
  const kinds = h('span', { class: 'kinds' })
  const input = h('input', { type: 'search', 'aria-label': 'Name, rule or model', placeholder: 'name, rule or model' })
  const list = h('div', { class: 'runs', role: 'table', 'aria-label': 'Runs' })
  const below = h('div', { class: 'against' })
  const url = () => link('runs', { with: state.ticked.join('\n'), metric: state.metric === 'reward' ? null : state.metric,
    by: state.by === 'step' ? null : state.by, sort: state.sort })
  let answer = await ask('runs')
  const sound = answer.runs.filter(run => !run.error), trained = sound.filter(run => run.reward.length)
  if (!asked.has('with')) state.ticked = (trained.length ? trained : sound).slice(0, 2).map(run => run.name)
  state.ticked = state.ticked.filter(name => answer.runs.some(run => run.name === name))

  const draw = () => {
    const count = kind => answer.runs.filter(run => run.status === kind).length
    kinds.replaceChildren(...['', ...STATES].filter(kind => !kind || count(kind)).map(kind =>
      h('button', { type: 'button', 'aria-pressed': String(state.show === kind), onclick: () => { state.show = kind; draw() } },
        kind ? h('span', { class: `dot ${DOTS[kind]}` }) : null, `${kind || 'all'} `, h('b', {}, kind ? count(kind) : answer.runs.length))))
    const text = state.text.toLowerCase()
    const rows = answer.runs.filter(run => (!state.show || run.status === state.show)
      && [run.name, run.rule, run.model].some(each => (each ?? '').toLowerCase().includes(text)))
    list.replaceChildren(head(state, sortBy), ...sorted(rows, state.sort).map(run => row(run, state, tick)), rows.length ? '' : nothing('No run is like this.'))
  }
  const sortBy = name => {
    state.sort = { [`-${name}`]: name, [name]: '' }[state.sort] ?? `-${name}`
    history.replaceState(null, '', url())
    draw()
    list.querySelector(`.run-${name} button`).focus()
  }
  const tick = name => {
    state.ticked = state.ticked.includes(name) ? state.ticked.filter(each => each !== name) : [...state.ticked, name].slice(-MOST)
    history.replaceState(null, '', url())
    draw()
    compare()
  }
  let turn = 0
  const compare = async () => {
    const mine = ++turn
    if (!state.ticked.length) return below.replaceChildren(nothing('Tick runs to lay their curves over each other.'))
    const names = state.ticked.join('\n')
    const [curves, asked_] = await Promise.all([ask('curves', { runs: names, metric: state.metric, by: state.by }),
      ask('questions', { runs: names }).catch(error => ({ error: error.message }))])
    if (mine !== turn) return
    const change = values => { Object.assign(state, values); history.replaceState(null, '', url()); compare() }
    below.replaceChildren(curves.metrics.length > 1 ? curvesCard(curves, state, change) : '', questionsCard(asked_, state))  // models that were evaluated have no curves
  }
  input.addEventListener('input', () => { state.text = input.value; draw() })
  main.replaceChildren(h('div', { class: 'bar' }, h('h2', {}, 'Runs'), h('span', { class: 'choices' }, kinds, input)), list, below)
  draw()
  await compare()
  const refresh = async () => {
    const before = JSON.stringify(answer)
    answer = await ask('runs')
    if (JSON.stringify(answer) === before) return
    if (!list.contains(document.activeElement)) draw()
    if (answer.runs.some(run => run.status === 'running' && state.ticked.includes(run.name))) await compare()
  }
  return { title: 'Runs', refresh }
}

const cell = (name, kind, ...children) => h('span', { class: `${kind} run-${name}`, role: 'cell' }, children)
/** Name, title, and what is sorted by; the newest come first where nothing is chosen. */
const COLUMNS = [['tick', ''], ['name', 'run', run => run.name], ['status', 'status', run => run.status], ['step', 'step', run => run.step],
  ['rule', 'rule', run => run.rule], ['model', 'model', run => run.model], ['reward', 'reward'], ['last', 'last 5', run => run.last]]

const head = (state, sortBy) => h('div', { class: 'run-row th', role: 'row' }, COLUMNS.map(([name, title, key]) => {
  const order = { [name]: 'ascending', [`-${name}`]: 'descending' }[state.sort] ?? 'none'
  const words = title || h('span', { class: 'unseen' }, 'compared')
  return h('span', { class: `run-${name}`, role: 'columnheader', 'aria-sort': key ? order : null },
    key ? h('button', { type: 'button', onclick: () => sortBy(name) }, words, { ascending: ' ▲', descending: ' ▼', none: '' }[order]) : words)
}))

/** Runs in an order, those without a value last. */
function sorted(rows, sort) {
  const key = COLUMNS.find(([name]) => name === sort.replace('-', ''))?.[2]
  if (!key) return rows
  const missing = run => key(run) === null || key(run) === undefined
  const compare = (a, b) => (typeof a === 'number' ? a - b : a.localeCompare(b, 'en', { numeric: true }))
  return rows.slice().sort((a, b) => missing(a) - missing(b) || (missing(a) ? 0 : (sort.startsWith('-') ? -1 : 1) * compare(key(a), key(b))))
}

function row(run, state, tick) {
  const at = state.ticked.indexOf(run.name)
  const name = h('a', { href: link('overview', { run: run.name }), title: run.name }, run.name)
  if (run.error) return h('div', { class: 'run-row', role: 'row' }, cell('tick', ''), cell('name', '', name), h('span', { class: 'problem run-error', role: 'cell' }, run.error))
  return h('div', { class: `run-row ${at < 0 ? '' : 'on'}`, role: 'row' },
    cell('tick', '', h('input', { type: 'checkbox', checked: at >= 0, 'aria-label': `compare ${run.name}`, onchange: () => tick(run.name) })),
    cell('name', '', h('span', { class: 'line-name' }, at < 0 ? null : h('span', { class: `swatch c${at % 7}` }), name),
      h('small', {}, when(run))),
    cell('status', '', h('span', { class: 'line-name' }, h('span', { class: `dot ${DOTS[run.status]}` }), run.status), h('small', { title: expect(run) }, expect(run))),
    cell('step', '', run.of ? `step ${run.step} of ${run.of}` : `step ${run.step}`,
      run.of ? h('span', { class: `progress ${DOTS[run.status]}`, role: 'img', 'aria-label': percent(run.step / run.of) },
        h('span', { css: { width: `${Math.min(100, 100 * run.step / run.of)}%` } })) : null),
    cell('rule', 'mono', run.rule ?? '–'), cell('model', '', run.model ?? '–'),
    cell('reward', '', sparkline(run.reward, at)), cell('last', 'n', h('b', {}, number(run.last))))
}

/** A duration in words. */
export function lasting(seconds) {
  if (seconds === null || seconds === undefined) return ''
  if (seconds < 90) return `${Math.round(seconds)} s`
  const minutes = Math.round(seconds / 60)
  return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, '0')}`
}

function when(run) {
  if (!run.started) return run.seconds ? lasting(run.seconds) : ''
  const begun = new Date(1000 * run.started)
  const day = begun.toDateString() === new Date().toDateString() ? 'today' : begun.toLocaleDateString('en', { month: 'short', day: 'numeric' })
  return `${day} ${begun.toTimeString().slice(0, 5)}, ${lasting(run.seconds)}`
}

/** What to expect of a run. */
export function expect(run) {
  const ago = run.beat ? lasting(Math.max(0, Date.now() / 1000 - run.beat)) : ''
  if (run.status === 'running') return run.left === null ? 'just begun' : `done in about ${lasting(run.left)}`
  if (run.status === 'finished') return 'all steps done'
  if (run.status === 'stopped') return run.reason ?? 'before its last step'
  if (run.status === 'failed') return run.reason ?? ''
  if (run.status === 'died') return `last sign of life ${ago} ago`
  return ago ? `last written ${ago} ago` : 'nothing written'
}

function sparkline(values, at) {
  if (!values.length) return '–'
  const low = Math.min(...values), high = Math.max(...values, low + 1e-9)
  const points = values.map((value, i) => `${values.length < 2 ? 70 : 140 * i / (values.length - 1)} ${22 - 20 * (value - low) / (high - low)}`)
  const kind = `line ${at < 0 ? 'ink' : `c${at % 7}`}`
  return s('svg', { viewBox: '-2 -1 144 26', width: 144, height: 26, role: 'img', 'aria-label': `from ${short(values[0])} to ${short(values.at(-1))}` },
    values.length < 2 ? s('circle', { class: 'point', cx: 70, cy: 12, r: 2.5 }) : s('path', { class: kind, d: `M${points.join('L')}` }))
}

function curvesCard(view, state, change) {
  const metric = h('select', { 'aria-label': 'Metric', onchange: event => change({ metric: event.target.value }) },
    view.metrics.map(name => h('option', { value: name, selected: name === view.metric }, name)))
  const axes = h('span', { class: 'buttons', role: 'group', 'aria-label': 'by' }, ['step', 'time', 'tokens'].map(by =>
    h('button', { type: 'button', 'aria-pressed': String(by === view.by), onclick: () => change({ by }) }, by)))
  const drawing = h('div', { class: 'overlaid' })
  const draw = () => drawing.replaceChildren(...overlaid(Math.max(260, drawing.clientWidth), view, state.ticked))
  new ResizeObserver(draw).observe(drawing)
  return h('section', { class: 'card' }, h('div', { class: 'bar tight' }, h('h3', {}, metric, h('span', { class: 'dim' }, ' · smoothed; each step faint')),
    h('span', { class: 'choices' }, h('span', { class: 'choice' }, h('span', { class: 'dim' }, 'by '), axes))), drawing)
}

function smoothed(points) {
  let mean = null
  return points.map(([x, y]) => [x, mean = mean === null ? y : 0.75 * mean + 0.25 * y])
}

/** Curves over each other; a hover reads all of them at one place, a click opens that step of the nearest run. */
function overlaid(width, view, names) {
  const curves = names.map((name, place) => ({ name, colour: `c${place % 7}`, points: view.curves[name] ?? [] })).filter(each => each.points.length)
  if (!curves.length) return [nothing(`None of these runs has ${view.metric} by ${view.by}.`)]
  const all = curves.flatMap(each => each.points)
  const [x0, x1] = [Math.min(...all.map(([x]) => x)), Math.max(...all.map(([x]) => x))]
  let [y0, y1] = [Math.min(...all.map(([, y]) => y)), Math.max(...all.map(([, y]) => y))]
  if (y0 > 0 && y0 < 0.5 * y1) y0 = 0
  if (y1 === y0) y1 = y0 + 1
  const left = 46, right = 16, upper = 10, lower = HEIGHT - 22
  const x = value => left + (x1 === x0 ? 0.5 : (value - x0) / (x1 - x0)) * (width - left - right)
  const y = value => lower - (value - y0) / (y1 - y0) * (lower - upper)
  const shown = value => (view.by === 'time' ? lasting(value) : value.toLocaleString('en'))
  const svg = s('svg', { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: 'img',
    'aria-label': curves.map(each => `${each.name} ends at ${short(each.points.at(-1)[1])}`).join(', ') })
  for (const share of [0, 0.5, 1]) {
    const value = y0 + share * (y1 - y0)
    svg.append(s('line', { class: 'grid-line', x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      s('text', { x: left - 6, y: y(value) + 3.5, 'text-anchor': 'end' }, short(value)))
  }
  const half = (x0 + x1) / 2
  const marks = new Map([[x0, 'start'], [view.by === 'step' ? Math.round(half) : half, 'middle'], [x1, 'end']])
  for (const [value, anchor] of marks) svg.append(s('text', { x: x(value), y: HEIGHT - 5, 'text-anchor': anchor }, shown(value)))
  for (const each of curves) {
    const path = points => `M${points.map(([a, b]) => `${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join('L')}`
    svg.append(s('path', { class: `line faint ${each.colour}`, d: path(each.points) }), s('path', { class: `line ${each.colour}`, d: path(smoothed(each.points)) }))
    if (each.points.length === 1) svg.append(s('circle', { class: 'point', cx: x(each.points[0][0]), cy: y(each.points[0][1]), r: 4 }))
  }
  const rule = s('line', { class: 'limit', y1: upper, y2: lower, visibility: 'hidden' })
  svg.append(rule)
  const said = h('p', { class: 'dim reading-line', role: 'status' })
  const legend = at => said.replaceChildren(...(at === null ? [] : [h('b', {}, `${view.by === 'step' ? 'step ' : ''}${shown(at)}`)]),
    ...curves.map(each => {
      const near = at === null ? each.points.at(-1) : each.points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a))
      return h('span', {}, h('span', { class: `swatch ${each.colour}` }), `${each.name} `, h('b', {}, short(near[1])))
    }))
  const place = event => {
    const box = svg.getBoundingClientRect()
    const value = x0 + (event.clientX - box.left - left) / (width - left - right) * (x1 - x0)
    return all.map(([a]) => a).reduce((a, b) => (Math.abs(b - value) < Math.abs(a - value) ? b : a))
  }
  svg.addEventListener('pointermove', event => {
    const at = place(event)
    for (const name of ['x1', 'x2']) rule.setAttribute(name, x(at))
    rule.setAttribute('visibility', 'visible')
    legend(at)
  })
  svg.addEventListener('pointerleave', () => { rule.setAttribute('visibility', 'hidden'); legend(null) })
  if (view.by === 'step') svg.addEventListener('click', event => {  // metrics count a step itself, conversations those before it
    location.hash = link('find', { run: curves[0].name, q: `mode=train step=${Math.max(0, place(event) - 1)}` })
  })
  legend(null)
  return [svg, said]
}

function questionsCard(view, state) {
  if (view.error) return h('section', { class: 'card' }, h('h3', {}, 'Held-out questions'), nothing(view.error))
  const names = state.ticked
  const steps = [...new Set(names.map(name => view.steps[name]))]
  const only = names.map((name, place) => [`only ${name}`, `c${place % 7}`])
  const parts = [['all', 'still-right'], ...(names.length > 1 ? only : []), ['none', 'still-wrong']]
  const label = { all: names.length > 2 ? 'all right' : names.length > 1 ? 'both right' : 'right', none: names.length > 1 ? 'neither' : 'wrong' }
  const question = row => (names.length < 2 ? row.prompt : h('a', { title: 'Read both conversations', href: link('beside',
    { run: names[0], a: row.cells[0].session, other: names[1], b: row.cells[1].session, with: names.join('\n') }) }, row.prompt))
  return h('section', { class: 'card' }, h('h3', {}, `${plural(view.asked, 'held-out question')} that all were asked`,
    h('span', { class: 'dim' }, steps.length === 1 ? ` · step ${steps[0]}` : ` · at the last evaluation of each`)),
  h('div', { class: 'shares' }, parts.filter(([kind]) => view.counts[kind]).map(([kind, colour]) =>
    h('span', { class: `${colour} fill`, css: { flex: String(view.counts[kind]) } }))),
  h('p', { class: 'reading-line' }, parts.map(([kind, colour]) => h('span', {}, h('span', { class: `swatch fill ${colour}` }), `${label[kind] ?? kind} `, h('b', {}, view.counts[kind] ?? 0)))),
  h('div', { class: 'scrolled' }, h('table', { class: 'asked' }, h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, view.rows.length > MOST_ROWS ? `the first ${MOST_ROWS}, differing ones first` : 'differing ones first'),
    names.map(name => h('th', { scope: 'col' }, name)))), h('tbody', {}, view.rows.slice(0, MOST_ROWS).map(row => h('tr', {}, h('th', { scope: 'row' }, question(row)),
    row.cells.map((each, n) => h('td', {}, h('a', { href: link('trajectory', { run: names[n], session: each.session }), class: each.right ? 'right' : 'wrong' },
      rightSign(each.right), each.answer ?? '–'), each.rights && h('span', { class: 'dim' }, ` ${each.rights}`)))))))))
}
