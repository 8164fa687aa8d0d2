// Looks at the served page as a user does, in both renderers; test_browser.py starts it.
// usage: browse.mjs ADDRESS CHROMIUM SCREENSHOTS PARTS   (of the report, which a page asks for while the panel is closed)
import assert from "node:assert/strict";
import { answered, expectDetail, inPage, isIdle, onCanvas, openPage, REFUSED, SAVED, without } from "./open_page.mjs";

const [base, executablePath, screenshots, parts] = process.argv.slice(2);
const LOADER = "HighwaterLoadPipeline";
// The nodes of the example.
const OURS = [LOADER, "HighwaterSamplePipeline", "HighwaterSaveImage", "HighwaterMemoryReport"];
const SAMPLER = "HighwaterSamplePipeline";
const ON_DEVICE = /^[1-9][\d.]*M gpu:0$/;
const ADDED = /^\+[1-9][\d.]*[KM] gpu:0$/;

const { browser, page, errors, foreign, shoot, eventually, ready, quiet, answerDialog, setting, widgets } = await openPage(base, executablePath, screenshots);
const allEmpty = (badges) => OURS.every((type) => badges[type] === "");
// The nodes that save an image and make the report hold nothing of a device, and add nothing.
const othersAreEmpty = (badges) => OURS.every((type) => [LOADER, SAMPLER].includes(type) || badges[type] === "");
const allBytes = (badges) => ON_DEVICE.test(badges[LOADER]) && ADDED.test(badges[SAMPLER]) && othersAreEmpty(badges);
const exampleIsOpen = () => window.app?.rootGraph?.nodes?.map((node) => node.type) ?? [];
const hasOurs = (types) => OURS.every((type) => types.includes(type));
const run = () => page.getByRole("button", { name: "Run", exact: true }).first().click();

// A newcomer opens the address: the example is there, and Run is all it takes.
await page.goto(base);
await eventually("example is open", exampleIsOpen, hasOurs);
await ready();
assert.deepEqual(
  await page.evaluate(() => Object.keys(LiteGraph.registered_node_types).filter((type) => type.startsWith("Highwater")).sort()),
  [...OURS, "HighwaterKeep", "HighwaterLimits", "HighwaterPlan", "HighwaterPrecision", "HighwaterRelease", "HighwaterVerifyPipeline", "HighwaterWatermark"].sort(),
);
await eventually("canvas before", onCanvas, allEmpty);
await quiet(); // what its opening asks for
const questions = [];
const noteQuestion = (request) => questions.push(new URL(request.url()));
page.on("request", noteQuestion);
await run();
await eventually("canvas after", onCanvas, allBytes);
await eventually("report on its node", () => document.querySelector(".highwater-text")?.textContent ?? "", (text) => text.includes("tiny-flux/transformer"));
await eventually("image on its node", () => app.rootGraph.nodes.find((node) => node.type === "HighwaterSaveImage").imgs?.[0]?.naturalWidth, (width) => width === 64);
await shoot("canvas");
await quiet(); // what the end of the run asks for
// Until the panel is open it asks for what the benchmark of badges measures, and for devices where something was moved since
// the server told of them.
page.off("request", noteQuestion);
const askedFor = questions.filter((url) => url.pathname.endsWith("/highwater/report")).map((url) => url.searchParams.get("only").split(",").sort());
assert.deepEqual([...new Set(askedFor.map((names) => names.filter((name) => name !== "devices").join()))], [parts.split(",").sort().join()]);
assert.ok(!askedFor.at(-1).includes("devices"), "devices are asked for though nothing was moved");
const forThePanel = questions.filter((url) => url.pathname.endsWith("/highwater/events") || url.searchParams.has("after"));
assert.deepEqual(forThePanel.map(String), [], "asked for a panel that is closed");
// A click on a badge tells the rest.
async function checkDetail() {
  await expectDetail(page, LOADER, /^tiny-flux\/transformer, [\d.]+M as stored\ngpu:0: [\d.]+M of weights\n12 of 12 blocks resident, 0 streamed\nin its file: [\d.]+M\n/);
  await expectDetail(page, LOADER, /moved [\d.]+M to devices so far, waited [\d.]+ s for copies\nin effect\n[^]*\nThis node, [\d.]+ s\nadded nothing$/);
  await expectDetail(page, SAMPLER, /^This node, [\d.]+ s\ngpu:0: [\d.]+M of weights that it used, [\d.]+[KM] of activations\nmoved [\d.]+M to devices, waited /);
}
await checkDetail();

// The menu's command, which a user needs in ComfyUI; here the pipelines are there already.
await page.evaluate(() => app.extensionManager.command.execute("Highwater.MakeTinyPipelines"));
await page.getByText(/tiny-flux, tiny-sd, tiny-wan are in models.diffusers/).first().waitFor();

