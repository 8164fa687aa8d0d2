// Unit tests of web/panel/; run by node --test, which test_scripts.py starts.
import assert from "node:assert/strict";
import { test } from "node:test";
import { barsOf, makeBars } from "../../web/panel/bars.js";
import { makeComponentTable } from "../../web/panel/component_table.js";
import { nextOrder, nodeAt, rowsOf, sorted } from "../../web/panel/components.js";
import { filtered, linesOf, makeEvents } from "../../web/panel/events.js";
import { closeToMark, makeSliders, marksOf, movedBy, movedTo } from "../../web/panel/marks.js";
import { makeColours, makePanel } from "../../web/panel/view.js";
import { useEnglish } from "./english.mjs";
import { makeDocument } from "./fake_document.mjs";
import { useTexts } from "../../web/texts.js";

const MIB = 2 ** 20;
const GIB = 2 ** 30;
const HOSTILE = "<img src=x onerror=alert(1)>";
const UNWRITTEN = { low_text: "", high_text: "" };
const MARK = { low_bytes: 5 * MIB, high_bytes: 8 * MIB, ...UNWRITTEN, source: "default" };
const GPU = {
  name: "gpu:0", total_bytes: 64 * MIB, free_bytes: 14 * MIB, watermark: MARK, own_watermark: MARK, managed_bytes: 40 * MIB, other_bytes: 0, peak_bytes: 0,
  lent: null, neighbours: [], unshared: null, activation_bytes: 6 * MIB, pinned: null,
};
const RAM = {
  ...GPU, name: "cpu", total_bytes: 16 * GIB, free_bytes: 10 * GIB, watermark: { low_bytes: 0, high_bytes: 0 }, own_watermark: { ...MARK, low_bytes: 2 * GIB, high_bytes: 3 * GIB },
  activation_bytes: null, pinned: { num_bytes: GIB, limit_bytes: 8 * GIB },
};
const PART = {
  id: "flux", name: "flux", kind: "diffusion", node_id: "1", workflow_id: "w", tiers: { "gpu:0": 40 * MIB, pinned: GIB }, precision: "as stored", in_effect: true, leased: false,
  last_use_s: 12, bytes_moved: 0, plan: { reasons: [], placement: "gpu:0" }, total_bytes: 50 * MIB, staging_bytes: { "gpu:0": 10 * MIB }, engine: "blocks", waited_s: 0, next_use: null,
  kept: false, moved: false, num_compiles: null, uncompiled_blocks: null,
};
const graph = (nodes) => ({ id: "w", getNodeById: (id) => nodes[id] ?? null });
const ROOT = graph({ 1: { id: 1, title: "Loader" }, 5: { id: 5, subgraph: graph({ 7: { id: 7, title: HOSTILE } }) } });
const PAGE = { root: ROOT, colourOf: () => "red", clock: (seconds) => `at ${seconds}` };
const ACTIONS = { lend() {}, giveBack() {}, setMark: async () => true, release() {}, keep() {}, move() {}, goTo() {} };
const toldAs = (text) => ({ text, key: "advice.unknown", values: {} });
const amounts = (bar) => Object.fromEntries(bar.segments.map((part) => [part.name, part.bytes / MIB]));

test("a bar is all that a device has: weights, staging memory, activations, others, and what is free", () => {
  const [gpu] = barsOf({ devices: [RAM, GPU], components: [PART] }, () => "red");
  assert.equal(gpu.id, "gpu:0");
  assert.deepEqual(amounts(gpu), { flux: 30, staging: 10, activations: 6, other: 4, free: 14 });
  assert.equal(gpu.segments.reduce((all, part) => all + part.bytes, 0), GPU.total_bytes);
});

test("what is next to nothing has no part of a bar", () => {
  const [gpu] = barsOf({ devices: [{ ...GPU, activation_bytes: 36 }], components: [] }, () => "");
  assert.deepEqual(gpu.segments.map((part) => part.name), ["other", "free"]);
});

