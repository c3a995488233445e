// By what tokens are shaded: a number for each token, the class for it, and how large it must be to be jumped to.

import { diverging, growing } from './colours.js'

const finite = values => values.filter(value => value !== null && value !== undefined)

/** A round number at or above the 99th percentile of sizes, and at least `least`. */
function scale(values, least) {
  const sizes = finite(values).map(Math.abs).sort((a, b) => a - b)
  const high = Math.max(least, sizes[Math.min(sizes.length - 1, Math.floor(sizes.length * 0.99))] ?? 0)
  const unit = 10 ** Math.floor(Math.log10(high))
  return Math.ceil(high / unit - 1e-9) * unit
}

/** All shades of a conversation by name: `values` per token, `full`, `shade(value)`, `ends` of the legend, `missing`. */
export function shadesOf(tokens, updates) {
  const difference = tokens.logprobs.map((engine, i) =>
    engine === null || tokens.trainer[i] === null ? null : engine - tokens.trainer[i])
  const ratios = updates.length ? updates.at(-1).ratios : tokens.ids.map(() => null)
  const logs = ratios.map(ratio => (ratio === null ? null : Math.log(Math.max(ratio, 1e-6))))
  const found = {
    advantage: { values: tokens.advantages, full: scale(tokens.advantages, 1.5), kind: 'both', missing: 'No advantage is written for this conversation.' },
    'log-prob': { values: tokens.logprobs.map(value => (value === null ? null : -value)), full: 5, kind: 'v', ends: ['0', '−5'], missing: 'No log-probs are written.' },
    'engine − trainer': { values: difference, full: scale(difference, 0.01), kind: 'both', missing: 'The trainer has not computed this conversation.' },
    ratio: { values: logs, full: Math.max(0.2, scale(logs, 0.2)), kind: 'both', missing: 'The trainer has not computed this conversation.' },
    entropy: { values: tokens.entropies, full: scale(tokens.entropies, 1), kind: 't', missing: 'The trainer has not computed this conversation.' },
  }
  for (const [name, each] of Object.entries(found)) {
    each.shade = each.kind === 'both' ? value => diverging(value, each.full) : value => growing(value, each.full, each.kind)
    const full = name === 'ratio' ? [Math.exp(-each.full), Math.exp(each.full)].map(x => x.toFixed(2)) : null
    each.ends ??= full ?? (each.kind === 'both' ? [`−${round(each.full)}`, `+${round(each.full)}`] : ['0', round(each.full)])
    each.empty = !finite(each.values).length
  }
  return found
}

const round = x => String(+x.toPrecision(3))

/** Tokens to jump to, in order: the first of each run of equal values that reach half of `full`. */
export function large({ values, full }, places) {
  return places.filter((i, n) => {
    const size = Math.abs(values[i] ?? 0)
    return size >= full / 2 && (n === 0 || places[n - 1] !== i - 1 || values[i - 1] !== values[i])
  })
}
