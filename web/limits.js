// @ts-check
// The limits for idle models. Knows nothing of the page: it imports only what node can test.
import { text } from "./texts.js";

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
  const key = keep_loaded === null ? "limits.any" : keep_loaded === 1 ? "limits.one" : "limits.at_most";
  const idle = idle_s === null ? text("limits.never") : text("limits.idle", { minutes: Math.round(idle_s / 6) / 10 });
  return text("limits.told", { loaded: text(key, { count: keep_loaded ?? 0 }), idle });
}
