// @ts-check
// The watermark on a bar: how much of a device stays free, moved by pointer or keys. Knows nothing of the page: it
// imports only what node can test.
import { text } from "../texts.js";
import { shortBytes } from "../units.js";
import { make } from "./elements.js";

/**
 * @typedef {import("./bars.js").Bar} Bar
 * @typedef {{ low_bytes: number, high_bytes: number }} Marks
 */

const MIB = 2 ** 20;
/** Steps of keys, as parts of all. @type {Record<string, number>} */
const STEPS = { ArrowRight: -0.01, ArrowUp: -0.01, ArrowLeft: 0.01, ArrowDown: 0.01, PageUp: -0.1, PageDown: 0.1, Home: 1, End: -1 };
/** A device that has at most so many times its low mark free is close to it. */
const CLOSE = 1.1;

/**
 * Return marks of which the low one is moved, at the same distance; no more stays free than there is.
 * @param {Marks} marks
 * @param {number} low_bytes where it is moved
 * @param {number} totalBytes
 * @returns {Marks} in whole hundredths of a MiB, as they are sent
 */
export function movedTo({ low_bytes: before, high_bytes }, low_bytes, totalBytes) {
  const band = Math.min(high_bytes - before, totalBytes);
  const low = Math.max(0, Math.min(low_bytes, totalBytes - band));
  const whole = (/** @type {number} */ bytes) => Math.min(totalBytes, Math.floor(Math.round((bytes * 100) / MIB) * (MIB / 100)));
  return { low_bytes: whole(low), high_bytes: whole(low + band) };
}

/**
 * Return marks after a key was pressed; null for a key that moves nothing.
 * @param {Marks} marks
 * @param {string} key right and up leave less free, as the mark moves to the right
 * @param {number} totalBytes
 */
export function movedBy(marks, key, totalBytes) {
  if (!Object.hasOwn(STEPS, key)) return null;
  return movedTo(marks, marks.low_bytes + STEPS[key] * totalBytes, totalBytes);
}

/**
 * Return what asks for new marks of a device, and for what is set for the others already: what is sent replaces all.
 * @param {import("./bars.js").Device[]} devices
 * @param {string} device the RAM is "host"
 * @param {Marks} marks
 */
export function marksOf(devices, device, marks) {
  const set = devices.filter(({ own_watermark: mark }) => mark.source === "setting");
  const others = set.map(({ name, own_watermark: mark }) => [name === "cpu" ? "host" : name, mark]);
  const all = { ...Object.fromEntries(others), [device]: marks };
  return Object.keys(all).sort().map((name) => `${name}=${inMiB(all[name].low_bytes)}:${inMiB(all[name].high_bytes)}`).join(",");
}

/** @param {number} bytes */
const inMiB = (bytes) => `${Number((bytes / MIB).toFixed(4))}MiB`;

/**
 * Return the devices of which little more is free than what stays free.
 * @param {import("./bars.js").Device[]} devices
 */
export function closeToMark(devices) {
  const lowOf = (/** @type {import("./bars.js").Device} */ device) => (device.name === "cpu" ? device.own_watermark : device.watermark).low_bytes;
  return devices.filter((device) => lowOf(device) > 0 && device.free_bytes <= CLOSE * lowOf(device));
}

/**
 * A handle on a bar, at the low mark, and a line at the high one. What is moved is told when it is let go.
 * @param {Document} document
 * @param {Bar} first
 * @param {(marks: Marks) => Promise<boolean>} apply whether they count now
 */
export function makeSlider(document, first, apply) {
  const high = make(document, "span", { class: "hw-high", "aria-hidden": "true" });
  const handle = make(document, "span", {
    class: "hw-mark", role: "slider", tabindex: "0", "aria-orientation": "horizontal",
    "aria-label": text("panel.mark_of", { device: first.title }),
  });
  const element = make(document, "div", { class: "hw-marks" }, high, handle);
  let totalBytes = first.totalBytes;
  /** @type {Marks} */
  let known = { low_bytes: 0, high_bytes: 0 };
  /** What the user has in hand. @type {Marks | null} */
  let moving = null;
  let isFixed = false;

  function draw() {
    const marks = moving ?? known;
    const from = (/** @type {number} */ bytes) => `${100 - (100 * bytes) / Math.max(totalBytes, 1)}%`;
    handle.style.left = from(marks.low_bytes);
    high.style.left = from(marks.high_bytes);
    handle.setAttribute("aria-valuemin", "0");
    handle.setAttribute("aria-valuemax", "100");
    handle.setAttribute("aria-valuenow", String(Math.round(100 - (100 * marks.low_bytes) / Math.max(totalBytes, 1))));
    const told = text("panel.kept_free", { low: shortBytes(marks.low_bytes), high: shortBytes(marks.high_bytes) });
    handle.setAttribute("aria-valuetext", told);
    handle.setAttribute("title", told);
    handle.setAttribute("aria-disabled", String(isFixed));
  }

  async function letGo() {
    const wanted = moving;
    if (!wanted) return;
    if (wanted.low_bytes !== known.low_bytes && (await apply(wanted))) known = wanted; // until the next report
    if (moving === wanted) moving = null;
    draw();
  }

  handle.addEventListener("pointerdown", (event) => {
    if (isFixed || event.button !== 0) return;
    event.preventDefault();
    handle.focus();
    handle.setPointerCapture(event.pointerId);
    moving = known;
  });
  handle.addEventListener("pointermove", (event) => {
    if (!moving || !handle.hasPointerCapture(event.pointerId)) return;
    const { left, width } = element.getBoundingClientRect();
    moving = movedTo(known, totalBytes * (1 - (event.clientX - left) / width), totalBytes);
    draw();
  });
  handle.addEventListener("pointerup", () => void letGo());
  handle.addEventListener("pointercancel", () => cancel());
  handle.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && moving) {
      event.stopPropagation();
      cancel();
    }
    const next = isFixed ? null : movedBy(moving ?? known, event.key, totalBytes);
    if (!next) return;
    event.preventDefault();
    event.stopPropagation(); // the page has keys of its own
    moving = next;
    draw();
  });
  handle.addEventListener("keyup", (event) => {
    if (Object.hasOwn(STEPS, event.key)) void letGo();
  });
  handle.addEventListener("blur", () => void letGo());

  function cancel() {
    moving = null;
    draw();
  }

  return {
    element,
    /** @param {Bar} bar */
    fill(bar) {
      if (!bar.mark) return;
      totalBytes = bar.totalBytes;
      known = bar.mark;
      isFixed = bar.mark.source === "set";
      draw();
    },
  };
}
