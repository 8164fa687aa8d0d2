// Looks at the served page as a user does, in both renderers; test_browser.py starts it.
// usage: browse.mjs ADDRESS CHROMIUM SCREENSHOTS
import assert from "node:assert/strict";
import { chromium } from "playwright-core";

const [base, executablePath, screenshots] = process.argv.slice(2);
// The nodes of the example.
const OURS = ["HighwaterLoadPipeline", "HighwaterSamplePipeline", "HighwaterSaveImage", "HighwaterMemoryReport"];
const BYTES = /^(RAM|VRAM) [1-9][\d.]*[KMG]( fp8)?$/;
const QUIET = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];

const started = Date.now();
const browser = await chromium.launch({
  executablePath,
  headless: true,
  args: ["--no-sandbox", "--disable-gpu", "--disable-quic", ...QUIET],
});
const page = await browser.newPage({ viewport: { width: 1600, height: 900 } });
const errors = [];
page.on("pageerror", (error) => errors.push(String(error)));
page.on("console", (message) => {
  // The page itself asks for files of the user that need not be there, and for other servers; 1.48 also complains
  // about its own start.
  const own = /^Failed to load resource|graph accessed before initialization/;
  if (message.type() === "error" && !own.test(message.text())) errors.push(message.text());
});
const foreign = new Set();
await page.route(
  (url) => url.origin !== base,
  (route) => (foreign.add(new URL(route.request().url()).origin), route.abort()),
);

/** Read a value in the page until it is what is wanted; the last value is in the error. */
async function eventually(name, read, wanted, timeout = 25_000) {
  const end = Date.now() + timeout;
  let value;
  do {
    value = await page.evaluate(read);
    if (wanted(value)) return console.log(`${((Date.now() - started) / 1000).toFixed(1)} s  ${name}: ${JSON.stringify(value)}`);
    await page.waitForTimeout(150);
  } while (Date.now() < end);
  assert.fail(`${name}: still ${JSON.stringify(value)} after ${timeout} ms; errors: ${JSON.stringify(errors)}`);
}

/** What each of our nodes' badges says: by the canvas renderer's own call, or as text in the page. */
const onCanvas = () =>
  app.rootGraph.nodes
    .filter((node) => node.type.startsWith("Highwater"))
    .map((node) => node.badges.map((badge) => (typeof badge === "function" ? badge() : badge).text).filter((text) => /^V?RAM /.test(text)).join(""));
const inPage = () =>
  app.rootGraph.nodes
    .filter((node) => node.type.startsWith("Highwater"))
    .map((node) => document.querySelector(`[data-node-id="${node.id}"]`)?.innerText.match(/V?RAM \S+( fp8)?/)?.[0] ?? "");
const allEmpty = (texts) => texts.length === OURS.length && texts.every((text) => text === "");
const allBytes = (texts) => texts.length === OURS.length && texts.every((text) => BYTES.test(text));
const exampleIsOpen = () => window.app?.rootGraph?.nodes?.map((node) => node.type) ?? [];
const hasOurs = (types) => OURS.every((type) => types.includes(type));
const widget = (type, name, value) =>
  page.evaluate(
    ([type, name, value]) => {
      const node = app.rootGraph.nodes.find((node) => node.type === type);
      node.widgets.find((widget) => widget.name === name).value = value;
    },
    [type, name, value],
  );
const run = () => page.getByRole("button", { name: "Run", exact: true }).first().click();
const setting = (id, value) => page.evaluate(([id, value]) => app.extensionManager.setting.set(id, value), [id, value]);
const shoot = (name) => page.screenshot({ path: `${screenshots}/${name}.png` });

// A newcomer opens the address: the example is there, and Run is all it takes.
await page.goto(base);
await eventually("example is open", exampleIsOpen, hasOurs);
assert.deepEqual(
  await page.evaluate(() => Object.keys(LiteGraph.registered_node_types).filter((type) => type.startsWith("Highwater")).sort()),
  [...OURS, "HighwaterWatermark"].sort(),
);
await eventually("canvas before", onCanvas, allEmpty);
await run();
await eventually("canvas after", onCanvas, allBytes);
await eventually("report on its node", () => document.querySelector(".highwater-text")?.textContent ?? "", (text) => text.includes("tiny-flux/transformer"));
await eventually("image on its node", () => app.rootGraph.nodes.find((node) => node.type === "HighwaterSaveImage").imgs?.[0]?.naturalWidth, (width) => width === 64);
await shoot("canvas");

// The same values in the other renderer, and again after a reload.
await setting("Comfy.VueNodes.Enabled", true);
await eventually("Nodes 2.0 after the switch", inPage, allBytes);
await page.reload();
await eventually("example is open again", exampleIsOpen, hasOurs);
await eventually("Nodes 2.0 after a reload", inPage, allBytes);

// A graph of another id has nothing yet, though its nodes have the same ids. Then it runs, in fp8.
await page.evaluate(() => app.loadGraphData({ ...app.rootGraph.serialize(), id: crypto.randomUUID() }));
await eventually("Nodes 2.0 before", inPage, allEmpty);
await widget("HighwaterLoadPipeline", "precision", "fp8 scaled");
await run();
await eventually("Nodes 2.0 after", inPage, (texts) => allBytes(texts) && texts[0].endsWith(" fp8"));
assert.ok(Number.parseFloat((await page.evaluate(inPage))[0].slice(4)) < 35, "another workflow's loader was counted too");
const image = '[data-node-id="3"] img';
await eventually("image in Nodes 2.0", `document.querySelector('${image}')?.naturalWidth`, (width) => width === 64);
await page.waitForTimeout(400);
await shoot("nodes2");

// What is shown is not saved, and not sent.
const saved = await page.evaluate(() => JSON.stringify(app.rootGraph.serialize()));
assert.ok(!/V?RAM \d|report_text/.test(saved.replace(/"MarkdownNote".*?\]/, "")), "a readout was saved with the workflow");
assert.deepEqual(await page.evaluate(async () => Object.keys((await app.graphToPrompt()).output[4].inputs)), ["after"]);
assert.deepEqual(errors, [], "errors in the page");

// A value that cannot be used is explained at once, and marked on its node.
await widget("HighwaterLoadPipeline", "profile", "12");
await run();
await page.getByText(/'12' has no unit/).first().waitFor({ timeout: 20_000 });
await page.waitForTimeout(300);
await shoot("refused");
// One that fails only when the weights are known is explained too: there the page itself says only that it failed.
await widget("HighwaterLoadPipeline", "profile", "1MiB");
await run();
await page.getByText(/'1MiB' is too small: transformer needs at least/).first().waitFor({ timeout: 20_000 });
await page.waitForTimeout(300);
await shoot("failed");
assert.deepEqual(errors.filter((error) => !error.startsWith("PromptExecutionError")), [], "errors in the page");
console.log(`asked other servers: ${[...foreign].join(" ") || "none"}`);
await browser.close();
