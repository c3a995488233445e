// The run at a glance.

import { ask } from './api.js'
import { chart, spark } from './charts.js'
import { choice, h, link, many, number, percent, plural, short } from './dom.js'
import { run } from './run.js'

const FEW = 5
const MOST_LINKED = 40
const MOST_METRICS = 60
const QUANTILES = ['lowest', '10 %', '25 %', 'median', '75 %', '90 %', 'highest']
const LEVELS = { bad: 'bad', warn: 'worth a look', ok: 'fine', idle: 'not known' }

/** Means of the first and of the last points, and how many steps the last ones are of. */
function ends(values, view) {
  const known = values.flatMap((value, i) => (value === null ? [] : [[value, view.last[i] - view.step[i] + 1]]))
  if (!known.length) return null
  const few = Math.max(1, Math.min(FEW, Math.floor(known.length / 3)))
  const mean = part => part.reduce((sum, [value]) => sum + value, 0) / part.length
  return { first: mean(known.slice(0, few)), last: mean(known.slice(-few)), few: total(known.slice(-few).map(([, steps]) => steps)) }
}

export async function overview(main, asked) {
  const state = { log: asked.get('axis') === 'log', metric: asked.get('metric') }
  const keep = () => history.replaceState(null, '', link('overview', { axis: state.log ? 'log' : '', metric: state.metric }))
  const metrics = h('div', {})
  let view = await ask('overview')
  if (!view.step.length && !view.held_out.length) return begun(main, asked)
  const show = async () => {
    const charts = h('div', { class: 'charts' })
    const draw = () => charts.replaceChildren(...cards(view, state.log))
    const set = value => { state.log = value === 'log'; keep(); bar.replaceWith(bar = axes(state, set)); draw(); if (state.metric !== null) showMetrics(metrics, state, keep) }
    let bar = axes(state, set)
    draw()
    main.replaceChildren(h('div', { class: 'tiles' }, tiles(view)), bar, charts, metrics)
    if (state.metric === null) metrics.replaceChildren(h('p', { class: 'note' }, h('button', { type: 'button', class: 'as-link', onclick: () => {
      state.metric = ''
      keep()
      showMetrics(metrics, state, keep)
    } }, 'every metric that was logged')))
    else await showMetrics(metrics, state, keep)
    showLost(main).catch(() => {})  // where the server has ended, the line above says so
  }
  await show()
  return { title: 'Overview', refresh: async () => { view = await ask('overview'); await show() } }
}

/** Of a run without conversations so far: how it is, and what it was started with. */
async function begun(main, asked) {
  const { beat } = await run(main, asked)
  return { title: 'Overview', beat, refresh: () => dispatchEvent(new Event('hashchange')) }
}

const axes = (state, set) => h('div', { class: 'bar tight axes' }, choice('axis', [['linear', 'linear'], ['log', 'log']], state.log ? 'log' : 'linear', set))

const toGroups = step => { location.hash = link('groups', { step }) }

/** Every metric of `metrics.jsonl` whose name contains the words of the filter. */
async function showMetrics(main, state, keep) {
  const { curves } = await ask('metrics')
  const names = Object.keys(curves).sort()
  const said = h('span', { class: 'dim', role: 'status' })
  const list = h('div', { class: 'charts' })
  const input = h('input', { type: 'search', placeholder: 'loss, grad_norm, rewards/, ...', 'aria-label': 'Filter metrics by name', spellcheck: 'false' })
  input.value = state.metric ?? ''
  const draw = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean)
    const found = names.filter(name => words.every(word => name.toLowerCase().includes(word)))
    said.textContent = `${found.length} of ${plural(names.length, 'metric')}${found.length > MOST_METRICS ? `, the first ${MOST_METRICS} shown` : ''}`
    list.replaceChildren(...found.slice(0, MOST_METRICS).map(name => chart(name, '', { steps: curves[name].step, curves: [[name.split('/').at(-1), curves[name].values]], log: state.log, go: toGroups })))
  }
  input.addEventListener('input', () => { state.metric = input.value.trim(); keep(); draw() })
  main.replaceChildren(h('div', { class: 'bar metrics' }, h('h3', {}, 'Every metric'), h('div', { class: 'words' }, input), said), list)
  draw()
}

function tile(name, value, note, change = null) {
  const kind = change > 0 ? 'up' : 'down'
  return h('div', { class: 'card tile' }, h('small', {}, name), h('b', {}, value),
    h('small', {}, change ? h('span', { class: kind }, `${change > 0 ? '▲' : '▼'} ${number(Math.abs(change))} `) : null, note))
}

