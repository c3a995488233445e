// Messages to be read: markdown, code, JSON over lines, colours of a terminal, images. All text goes through text nodes.

import { folded } from './fold.js'
import { h, plural } from './dom.js'

const LONG = 1200
const THINKING = /<(think|thinking|reasoning)>([\s\S]*?)(<\/\1>|$)/
const IMAGE = /^data:image\/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=\s]*$/

/** A message of the conversation: its words, its images, and which sounds it plays. */
export function read(message) {
  const content = message.content ?? ''
  const parts = typeof content === 'string' ? [content] : content
  const thought = message.reasoning_content ? [thinking(message.reasoning_content)] : []
  return h('div', { class: 'read' }, thought, parts.map(part => {
    if (typeof part === 'string') return text(part)
    if (part.text !== undefined && part.text !== null) return text(part.text)
    return part.type === 'audio' ? sound(part) : picture(part)
  }))
}

function sound(part) {
  const length = typeof part.seconds === 'number' ? ` of ${part.seconds.toFixed(1)} s` : ''
  return h('p', { class: 'dim' }, `[sound${length}${typeof part.audio === 'string' ? `: ${part.audio}` : ''}]`)
}

function picture(part) {
  const given = part.image_url?.url ?? part.image_url ?? part.image ?? part.url ?? ''
  const url = typeof given === 'string' ? given : ''
  if (IMAGE.test(url)) return h('img', { src: url, alt: 'image of the conversation' })
  return h('p', { class: 'dim' }, `[${part.type ?? 'image'}${url && !url.startsWith('data:') ? `: ${url}` : ''}]`)
}

/** Text as it is meant to be read; long text is folded. */
export function text(words) {
  const element = h('div', { dir: 'auto' }, pieces(words))
  return words.length > LONG ? folded(element, `all ${plural(words.length, 'character')}`) : element
}

function pieces(words) {
  const found = THINKING.exec(words)
  if (!found) return plain(words)
  return [...plain(words.slice(0, found.index)), thinking(found[2]), ...pieces(words.slice(found.index + found[0].length))]
}

const thinking = words => h('details', { class: 'thinking' }, h('summary', {}, `thinking · ${plural(words.split(/\s+/).filter(Boolean).length, 'word')}`),
  h('div', { dir: 'auto' }, plain(words)))

function plain(words) {
  if (!words.trim()) return []
  if (words.includes('\u001b[')) return [h('pre', { class: 'code' }, coloured(words))]
  const whole = json(words)
  if (whole !== null) return [h('pre', { class: 'code', dir: 'ltr' }, whole)]
  return markdown(words)
}