test("what is lent and not taken is no longer free", () => {
  const lent = { num_bytes: 20 * MIB, missing_bytes: 8 * MIB, left_s: 60 };
  const [gpu] = barsOf({ devices: [{ ...GPU, lent }], components: [] }, () => "");
  assert.deepEqual(amounts(gpu), { activations: 6, other: 44, "lent, not taken yet": 8, free: 6 });
  assert.equal(gpu.lentBytes, 20 * MIB);
  assert.match(gpu.notes.join(), /20\.0M are lent/);
});

test("a bar says where activations are not counted, and whose watermark counts", () => {
  const marks = { own_watermark: { ...MARK, source: "set" }, watermark: { low_bytes: 7 * MIB, high_bytes: 9 * MIB } };
  const [gpu] = barsOf({ devices: [{ ...GPU, ...marks, activation_bytes: null }], components: [] }, () => "");
  assert.match(gpu.notes.join(" "), /does not count .* A Watermark node .* keep 7\.0M free/);
});

test("the RAM and what of it is page-locked have bars of their own", () => {
  const [ram, pinned] = barsOf({ devices: [RAM], components: [{ ...PART, tiers: { host: GIB, pinned: GIB } }] }, () => "");
  assert.deepEqual(amounts(ram), { flux: 2048, other: 4096, free: 10240 });
  assert.deepEqual([ram.device, ram.mark.low_bytes, ram.lentBytes], ["host", 2 * GIB, null]);
  assert.deepEqual(amounts(pinned), { flux: 1024, free: 7168 });
  assert.equal(pinned.mark, null);
  assert.equal(barsOf({ devices: [{ ...RAM, pinned: { num_bytes: 0, limit_bytes: 0 } }] }, () => "").length, 1);
});

test("each mark is moved by itself, stays on the device, and the low one never passes the high one", () => {
  const marks = { low_bytes: 5 * MIB, high_bytes: 8 * MIB, ...UNWRITTEN };
  const moved = (side, wanted) => {
    const { low_bytes, high_bytes } = movedTo(marks, side, wanted, 64 * MIB);
    return [low_bytes / MIB, high_bytes / MIB];
  };
  assert.deepEqual([moved("low", 6 * MIB), moved("low", 20 * MIB), moved("low", -MIB)], [[6, 8], [8, 8], [0, 8]]);
  assert.deepEqual([moved("high", 20 * MIB), moved("high", 2 * MIB), moved("high", 90 * MIB)], [[5, 20], [5, 5], [5, 64]]);
  for (const key of ["a", "toString"]) assert.equal(movedBy(marks, "low", key, 64 * MIB), null);
  assert.ok(movedBy(marks, "low", "ArrowRight", 64 * MIB).low_bytes < marks.low_bytes && movedBy(marks, "high", "ArrowDown", 64 * MIB).high_bytes > marks.high_bytes);
  assert.equal(movedBy(marks, "high", "Home", 64 * MIB).high_bytes, 64 * MIB);
  assert.equal(movedBy(marks, "low", "Home", 64 * MIB).low_bytes, 8 * MIB);
  assert.equal(movedBy(marks, "high", "End", 64 * MIB).high_bytes, 5 * MIB);
});

test("a mark keeps the unit in which it was written, with as many digits as the device needs", () => {
  const moved = (low_text, wanted, total) => movedTo({ low_bytes: 0, high_bytes: total, low_text, high_text: "100%" }, "low", wanted, total);
  const told = (...asked) => moved(...asked).low_text;
  assert.deepEqual([told("10%", 0.29876 * GIB, GIB), told("5.5%", 0.3 * GIB, GIB), told("5%", 0, GIB)], ["29.9%", "30%", "0%"]);
  assert.deepEqual([told("8GB", 7.1234e9, 24 * GIB), told("8g", 7.1234 * GIB, 24 * GIB), told("1GiB", GIB / 4, 24 * GIB)], ["7.12GB", "7.12g", "0.25GiB"]);
  assert.deepEqual([told("512MiB", 600.4 * MIB, 24 * GIB), told("3MiB", 3.456 * MIB, 64 * MIB), told("", 600.4 * MIB, 2 * GIB), told("", 5.678 * GIB, 24 * GIB)], ["600MiB", "3.46MiB", "600MiB", "5.68GiB"]);
  assert.equal(told("0", 3 * MIB, GIB), "3MiB", "a zero has no unit to keep");
  assert.equal(moved("10%", 0.29876 * GIB, GIB).low_bytes, Math.floor(0.299 * GIB), "what the text means to the server");
  assert.equal(moved("8GB", 7.1234e9, 24 * GIB).low_bytes, 7.12e9);
  const other = movedTo({ low_bytes: 184.4 * MIB, high_bytes: 276.6 * MIB, ...UNWRITTEN }, "high", 700 * MIB, 1844 * MIB);
  assert.deepEqual(other, { low_bytes: 184 * MIB, high_bytes: 700 * MIB, low_text: "184MiB", high_text: "700MiB" }, "the other one is sent, too");
});

