// Takes the pictures of the page that README and the help pages show; scripts/take_pictures.py starts it.
// usage: take_pictures.mjs ADDRESS CHROMIUM FOLDER [GRAPHS]   (the nodes' pictures; without, those of README)
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { inPage, onCanvas, openPage } from "./open_page.mjs";

const [base, executablePath, folder, graphs] = process.argv.slice(2);
if (graphs) await takeNodes(JSON.parse(await readFile(graphs, "utf8")));
else await takePage();

async function takePage() {
  const LOADER = "HighwaterLoadPipeline";
  const { browser, page, shoot, eventually, setting, widgets } = await openPage(base, executablePath, folder);
  await page.setViewportSize({ width: 1440, height: 700 });
  await page.goto(base);
  await eventually("the example is open", () => window.app?.rootGraph?.nodes?.map((node) => node.type) ?? [], (types) => types.includes(LOADER));
  await setting("Comfy.VueNodes.Enabled", true);
  await setting("Comfy.Minimap.Visible", false);
  await setting("Comfy.Graph.CanvasInfo", false);
  await widgets(LOADER, { profile: "12MiB", precision: "fp8 scaled" });
  await page.getByRole("button", { name: "Run", exact: true }).first().click();
  await eventually("the loader streams", inPage, (badges) => /^streams /.test(badges[LOADER]));
  await eventually("the image is there", () => document.querySelectorAll("[data-node-id] img").length, (number) => number > 0);
  await eventually("the report is there", () => document.querySelector(".highwater-text")?.textContent ?? "", (text) => text.includes("Last events"));
  await page.waitForTimeout(6000); // until the notice of the run is gone;
  await shoot("serve");
  // The panel beside the same run.
  await page.getByRole("button", { name: "Memory (Highwater)" }).click();
  await eventually("the panel has the components", () => document.querySelectorAll(".hw-panel .hw-component-row").length, (number) => number >= 4);
  await eventually("the panel has the events", () => document.querySelectorAll(".hw-panel .hw-events li").length, (number) => number > 0);
  await page.setViewportSize({ width: 1440, height: 1080 });
  await page.mouse.move(900, 700); // away from the tab, which has a tooltip
  await page.evaluate(() => app.canvas.ds.reset());
  await page.keyboard.press("."); // all nodes in sight
  await page.waitForTimeout(1500);
  await shoot("panel");
  await browser.close();
}

/** One picture of each node, after a run of its graph, in the canvas renderer and at twice the size. */
async function takeNodes(pictures) {
  const [LEFT, TOP, MARGIN, ABOVE] = [420, 160, 8, 52]; // above a node are its title and its badges
  const { browser, page, eventually } = await openPage(base, executablePath, folder, 2);
  await page.setViewportSize({ width: 1500, height: 1000 });
  const off = ["Comfy.VueNodes.Enabled", "Comfy.Minimap.Visible", "Comfy.Graph.CanvasInfo", "Comfy.Graph.CanvasMenu"];
  for (const [id, value] of [["Comfy.TutorialCompleted", true], ...off.map((id) => [id, false])]) {
    await fetch(`${base}/api/settings/${id}`, { method: "POST", body: JSON.stringify(value) });
  }
  await page.goto(base);
  await eventually("page is ready", () => Boolean(window.app?.extensionManager && window.app.rootGraph), Boolean);
  await page.addStyleTag({ content: ".p-toast, [data-testid='toast'] { display: none !important }" });
  await page.waitForTimeout(2000); // it opens a workflow of its own
  for (const [type, { graph, badge, text, width, height }] of Object.entries(pictures)) {
    await page.evaluate((graph) => app.loadApiJson(graph, "help"), graph);
    // What comes from an API file has an id of zeros until it is saved and opened.
    await page.evaluate(() => app.loadGraphData({ ...app.rootGraph.serialize(), id: crypto.randomUUID() }));
    await page.evaluate(keepSeeds);
    const numRuns = await page.evaluate(outcomes).then((all) => all.length);
    await page.evaluate(() => app.queuePrompt(0));
    await eventually(`${type}: the run`, outcomes, (all) => all.length > numRuns);
    assert.ok((await page.evaluate(outcomes)).every((outcome) => outcome === "success"), `${type}: the run failed`);
    await eventually(`${type}: its badge`, onCanvas, (badges) => !badge || badges[type] === badge);
    await eventually(`${type}: its text`, texts, (texts) => (texts[type] ?? "").includes(text));
    await page.waitForTimeout(1500);
    await page.evaluate(place, [type, LEFT, TOP, width, height]);
    await page.mouse.move(5, 995);
    await page.waitForTimeout(1500); // until all is drawn there
    const size = await page.evaluate(growToText, type);
    await page.waitForTimeout(1500);
    const above = ABOVE + MARGIN;
    const clip = { x: LEFT - MARGIN, y: TOP - above, width: size[0] + 2 * MARGIN, height: size[1] + above + MARGIN };
    await page.screenshot({ path: `${folder}/${type}.png`, clip });
  }
  await browser.close();
}

// Read and done in the page, which sees nothing of this module.
async function outcomes() {
  return Object.values(await (await fetch("/api/history")).json()).map((run) => run.status.status_str);
}
function texts() {
  const told = (node) => node.widgets?.find((widget) => widget.element?.classList.contains("highwater-text"))?.element.textContent;
  return Object.fromEntries(app.rootGraph.nodes.map((node) => [node.type, told(node) ?? ""]));
}
/** Without this every run has seeds of its own. */
function keepSeeds() {
  const widgets = app.rootGraph.nodes.flatMap((node) => node.widgets ?? []);
  for (const widget of widgets) if (widget.name === "control_after_generate") widget.value = "fixed";
}
/** Make a node as high as its text needs; returns its size. */
function growToText(type) {
  const node = app.rootGraph.nodes.find((node) => node.type === type);
  const box = node.widgets?.find((widget) => widget.element?.classList.contains("highwater-text"))?.element;
  if (box && box.scrollHeight > box.clientHeight) node.setSize([node.size[0], node.size[1] + box.scrollHeight - box.clientHeight]);
  app.canvas.setDirty(true, true);
  return [...node.size];
}
/** Draw a node alone at this place of the window, with links to both sides. */
function place([type, left, top, width, height]) {
  const node = app.rootGraph.nodes.find((node) => node.type === type);
  const canvas = app.canvas.canvas.getBoundingClientRect();
  const isLinked = (other) => [...app.rootGraph.links.values()].some((link) => [link.origin_id, link.target_id].includes(other.id) && [link.origin_id, link.target_id].includes(node.id));
  for (const other of app.rootGraph.nodes) other.pos = [other.order < node.order ? -900 : 1400, isLinked(other) ? other.order * 40 : 9000];
  node.pos = [0, 0];
  node.setSize([width, Math.max(height, height ? 0 : node.computeSize()[1])]);
  app.canvas.deselectAll();
  app.canvas.ds.scale = 1;
  app.canvas.ds.offset[0] = left - canvas.left;
  app.canvas.ds.offset[1] = top - canvas.top;
  app.canvas.setDirty(true, true);
}
