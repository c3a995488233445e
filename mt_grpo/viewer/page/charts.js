// Curves over steps, drawn as SVG at the width that they have on the page.

import { h, s, short } from './dom.js'

const HEIGHT = 200
const SMOOTH = 0.25
const LABEL = 128

/** A running mean that a curve's own noise does not hide. */
function smoothed(values) {
  let mean = null
  return values.map(value => {
    if (value !== null) mean = mean === null ? value : (1 - SMOOTH) * mean + SMOOTH * value
    return value === null ? null : mean
  })
}

/**
 * A card with a chart. The values of a step are shown where it is pointed at, or with the arrow keys.
 *
 * `steps`: the x of each value, `last`: the last step of each, where it is of several. `curves`: `[name, values]`, null
 * where there is none. `stacked`: areas on top of each other instead of lines. `bands`: curves of quantiles, of which
 * each two that face each other are an area. `points`: `[step, value]`, drawn as circles. `text`: a value as text.
 * `log`: whether the axis is logarithmic. `go`: what a click on a step does, with its words in `goes`.
 */
export function chart(title, note, options) {
  const { steps, curves, text = short } = options
  const drawing = h('div', { class: 'chart' })
  const spoken = curves.map(([name, values]) => `${name} ${text(values.findLast(v => v !== null) ?? null)}`).join(', ')
  const draw = () => {
    const width = Math.max(260, drawing.clientWidth)
    drawing.replaceChildren(plot(width, { stacked: false, bands: false, points: [], text: short, top: null, log: false, ...options, label: `${title}: at the end ${spoken}` }))
  }
  new ResizeObserver(draw).observe(drawing)
  return h('section', { class: 'card' }, h('h3', {}, title, note && h('span', { class: 'dim' }, ` · ${note}`)), steps.length ? drawing : null)
}

function plot(width, { steps, last: lasts, curves, stacked, bands, points, text, top, log, label, go, goes = 'its groups' }) {
  const right = 22 + Math.max(0, ...(bands ? [] : curves).map(([name]) => wide(fitting(name))))
  const upper = 8, lower = 20
  const base = steps.map(() => 0)
  const layers = curves.map(([name, values], place) => {
    const from = base.slice()
    if (stacked) values.forEach((value, i) => { base[i] += value ?? 0 })
    return { name, colour: `c${place % 7}`, from, to: stacked ? base.slice() : values }
  })
  const known = [...layers.flatMap(layer => layer.to), ...points.map(([, value]) => value)].filter(v => v !== null)
  const positive = known.filter(value => value > 0)
  const logs = log && !stacked && positive.length > 0
  const bottom = logs ? 10 ** Math.floor(Math.log10(Math.min(...positive)) + 1e-9) : Math.min(0, ...known)
  const high = logs ? Math.max(bottom * 10, 10 ** Math.ceil(Math.log10(Math.max(...positive)) - 1e-9))
    : top ?? bottom + round((Math.max(...known, bottom) - bottom || 1) * 1.001)
  const at = share => (logs ? bottom * (high / bottom) ** share : bottom + share * (high - bottom))
  const left = 12 + 6.4 * Math.max(...[0, 0.5, 1].map(share => text(at(share)).length))
  const w = width - left - right, y0 = HEIGHT - lower
  const first = Math.min(steps[0], ...points.map(([step]) => step))
  const last = Math.max(steps.at(-1), ...points.map(([step]) => step))
  const x = step => left + (last === first ? w / 2 : (step - first) / (last - first) * w)
  const share = value => (logs ? Math.log(Math.max(value, bottom) / bottom) / Math.log(high / bottom) : (Math.min(value, high) - bottom) / (high - bottom))
  const y = value => upper + (1 - share(value)) * (y0 - upper)
  const svg = s('svg', { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: 'img', tabindex: '0', 'aria-label': label })
  for (const part of [0, 0.5, 1]) {
    const value = at(part)
    svg.append(s('line', { class: 'grid-line', x1: left, x2: left + w, y1: y(value), y2: y(value) }),
      s('text', { x: left - 6, y: y(value) + 3.5, 'text-anchor': 'end' }, text(value)))
  }
  const marks = [...new Set([first, Math.round((first + last) / 2), last])]
  marks.forEach((step, i) => svg.append(s('text', { x: x(step), y: HEIGHT - 4, 'text-anchor': 'middle' },
    i ? String(step) : `step ${step}`)))
  if (bands) {
    for (let i = 0; i < layers.length >> 1; i++) svg.append(between(steps.map((step, n) => [step, layers[i].to[n], layers.at(-1 - i).to[n]]), x, y, 'band'))
    const middle = { ...layers[layers.length >> 1], colour: 'c0' }
    svg.append(line(middle.to, steps, x, y, 'c0'), ...alone(middle, steps, x, y))
  }
  for (const layer of bands ? [] : layers) {
    if (stacked) svg.append(between(steps.map((step, n) => [step, layer.from[n], layer.to[n]]), x, y, `area ${layer.colour}`))
    else svg.append(line(layer.to, steps, x, y, `${layer.colour} faint`), line(smoothed(layer.to), steps, x, y, layer.colour), ...alone(layer, steps, x, y))
  }
  for (const [step, value] of points) svg.append(s('circle', { class: 'point', cx: x(step), cy: y(value), r: 4.5 }))
  if (!bands) svg.append(...labels(layers, stacked, y, left + w + (points.length ? 14 : 7), upper + 4, y0))
  const box = h('div', { class: 'plot' }, svg)
  reading(box, svg, { steps, lasts, curves, points, text, x, left, w, upper, y0, width, go, goes, stacked, bands })
  return box
}