test("marks of different units stay in their order, however they are rounded", () => {
  const total = 1844 * MIB;
  const marks = { low_bytes: Math.floor(total * 0.1), high_bytes: 277 * MIB, low_text: "10%", high_text: "277MiB" };
  for (const [side, wanted] of [["low", total], ["low", 276.99 * MIB], ["high", 0], ["high", marks.low_bytes + 1], ["high", total]]) {
    const { low_bytes, high_bytes, low_text, high_text } = movedTo(marks, side, wanted, total);
    assert.ok(low_bytes <= high_bytes && high_bytes <= total, `${side} at ${wanted}`);
    assert.deepEqual([low_text.at(-1), high_text.slice(-3)], ["%", "MiB"]);
  }
  const together = { low_bytes: 7, high_bytes: 7, ...UNWRITTEN };
  assert.equal(movedTo(together, "low", 7, total).low_bytes, 0, "no MiB lies between");
  assert.deepEqual(marksOf([], "gpu:0", { low_bytes: 193356595, high_bytes: 193356595, ...UNWRITTEN }), "gpu:0=184.3992MiB:184.3993MiB");
});

test("new marks of one device leave those that are set for others as they were written", () => {
  const set = { low_bytes: 3 * MIB, high_bytes: 4.5 * MIB, ...UNWRITTEN, source: "setting" };
  const written = { ...set, low_text: "5%", high_text: "8GB" };
  const devices = [{ ...RAM, own_watermark: set }, GPU, { ...GPU, name: "gpu:1", own_watermark: written }];
  assert.equal(marksOf(devices, "gpu:0", { low_bytes: MIB, high_bytes: 2 * MIB, ...UNWRITTEN }), "gpu:0=1MiB:2MiB,gpu:1=5%:8GB,host=3MiB:4.5MiB");
  assert.equal(marksOf(devices, "host", movedTo(set, "high", 12.59 * MIB, 64 * MIB)), "gpu:1=5%:8GB,host=3MiB:12.59MiB");
});

test("a device is close to its watermark when little more than that is free", () => {
  const close = (bytes) => closeToMark([{ ...GPU, free_bytes: bytes }]).length === 1;
  assert.ok(close(5.5 * MIB) && close(0) && !close(5.6 * MIB));
  assert.deepEqual(closeToMark([{ ...GPU, free_bytes: 0, watermark: { low_bytes: 0, high_bytes: 0 } }]), []);
  assert.equal(closeToMark([{ ...RAM, free_bytes: 2 * GIB }]).length, 1);
});

const withMark = (more) => ({ ...barsOf({ devices: [GPU] }, () => "")[0], mark: { ...MARK, ...more } });

test("a bar says its marks in the units in which they were written", () => {
  const list = makeDocument().createElement("ul");
  makeBars(list, ACTIONS)([withMark({ low_text: "7.8%", high_text: "8MiB" })]);
  assert.ok(list.find({ text: "Watermark: keeps 7.8% (5.0M) to 8 MiB free" }));
});