// The panel shows the parts of the pipeline, and what of the device they have.
const memoryTab = () => page.getByRole("button", { name: "Memory (Highwater)" }).click();
const cards = () => [...document.querySelectorAll(".hw-table .hw-component .hw-name")].map((name) => name.textContent).sort();
const PARTS = ["text_encoder", "text_encoder_2", "transformer", "vae"].map((part) => `tiny-flux/${part}`);
await memoryTab();
await eventually("the panel's components", cards, (names) => names.join() === PARTS.join());
await eventually("the bar of the device", () => document.querySelector(".hw-track")?.getAttribute("aria-label") ?? "", (told) => /^gpu:0: .*tiny-flux\/transformer [\d.]+M, .*free [\d.]+M$/.test(told));
await eventually("the events", () => document.querySelectorAll(".hw-events li").length, (number) => number > 0);
// They are a table, sorted by its columns, from the keyboard too.
const column = (name) => page.getByRole("table", { name: "Components" }).getByRole("columnheader", { name });
const sizes = () => [...document.querySelectorAll(".hw-table td.hw-size")].map((cell) => Number.parseFloat(cell.textContent) * { K: 1, M: 1024 }[cell.textContent.slice(-1)]);
const inOrder = (sign) => (found) => found.length === PARTS.length && found.every((size, at) => at === 0 || sign * (size - found[at - 1]) >= 0);
await column("Size").getByRole("button").click();
await eventually("the largest first", sizes, inOrder(-1));
await page.keyboard.press("Enter");
await eventually("the smallest first", sizes, inOrder(1));
assert.equal(await column("Size").getAttribute("aria-sort"), "ascending");
await page.keyboard.press("Enter");
assert.equal(await column("Size").getAttribute("aria-sort"), "none");
await shoot("panel");

// While nothing runs the page asks for nothing, with the panel as without.
await quiet(); // what the end of the run asked for
const asked = [];
const noteAsked = (request) => asked.push(request.url());
page.on("request", noteAsked);
await page.waitForTimeout(3000);
page.off("request", noteAsked);
assert.deepEqual(asked.filter((url) => url.includes("/highwater/")), [], "asked while nothing runs");
await memoryTab();
await eventually("the panel is closed", () => document.querySelectorAll(".hw-panel").length, (number) => number === 0);

// The same values in the other renderer, and again after a reload.
await setting("Comfy.VueNodes.Enabled", true);
await eventually("Nodes 2.0 after the switch", inPage, allBytes);
await checkDetail();
await page.reload();
await eventually("example is open again", exampleIsOpen, hasOurs);
await ready("page is ready again");
await eventually("Nodes 2.0 after a reload", inPage, allBytes);
await eventually("report after a reload", () => document.querySelector(".highwater-text")?.textContent ?? "", (text) => text.includes("tiny-flux/transformer"));

