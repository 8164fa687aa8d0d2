// Unit tests of web/readout.js; run by node --test, which test_scripts.py starts.
import assert from "node:assert/strict";
import { test } from "node:test";
import { badgeText, keyOf, keysOf, noticeOfEvent, noticeOfFailure, precisionOf, shortBytes, tiersOf } from "../../web/readout.js";

const MIB = 2 ** 20;
const node = (parts) => ({ node_id: "1", workflow_id: null, peak_bytes: {}, ...parts });

test("bytes are short, in binary units", () => {
  const cases = [[0, "0B"], [1023, "1.0K"], [1024, "1.0K"], [34.2 * MIB, "34.2M"], [99.96 * MIB, "100M"], [999.4 * MIB, "999M"], [999.6 * MIB, "1.0G"], [1.2 * 2 ** 30, "1.2G"], [80 * 2 ** 40, "80.0T"]];
  for (const [bytes, text] of cases) assert.equal(shortBytes(bytes), text);
});

test("bytes take at most five characters below a petabyte", () => {
  for (let bytes = 1; bytes < 900 * 2 ** 40; bytes = Math.ceil(bytes * 1.37)) {
    assert.ok(shortBytes(bytes).length <= 5, `${bytes} -> ${shortBytes(bytes)}`);
  }
});

test("a loader shows where its models rest, not their copies on devices", () => {
  const tiers = { pinned: 30 * MIB, host: 4.2 * MIB, "gpu:0": 34.2 * MIB };
  assert.equal(badgeText(node({}), tiers, "fp8"), "RAM 34.2M fp8");
  assert.equal(badgeText(node({}), tiers), "RAM 34.2M");
});

test("a loader shows what its models hold of the devices where none is in RAM, whatever else was there", () => {
  const loader = node({ peak_bytes: { "gpu:0": 256 * MIB, "gpu:1": 9 * MIB } });
  assert.equal(badgeText(loader, { "gpu:0": 192 * MIB }), "VRAM 192M");
  assert.equal(badgeText(loader, { "gpu:0": 192 * MIB, "gpu:1": 0 }), "VRAM 192M");
  assert.equal(badgeText(loader, {}), "VRAM 0B", "not loaded yet");
  assert.equal(badgeText(node({}), {}), "", "no device, nothing to say");
});

test("another node shows the peak of each device that it used", () => {
  assert.equal(badgeText(node({ peak_bytes: { "gpu:0": 8 * MIB, "gpu:1": 0 } })), "VRAM 8.0M");
  assert.equal(badgeText(node({ peak_bytes: { "gpu:0": 8 * MIB, "gpu:1": 5 * MIB } })), "VRAM 8.0M+5.0M");
  assert.equal(badgeText(node({ peak_bytes: { "gpu:0": MIB, "gpu:1": 5 * MIB, "gpu:2": MIB } })), "VRAM 5.0M ×3");
  assert.equal(badgeText(node({ peak_bytes: { "gpu:0": 0 } })), "VRAM 0B");
  assert.equal(badgeText(node({})), "", "no device, nothing to say");
});

test("a badge fits a narrow node", () => {
  const peaks = { "gpu:0": 999 * MIB, "gpu:1": 999 * MIB };
  for (const text of [badgeText(node({ peak_bytes: peaks })), badgeText(node({}), { pinned: 999 * MIB }, "fp8")]) {
    assert.ok(text.length <= 16, text);
  }
});

test("precision is that of the node's own parts, and silent where nothing was changed", () => {
  const parts = [
    { node_id: "1", workflow_id: "w", precision: "as stored" },
    { node_id: "1", workflow_id: "w", precision: "fp8 scaled" },
    { node_id: "2", workflow_id: "w", precision: "as stored" },
  ];
  assert.equal(precisionOf(parts, { node_id: "1", workflow_id: "w" }), "fp8");
  assert.equal(precisionOf(parts, { node_id: "2", workflow_id: "w" }), "");
  assert.equal(precisionOf(parts, { node_id: "1", workflow_id: "another" }), "");
  assert.equal(precisionOf([], { node_id: "1", workflow_id: "w" }), "");
});

