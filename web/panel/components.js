// @ts-check
// The components of the memory panel: what each is, where it is, when it is used, and what can be done with it. Knows
// nothing of the page: it imports only what node can test.
import { weightsOf } from "../badges.js";
import { text } from "../texts.js";
import { shortBytes } from "../units.js";
import { make, makeButton, makeRows, write } from "./elements.js";

/**
 * @typedef {import("./bars.js").Component} Component
 * @typedef {import("../badges.js").GraphLike} GraphLike
 * @typedef {{ id: string | number, title?: string, graph?: GraphLike | null, subgraph?: GraphLike }} TitledNode
 * @typedef {{ id: string, label: string }} NodeLink an execution id such as "5:7", and what the node is called
 * @typedef {{ id: string, kind: string, colour: string, size: string, where: string, precision: string, last_use: string, next_use: string,
 *   nodes: NodeLink[], elsewhere: string, notes: string[], isKept: boolean, isOnDevice: boolean, isManaged: boolean,
 *   canMove: boolean, placement: string }} Row
 */

/** What moves components that can be asked to leave, and to stay. */
const MANAGED = ["blocks", "dynamic"];

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
      last_use: part.last_use_s === null ? text("panel.never") : part.leased ? text("panel.now") : clock(part.last_use_s),
      next_use: nextUse(part),
      nodes: found,
      elsewhere: isElsewhere ? text("panel.elsewhere") : found.length === 0 ? text("panel.no_node") : "",
      notes: notesOf(part),
      isKept: part.kept,
      isOnDevice: onDevices(part) > 0,
      isManaged: MANAGED.includes(part.engine),
      canMove: part.engine === "blocks",
      placement: placementOf(part),
    };
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

/**
 * Return what shows the rows in an element.
 * @param {HTMLElement} parent
 * @param {{ release: (id: string) => unknown, keep: (id: string, isKept: boolean) => unknown, move: (id: string, placement: string) => unknown,
 *   goTo: (executionId: string) => void }} actions
 * @returns {(rows: Row[]) => void}
 */
export function makeComponents(parent, actions) {
  return makeRows(parent, (row) => makeCard(parent.ownerDocument, row, actions));
}

/**
 * @param {Document} document
 * @param {Row} first
 * @param {Parameters<typeof makeComponents>[1]} actions
 */
function makeCard(document, first, actions) {
  const { id } = first;
  let row = first;
  const swatch = make(document, "span", { class: "hw-swatch" });
  swatch.style.background = first.colour;
  const size = make(document, "span", { class: "hw-amount" });
  const heading = make(document, "h4", { class: "hw-name", text: id, title: id });
  const values = Object.fromEntries(["node", "where", "precision", "last_use", "next_use"].map((name) => [name, make(document, "dd")]));
  const facts = make(document, "dl");
  for (const [name, value] of Object.entries(values)) facts.append(make(document, "dt", { text: text(`panel.fact.${name}`) }), value);
  const notes = make(document, "p", { class: "hw-quiet" });
  const release = makeButton(document, text("panel.release"), () => actions.release(id));
  const keep = makeButton(document, text("panel.keep"), () => actions.keep(id, !row.isKept));
  const move = makeButton(document, text("panel.move"), () => actions.move(id, row.placement));
  const buttons = make(document, "div", { class: "hw-buttons" }, release, keep, move);
  for (const button of [release, keep, move]) button.setAttribute("aria-label", `${button.textContent} (${id})`);
  const element = make(document, "li", { class: "hw-card" }, make(document, "div", { class: "hw-row" }, swatch, heading, size), facts, notes, buttons);
  /** The nodes that are shown, so that links keep the focus. */
  let shownNodes = "";
  const fill = (/** @type {Row} */ now) => {
    row = now;
    write(size, now.size);
    for (const name of /** @type {const} */ (["where", "precision", "last_use", "next_use"])) write(values[name], now[name]);
    if (now.kind) heading.setAttribute("title", `${id} (${now.kind})`);
    const nodes = JSON.stringify([now.nodes, now.elsewhere]);
    if (nodes !== shownNodes) {
      shownNodes = nodes;
      const links = now.nodes.map((node) => {
        const link = makeButton(document, node.label, () => actions.goTo(node.id));
        link.setAttribute("class", "hw-link");
        link.setAttribute("title", text("panel.go_to", { node: node.label }));
        return link;
      });
      values.node.replaceChildren(...links, ...(now.elsewhere ? [make(document, "span", { text: now.elsewhere })] : []));
    }
    write(notes, now.notes.join(" "));
    buttons.hidden = !now.isManaged;
    release.setAttribute("aria-disabled", String(!now.isOnDevice));
    keep.setAttribute("aria-pressed", String(now.isKept));
    move.hidden = !now.canMove;
  };
  return { element, fill };
}
