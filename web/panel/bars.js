// @ts-check
// The bars of the memory panel: what each device, the RAM and the page-locked RAM hold, and how much stays free. Knows
// nothing of the page: it imports only what node can test.
import { text } from "../texts.js";
import { shortBytes } from "../units.js";
import { make, makeButton, makeRows, write } from "./elements.js";
import { markText } from "../watermark.js";
import { makeSliders } from "./marks.js";

/**
 * @typedef {NonNullable<Highwater.Report["devices"]>[number]} Device
 * @typedef {NonNullable<Highwater.Report["components"]>[number]} Component
 * @typedef {{ name: string, bytes: number, kind: "weights" | "staging" | "activations" | "other" | "lent" | "free", colour: string }} Segment
 *   one part of a bar, in its order; the colour is "" where the kind says it
 * @typedef {import("./marks.js").Marks & { source: "set" | "setting" | "default" }} Mark
 * @typedef {{ id: string, title: string, totalBytes: number, segments: Segment[], mark: Mark | null, device: string,
 *   lentBytes: number | null, notes: string[] }} Bar
 *   `device` is what the server calls it in a watermark; `lentBytes` is null where nothing can be lent
 */

const RAM = "cpu";
/** What is less than this is nothing to show: a number that a node computed with, and the like. */
const LEAST_BYTES = 1024;

/**
 * Return a bar for each device, for the RAM, and for what of the RAM is page-locked.
 * @param {Highwater.Report} report
 * @param {(id: string) => string} colourOf a component
 * @returns {Bar[]}
 */
export function barsOf({ devices = [], components = [] }, colourOf) {
  const ram = devices.find((device) => device.name === RAM);
  const bars = devices.filter((device) => device !== ram).map((device) => barOfDevice(device, components, colourOf));
  if (ram) bars.push(barOfRam(ram, components, colourOf));
  if (ram?.pinned && ram.pinned.limit_bytes > 0) bars.push(barOfPinned(ram.pinned, components, colourOf));
  return bars;
}

/**
 * @param {Device} device
 * @param {Component[]} components
 * @param {(id: string) => string} colourOf
 * @returns {Bar}
 */
function barOfDevice(device, components, colourOf) {
  const { name, total_bytes: totalBytes, own_watermark: mark, activation_bytes: activations, lent } = device;
  const staging = components.reduce((all, part) => all + (part.staging_bytes[name] ?? 0), 0);
  const promised = Math.min(device.free_bytes, lent?.missing_bytes ?? 0);
  const notes = [];
  if (activations === null) notes.push(text("panel.uncounted"));
  if (mark.source === "set") notes.push(text("panel.mark_of_node"));
  if (device.watermark.low_bytes > mark.low_bytes) {
    notes.push(text("panel.others_keep", { amount: shortBytes(device.watermark.low_bytes) }));
  }
  if (lent) notes.push(text("panel.lent_of", { amount: shortBytes(lent.num_bytes) }));
  return {
    id: name,
    title: name,
    totalBytes,
    segments: filled(totalBytes - device.free_bytes, device.free_bytes - promised, [
      ...weightSegments(components, (part) => (part.tiers[name] ?? 0) - (part.staging_bytes[name] ?? 0), colourOf),
      segment("staging", staging),
      segment("activations", activations ?? 0),
    ], segment("lent", promised)),
    mark,
    device: name,
    lentBytes: lent?.num_bytes ?? 0,
    notes,
  };
}

/**
 * @param {Device} ram
 * @param {Component[]} components
 * @param {(id: string) => string} colourOf
 * @returns {Bar}
 */
function barOfRam(ram, components, colourOf) {
  const inRam = (/** @type {Component} */ part) => (part.tiers.host ?? 0) + (part.tiers.pinned ?? 0) + (part.tiers[RAM] ?? 0);
  return {
    id: "host",
    title: text("panel.ram"),
    totalBytes: ram.total_bytes,
    segments: filled(ram.total_bytes - ram.free_bytes, ram.free_bytes, weightSegments(components, inRam, colourOf)),
    mark: ram.own_watermark,
    device: "host",
    lentBytes: null,
    notes: ram.own_watermark.source === "set" ? [text("panel.mark_of_node")] : [],
  };
}

/**
 * @param {{ num_bytes: number, limit_bytes: number }} pinned
 * @param {Component[]} components
 * @param {(id: string) => string} colourOf
 * @returns {Bar}
 */
function barOfPinned(pinned, components, colourOf) {
  const { num_bytes: used, limit_bytes: totalBytes } = pinned;
  return {
    id: "pinned",
    title: text("panel.pinned"),
    totalBytes,
    segments: filled(used, Math.max(0, totalBytes - used), weightSegments(components, (part) => part.tiers.pinned ?? 0, colourOf)),
    mark: null,
    device: "",
    lentBytes: null,
    notes: [],
  };
}

