// @ts-check
// One after the other: requests overtake each other on their way, and what the user did last must count. Knows nothing of
// the page: it imports nothing, so that node can test it.

/** Return a function that calls another one once all before it under the same name have ended; returns what that one does. */
export function makeTurns() {
  /** The end of the last one of each name, whether it failed or not. @type {Map<string, Promise<unknown>>} */
  const ends = new Map();
  /**
   * @template Result
   * @param {string} name
   * @param {() => Promise<Result>} act
   * @returns {Promise<Result>}
   */
  return (name, act) => {
    const turn = (ends.get(name) ?? Promise.resolve()).then(act);
    ends.set(name, turn.catch(() => {}));
    return turn;
  };
}