/** JSON over lines; null for what is none. */
export function json(words) {
  const trimmed = words.trim()
  if (!/^[[{]/.test(trimmed)) return null
  try {
    return JSON.stringify(JSON.parse(trimmed), null, 2)
  } catch {
    return null
  }
}

// Colours of a terminal

function coloured(words) {
  const found = []
  let kind = new Set()
  // eslint-disable-next-line no-control-regex
  for (const part of words.split(/(\u001b\[[0-9;?]*[A-Za-z])/)) {
    const codes = /^\u001b\[([0-9;]*)m$/.exec(part)
    if (codes) kind = styled(kind, codes[1].split(';').map(Number))
    else if (!part.startsWith('\u001b[') && part) found.push(h('span', { class: [...kind].join(' ') || null }, part))
  }
  return found
}

function styled(kind, codes) {
  let now = new Set(kind)
  for (const code of codes) {
    if (code === 0) now = new Set()
    else if (code === 1) now.add('bold')
    else if (code === 4) now.add('underlined')
    else if (code === 22) now.delete('bold')
    else if (code === 24) now.delete('underlined')
    else if (code >= 30 && code <= 39 || code >= 90 && code <= 97) {
      now = new Set([...now].filter(each => !each.startsWith('ansi')))
      if (code !== 39 && code !== 38) now.add(`ansi${code % 10}`)
    }
  }
  return now
}

// Markdown

const BLOCKS = [
  [/^(```|~~~)\s*(\S*)\s*$/, fence],
  [/^(#{1,6})\s+(.*)$/, (lines, [, marks, words]) => [h('p', { class: `heading h${marks.length}`, role: 'heading', 'aria-level': String(Math.min(6, marks.length + 2)) }, inline(words)), 1]],
  [/^\s*(?:[-*_]\s*){3,}$/, () => [h('hr'), 1]],
  [/^\s*(?:[-*+]|\d+[.)])\s+/, list],
  [/^>(?!(?:\s?>){20})/, quote],
  [/^\s*\|.*\|\s*$/, table],
  [/^<(tool_call|tool|function_call|tool_response|result)>/, tagged],
]

function markdown(words) {
  const lines = words.split(/\r?\n/)
  const found = []
  let paragraph = []
  const flush = () => {
    if (paragraph.some(line => line.trim())) found.push(h('p', {}, paragraph.flatMap((line, i) => [i ? h('br') : null, inline(line)])))
    paragraph = []
  }
  for (let at = 0; at < lines.length;) {
    const kind = BLOCKS.find(([begins]) => begins.test(lines[at]))
    const made = kind?.[1](lines.slice(at), kind[0].exec(lines[at]))
    if (made) {
      flush()
      found.push(made[0])
      at += made[1]
    } else {
      if (lines[at].trim()) paragraph.push(lines[at])
      else flush()
      at += 1
    }
  }
  flush()
  return found
}

function fence(lines, [, mark]) {
  const end = lines.findIndex((line, i) => i && line.trim() === mark)
  const inside = lines.slice(1, end < 0 ? undefined : end).join('\n')
  return [h('pre', { class: 'code', dir: 'ltr' }, json(inside) ?? inside), end < 0 ? lines.length : end + 1]
}

function list(lines, _, begins = /^(\s*)(?:[-*+]|(\d+)[.)])\s+(.*)$/s) {
  let size = 0
  while (size < lines.length && (begins.test(lines[size]) || size && /^\s+\S/.test(lines[size]))) size++
  const items = []
  for (const line of lines.slice(0, size)) {
    const item = begins.exec(line)
    if (item) items.push(h('li', { value: item[2] ?? null, css: { 'margin-inline-start': `${item[1].length * 8}px` } }, inline(item[3])))
    else items.at(-1).append(' ', ...inline(line.trim()))
  }
  return [h(/^\s*\d/.test(lines[0]) ? 'ol' : 'ul', {}, items), size]
}

function quote(lines) {
  let size = 0
  while (size < lines.length && lines[size].startsWith('>')) size++
  return [h('blockquote', {}, markdown(lines.slice(0, size).map(line => line.replace(/^>\s?/, '')).join('\n'))), size]
}

function table(lines) {
  let size = 0
  while (size < lines.length && /^\s*\|.*\|\s*$/.test(lines[size])) size++
  if (size < 2 || !/^[\s|:-]+$/.test(lines[1])) return null
  const cells = line => line.trim().slice(1, -1).split('|').map(cell => cell.trim())
  return [h('table', { class: 'written' }, h('thead', {}, h('tr', {}, cells(lines[0]).map(cell => h('th', { scope: 'col' }, inline(cell))))),
    h('tbody', {}, lines.slice(2, size).map(line => h('tr', {}, cells(line).map(cell => h('td', {}, inline(cell))))))), size]
}

/** A call or a result in tags, with JSON over lines. */
function tagged(lines, [, name]) {
  const whole = lines.join('\n')
  const close = whole.indexOf(`</${name}>`)
  if (close < 0) return null
  const inside = whole.slice(name.length + 2, close)
  const size = whole.slice(0, close).split('\n').length
  const rest = whole.slice(close + name.length + 3).split('\n')[0]
  const body = json(inside)
  return [h('div', { class: 'tagged' }, h('small', { class: 'dim' }, name.replaceAll('_', ' ')),
    body ? h('pre', { class: 'code', dir: 'ltr' }, body) : h('div', { dir: 'auto' }, plain(inside)), rest.trim() ? h('p', {}, inline(rest)) : null), size]
}

/** Code, emphasis and links inside a line; a link shows where it leads, and leads nowhere. */
function inline(words) {
  const found = []
  let rest = words
  while (rest) {
    const next = /`([^`]+)`|\*\*([^*]+)\*\*|(?<![*\w])\*([^*\s][^*]*)\*(?!\w)|\[([^[\]]+)\]\(([^)\s]+)\)/.exec(rest)
    if (!next) { found.push(rest); break }
    if (next.index) found.push(rest.slice(0, next.index))
    if (next[1] !== undefined) found.push(h('code', {}, next[1]))
    else if (next[2] !== undefined) found.push(h('strong', {}, next[2]))
    else if (next[3] !== undefined) found.push(h('em', {}, next[3]))
    else found.push(h('bdi', {}, next[4]), h('span', { class: 'dim' }, ` (${next[5]})`))
    rest = rest.slice(next.index + next[0].length)
  }
  return found
}
