// Unit tests of web/badges.js; run by node --test, which test_scripts.py starts.
import assert from "node:assert/strict";
import { test } from "node:test";
import "./english.mjs";
import { addedBy, badgeText, keyOf, keysOf, loaderText, MOST_CHARACTERS, shownIn } from "../../web/badges.js";
import { shortBytes } from "../../web/units.js";

const MIB = 2 ** 20;
const GIB = 2 ** 30;
const node = (parts) => ({ node_id: "1", workflow_id: "root", activation_bytes: {}, staging_bytes: {}, ...parts });
const part = (tiers, more = {}) => ({ id: "a", precision: "as stored", tiers, staging_bytes: {}, total_bytes: 12 * GIB, plan: {}, ...more });
const share = (device, blocks, streamed) => ({ device, blocks, resident_blocks: blocks - streamed, streamed_blocks: streamed });

test("bytes are short, in binary units", () => {
  const cases = [[0, "0B"], [1023, "1.0K"], [1024, "1.0K"], [34.2 * MIB, "34.2M"], [99.96 * MIB, "100M"], [999.4 * MIB, "999M"], [999.6 * MIB, "1.0G"], [1.2 * 2 ** 30, "1.2G"], [80 * 2 ** 40, "80.0T"]];
  for (const [bytes, text] of cases) assert.equal(shortBytes(bytes), text);
});

test("bytes take at most five characters below a petabyte", () => {
  for (let bytes = 1; bytes < 900 * 2 ** 40; bytes = Math.ceil(bytes * 1.37)) {
    assert.ok(shortBytes(bytes).length <= 5, `${bytes} -> ${shortBytes(bytes)}`);
  }
});

test("a loader shows what is on its device and what there is in all", () => {
  assert.equal(loaderText([part({ pinned: 12 * GIB, "gpu:0": 7.8 * GIB }, { total_bytes: 11.1 * GIB })]), "7.8G/11.1G gpu:0");
  assert.equal(loaderText([part({ pinned: 12 * GIB, "gpu:0": 12 * GIB })]), "12.0G gpu:0", "all of it");
  assert.equal(loaderText([part({ "gpu:0": 2 * GIB }), part({ host: 12 * GIB }, { id: "b" })]), "2.0G/24.0G gpu:0", "parts together");
  assert.equal(loaderText([part({ "gpu:0": 3 * GIB }, { total_bytes: null })]), "3.0G gpu:0", "a host that tells no more");
});

test("a loader whose blocks stream says how many, wherever the others are", () => {
  const streaming = { "gpu:0": 5 * GIB, pinned: 12 * GIB };
  const plan = { shares: [share("gpu:0", 57, 38)] };
  assert.equal(loaderText([part(streaming, { plan })]), "streams 38/57");
  assert.equal(loaderText([part(streaming, { plan }), part({ "gpu:0": GIB }, { id: "b", plan: { shares: [share("gpu:0", 12, 0)] } })]), "streams 38/69");
  assert.equal(loaderText([part({ pinned: 12 * GIB }, { plan })]), "RAM 12.0G", "not loaded: nothing streams");
});

test("staging memory is no weight of a loader", () => {
  const held = part({ "gpu:0": 5 * GIB }, { staging_bytes: { "gpu:0": 2 * GIB } });
  assert.equal(loaderText([held]), "3.0G/12.0G gpu:0");
});

test("a loader whose parts are on no device shows where they rest", () => {
  assert.equal(loaderText([part({ pinned: 4 * GIB, host: 0.6 * GIB }, { precision: "fp8 scaled" })]), "RAM 4.6G fp8");
  assert.equal(loaderText([part({ host: 34.2 * MIB, "gpu:0": 0 })]), "RAM 34.2M");
  assert.equal(loaderText([part({}, { plan: { tier: "disk" } })]), "disk");
  assert.equal(loaderText([part({ host: MIB }, { plan: { tier: "disk" } })]), "disk", "a buffer through which it is read");
  assert.equal(loaderText([part({})]), "", "the host does not tell");
  assert.equal(loaderText([]), "", "released");
});

test("a loader on several devices shows each", () => {
  assert.equal(loaderText([part({ "gpu:0": 3.5 * GIB, "gpu:1": 3.4 * GIB })]), "2 GPUs 3.5+3.4G");
  assert.equal(loaderText([part({ "gpu:1": 3.4 * GIB, "gpu:0": 900 * MIB })]), "2 GPUs 900M+3.4G");
  assert.equal(loaderText([part({ "gpu:0": 3 * GIB, "gpu:1": 3 * GIB, "gpu:2": 4.4 * GIB })]), "3 GPUs 10.4G");
});

