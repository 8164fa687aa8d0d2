// Uses the memory panel of ComfyUI's own page as a user does; test_panel.py starts it.
// usage: panel.mjs ADDRESS CHROMIUM SCREENSHOTS WORKFLOW.json WAITING.json PARTS
// The workflows are in API format, the second one waits for an interrupt; PARTS of the report are those that the open panel
// asks for while a run goes on.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { answered, BEFORE_THE_SCRIPT, isIdle, OF_THE_TEST_PACK, openPage, PATIENCE_MS, without } from "../web/open_page.mjs";

const [base, executablePath, screenshots, workflow, waiting, parts] = process.argv.slice(2);
const LOADER = "HighwaterLoadDiffusionModel";
const HOSTILE = '<img src=x onerror="window.wasRun = 1">';
const MIB = 2 ** 20;
const { browser, page, errors, shoot, eventually, ready, quiet, answerDialog, placeOf, setting } = await openPage(base, executablePath, screenshots);
const readJson = async (file) => JSON.parse(await readFile(file, "utf8"));
const send = (path, body) => fetch(`${base}${path}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
const report = async (part) => (await (await fetch(`${base}/highwater/report?only=${part}`)).json())[part];
const gpu = async () => (await report("devices")).find((device) => device.name === "gpu:0");
/** As `eventually`, of what is read here. */
async function until(name, read, wanted) {
  const end = Date.now() + PATIENCE_MS;
  let value;
  do {
    value = await read();
    if (wanted(value)) return console.log(`${name}: ${JSON.stringify(value).slice(0, 500)}`);
    await page.waitForTimeout(150);
  } while (Date.now() < end);
  await shoot("stuck");
  assert.fail(`${name}: still ${JSON.stringify(value)}`);
}
const openTab = async () => {
  await page.getByRole("button", { name: "Memory (Highwater)" }).click();
  await page.locator(".hw-panel").waitFor();
};

for (const [id, value] of [["Comfy.TutorialCompleted", true], ["Comfy.VueNodes.Enabled", false], ["Comfy.Minimap.Visible", false]]) {
  await fetch(`${base}/api/settings/${id}`, { method: "POST", body: JSON.stringify(value) });
}
await page.goto(base);
await ready();
await page.evaluate((graph) => app.loadApiJson(graph, "test"), await readJson(workflow));
await page.evaluate(([type, title]) => {
  app.rootGraph.nodes.find((node) => node.type === type).title = title;
  app.rootGraph.nodes.flatMap((node) => node.widgets ?? []).filter((widget) => widget.name === "control_after_generate").forEach((widget) => (widget.value = "fixed"));
}, [LOADER, HOSTILE]);
await page.evaluate(() => app.loadGraphData({ ...app.rootGraph.serialize(), id: crypto.randomUUID() }));

// Open and idle, the panel asks nothing; it says that nothing is there.
const panel = page.locator(".hw-panel");
const section = (name) => panel.getByRole("region", { name, exact: true });
const card = panel.getByRole("row", { name: "tiny_flux" });
const bar = panel.locator(".hw-bar", { has: page.getByText("gpu:0", { exact: true }) });
const button = (name) => card.getByRole("button", { name });
const told = (name, read, wanted) => until(name, async () => ((await read.count()) ? read.first().innerText() : ""), (text) => wanted.test(text));
await openTab();
await panel.getByText("No model is loaded.").waitFor();
await quiet();
const asked = [];
const noteAsked = (request) => asked.push(request.url());
page.on("request", noteAsked);
await page.waitForTimeout(3000);
page.off("request", noteAsked);
assert.deepEqual(asked.filter((url) => url.includes("/highwater/")), [], "asked while nothing runs");
await shoot("panel_empty");

// A run: the bar and the component have the report's numbers.
await page.evaluate(() => void app.queuePrompt(0));
await told("the component", card.locator(".hw-where"), /^[\d.]+[MG] gpu:0/);
await eventually("the run's end", isIdle, Boolean);
await until("the bar", () => bar.locator(".hw-track").getAttribute("aria-label"), (label) => /^gpu:0: tiny_flux [\d.]+M, (.*, )?free [\d.]+[MG]$/.test(label));
await told("the reason of the load", section("Events").locator("li", { hasText: "load" }).filter({ hasText: "tiny_flux" }), /KSampler/);
await told("the loader's title as text", card, /<img src=x onerror=/);
assert.equal(await panel.locator("img").count(), 0);
assert.equal(await page.evaluate(() => window.wasRun), undefined);
await told("advice", panel.locator(".hw-advice"), /\S/);
await shoot("panel_dark");

// The timeline of that run: what is under the pointer, what the arrow keys reach, and a PNG of it.
const timeline = section("Timeline of the last runs");
const picture = timeline.getByRole("img");
await until("the timeline", () => picture.getAttribute("aria-label"), (label) => /^Last runs: .*; gpu:0: at most [\d.]+M of 1\.8G/.test(label ?? ""));
await picture.scrollIntoViewIfNeeded();
const pointAtPicture = async () => {
  const place = await placeOf(picture);
  await page.mouse.move(place.x + place.width - 8, place.y + place.height / 2);
  return timeline.innerText();
};
const isTold = (text) => /s after the start of [^]*gpu:0: [\d.]+M in use \(tiny_flux [\d.]+M\)/.test(text);
await until("the values under the pointer", pointAtPicture, isTold);
await shoot("panel_timeline");
await page.mouse.move(5, 5);
await told("how to see values", timeline, /Point at the picture/);
await picture.focus();
await page.keyboard.press("ArrowRight");
await told("the values by keys", timeline, /0\.00 s after the start of [^]*gpu:0: 0B in use \(no weights\)/);
const [download] = await Promise.all([page.waitForEvent("download"), timeline.getByRole("button", { name: "Save as PNG" }).click()]);
assert.equal(download.suggestedFilename(), "highwater-timeline.png");
await download.saveAs(`${screenshots}/highwater-timeline.png`);
const png = await readFile(`${screenshots}/highwater-timeline.png`);
assert.deepEqual([...png.subarray(0, 8)], [0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a]);
assert.equal(png.readUInt32BE(16), Math.round(2 * (await picture.locator("svg").evaluate((svg) => svg.width.baseVal.value))));
assert.ok(png.length > 2000, `${png.length} bytes`);

// A click on its node goes there, in whichever renderer.
for (const isVue of [true, false]) {
  await setting("Comfy.VueNodes.Enabled", isVue);
  await page.evaluate(() => (app.canvas.deselectAll(), (app.canvas.ds.offset[0] = 9000)));
  await card.getByRole("button", { name: HOSTILE }).click();
  await eventually("the node is selected", () => [...app.canvas.selectedItems].map((node) => node.type), (types) => types.join() === LOADER);
  await eventually("the node is in sight", () => Math.abs(app.canvas.ds.offset[0]), (offset) => offset < 9000);
}

// Keys alone: keep a component, and no more.
await button("Keep (tiny_flux)").focus();
for (const isKept of [true, false, true]) {
  await page.keyboard.press("Enter");
  await until("kept", async () => (await report("components"))[0].kept, (kept) => kept === isKept);
  await until("pressed", () => button("Keep (tiny_flux)").getAttribute("aria-pressed"), (pressed) => pressed === String(isKept));
  await until("the button is ready", () => button("Keep (tiny_flux)").getAttribute("aria-busy"), (busy) => busy === null);
}
assert.equal(await page.evaluate(() => document.activeElement.getAttribute("aria-label")), "Keep (tiny_flux)", "the focus stays");
const stops = [];
await bar.getByRole("slider").first().focus();
for (let step = 0; step < 30 && !stops.includes("Filter by text"); step += 1) {
  await page.keyboard.press("Tab");
  stops.push(await page.evaluate(() => document.activeElement.getAttribute("aria-label") ?? document.activeElement.textContent));
}
for (const name of ["Lend… (gpu:0)", "High mark of RAM", "Low mark of RAM", HOSTILE, "Release (tiny_flux)", "Keep (tiny_flux)", "Move… (tiny_flux)"]) {
  assert.ok(stops.includes(name), `${name} is not reached by Tab: ${stops.join("; ")}`);
}

// Each mark is dragged, and moved by keys; it is set when it is let go, keeps the unit in which it was written, and stays
// after a reload. The low one never passes the high one.
const mark = (side) => bar.getByRole("slider", { name: `${side} mark of gpu:0` });
const marks = async () => (await gpu()).own_watermark;
const savedMarks = () => page.evaluate(() => app.extensionManager.setting.get("Highwater.Watermark"));
/** Drag a mark to a part of the bar, from the left, and do something before it is let go. */
async function drag(slider, part, before = async () => {}) {
  await slider.scrollIntoViewIfNeeded();
  const handle = await placeOf(slider);
  const track = await bar.locator(".hw-track").boundingBox();
  await page.mouse.move(handle.x + handle.width / 2, handle.y + handle.height / 2);
  await page.mouse.down();
  await page.mouse.move(track.x + track.width * part, handle.y + handle.height / 2, { steps: 5 });
  await before();
  await page.mouse.up();
}
const unset = await marks();
await drag(mark("High"), 0.6, async () => assert.deepEqual(await marks(), unset, "set while it is dragged"));
await until("the high mark", marks, (found) => found.source === "setting" && Math.abs(found.high_bytes - 0.4 * 1844 * MIB) < 30 * MIB);
assert.equal((await marks()).low_bytes >> 20, unset.low_bytes >> 20, "the low one stays");
await page.getByText(/Kept free: gpu:0: 184 MiB to 7\d\d MiB/).first().waitFor();
await drag(mark("Low"), 0.2);
await until("the low mark stops at the high one", marks, (found) => found.low_bytes === found.high_bytes);
await setting("Highwater.Watermark", "*=10%:20%");
await until("marks in percent", marks, (found) => found.low_text === "10%" && found.high_text === "20%");
await until("they are shown so", () => mark("Low").getAttribute("aria-valuetext"), (text) => text === "Eviction starts when less than 10% (184M) is free");
await drag(mark("High"), 0.67);
await until("a percentage stays one", marks, (found) => /^3[23](\.\d)?%$/.test(found.high_text) && found.low_text === "10%");
await mark("Low").focus();
await page.keyboard.press("ArrowLeft");
await until("one more percent by a key", marks, (found) => found.low_text === "11%");
await page.keyboard.press("ArrowLeft");
await until("and another one", marks, (found) => found.low_text === "12%");
await until("its value", () => mark("Low").getAttribute("aria-valuenow"), (value) => value === "88");
await until("they are saved", savedMarks, (saved) => /^gpu:0=12%:3[23](\.\d)?%,gpu:1=10%:20%$/.test(saved));
await page.getByText(/Kept free: gpu:0: 12% \(221 MiB\) to 3[23](\.\d)?% \(\d+ MiB\); gpu:1: 10% \(184 MiB\) to 20%/).first().waitFor();
await shoot("panel_marks");

// While a run computes nothing is released: one toast has the server's line, and the button works again.
const { prompt_id: id } = await (await send("/prompt", { prompt: await readJson(waiting) })).json();
await until("it waits inside of a node", async () => (await report("open_nodes"))[0]?.seconds ?? 0, (seconds) => seconds > 0.5);
await button("Release (tiny_flux)").click();
const toast = page.getByText("a prompt is running; cancel it, or wait until it ends", { exact: true }); // newer pages announce it, too
await toast.first().waitFor();
assert.equal(await toast.count(), 1);
await shoot("panel_refused");
await send("/interrupt", {});
await until("the run is interrupted", async () => Boolean((await (await fetch(`${base}/history/${id}`)).json())[id]), Boolean);
await eventually("nothing runs", isIdle, Boolean);
const numRuns = (await report("runs")).length;
await page.evaluate(() => void app.queuePrompt(0));
await until("another run", () => report("runs"), (runs) => runs.length > numRuns && runs.at(-1).end_s !== null);
await told("what is said of a run that took no time", panel.locator(".hw-advice"), /nothing was loaded again/);
await until("it is loaded", async () => (await report("components")).find((part) => part.id === "tiny_flux")?.tiers["gpu:0"] ?? 0, (bytes) => bytes > 0);
await eventually("nothing runs", isIdle, Boolean);
await until("the button", () => button("Release (tiny_flux)").getAttribute("aria-disabled"), (disabled) => disabled === "false");
await button("Release (tiny_flux)").click();
await told("it has left", card.locator(".hw-where"), /^[\d.]+M (pinned )?RAM$/);
assert.equal(await button("Release (tiny_flux)").getAttribute("aria-disabled"), "true");

// The timeline follows another run while it goes on: the weights that it loads and the node that is open, though neither the
// node nor the run has ended. The page asks only for what came since, events among it.
const questions = [];
const noteQuestion = (request) => questions.push(new URL(request.url()));
page.on("request", noteQuestion);
const loads = section("Events").locator("li", { hasText: "load" }).filter({ hasText: "tiny_flux" });
const numLoads = await loads.count();
const { prompt_id: loading } = await (await send("/prompt", { prompt: await readJson(waiting) })).json();
await until("it is loaded while a run goes on", async () => (await report("components")).find((part) => part.id === "tiny_flux")?.tiers["gpu:0"] ?? 0, (bytes) => bytes > 0);
async function atTheEnd() {
  await picture.scrollIntoViewIfNeeded();
  const { x, y, width, height } = await picture.boundingBox();
  await page.mouse.move(x + width - 30, y + height / 2);
  await page.mouse.move(x + width - 5, y + height / 2);
  return timeline.innerText();
}
await until("the open run", atTheEnd, (text) => /KSampler\s+gpu:0: [\d.]+M in use \(tiny_flux [\d.]+M\)/.test(text));
await until("the event of its load", () => loads.count(), (number) => number > numLoads);
// It waits inside of the node, for as long as nobody interrupts it. What is asked meanwhile makes its part of the picture
// longer: the run is as old as the answer.
await page.mouse.move(5, 5);
const ofTheRun = async () => Number.parseFloat((await picture.locator("svg text").filter({ hasText: /^\d+\.\d s$/ }).allTextContents()).at(-1));
const drawnSeconds = await ofTheRun();
await until("it waits", async () => (await report("open_nodes"))[0].seconds, (seconds) => seconds > drawnSeconds + 1);
for (const isKept of [false, true]) {
  await button("Keep (tiny_flux)").click();
  await until("kept", async () => (await report("components"))[0].kept, (kept) => kept === isKept);
  await until("pressed", () => button("Keep (tiny_flux)").getAttribute("aria-pressed"), (pressed) => pressed === String(isKept));
  await until("the button is ready", () => button("Keep (tiny_flux)").getAttribute("aria-busy"), (busy) => busy === null);
}
await until("the run is longer", ofTheRun, (seconds) => seconds > drawnSeconds + 0.5);
assert.equal((await report("open_nodes")).length, 1, "it runs still");
await shoot("panel_live");
page.off("request", noteQuestion);
const withLists = questions.filter((url) => url.searchParams.get("only")?.includes("samples"));
const named = withLists.map((url) => url.searchParams.get("only").split(",").filter((name) => name !== "advice").sort().join());
assert.deepEqual([...new Set(named)], [parts.split(",").sort().join()]);
assert.ok(withLists.every((url) => Number(url.searchParams.get("after")) > 0), "asked for what is known");
assert.ok(withLists.some((url) => !url.searchParams.get("only").includes("advice")), "asked only as the queue changed");
await send("/interrupt", {});
await until("the other run is interrupted", async () => Boolean((await (await fetch(`${base}/history/${loading}`)).json())[loading]), Boolean);
await eventually("nothing runs", isIdle, Boolean);

// It is moved on request: what cannot be is refused with why, and the row says that the node is not changed.
async function move(placement) {
  await button("Move… (tiny_flux)").click();
  await answerDialog(placement);
}
await move("gpu:7");
await page.getByText(/device 'gpu:7' is unknown|no device 'gpu:7'|gpu:7/).last().waitFor();
await move("gpu:0&gpu:1@30%");
await told("moved", card, /Moved to gpu:0.*gpu:1.* on request\. The node that loads it is not changed\./);
assert.equal(await page.evaluate((type) => app.rootGraph.nodes.find((node) => node.type === type).widgets.find((widget) => widget.name === "placement").value, LOADER), "default");

// Memory is lent and given back, of the device of the button.
await bar.getByRole("button", { name: "Lend… (gpu:0)" }).click();
await answerDialog("64MiB 1h");
await told("lent", bar, /lent, not taken yet\s*64\.0M[^]*64\.0M are lent/);
await bar.getByRole("button", { name: "Give back (gpu:0)" }).click();
await until("given back", async () => (await gpu()).lent, (lent) => lent === null);
await bar.getByRole("button", { name: "Lend… (gpu:0)" }).waitFor();

// The events by words and kind.
const events = section("Events").locator("li");
await section("Events").getByRole("combobox").selectOption("lend");
await until("lend events", () => events.allInnerTexts(), (texts) => texts.length >= 2 && texts.every((text) => text.startsWith("lend")));
await section("Events").getByRole("combobox").selectOption("");
await section("Events").getByRole("searchbox").fill("TINY_FLUX request");
await until("events by words", () => events.allInnerTexts(), (texts) => texts.length >= 1 && texts.every((text) => /tiny_flux/.test(text) && /request/.test(text)));
await section("Events").getByRole("searchbox").fill("nothing has this");
await section("Events").getByText("No events.").waitFor();
await section("Events").getByRole("searchbox").fill("");

// Another workflow: the component is elsewhere; the first one again, and after a reload.
const first = await page.evaluate(() => app.rootGraph.serialize());
await page.evaluate((graph) => app.loadGraphData({ ...graph, id: crypto.randomUUID() }), first);
await told("in another workflow", card, /in another workflow/);
await page.evaluate((graph) => app.loadGraphData(graph), first);
await told("the first workflow again", card, /onerror/);
await page.reload();
await ready("page is ready again");
await page.evaluate((graph) => app.loadGraphData(graph), first);
if (!(await panel.count())) await openTab();
await told("after a reload", card, /onerror[^]*Moved to/);
await until("the marks after a reload", marks, (found) => found.source === "setting" && found.low_text === "12%");

// Another language and other units are there at once.
await setting("Highwater.Language", "de");
await told("in German", panel, /^Speicher\n[^]*Geräte und RAM[^]*Freigeben/);
await setting("Highwater.Language", "page");
await told("in English again", panel, /^Memory\n[^]*Devices and RAM/);
await setting("Highwater.Units", "decimal");
await told("in decimal units", bar, /1\.9G free/);
await setting("Highwater.Units", "binary");
await told("in binary units again", bar, /1\.8G free/);

// The narrowest sidebar, a wider one, and one where the table has room, in both themes.
const measured = () => {
  const element = document.querySelector(".hw-panel");
  return { scroll: element.scrollWidth, client: element.clientWidth, layout: getComputedStyle(element.querySelector(".hw-table")).display };
};
for (const [width, name] of [[1640, "narrow"], [3200, "wide"], [4400, "widest"]]) {
  await page.setViewportSize({ width, height: 1100 });
  for (const theme of ["dark", "light"]) {
    await setting("Comfy.ColorPalette", theme);
    await placeOf(panel); // some pages give it a part of the window, others always as much
    const isRight = ({ scroll, client, layout }) => scroll <= client && (name !== "narrow" || client <= 320) && layout === (client >= 804 ? "table" : "block");
    await eventually(`${name}: the panel's width`, measured, isRight);
    assert.ok(await card.getByRole("rowheader", { name: "tiny_flux" }).isVisible(), "a row has its name in any layout");
    assert.ok(await panel.getByRole("columnheader", { name: "Size" }).isVisible(), "it can be sorted in any layout");
    await shoot(`panel_${name}_${theme}`);
  }
}
await setting("Comfy.ColorPalette", "dark");

