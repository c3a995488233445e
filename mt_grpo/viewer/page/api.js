// Questions to the server; in an exported file, to the data inside it.

const inside = document.getElementById('data')
const data = inside ? JSON.parse(inside.textContent) : null

/** Whether the page is an exported file: what it has of the run, or null. */
export const exported = data && { filter: data.filter, conversations: data.rows.length }

/** The run that the page is at, where it has several. */
export const current = { run: null }

/** The answer to a question; throws an Error whose message is a sentence for people. */
export async function ask(question, parameters = {}) {
  const known = Object.entries({ run: current.run, ...parameters }).filter(([, value]) => value !== null && value !== undefined && value !== '')
  if (data) return fromFile(question, Object.fromEntries(known))
  let response
  try {
    response = await fetch(`api/${question}?${new URLSearchParams(known)}`)
  } catch {
    throw new Error('`mt-grpo view` does not answer: it has ended, or its machine cannot be reached.')
  }
  const answer = await response.json().catch(() => ({ error: `The server failed (status ${response.status}).` }))
  if (!response.ok) throw new Error(answer.error)
  return answer
}

/** Puts a star and a note on a conversation; the notes of the run. */
export async function putNote(session, star, note) {
  const known = Object.entries({ run: current.run, session }).filter(([, value]) => value)
  const response = await fetch(`api/note?${new URLSearchParams(known)}`, { method: 'POST', body: JSON.stringify({ star, note }),
    headers: { 'Content-Type': 'application/json' } }).catch(() => { throw new Error('`mt-grpo view` does not answer.') })
  const answer = await response.json().catch(() => ({ error: `The server failed (status ${response.status}).` }))
  if (!response.ok) throw new Error(answer.error)
  return answer.notes
}

const LEFT_OUT = { panel: 'An exported file has conversations, and not how the run itself went.',
  compare: 'An exported file has the first and the last evaluation alone.' }

function fromFile(question, asked) {
  if (question === 'find') return findInFile(asked)
  const keys = { groups: ['mode', 'step'], group: ['mode', 'step', 'k', 'group'], trajectory: ['session'], why: ['session'], compare: ['from', 'to'] }[question] ?? []
  const key = keys.map(name => asked[name] ?? '').join(' ').trim()
  const answers = data.answers[question] ?? {}
  const answer = key in answers ? answers[key] : key ? undefined : Object.values(answers)[0]
  if (!answer) throw new Error(LEFT_OUT[question] ?? 'This is not in the exported file: its filter leaves it out.')
  if (answer.error) throw new Error(answer.error)
  return answer
}

/** Why a link of an exported file leads nowhere; null where it leads to what is in it. */
export function missing(href) {
  const [view, text = ''] = href.replace(/^#\/?/, '').split('?')
  const asked = Object.fromEntries(new URLSearchParams(text))
  const { finds, group, groups } = data.answers
  const there = {
    find: () => !asked.q || asked.q === data.filter || finds[asked.q]?.length > 0,
    trajectory: () => !asked.session || inFile(asked.session),
    context: () => inFile(asked.session),
    apart: () => inFile(asked.a) && inFile(asked.b),
    beside: () => inFile(asked.a) && inFile(asked.b),
    group: () => !asked.group || `${asked.mode} ${asked.step} ${asked.k} ${asked.group}` in group,
    groups: () => !asked.step || `${asked.mode ?? 'train'} ${asked.step}` in groups,
  }[view]
  if (view === 'run') return LEFT_OUT.panel
  return !there || there() ? null : 'not in this file: its filter leaves it out'
}

/** Whether a conversation can be shown: in an exported file, those that its filter lets through. */
export const inFile = session => !data || session in data.answers.trajectory

/** The rows of the file, or those of a finding, sorted; its filter was fixed when it was written. */
function findInFile(asked) {
  const chosen = data.answers.finds[asked.q]
  const rows = chosen ? chosen.map(place => data.rows[place]) : data.rows.slice()
  const name = (asked.sort ?? '').replace(/^-/, '')
  const sign = (asked.sort ?? '').startsWith('-') ? -1 : 1
  if (name) {
    const missing = row => row[name] === null || row[name] === undefined
    rows.sort((a, b) => missing(a) - missing(b) || (missing(a) ? 0 : sign * (a[name] < b[name] ? -1 : +(a[name] > b[name]))))
  }
  const offset = +(asked.offset ?? 0)
  return { total: data.total, matched: rows.length, offset, rows: rows.slice(offset, offset + +(asked.limit ?? 100)) }
}
