// @ts-check
// Turns what the memory manager reports into short texts and page elements. Knows nothing of the page:
// it imports nothing, so that node can test it.

/**
 * One execution of a node, and one part of a model now, as the report has them; bytes by place. Places are devices
 * ("gpu:0") and where weights rest in RAM ("pinned", "host").
 * @typedef {{ node_id: string, workflow_id: string | null, peak_bytes: Record<string, number> }} NodeReport
 * @typedef {{ node_id: string | null, workflow_id: string | null, precision: string,
 *   tiers: Record<string, number> }} ComponentReport
 * @typedef {{ node_id: string, workflow_id: string | null, as_node_id: string, as_workflow_id: string | null }} ShownAs
 *   a node whose result another node computed, and that node
 * @typedef {{ id: string | number, graph?: GraphLike | null, subgraph?: GraphLike }} NodeLike
 * @typedef {{ id: string, rootGraph?: GraphLike, getNodeById(id: string | number): NodeLike | null }} GraphLike
 */

const UNITS = ["B", "K", "M", "G", "T"];
const AS_STORED = "as stored";

/**
 * Bytes in at most five characters and binary units: "512B", "34.2M", "1.2G".
 * @param {number} bytes
 */
export function shortBytes(bytes) {
  let unit = 0;
  let amount = bytes;
  // 999.5 of a unit would be shown with four digits: the next unit takes it.
  while (amount >= 999.5 && unit < UNITS.length - 1) {
    amount /= 1024;
    unit += 1;
  }
  return `${unit === 0 || amount >= 99.95 ? amount.toFixed(0) : amount.toFixed(1)}${UNITS[unit]}`;
}

/**
 * The badge of a node, at most 16 characters: for one that loaded models, what they weigh in RAM and in which
 * precision, or what they hold of the devices where none is in RAM; for any other, the most that was allocated on the
 * devices while it ran. Nothing where no device is.
 * @param {NodeReport} node
 * @param {Record<string, number>} [tiers] what `tiersOf` said
 * @param {string} [precision] what `precisionOf` said
 */
export function badgeText(node, tiers, precision = "") {
  const rests = Object.entries(tiers ?? {}).filter(([place]) => !isAccelerator(place));
  if (rests.length > 0) {
    const bytes = rests.reduce((sum, [, held]) => sum + held, 0);
    return `RAM ${shortBytes(bytes)} ${precision}`.trim();
  }
  const peaks = Object.values(node.peak_bytes);
  if (peaks.length === 0) return "";
  // Models are loaded when another node needs them: a peak while their loader ran is of others.
  const amounts = Object.values(tiers ?? peaks).filter((bytes) => bytes > 0);
  if (amounts.length === 0) return "VRAM 0B";
  if (amounts.length <= 2) return `VRAM ${amounts.map(shortBytes).join("+")}`;
  return `VRAM ${shortBytes(Math.max(...amounts))} ×${amounts.length}`;
}

/** @param {string} place */
const isAccelerator = (place) => place.startsWith("gpu");

/**
 * The parts that a node loaded. Equal node ids in two workflows are two nodes.
 * @param {ComponentReport[]} components
 * @param {{ node_id: string, workflow_id: string | null }} node
 */
const partsOf = (components, node) =>
  components.filter((part) => part.node_id === node.node_id && part.workflow_id === node.workflow_id);

/**
 * Where the models that a node loaded are now, in bytes by place; undefined if it loaded none.
 * @param {ComponentReport[]} components
 * @param {{ node_id: string, workflow_id: string | null }} node
 */
export function tiersOf(components, node) {
  const parts = partsOf(components, node);
  if (parts.length === 0) return undefined;
  /** @type {Record<string, number>} */
  const tiers = {};
  for (const part of parts) {
    for (const [place, bytes] of Object.entries(part.tiers)) tiers[place] = (tiers[place] ?? 0) + bytes;
  }
  return tiers;
}

/**
 * How the models of a node are stored, in one word: "fp8" if any of them is, "" if all are as in their files.
 * @param {ComponentReport[]} components
 * @param {{ node_id: string, workflow_id: string | null }} node
 */
