// @ts-check
// Makes elements of the memory panel. Knows nothing of the page: it imports nothing, so that node can test it.

/**
 * Make an element. Texts come from shared workflows: they are put in as text.
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Document} document
 * @param {Tag} tag
 * @param {Record<string, string>} [attributes] `text` is its text
 * @param {(HTMLElement | null)[]} children those that are null are left out
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function make(document, tag, { text, ...attributes } = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  element.append(...children.filter((child) => child !== null));
  return element;
}

/**
 * Write a text where it differs: what is selected or read aloud stays untouched.
 * @param {HTMLElement} element
 * @param {string} text "" hides the element
 */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
  element.hidden = text === "";
}

/**
 * Return what shows items in an element, a row each by its id. A row that stays keeps its element, and the focus in it,
 * also where it is put elsewhere.
 * @template {{ id: string }} Item
 * @param {HTMLElement} parent
 * @param {(item: Item) => { element: HTMLElement, fill: (item: Item) => void }} makeRow
 * @returns {(items: Item[]) => void}
 */
export function makeRows(parent, makeRow) {
  /** @type {Map<string, ReturnType<typeof makeRow>>} */
  const rows = new Map();
  return (items) => {
    const focused = /** @type {HTMLElement | null} */ (parent.ownerDocument.activeElement);
    const ids = new Set(items.map((item) => item.id));
    for (const [id, row] of rows) {
      if (ids.has(id)) continue;
      row.element.remove();
      rows.delete(id);
    }
    items.forEach((item, at) => {
      const row = rows.get(item.id) ?? makeRow(item);
      rows.set(item.id, row);
      row.fill(item);
      if (parent.children[at] !== row.element) parent.insertBefore(row.element, parent.children[at] ?? null);
    });
    if (focused !== parent.ownerDocument.activeElement && parent.contains(focused)) focused?.focus({ preventScroll: true });
  };
}

/**
 * A button that starts something and stays quiet until that has ended; it keeps the focus meanwhile.
 * @param {Document} document
 * @param {string} label
 * @param {() => unknown} start may return a promise
 */
export function makeButton(document, label, start) {
  const button = make(document, "button", { type: "button", text: label });
  let isBusy = false;
  button.addEventListener("click", async () => {
    if (isBusy || button.getAttribute("aria-disabled") === "true") return;
    isBusy = true;
    button.setAttribute("aria-busy", "true");
    try {
      await start();
    } finally {
      isBusy = false;
      button.removeAttribute("aria-busy");
    }
  });
  return button;
}
