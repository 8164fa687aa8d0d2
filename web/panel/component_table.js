// @ts-check
// The table of the components in the memory panel: a row each, sorted by a click on a column, with buttons. Knows nothing
// of the page: it imports only what node can test.
import { text } from "../texts.js";
import { nextOrder, sorted } from "./components.js";
import { make, makeButton, makeRows, write } from "./elements.js";

/**
 * @typedef {import("./components.js").Row} Row
 * @typedef {import("./components.js").SortKey} SortKey
 * @typedef {{ release: (id: string) => unknown, keep: (id: string, isKept: boolean) => unknown, move: (id: string, placement: string) => unknown,
 *   goTo: (executionId: string) => void }} Actions
 */

const COLUMNS = /** @type {const} */ (["component", "node", "where", "precision", "last_use", "next_use", "size", "actions"]);
const SORTED_BY = /** @type {readonly string[]} */ (["last_use", "next_use", "size"]);

/**
 * Make the table. `show` shows rows in the order that the user chose. Where it is narrow the style makes a block of each
 * row: then roles say that it is a table still, and each cell has the name of its column.
 * @param {Document} document
 * @param {Actions} actions
 */
export function makeComponentTable(document, actions) {
  const head = make(document, "tr", { role: "row" });
  const body = make(document, "tbody", { role: "rowgroup" });
  const element = make(document, "table", { class: "hw-table", role: "table", "aria-label": text("panel.components") },
    make(document, "thead", { role: "rowgroup" }, head),
    body,
  );
  const showRows = makeRows(body, (/** @type {Row} */ row) => makeRow(document, row, actions));
  /** @type {Row[]} */
  let rows = [];
  /** @type {import("./components.js").Order | null} */
  let order = null;
  /** @type {{ by: SortKey, heading: HTMLElement, button: HTMLElement }[]} */
  const sorters = [];

  for (const name of COLUMNS) {
    const heading = make(document, "th", { scope: "col", role: "columnheader", class: `hw-head hw-${name}` });
    head.append(heading);
    if (!SORTED_BY.includes(name)) {
      heading.textContent = text(`panel.fact.${name}`);
      continue;
    }
    const by = /** @type {SortKey} */ (name);
    const button = makeButton(document, text(`panel.fact.${name}`), () => {
      order = nextOrder(order, by);
      draw();
    });
    button.setAttribute("class", "hw-sort");
    button.setAttribute("title", text("panel.sort", { column: text(`panel.fact.${name}`) }));
    heading.append(button);
    sorters.push({ by, heading, button });
  }

  function draw() {
    for (const { by, heading } of sorters) {
      heading.setAttribute("aria-sort", order?.by !== by ? "none" : order.isRising ? "ascending" : "descending");
    }
    showRows(sorted(rows, order));
  }

  return {
    element,
    /** @param {Row[]} now */
    show(now) {
      rows = now;
      element.hidden = now.length === 0;
      draw();
    },
  };
}

/**
 * @param {Document} document
 * @param {Row} first
 * @param {Actions} actions
 */
function makeRow(document, first, actions) {
  const { id } = first;
  let row = first;
  const cell = (/** @type {typeof COLUMNS[number]} */ name, /** @type {HTMLElement[]} */ ...children) =>
    make(document, "td", { role: "cell", class: `hw-${name}`, "data-label": text(`panel.fact.${name}`) }, ...children);
  const swatch = make(document, "span", { class: "hw-swatch" });
  swatch.style.background = first.colour;
  const name = make(document, "span", { class: "hw-name", text: id });
  const heading = make(document, "th", { scope: "row", role: "rowheader", class: "hw-component" }, make(document, "div", { class: "hw-title" }, swatch, name));
  const values = { where: cell("where"), precision: cell("precision"), last_use: cell("last_use"), next_use: cell("next_use"), size: cell("size") };
  const nodes = cell("node");
  const release = makeButton(document, text("panel.release"), () => actions.release(id));
  const keep = makeButton(document, text("panel.keep"), () => actions.keep(id, !row.isKept));
  const move = makeButton(document, text("panel.move"), () => actions.move(id, row.placement));
  for (const button of [release, keep, move]) button.setAttribute("aria-label", `${button.textContent} (${id})`);
  const buttons = make(document, "div", { class: "hw-buttons" }, release, keep, move);
  const notes = make(document, "p", { class: "hw-quiet" });
  const element = make(document, "tr", { role: "row", class: "hw-component-row" },
    heading, nodes, values.where, values.precision, values.last_use, values.next_use, values.size, cell("actions", buttons, notes),
  );
  /** The nodes that are shown, so that links keep the focus. */
  let shownNodes = "";
  const fill = (/** @type {Row} */ now) => {
    row = now;
    heading.setAttribute("title", now.kind ? `${id} (${now.kind})` : id);
    for (const [fact, value] of Object.entries(values)) {
      const told = now[/** @type {keyof typeof values} */ (fact)];
      if (value.textContent !== told) value.textContent = told;
    }
    const told = JSON.stringify([now.nodes, now.elsewhere]);
    if (told !== shownNodes) {
      shownNodes = told;
      const links = now.nodes.map((node) => {
        const link = makeButton(document, node.label, () => actions.goTo(node.id));
        link.setAttribute("class", "hw-link");
        link.setAttribute("title", text("panel.go_to", { node: node.label }));
        return link;
      });
      nodes.replaceChildren(...links, ...(now.elsewhere ? [make(document, "span", { text: now.elsewhere })] : []));
    }
    write(notes, now.notes.join(" "));
    buttons.hidden = !now.canRelease;
    release.setAttribute("aria-disabled", String(!now.isOnDevice));
    keep.setAttribute("aria-pressed", String(now.isKept));
    move.hidden = !now.canMove;
  };
  return { element, fill };
}