// A graph of another id has nothing yet, though its nodes have the same ids. Then it runs, in fp8.
await page.evaluate(() => app.loadGraphData({ ...app.rootGraph.serialize(), id: crypto.randomUUID() }));
await eventually("Nodes 2.0 before", inPage, allEmpty);
await widgets(LOADER, { precision: "fp8 scaled" });
await run();
// Another workflow's loader is not counted.
await eventually("Nodes 2.0 after", inPage, (badges) => allBytes(badges) && Number.parseFloat(badges[LOADER]) < 35);
// What leaves the device is seen at once, without a run.
/** Posts JSON as the page does: what changes something takes nothing else. */
const post = ([path, body]) =>
  fetch(`/highwater/${path}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) }).then((answer) => answer.json());
await eventually("nothing runs", isIdle, Boolean);
await page.evaluate(post, ["free", {}]);
await eventually("Nodes 2.0 in RAM", inPage, (badges) => /^RAM [1-9][\d.]*M fp8$/.test(badges[LOADER]) && ADDED.test(badges[SAMPLER]));
const image = '[data-node-id="3"] img';
await eventually("image in Nodes 2.0", `document.querySelector('${image}')?.naturalWidth`, (width) => width === 64);
await page.waitForTimeout(400);
await shoot("nodes2");

// What is shown is not saved, and not sent.
const saved = await page.evaluate(() => JSON.stringify(app.rootGraph.serialize()));
assert.ok(!SAVED.test(saved.replace(/"MarkdownNote".*?\]/, "")), "a readout was saved with the workflow");
assert.deepEqual(await page.evaluate(async () => Object.keys((await app.graphToPrompt()).output[4].inputs)), ["after"]);
assert.deepEqual(errors, [], "errors in the page");

// All parts of the pipeline stay in their files: once they have left the device, the badge says so,
// though the server keeps the last result of the loader, and its models.
await widgets(LOADER, { precision: "as stored", profile: "auto,disk=all" });
await run();
const runsEnded = async () => (await (await fetch("/highwater/report?only=runs")).json()).runs.map((run) => run.end_s !== null);
await eventually("a run from files", runsEnded, (ended) => ended.length === 3 && ended[2]);
await page.evaluate(post, ["free", {}]);
await eventually("Nodes 2.0 on disk", inPage, (badges) => badges[LOADER] === "disk");
await setting("Comfy.VueNodes.Enabled", false);
await eventually("canvas on disk", onCanvas, (badges) => badges[LOADER] === "disk");
await setting("Comfy.VueNodes.Enabled", true);
assert.deepEqual(errors, [], "errors in the page");

// A value that cannot be used is explained at once, and marked on its node.
await widgets(LOADER, { profile: "12" });
await run();
await page.getByText(/'12' is not a profile and has no unit/).first().waitFor();
await page.waitForTimeout(300);
await shoot("refused");
// One that fails only when the weights are known is explained too: there the page itself says only that it failed.
await widgets(LOADER, { profile: "1MiB" });
await run();
await page.getByText(/'1MiB' is too small: transformer needs at least/).first().waitFor();
await page.waitForTimeout(300);
await shoot("failed");

// How much memory stays free: a setting that is applied when it is changed and when the page opens, or refused with why.
const lowMark = async () => (await (await fetch("/highwater/report?only=devices")).json()).devices[1].watermark.low_bytes;
await setting("Highwater.Watermark", "gpu:0=3MiB");
await page.getByText(/column 11: ':' and the high mark must follow, such as 1GiB:2GiB/).first().waitFor();
await setting("Highwater.Watermark", "gpu:0=3MiB:25%");
await page.getByText("Kept free: gpu:0: 3 MiB to 25% (16 MiB).").first().waitFor();
assert.equal(await page.evaluate(lowMark), 3 << 20);
await page.evaluate(post, ["watermark", { marks: "" }]);
assert.notEqual(await page.evaluate(lowMark), 3 << 20);
// Memory is lent by the menu's command and given back; a run goes on beside the loan and says so.
const lent = async () => (await (await fetch("/highwater/report?only=devices")).json()).devices[1].lent;
const lend = async (words) => {
  await page.evaluate(() => void app.extensionManager.command.execute("Highwater.Lend"));
  await answerDialog(words);
};
await lend("1024GiB 60s");
await page.getByText(/lend 1024GiB of gpu:0: it has 64.0MiB; allowed: more than 0, up to 64.0MiB/).first().waitFor();
await lend("24MiB 1h");
await page.getByText(/\d+ MiB freed, \d+ MiB free on gpu:0\./).first().waitFor();
assert.equal((await page.evaluate(lent)).num_bytes, 24 << 20);
await widgets(LOADER, { profile: "auto", precision: "as stored" });
const runs = async () => (await (await fetch("/highwater/report?only=runs")).json()).runs.filter((run) => run.end_s !== null).length;
const numRuns = await page.evaluate(runs);
await run();
await eventually("a run beside the loan", runs, (number) => number > numRuns);
await eventually("the loan on the report's node", () => document.querySelector(".highwater-text")?.textContent ?? "", (text) => /24\.0 ?MiB (are )?lent/.test(text));
await page.evaluate(() => app.extensionManager.command.execute("Highwater.GiveBack"));
await page.getByText("24 MiB of gpu:0 are given back.").first().waitFor();
assert.equal(await page.evaluate(lent), null);
// Limits for idle models: the one that is changed is passed on, the other one stays.
await setting("Highwater.MaxLoaded", 3);
await page.getByText("At most 3 models stay loaded; no idle model is unloaded by time.").first().waitFor();
await setting("Highwater.IdleMinutes", 90);
await page.getByText("At most 3 models stay loaded; idle ones are unloaded after 90 min.").first().waitFor();
assert.deepEqual(await page.evaluate(post, ["limits", { keep_loaded: null, idle: null }]), { keep_loaded: null, idle_s: null });
await setting("Highwater.LookAhead", false);
await page.getByText("Each model is loaded when it is used.").first().waitFor();
await setting("Highwater.LookAhead", true);
await page.getByText("What is used next is read, and copied to free device memory, while others compute.").first().waitFor();
const limits = async () => {
  const answer = await fetch("/highwater/limits", { method: "POST", headers: { "Content-Type": "application/json" }, body: "{}" });
  return answer.json();
};
await page.reload();
await eventually("the setting counts again after a reload", lowMark, (bytes) => bytes === 3 << 20);
await eventually("the limits, too", limits, (found) => found.keep_loaded === 3 && found.idle_s === 5400);
await setting("Highwater.MaxLoaded", 0);
await page.getByText("Any number of models stays loaded; idle ones are unloaded after 90 min.").first().waitFor();
await eventually("example is open once more", exampleIsOpen, hasOurs);
await page.evaluate(() => app.extensionManager.command.execute("Comfy.ShowSettingsDialog"));
await page.getByText("Highwater", { exact: true }).first().click();
await page.getByText("Memory to keep free: low and high mark").first().waitFor();
await page.waitForTimeout(300);
await shoot("setting");
const provoked = [...REFUSED, answered(400, "highwater/watermark"), answered(400, "highwater/lend")];
assert.deepEqual(without(errors, ...provoked), [], "errors in the page");
console.log(`asked other servers: ${[...foreign].join(" ") || "none"}`);
await browser.close();
