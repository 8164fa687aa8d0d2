// @ts-check
// Texts that nodes told and that outlive a reload of the page, which keeps none itself. They do not outlive the server
// that told them. Knows nothing of the page: it imports nothing, so that node can test it.

/**
 * Return what keeps texts by name in a storage.
 * @param {() => Pick<Storage, "getItem" | "setItem" | "removeItem">} storage of the page; asked for at each use
 */
export function makeKeptTexts(storage) {
  /** What the server that answered last calls itself; empty before its first answer. */
  let server = "";
  return {
    /**
     * Take what the server calls itself; returns whether another one told what is known so far.
     * @param {string} id
     */
    isAnother(id) {
      const before = server;
      server = id;
      return before !== "" && before !== id;
    },
    /**
     * Keep a text; an empty one is forgotten.
     * @param {string} name
     * @param {string} text
     */
    keep(name, text) {
      if (text) storage().setItem(name, JSON.stringify({ server, text }));
      else storage().removeItem(name);
    },
    /** The text of a name, if the same server told it; else an empty one. @param {string} name @returns {string} */
    find(name) {
      const found = storage().getItem(name);
      if (!found || !server) return "";
      const kept = JSON.parse(found);
      return kept.server === server || kept.server === "" ? kept.text : "";
    },
  };
}
