// @ts-check
// The geometry of the timeline: where a second lies, what held when, and which lines that makes. Numbers only: it imports
// nothing.

/**
 * @typedef {{ id: string, name: string, begin: number, end: number }} Span a run, in seconds after the server's start
 * @typedef {{ at: number, weights: Record<string, number>, allocated: number, peak: number }} Point
 *   what a device held from then on, in bytes; the peak is that of the time before
 * @typedef {{ id: string, title: string, run: string, begin: number, end: number }} Step one execution of a node
 * @typedef {{ x: (seconds: number) => number, seconds: (x: number) => number, begin: number, end: number }} Scale
 */

/** Of the width that runs share, what each has at least, however short it was. */
const LEAST_PART = 0.3;
/** Less than this part of a device would be a flat line: then the row is scaled so that it is the other part of it. */
const [LEAST_HEIGHT, FULL_HEIGHT] = [0.2, 0.75];

/**
 * The last runs that began, the oldest first; one that goes on ends now.
 * @param {{ run_id: string, name: string, begin_s: number, end_s: number | null }[]} runs
 * @param {number} now
 * @param {number} most
 * @returns {Span[]}
 */
export function spansOf(runs, now, most) {
  return runs.slice(-most).map(({ run_id: id, name, begin_s: begin, end_s: end }) => ({ id, name, begin, end: Math.max(begin, end ?? now) }));
}

/**
 * The executions of nodes in these runs that took a part of the width worth a line.
 * @param {{ node_id: string, title: string, run_id: string, begin_s: number, seconds: number }[]} nodes
 * @param {Span[]} spans
 * @returns {Step[]}
 */
export function stepsOf(nodes, spans) {
  const runs = new Set(spans.map((span) => span.id));
  return nodes
    .filter((node) => runs.has(node.run_id))
    .map((node) => ({ id: node.node_id, title: node.title, run: node.run_id, begin: node.begin_s, end: node.begin_s + node.seconds }));
}

/**
 * A scale on which runs lie side by side: the time between them takes the same few pixels, however long it was. Each run
 * has a part of the width by its seconds, beside an equal part that all have. Rises everywhere, so it has an inverse.
 * @param {Span[]} spans not empty, in the order of their times
 * @param {number} left
 * @param {number} right
 * @param {number} gap pixels between two runs
 * @returns {Scale}
 */
export function makeScale(spans, left, right, gap) {
  const room = Math.max(1, right - left - gap * (spans.length - 1));
  const total = spans.reduce((all, { begin, end }) => all + end - begin, 0);
  const even = total > 0 ? LEAST_PART : 1;
  /** @type {[number, number][]} knots: seconds and pixels */
  const knots = [];
  let x = left;
  for (const { begin, end } of spans) {
    const width = (even / spans.length + (total > 0 ? ((1 - even) * (end - begin)) / total : 0)) * room;
    knots.push([begin, x], [end, x + width]);
    x += width + gap;
  }
  return {
    x: (seconds) => between(knots, seconds, 0, 1),
    seconds: (place) => between(knots, place, 1, 0),
    begin: spans[0].begin,
    end: spans[spans.length - 1].end,
  };
}

/**
 * @param {[number, number][]} knots
 * @param {number} value
 * @param {0 | 1} from which of a knot's numbers it is
 * @param {0 | 1} to which one is wanted
 */
function between(knots, value, from, to) {
  const after = knots.findIndex((knot) => knot[from] >= value);
  if (after <= 0) return (after === 0 ? knots[0] : knots[knots.length - 1])[to];
  const [low, high] = [knots[after - 1], knots[after]];
  const length = high[from] - low[from];
  return length > 0 ? low[to] + ((high[to] - low[to]) * (value - low[from])) / length : high[to];
}

/**
 * The points of a device, the oldest first: those of these runs, and the last one before them, as it held until then.
 * @param {{ t_s: number, device: string, component_bytes: Record<string, number>, allocated_bytes: number, peak_bytes: number }[]} samples
 * @param {string} device
 * @param {number} begin
 * @returns {Point[]}
 */
export function pointsOf(samples, device, begin) {
  const points = samples
    .filter((sample) => sample.device === device)
    .map(({ t_s: at, component_bytes: weights, allocated_bytes: allocated, peak_bytes: peak }) => ({ at, weights, allocated, peak }));
  const first = points.findLastIndex((point) => point.at <= begin);
  return first < 0 ? points : [{ ...points[first], at: begin, peak: points[first].allocated }, ...points.slice(first + 1)];
}

/**
 * The point that holds at a second: the last one until then. Null before the first.
 * @param {Point[]} points
 * @param {number} seconds
 */
export function pointAt(points, seconds) {
  let low = 0;
  let high = points.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle].at <= seconds) low = middle + 1;
    else high = middle;
  }
  return low > 0 ? points[low - 1] : null;
}

/**
 * The points where something changes, in pixels, for steps from one to the next by keys; each once, rising.
 * @param {Point[][]} rows
 * @param {Scale} scale
 */
export function stopsOf(rows, scale) {
  const stops = rows.flat().filter(({ at }) => at <= scale.end).map(({ at }) => scale.x(at));
  return [...new Set(stops)].sort((one, other) => one - other);
}

/**
 * The bytes at the top of a device's row: all that it has, or a little more than was used, where that is far less.
 * @param {Point[]} points
 * @param {number} totalBytes
 */
export function topOf(points, totalBytes) {
  const most = Math.max(1, ...points.map(mostOf));
  return most >= totalBytes * LEAST_HEIGHT ? Math.max(1, totalBytes) : most / FULL_HEIGHT;
}

/**
 * The most that a device held at a point, or just before.
 * @param {Point} point
 */
export function mostOf({ weights, allocated, peak }) {
  return Math.max(allocated, peak, Object.values(weights).reduce((all, bytes) => all + bytes, 0));
}

/**
 * The outline of an area that keeps its height from one point to the next.
 * @param {{ at: number, low: number, high: number }[]} levels pixels from below, at seconds
 * @param {Scale} scale
 */
export function areaPath(levels, scale) {
  /** @type {string[]} */
  const above = [];
  /** @type {string[]} */
  const below = [];
  levels.forEach(({ at, low, high }, index) => {
    const from = round(scale.x(at));
    const to = round(scale.x(index + 1 < levels.length ? levels[index + 1].at : scale.end));
    above.push(`${from},${round(high)} ${to},${round(high)}`);
    below.unshift(`${to},${round(low)} ${from},${round(low)}`);
  });
  return levels.length ? `M${above.join(" ")} ${below.join(" ")}Z` : "";
}

/**
 * The most that was allocated: each point says it of the time since the one before.
 * @param {Point[]} points
 * @param {Scale} scale
 * @param {(bytes: number) => number} y
 */
export function peakPath(points, scale, y) {
  const parts = points.slice(1).map(({ at, peak }, index) => {
    const [from, to, high] = [scale.x(points[index].at), scale.x(at), y(peak)].map(round);
    return `${index ? "L" : "M"}${from},${high} ${to},${high}`;
  });
  const last = points[points.length - 1];
  if (last) parts.push(`${parts.length ? "L" : "M"}${round(scale.x(last.at))},${round(y(last.allocated))} ${round(scale.x(scale.end))},${round(y(last.allocated))}`);
  return parts.join(" ");
}

/** @param {number} pixels */
const round = (pixels) => Math.round(pixels * 10) / 10;
