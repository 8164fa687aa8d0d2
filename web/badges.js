// @ts-check
// What the badge of a node says, out of the memory manager's report. Knows nothing of the page: it imports only what node
// can test.
import { text } from "./texts.js";
import { shortBytes } from "./units.js";

/**
 * One execution of a node, and one part of a model now, as the report has them; bytes by place. Places are devices
 * ("gpu:0") and where weights rest in RAM ("pinned", "host").
 * @typedef {{ device: string, blocks: number, resident_blocks: number, streamed_blocks: number, read_bytes: number }} Share
 *   what a part was planned to have on a device
 * @typedef {{ node_id: string, workflow_id: string | null, seconds: number, weights_bytes: Record<string, number>,
 *   activation_bytes: Record<string, number>, staging_bytes: Record<string, number>, bytes_moved: number,
 *   waited_s: number, uncounted: string[] }} NodeReport
 * @typedef {{ id: string, precision: string, engine: string, in_effect: boolean, tiers: Record<string, number>,
 *   staging_bytes: Record<string, number>, total_bytes: number | null, bytes_moved: number | null,
 *   waited_s: number | null, plan: { tier?: string, file_bytes?: number, shares?: Share[], reasons?: string[] } }} ComponentReport
 * @typedef {{ node_id: string, workflow_id: string | null, components: string[] }} Loader
 *   a node, and the ids of the parts that it shows
 * @typedef {{ id: string | number, graph?: GraphLike | null, subgraph?: GraphLike }} NodeLike
 * @typedef {{ id: string, rootGraph?: GraphLike, getNodeById(id: string | number): NodeLike | null }} GraphLike
 * @typedef {{ components: ComponentReport[], loaders: Loader[], nodes: Iterable<NodeReport> }} Known
 *   what is known now; of the nodes the oldest comes first
 */

const AS_STORED = "as stored";
/** As much as fits a narrow node. */
export const MOST_CHARACTERS = 18;
/** What is less than this is nothing to show: a number that a node computed with, and the like. */
const LEAST_BYTES = 1024;

/** @param {string} place */
const isDevice = (place) => place.startsWith("gpu");

/** @param {Record<string, number>} amounts */
const sum = (amounts) => Object.values(amounts).reduce((all, bytes) => all + bytes, 0);

/**
 * Bytes of devices in at most 18 characters: "1.2G gpu:0", "2 GPUs 3.5+3.4G", "3 GPUs 10.4G".
 * @param {Record<string, number>} amounts more than nothing each
 * @param {string} [sign] before each amount
 */
function onDevices(amounts, sign = "") {
  const devices = Object.keys(amounts).sort();
  if (devices.length === 1) return `${sign}${shortBytes(amounts[devices[0]])} ${devices[0]}`;
  const parts = devices.map((device) => shortBytes(amounts[device]));
  const [last] = parts.slice(-1);
  const isOneUnit = parts.every((part) => part.at(-1) === last.at(-1));
  const joined = parts.map((part, at) => (isOneUnit && at < parts.length - 1 ? part.slice(0, -1) : part)).join("+");
  const each = `${devices.length} GPUs ${sign}${joined}`;
  return each.length <= MOST_CHARACTERS ? each : `${devices.length} GPUs ${sign}${shortBytes(sum(amounts))}`;
}

/**
 * The weights of parts on devices, without memory through which they only pass.
 * @param {ComponentReport} part
 */
export function weightsOf(part) {
  /** @type {Record<string, number>} */
  const weights = {};
  for (const [place, bytes] of Object.entries(part.tiers)) {
    const own = bytes - (part.staging_bytes[place] ?? 0);
    if (isDevice(place) && bytes > 0) weights[place] = own;
  }
  return weights;
}

/**
 * The blocks of a part that stream and all of its blocks, on the devices where it is now.
 * @param {ComponentReport} part
 */
export function blocksOf(part) {
  const shares = (part.plan.shares ?? []).filter((share) => (part.tiers[share.device] ?? 0) > 0 && isDevice(share.device));
  const count = (/** @type {"blocks" | "streamed_blocks" | "resident_blocks"} */ name) =>
    shares.reduce((all, share) => all + share[name], 0);
  return { blocks: count("blocks"), streamed: count("streamed_blocks"), resident: count("resident_blocks") };
}

/**
 * What a loader shows of its parts, wherever they are: what is on devices, else what is in RAM, else "disk". Nothing
 * where no part is left.
 * @param {ComponentReport[]} parts
 */