test("both marks have a handle that tells its value and limits, and are applied once when they are let go", async () => {
  const asked = [];
  const bar = withMark({ high_text: "12.5%" });
  const sliders = makeSliders(makeDocument(), bar, async (marks) => (asked.push(marks), false));
  sliders.fill(bar);
  const [high, low] = sliders.element.all(({ attributes }) => attributes.role === "slider");
  const values = (handle) => ["now", "min", "max"].map((name) => handle.getAttribute(`aria-value${name}`)).join();
  assert.deepEqual([low, high].map((handle) => handle.getAttribute("aria-label")), ["Low mark of gpu:0", "High mark of gpu:0"]);
  assert.equal(low.getAttribute("aria-valuetext"), "Eviction starts when less than 5.0M is free");
  assert.equal(high.getAttribute("aria-valuetext"), "Eviction stops when 12.5% (8.0M) is free");
  assert.deepEqual([values(high), values(low)], ["88,0,92", "92,88,100"]);
  await high.fire("pointerdown", { button: 0, pointerId: 1 });
  await high.fire("pointermove", { clientX: 200, pointerId: 1 });
  sliders.fill(bar); // a report comes meanwhile
  assert.equal(high.getAttribute("aria-valuetext"), "Eviction stops when 50% (32.0M) is free");
  assert.equal(low.getAttribute("aria-valuetext"), "Eviction starts when less than 5 MiB is free", "the other one stays, and is written now");
  assert.equal(asked.length, 0);
  await high.fire("pointerup");
  assert.deepEqual(asked, [{ low_bytes: 5 * MIB, high_bytes: 32 * MIB, low_text: "5MiB", high_text: "50%", source: "default" }]);
  assert.match(high.getAttribute("aria-valuetext"), /12\.5%/, "it was refused");
  for (const key of ["ArrowLeft", "ArrowLeft", "x"]) await low.fire("keydown", { key });
  assert.equal(asked.length, 1);
  await low.fire("keyup", { key: "ArrowLeft" });
  assert.deepEqual([asked.length, asked[1].low_text, asked[1].high_text], [2, "6.28MiB", "12.5%"]);
  await low.fire("keydown", { key: "Home" });
  await low.fire("keydown", { key: "Escape" });
  await low.fire("keyup", { key: "Home" });
  await low.fire("blur");
  assert.equal(asked.length, 2, "Escape takes it back");
  sliders.fill(withMark({ source: "set" }));
  await low.fire("keydown", { key: "Home" });
  await low.fire("keyup", { key: "Home" });
  assert.equal(asked.length, 2, "a node has set it");
  assert.equal(high.getAttribute("aria-disabled"), "true");
});

test("a mark that was let go is applied once, also where the focus leaves it before the server has answered", async () => {
  const answers = [];
  const bar = withMark({});
  const sliders = makeSliders(makeDocument(), bar, () => new Promise((resolve) => answers.push(resolve)));
  sliders.fill(bar);
  const low = sliders.element.find({ name: "hw-low" });
  await low.fire("keydown", { key: "ArrowLeft" });
  const letGo = low.fire("keyup", { key: "ArrowLeft" });
  void low.fire("blur");
  assert.equal(answers.length, 1);
  answers[0](true);
  await letGo;
  await low.fire("pointerdown", { button: 0, pointerId: 1 });
  await low.fire("pointerup");
  assert.equal(answers.length, 1, "it was not moved");
  await low.fire("keydown", { key: "ArrowLeft" });
  void low.fire("keyup", { key: "ArrowLeft" });
  assert.equal(answers.length, 2);
});

test("a row says where a component is, when it is used, and which node shows it", () => {
  const [row] = rowsOf({ components: [PART], loaders: [{ node_id: "5:7", workflow_id: "w", components: ["flux"] }] }, PAGE);
  assert.deepEqual([row.size, row.where, row.last_use, row.next_use], ["50.0M", "30.0M gpu:0, 1.0G pinned RAM", "at 12", "not known"]);
  assert.deepEqual(row.nodes, [{ id: "5:7", label: HOSTILE }, { id: "1", label: "Loader" }]);
  const told = (more) => rowsOf({ components: [{ ...PART, ...more }] }, PAGE)[0];
  assert.deepEqual([0, 1, 3].map((next_use) => told({ next_use }).next_use), ["now", "in the next step", "in 3 steps"]);
  assert.deepEqual([told({ last_use_s: null }).last_use, told({ leased: true }).last_use], ["never", "now"]);
  assert.equal(told({ last_use_s: null, engine: "core" }).last_use, "not known", "nothing tells of uses before the first run with a node of ours");
  assert.equal(told({ tiers: {}, plan: { tier: "disk" } }).where, "disk");
  assert.equal(told({ tiers: { pinned: MIB }, plan: { tier: "pinned", file_bytes: 2 * MIB } }).where, "1.0M pinned RAM, 2.0M disk");
  assert.equal(told({ tiers: {} }).where, "not loaded");
  assert.equal(told({ tiers: { host: MIB } }).isOnDevice, false);
  assert.equal(told({ workflow_id: "other" }).elsewhere, "in another workflow");
  assert.equal(told({ node_id: "99" }).elsewhere, "no node of this workflow");
  assert.match(told({ moved: true, plan: { placement: "flux=cpu" } }).notes.join(), /Moved to cpu on request\. The node that loads it is not changed\./);
});

