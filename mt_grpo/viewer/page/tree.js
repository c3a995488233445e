// The token tree of a conversation as a strip: a lane per sequence, a box per run of tokens.

import { diverging } from './colours.js'
import { h, plural, s, signed } from './dom.js'

const LANE = 34, BOX = 20, LEAST = 30, GAP = 2, FULL_ADVANTAGE = 2

/** A card with the tree; `go(turn)` is called when a turn's box is chosen. */
export function treeCard(whole, go) {
  const { nodes, turns } = whole
  const drawing = h('div', { class: 'tree' })
  const parents = new Set(nodes.map(node => node.parent))
  const leaves = nodes.filter((_, i) => !parents.has(i)).length
  const causes = [...new Set(turns.map(turn => turn.fork_cause).filter(Boolean))]
  const words = leaves < 2 ? 'one sequence' : `${plural(leaves, 'sequence')}, ${plural(leaves - 1, 'fork')}`
    + (causes.length ? ` (${causes.join(', ')})` : '')
  const draw = () => drawing.replaceChildren(plot(whole, Math.max(300, drawing.clientWidth), go))
  new ResizeObserver(draw).observe(drawing)
  return h('section', { class: 'card' }, h('h3', {}, 'Token tree', h('span', { class: 'dim' },
    ` · ${words}; every token is computed and trained once`)), drawing)
}

function plot(whole, width, go) {
  const { nodes } = whole
  const sizes = nodes.map(node => node.end - node.begin)
  const starts = []
  nodes.forEach((node, i) => starts.push(node.parent < 0 ? 0 : starts[node.parent] + sizes[node.parent]))
  const deepest = Math.max(1, ...nodes.map((_, i) => starts[i] + sizes[i]))
  const scale = scaleOf(nodes, sizes, width - 4, deepest)
  const boxes = []
  let lanes = 0
  nodes.forEach((node, i) => {
    const follows = node.parent === i - 1 || node.parent < 0 && i === 0
    const lane = i === 0 ? 0 : follows ? boxes[node.parent].lane : (lanes += 1)
    const parent = boxes[node.parent]
    const x = parent ? parent.x + parent.w + (follows ? 0 : 26) : 2
    boxes.push({ lane, x, w: Math.max(LEAST, sizes[i] * scale), follows, parent })
  })
  const right = Math.max(...boxes.map(box => box.x + box.w), width - 4)
  const height = (lanes + 1) * LANE
  const svg = s('svg', { viewBox: `0 0 ${right + 4} ${height}`, width: right + 4, height, role: 'group', 'aria-label': 'Token tree' })
  boxes.forEach((box, i) => svg.append(...drawn(whole, i, box, sizes[i], go)))
  return svg
}

/** Pixels per token such that the longest path fits, the least width of a box considered. */
function scaleOf(nodes, sizes, width, deepest) {
  let scale = width / deepest
  for (let round = 0; round < 8; round++) {
    const ends = []
    nodes.forEach((node, i) => {
      const from = node.parent < 0 ? 0 : ends[node.parent] + (node.parent === i - 1 ? 0 : 26)
      ends.push(from + Math.max(LEAST, sizes[i] * scale))
    })
    const longest = Math.max(...ends)
    if (longest <= width) break
    scale *= Math.max(0.3, width / longest) * 0.98
  }
  return scale
}

function drawn(whole, i, box, size, go) {
  const node = whole.nodes[i]
  const y = box.lane * LANE + (LANE - BOX) / 2
  const turn = node.turn >= 0 ? whole.turns[node.turn] : null
  const [name, kind, long] = turn ? ofTurn(turn, node.turn) : ofContext(whole, i, box)
  const fits = text => text.length * 6.2 + 6 <= box.w
  const written = [long, name].find(fits) ?? (turn && fits(String(node.turn + 1)) ? String(node.turn + 1) : '')
  const choose = turn ? () => go(node.turn) : null
  const element = s('g', { class: turn ? 'box of-turn' : 'box', ...(turn && { tabindex: '0', role: 'button', onclick: choose,
    onkeydown: event => { if (event.key === 'Enter') choose() }, 'aria-label': long }) },
  s('title', {}, `${long}: ${plural(size, 'token')}`),
  s('rect', { class: kind, x: box.x, y, width: Math.max(1, box.w - GAP), height: BOX, rx: 3 }),
  s('text', { x: box.x + (box.w - GAP) / 2, y: y + 14, 'text-anchor': 'middle' }, written))
  if (box.follows || !box.parent) return [element]
  const from = box.parent.x + box.parent.w - GAP, top = box.parent.lane * LANE + (LANE + BOX) / 2 - 2, to = y + BOX / 2
  return [s('path', { class: 'fork', d: `M${from - 3} ${top} C${from - 3} ${to} ${from} ${to} ${box.x - 2} ${to}` }), element]
}

function ofTurn(turn, number) {
  const known = turn.advantage !== null && turn.advantage !== undefined
  const shade = known ? diverging(turn.advantage, FULL_ADVANTAGE) : ''
  const value = known ? ` ${signed(turn.advantage)}` : ''
  return [`${number + 1}${value}`, `model ${shade}`, `turn ${number + 1}${value}`]
}

function ofContext(whole, i, box) {
  const node = whole.nodes[i]
  if (node.parent < 0) return ['prompt', 'context', 'prompt']
  if (!box.follows) return ['past', 'context', 'the past, written otherwise']
  let parent = whole.nodes[node.parent]
  while (parent && parent.turn < 0) parent = whole.nodes[parent.parent]
  if (!parent) return ['prompt', 'context', 'prompt']
  const turn = whole.turns[parent.turn]
  const wrong = turn.error !== null || turn.tool_calls.some(call => call.error !== null)
  return wrong ? ['error', 'context wrong', 'error'] : ['result', 'context', 'result']
}