export function loaderText(parts) {
  if (parts.length === 0) return "";
  /** @type {Record<string, number>} */
  const held = {};
  for (const part of parts) {
    for (const [device, bytes] of Object.entries(weightsOf(part))) held[device] = (held[device] ?? 0) + bytes;
  }
  const devices = Object.keys(held);
  if (devices.length === 0) return restingText(parts);
  const blocks = parts.map(blocksOf);
  const streamed = blocks.reduce((all, part) => all + part.streamed, 0);
  if (streamed > 0) return text("badge.streams", { streamed, blocks: blocks.reduce((all, part) => all + part.blocks, 0) });
  const total = parts.reduce((all, part) => all + (part.total_bytes ?? sum(weightsOf(part))), 0);
  const [here, whole] = [shortBytes(sum(held)), shortBytes(total)];
  if (devices.length > 1 || here === whole || sum(held) > total) return onDevices(held);
  return `${here}/${whole} ${devices[0]}`;
}

/** @param {ComponentReport[]} parts none on a device */
function restingText(parts) {
  if (parts.every((part) => part.plan.tier === "disk")) return text("badge.disk");
  const bytes = parts.reduce((all, part) => all + sum(part.tiers), 0);
  if (bytes === 0) return "";
  const changed = parts.find((part) => part.precision !== AS_STORED);
  return `RAM ${shortBytes(bytes)} ${changed?.precision.split(" ")[0] ?? ""}`.trim().slice(0, MOST_CHARACTERS);
}

/**
 * What a node added to each device itself, activations and staging memory together; without what is next to nothing.
 * @param {NodeReport} node
 */
export function addedBy(node) {
  /** @type {Record<string, number>} */
  const added = {};
  for (const amounts of [node.activation_bytes, node.staging_bytes]) {
    for (const [device, bytes] of Object.entries(amounts)) added[device] = (added[device] ?? 0) + bytes;
  }
  return Object.fromEntries(Object.entries(added).filter(([, bytes]) => bytes >= LEAST_BYTES));
}

/**
 * What a node that loads nothing shows: "+1.2G gpu:0". Nothing where it added nothing.
 * @param {NodeReport} node
 */
export function addedText(node) {
  const added = addedBy(node);
  return Object.keys(added).length > 0 ? onDevices(added, "+") : "";
}

/**
 * What is known of one node, or of a node that holds others: the parts that it shows, and its last execution.
 * @typedef {{ parts: ComponentReport[], node?: NodeReport }} Shown
 */

/**
 * The badge of a node, at most 18 characters; "" for none.
 * @param {Shown} shown
 */
export function badgeText({ parts, node }) {
  return parts.length > 0 ? loaderText(parts) : node ? addedText(node) : "";
}

/**
 * What is known of the nodes of a workflow, by their keys. What has no workflow's id is of none that is open. A node
 * that holds a subgraph has the parts of all inside, and of the executions the one that added most.
 * @param {GraphLike} root
 * @param {Known} known
 * @returns {Map<string, Shown>}
 */
export function shownIn(root, known) {
  /** @type {Map<string, Shown>} */
  const found = new Map();
  const at = (/** @type {string} */ key) => {
    const shown = found.get(key) ?? { parts: [] };
    found.set(key, shown);
    return shown;
  };
  const byId = new Map(known.components.map((part) => [part.id, part]));
  for (const loader of known.loaders) {
    if (loader.workflow_id !== root.id) continue;
    const parts = loader.components.map((id) => byId.get(id)).filter((part) => part !== undefined);
    for (const key of keysOf(root, loader.node_id)) {
      const shown = at(key);
      shown.parts.push(...parts.filter((part) => !shown.parts.includes(part)));
    }
  }
  for (const node of known.nodes) {
    if (node.workflow_id !== root.id) continue;
    const keys = keysOf(root, node.node_id);
    for (const key of keys) {
      const shown = at(key);
      // Its own key comes last: there the newest counts.
      if (key === keys.at(-1) || !shown.node || sum(addedBy(node)) >= sum(addedBy(shown.node))) shown.node = node;
    }
  }
  return found;
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
    if (!graph || !node) return []; // it was removed since
    keys.push(`${root.id}/${graph === root ? "" : `${graph.id}:`}${node.id}`);
    graph = node.subgraph;
  }
  return keys;
}