test("what can be asked to leave has buttons, also where another loader made it; only what we move can be moved", () => {
  const can = (engine) => rowsOf({ components: [{ ...PART, engine }] }, PAGE).map((row) => [row.canRelease, row.canMove, row.notes.join(" ")])[0];
  assert.deepEqual(["blocks", "dynamic", "core", "registered", "kept"].map((engine) => can(engine).slice(0, 2)), [[true, true], [true, false], [true, false], [true, false], [false, false]]);
  assert.match(can("core")[2], /another loader made it.* choose its device in its loader/);
  assert.match(can("dynamic")[2], /dynamic VRAM.* choose its device in its loader/);
  assert.match(can("registered")[2], /another pack, which frees it/);
  assert.match(can("kept")[2], /“Release idle models” drops them/);
  assert.equal(can("blocks")[2], "");
});

test("what is on devices comes first, the largest first", () => {
  const parts = [["ram", {}, 90], ["small", { "gpu:0": MIB }, 1], ["large", { "gpu:0": 9 * MIB }, 9]];
  const components = parts.map(([id, tiers, size]) => ({ ...PART, id, tiers, total_bytes: size * MIB, staging_bytes: {} }));
  assert.deepEqual(rowsOf({ components }, PAGE).map((row) => row.id), ["large", "small", "ram"]);
});

const THREE = [["small", 1, 30, 2], ["unknown", null, null, null], ["large", 9, 20, 1], ["middle", 5, 20, 0]].map(([id, size, last_use_s, next_use]) => (
  { ...PART, id, tiers: {}, total_bytes: size && size * MIB, last_use_s, next_use }
));

test("rows are sorted by size and by use, and what is not known comes last in both directions", () => {
  const rows = rowsOf({ components: THREE }, PAGE);
  const ids = (by, isRising) => sorted(rows, { by, isRising }).map((row) => row.id);
  assert.deepEqual(ids("size", false), ["large", "middle", "small", "unknown"]);
  assert.deepEqual(ids("size", true), ["small", "middle", "large", "unknown"]);
  assert.deepEqual(ids("last_use", false), ["small", "large", "middle", "unknown"], "equal ones keep their order");
  assert.deepEqual(ids("next_use", true), ["middle", "large", "small", "unknown"]);
  assert.equal(sorted(rows, null), rows);
  const leased = rowsOf({ components: [...THREE, { ...PART, id: "used now", last_use_s: 1, leased: true }] }, PAGE);
  assert.equal(sorted(leased, { by: "last_use", isRising: false })[0].id, "used now");
});

test("a column sorts, then the other way, then not at all", () => {
  const first = nextOrder(null, "size");
  assert.deepEqual(first, { by: "size", isRising: false });
  assert.deepEqual(nextOrder(first, "next_use"), { by: "next_use", isRising: true }, "another column begins anew");
  const second = nextOrder(first, "size");
  assert.deepEqual([second, nextOrder(second, "size")], [{ by: "size", isRising: true }, null]);
});

