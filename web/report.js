// @ts-check
// Asks the server for the memory manager's report. Knows nothing of the page: it imports nothing, so that node can test it.

/**
 * Return a function that asks for parts of the report and hands on what came. Answers may overtake each other: of one to
 * an older question only those parts are handed on that no answer to a newer one had, and nothing of a server that is
 * gone. A failure is told, the next one only after an answer.
 * @template {{ server_id: string }} Report
 * @param {(words: string) => Promise<Report>} fetchReport
 * @param {{ show: (report: Report, turn: number) => void, fail: (error: unknown) => void }} page `show` gets the number of
 *   the question, too
 * @returns {(parts: string[], words: string, turn: number) => Promise<void>} each question has a larger number than the one
 *   before; never rejects for what `fetchReport` does
 */
export function makeAsker(fetchReport, { show, fail }) {
  /** The newest question that was answered, and the server that did. */
  let newest = 0;
  let server = "";
  /** That question for each part. @type {Map<string, number>} */
  const shown = new Map();
  let isFailing = false;
  return async (parts, words, turn) => {
    let report;
    try {
      report = await fetchReport(words);
    } catch (error) {
      if (!isFailing) fail(error);
      isFailing = true;
      return;
    }
    isFailing = false;
    if (turn > newest) {
      newest = turn;
      server = report.server_id;
    } else if (report.server_id !== server) return;
    const old = new Set(parts.filter((part) => turn < (shown.get(part) ?? 0)));
    if (old.size === parts.length) return;
    for (const part of parts) if (!old.has(part)) shown.set(part, turn);
    const news = Object.entries(report).filter(([name]) => !old.has(name));
    show(/** @type {Report} */ (Object.fromEntries(news)), turn);
  };
}

/**
 * Return a function that asks after a while, once for all who want that meanwhile: when the first of them may wait no
 * longer, for what any of them wants.
 * @param {(parts: string[]) => void} ask
 * @returns {(milliseconds: number, parts?: string[]) => void}
 */
export function makeSoon(ask) {
  /** @type {Set<string>} */
  const wanted = new Set();
  let due = Infinity;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let timer;
  return (milliseconds, parts = []) => {
    for (const part of parts) wanted.add(part);
    const wish = performance.now() + milliseconds;
    if (wish >= due) return;
    due = wish;
    clearTimeout(timer);
    timer = setTimeout(() => {
      due = Infinity;
      const all = [...wanted];
      wanted.clear();
      ask(all);
    }, milliseconds);
  };
}

/**
 * Return what asks for one report for all readers. It sends no request by itself.
 * @param {(words: string) => Promise<Highwater.Report>} fetchReport takes the words of the address
 * @param {(error: unknown) => void} fail is told of a failure, the next one only after an answer
 */
export function makeLiveReport(fetchReport, fail) {
  /** @type {Set<{ parts: () => string[], show: (report: Highwater.Report, turn: number) => void, after?: () => number | undefined }>} */
  const readers = new Set();
  let asked = 0;
  const ask = makeAsker(fetchReport, { show: (report, turn) => [...readers].forEach((reader) => reader.show(report, turn)), fail });
  return {
    /** How many questions were asked so far, which is the number of the last one. */
    asked: () => asked,
    /**
     * Show every report from now on; returns what ends that.
     * @param {() => string[]} parts names what is needed in the next report
     * @param {(report: Highwater.Report, turn: number) => void} show gets also what others need, without what a newer
     *   answer had already; the number is that of the question
     * @param {() => number | undefined} [after] from when on it needs entries of lists; undefined: all. One reader at most has this
     */
    read(parts, show, after) {
      const reader = { parts, show, after };
      readers.add(reader);
      return () => void readers.delete(reader);
    },
    /**
     * Ask for what the readers need, and for more; for nothing if no reader needs anything. With a limit lists are asked for from
     * their begin on.
     * @param {{ more?: string[], limit?: number }} [also]
     */
    async ask({ more = [], limit } = {}) {
      const parts = [...new Set([...[...readers].flatMap((reader) => reader.parts()), ...more])];
      if (parts.length === 0) return;
      const after = limit !== undefined ? undefined : [...readers].map((reader) => reader.after?.()).find((time) => time !== undefined);
      asked += 1;
      await ask(parts, `only=${parts.join(",")}${limit === undefined ? "" : `&limit=${limit}`}${after === undefined ? "" : `&after=${after}`}`, asked);
    },
  };
}