export function precisionOf(components, node) {
  const changed = partsOf(components, node).filter((part) => part.precision !== AS_STORED);
  return changed[0]?.precision.split(" ")[0] ?? "";
}

/**
 * Where a node's text is kept: "workflow/12", or "workflow/<subgraph>:7". Undefined while it is in no graph.
 * @param {NodeLike} node
 */
export function keyOf(node) {
  const graph = node.graph;
  if (!graph) return undefined;
  const root = graph.rootGraph ?? graph;
  return `${root.id}/${graph === root ? "" : `${graph.id}:`}${node.id}`;
}

/**
 * The keys that an execution id such as "5:7" means: the subgraph's node, and what is inside of it. The nodes of
 * one subgraph definition are the same for all its uses, so an inner node shows what came last.
 * @param {GraphLike} root
 * @param {string} executionId
 */
export function keysOf(root, executionId) {
  const keys = [];
  /** @type {GraphLike | undefined} */
  let graph = root;
  for (const part of executionId.split(":")) {
    /** @type {NodeLike | null | undefined} */
    const node = graph?.getNodeById(part) ?? graph?.getNodeById(Number(part));
    if (!graph || !node) break;
    keys.push(`${root.id}/${graph === root ? "" : `${graph.id}:`}${node.id}`);
    graph = node.subgraph;
  }
  return keys;
}

const REMEDY = "Keep more memory free with a Watermark node, or set a smaller budget in the loader's profile.";

/**
 * What to tell when a run failed in a way that its message explains: the page itself says only that a node failed.
 * ComfyUI loads a model when a node needs it: what is wrong with a loader's values may come up in any node.
 * Null for every other failure.
 * @param {{ node_type?: string, exception_type?: string, exception_message?: string }} failure
 * @param {boolean} [isManaging] whether any model is under the manager's care
 * @returns {{ severity: "error", summary: string, detail: string } | null}
 */
export function noticeOfFailure(failure, isManaging = false) {
  const type = failure.exception_type ?? "";
  const kind = type.split(".").pop();
  const message = (failure.exception_message ?? "").trim();
  const isOurs = failure.node_type?.startsWith("Highwater") || /\bmemory\.errors\.\w+$/.test(type);
  if (kind === "DoesNotFit") return { severity: "error", summary: "Does not fit in memory", detail: message };
  if (kind === "InvalidInput" && isOurs) {
    return { severity: "error", summary: "Invalid input", detail: message };
  }
  if (kind === "OutOfMemoryError" && (isOurs || isManaging)) {
    const [first, ...others] = message.split("\n");
    const learned = others.find((line) => line.startsWith("Highwater: "));
    return { severity: "error", summary: "Out of memory", detail: `${first}. ${learned?.slice(11) ?? REMEDY}` };
  }
  return null;
}

/**
 * What to tell about an event of the manager; null for those that only the log keeps.
 * @param {{ type?: string, kind?: string, component?: string, device?: string, reason?: string }} event
 * @returns {{ severity: "warn", summary: string, detail: string } | null}
 */
export function noticeOfEvent(event) {
  if (event.type !== "event") return null;
  const detail = event.reason ?? "";
  if (event.kind === "growth") return { severity: "warn", summary: "More memory than before", detail };
  if (event.kind !== "error" && event.kind !== "thrashing") return null;
  return { severity: "warn", summary: `${event.component} on ${event.device}`, detail };
}

/**
 * A box for the text of a node, in the page's colours; scrolls where the node is too small, and never makes it grow.
 * @param {Document} document
 */
export function makeTextBox(document) {
  const box = document.createElement("pre");
  box.className = "highwater-text";
  Object.assign(box.style, {
    margin: "0",
    padding: "6px 8px",
    boxSizing: "border-box",
    overflow: "auto",
    height: "100%",
    minHeight: "140px",
    contain: "size",
    font: "10px/1.45 ui-monospace, monospace",
    color: "var(--input-text)",
    background: "var(--comfy-input-bg)",
    borderRadius: "6px",
    userSelect: "text",
  });
  return box;
}
