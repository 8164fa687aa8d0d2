// @ts-check
// The boxes of our nodes: the text of a Memory Report, and what any other has to say about its model. The page shows the
// text of its own nodes only.
import { keyOf } from "./badges.js";
import { makeTextBox } from "./readout.js";

// So wide that no line of a report is broken again, and so high that most reports are seen as a whole.
const REPORT_SIZE = [580, 600];
const NOTE_HEIGHT = 56;
const NOTE_ROOM = NOTE_HEIGHT + 16; // the canvas renderer leaves a margin

/** The boxes of Memory Report nodes. @type {Map<ComfyNode, HTMLElement>} */
const reportBoxes = new Map();
/** @param {string} key what `keyOf` said */
const reportKey = (key) => `highwater report ${key}`;

/** Show the last report of each node again after a reload: the page keeps no text of nodes. */
export function showReports() {
  for (const [node, box] of reportBoxes) {
    const key = keyOf(node);
    if (key && !box.textContent) box.textContent = sessionStorage.getItem(reportKey(key)) ?? "";
  }
}

/**
 * Give a node of ours a box for its text.
 * @param {ComfyNode} node
 */
export function addTextBox(node) {
  const box = makeTextBox(document);
  box.style.whiteSpace = "pre-wrap";
  const [width, height] = node.size;
  node.setSize([Math.max(width, REPORT_SIZE[0]), Math.max(height, REPORT_SIZE[1])]); // a saved node has its own size
  const widget = node.addDOMWidget("report_text", "highwater-text", box, { serialize: false, getMinHeight: () => 140 });
  widget.serialize = false; // both are needed to keep it out of saved workflows
  const onExecuted = node.onExecuted;
  node.onExecuted = function (output) {
    onExecuted?.call(this, output);
    box.textContent = (output?.text ?? []).join("\n");
    const key = keyOf(node);
    if (key) sessionStorage.setItem(reportKey(key), box.textContent);
  };
  reportBoxes.set(node, box);
  const onRemoved = node.onRemoved;
  node.onRemoved = function () {
    reportBoxes.delete(node);
    onRemoved?.call(this);
  };
}

/**
 * Give a node of ours a box for what it has to say about its model, as long as it has something: an empty text
 * takes the box away, and the node has the size again that it had.
 * @param {ComfyNode} node
 */
export function addNotes(node) {
  const box = makeTextBox(document);
  box.style.whiteSpace = "pre-wrap";
  box.style.minHeight = `${NOTE_HEIGHT}px`;
  /** @type {{ serialize?: boolean } | undefined} */
  let widget;
  const onExecuted = node.onExecuted;
  node.onExecuted = function (output) {
    onExecuted?.call(this, output);
    const told = (output?.text ?? []).join("\n");
    box.textContent = told;
    const [width, height] = node.size;
    if (told && !widget) {
      widget = node.addDOMWidget("notes", "highwater-text", box, { serialize: false, getMinHeight: () => NOTE_HEIGHT });
      widget.serialize = false;
      node.setSize([width, height + NOTE_ROOM]);
    } else if (!told && widget) {
      node.removeWidget(widget);
      widget = undefined;
      node.setSize([width, height - NOTE_ROOM]);
    }
  };
}
