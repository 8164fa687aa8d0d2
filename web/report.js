// @ts-check
// Asks the server for the memory manager's report. Knows nothing of the page: it imports nothing, so that node can test it.

/**
 * Return a function that asks for parts of the report and hands on what came. An answer to an older question than the
 * last one shown is dropped: answers may overtake each other. A failure is told, the next one only after an answer.
 * @template Report
 * @param {(words: string) => Promise<Report>} fetchReport
 * @param {{ show: (report: Report) => void, fail: (error: unknown) => void }} page
 * @returns {(words: string) => Promise<void>} never rejects for what `fetchReport` does
 */
export function makeAsker(fetchReport, { show, fail }) {
  let asked = 0;
  let shown = 0;
  let isFailing = false;
  return async (words) => {
    const turn = ++asked;
    let report;
    try {
      report = await fetchReport(words);
    } catch (error) {
      if (!isFailing) fail(error);
      isFailing = true;
      return;
    }
    isFailing = false;
    if (turn < shown) return;
    shown = turn;
    show(report);
  };
}

/**
 * Return a function that calls another one after a while, once for all calls meanwhile.
 * @param {() => void} call
 * @param {number} milliseconds
 */
export function makeSoon(call, milliseconds) {
  let isWaiting = false;
  return () => {
    if (isWaiting) return;
    isWaiting = true;
    setTimeout(() => {
      isWaiting = false;
      call();
    }, milliseconds);
  };
}

/**
 * Return what asks for one report for all who show something of it. Nothing is asked while nobody asks.
 * @param {(words: string) => Promise<Highwater.Report>} fetchReport takes the words of the address
 * @param {(error: unknown) => void} fail is told of a failure, the next one only after an answer
 */
export function makeLiveReport(fetchReport, fail) {
  /** @type {Set<{ parts: () => string[], show: (report: Highwater.Report) => void, after?: () => number | undefined }>} */
  const readers = new Set();
  const show = (/** @type {Highwater.Report} */ report) => [...readers].forEach((reader) => reader.show(report));
  const ask = makeAsker(fetchReport, { show, fail });
  return {
    /**
     * Show every report from now on; returns what ends that.
     * @param {() => string[]} parts names what is needed in the next report
     * @param {(report: Highwater.Report) => void} show gets also what others need
     * @param {() => number | undefined} [after] from when on it needs entries of lists; undefined: all. One reader at most has this
     */
    read(parts, show, after) {
      const reader = { parts, show, after };
      readers.add(reader);
      return () => void readers.delete(reader);
    },
    /**
     * Ask for what the readers need, and for more; nothing where nobody needs anything. With a limit lists are asked for from
     * their begin on.
     * @param {{ more?: string[], limit?: number }} [also]
     */
    async ask({ more = [], limit } = {}) {
      const parts = new Set([...[...readers].flatMap((reader) => reader.parts()), ...more]);
      if (parts.size === 0) return;
      const after = limit !== undefined ? undefined : [...readers].map((reader) => reader.after?.()).find((time) => time !== undefined);
      await ask(`only=${[...parts].join(",")}${limit === undefined ? "" : `&limit=${limit}`}${after === undefined ? "" : `&after=${after}`}`);
    },
  };
}
