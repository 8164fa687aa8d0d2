// @ts-check
// The boxes of our nodes: the text of a Memory Report, and what any other has to say about its model. The page shows the
// text of its own nodes only, and forgets it when another workflow is opened.
import { keyOf } from "./badges.js";
import { makeKeptTexts } from "./kept_texts.js";
import { makeTextBox } from "./readout.js";

// So wide that no line of a report is broken again, and so high that most reports are seen as a whole.
const REPORT_SIZE = [660, 600];
const NOTE_HEIGHT = 56;
const NOTE_ROOM = NOTE_HEIGHT + 16; // the canvas renderer leaves a margin

/** What shows a text on each node of the open workflows that has one. @type {Map<ComfyNode, (text: string) => void>} */
const boxes = new Map();
const texts = makeKeptTexts(() => sessionStorage);

/** @param {ComfyNode} node @returns {string | undefined} undefined while it is in no workflow */
function nameOf(node) {
  const key = keyOf(node);
  return key && `highwater text ${key}`;
}

/** Show what nodes told before a reload of the page, or before another workflow was opened. */
export function showTexts() {
  for (const [node, show] of boxes) {
    const name = nameOf(node);
    const told = name && texts.find(name);
    if (told) show(told);
  }
}

/**
 * Take what the server calls itself, with each of its answers. Where that is news, what another one told is no longer true,
 * and what it told itself is shown again; else nothing is: a text that is written again is no longer selected or scrolled.
 * @param {string} id
 * @returns {boolean} whether it is another one
 */
export function takeServer(id) {
  const change = texts.take(id);
  if (change === "another") for (const show of boxes.values()) show("");
  if (change !== "same") showTexts();
  return change === "another";
}

/** Note that the server may be another one when it answers next. */
export const loseConnection = () => texts.loseConnection();

/**
 * Show the text of a node at each of its runs, and again when its workflow is opened.
 * @param {ComfyNode} node
 * @param {(text: string) => void} show
 */
function showAtRuns(node, show) {
  const onExecuted = node.onExecuted;
  node.onExecuted = function (output) {
    onExecuted?.call(this, output);
    const told = (output?.text ?? []).join("\n");
    show(told);
    const name = nameOf(node);
    if (name) texts.keep(name, told);
  };
  boxes.set(node, show);
  const onRemoved = node.onRemoved;
  node.onRemoved = function () {
    boxes.delete(node);
    onRemoved?.call(this);
  };
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
  showAtRuns(node, (text) => (box.textContent = text));
}

/**
 * Give a node of ours a box for what it has to say about its model, as long as it has something: an empty text
 * takes the box away, and the node has the size again that it had. The box's room is saved with no workflow.
 * @param {ComfyNode} node
 */
export function addNotes(node) {
  const box = makeTextBox(document);
  box.style.whiteSpace = "pre-wrap";
  box.style.minHeight = `${NOTE_HEIGHT}px`;
  /** @type {{ serialize?: boolean } | undefined} */
  let widget;
  showAtRuns(node, (text) => {
    box.textContent = text;
    const [width, height] = node.size;
    if (text && !widget) {
      widget = node.addDOMWidget("notes", "highwater-text", box, { serialize: false, getMinHeight: () => NOTE_HEIGHT });
      widget.serialize = false;
      node.setSize([width, height + NOTE_ROOM]);
    } else if (!text && widget) {
      node.removeWidget(widget);
      widget = undefined;
      node.setSize([width, height - NOTE_ROOM]);
    }
  });
  const onSerialize = node.onSerialize;
  node.onSerialize = function (saved) {
    onSerialize?.call(this, saved);
    if (widget) saved.size = [saved.size[0], saved.size[1] - NOTE_ROOM];
  };
}
