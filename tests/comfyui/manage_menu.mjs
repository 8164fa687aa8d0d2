// "Manage with Highwater" in ComfyUI's own page, in both renderers and in a subgraph; test_manage_menu.py starts it.
// usage: manage_menu.mjs ADDRESS CHROMIUM SCREENSHOTS WORKFLOW.json   (API format; one loader of each class named here)
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { expectDetail, inPage, onCanvas, openPage } from "../web/open_page.mjs";

const [base, executablePath, screenshots, workflow] = process.argv.slice(2);
const ENTRY = "Manage with Highwater";
const CHECKPOINT = "CheckpointLoaderSimple";
const GGUF = "TestGGUFModel";
const MANAGERS = ["HighwaterManageModel", "HighwaterManageCLIP", "HighwaterManageVAE"];
const ON_DEVICE = /^[1-9][\d.]*[KMG](\/[\d.]+[KMG])? gpu:0$/;

const { browser, page, errors, shoot, eventually, ready, setting } = await openPage(base, executablePath, screenshots);

/** The open graph: node classes, links by classes and slots, and pairs of nodes that cover each other. */
const graphNow = () => {
  const graph = app.canvas.graph;
  const name = (id) => graph.getNodeById(id)?.type ?? String(id);
  const links = [...graph.links.values()].map((link) => `${name(link.origin_id)}:${link.origin_slot} ${name(link.target_id)}:${link.target_slot}`);
  const boxes = graph.nodes.map(({ type, pos, size }) => [type, pos[0], pos[1] - 30, pos[0] + size[0], pos[1] + size[1]]);
  const covers = (a, b) => a[1] < b[3] && b[1] < a[3] && a[2] < b[4] && b[2] < a[4];
  const covered = boxes.flatMap((a, at) => boxes.slice(at + 1).filter((b) => covers(a, b)).map((b) => `${a[0]} ${b[0]}`));
  return { types: graph.nodes.map((node) => node.type).sort(), links: links.sort(), covered };
};
const nodeOf = (type) => page.evaluate((type) => String(app.canvas.graph.nodes.find((node) => node.type === type).id), type);

/** Bring a node to the middle of the window and open its menu by a right click on its title. */
async function openMenu(type) {
  const id = await nodeOf(type);
  const place = await page.evaluate((id) => {
    const node = app.canvas.graph.getNodeById(id) ?? app.canvas.graph.getNodeById(Number(id));
    app.canvas.ds.scale = 0.8;
    app.canvas.ds.offset[0] = 700 / 0.8 - node.pos[0];
    app.canvas.ds.offset[1] = 400 / 0.8 - node.pos[1];
    app.canvas.setDirty(true, true);
    const canvas = app.canvas.canvas.getBoundingClientRect();
    return [canvas.left + 700 + 60, canvas.top + 400 - 10];
  }, id);
  await page.waitForTimeout(500);
  await page.mouse.click(...place, { button: "right" });
  await page.getByText("Properties Panel", { exact: true }).or(page.getByText("Node Info", { exact: true })).first().waitFor();
}
async function closeMenu() {
  await page.keyboard.press("Escape");
  await page.mouse.click(400, 820);
  await page.waitForTimeout(600); // two clicks on one place within 300 ms are a double click, which opens a search
}
async function manage(name, type) {
  await openMenu(type);
  await page.getByText(ENTRY, { exact: true }).first().waitFor();
  await shoot(name);
  await page.getByText(ENTRY, { exact: true }).first().click();
}
const outcomes = async () => Object.values(await (await fetch("/api/history")).json()).map((run) => run.status.status_str);
async function run() {
  const before = (await page.evaluate(outcomes)).length;
  await page.evaluate(() => app.queuePrompt(0));
  await eventually("a run", outcomes, (all) => all.length > before);
  assert.ok((await page.evaluate(outcomes)).every((outcome) => outcome === "success"));
}
const undo = async () => {
  await page.mouse.click(400, 820); // what was clicked last may be a field with an undo of its own
  await page.keyboard.press("Control+z");
};
const open = () => page.evaluate((graph) => app.loadGraphData({ ...graph, id: crypto.randomUUID() }), graph);
const without = (types) => (before) => before.types.every((type) => !types.includes(type));

for (const [id, value] of [["Comfy.TutorialCompleted", true], ["Comfy.VueNodes.Enabled", false], ["Comfy.Minimap.Visible", false]]) {
  await fetch(`${base}/api/settings/${id}`, { method: "POST", body: JSON.stringify(value) });
}
await page.goto(base);
await ready();
await page.evaluate((graph) => app.loadApiJson(graph, "test"), JSON.parse(await readFile(workflow, "utf8")));
// Without this every run has seeds of its own, and nothing is cached.
await page.evaluate(() => {
  for (const widget of app.rootGraph.nodes.flatMap((node) => node.widgets ?? [])) if (widget.name === "control_after_generate") widget.value = "fixed";
});
const graph = await page.evaluate(() => app.rootGraph.serialize());

