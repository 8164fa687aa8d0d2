// A page in Chromium for the scripts beside this one: asks no other server, notes its errors, and waits for values.
import assert from "node:assert/strict";
import { chromium } from "playwright-core";

// What the page says by itself, collected in ComfyUI without this pack, with 1.48.7 and 1.58.1, in both renderers: it asks
// for files of the user that need not be there, and uses what it calls deprecated. The second pattern is of the address.
const ITS_OWN = [
  [/^Failed to load resource: .* 404 /, /^\/(api\/)?(userdata[/?]|user\.css)/],
  [/^ComfyApp graph accessed before initialization$/, /^\/assets\//],
  [/^\[ComfyUI\] The legacy queue\/history menu is deprecated\./, /^\/assets\//],
  [/^\[MaskEditor\] ComfyApp\.open_maskeditor is deprecated\./, /^\/assets\//],
  [/^WARNING: Invalid layout total size: /, /^\/assets\//],
  [/^input\.link is deprecated\./, /^\/assets\//],
  [/^The trigger event was undefined when addNode was called\.$/, /^\/assets\//],
  [/^(Connecting to '|Fetch API cannot load )https:\/\/huggingface\.co\//, /^\/assets\//], // where ComfyUI itself forbids it
  [/^Locale "\w+" not shipped; using "en"$/, /^\/assets\//],
];
// Never its own: lines of our scripts, and about our addresses.
const OURS = /\/highwater\/|^highwater\b/;

/** Whether the page says a line without this pack, too. The address is without the page's own origin. */
const isItsOwn = (text, address) => {
  if (OURS.test(text) || OURS.test(address)) return false;
  const isRefused = /^Failed to load resource: net::ERR_FAILED/.test(text) && /^https:/.test(address); // it asked others, see below
  return isRefused || ITS_OWN.some(([said, from]) => said.test(text) && from.test(address));
};

// Ends what hangs: on a busy machine a page takes minutes.
export const PATIENCE_MS = 300_000;
const QUIET_MS = 2_000;
const QUIET = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];

/** The lines that none of the patterns matches: what a script provokes, it names. @param {string[]} lines */
export const without = (lines, ...provoked) => lines.filter((line) => !provoked.some((pattern) => pattern.test(line)));
/** What the page says of an answer with a status, by the end of the address. */
export const answered = (status, path) => new RegExp(`^Failed to load resource: .* ${status} .*\\(\\S*/${path}\\)$`);
// What it says of messages that only the tests' nodes send, and of a refused prompt.
export const OF_THE_TEST_PACK = /Unknown message type highwater_test\./;
// What it says of an event that comes while it loads, before the pack's script has run; the script asks for the report then.
export const BEFORE_THE_SCRIPT = /^Unhandled message: \{"type": "highwater\.memory"/;
export const REFUSED = [/^PromptExecutionError/, answered(400, "prompt")];

/**
 * Open a browser at no address yet. `errors` grows with the errors and warnings of the page that are not its own, each with
 * the address that it is about; `foreign` with whom it asked.
 */
export async function openPage(base, executablePath, screenshots, deviceScaleFactor = 1) {
  const started = Date.now();
  const browser = await chromium.launch({
    executablePath,
    timeout: PATIENCE_MS,
    headless: true,
    args: ["--no-sandbox", "--disable-gpu", "--disable-quic", ...QUIET],
  });
  const page = await browser.newPage({ viewport: { width: 1600, height: 900 }, deviceScaleFactor });
  page.setDefaultTimeout(PATIENCE_MS);
  const errors = [];
  page.on("pageerror", (error) => errors.push(String(error)));
  page.on("console", (message) => {
    const address = message.location().url.replace(base, "");
    if (["error", "warning"].includes(message.type()) && !isItsOwn(message.text(), address)) errors.push(`${message.text()} (${address})`);
  });
  // What is asked of ours and not answered yet, and when the page asked last.
  const open = new Set();
  let lastAsked = Date.now();
  page.on("request", (request) => {
    if (!new URL(request.url()).pathname.includes("/highwater/")) return;
    open.add(request);
    lastAsked = Date.now();
  });
  for (const end of ["requestfinished", "requestfailed"]) page.on(end, (request) => open.delete(request));
  page.on("framenavigated", () => open.clear());
  const foreign = new Set();
  await page.route(
    (url) => url.origin !== base,
    (route) => (foreign.add(new URL(route.request().url()).origin), route.abort()),
  );

  const shoot = (name) => page.screenshot({ path: `${screenshots}/${name}.png` });

  /** Read a value in the page until it is what is wanted; the last value is in the error. */
  async function eventually(name, read, wanted, timeout = PATIENCE_MS) {
    const end = Date.now() + timeout;
    let value;
    do {
      value = await page.evaluate(read);
      if (wanted(value)) return console.log(`${((Date.now() - started) / 1000).toFixed(1)} s  ${name}: ${JSON.stringify(value)}`);
      await page.waitForTimeout(150);
    } while (Date.now() < end);
    await shoot("stuck");
    assert.fail(`${name}: still ${JSON.stringify(value)} after ${timeout} ms; errors: ${JSON.stringify(errors)}`);
  }

  /** Wait until the page has opened what it opens by itself: that takes the place of what is opened before. */
  const ready = (name = "page is ready") => eventually(name, hasOpened, Boolean);

  /** Wait until the page has asked nothing of ours for a while, and has all answers. */
  async function quiet() {
    while (open.size > 0 || Date.now() - lastAsked < QUIET_MS) await page.waitForTimeout(100);
  }

  /** Type into the dialog that asks for something, and wait until it is gone: the next one looks the same. */
  async function answerDialog(words) {
    await page.getByRole("dialog").getByRole("textbox").fill(words);
    await page.keyboard.press("Enter");
    await page.getByRole("dialog").waitFor({ state: "detached" });
  }

  /** Wait until an element is drawn where it stays; returns its place. */
  async function placeOf(locator) {
    for (let before = null; ; ) {
      const place = await locator.boundingBox();
      if (place && JSON.stringify(place) === before) return place;
      before = JSON.stringify(place);
      await page.waitForTimeout(150);
    }
  }

  const setting = (id, value) => page.evaluate(([id, value]) => app.extensionManager.setting.set(id, value), [id, value]);

  /** Write to the widgets of the first node of a class. */
  const widgets = (type, values) =>
    page.evaluate(
      ([type, values]) => {
        const node = app.rootGraph.nodes.find((node) => node.type === type);
        for (const [name, value] of Object.entries(values)) node.widgets.find((widget) => widget.name === name).value = value;
      },
      [type, values],
    );

  return { browser, page, errors, foreign, shoot, eventually, ready, quiet, answerDialog, placeOf, setting, widgets };
}

/** Whether the page has opened what it opens by itself. */
const hasOpened = () => Boolean(window.app?.rootGraph && !app.extensionManager.spinner && app.extensionManager.workflow?.activeWorkflow);

/** Whether the server has nothing to run; runs in the page. */
export const isIdle = async () => {
  const { queue_running: running, queue_pending: pending } = await (await fetch("/api/queue")).json();
  return running.length + pending.length === 0;
};

/** What the badge of the first node of a class says now. */
const textOfBadge = (type) => {
  const node = app.rootGraph.nodes.find((node) => node.type === type);
  return node.badges.map((badge) => (typeof badge === "function" ? badge() : badge)).find((badge) => badge.onClick && badge.text)?.text ?? "";
};

/** Where on the screen the canvas renderer has drawn the badge of the first node of a class; null where it has none. */
const placeOfBadge = (type) => {
  const node = app.rootGraph.nodes.find((node) => node.type === type);
  const badge = node.badges.map((badge) => (typeof badge === "function" ? badge() : badge)).find((badge) => badge.onClick && badge.text);
  if (!badge?.boundingRect) return null;
  const [left, top, width, height] = badge.boundingRect;
  const { scale, offset } = app.canvas.ds;
  const canvas = app.canvas.canvas.getBoundingClientRect();
  return [canvas.left + (node.pos[0] + left + width / 2 + offset[0]) * scale, canvas.top + (node.pos[1] + top + height / 2 + offset[1]) * scale];
};

async function clickBadge(page, type) {
  if (await page.evaluate(() => LiteGraph.vueNodesMode)) {
    const id = await page.evaluate((type) => app.rootGraph.nodes.find((node) => node.type === type).id, type);
    const text = await page.evaluate(textOfBadge, type);
    // It may say something else by now, or lie where something of the page covers it: who asked tries again.
    const center = () => page.evaluate((id) => app.canvas.centerOnNode(app.rootGraph.getNodeById(id)), id);
    await page.locator(`[data-node-id="${id}"]`).getByText(text, { exact: true }).click({ timeout: 5_000 }).catch(center);
  } else {
    const place = await page.evaluate(placeOfBadge, type);
    if (place) await page.mouse.click(...place);
  }
}

/** Click on the badge of a node until what it tells is as expected: the last report of a run comes after its end. */
export async function expectDetail(page, type, pattern, title) {
  for (const end = Date.now() + PATIENCE_MS; ; ) {
    const told = await readDetail(page, type, title);
    if (pattern.test(told) || Date.now() > end) return assert.match(told, pattern);
    await page.waitForTimeout(500);
  }
}

/** Click on the badge of a node, read what it tells, and close that again by Escape. */
async function readDetail(page, type, title = "Memory of this node") {
  const box = page.getByRole("dialog", { name: title });
  // A workflow that the page opens or moves meanwhile takes the box away, or the badge from under the click.
  for (const end = Date.now() + PATIENCE_MS; ; ) {
    await clickBadge(page, type);
    const told = await box.innerText({ timeout: 5_000 }).catch(() => null);
    if (told !== null) {
      await page.keyboard.press("Escape");
      await box.waitFor({ state: "detached" });
      return told;
    }
    assert.ok(Date.now() < end, `the badge of ${type} opens no box "${title}"`);
  }
}

// Badges by node class, read in the page: by the canvas renderer's own call, or as text. Functions that the page runs
// see nothing of this module: what a badge looks like stands in both.
export const onCanvas = () =>
  Object.fromEntries(
    app.rootGraph.nodes.map((node) => [
      node.type,
      node.badges
        .map((badge) => (typeof badge === "function" ? badge() : badge).text)
        .filter((text) => /^(\+?[\d.]+[BKMGT](\/[\d.]+[KMGT])? gpu:\d+|streams \d+\/\d+|RAM [\d.]+[BKMGT]( \w+)?|\d+ GPUs \+?[\d.+BKMGT]+|disk)$/.test(text))
        .join(""),
    ]),
  );
export const inPage = () =>
  Object.fromEntries(
    app.rootGraph.nodes.map((node) => [
      node.type,
      document.querySelector(`[data-node-id="${node.id}"]`)?.innerText.match(/\+?[\d.]+[BKMGT](\/[\d.]+[KMGT])? gpu:\d+|streams \d+\/\d+|RAM [\d.]+[BKMGT]( fp8)?|\d+ GPUs \+?[\d.+BKMGT]+|^disk$/m)?.[0] ?? "",
    ]),
  );
// What of it stands in a workflow that was saved.
export const SAVED = /[KMGT] gpu:\d|streams \d|RAM [\d.]+[BKMGT]\b|report_text/;
