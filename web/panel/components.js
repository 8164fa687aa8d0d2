// @ts-check
// The components of the memory panel: what each is, where it is, when it is used, and what can be done with it. Makes
// rows of a report; component_table.js shows them. Knows nothing of the page: it imports only what node can test.
import { weightsOf } from "../badges.js";
import { text } from "../texts.js";
import { shortBytes } from "../units.js";

/**
 * @typedef {import("./bars.js").Component} Component
 * @typedef {import("../badges.js").GraphLike} GraphLike
 * @typedef {{ id: string | number, title?: string, graph?: GraphLike | null, subgraph?: GraphLike }} TitledNode
 * @typedef {{ id: string, label: string }} NodeLink an execution id such as "5:7", and what the node is called
 * @typedef {{ id: string, kind: string, colour: string, size: string, where: string, precision: string, last_use: string, next_use: string,
 *   nodes: NodeLink[], elsewhere: string, notes: string[], isKept: boolean, isOnDevice: boolean, canRelease: boolean,
 *   canMove: boolean, placement: string, keys: Record<SortKey, number | null> }} Row
 *   `canRelease`: it can be asked to leave, and to stay; `keys` are what rows are sorted by, null where it is not known
 * @typedef {"size" | "last_use" | "next_use"} SortKey
 * @typedef {{ by: SortKey, isRising: boolean }} Order
 */

/** What moves components that can be asked to leave, and to stay; what nothing moves is only kept in RAM. */
const LEAVING = ["blocks", "dynamic", "core", "registered"];
/** Whether the first click on a column shows its smallest values first: what is used soonest, but the largest and the last used. */
const RISES_FIRST = { size: false, last_use: false, next_use: true };

/**
 * Return a row for each component, those on devices first, the largest first.
 * @param {Highwater.Report} report
 * @param {{ root: GraphLike, colourOf: (id: string) => string, clock: (seconds: number) => string }} page the open
 *   workflow, and the time of day of what happened so many seconds after the server's start
 * @returns {Row[]}
 */
export function rowsOf({ components = [], loaders = [] }, { root, colourOf, clock }) {
  const onDevices = (/** @type {Component} */ part) => Object.values(weightsOf(part)).reduce((all, bytes) => all + bytes, 0);
  const size = (/** @type {Component} */ part) => part.total_bytes ?? onDevices(part);
  const sorted = [...components].sort((a, b) => onDevices(b) - onDevices(a) || size(b) - size(a));
  return sorted.map((part) => {
    const shownBy = loaders.filter((loader) => loader.components.includes(part.id));
    const uses = part.node_id === null ? shownBy : [...shownBy, { node_id: part.node_id, workflow_id: part.workflow_id }];
    const here = uses.filter((node) => node.workflow_id === root.id);
    const found = [...new Set(here.map((node) => node.node_id))].flatMap((id) => {
      const node = nodeAt(root, id);
      return node ? [{ id, label: node.title || text("panel.node", { id }) }] : [];
    });
    const isElsewhere = found.length === 0 && uses.some((node) => node.workflow_id !== root.id);
    return {
      id: part.id,
      kind: part.kind,
      colour: colourOf(part.id),
      size: part.total_bytes === null ? "" : shortBytes(part.total_bytes),
      where: whereIs(part),
      precision: part.precision,
      last_use: part.last_use_s === null ? text(part.engine === "core" ? "panel.unknown" : "panel.never") : part.leased ? text("panel.now") : clock(part.last_use_s),
      next_use: nextUse(part),
      nodes: found,
      elsewhere: isElsewhere ? text("panel.elsewhere") : found.length === 0 ? text("panel.no_node") : "",
      notes: notesOf(part),
      isKept: part.kept,
      isOnDevice: onDevices(part) > 0,
      canRelease: LEAVING.includes(part.engine),
      canMove: part.engine === "blocks",
      placement: placementOf(part),
      keys: {
        size: part.total_bytes,
        last_use: part.last_use_s === null ? null : part.leased ? Infinity : part.last_use_s,
        next_use: part.next_use,
      },
    };
  });
}

/**
 * Return the order after a click on a column: its first one, the opposite, and then that of `rowsOf` again.
 * @param {Order | null} order null: that of `rowsOf`
 * @param {SortKey} by
 * @returns {Order | null}
 */
export function nextOrder(order, by) {
  if (order?.by !== by) return { by, isRising: RISES_FIRST[by] };
  return order.isRising === RISES_FIRST[by] ? { by, isRising: !order.isRising } : null;
}

/**
 * Return rows in an order; those of which it is not known come last, and equal ones stay as they are.
 * @param {Row[]} rows
 * @param {Order | null} order
 */
export function sorted(rows, order) {
  if (!order) return rows;
  const sign = order.isRising ? 1 : -1;
  return [...rows].sort(({ keys: { [order.by]: one } }, { keys: { [order.by]: other } }) => {
    if (one === other) return 0;
    if (one === null || other === null) return one === null ? 1 : -1;
    return sign * (one < other ? -1 : 1);
  });
}

/** @param {Component} part */
function nextUse({ next_use: steps }) {
  if (steps === null) return text("panel.unknown");
  if (steps === 0) return text("panel.now");
  return steps === 1 ? text("panel.in_a_step") : text("panel.in_steps", { steps });
}

/** @param {Component} part */
function whereIs(part) {
  const weights = weightsOf(part);
  const parts = Object.keys(weights).sort().map((device) => `${shortBytes(weights[device])} ${device}`);
  const inRam = (part.tiers.host ?? 0) + (part.tiers.cpu ?? 0);
  if (part.tiers.pinned) parts.push(text("panel.in_pinned", { amount: shortBytes(part.tiers.pinned) }));
  if (inRam) parts.push(text("panel.in_ram", { amount: shortBytes(inRam) }));
  if (part.plan.tier === "disk") parts.push(text("panel.disk"));
  else if (part.plan.file_bytes) parts.push(text("panel.in_file", { amount: shortBytes(part.plan.file_bytes) }));
  return parts.join(", ") || text("panel.nowhere");
}

/** Where a component was placed, without its own name. @param {Component} part */
const placementOf = (part) => (part.plan.placement ?? "").replace(/^[^=]*=/, "");

/** @param {Component} part */
function notesOf(part) {
  const notes = [];
  if (part.engine === "core") notes.push(text("panel.not_managed"));
  if (part.engine === "kept") notes.push(text("panel.kept_weights"));
  if (part.engine === "dynamic") notes.push(text("panel.dynamic"));
  if (part.engine === "registered") notes.push(text("panel.registered"));
  if (part.engine === "core" || part.engine === "dynamic") notes.push(text("panel.no_move"));
  if (part.moved) notes.push(text("panel.moved", { placement: placementOf(part) }));
  return notes;
}

/**
 * Return the node of an execution id such as "5:7", in a subgraph; undefined where it is gone.
 * @param {GraphLike} root
 * @param {string} executionId
 * @returns {TitledNode | undefined}
 */
export function nodeAt(root, executionId) {
  /** @type {GraphLike | undefined} */
  let graph = root;
  /** @type {TitledNode | null | undefined} */
  let node;
  for (const part of executionId.split(":")) {
    node = graph?.getNodeById(part) ?? graph?.getNodeById(Number(part));
    if (!node) return undefined;
    graph = node.subgraph;
  }
  return node ?? undefined;
}
