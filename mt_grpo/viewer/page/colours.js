// A value as one of ten steps of a colour; the colours themselves are in style.css, for light and for dark.

const STEPS = 9

/** A class for a value with a sign, which is full at `full`: blue above 0, orange below. */
export function diverging(x, full) {
  if (!x) return ''
  const step = level(Math.abs(x) / full)
  return step ? (x > 0 ? 'p' : 'm') + step : ''
}

/** A class for a value from 0 to `full`; `kind` is the colour: `v`iolet, `t`eal or `g`reen. */
export function growing(x, full, kind = 'v') {
  const step = x > 0 ? level(x / full) : 0
  return step ? kind + step : ''
}

const level = share => Math.min(STEPS, Math.round(share * STEPS))