test("tiers are those of all parts of one node of one workflow", () => {
  const part = (tiers, parts = {}) => ({ node_id: "1", workflow_id: "w", precision: "as stored", tiers, ...parts });
  const parts = [
    part({ pinned: 3, "gpu:0": 1 }),
    part({ pinned: 4, host: 5 }),
    part({ pinned: 100 }, { workflow_id: "another" }),
    part({ pinned: 100 }, { node_id: null }),
  ];
  assert.deepEqual(tiersOf(parts, { node_id: "1", workflow_id: "w" }), { pinned: 7, "gpu:0": 1, host: 5 });
  assert.equal(tiersOf(parts, { node_id: "2", workflow_id: "w" }), undefined);
});

/** A root graph with node 1 and a subgraph node 5, which holds node 7. */
function graphs() {
  const inner = { id: "sub", getNodeById: (id) => (id === 7 ? { id: 7, graph: inner } : null) };
  const root = {
    id: "root",
    getNodeById: (id) => ({ 1: { id: 1, graph: root }, 5: { id: 5, graph: root, subgraph: inner } })[id] ?? null,
  };
  inner.rootGraph = root;
  return { root, inner };
}

test("an execution id means the inner node and every subgraph node on the way", () => {
  const { root, inner } = graphs();
  assert.deepEqual(keysOf(root, "1"), ["root/1"]);
  assert.deepEqual(keysOf(root, "5:7"), ["root/5", "root/sub:7"]);
  assert.deepEqual(keysOf(root, "9"), []);
  assert.equal(keyOf({ id: 7, graph: inner }), "root/sub:7");
  assert.equal(keyOf({ id: 1, graph: root }), "root/1");
  assert.equal(keyOf({ id: 1 }), undefined);
});

test("a failure that its message explains is told, any other is left to the page", () => {
  const failure = { node_type: "HighwaterSamplePipeline", exception_message: "needs 9 MiB: 3 MiB free" };
  const told = (exception_type, parts = {}) => noticeOfFailure({ ...failure, exception_type, ...parts });
  const doesNotFit = { severity: "error", summary: "Does not fit in memory", detail: "needs 9 MiB: 3 MiB free" };
  assert.deepEqual(told("highwater.memory.errors.DoesNotFit"), doesNotFit);
  assert.deepEqual(told("DoesNotFit", { node_type: "KSampler" }), doesNotFit);
  assert.equal(told("highwater.memory.errors.InvalidInput").summary, "Invalid input");
  assert.match(told("torch.OutOfMemoryError").detail, /^needs 9 MiB: 3 MiB free\. Keep more memory free/);
  assert.equal(told("torch.OutOfMemoryError", { node_type: "KSampler" }), null);
  const sampling = { ...failure, node_type: "KSampler" };
  const isManaging = true;
  assert.match(noticeOfFailure({ ...sampling, exception_type: "torch.OutOfMemoryError" }, isManaging).detail, /^needs 9 MiB/);
  // Below custom_nodes the module's name begins with a path; the host adds an empty line to every message.
  const late = { ...sampling, exception_type: "/srv/custom_nodes/hw_2.1.memory.errors.InvalidInput", exception_message: "no\n" };
  assert.deepEqual(noticeOfFailure(late), { severity: "error", summary: "Invalid input", detail: "no" });
  assert.equal(told("another.pack.InvalidInput", { node_type: "KSampler" }), null);
  assert.equal(told("builtins.KeyError"), null);
  assert.equal(noticeOfFailure({}), null);
});

test("of the manager's events only errors, thrashing and growth are told", () => {
  const event = { type: "event", kind: "error", component: "vae", device: "gpu:0", reason: "out of memory" };
  assert.deepEqual(noticeOfEvent(event), { severity: "warn", summary: "vae on gpu:0", detail: "out of memory" });
  assert.deepEqual(noticeOfEvent({ ...event, kind: "thrashing" }), noticeOfEvent(event));
  assert.equal(noticeOfEvent({ ...event, kind: "growth" }).summary, "More memory than before");
  assert.equal(noticeOfEvent({ ...event, kind: "evict" }), null);
  assert.equal(noticeOfEvent({ ...event, type: "node" }), null);
});
