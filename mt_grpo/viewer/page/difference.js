// How one list becomes another: what both have in longest runs stays, as in Ratcliff and Obershelp's comparison.

const MOST = 3e7
const STRAY = 2, APART = 8

/**
 * Steps from `old` to `next`, in order: `kind` is '' for what stays (places of `next`), `new` (of `next`) or `gone` (of
 * `old`), for the places `from` to `to`; and `prefix`, the length of what both begin with.
 */
export function difference(old, next) {
  let prefix = 0
  while (prefix < old.length && prefix < next.length && old[prefix] === next[prefix]) prefix++
  let tail = 0
  while (tail < old.length - prefix && tail < next.length - prefix && old[old.length - 1 - tail] === next[next.length - 1 - tail]) tail++
  const ends = [old.length - tail, next.length - tail]
  const runs = [[0, 0, prefix], ...stray(common(old, next, prefix, ...ends), prefix, ends), [...ends, tail]]
  const steps = []
  let a = 0, b = 0
  for (const [i, j, size] of runs) {
    steps.push({ kind: 'gone', from: a, to: i }, { kind: 'new', from: b, to: j }, { kind: '', from: j, to: j + size })
    a = i + size
    b = j + size
  }
  return { prefix, steps: steps.filter(step => step.to > step.from) }
}

/** Runs that both have, `[place in old, place in next, size]`, in order; none where the lists are too long to look. */
function common(old, next, prefix, oldEnd, nextEnd) {
  if ((oldEnd - prefix) * (nextEnd - prefix) > MOST) return []
  const places = new Map()
  for (let j = prefix; j < nextEnd; j++) {
    if (!places.has(next[j])) places.set(next[j], [])
    places.get(next[j]).push(j)
  }
  const found = [], left = [[prefix, oldEnd, prefix, nextEnd]]
  while (left.length) {
    const [a, aEnd, b, bEnd] = left.pop()
    const run = longest(old, places, a, aEnd, b, bEnd)
    if (!run) continue
    const [i, j, size] = run
    found.push(run)
    left.push([a, i, b, j], [i + size, aEnd, j + size, bEnd])
  }
  return found.sort((x, y) => x[0] - y[0])
}

function longest(old, places, a, aEnd, b, bEnd) {
  let best = null, sizes = new Map()
  for (let i = a; i < aEnd; i++) {
    const here = new Map()
    for (const j of places.get(old[i]) ?? []) {
      if (j < b) continue
      if (j >= bEnd) break
      const size = (sizes.get(j - 1) ?? 0) + 1
      here.set(j, size)
      if (!best || size > best[2]) best = [i - size + 1, j - size + 1, size]
    }
    sizes = here
  }
  return best
}

/** Without runs of a word or two amid much that changed: they are there by chance. */
function stray(runs, prefix, [oldEnd, nextEnd]) {
  const kept = []
  runs.forEach((run, n) => {
    const [i, j, size] = run
    const [a, b] = kept.length ? [kept.at(-1)[0] + kept.at(-1)[2], kept.at(-1)[1] + kept.at(-1)[2]] : [prefix, prefix]
    const [c, d] = runs[n + 1] ?? [oldEnd, nextEnd]
    const before = i - a + j - b, after = c - i - size + d - j - size
    if (size > STRAY || before < APART && after < APART) kept.push(run)
  })
  return kept
}
