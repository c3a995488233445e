// A conversation as cards: what the model wrote, token by token, and what it was answered.

import { words } from './context_tokens.js'
import { folded } from './fold.js'
import { h, link, number, plural, signed } from './dom.js'
import { json, read } from './reading.js'

const LONG = 1500

/** Places of the tokens of each turn in the list of all tokens. */
export function placesByTurn(whole) {
  const places = whole.turns.map(() => [])
  whole.tokens.turn.forEach((turn, i) => { if (turn >= 0) places[turn].push(i) })
  return places
}

/** What stands before the first turn. */
function promptCard(whole, reading) {
  return h('div', { class: 'said prompt' }, whole.prompt.map(message => (reading ? [h('b', {}, message.role), read(message)]
    : h('p', { dir: 'auto' }, h('b', {}, message.role), ' ', short(words(message))))))
}

/** Long text folded. */
function short(text) {
  return text.length > LONG ? folded(h('span', {}, text), `all ${plural(text.length, 'character')}`) : text
}

/** All that was said, and why it ended early; see `turnCard`. */
export function conversation(whole, places, spans, open, reading) {
  return [promptCard(whole, reading), whole.turns.map((_, n) => turnCard(whole, n, places[n], spans, open, reading)),
    whole.error && h('div', { class: 'said wrong' }, whole.error),
    Object.entries(whole.refusals ?? {}).map(([why, number]) => h('div', { class: 'said wrong' }, `${plural(number, 'request')} refused: ${why}`)),
    whole.where && h('pre', { class: 'said wrong' }, whole.traceback)]
}

/**
 * The card of a turn, and what followed it; `spans` gets the element of each token. With `open` the advantage is a
 * button that calls it. `reading` shows messages as they are meant to be read, in place of their tokens.
 */
export function turnCard(whole, number_, places, spans, open = null, reading = false) {
  const turn = whole.turns[number_]
  const advantage = whole.index.mode === 'eval' ? null : turn.advantage  // nothing is trained there
  const side = advantage === null || advantage === undefined ? '' : advantage > 0 ? 'above' : advantage < 0 ? 'below' : ''
  const reward = whole.index.turn_rewards[number_]
  const bit = (name, value) => h('span', {}, name + ' ', h('b', {}, value))
  const teacher = whole.teacher_log_ratios?.[number_]
  const head = h('h4', { 'aria-level': '3' }, h('b', {}, `turn ${number_ + 1}`),
    side || advantage === 0 ? (open ? opener(number_, advantage, open) : bit('advantage', signed(advantage))) : null,
    h('span', { title: byName(whole, number_) }, 'turn reward ', h('b', {}, number(reward))),
    Number.isFinite(teacher) && h('span', { title: 'log-prob of the teacher minus that of the policy, mean over its tokens, in nats' }, 'teacher ', h('b', {}, signed(teacher))),
    h('span', {}, `${plural(turn.num_tokens, 'token')} after ${turn.context_length.toLocaleString('en')}`),
    h('span', {}, `${number(turn.seconds)} s`),
    turn.finish_reason === 'length' && h('span', { class: 'chip cut' }, 'length'),
    turn.fork_cause && h('span', { class: 'chip cut', title: 'why its context does not extend the one before' }, turn.fork_cause),
    open && h('a', { class: 'saw', href: link('context', { session: whole.index.session, turn: number_ + 1 }), title: 'The context of this turn (c)' }, 'what it saw'),
    turn.weight_version !== null && h('span', { class: 'right-end' }, `weights of step ${turn.weight_version}`))
  return [h('article', { class: `turn ${side}`, id: open && `turn-${number_ + 1}`, 'aria-label': `turn ${number_ + 1}` },
    head, reading ? h('div', { class: 'to-read' }, read(turn.message), calls(turn)) : text(whole, turn, places, spans)), reply(turn, reading)]
}

function opener(number_, advantage, open) {
  return h('button', { type: 'button', class: 'open', 'aria-expanded': 'false', title: 'Why this advantage (w)', onclick: () => open(number_) },
    'advantage ', h('b', {}, signed(advantage)))
}

/** The turn rewards of a turn, unweighted. */
const byName = (whole, n) => Object.entries(whole.rewards.turn ?? {}).map(([name, values]) => `${name}: ${number(values[n])}`).join('\n')

function text(whole, turn, places, spans) {
  const block = document.createElement('div')
  block.className = 'tokens'
  block.dir = 'auto'
  const { texts, ids } = whole.tokens
  for (const [k, i] of places.entries()) {
    const span = document.createElement('span')
    const words_ = texts ? texts[i] : `⟨${ids[i]}⟩`
    if (words_.includes('\n')) span.append(...withBreaks(words_))
    else span.textContent = words_  // empty where a later token ends the character
    span.place = i
    if (whole.turns[turn.index].mask?.[k] === 0) {
      span.dataset.masked = ''
      span.title = 'sampled, and taken out of training by the environment'
    }
    spans[i] = span
    block.append(span)
  }
  if (!places.length) block.append(h('span', { class: 'dim' }, turn.message.content || 'No token was sampled.'))
  return block
}

/** Line breaks with a sign, which the style gives them, so that they can be pointed at. */
function withBreaks(words_) {
  return words_.split('\n').flatMap((part, n) => (n ? [h('i'), '\n', part] : [part])).filter(part => part !== '')
}

/** Calls that are not in the text of the message. */
function calls(turn) {
  if (!turn.message.tool_calls?.length) return null
  return turn.tool_calls.map(call => h('div', { class: 'tagged' }, h('small', { class: 'dim' }, `call of ${call.name}`),
    h('pre', { class: 'code', dir: 'ltr' }, json(JSON.stringify(call.arguments)))))
}

/** Whether a call ran a command in a shell: its tool said with what exit code. */
const isCommand = call => Number.isInteger(call.data?.exit_code) && typeof call.arguments.command === 'string'

/** A command as a terminal shows it, with its exit code and time. */
function terminal({ arguments: { command }, result, data, seconds, error }) {
  const failed = data.exit_code !== 0
  return h('div', { class: 'terminal', dir: 'ltr' }, h('pre', {}, h('b', {}, '$ '), command), h('pre', {}, error ?? result),
    h('small', { class: failed ? 'problem' : 'dim' }, `exit code ${data.exit_code} · ${milliseconds(data.seconds ?? seconds)}`))
}

function reply(turn, reading) {
  if (turn.error === null && turn.tool_calls.length && turn.tool_calls.every(isCommand)) {
    return h('div', { class: 'said' }, turn.tool_calls.map(terminal))
  }
  const wrong = turn.error !== null || turn.tool_calls.some(call => call.error !== null)
  if (!turn.replies.length && !wrong) return null
  const ran = turn.tool_calls.map(call => h('p', {}, h('b', {}, call.name), `(${JSON.stringify(call.arguments)})`,
    ` · ${milliseconds(call.seconds)}`, call.error !== null && h('span', { class: 'problem' }, ` · ${call.error}`),
    call.where && h('span', { class: 'dim' }, ` · ${call.where}`)))
  const none = !ran.length && turn.error !== null && h('p', {}, h('b', {}, 'no call ran'))
  return h('div', { class: `said ${wrong ? 'wrong' : ''}` }, ran, none,
    turn.replies.length ? turn.replies.map(message => (reading ? read(message) : h('p', { dir: 'auto' }, short(words(message))))) : h('p', {}, turn.error))
}

const milliseconds = seconds => (seconds < 1 ? `${(1000 * seconds).toFixed(0)} ms` : `${number(seconds)} s`)
