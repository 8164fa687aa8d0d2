// @ts-check
// What a click on a badge tells, and the box for it. Knows nothing of the page: it imports only what node can test.
import { blocksOf, weightsOf } from "./badges.js";
import { text } from "./texts.js";
import { shortBytes } from "./units.js";

/**
 * @typedef {import("./badges.js").Shown} Shown
 * @typedef {import("./badges.js").ComponentReport} ComponentReport
 * @typedef {import("./badges.js").NodeReport} NodeReport
 * @typedef {{ title: string, lines: string[] }} Section
 */

/** What moves a part, where that is not us: the last part of a text's key. */
const OTHER_ENGINES = ["dynamic", "core", "kept", "registered"];

/** @param {number} seconds */
const inSeconds = (seconds) => (seconds > 0 && seconds < 0.01 ? text("detail.less_than", { time: "0.01 s" }) : `${seconds.toFixed(2)} s`);

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
  const kinds = [
    { amounts: node.weights_bytes, key: "detail.weights_used" },
    { amounts: node.activation_bytes, key: "detail.activations" },
    { amounts: node.staging_bytes, key: "detail.staging" },
  ];
  const devices = [...new Set(kinds.flatMap(({ amounts }) => Object.keys(amounts)))].sort();
  const lines = devices.flatMap((device) => {
    const texts = kinds.map(({ amounts, key }) => (amounts[device] ? text(key, { amount: shortBytes(amounts[device]) }) : null));
    return texts.some(Boolean) ? [`${device}: ${joined(texts)}`] : [];
  });
  const uncounted = node.uncounted.map((device) => text("detail.uncounted", { device }));
  const hasMoved = node.bytes_moved > 0 || node.waited_s > 0;
  const moved = hasMoved ? [joined([text("detail.moved", { amount: shortBytes(node.bytes_moved) }), text("detail.waited", { time: inSeconds(node.waited_s) })])] : [];
  const title = text("detail.node", { time: inSeconds(node.seconds) });
  return { title, lines: [...(lines.length ? lines : [text("detail.added_nothing")]), ...uncounted, ...moved] };
}

/** @param {ComponentReport} part */
function detailOfPart(part) {
  const size = part.total_bytes === null ? "" : ` ${shortBytes(part.total_bytes)}`;
  const weights = weightsOf(part);
  const onDevices = Object.keys(weights).sort().map((device) => {
    const staging = part.staging_bytes[device];
    const ofWeights = text("detail.weights", { amount: shortBytes(weights[device]) });
    return `${device}: ${joined([ofWeights, staging ? text("detail.staging", { amount: shortBytes(staging) }) : null])}`;
  });
  const { blocks, resident, streamed } = blocksOf(part);
  const inBlocks = blocks > 0 ? [text("detail.blocks", { resident, blocks, streamed })] : [];
  const { pinned, host } = part.tiers;
  const inRam = [...(pinned ? [text("detail.pinned", { amount: shortBytes(pinned) })] : []), ...(host ? [`RAM: ${shortBytes(host)}`] : [])];
  const read = (part.plan.shares ?? []).reduce((all, share) => all + share.read_bytes, 0);
  const onDisk = [
    ...(part.plan.file_bytes ? [text("detail.in_file", { amount: shortBytes(part.plan.file_bytes) })] : []),
    ...(read > 0 ? [text("detail.from_file", { amount: shortBytes(read) })] : []),
  ];
  const moved =
    part.bytes_moved === null
      ? []
      : [joined([text("detail.moved_so_far", { amount: shortBytes(part.bytes_moved) }), part.waited_s === null ? null : text("detail.waited", { time: inSeconds(part.waited_s) })])];
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
  if (OTHER_ENGINES.includes(part.engine)) {
    const by = text(`detail.engine.${part.engine}`);
    return part.engine === "dynamic" && !part.in_effect ? joined([by, text("detail.over_budget")]) : by;
  }
  return text(part.in_effect ? "detail.in_effect" : isLoaded ? "detail.evicted" : "detail.not_loaded");
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
  box.setAttribute("aria-label", text("detail.title"));
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