test("the components are a table with names of its columns and rows, which sorts and stays sorted", async () => {
  const { element, show } = makeComponentTable(makeDocument(), ACTIONS);
  show(rowsOf({ components: THREE }, PAGE));
  assert.deepEqual([element.tag, element.getAttribute("aria-label")], ["table", "Components"]);
  const headings = element.all(({ tag, attributes }) => tag === "th" && attributes.scope === "col");
  assert.deepEqual(headings.map((cell) => cell.textContent), ["Component", "Node", "Where", "Precision", "Last use", "Next use", "Size", "Actions"]);
  assert.deepEqual(headings.map((cell) => cell.getAttribute("aria-sort")), [null, null, null, null, "none", "none", "none", null]);
  const ids = () => element.all(({ attributes }) => attributes.scope === "row").map((cell) => cell.textContent);
  assert.deepEqual(ids(), ["large", "middle", "small", "unknown"]);
  const size = headings.at(-2);
  for (const [told, wanted] of [["descending", "large"], ["ascending", "small"], ["none", "large"], ["descending", "large"]]) {
    await size.children[0].fire("click");
    assert.deepEqual([size.getAttribute("aria-sort"), ids()[0]], [told, wanted]);
  }
  show(rowsOf({ components: [...THREE, { ...PART, id: "huge", tiers: {}, total_bytes: GIB }] }, PAGE));
  assert.equal(ids()[0], "huge", "the next report is sorted, too");
  for (const row of element.all(({ attributes }) => attributes.class === "hw-component-row")) {
    assert.deepEqual(row.children.slice(1).map((cell) => cell.getAttribute("data-label")), headings.slice(1).map((cell) => cell.textContent));
  }
  show([]);
  assert.ok(element.hidden);
});

test("a node inside of a subgraph is found, and one that is gone is not", () => {
  assert.equal(nodeAt(ROOT, "5:7").id, 7);
  assert.equal(nodeAt(ROOT, "5:8"), undefined);
  assert.equal(nodeAt(ROOT, "1:7"), undefined);
});

test("buttons act once at a time, work again after that, and pass on what is shown now", async () => {
  const done = [];
  let end;
  const actions = { ...ACTIONS, release: (id) => (done.push(["release", id]), new Promise((resolve) => (end = resolve))), keep: (...asked) => done.push(["keep", ...asked]) };
  const { element: list, show } = makeComponentTable(makeDocument(), actions);
  const rows = (more) => rowsOf({ components: [{ ...PART, ...more }] }, PAGE);
  show(rows());
  const [release, keep] = ["Release", "Keep"].map((text) => list.find({ text }));
  const first = release.fire("click");
  await release.fire("click");
  assert.deepEqual(done, [["release", "flux"]]);
  end();
  await first;
  const again = release.fire("click");
  end();
  await again;
  assert.equal(done.length, 2);
  await keep.fire("click");
  show(rows({ kept: true }));
  assert.equal(list.find({ text: "Keep" }), keep, "a row keeps its element, and so the focus");
  assert.equal(keep.getAttribute("aria-pressed"), "true");
  await keep.fire("click");
  assert.deepEqual(done.slice(2), [["keep", "flux", true], ["keep", "flux", false]]);
  show(rows({ tiers: {} }));
  await release.fire("click");
  assert.equal(done.length, 4, "nothing is left to release");
  show([]);
  assert.equal(list.find({ text: "Release" }), undefined);
});

const EVENT = { t_s: 1, kind: "evict", component: "flux", bytes: 3 * MIB, device: "gpu:0", reason: "to make room", component_kind: "", to: "pinned", run_id: "r1", node_id: "3" };

test("events name their run and node, the newest first, and are found by words and kind", () => {
  const report = { runs: [{ run_id: "r1", name: "first" }], nodes: [{ run_id: "r1", node_id: "3", title: "Sampler" }] };
  const lines = linesOf([EVENT, { ...EVENT, t_s: 2, kind: "load", run_id: "", node_id: null, bytes: 0 }], report, (seconds) => `at ${seconds}`);
  assert.deepEqual(lines.map((line) => [line.time, line.what, line.when]), [["at 2", "flux gpu:0", ""], ["at 1", "flux gpu:0 3.0M", "run first, Sampler"]]);
  const found = (words, kind = "") => filtered(lines, { words, kind }).map((line) => line.kind);
  assert.deepEqual([found(""), found("ROOM sampler"), found("room nothing"), found("", "load"), found("sampler", "load")], [["load", "evict"], ["evict"], [], ["load"], []]);
});

