// @ts-check
// What a click on a badge tells, and the box for it. Knows nothing of the page: it imports only what node can test.
import { blocksOf, shortBytes, weightsOf } from "./badges.js";

/**
 * @typedef {import("./badges.js").Shown} Shown
 * @typedef {import("./badges.js").ComponentReport} ComponentReport
 * @typedef {import("./badges.js").NodeReport} NodeReport
 * @typedef {{ title: string, lines: string[] }} Section
 */

/** @type {Record<string, string>} */
const RESTS_IN = { pinned: "pinned RAM", host: "RAM" };
/** @type {Record<string, string>} */
const MOVED_BY = { dynamic: "moved by ComfyUI's dynamic VRAM", core: "not managed", kept: "kept in RAM in case its file is loaded again" };

/** @param {number} seconds */
const inSeconds = (seconds) => (seconds > 0 && seconds < 0.01 ? "less than 0.01 s" : `${seconds.toFixed(2)} s`);

/** @param {(string | null)[]} words */
const joined = (words) => words.filter(Boolean).join(", ");

/**
 * What is told of a node: each part of a model that it shows, and its last execution.
 * @param {Shown} shown
 * @returns {Section[]}
 */
export function detailOf({ parts, node }) {
  return [...parts.map(detailOfPart), ...(node ? [detailOfNode(node)] : [])];
}

/** @param {NodeReport} node */
function detailOfNode(node) {
  const amounts = [
    { amount: node.weights_bytes, what: "of weights that it used" },
    { amount: node.activation_bytes, what: "of activations" },
    { amount: node.staging_bytes, what: "of staging memory" },
  ];
  const devices = [...new Set(amounts.flatMap(({ amount }) => Object.keys(amount)))].sort();
  const lines = devices.flatMap((device) => {
    const texts = amounts.map(({ amount, what }) => (amount[device] ? `${shortBytes(amount[device])} ${what}` : null));
    return texts.some(Boolean) ? [`${device}: ${joined(texts)}`] : [];
  });
  const uncounted = node.uncounted.map(
    (device) => `${device}: torch does not count what the host's allocator gives out there: activations are not known`,
  );
  const hasMoved = node.bytes_moved > 0 || node.waited_s > 0;
  const moved = hasMoved ? [`moved ${shortBytes(node.bytes_moved)} to devices, waited ${inSeconds(node.waited_s)} for copies`] : [];
  return { title: `This node, ${inSeconds(node.seconds)}`, lines: [...(lines.length ? lines : ["added nothing"]), ...uncounted, ...moved] };
}

/** @param {ComponentReport} part */
function detailOfPart(part) {
  const size = part.total_bytes === null ? "" : ` ${shortBytes(part.total_bytes)}`;
  const weights = weightsOf(part);
  const onDevices = Object.keys(weights).sort().map((device) => {
    const staging = part.staging_bytes[device];
    return `${device}: ${joined([`${shortBytes(weights[device])} of weights`, staging ? `${shortBytes(staging)} of staging memory` : null])}`;
  });
  const { blocks, resident, streamed } = blocksOf(part);
  const inBlocks = blocks > 0 ? [`${resident} of ${blocks} blocks resident, ${streamed} streamed`] : [];
  const inRam = Object.entries(RESTS_IN).flatMap(([tier, words]) => (part.tiers[tier] ? [`${words}: ${shortBytes(part.tiers[tier])}`] : []));
  const onDisk = part.plan.tier === "disk" ? ["the other weights are read from their file in each pass"] : [];
  const moved =
    part.bytes_moved === null
      ? []
      : [joined([`moved ${shortBytes(part.bytes_moved)} to devices so far`, part.waited_s === null ? null : `waited ${inSeconds(part.waited_s)} for copies`])];
  const reasons = (part.plan.reasons ?? []).map((reason) => `- ${reason}`);
  return {
    title: `${part.id},${size} ${part.precision}`,
    lines: [...onDevices, ...inBlocks, ...inRam, ...onDisk, ...moved, effectOf(part, onDevices.length > 0), ...reasons],
  };
}

/**
 * Whether a part is where it should be, or why not.
 * @param {ComponentReport} part
 * @param {boolean} isLoaded
 */
function effectOf(part, isLoaded) {
  const by = MOVED_BY[part.engine];
  if (by) return part.engine === "dynamic" && !part.in_effect ? `${by}, OVER its budget` : by;
  if (part.in_effect) return "in effect";
  return isLoaded ? "not in effect: a part of it was evicted; it comes back when it computes" : "not in effect: it is loaded when it computes";
}

/**
 * A box for sections, in the page's colours. Texts come from shared workflows: they are put in as text.
 * @param {Document} document
 * @param {Section[]} sections
 * @param {{ x: number, y: number, width: number, height: number }} place where it begins, in a window so large
 */
export function makeDetail(document, sections, { x, y, width, height }) {
  const box = document.createElement("div");
  box.className = "highwater-detail";
  box.setAttribute("role", "dialog");
  box.setAttribute("aria-label", "Memory of this node");
  box.tabIndex = -1;
  const room = Math.min(380, width - 16);
  Object.assign(box.style, {
    position: "fixed",
    zIndex: "10000",
    left: `${Math.max(8, Math.min(x, width - room - 8))}px`,
    ...(y < height / 2 ? { top: `${y + 8}px` } : { bottom: `${height - y + 8}px` }),
    width: `${room}px`,
    maxHeight: "45vh",
    overflow: "auto",
    boxSizing: "border-box",
    padding: "8px 12px",
    font: "12px/1.5 sans-serif",
    color: "var(--input-text)",
    background: "var(--comfy-menu-bg)",
    border: "1px solid var(--border-color)",
    borderRadius: "8px",
    userSelect: "text",
  });
  fillDetail(box, sections);
  return box;
}

/**
 * Put sections into a box in place of what is there.
 * @param {HTMLElement} box
 * @param {Section[]} sections
 */
export function fillDetail(box, sections) {
  const document = box.ownerDocument;
  box.replaceChildren(
    ...sections.flatMap(({ title, lines }, at) => {
      const head = document.createElement("div");
      Object.assign(head.style, { fontWeight: "bold", marginTop: at > 0 ? "8px" : "0" });
      head.textContent = title;
      return [head, ...lines.map((line) => Object.assign(document.createElement("div"), { textContent: line }))];
    }),
  );
}
