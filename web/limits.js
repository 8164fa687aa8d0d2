// @ts-check
// The limits for idle models. Knows nothing of the page: it imports nothing, so that node can test it.

/**
 * Return what asks the server for a limit; 0 stands for none.
 * @param {"keep_loaded" | "idle"} name
 * @param {number} value models, or minutes
 */
export function limitBody(name, value) {
  if (name === "idle") return { idle: value ? `${value}min` : null };
  return { keep_loaded: value || null };
}

/**
 * Say which limits count now.
 * @param {{ keep_loaded: number | null, idle_s: number | null }} limits
 */
export function limitsText({ keep_loaded, idle_s }) {
  const loaded = keep_loaded === null ? "Any number of models stays loaded" : `At most ${keep_loaded} ${keep_loaded === 1 ? "model stays" : "models stay"} loaded`;
  return `${loaded}; ${idle_s === null ? "no idle model is unloaded by time" : `idle ones are unloaded after ${Math.round(idle_s / 6) / 10} min`}.`;
}
