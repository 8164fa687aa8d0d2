// Looks at ComfyUI's own page as a user does, in both renderers; test_page.py starts it.
// usage: page.mjs ADDRESS CHROMIUM SCREENSHOTS WORKFLOW.json WAITING.json   (API format; the first has one of each
// node that is named here, the second waits for an interrupt)
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { answered, BEFORE_THE_SCRIPT, expectDetail, inPage, isIdle, onCanvas, OF_THE_TEST_PACK, openPage, REFUSED, SAVED, without } from "../web/open_page.mjs";

const [base, executablePath, screenshots, workflow, waiting] = process.argv.slice(2);
const LOADER = "HighwaterLoadDiffusionModel";
const SAMPLER = "KSampler";
const IN_RAM = /^RAM [1-9][\d.]*[KMG]( fp8)?$/;
const ON_DEVICE = /^[1-9][\d.]*[KMG] gpu:0$/;
const ADDED = /^\+[1-9][\d.]*[KMG] gpu:0$/;

const { browser, page, errors, shoot, eventually, ready, quiet, setting, widgets } = await openPage(base, executablePath, screenshots);
const isShown = (badges) => ON_DEVICE.test(badges[LOADER]) && ADDED.test(badges[SAMPLER]);
const isEmpty = (badges) => LOADER in badges && Object.values(badges).every((text) => text === "");
const notes = () => [...document.querySelectorAll(".highwater-text")].map((box) => box.textContent).join("\n");
const run = () => page.evaluate(() => app.queuePrompt(0));

for (const [id, value] of [["Comfy.TutorialCompleted", true], ["Comfy.VueNodes.Enabled", false]]) {
  await fetch(`${base}/api/settings/${id}`, { method: "POST", body: JSON.stringify(value) });
}
// The page's first question fails, as it does when the server is slow to start: it says so, and goes on.
const isReport = (url) => url.pathname.endsWith("/highwater/report");
await page.route(isReport, (route) => route.abort());
await page.goto(base);
await page.getByText("Memory badges may be out of date").first().waitFor();
await page.unroute(isReport);
await ready();
await page.evaluate((graph) => app.loadApiJson(graph, "test"), JSON.parse(await readFile(workflow, "utf8")));
// What comes from an API file has an id of zeros until it is saved and opened.
await page.evaluate(() => app.loadGraphData({ ...app.rootGraph.serialize(), id: crypto.randomUUID() }));
await eventually("canvas before", onCanvas, isEmpty);
// Without this every run has seeds of its own, and nothing is cached.
const seeds = () => app.rootGraph.nodes.flatMap((node) => node.widgets ?? []).filter((widget) => widget.name === "control_after_generate");
await page.evaluate(`(${seeds})().forEach((widget) => { widget.value = "fixed"; })`);
await run();
await eventually("canvas after", onCanvas, isShown);
await page.waitForTimeout(500);
await shoot("comfyui_canvas");
await expectDetail(page, LOADER, /^tiny_flux, [\d.]+M as stored\ngpu:0: [\d.]+M of weights\n[^]*\nin effect/);
await expectDetail(page, SAMPLER, /^This node, [\d.]+ s\ngpu:0: [\d.]+M of weights that it used, [\d.]+K of activations\n/);

