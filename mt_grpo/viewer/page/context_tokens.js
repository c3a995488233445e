// The tokens and the messages that a turn was given.

/** Places of the tokens on the way to a turn, in order, without those that it sampled. */
export function pathTo(whole, n) {
  const { nodes } = whole
  let at = nodes.findIndex(node => node.turn === n && nodes[node.parent]?.turn !== n)
  const way = []
  for (at = at < 0 ? -1 : nodes[at].parent; at >= 0; at = nodes[at].parent) way.push(nodes[at])
  return way.reverse().flatMap(node => range(node.begin, node.end))
}

const range = (from, to) => Array.from({ length: to - from }, (_, i) => from + i)

const SAMPLED = new WeakMap()

/** Places of the tokens that a turn sampled. */
export function sampledIn(whole, n) {
  if (!SAMPLED.has(whole)) {
    const places = whole.turns.map(() => [])
    whole.tokens.turn.forEach((turn, i) => { if (turn >= 0) places[turn].push(i) })
    SAMPLED.set(whole, places)
  }
  return SAMPLED.get(whole)[n]
}

export const textOf = (whole, i) => (whole.tokens.texts ? whole.tokens.texts[i] : `⟨${whole.tokens.ids[i]}⟩`)

/** The turn that a turn's context goes on from; -1 for none. */
export function followed(whole, n) {
  const after = whole.turns[n].follows
  return after === null || after === undefined || after >= n ? n - 1 : after
}

/** The messages of a turn's context: `role`, `text`, `note`, and `turn` of the model's own. */
export function messagesAt(whole, n) {
  const way = []
  for (let at = n; at >= 0; at = followed(whole, at)) way.push(at)
  return way.reverse().flatMap((at, i) => [
    ...given(whole, at).map(message => plain(message)),
    ...(i + 1 < way.length ? [{ role: 'assistant', text: words(whole.turns[at].message), note: `turn ${at + 1}`, turn: at }] : [])])
}

/** What stands before a turn and behind the one that it goes on from. */
function given(whole, n) {
  const turn = whole.turns[n]
  const own = turn.given ?? []
  if (turn.follows !== null && turn.follows !== undefined) return own
  return [...(n ? whole.turns[n - 1].replies : whole.prompt), ...own]
}

const plain = message => ({ role: message.role, text: words(message), note: message.name ?? '' })

/** The words of a message; of content in parts, its text. */
export function words(message) {
  const content = message.content ?? ''
  if (typeof content === 'string') return content
  return content.map(part => (typeof part === 'string' ? part : part.text ?? `[${part.type}]`)).join('\n')
}