/**
 * @param {Component[]} components
 * @param {(part: Component) => number} bytesOf
 * @param {(id: string) => string} colourOf
 * @returns {Segment[]}
 */
function weightSegments(components, bytesOf, colourOf) {
  return components.map((part) => ({ name: part.id, bytes: bytesOf(part), kind: "weights", colour: colourOf(part.id) }));
}

/**
 * @param {Exclude<Segment["kind"], "weights">} kind
 * @param {number} bytes
 * @returns {Segment}
 */
const segment = (kind, bytes) => ({ name: text(`panel.segment.${kind}`), bytes, kind, colour: "" });

/**
 * Complete a bar by what others hold and what is free; leaves out what is next to nothing.
 * @param {number} usedBytes
 * @param {number} freeBytes
 * @param {Segment[]} known
 * @param {Segment[]} promised of what is free
 */
function filled(usedBytes, freeBytes, known, ...promised) {
  const others = usedBytes - known.reduce((all, { bytes }) => all + Math.max(0, bytes), 0);
  return [...known, segment("other", others), ...promised, segment("free", freeBytes)].filter(({ bytes }) => bytes >= LEAST_BYTES);
}

/** @param {Mark} mark */
const keptText = ({ low_bytes, high_bytes, low_text, high_text }) =>
  text("panel.kept_free", { low: markText(low_text, shortBytes(low_bytes)), high: markText(high_text, shortBytes(high_bytes)) });

/**
 * Return what shows the bars in an element.
 * @param {HTMLElement} parent
 * @param {{ lend: (device: string) => unknown, giveBack: (device: string) => unknown,
 *   setMark: (device: string, marks: import("./marks.js").Marks) => Promise<boolean> }} actions
 * @returns {(bars: Bar[]) => void}
 */
export function makeBars(parent, actions) {
  return makeRows(parent, (bar) => makeBar(parent.ownerDocument, bar, actions));
}

/**
 * @param {Document} document
 * @param {Bar} first
 * @param {Parameters<typeof makeBars>[1]} actions
 */
function makeBar(document, first, actions) {
  const amount = make(document, "span", { class: "hw-amount" });
  const heading = make(document, "h4", { text: first.title });
  const track = make(document, "div", { class: "hw-track", role: "img" });
  const slider = first.mark ? makeSliders(document, first, (marks) => actions.setMark(first.device, marks)) : null;
  const legend = make(document, "ul", { class: "hw-legend" });
  const kept = make(document, "p", { class: "hw-quiet" });
  const notes = make(document, "p", { class: "hw-quiet" });
  const lend = makeButton(document, text("panel.lend"), () => actions.lend(first.device));
  const back = makeButton(document, text("panel.give_back"), () => actions.giveBack(first.device));
  for (const button of [lend, back]) button.setAttribute("aria-label", `${button.textContent} (${first.title})`);
  const buttons = first.lentBytes === null ? null : make(document, "div", { class: "hw-buttons" }, lend, back);
  const element = make(document, "li", { class: "hw-bar" },
    make(document, "div", { class: "hw-row" }, heading, amount),
    make(document, "div", { class: slider ? "hw-scale hw-marked" : "hw-scale" }, track, slider?.element ?? null),
    kept, legend, notes, buttons,
  );
  const fill = (/** @type {Bar} */ bar) => {
    const free = bar.segments.find(({ kind }) => kind === "free")?.bytes ?? 0;
    write(amount, text("panel.free_of", { free: shortBytes(free), total: shortBytes(bar.totalBytes) }));
    track.setAttribute("aria-label", `${bar.title}: ${bar.segments.map((part) => `${part.name} ${shortBytes(part.bytes)}`).join(", ")}`);
    const held = bar.segments.filter(({ kind }) => kind !== "free");
    track.replaceChildren(...held.map((part) => {
      const box = make(document, "span", { class: `hw-segment hw-${part.kind}`, title: `${part.name} ${shortBytes(part.bytes)}` });
      box.style.width = `${(100 * part.bytes) / Math.max(bar.totalBytes, 1)}%`;
      if (part.colour) box.style.background = part.colour;
      return box;
    }));
    legend.replaceChildren(...held.map((part) => {
      const swatch = make(document, "span", { class: `hw-swatch hw-${part.kind}` });
      if (part.colour) swatch.style.background = part.colour;
      const name = make(document, "span", { class: "hw-name", text: part.name });
      return make(document, "li", {}, swatch, name, make(document, "span", { class: "hw-amount", text: shortBytes(part.bytes) }));
    }));
    write(kept, bar.mark ? keptText(bar.mark) : "");
    slider?.fill(bar);
    write(notes, bar.notes.join(" "));
    back.hidden = !bar.lentBytes;
    lend.hidden = Boolean(bar.lentBytes);
  };
  return { element, fill };
}