// The same values in the other renderer; they change with the next run.
await setting("Comfy.VueNodes.Enabled", true);
await eventually("Nodes 2.0 after the switch", inPage, isShown);
await widgets(LOADER, { precision: "fp8 scaled", placement: "gpu:7" });
await run();
await eventually("Nodes 2.0 in fp8", inPage, isShown);
await eventually("what the loader says", notes, (text) => text.includes("this machine has no gpu:7"));
// What leaves the device is seen at once, without a run; the next run loads it again.
await eventually("nothing runs", isIdle, Boolean);
await page.evaluate(() => fetch("/api/highwater/free", { method: "POST", headers: { "Content-Type": "application/json" }, body: "{}" }));
await eventually("Nodes 2.0 in RAM", inPage, (badges) => / fp8$/.test(badges[LOADER]) && IN_RAM.test(badges[LOADER]));
await page.waitForTimeout(500);
await shoot("comfyui_nodes2");
// Over two devices, and back.
await widgets(LOADER, { placement: "gpu:0&gpu:1" });
await run();
const onTwo = /^2 GPUs [1-9][\d.]*\+[1-9][\d.]*[KMG]$/;
await eventually("Nodes 2.0 on two devices", inPage, (badges) => onTwo.test(badges[LOADER]));
await eventually("canvas on two devices", onCanvas, (badges) => onTwo.test(badges[LOADER]));
await widgets(LOADER, { placement: "gpu:7" });
await run();
await eventually("nothing runs again", isIdle, Boolean);
await eventually("Nodes 2.0 on one device", inPage, isShown);
await page.evaluate(() => fetch("/api/highwater/free", { method: "POST", headers: { "Content-Type": "application/json" }, body: "{}" }));
await eventually("Nodes 2.0 in RAM again", inPage, (badges) => / fp8$/.test(badges[LOADER]) && IN_RAM.test(badges[LOADER]));
const saved = await page.evaluate(() => JSON.stringify(app.rootGraph.serialize()));
assert.ok(!SAVED.test(saved) && !/this machine has no/.test(saved), "a readout was saved with the workflow");
const firstQuestion = [/net::ERR_FAILED \(\S*\/highwater\/report/, /^highwater: the report could not be read/];
assert.deepEqual(without(errors, ...firstQuestion), [], "errors in the page");

// What a node says is there again when its tab is, and after a reload; it makes the saved node no larger. What a server told
// that is gone is no longer true.
const saysNoDevice = (text) => text.includes("this machine has no gpu:7");
const says = (name, isSaid) => eventually(`what the loader says ${name}`, notes, (text) => saysNoDevice(text) === isSaid);
const command = (id) => page.evaluate((id) => app.extensionManager.command.execute(id), id);
const savedHeight = () => app.rootGraph.serialize().nodes.find((node) => node.type === "HighwaterLoadDiffusionModel").size[1];
const height = await page.evaluate(savedHeight);
for (const isVue of [true, false]) {
  await setting("Comfy.VueNodes.Enabled", isVue);
  await command(isVue ? "Comfy.NewBlankWorkflow" : "Workspace.NextOpenedWorkflow");
  await says("in another tab", false);
  await command("Workspace.PreviousOpenedWorkflow");
  await says("in its tab", true);
  await eventually("the room of a note is not saved", savedHeight, (saved) => saved === height);
  await run();
  await eventually("nothing runs", isIdle, Boolean);
  await eventually("nor after a run", savedHeight, (saved) => saved === height);
}
// The first question fails again: the next one asks for what it should have told.
await page.route(isReport, (route) => route.abort());
await page.reload();
await page.getByText("Memory badges may be out of date").first().waitFor();
await ready("page is ready after its own reload");
await page.unroute(isReport);
await page.evaluate(() => app.api.dispatchCustomEvent("status", { exec_info: { queue_remaining: 0 } }));
await says("after a reload", true);
await eventually("canvas after a reload", onCanvas, (badges) => ADDED.test(badges[SAMPLER]));
await page.route(isReport, async (route) => {
  const response = await route.fetch();
  await route.fulfill({ response, json: { ...(await response.json()), nodes: [], server_id: "another" } });
});
await page.evaluate(() => app.api.dispatchCustomEvent("reconnected"));
await says("of another server", false);
await eventually("canvas with another server", onCanvas, (badges) => badges[SAMPLER] === "" && badges[LOADER] !== "");
await page.unroute(isReport);
await page.evaluate(() => app.api.dispatchCustomEvent("reconnected"));
await eventually("canvas with this server", onCanvas, (badges) => ADDED.test(badges[SAMPLER]));
await setting("Comfy.VueNodes.Enabled", true);

// Another workflow with the same node ids has nothing yet; the first one's values are there when it is opened again,
// and after a reload, when no event is repeated.
const first = await page.evaluate(() => app.rootGraph.serialize());
await page.evaluate((graph) => app.loadGraphData({ ...graph, id: crypto.randomUUID() }), first);
await eventually("another workflow", inPage, isEmpty);
// It runs: nothing is computed again, as the host has all results. Its loader shows what the first one's does; no
// node added anything.
const lastRuns = async () => (await (await fetch("/api/highwater/report?only=runs")).json()).runs.map((run) => run.end_s !== null);
const numRuns = (await page.evaluate(lastRuns)).length;
await run();
await eventually("its run", lastRuns, (runs) => runs.length === numRuns + 1 && runs[numRuns]);
await eventually("another workflow with the same results", inPage, (badges) => IN_RAM.test(badges[LOADER]) && badges[SAMPLER] === "");
const isFirst = (badges) => IN_RAM.test(badges[LOADER]) && ADDED.test(badges[SAMPLER]);
await page.evaluate((graph) => app.loadGraphData(graph), first);
await eventually("the first one again", inPage, isFirst);
await page.reload();
await ready("page is ready again");
await page.evaluate((graph) => app.loadGraphData(graph), first);
await eventually("after a reload", inPage, isFirst);

// Put into a subgraph, they run under other ids: its node shows the model inside, and forgets the nodes that are gone.
const isInside = (name) => (badges) => Object.keys(badges).every((type) => type !== LOADER) && name.test(Object.values(badges).join(" "));
await page.evaluate(
  (types) => void app.rootGraph.convertToSubgraph(new Set(app.rootGraph.nodes.filter((node) => types.includes(node.type)))),
  [LOADER, SAMPLER],
);
await run();
await eventually("the node of a subgraph", inPage, isInside(/RAM [\d.]+M fp8|[\d.]+M gpu:0/));
await page.waitForTimeout(300);
await shoot("comfyui_subgraph");

// A prompt from elsewhere that has these node ids and no workflow's id is no business of any that is open.
await page.evaluate((graph) => app.loadGraphData({ ...graph, id: crypto.randomUUID() }), first);
const elsewhere = JSON.parse(await readFile(workflow, "utf8"));
const { prompt_id } = await (await fetch(`${base}/prompt`, { method: "POST", body: JSON.stringify({ prompt: elsewhere }) })).json();
const isDone = async (id) => Boolean((await (await fetch(`/api/history/${id}`)).json())[id]?.status.completed);
await eventually("the prompt from elsewhere", `(${isDone})("${prompt_id}")`, Boolean);
await quiet();
await eventually("a prompt without a workflow's id is shown on no workflow", inPage, isEmpty);

// While a run is open its nodes have badges: it waits inside of the model until it is interrupted.
await page.evaluate((graph) => app.loadApiJson(graph, "waiting"), JSON.parse(await readFile(waiting, "utf8")));
await page.evaluate(() => app.loadGraphData({ ...app.rootGraph.serialize(), id: crypto.randomUUID() }));
await eventually("before the open run", inPage, (badges) => badges[SAMPLER] === "");
await run();
await eventually("while a run is open", inPage, isShown);
assert.ok(!(await page.evaluate(isIdle)), "the run has ended");
await page.evaluate(() => fetch("/api/interrupt", { method: "POST" }));
await eventually("the open run's end", isIdle, Boolean);
await page.evaluate((graph) => app.loadGraphData(graph), first);

// A budget that is too small is found when the sampler asks for the model; the page itself says only that it failed.
await widgets(LOADER, { precision: "as stored", placement: "default", profile: "0.25MiB" });
await run();
await page.getByText("Invalid input").first().waitFor();
await page.getByText(/'0\.25MiB' is too small/).first().waitFor();
await page.waitForTimeout(300);
await shoot("comfyui_refused");

// A model that does not fit beside what others hold: the notice has the sum and the remedy.
const occupy = { class_type: "TestOccupy", inputs: { device: 0, free_bytes: 1 << 20, run: 1 } };
await fetch(`${base}/prompt`, { method: "POST", body: JSON.stringify({ prompt: { 1: occupy } }) });
const isOccupied = async () => {
  const history = await (await fetch("/api/history")).json();
  return Object.values(history).some((entry) => entry.prompt[2][1]?.class_type === "TestOccupy" && entry.status.completed);
};
await eventually("others hold the device", isOccupied, Boolean);
await widgets(LOADER, { profile: "auto" });
await run();
await page.getByText("Does not fit in memory").first().waitFor();
await page.getByText(/tiny_flux needs at least .* available of .* reserved\. What helps: lower the watermark, /).first().waitFor();
await page.waitForTimeout(300);
await shoot("comfyui_does_not_fit");

// How much memory stays free: a setting that the host keeps. Pages of other sites are refused.
const lowMark = async () => (await (await fetch("/api/highwater/report?only=devices")).json()).devices[1].watermark.low_bytes;
await setting("Highwater.Watermark", "gpu:0=3MiB:4MiB,host=1%:2%,gpu:9=1MiB:2MiB");
const leftOut = page.getByText(/this machine has no gpu:9, so that is left out; it has gpu:0, .*host\. Kept free: gpu:0: 3 MiB to 4 MiB; host: /);
await leftOut.first().waitFor();
const post = (marks, headers) =>
  fetch(`${base}/highwater/watermark`, { method: "POST", headers: { "Content-Type": "application/json", ...headers }, body: JSON.stringify({ marks }) });
assert.equal((await post("gpu:0=5MiB:6MiB", { Origin: "http://evil.example" })).status, 403);
assert.equal(await page.evaluate(lowMark), 3 << 20);
assert.equal((await post("", {})).status, 200);
assert.notEqual(await page.evaluate(lowMark), 3 << 20);
await page.reload();
await eventually("the setting counts again after a reload", lowMark, (bytes) => bytes === 3 << 20);
await ready("page is ready once more");
await quiet();
assert.equal(await leftOut.count(), 0, "what this machine cannot keep is told at each opening");
const provoked = [...firstQuestion, ...REFUSED, BEFORE_THE_SCRIPT, /DoesNotFit|InvalidInput/, OF_THE_TEST_PACK, answered(400, "highwater/watermark")];
assert.deepEqual(without(errors, ...provoked), [], "errors in the page");
await browser.close();
