// Two whole conversations to read side by side: what two models did with a question, or one run at two evaluations.

import { ask, inFile } from './api.js'
import { choice, h, link, number } from './dom.js'
import { outcome } from './trajectory.js'
import { conversation } from './turns.js'

export async function beside(main, asked) {
  const runs = asked.get('with')
  const names = runs ? runs.split('\n') : []
  const sides = [{ run: asked.get('run'), session: asked.get('a') }, { run: asked.get('other') ?? asked.get('run'), session: asked.get('b') }]
  const [{ rows }, ...wholes] = await Promise.all([runs ? ask('questions', { runs }) : { rows: [] }, ...sides.map(side => ask('trajectory', side))])
  const to = ([one, two]) => link('beside', { run: one.run, a: one.session, other: two.run, b: two.session, with: runs })
  const asks = (row, run) => ({ run, session: row?.cells[names.indexOf(run)]?.session })
  const at = rows.findIndex(row => wholes[0].group.sessions.includes(asks(row, sides[0].run).session))
  const of = place => rows[place] && to(sides.map(side => asks(rows[place], side.run)))
  const step = (place, text) => (of(place) ? h('a', { href: of(place) }, text) : h('span', { class: 'dim' }, text))
  const go = href => { if (href) location.hash = href }

  const column = (whole, n) => {
    const put = side => go(to(n ? [sides[0], side] : [side, sides[1]]))
    const { run } = sides[n]
    const name = run && names.length ? run : `step ${whole.index.step}`
    const same = whole.group.sessions.map((session, i) => [session, `${i + 1}: ${number(whole.group.rewards[i])}`]).filter(([session]) => inFile(session))
    return h('section', { 'aria-label': name }, h('div', { class: 'side-head' },
      at >= 0 ? h('select', { 'aria-label': n ? 'The other model' : 'The one model', onchange: event => put(asks(rows[at], event.target.value)) },
        names.map(each => h('option', { value: each, selected: each === run }, each))) : h('b', {}, name),
      h('a', { href: link('trajectory', { run, session: whole.index.session }) }, 'token by token'),
      same.length > 1 && choice('reward of each conversation', same, whole.index.session, session => put({ run, session }))),
    outcome(whole), conversation(whole, [], [], null, true))
  }
  main.replaceChildren(h('div', { class: 'bar' }, h('div', { class: 'words' }, at >= 0 && h('p', { class: 'dim' }, h('a', { href: link('runs', { with: runs }) }, '◀ questions'),
    ` · ${at + 1} of ${rows.length} · `, step(at - 1, 'previous'), ' ', step(at + 1, 'next')), h('h2', {}, wholes[0].question))), h('div', { class: 'sides whole' }, wholes.map(column)))
  return { title: 'Side by side', keys: { ArrowLeft: () => go(of(at - 1)), ArrowRight: () => go(of(at + 1)) } }
}
