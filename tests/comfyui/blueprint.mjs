// The subgraph blueprint in ComfyUI's own page: found by search, inserted, set, run; test_blueprint.py starts it.
// usage: blueprint.mjs ADDRESS CHROMIUM SCREENSHOTS NAME WORKFLOW.json   (an example whose loaders it takes the place of)
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { inPage, onCanvas, openPage, without } from "../web/open_page.mjs";

const [base, executablePath, screenshots, name, workflow] = process.argv.slice(2);
const { browser, page, errors, shoot, eventually, ready, setting } = await openPage(base, executablePath, screenshots);
for (const [id, value] of [["Comfy.TutorialCompleted", true], ["Comfy.VueNodes.Enabled", false], ["Comfy.Minimap.Visible", false]]) {
  await fetch(`${base}/api/settings/${id}`, { method: "POST", body: JSON.stringify(value) });
}
await page.goto(base);
await ready();
const example = JSON.parse(await readFile(workflow, "utf8"));
const outcomes = async () => Object.values(await (await fetch("/api/history")).json()).map((run) => run.status.status_str);
const found = () => [...document.querySelectorAll("[role=option]")].map((option) => option.innerText.replace(/\s+/g, " "));

for (const [turn, isVue] of [true, false].entries()) {
  const where = isVue ? "Nodes 2.0" : "canvas";
  await setting("Comfy.VueNodes.Enabled", isVue);
  await page.evaluate((graph) => app.loadGraphData({ ...graph, id: crypto.randomUUID() }), example);
  await page.evaluate(() => app.extensionManager.command.execute("Workspace.SearchBox.Toggle"));
  await page.locator("input:focus").fill("load with profile");
  await eventually(`${where}: search`, found, (texts) => texts[0]?.startsWith(name));
  await shoot(`search_${where}`);
  await page.locator("[role=option]").first().click();
  // It follows the pointer until a click; a node that still does is taken away by the page as the next one comes.
  const carried = () => app.canvas.state.ghostNodeId;
  await eventually(`${where}: carried`, carried, (node) => node !== null);
  // A busy page misses a click at times.
  for (let x = 700; (await page.evaluate(carried)) !== null && x < 900; x += 5) {
    await page.mouse.move(x, 760, { steps: 4 });
    await page.mouse.down();
    await page.mouse.up();
    await page.waitForTimeout(500);
  }
  assert.equal(await page.evaluate(carried), null, `${where}: placed`);
  const subgraphs = () => app.rootGraph.nodes.filter((node) => node.subgraph).map((node) => [node.title, node.widgets.map((widget) => widget.name)]);
  await eventually(`${where}: inserted`, subgraphs, (all) => all.length === 1 && all[0][1].includes("profile"));

  // It takes the place of the three loaders; one profile is for all of them.
  const values = await page.evaluate(() => {
    const graph = app.rootGraph;
    const whole = graph.nodes.find((node) => node.subgraph);
    const of = (type) => graph.nodes.find((node) => node.type === type);
    for (const [slot, type] of [[0, "HighwaterLoadDiffusionModel"], [1, "HighwaterLoadTextEncoder"], [2, "HighwaterLoadVAE"]]) {
      for (const link of [...graph.links.values()].filter((link) => link.origin_id === of(type).id))
        whole.connect(slot, graph.getNodeById(link.target_id), link.target_slot);
      graph.remove(of(type));
    }
    whole.widgets.find((widget) => widget.name === "profile").value = "auto,diffusion=16MiB";
    return Object.fromEntries(whole.widgets.map((widget) => [widget.name, widget.value]));
  });
  assert.equal(values.unet_name, "highwater-tiny-flux.safetensors", JSON.stringify(values));
  const prompt = await page.evaluate(async () => (await app.graphToPrompt()).output);
  const loaders = Object.values(prompt).filter((node) => node.class_type.startsWith("HighwaterLoad"));
  assert.equal(loaders.length, 3);
  assert.ok(loaders.every((node) => node.inputs.profile === "auto,diffusion=16MiB" && node.inputs.precision === "as stored"), JSON.stringify(loaders));
  await page.evaluate(() => app.queuePrompt(0));
  await eventually(`${where}: a run`, outcomes, (all) => all.length === turn + 1);
  assert.ok((await page.evaluate(outcomes)).every((outcome) => outcome === "success"));
  const badge = (badges) => Object.entries(badges).find(([type]) => /^[0-9a-f-]{36}$/.test(type))?.[1];
  await eventually(`${where}: its badge`, isVue ? inPage : onCanvas, (badges) => /^streams \d/.test(badge(badges) ?? ""));
  await shoot(`blueprint_${where}`);
}
// The newest page says that it gives what is inside other ids, where the graph has them already.
assert.deepEqual(without(errors, /^LiteGraph: duplicate subgraph (node|link) ID \d+ remapped to \d+ \(\/assets\//), [], "errors in the page");
await browser.close();