/** Points without a neighbour, which no line shows. */
function alone(layer, steps, x, y) {
  const is = i => layer.to[i] !== null && layer.to[i] !== undefined
  return layer.to.flatMap((value, i) => (is(i) && !is(i - 1) && !is(i + 1)
    ? [s('circle', { class: `single ${layer.colour}`, cx: x(steps[i]), cy: y(value), r: 3.2 })] : []))
}

/** The values of the step that is pointed at, and what a click on it does. */
function reading(box, svg, { steps, lasts, curves, points, text, x, left, w, upper, y0, width, go, goes, stacked, bands }) {
  const cross = s('path', { class: 'cross', d: '' })
  const tip = h('div', { class: 'tip', 'aria-live': 'polite' })
  svg.append(cross)
  box.append(tip)
  let here = null
  const hide = () => { here = null; cross.setAttribute('d', ''); tip.classList.remove('on') }
  const show = i => {
    here = i
    const to = lasts && lasts[i] !== steps[i] ? `–${lasts[i]}` : ''
    cross.setAttribute('d', `M${x(steps[i])} ${upper}V${y0}`)
    const rows = curves.map(([name, values], n) => [name, values[i], bands ? null : `c${n % 7}`]).filter(([, value]) => value !== null && value !== undefined)
    if (bands || stacked) rows.reverse()
    const held = points.filter(([step]) => step === steps[i]).map(([, value]) => ['○ held-out', value, null])
    tip.replaceChildren(h('b', {}, `step ${steps[i]}${to}`), h('table', {}, h('tbody', {}, [...rows, ...held].map(([name, value, colour]) =>
      h('tr', {}, h('th', { scope: 'row' }, colour && h('span', { class: `swatch ${colour}` }), name.replaceAll('_', ' ')), h('td', {}, text(value)))))),
    go && h('small', {}, `click: ${goes}`))
    tip.classList.add('on')
    const side = x(steps[i]) < width / 2
    tip.style.setProperty('left', side ? `${x(steps[i]) + 12}px` : 'auto')
    tip.style.setProperty('right', side ? 'auto' : `${width - x(steps[i]) + 12}px`)
  }
  const nearest = event => {
    const at = event.clientX - svg.getBoundingClientRect().left
    if (at < left - 12 || at > left + w + 12) return null
    let best = 0
    steps.forEach((step, i) => { if (Math.abs(x(step) - at) < Math.abs(x(steps[best]) - at)) best = i })
    return best
  }
  svg.addEventListener('pointermove', event => { const i = nearest(event); if (i === null) hide(); else if (i !== here) show(i) })
  svg.addEventListener('pointerleave', hide)
  svg.addEventListener('blur', hide)
  if (go) {
    svg.classList.add('goes')
    svg.addEventListener('click', event => { const i = nearest(event); if (i !== null) go(steps[i]) })
  }
  svg.addEventListener('keydown', event => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key]
    if (by) {
      event.preventDefault()
      event.stopPropagation()
      show(Math.min(steps.length - 1, Math.max(0, (here ?? (by > 0 ? -1 : steps.length)) + by)))
    } else if (event.key === 'Enter' && here !== null && go) go(steps[here])
    else if (event.key === 'Escape') hide()
  })
}

const BAR = 7

/** What lies between two curves, of `[step, low, high]`; of one step a bar. */
function between(points, x, y, kind) {
  const there = points.filter(([, low, high]) => low !== null && high !== null)
  const wide = there.length === 1 ? [-BAR, BAR].map(by => [by, ...there[0]]) : there.map(point => [0, ...point])
  const at = (by, step, value) => `${(x(step) + by).toFixed(1)} ${y(value).toFixed(1)}`
  const path = [...wide.map(([by, step, , high]) => at(by, step, high)), ...wide.map(([by, step, low]) => at(by, step, low)).reverse()]
  return s('path', { class: kind, d: path.length ? `M${path.join('L')}Z` : 'M0 0' })
}

const pen = document.createElement('canvas').getContext('2d')
pen.font = '600 10.5px system-ui, "DejaVu Sans", sans-serif'
const wide = text => pen.measureText(text).width

/** A name that fits beside a chart: of a long one both ends, as many names begin alike. */
function fitting(name) {
  const words = name.replaceAll('_', ' ')
  const cut = size => `${words.slice(0, Math.ceil(size / 2))}…${words.slice(words.length - Math.floor(size / 2))}`
  let size = Math.min(words.length, LABEL)
  if (wide(words) <= LABEL) return words
  while (size > 1 && wide(cut(size)) > LABEL) size -= 1
  return cut(size)
}

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
  return found.map(each => s('text', { class: `label ${each.colour}`, x, y: each.y + 3.5 }, s('title', {}, each.name), fitting(each.name)))
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
    line(values, values.map((_, i) => i), x, y, 'ink'), known.length === 1 && s('circle', { class: 'point', cx: x(values.indexOf(known[0])), cy: y(known[0]), r: 2 }))
}
