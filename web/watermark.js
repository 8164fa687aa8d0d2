// @ts-check
// What is said of how much memory stays free. Knows nothing of the page: it imports only what
// node can test.
import { text } from "./texts.js";
import { inMegabytes } from "./units.js";

/** @typedef {{ low_bytes: number, high_bytes: number, low_text: string, high_text: string, source: "set" | "setting" | "default" }} WatermarkReport */

/**
 * A mark in the unit in which it was written: "10% (1.2G)", "8 GB"; its amount where none was written.
 * @param {string} written
 * @param {string} amount
 */
export function markText(written, amount) {
  if (written.endsWith("%")) return `${written} (${amount})`;
  return written.replace(/(?<=\d)(?=[A-Za-z])/, " ") || amount;
}

/**
 * Say what this machine cannot keep, which marks count now, and for which devices a node has others.
 * @param {Record<string, WatermarkReport>} watermarks by device; the RAM is "host"
 * @param {string[]} [notes] the server's
 */
export function marksText(watermarks, notes = []) {
  const named = Object.entries(watermarks).filter(([, { source }]) => source === "setting");
  const marks = named.map(([device, { low_bytes, high_bytes, low_text, high_text }]) => {
    const [low, high] = [markText(low_text, inMegabytes(low_bytes)), markText(high_text, inMegabytes(high_bytes))];
    return text("marks.of_device", { device, low, high });
  });
  const byNodes = Object.keys(watermarks).filter((device) => watermarks[device].source === "set");
  const others = byNodes.length ? [text("marks.by_node", { devices: byNodes.join(", ") })] : [];
  return [...notes.map((note) => `${note}.`), marks.length ? text("marks.kept_free", { marks: marks.join("; ") }) : text("marks.default"), ...others].join(" ");
}
