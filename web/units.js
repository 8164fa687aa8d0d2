// @ts-check
// Amounts of memory as the page writes them: in binary units, or in decimal ones as the user chose. Knows nothing of the
// page: it imports nothing, so that node can test it.

/** @typedef {"binary" | "decimal"} Units */

const NAMES = ["B", "K", "M", "G", "T"];
let base = 1024;

/** Write amounts in these units from now on. @param {Units} units */
export function useUnits(units) {
  base = units === "decimal" ? 1000 : 1024;
}

/**
 * Bytes in at most five characters: "512B", "34.2M", "1.2G".
 * @param {number} bytes
 */
export function shortBytes(bytes) {
  let unit = 0;
  let amount = bytes;
  // 999.5 of a unit would be shown with four digits: the next unit takes it.
  while (amount >= 999.5 && unit < NAMES.length - 1) {
    amount /= base;
    unit += 1;
  }
  return `${unit === 0 || amount >= 99.95 ? amount.toFixed(0) : amount.toFixed(1)}${NAMES[unit]}`;
}

/**
 * Bytes in whole MiB, or MB.
 * @param {number} bytes
 */
export function inMegabytes(bytes) {
  return `${Math.round(bytes / base ** 2)} ${base === 1000 ? "MB" : "MiB"}`;
}
