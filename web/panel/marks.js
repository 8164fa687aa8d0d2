// @ts-check
// The watermark on a bar: how much of a device stays free, moved by pointer or keys. Knows nothing of the page: it
// imports only what node can test.
import { text } from "../texts.js";
import { shortBytes } from "../units.js";
import { markText } from "../watermark.js";
import { make } from "./elements.js";

/**
 * @typedef {import("./bars.js").Bar} Bar
 * @typedef {{ low_bytes: number, high_bytes: number, low_text: string, high_text: string }} Marks
 *   the texts are as a user wrote them, such as "8GB" or "10%"; "" for one that no user wrote
 * @typedef {"low" | "high"} Side
 */

const MIB = 2 ** 20;
const GIB = 2 ** 30;
/** Bytes of the units that users write, in small letters. @type {Record<string, number>} */
const UNITS = { gib: GIB, g: GIB, mib: MIB, m: MIB, gb: 1e9, mb: 1e6 };
/** Steps of keys, as parts of all. @type {Record<string, number>} */
const STEPS = { ArrowRight: -0.01, ArrowUp: -0.01, ArrowLeft: 0.01, ArrowDown: 0.01, PageUp: -0.1, PageDown: 0.1, Home: 1, End: -1 };
/** A device that has at most so many times its low mark free is close to it. */
const CLOSE = 1.1;

/**
 * Return how an amount is written: in the unit in which the user wrote the mark, else in MiB or GiB, with as many digits as
 * tell a thousandth of the device.
 * @param {string} text of the mark so far
 * @param {number} bytes
 * @param {number} totalBytes
 */
function unitFor(text, bytes, totalBytes) {
  if (text.endsWith("%")) return { name: "%", size: totalBytes / 100, digits: 1 };
  const written = text.match(/[A-Za-z]+$/)?.[0] ?? "";
  const name = written.toLowerCase() in UNITS ? written : bytes >= GIB ? "GiB" : "MiB";
  const size = UNITS[name.toLowerCase()];
  return { name, size, digits: Math.min(4, Math.max(0, Math.ceil(Math.log10((1000 * size) / totalBytes)))) };
}

/**
 * Return marks of which one is moved, as far as the other one and the device let it; it keeps its unit. The other one
 * stays. If it has no text it gets one, because both are sent.
 * @param {Marks} marks
 * @param {Side} side
 * @param {number} wantedBytes where it is moved
 * @param {number} totalBytes
 */
export function movedTo(marks, side, wantedBytes, totalBytes) {
  const other = side === "low" ? "high" : "low";
  const moved = withMark(marks, side, wantedBytes, totalBytes);
  return moved[`${other}_text`] ? moved : withMark(moved, other, moved[`${other}_bytes`], totalBytes);
}

/**
 * @param {Marks} marks
 * @param {Side} side
 * @param {number} wantedBytes
 * @param {number} totalBytes
 * @returns {Marks} in bytes exactly what the text of this one means; as they were where no such text lies between the limits
 */
function withMark(marks, side, wantedBytes, totalBytes) {
  const [least, most] = side === "low" ? [0, marks.high_bytes] : [marks.low_bytes, totalBytes];
  const wanted = Math.max(least, Math.min(wantedBytes, most));
  const { name, size, digits } = unitFor(marks[`${side}_text`], wanted, totalBytes);
  const scale = 10 ** digits;
  const nearest = Math.round((wanted / size) * scale);
  // Rounded it may lie beyond a limit: then the next one inside of it counts.
  for (const amount of [nearest, nearest - 1, nearest + 1]) {
    const number = (amount / scale).toFixed(digits);
    const bytes = Math.floor(name === "%" ? totalBytes * Number((amount / scale / 100).toFixed(digits + 2)) : Number(number) * size);
    if (bytes < least || bytes > most) continue;
    return { ...marks, [`${side}_bytes`]: bytes, [`${side}_text`]: `${Number(number)}${name}` };
  }
  return marks;
}

/**
 * Return marks of which one was moved by a key; null for a key that moves nothing.
 * @param {Marks} marks
 * @param {Side} side
 * @param {string} key right and up leave less free, as the mark moves to the right
 * @param {number} totalBytes
 */
export function movedBy(marks, side, key, totalBytes) {
  if (!Object.hasOwn(STEPS, key)) return null;
  return movedTo(marks, side, marks[`${side}_bytes`] + STEPS[key] * totalBytes, totalBytes);
}

/**
 * Return what asks for new marks of a device, and for what is set for the others already: what is sent replaces all.
 * @param {import("./bars.js").Device[]} devices
 * @param {string} device the RAM is "host"
 * @param {Marks} marks
 */
