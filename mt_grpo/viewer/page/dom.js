// Elements, and numbers as text. All text goes through text nodes: nothing that a model or a tool wrote is ever markup.

import { current } from './api.js'

const SVG = 'http://www.w3.org/2000/svg'

/** An element: attributes, `class`, `on...` listeners and `css` (properties set one by one), then children. */
export function h(tag, options = {}, ...children) {
  return fill(document.createElement(tag), options, children)
}

/** The same in SVG. */
export function s(tag, options = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), options, children)
}

function fill(element, options, children) {
  for (const [name, value] of Object.entries(options)) {
    if (value === null || value === undefined || value === false) continue
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value)
    else if (name === 'css') for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each)
    else element.setAttribute(name, value === true ? '' : value)
  }
  element.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== false))
  return element
}

/** Where a view is: `#/find?q=...`; parameters without a value are left out. */
export function link(view, parameters = {}) {
  const known = Object.entries({ run: current.run, ...parameters }).filter(([, value]) => value !== null && value !== undefined && value !== '')
  const text = new URLSearchParams(known).toString()
  return `#/${view}${text ? '?' + text : ''}`
}

/** Where a group is. */
export const groupLink = key =>
  link('group', { mode: key.mode, step: key.step, k: key.k, group: key.group })

export const number = (x, digits = 2) => (x === null || x === undefined ? '–' : minus((+x).toFixed(digits)))
export const signed = (x, digits = 2) => (x === null || x === undefined ? '–' : (x > 0 ? '+' : '') + number(x, digits))
export const percent = (x, digits = 0) => (x === null || x === undefined ? '–' : `${number(100 * x, digits)} %`)
export const plural = (n, one, many = one + 's') => `${n.toLocaleString('en')} ${n === 1 ? one : many}`
const minus = text => (/^-0(\.0*)?$/.test(text) ? text.slice(1) : text.replace('-', '−'))

/** Three digits, whatever the size. */
export function short(x) {
  if (x === null || x === undefined) return '–'
  const size = Math.abs(x)
  if (size && (size < 0.001 || size >= 1e6)) return minus(x.toExponential(1))
  return number(x, size && size < 0.1 ? 4 : size < 10 ? 2 : size < 100 ? 1 : 0)
}

/** A number of tokens: 74 k. */
export function many(x) {
  for (const [size, name] of [[1e9, 'G'], [1e6, 'M'], [1e3, 'k']]) {
    if (x >= size) return `${(x / size).toFixed(x / size < 10 ? 1 : 0)} ${name}`
  }
  return String(x)
}

const FINE = ['answered', 'env_done']
const FAILED = ['engine_error', 'env_error']

/** Why a conversation ended; with a count, how many did. */
export function chip(stop, count = null) {
  const kind = FINE.includes(stop) ? 'fine' : FAILED.includes(stop) ? 'failed' : 'cut'
  return h('span', { class: `chip ${kind}` }, count === null ? null : `${count} `, stop ?? 'unfinished')
}

/** Buttons of which one is chosen. */
export function choice(label, values, chosen, choose) {
  const buttons = values.map(([value, text]) =>
    h('button', { type: 'button', 'aria-pressed': String(value === chosen), onclick: () => choose(value) }, text))
  return h('span', { class: 'choice' }, h('span', { class: 'dim' }, label + ' '),
    h('span', { class: 'buttons', role: 'group', 'aria-label': label }, buttons))
}

/** A sign before what is right or wrong; it is not copied with it. */
export const rightSign = right => (right === null || right === undefined ? null : h('span', { class: 'sign-of' }, right ? '✓ ' : '✗ '))

/** A table of two columns. */
export function facts(rows) {
  return h('table', { class: 'facts' }, h('tbody', {}, rows.filter(Boolean).map(([name, value, kind = 'dim']) =>
    h('tr', {}, h('th', { scope: 'row', class: kind }, name), h('td', { class: typeof value === 'string' && value.length < 22 ? 'fit' : null }, value)))))
}

/** What stands where there is nothing to show. */
export const nothing = text => h('p', { class: 'nothing' }, text)
