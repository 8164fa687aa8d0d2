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
  /** What was told before that: it is of the server that answers, unless the connection was lost meanwhile. @type {Map<string, string>} */
  const early = new Map();

  /** @param {string} name @param {string} text */
  const store = (name, text) => storage().setItem(name, JSON.stringify({ server, text }));

  return {
    /**
     * Take what the server calls itself; returns what that changes: a server is known now, or another one told what is
     * known so far.
     * @param {string} id
     * @returns {"same" | "first" | "another"}
     */
    take(id) {
      if (id === server) return "same";
      const isFirst = server === "";
      server = id;
      early.forEach((text, name) => store(name, text));
      early.clear();
      return isFirst ? "first" : "another";
    },
    /** Forget what was told before the server has called itself anything: another one may answer now. */
    loseConnection() {
      early.clear();
    },
    /**
     * Keep a text; an empty one is forgotten.
     * @param {string} name
     * @param {string} text
     */
    keep(name, text) {
      storage().removeItem(name);
      early.delete(name);
      if (!text) return;
      if (server) store(name, text);
      else early.set(name, text);
    },
    /** The text of a name, if the same server told it; else an empty one. @param {string} name @returns {string} */
    find(name) {
      const found = storage().getItem(name);
      if (!found || !server) return "";
      const kept = JSON.parse(found);
      return kept.server === server ? kept.text : "";
    },
  };
}
