// Unit tests of web/detail.js; run by node --test, which test_scripts.py starts.
import assert from "node:assert/strict";
import { test } from "node:test";
import "./english.mjs";
import { detailOf, makeDetail } from "../../web/detail.js";

const MIB = 2 ** 20;
const NODE = {
  node_id: "1", workflow_id: "w", seconds: 2.345, weights_bytes: {}, activation_bytes: {}, staging_bytes: {},
  bytes_moved: 0, waited_s: 0, uncounted: [],
};
const PART = {
  id: "flux", precision: "fp8 scaled", engine: "blocks", in_effect: true, total_bytes: 34 * MIB, bytes_moved: 120 * MIB, waited_s: 0.5,
  tiers: { "gpu:0": 20 * MIB, pinned: 30 * MIB, host: 4 * MIB }, staging_bytes: { "gpu:0": 5 * MIB },
  plan: { tier: "pinned", shares: [{ device: "gpu:0", blocks: 12, resident_blocks: 8, streamed_blocks: 4, read_bytes: 0 }], reasons: ["16MiB budget: 4 of 12 blocks stream"] },
};

test("a node tells its weights, activations and staging per device, what moved, and for how long it waited", () => {
  const node = {
    ...NODE, weights_bytes: { "gpu:0": 20 * MIB, "gpu:1": 0 }, activation_bytes: { "gpu:0": MIB, "gpu:1": 2 * MIB }, staging_bytes: { "gpu:0": 5 * MIB },
    bytes_moved: 40 * MIB, waited_s: 0.123,
  };
  const [section] = detailOf({ parts: [], node });
  assert.equal(section.title, "This node, 2.35 s");
  assert.deepEqual(section.lines, [
    "gpu:0: 20.0M of weights that it used, 1.0M of activations, 5.0M of staging memory",
    "gpu:1: 2.0M of activations",
    "moved 40.0M to devices, waited 0.12 s for copies",
  ]);
});

test("a node that added nothing says so, and what cannot be known is said to be", () => {
  assert.deepEqual(detailOf({ parts: [], node: NODE })[0].lines, ["added nothing"]);
  const lines = detailOf({ parts: [], node: { ...NODE, uncounted: ["gpu:1"], waited_s: 0.001 } })[0].lines;
  assert.match(lines[1], /^gpu:1: torch does not count .* activations are not known$/);
  assert.match(lines[2], /waited less than 0.01 s/);
});

test("a part tells its blocks, where its weights are, what moved, and whether that is in effect", () => {
  const [section] = detailOf({ parts: [PART] });
  assert.equal(section.title, "flux, 34.0M fp8 scaled");
  assert.deepEqual(section.lines, [
    "gpu:0: 15.0M of weights, 5.0M of staging memory",
    "8 of 12 blocks resident, 4 streamed",
    "pinned RAM: 30.0M",
    "RAM: 4.0M",
    "moved 120M to devices so far, waited 0.50 s for copies",
    "in effect",
    "- 16MiB budget: 4 of 12 blocks stream",
  ]);
});

test("a part that is not where it should be says why not", () => {
  const told = (more) => detailOf({ parts: [{ ...PART, ...more }] })[0].lines.join("\n");
  assert.match(told({ in_effect: false }), /not in effect: a part of it was evicted/);
  assert.match(told({ in_effect: false, tiers: { pinned: MIB } }), /not in effect: it is loaded when it computes/);
  assert.doesNotMatch(told({ in_effect: false, tiers: { pinned: MIB } }), /blocks resident/);
  assert.match(told({ engine: "dynamic", bytes_moved: null, waited_s: null, plan: {} }), /moved by ComfyUI's dynamic VRAM$/);
  assert.match(told({ engine: "dynamic", in_effect: false }), /OVER its budget/);
  assert.match(told({ engine: "core", in_effect: false }), /not managed/);
  assert.match(told({ plan: { tier: "disk", file_bytes: 8 * MIB } }), /in its file: 8\.0M/);
  const shares = [{ ...PART.plan.shares[0], read_bytes: 3 * MIB }];
  assert.match(told({ plan: { ...PART.plan, file_bytes: 8 * MIB, shares } }), /in its file: 8\.0M\nread from its file in each pass: 3\.0M/);
  assert.doesNotMatch(told({ bytes_moved: null }), /moved .* to devices/);
  assert.equal(detailOf({ parts: [{ ...PART, total_bytes: null }] })[0].title, "flux, fp8 scaled");
});

test("the box stays inside of the window, and holds texts as text", () => {
  const made = [];
  const document = {
    createElement: (name) => {
      const element = {
        name, style: {}, ownerDocument: document, children: [], setAttribute(key, value) { this[key] = value; },
        replaceChildren(...children) { this.children = children; },
      };
      made.push(element);
      return element;
    },
  };
  const place = { x: 790, y: 590, width: 800, height: 600 };
  const box = makeDetail(document, [{ title: "<img onerror=x>", lines: ["<b>"] }], place);
  assert.equal(box.role, "dialog");
  assert.equal(box.style.left, `${800 - 380 - 8}px`);
  assert.equal(box.style.bottom, "18px");
  assert.deepEqual(box.children.map((child) => child.textContent), ["<img onerror=x>", "<b>"]);
  assert.ok(made.every((element) => !("innerHTML" in element)));
  assert.equal(makeDetail(document, [], { ...place, x: 3, y: 3, width: 320 }).style.width, "304px");
});
