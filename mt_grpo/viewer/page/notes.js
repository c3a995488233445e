// A star and a note on a conversation, kept beside the run.

import { ask, exported, putNote } from './api.js'
import { h } from './dom.js'

const WAIT = 500

export function noteOf(session) {
  const star = h('button', { type: 'button', class: 'as-link star', 'aria-pressed': 'false', 'aria-label': 'star', disabled: !!exported }, '☆')
  const note = h('input', { type: 'text', 'aria-label': 'Note', placeholder: 'a note', maxlength: '4000', disabled: !!exported })
  const said = h('span', { class: 'problem', role: 'status' })
  const draw = on => { star.setAttribute('aria-pressed', String(on)); star.textContent = on ? '★' : '☆' }
  const save = async on => {
    try {
      const notes = await putNote(session, on, note.value)
      draw(notes[session]?.star ?? false)
      said.textContent = ''
    } catch (error) {
      said.textContent = error.message
    }
  }
  const starred = () => star.getAttribute('aria-pressed') === 'true'
  star.addEventListener('click', () => save(!starred()))
  let timer
  note.addEventListener('input', () => { clearTimeout(timer); timer = setTimeout(() => save(starred()), WAIT) })
  note.addEventListener('change', () => { clearTimeout(timer); save(starred()) })
  ask('notes').then(({ notes }) => {
    const known = notes[session]
    if (!known) return
    draw(known.star)
    note.value = known.note
  }).catch(() => {})  // where the server has ended, the line above says so
  return h('p', { class: 'noted' }, star, note, said)
}
