// @ts-check
// What is said of how much memory stays free. Knows nothing of the page: it imports only what
// node can test.
import { text } from "./texts.js";
import { inMegabytes } from "./units.js";

/** @typedef {{ low_bytes: number, high_bytes: number, source: "set" | "setting" | "default" }} WatermarkReport */

/**
 * Say which marks count now, and for which devices a node has others.
 * @param {Record<string, WatermarkReport>} watermarks by device; the RAM is "host"
 */
export function marksText(watermarks) {
  const named = Object.entries(watermarks).filter(([, { source }]) => source === "setting");
  const marks = named.map(([device, { low_bytes, high_bytes }]) => text("marks.of_device", { device, low: inMegabytes(low_bytes), high: inMegabytes(high_bytes) }));
  const byNodes = Object.keys(watermarks).filter((device) => watermarks[device].source === "set");
  const others = byNodes.length ? [text("marks.by_node", { devices: byNodes.join(", ") })] : [];
  return [marks.length ? text("marks.kept_free", { marks: marks.join("; ") }) : text("marks.default"), ...others].join(" ");
}
