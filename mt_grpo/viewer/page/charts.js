// Curves over steps, drawn as SVG at the width that they have on the page.

import { h, s, short } from './dom.js'

const HEIGHT = 200
const SMOOTH = 0.25
const LONGEST = 20

/** A running mean that a curve's own noise does not hide. */
function smoothed(values) {
  let mean = null
  return values.map(value => {
    if (value !== null) mean = mean === null ? value : (1 - SMOOTH) * mean + SMOOTH * value
    return value === null ? null : mean
  })
}

/**
 * A card with a chart.
 *
 * `steps`: the x of each value. `curves`: `[name, values]`, null where there is none. `stacked`: areas on top of each
 * other instead of lines. `points`: `[step, value]`, drawn as circles. `text`: a value as text.
 */
export function chart(title, note, { steps, curves, stacked = false, points = [], text = short, top = null }) {
  const drawing = h('div', { class: 'chart' })
  const spoken = curves.map(([name, values]) => `${name} ${text(values.findLast(v => v !== null) ?? 0)}`).join(', ')
  const draw = () => {
    const width = Math.max(260, drawing.clientWidth)
    drawing.replaceChildren(plot(width, { steps, curves, stacked, points, text, top, label: `${title}: at the end ${spoken}` }))
  }
  new ResizeObserver(draw).observe(drawing)
  return h('section', { class: 'card' }, h('h3', {}, title, note && h('span', { class: 'dim' }, ` · ${note}`)), drawing)
}

function plot(width, { steps, curves, stacked, points, text, top, label }) {
  const names = curves.map(([name]) => cut(name))
  const right = Math.min(150, 22 + 6.4 * Math.max(0, ...names.map(name => name.length)))
  const upper = 8, lower = 20
  const base = steps.map(() => 0)
  const layers = curves.map(([name, values], place) => {
    const from = base.slice()
    if (stacked) values.forEach((value, i) => { base[i] += value ?? 0 })
    return { name, colour: `c${place % 7}`, from, to: stacked ? base.slice() : values }
  })
  const known = [...layers.flatMap(layer => layer.to), ...points.map(([, value]) => value)].filter(v => v !== null)
  const bottom = Math.min(0, ...known)
  const high = top ?? bottom + round((Math.max(...known, bottom + 1e-9) - bottom) * 1.001)
  const left = 12 + 6.4 * Math.max(...[0, 0.5, 1].map(share => text(bottom + share * (high - bottom)).length))
  const w = width - left - right, y0 = HEIGHT - lower
  const first = Math.min(steps[0], ...points.map(([step]) => step))
  const last = Math.max(steps.at(-1), ...points.map(([step]) => step))
  const x = step => left + (last === first ? w / 2 : (step - first) / (last - first) * w)
  const y = value => upper + (1 - (Math.min(value, high) - bottom) / (high - bottom)) * (y0 - upper)
  const svg = s('svg', { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: 'img', 'aria-label': label })
  for (const share of [0, 0.5, 1]) {
    const value = bottom + share * (high - bottom)
    svg.append(s('line', { class: 'grid-line', x1: left, x2: left + w, y1: y(value), y2: y(value) }),
      s('text', { x: left - 6, y: y(value) + 3.5, 'text-anchor': 'end' }, text(value)))
  }
  const marks = [...new Set([first, Math.round((first + last) / 2), last])]
  marks.forEach((step, i) => svg.append(s('text', { x: x(step), y: HEIGHT - 4, 'text-anchor': 'middle' },
    i ? String(step) : `step ${step}`)))
  for (const layer of layers) {
    if (stacked) svg.append(area(layer, steps, x, y))
    else svg.append(line(layer.to, steps, x, y, `${layer.colour} faint`), line(smoothed(layer.to), steps, x, y, layer.colour))
  }
  for (const [step, value] of points) svg.append(s('circle', { class: 'point', cx: x(step), cy: y(value), r: 4.5 }))
  svg.append(...labels(layers, stacked, y, left + w + (points.length ? 14 : 7), upper + 4, y0))
  return svg
}

/** A name that fits beside a chart. */
const cut = name => (name.length > LONGEST ? name.slice(0, LONGEST - 1) + '…' : name).replaceAll('_', ' ')

/** The next number that reads well. */
function round(x) {
  const unit = 10 ** Math.floor(Math.log10(x))
  return unit * [1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10].find(step => step * unit >= x * 0.999)
}

function line(values, steps, x, y, kind) {
  const parts = []
  let pen = 'M'
  values.forEach((value, i) => {
    if (value === null) pen = 'M'
    else {
      parts.push(`${pen}${x(steps[i]).toFixed(1)} ${y(value).toFixed(1)}`)
      pen = 'L'
    }
  })
  return s('path', { class: `line ${kind}`, d: parts.join('') || 'M0 0' })
}

function area(layer, steps, x, y) {
  const there = layer.to.map((value, i) => `${x(steps[i]).toFixed(1)} ${y(value).toFixed(1)}`)
  const back = layer.from.map((value, i) => `${x(steps[i]).toFixed(1)} ${y(value).toFixed(1)}`).reverse()
  return s('path', { class: `area ${layer.colour}`, d: `M${[...there, ...back].join('L')}Z` })
}

/** Names at the right end of their curves, moved apart. */
function labels(layers, stacked, y, x, upper, lower) {
  const gap = 12
  const found = layers.map(layer => {
    const values = stacked ? layer.to : smoothed(layer.to)
    const i = values.findLastIndex(value => value !== null)
    if (i < 0) return null
    return { ...layer, y: y(stacked ? (layer.from[i] + layer.to[i]) / 2 : values[i]) }
  }).filter(Boolean).sort((a, b) => a.y - b.y)
  found.forEach((each, i) => { each.y = Math.max(each.y, i ? found[i - 1].y + gap : upper) })
  for (let i = found.length - 1; i >= 0; i--) {
    found[i].y = Math.min(found[i].y, i + 1 < found.length ? found[i + 1].y - gap : lower)
  }
  return found.map(each => s('text', { class: `label ${each.colour}`, x, y: each.y + 3.5 }, s('title', {}, each.name), cut(each.name)))
}

/** A small curve; `limit` is dashed. */
export function spark(values, limit, label) {
  const known = values.filter(value => value !== null)
  const width = 150, height = 26
  const high = Math.max(...known, limit ?? 0, 1e-12) * 1.05
  const x = i => (values.length < 2 ? width / 2 : i / (values.length - 1) * width)
  const y = value => height - 2 - value / high * (height - 4)
  return s('svg', { viewBox: `0 0 ${width} ${height}`, width, height, role: 'img', 'aria-label': label },
    limit !== undefined && s('line', { class: 'limit', x1: 0, x2: width, y1: y(limit), y2: y(limit) }),
    line(values, values.map((_, i) => i), x, y, 'ink'))
}
