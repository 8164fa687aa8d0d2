// @ts-check
// The events that the server told so far. Knows nothing of the page: it imports nothing, so that node can test it.

/** @typedef {import("./events.js").Event} Event */

/** So many are kept, and so many are asked for at once. */
const MOST_EVENTS = 1000;
const MOST_ASKED = 500;

/**
 * Return the events that are known after some more came, the oldest first, and no more than are kept.
 * @param {Event[]} known
 * @param {Event[]} more
 */
export function withMore(known, more) {
  const last = known.at(-1)?.t_s ?? -1;
  return [...known, ...more.filter((event) => event.t_s > last)].slice(-MOST_EVENTS);
}

/**
 * Return what reads the events of a server. Answers may overtake each other: each counts, as it has all after what was
 * known when it was asked for.
 * @param {(words: string) => Promise<{ events: Event[] }>} read takes the words of the address
 * @param {() => void} show is told of news
 * @param {(error: unknown) => void} fail
 */
export function makeEventLog(read, show, fail) {
  /** @type {Event[]} */
  let events = [];
  let server = "";
  /** The last question, and the newest one that was answered. */
  let asked = 0;
  let answered = 0;
  return {
    /** The oldest first. */
    known: () => events,
    /**
     * Take what came since the last update, or ask for what is new: another server has events of its own, and what came since
     * continues what is known only where that is all there. Never rejects for what `read` does.
     * @param {string} id the server's
     * @param {Event[]} [since]
     */
    async update(id, since) {
      if (id !== server) [events, server, answered] = [[], id, -1];
      if (since && answered === asked) {
        events = withMore(events, since);
        return;
      }
      const turn = ++asked;
      const last = events.at(-1)?.t_s;
      try {
        const more = await read(`${last === undefined ? "" : `after=${last}&`}limit=${MOST_ASKED}`);
        if (id !== server) return;
        answered = Math.max(answered, turn);
        events = withMore(events, more.events);
        show();
      } catch (error) {
        fail(error);
      }
    },
  };
}