for (const isVue of [false, true]) {
  const where = isVue ? "Nodes 2.0" : "canvas";
  const badges = isVue ? inPage : onCanvas;
  await setting("Comfy.VueNodes.Enabled", isVue);
  await page.evaluate(() => fetch("/api/free", { method: "POST", body: JSON.stringify({ unload_models: true, free_memory: true }) }));
  await open();
  await page.waitForTimeout(1000);
  const before = await page.evaluate(graphNow);

  // A loader of core's shows what it loaded, and that nobody manages it.
  await run();
  await eventually(`${where}: models that nobody manages`, badges, (all) => ON_DEVICE.test(all[CHECKPOINT]));
  await expectDetail(page, CHECKPOINT, /(?:[\d.]+M as stored\ngpu:0: [\d.]+M of weights\nnot managed\n[^]*){3}/);

  // One entry for the parts of a checkpoint: each gets its node, and every link leaves that.
  await manage(`manage_menu_${where}`, CHECKPOINT);
  await eventually(`${where}: a node for each part`, graphNow, (now) => MANAGERS.every((type) => now.types.includes(type)));
  await page.waitForTimeout(500);
  const after = await page.evaluate(graphNow);
  assert.deepEqual(after.covered, before.covered);
  const rewired = before.links.map((link) => link.replace(/^CheckpointLoaderSimple:(\d)/, (_, slot) => `${MANAGERS[slot]}:0`));
  assert.deepEqual(after.links, [...rewired, ...MANAGERS.map((type, slot) => `${CHECKPOINT}:${slot} ${type}:0`)].sort());
  await shoot(`managed_${where}`);
  await openMenu(CHECKPOINT);
  assert.equal(await page.getByText(ENTRY, { exact: true }).count(), 0, "offered again");
  await closeMenu();
  await openMenu(MANAGERS[0]);
  assert.equal(await page.getByText(ENTRY, { exact: true }).count(), 0, "offered for a node of ours");
  await closeMenu();

  // One step back, and all is as it was; one step forward.
  await undo();
  await eventually(`${where}: undone`, graphNow, without(MANAGERS));
  assert.deepEqual(await page.evaluate(graphNow), before);
  await page.keyboard.press("Control+y");
  await eventually(`${where}: done again`, graphNow, (now) => now.links.join() === after.links.join());

  // The next run is managed.
  await run();
  await eventually(`${where}: managed models`, badges, (all) => MANAGERS.every((type) => ON_DEVICE.test(all[type]) || /^RAM /.test(all[type])));
  await page.waitForTimeout(500);
  assert.deepEqual((await page.evaluate(graphNow)).covered, before.covered, "what a node says after a run covers another");
  await shoot(`managed_ran_${where}`);
  await expectDetail(page, MANAGERS[0], /gpu:0: [\d.]+M of weights[^]*\nin effect/);

  // In a subgraph: what leaves the loader there may leave the subgraph.
  await page.evaluate((type) => {
    const { subgraph } = app.rootGraph.convertToSubgraph(new Set(app.rootGraph.nodes.filter((node) => node.type === type)));
    app.canvas.openSubgraph?.(subgraph, app.rootGraph.nodes.find((node) => node.subgraph === subgraph));
    if (app.canvas.graph !== subgraph) app.canvas.setGraph(subgraph);
  }, GGUF);
  await eventually(`${where}: inside of a subgraph`, graphNow, (now) => now.types.join() === GGUF);
  await page.waitForTimeout(1000);
  await manage(`manage_in_subgraph_${where}`, GGUF);
  await eventually(`${where}: managed in the subgraph`, graphNow, (now) => now.types.length === 2);
  await page.waitForTimeout(500);
  const inside = await page.evaluate(graphNow);
  assert.deepEqual(inside.links, [`${MANAGERS[0]}:0 -20:0`, `${GGUF}:0 ${MANAGERS[0]}:0`].sort());
  assert.deepEqual(inside.covered, []);
  await shoot(`managed_in_subgraph_${where}`);
  await run();
  const report = async () => (await (await fetch("/api/highwater/report?only=components")).json()).components.map((part) => part.engine);
  await eventually(`${where}: the model of the subgraph is managed`, report, (engines) => engines.includes("blocks"));
  await page.evaluate(() => app.canvas.setGraph(app.rootGraph));
}
assert.deepEqual(errors, [], "errors in the page");
await browser.close();
