// @ts-check
// Asks the server for the memory manager's report. Knows nothing of the page: it imports nothing, so that node can test it.

/**
 * Return a function that asks for parts of the report and hands on what came. An answer to an older question than the
 * last one shown is dropped: answers may overtake each other. A failure is told, the next one only after an answer.
 * @template Report
 * @param {(parts: string) => Promise<Report>} fetchReport
 * @param {{ show: (report: Report) => void, fail: (error: unknown) => void }} page
 * @returns {(parts: string) => Promise<void>} never rejects for what `fetchReport` does
 */
export function makeAsker(fetchReport, { show, fail }) {
  let asked = 0;
  let shown = 0;
  let isFailing = false;
  return async (parts) => {
    const turn = ++asked;
    let report;
    try {
      report = await fetchReport(parts);
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