function tiles(view) {
  const found = []
  const reward = ends(view.reward, view)
  if (reward) {
    const where = reward.few === 1 ? 'last step' : `last ${reward.few} steps`
    found.push(tile(`reward, ${where}`, number(reward.last), `from ${number(reward.first)}`, reward.last - reward.first))
  }
  const [before, after] = [view.held_out[0], view.held_out.at(-1)]
  if (after?.right !== null && after?.right !== undefined) {
    const more = view.held_out.length > 1
    found.push(tile(`right, ${after.questions.toLocaleString('en')} held-out`, number(after.right),
      more ? `from ${number(before.right)}` : `at step ${after.step}`, more ? after.right - before.right : null))
  }
  const turns = ends(view.turns, view)
  if (turns) found.push(tile('turns per conversation', number(turns.last, 1), `${number(turns.first, 1)} at first`))
  const dead = view.health['groups without signal'].filter(value => value !== null)
  if (dead.length) {
    const { steps, of, most } = view.silent
    found.push(tile('groups without signal', percent(dead.at(-1)),
      steps ? `at most ${percent(most)}, in ${steps} of ${of} steps` : 'at no step'))
  }
  const parts = Object.entries(view.time).filter(([name]) => name !== 'step').map(([, values]) => total(values))
  const seconds = total(parts)
  if (seconds) {
    found.push(tile('seconds per step', number(seconds / view.time.step.length), `${percent(parts[0] / seconds)} of it sampling`))
  }
  if (view.tokens.tokens) {
    found.push(tile('trained tokens', many(view.tokens.tokens), `of ${many(view.tokens.unique)} computed`))
  }
  return found
}

const total = values => values.reduce((a, b) => a + (b ?? 0), 0)

function cards(view, log) {
  const found = []
  const steps = view.step
  const common = { steps, last: view.last, log, go: toGroups }
  if (steps.length) {
    const points = view.held_out.filter(each => each.reward !== null).map(each => [each.step, each.reward])
    found.push(chart('Reward', points.length ? '○ held-out' : '', { ...common, curves: [['training batch', view.reward]], points }))
    found.push(chart('Reward components', 'unweighted', { ...common, curves: Object.entries(view.rewards) }))
    found.push(chart('Distribution of the reward', 'from the lowest to the highest; dark: the middle half', { ...common, bands: true,
      curves: QUANTILES.map((name, i) => [name, view.distribution[i]]) }))
    const stops = Object.entries(view.stops)
    const early = steps.map((_, i) => total(stops.map(([, shares]) => shares[i])))
    const words = [...new Set([0, steps.length - 1])].map(i => `${percent(early[i])} at step ${steps[i]}`).join(', ')
    found.push(chart('Cut off or failed', words, { ...common, curves: stops, stacked: true,
      text: x => percent(x, 1), top: stops.length ? null : 0.1 }))
  }
  if (view.time.step.length) {
    const { step, ...parts } = view.time
    found.push(chart('Where a step’s time goes, s', '', { steps: step, stacked: true, go: toGroups, curves: Object.entries(parts)
      .map(([name, values]) => [name === 'sync' ? 'weight sync' : name, values]) }))
  }
  found.push(health(view), lookAt(view.findings))
  return found
}

function health(view) {
  const rows = Object.entries(view.health).map(([name, values]) => {
    const last = values.findLast(value => value !== null)
    const limit = view.limits[name]
    const odd = last !== undefined && limit !== undefined && (name === 'entropy' ? last < limit : last > limit)
    const share = /groups|clipped|failed/.test(name)
    const value = last === undefined ? '–' : share ? percent(last, last && last < 0.1 ? 1 : 0) : short(last)
    const unit = { entropy: ', nats', 'engine − trainer': ', nats' }[name] ?? ''
    return h('tr', {}, h('th', { scope: 'row' }, dot(odd ? 'warn' : last === undefined ? 'idle' : 'ok'), name + unit),
      h('td', {}, last !== undefined && spark(values, limit, `${name}, at the end ${value}`)), h('td', {}, h('b', {}, value)))
  })
  return h('section', { class: 'card' }, h('h3', {}, 'Health', h('span', { class: 'dim' }, ' · dashed: where to look')),
    h('table', { class: 'health' }, h('tbody', {}, rows)))
}

const dot = level => h('span', { class: `dot ${level}`, role: 'img', 'aria-label': LEVELS[level] })

/** Conversations have to be read for this one, so that it comes after the others. */
async function showLost(main) {
  const { sessions, read } = await ask('lost')
  const list = main.querySelector('.findings')
  if (!sessions.length || !list) return
  const q = `session=${sessions.slice(0, MOST_LINKED).join(',')}`
  const fine = [...list.children].find(each => each.querySelector('.dot.ok')) ?? null
  list.insertBefore(item({ level: 'warn', strong: plural(sessions.length, 'conversation'), label: 'show them', link: { view: 'find', q },
    text: `of the latest ${read} with a failed turn and a wrong answer had the right one in a turn that could not be read.` }), fine)
}

function item(finding) {
  const { view, ...parameters } = finding.link ?? {}
  return h('li', {}, dot(finding.level), h('span', {}, h('b', {}, finding.strong), ' ', finding.text, ' ',
    finding.link && h('a', { href: link(view, parameters) }, finding.label)))
}

function lookAt(findings) {
  const items = findings.map(item)
  return h('section', { class: 'card look' }, h('h3', {}, 'Look at'),
    h('ul', { class: 'findings' }, items), h('p', { class: 'dim quiet' }, 'Nothing stands out.'))
}