test("a run that has no name of its own is told by the begin of its id", () => {
  const [id, workflow] = ["8250cd05-0000-4000-8000-000000000000", "74c9bb80-4881-4440-9e6a-21e4cf4ffce0"];
  const told = (run_id, runs) => linesOf([{ ...EVENT, run_id, node_id: null }], { runs }, String)[0].when;
  assert.equal(told(id, [{ run_id: id, name: workflow }]), "run 8250cd05");
  assert.equal(told(id, []), "run 8250cd05");
  assert.equal(told("A", []), "run A");
});

test("the filter keeps its kind while events come", async () => {
  const { element, show } = makeEvents(makeDocument());
  const lines = linesOf([EVENT, { ...EVENT, t_s: 2, kind: "load" }], {}, String);
  show(lines);
  const kinds = element.all(({ tag }) => tag === "select")[0];
  kinds.value = "load";
  await kinds.fire("change");
  show(lines);
  assert.equal(kinds.value, "load");
  assert.equal(element.find({ name: "hw-events" }).children.length, 1);
  assert.equal(element.find({ role: "status" }).textContent, "1 of 2 events");
});

test("kinds of events are in the user's language, in the list, in its filter and in what is found by words", () => {
  useTexts({ xx: { highwater: { panel: { event_kind: { evict: "Auslagern" } } } }, en: {} }, "xx");
  const lines = linesOf([EVENT], {}, String);
  assert.equal(filtered(lines, { words: "auslagern", kind: "evict" }).length, 1);
  const { element, show } = makeEvents(makeDocument());
  show(lines);
  assert.equal(element.find({ name: "hw-kind" }).textContent, "Auslagern");
  assert.deepEqual(element.all(({ tag }) => tag === "option").map((option) => [option.getAttribute("value"), option.textContent])[1], ["evict", "Auslagern"]);
  useEnglish();
});

test("the panel shows hostile names as text, and advice only where there is some", () => {
  const panel = makePanel(makeDocument(), ACTIONS);
  const known = { events: [{ ...EVENT, component: HOSTILE }], root: ROOT, clock: String };
  const report = { devices: [GPU, RAM], components: [{ ...PART, id: HOSTILE, node_id: "5:7" }], advice: [toldAs(HOSTILE), toldAs("second")] };
  panel.show({ ...known, report });
  assert.equal(panel.element.all((element) => element.tag === "img").length, 0);
  assert.ok(panel.element.all((element) => element.textContent === HOSTILE).length >= 4);
  const advice = panel.element.find({ name: "hw-advice" });
  assert.deepEqual([advice.children.length, advice.hidden], [2, false]);
  assert.equal(advice.children[1].textContent, "second");
  panel.show({ ...known, report: { ...report, advice: [{ text: "in English", key: "advice.on_cpu", values: { name: HOSTILE } }] } });
  assert.equal(advice.children[0].textContent, `${HOSTILE} computes on the CPU, as its placement says`);
  assert.ok(panel.element.find({ role: "img" }).getAttribute("aria-label").includes(`${HOSTILE} 30.0M`));
  panel.show({ ...known, report: { ...report, advice: undefined, components: [] } });
  const timeline = panel.element.all((element) => element.attributes["aria-label"] === "Timeline of the last runs")[0];
  assert.ok(advice.hidden && timeline.hidden);
  assert.ok(!panel.element.find({ text: "No model is loaded. Models appear here when a workflow runs." }).hidden);
});

test("every text of the panel is there", () => {
  const panel = makePanel(makeDocument(), ACTIONS);
  panel.show({ report: { devices: [GPU, RAM], components: [{ ...PART, moved: true }] }, events: [EVENT], root: ROOT, clock: String });
  const keys = panel.element.all((element) => /^panel\./.test(element.textContent) || Object.values(element.attributes).some((value) => /^panel\./.test(value)));
  assert.deepEqual(keys.map((element) => element.textContent), []);
});

test("a component keeps its colour", () => {
  const colourOf = makeColours();
  const first = colourOf("a");
  assert.notEqual(colourOf("b"), first);
  assert.equal(colourOf("a"), first);
});