test("another node shows what it added itself, and nothing where that is nothing", () => {
  const shown = (parts) => badgeText({ parts: [], node: node(parts) });
  assert.equal(shown({ activation_bytes: { "gpu:0": 8 * MIB, "gpu:1": 0 } }), "+8.0M gpu:0");
  assert.equal(shown({ activation_bytes: { "gpu:0": 8 * MIB }, staging_bytes: { "gpu:0": 4 * MIB } }), "+12.0M gpu:0");
  assert.equal(shown({ activation_bytes: { "gpu:0": 8 * MIB }, staging_bytes: { "gpu:1": 5 * MIB } }), "2 GPUs +8.0+5.0M");
  assert.equal(shown({ activation_bytes: { "gpu:0": 0 } }), "");
  assert.equal(shown({ activation_bytes: { "gpu:0": 512 } }), "", "next to nothing");
  assert.equal(shown({ peak_bytes: { "gpu:0": 9 * GIB } }), "", "the peak is of others");
  assert.equal(badgeText({ parts: [] }), "");
});

test("what a loader added while it ran is not shown in the place of its parts", () => {
  const added = node({ activation_bytes: { "gpu:0": GIB } });
  assert.equal(badgeText({ parts: [part({ host: GIB })], node: added }), "RAM 1.0G");
});

test("no badge is longer than a narrow node", () => {
  const sizes = [1, 999, 99.94 * MIB, 999.4 * MIB, 99.9 * GIB, 999 * 1024 * GIB];
  const places = ["gpu:0", "gpu:10", "gpu:2", "pinned"];
  for (const one of sizes) {
    for (const other of sizes) {
      for (const place of places) {
        const tiers = { [place]: one, "gpu:15": other };
        for (const precision of ["as stored", "fp8 scaled", "something-long-of-a-host"]) {
          const shares = [share("gpu:15", 9999, 9999)];
          for (const more of [{ total_bytes: one + other }, { total_bytes: 2 * (one + other) }, { plan: { shares } }]) {
            for (const held of [tiers, { [place]: one }, { host: one }]) {
              const text = loaderText([part(held, { precision, ...more })]);
              assert.ok(text.length <= MOST_CHARACTERS, text);
            }
          }
        }
        const text = badgeText({ parts: [], node: node({ activation_bytes: tiers }) });
        assert.ok(text.length <= MOST_CHARACTERS, text);
      }
    }
  }
});

/** A root graph with node 1 and a subgraph node 5, which holds node 7. */
function graphs() {
  const inner = { id: "sub", getNodeById: (id) => ([7, 8].includes(id) ? { id, graph: inner } : null) };
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
  assert.deepEqual(keysOf(root, "5:9"), [], "removed since");
  assert.equal(keyOf({ id: 7, graph: inner }), "root/sub:7");
  assert.equal(keyOf({ id: 1, graph: root }), "root/1");
  assert.equal(keyOf({ id: 1 }), undefined);
});

test("nodes of other workflows, and of none, are not shown", () => {
  const { root } = graphs();
  const parts = [part({ host: GIB })];
  const loader = (workflow_id) => ({ node_id: "1", workflow_id, components: ["a"] });
  const known = (workflow_id) => ({ components: parts, loaders: [loader(workflow_id)], nodes: [node({ workflow_id })] });
  assert.deepEqual([...shownIn(root, known(null)).keys()], []);
  assert.deepEqual([...shownIn(root, known("")).keys()], []);
  assert.deepEqual([...shownIn(root, known("another")).keys()], []);
  assert.deepEqual(shownIn(root, known("root")).get("root/1").parts, parts);
});

test("a loader whose parts are gone shows nothing", () => {
  const { root } = graphs();
  const shown = shownIn(root, { components: [], loaders: [{ node_id: "1", workflow_id: "root", components: ["a"] }], nodes: [] });
  assert.equal(badgeText(shown.get("root/1")), "");
});

test("a subgraph's node shows the parts inside, each once, or what was added most", () => {
  const { root } = graphs();
  const added = (node_id, bytes) => node({ node_id, activation_bytes: { "gpu:0": bytes } });
  const components = [part({ host: GIB }), part({ host: GIB }, { id: "b" })];
  const loaders = [{ node_id: "5:7", workflow_id: "root", components: ["a", "b"] }, { node_id: "5:8", workflow_id: "root", components: ["a"] }];
  const nodes = [added("5:7", 3 * MIB), added("5:8", MIB)];
  const shown = shownIn(root, { components, loaders, nodes });
  assert.equal(badgeText(shown.get("root/5")), "RAM 2.0G");
  assert.deepEqual([...shown.keys()], ["root/5", "root/sub:7", "root/sub:8"]);
  const without = shownIn(root, { components: [], loaders: [], nodes });
  assert.equal(addedBy(without.get("root/5").node)["gpu:0"], 3 * MIB);
  assert.equal(badgeText(without.get("root/sub:8")), "+1.0M gpu:0");
  const again = shownIn(root, { components: [], loaders: [], nodes: [...nodes, added("5:7", 2 * MIB)] });
  assert.equal(badgeText(again.get("root/sub:7")), "+2.0M gpu:0", "the newest");
});
