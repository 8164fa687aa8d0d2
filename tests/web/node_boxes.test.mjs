// Unit tests of web/node_boxes.js; run by node --test, which test_scripts.py starts.
import assert from "node:assert/strict";
import { test } from "node:test";
import { addNotes, addTextBox, takeServer } from "../../web/node_boxes.js";

globalThis.document = { createElement: () => ({ style: {} }) };
const stored = new Map();
globalThis.sessionStorage = { setItem: (name, text) => void stored.set(name, text), removeItem: (name) => void stored.delete(name), getItem: (name) => stored.get(name) ?? null };

const makeNode = (width, height) => ({
  id: 1,
  size: [width, height],
  boxes: [],
  setSize(size) { this.size = size; },
  removeWidget() { this.boxes.pop(); },
  addDOMWidget(name, type, box) { this.boxes.push(box); return {}; },
});

test("a report has room for its lines from the start, and keeps a larger size", () => {
  const node = makeNode(225, 60);
  addTextBox(node);
  assert.ok(node.size[0] >= 560 && node.size[1] >= 560);
  const large = makeNode(900, 1000);
  addTextBox(large);
  assert.deepEqual(large.size, [900, 1000]);
});

test("lines that are longer than the box go on below, and are text", () => {
  const node = makeNode(225, 60);
  addTextBox(node);
  const [box] = node.boxes;
  assert.equal(box.style.whiteSpace, "pre-wrap");
  node.onExecuted({ text: ["<b>Devices", "Advice"] });
  assert.equal(box.textContent, "<b>Devices\nAdvice");
  assert.ok(!("innerHTML" in box));
});

test("a note has room while it is there, which is not saved", () => {
  const node = makeNode(225, 60);
  addNotes(node);
  const saved = () => {
    const data = { size: [...node.size] };
    node.onSerialize(data);
    return data.size;
  };
  assert.deepEqual([node.boxes.length, saved()], [0, [225, 60]]);
  for (const text of [["this machine has no gpu:7"], ["another"]]) {
    node.onExecuted({ text });
    assert.deepEqual([node.boxes.length, saved()], [1, [225, 60]]);
    assert.ok(node.size[1] > 100);
  }
  node.onExecuted({ text: [] });
  assert.deepEqual([node.boxes.length, node.size], [0, [225, 60]]);
});

test("a text is written when it is news, and not with each answer of the server: it stays selected and scrolled", () => {
  takeServer("one");
  const node = { ...makeNode(225, 60), graph: { id: "graph" } };
  addTextBox(node);
  const [box] = node.boxes;
  const written = [];
  Object.defineProperty(box, "textContent", { set: (text) => written.push(text) });
  node.onExecuted({ text: ["Devices"] });
  assert.equal(takeServer("one"), false);
  assert.deepEqual(written, ["Devices"]);
  assert.equal(takeServer("two"), true);
  assert.deepEqual(written, ["Devices", ""]);
  assert.equal(takeServer("one"), true);
  assert.deepEqual(written, ["Devices", "", "", "Devices"]);
});