// Closed, nothing is asked for it but what badges need; the top bar says when a device is nearly full.
await page.setViewportSize({ width: 1600, height: 900 });
await page.getByRole("button", { name: "Memory (Highwater)" }).click();
await panel.waitFor({ state: "detached" });
const occupy = (free_bytes, run) => send("/prompt", { prompt: { 1: { class_type: "TestOccupy", inputs: { device: 0, free_bytes, run } } } });
const badge = page.getByText("gpu:0 nearly full");
assert.equal(await badge.count(), 0);
const again = await readJson(workflow);
Object.values(again).find(({ inputs }) => "seed" in inputs).inputs.seed += 1;
await send("/prompt", { prompt: again });
await until("the model is loaded", async () => (await gpu()).managed_bytes, (bytes) => bytes > 0);
await eventually("nothing runs", isIdle, Boolean);
const late = [];
const held = [];
async function hold(route) {
  const response = await route.fetch();
  const { devices = [] } = await response.json();
  const isFull = devices.some(({ free_bytes }) => free_bytes <= 16 * MIB);
  late.push({ url: route.request().url(), isFull, deliver: () => route.fulfill({ response }) });
}
await page.route("**/highwater/report?**", (route) => void held.push(hold(route)));
await occupy(MIB, 1);
await badge.first().waitFor();
await shoot("panel_topbar");
// The host drops the model at the run's end, which asks for the devices. That answer comes after the next run's word.
await until("a late answer", () => late.filter(({ isFull }) => isFull).length, (number) => number > 0);
await occupy(-1, 2);
await badge.first().waitFor({ state: "detached" });
for (const { url, deliver } of late.splice(0)) {
  const [response] = await Promise.all([page.waitForResponse(url), deliver()]);
  await response.finished();
}
await page.evaluate(() => new Promise((resolve) => setTimeout(resolve)));
assert.equal(await badge.count(), 0, "an older answer is no news");
await page.unroute("**/highwater/report?**");
await Promise.all(held); // an answer that is read as the browser ends is an error
const provoked = [OF_THE_TEST_PACK, BEFORE_THE_SCRIPT, answered(404, "highwater/move"), answered(409, "highwater/release")];
assert.deepEqual(without(errors, ...provoked), [], "errors in the page");
await browser.close();
