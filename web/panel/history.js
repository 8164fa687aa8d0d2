// @ts-check
// The history that the panel shows: runs, nodes and samples, and what comes after them while a run goes on. Knows nothing
// of the page: it imports nothing, so that node can test it.

/** @typedef {Highwater.Report} Report */

/** So many entries of each list are kept, as the server does. */
const MOST = 1000;
/** Times are rounded: so much before the last answer is asked for again. */
const OVERLAP_S = 0.001;
/** What grows while a run goes on, and when an entry of it was over. */
const ENDS = {
  /** @param {NonNullable<Report["runs"]>[number]} run */
  runs: (run) => run.end_s ?? Infinity,
  /** @param {NonNullable<Report["nodes"]>[number]} node */
  nodes: (node) => node.begin_s + node.seconds,
  /** @param {NonNullable<Report["samples"]>[number]} sample */
  samples: (sample) => sample.t_s,
};
export const LISTS = /** @type {(keyof typeof ENDS)[]} */ (Object.keys(ENDS));

/**
 * Whether an answer has the lists from their begin on, as far as the server tells them.
 * @param {Report} now
 */
export const isWhole = (now) => now.after_s === undefined && LISTS.every((name) => now[name]);

/**
 * Return what is known after an answer: its parts take the place of what was known of them. Lists of which it has only what
 * came after a time are continued, where nothing is missing between. Of a server that was started again only whole lists
 * are taken: the times of others are those of the server before.
 * @param {Report} known
 * @param {Report} now
 * @returns {Report}
 */
export function withAnswer(known, now) {
  if (now.server_id !== known.server_id) return isWhole(now) ? now : { ...now, runs: [], nodes: [], samples: [] };
  const { after_s: after, left_out: leftOut = {} } = now;
  const all = { ...known, ...now };
  if (after === undefined) return all;
  for (const name of LISTS) {
    const [before, more] = [known[name], now[name]];
    if (!before || !more || leftOut[name]) continue;
    const isOver = /** @type {(entry: object) => number} */ (ENDS[name]);
    Object.assign(all, { [name]: [...before.filter((entry) => isOver(entry) <= after), ...more].slice(-MOST) });
  }
  return all;
}

/**
 * From when on the next answer has to tell of the lists.
 * @param {Report} told the last answer that had them
 */
export const nextAfter = ({ now_s }) => Math.max(0, now_s - OVERLAP_S);

/**
 * Whether a run goes on, as far as is known; a node that runs tells of one that began after the lists were asked for.
 * @param {Report} report
 */
export const isRunning = ({ runs = [], open_nodes: open = [] }) => open.length > 0 || runs.some((run) => run.end_s === null);