export function marksOf(devices, device, marks) {
  const set = devices.filter(({ own_watermark: mark }) => mark.source === "setting");
  /** @type {[string, Marks][]} */
  const others = set.map(({ name, own_watermark: mark }) => [name === "cpu" ? "host" : name, mark]);
  const all = { ...Object.fromEntries(others), [device]: marks };
  return Object.keys(all).sort().map((name) => {
    const { low_bytes: low, high_bytes: high, low_text: lowText, high_text: highText } = all[name];
    return `${name}=${lowText || inMiB(low, Math.floor)}:${highText || inMiB(high, Math.ceil)}`;
  }).join(",");
}

/**
 * @param {number} bytes
 * @param {(amount: number) => number} rounded so that marks that are equal stay in their order
 */
const inMiB = (bytes, rounded) => `${rounded((bytes / MIB) * 1e4) / 1e4}MiB`;

/**
 * Return the devices of which little more is free than what stays free.
 * @param {import("./bars.js").Device[]} devices
 */
export function closeToMark(devices) {
  const lowOf = (/** @type {import("./bars.js").Device} */ device) => (device.name === "cpu" ? device.own_watermark : device.watermark).low_bytes;
  return devices.filter((device) => lowOf(device) > 0 && device.free_bytes <= CLOSE * lowOf(device));
}

/**
 * A handle on a bar for each of its marks: that of the low one hangs below the bar, that of the high one stands above it, so
 * that they are told apart where they meet. What is moved is told when it is let go.
 * @param {Document} document
 * @param {Bar} first
 * @param {(marks: Marks) => Promise<boolean>} apply whether they count now
 */
export function makeSliders(document, first, apply) {
  const element = make(document, "div", { class: "hw-marks" });
  let totalBytes = first.totalBytes;
  /** @type {Marks} */
  let known = { low_bytes: 0, high_bytes: 0, low_text: "", high_text: "" };
  /** What the user has in hand. @type {Marks | null} */
  let moving = null;
  /** What was let go, and is applied now. @type {Marks | null} */
  let applied = null;
  let isFixed = false;

  /** Where a mark is on the bar, from the left, in percent. @param {number} bytes that stay free */
  const placeOf = (bytes) => 100 - (100 * bytes) / Math.max(totalBytes, 1);

  /** @param {Side} side */
  function makeHandle(side) {
    const handle = make(document, "span", {
      class: `hw-mark hw-${side}`, role: "slider", tabindex: "0", "aria-orientation": "horizontal",
      "aria-label": text(`panel.mark_name.${side}`, { device: first.title }),
    });
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
      moving = movedTo(known, side, totalBytes * (1 - (event.clientX - left) / width), totalBytes);
      draw();
    });
    handle.addEventListener("pointerup", () => void letGo());
    handle.addEventListener("pointercancel", () => cancel());
    handle.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && moving) {
        event.stopPropagation();
        cancel();
      }
      const next = isFixed ? null : movedBy(moving ?? known, side, event.key, totalBytes);
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
    return handle;
  }

  const handles = { high: makeHandle("high"), low: makeHandle("low") };
  element.append(handles.high, handles.low);

  function draw() {
    const marks = moving ?? known;
    const [low, high] = [placeOf(marks.low_bytes), placeOf(marks.high_bytes)];
    for (const [side, at, least, most] of /** @type {[Side, number, number, number][]} */ ([["high", high, 0, low], ["low", low, high, 100]])) {
      const handle = handles[side];
      const told = text(`panel.mark_value.${side}`, { amount: markText(marks[`${side}_text`], shortBytes(marks[`${side}_bytes`])) });
      handle.style.left = `${at}%`;
      handle.setAttribute("aria-valuemin", String(Math.round(least)));
      handle.setAttribute("aria-valuemax", String(Math.round(most)));
      handle.setAttribute("aria-valuenow", String(Math.round(at)));
      handle.setAttribute("aria-valuetext", told);
      handle.setAttribute("title", told);
      handle.setAttribute("aria-disabled", String(isFixed));
    }
  }

  async function letGo() {
    const wanted = moving;
    if (!wanted || wanted === applied) return;
    applied = wanted;
    const isSame = wanted.low_bytes === known.low_bytes && wanted.high_bytes === known.high_bytes;
    if (!isSame && (await apply(wanted))) known = wanted; // until the next report
    if (applied === wanted) applied = null;
    if (moving === wanted) moving = null;
    draw();
  }

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
