// Long text that begins folded.

import { h } from './dom.js'

/** An element cut off at a height, with a button that shows all of it. */
export function folded(element, words) {
  const button = h('button', { type: 'button', class: 'unfold as-link', 'aria-expanded': 'false' }, `▸ ${words}`)
  const box = h('div', { class: 'fold' }, h('div', { class: 'cut' }, element), button)
  button.addEventListener('click', () => {
    const open = box.classList.toggle('open')
    button.setAttribute('aria-expanded', String(open))
    button.textContent = open ? '▾ less' : `▸ ${words}`
  })
  return box
}
