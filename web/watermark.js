// @ts-check
// What is said of how much memory stays free. Knows nothing of the page: it imports nothing, so that node can test it.

/** @typedef {{ low_bytes: number, high_bytes: number, source: "set" | "setting" | "default" }} WatermarkReport */

/**
 * Say which marks count now, and for which devices a node has others.
 * @param {Record<string, WatermarkReport>} watermarks by device; the RAM is "host"
 */
export function marksText(watermarks) {
  const named = Object.entries(watermarks).filter(([, { source }]) => source === "setting");
  const marks = named.map(([device, { low_bytes, high_bytes }]) => `${device}: ${toMiB(low_bytes)} to ${toMiB(high_bytes)}`);
  const byNodes = Object.keys(watermarks).filter((device) => watermarks[device].source === "set");
  const others = byNodes.length ? [`A Watermark node was run for ${byNodes.join(", ")}, and counts there.`] : [];
  return [marks.length ? `Kept free: ${marks.join("; ")}.` : "The default amounts are kept free.", ...others].join(" ");
}

/** @param {number} bytes */
const toMiB = (bytes) => `${Math.round(bytes / 2 ** 20)} MiB`;
