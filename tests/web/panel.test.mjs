// Unit tests of web/panel/; run by node --test, which test_scripts.py starts.
import assert from "node:assert/strict";
import { test } from "node:test";
import { barsOf } from "../../web/panel/bars.js";
import { makeComponentTable } from "../../web/panel/component_table.js";
import { nextOrder, nodeAt, rowsOf, sorted } from "../../web/panel/components.js";
import { filtered, linesOf, makeEvents, withMore } from "../../web/panel/events.js";
import { closeToMark, makeSlider, marksOf, movedBy, movedTo } from "../../web/panel/marks.js";
import { makeColours, makePanel } from "../../web/panel/view.js";
import { useEnglish } from "./english.mjs";
import { makeDocument } from "./fake_document.mjs";
import { useTexts } from "../../web/texts.js";

const MIB = 2 ** 20;
const GIB = 2 ** 30;
const HOSTILE = "<img src=x onerror=alert(1)>";
const MARK = { low_bytes: 5 * MIB, high_bytes: 8 * MIB, source: "default" };
const GPU = {
  name: "gpu:0", total_bytes: 64 * MIB, free_bytes: 14 * MIB, watermark: MARK, own_watermark: MARK, managed_bytes: 40 * MIB, other_bytes: 0, peak_bytes: 0,
  lent: null, neighbours: [], unshared: null, activation_bytes: 6 * MIB, pinned: null,
};
const RAM = {
  ...GPU, name: "cpu", total_bytes: 16 * GIB, free_bytes: 10 * GIB, watermark: { low_bytes: 0, high_bytes: 0 }, own_watermark: { low_bytes: 2 * GIB, high_bytes: 3 * GIB, source: "default" },
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

test("a moved mark keeps its distance and stays on the device", () => {
  const marks = { low_bytes: 5 * MIB, high_bytes: 8 * MIB };
  assert.deepEqual(movedTo(marks, 20 * MIB, 64 * MIB), { low_bytes: 20 * MIB, high_bytes: 23 * MIB });
  assert.deepEqual(movedTo(marks, 90 * MIB, 64 * MIB), { low_bytes: 61 * MIB, high_bytes: 64 * MIB });
  assert.deepEqual(movedTo(marks, -MIB, 64 * MIB), { low_bytes: 0, high_bytes: 3 * MIB });
  assert.equal(movedBy(marks, "a", 64 * MIB), null);
  assert.equal(movedBy(marks, "toString", 64 * MIB), null);
  assert.ok(movedBy(marks, "ArrowRight", 64 * MIB).low_bytes < marks.low_bytes && movedBy(marks, "ArrowDown", 64 * MIB).low_bytes > marks.low_bytes);
  assert.equal(movedBy(marks, "Home", 64 * MIB).high_bytes, 64 * MIB);
  assert.equal(movedBy(marks, "End", 64 * MIB).low_bytes, 0);
});

test("new marks of one device leave those that are set for others", () => {
  const set = { low_bytes: 3 * MIB, high_bytes: 4.5 * MIB, source: "setting" };
  const devices = [{ ...RAM, own_watermark: set }, GPU, { ...GPU, name: "gpu:1", own_watermark: set }];
  assert.equal(marksOf(devices, "gpu:0", { low_bytes: MIB, high_bytes: 2 * MIB }), "gpu:0=1MiB:2MiB,gpu:1=3MiB:4.5MiB,host=3MiB:4.5MiB");
  assert.equal(marksOf(devices, "host", movedTo(set, 12.59 * MIB, GIB)), "gpu:1=3MiB:4.5MiB,host=12.59MiB:14.09MiB");
});

test("a device is close to its watermark when little more than that is free", () => {
  const close = (bytes) => closeToMark([{ ...GPU, free_bytes: bytes }]).length === 1;
  assert.ok(close(5.5 * MIB) && close(0) && !close(5.6 * MIB));
  assert.deepEqual(closeToMark([{ ...GPU, free_bytes: 0, watermark: { low_bytes: 0, high_bytes: 0 } }]), []);
  assert.equal(closeToMark([{ ...RAM, free_bytes: 2 * GIB }]).length, 1);
});

test("the handle of a mark tells its value, and is applied once when it is let go", async () => {
  const asked = [];
  const bar = { ...barsOf({ devices: [GPU] }, () => "")[0] };
  const slider = makeSlider(makeDocument(), bar, async (marks) => (asked.push(marks), false));
  slider.fill(bar);
  const handle = slider.element.find({ role: "slider" });
  assert.equal(handle.getAttribute("aria-valuetext"), "Watermark: keeps 5.0M to 8.0M free");
  assert.equal(handle.getAttribute("aria-valuenow"), "92");
  await handle.fire("pointerdown", { button: 0, pointerId: 1 });
  await handle.fire("pointermove", { clientX: 200, pointerId: 1 });
  slider.fill(bar); // a report comes meanwhile
  assert.equal(handle.getAttribute("aria-valuetext"), "Watermark: keeps 32.0M to 35.0M free");
  assert.equal(asked.length, 0);
  await handle.fire("pointerup");
  assert.deepEqual(asked, [{ low_bytes: 32 * MIB, high_bytes: 35 * MIB }]);
  assert.match(handle.getAttribute("aria-valuetext"), /5\.0M to 8\.0M/, "it was refused");
  for (const key of ["ArrowLeft", "ArrowLeft", "x"]) await handle.fire("keydown", { key });
  assert.equal(asked.length, 1);
  await handle.fire("keyup", { key: "ArrowLeft" });
  assert.equal(asked.length, 2);
  assert.ok(Math.abs(asked[1].low_bytes - 6.28 * MIB) < MIB / 10);
  await handle.fire("keydown", { key: "Home" });
  await handle.fire("keydown", { key: "Escape" });
  await handle.fire("keyup", { key: "Home" });
  await handle.fire("blur");
  assert.equal(asked.length, 2, "Escape takes it back");
  slider.fill({ ...bar, mark: { ...MARK, source: "set" } });
  await handle.fire("keydown", { key: "Home" });
  await handle.fire("keyup", { key: "Home" });
  assert.equal(asked.length, 2, "a node has set it");
  assert.equal(handle.getAttribute("aria-disabled"), "true");
});

test("a row says where a component is, when it is used, and which node shows it", () => {
  const [row] = rowsOf({ components: [PART], loaders: [{ node_id: "5:7", workflow_id: "w", components: ["flux"] }] }, PAGE);
  assert.deepEqual([row.size, row.where, row.last_use, row.next_use], ["50.0M", "30.0M gpu:0, 1.0G pinned RAM", "at 12", "not known"]);
  assert.deepEqual(row.nodes, [{ id: "5:7", label: HOSTILE }, { id: "1", label: "Loader" }]);
  const told = (more) => rowsOf({ components: [{ ...PART, ...more }] }, PAGE)[0];
  assert.deepEqual([0, 1, 3].map((next_use) => told({ next_use }).next_use), ["now", "in the next step", "in 3 steps"]);
  assert.deepEqual([told({ last_use_s: null }).last_use, told({ leased: true }).last_use], ["never", "now"]);
  assert.equal(told({ tiers: {}, plan: { tier: "disk" } }).where, "disk");
  assert.equal(told({ tiers: {} }).where, "not loaded");
  assert.equal(told({ tiers: { host: MIB } }).isOnDevice, false);
  assert.equal(told({ workflow_id: "other" }).elsewhere, "in another workflow");
  assert.equal(told({ node_id: "99" }).elsewhere, "no node of this workflow");
  assert.match(told({ moved: true, plan: { placement: "flux=cpu" } }).notes.join(), /Moved to cpu on request\. The node that loads it is not changed\./);
});

test("what can be asked to leave has buttons, also where another loader made it; only what we move can be moved", () => {
  const can = (engine) => rowsOf({ components: [{ ...PART, engine }] }, PAGE).map((row) => [row.canRelease, row.canMove, row.notes.join(" ")])[0];
  assert.deepEqual(["blocks", "dynamic", "core", "kept"].map((engine) => can(engine).slice(0, 2)), [[true, true], [true, false], [true, false], [false, false]]);
  assert.match(can("core")[2], /another loader made it.* choose its device in its loader/);
  assert.match(can("dynamic")[2], /dynamic VRAM.* choose its device in its loader/);
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

test("only newer events are added, and the oldest are forgotten", () => {
  const at = (t_s) => ({ ...EVENT, t_s });
  assert.deepEqual(withMore([at(1), at(2)], [at(2), at(3)]).map((event) => event.t_s), [1, 2, 3]);
  assert.equal(withMore([], Array.from({ length: 1200 }, (_, index) => at(index))).at(0).t_s, 200);
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
