// @ts-check
// Shows the memory manager's numbers in the page: a badge on every node that holds or used memory, and a notice when
// something does not fit. Registers only; what is shown is made in badges.js and readout.js.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { badgeText, keyOf, shownIn } from "./badges.js";
import { detailOf, fillDetail, makeDetail } from "./detail.js";
import { useLanguage } from "./page_texts.js";
import { noticeOfEvent, noticeOfFailure } from "./readout.js";
import { makeAsker, makeSoon } from "./report.js";
import { limitBody, limitsText } from "./limits.js";
import { addNotes, addTextBox, showReports } from "./node_boxes.js";
import { makeListener } from "./settings.js";
import { text } from "./texts.js";
import { marksText } from "./watermark.js";

/** @typedef {import("./badges.js").NodeReport & { run_id: string }} NodeReport */
/** @typedef {import("./badges.js").ComponentReport} ComponentReport */
/** @typedef {import("./badges.js").Loader} Loader */

// An own key on the page's store becomes reactive in the page's own Vue. That is what makes badges live in
// Nodes 2.0, where nothing else tells a badge to be drawn again; the page offers no documented way.
const STORE = "highwaterReadouts";
const NOTICE_MS = 20_000;
const ASK_MS = 200;
const ASK_IN_NODE_MS = 1_000;
// What changes while the page is open; executions of nodes are told one by one.
const NOW = "components,loaders,open_nodes";
const TYPING_MS = 1_000;
const TELLING_NODE = /^Highwater((Load|Manage)[A-Z]|(Watermark|Keep|Release|Limits|Verify|VerifyPipeline)$)/;

/**
 * Badge texts by key. Made before any badge reads it, and read back from the store: what is assigned is the plain
 * object, and a badge that reads that one is never drawn again.
 * @returns {Record<string, string>}
 */
function texts() {
  app.extensionManager[STORE] ??= {};
  return app.extensionManager[STORE];
}

/**
 * The newest report of every node: workflow id -> node id -> report, the oldest first. What a prompt without a
 * workflow's id did belongs to no workflow. @type {Map<string, Map<string, NodeReport>>}
 */
const reports = new Map();
/** What is loaded now, and which nodes show it, as far as the page has asked. @type {{ components: ComponentReport[], loaders: Loader[] }} */
let now = { components: [], loaders: [] };

/** What the nodes of the open workflow show, by their keys. @type {Map<string, import("./badges.js").Shown>} */
let shown = new Map();

/** @param {NodeReport} node */
function keep(node) {
  if (node.workflow_id === null) return;
  const nodes = reports.get(node.workflow_id) ?? new Map();
  const before = nodes.get(node.node_id);
  // An answer about a node that ran may come after the event that it has ended.
  if (before && before.run_id === node.run_id && before.seconds > node.seconds) return;
  nodes.delete(node.node_id);
  reports.set(node.workflow_id, nodes.set(node.node_id, node));
}

/** Show what is known of the nodes of the open workflow; those of others wait until it is opened. */
function showNodes() {
  const root = app.rootGraph;
  shown = shownIn(root, { ...now, nodes: reports.get(root.id)?.values() ?? [] });
  const store = texts();
  let isChanged = false;
  for (const key of new Set([...shown.keys(), ...Object.keys(store)])) {
    if (!key.startsWith(`${root.id}/`)) continue;
    const badge = badgeText(shown.get(key) ?? { parts: [] });
    if ((store[key] ?? "") === badge) continue;
    store[key] = badge;
    isChanged = true;
  }
  if (isChanged) app.canvas?.setDirty(true, true); // the canvas renderer draws on demand
  if (detail) fillDetail(detail.box, detailOf(shown.get(detail.key) ?? { parts: [] }));
}

/** The open box of a badge that was clicked. @type {{ key: string, box: HTMLElement } | null} */
let detail = null;

/**
 * Show what is known of a node beside its badge, until the next click elsewhere, or Escape.
 * @param {ComfyNode} node
 * @param {MouseEvent} event the click on its badge
 */
function openDetail(node, event) {
  closeDetail();
  const key = keyOf(node);
  const known = key && texts()[key] ? shown.get(key) : undefined;
  if (!key || !known) return;
  const place = { x: event.clientX, y: event.clientY, width: window.innerWidth, height: window.innerHeight };
  detail = { key, box: makeDetail(document, detailOf(known), place) };
  document.body.append(detail.box);
  detail.box.focus();
  document.addEventListener("pointerdown", closeUnlessInside, true);
  document.addEventListener("keydown", closeOnEscape, true);
}

function closeDetail() {
  document.removeEventListener("pointerdown", closeUnlessInside, true);
  document.removeEventListener("keydown", closeOnEscape, true);
  detail?.box.remove();
  detail = null;
}

/** @param {Event} event */
function closeUnlessInside(event) {
  if (!(event.target instanceof Node && detail?.box.contains(event.target))) closeDetail();
}

/** @param {KeyboardEvent} event */
function closeOnEscape(event) {
  if (event.key !== "Escape") return;
  event.stopPropagation();
  closeDetail();
}

/**
 * Take a report. Its nodes are those of before the page listened: an event that came meanwhile is newer.
 * @param {{ components: ComponentReport[], loaders: Loader[], open_nodes: NodeReport[], nodes?: NodeReport[] }} report
 */
function take(report) {
  now = report;
  const isNews = (/** @type {NodeReport} */ node) => !reports.get(node.workflow_id ?? "")?.has(node.node_id);
  const before = (report.nodes ?? []).filter(isNews);
  [...before, ...report.open_nodes].forEach(keep);
  showNodes();
}

/** @param {unknown} error */
function tellFailure(error) {
  console.warn("highwater: the report could not be read:", error);
  const reason = error instanceof Error ? error.message : String(error);
  notify({ severity: "warn", summary: text("notice.no_report"), detail: text("notice.no_report_why", { reason }) });
}

const ask = makeAsker(fetchReport, { show: take, fail: tellFailure });
// A loader's own report does not know what is loaded: ComfyUI loads a model when another node needs it.
const askNow = makeSoon(() => void ask(NOW), ASK_MS);
const askInNode = makeSoon(() => void ask(NOW), ASK_IN_NODE_MS);

/**
 * @param {string} parts comma-separated names of the report's parts
 * @returns {Promise<Highwater.PageReport>}
 */
async function fetchReport(parts) {
  const response = await api.fetchApi(`/highwater/report?only=${parts}`);
  if (!response.ok) throw new Error(`HTTP ${response.status}`);
  return response.json();
}

/** Make the pipelines that the example of a pipeline uses: random weights, small enough for any machine. */
async function makeTinyPipelines() {
  const summary = "Tiny pipelines";
  notify({ severity: "info", summary, detail: "Creating the pipelines takes some seconds." });
  try {
    const answer = await post("tiny-pipelines", {});
    const names = Object.keys(answer.pipelines).join(", ");
    notify({ severity: "success", summary, detail: `${names} are in models/diffusers; press R to see them in Load Pipeline.` });
  } catch (error) {
    notify({ severity: "error", summary, detail: error instanceof Error ? error.message : String(error) });
  }
}

/** Lend memory of a device to another program: asks how much, and for how long. */
async function lend() {
  const summary = "Lend GPU memory";
  const wish = await app.extensionManager.dialog.prompt({
    title: summary,
    message: "How much, for how long, and where there are several GPUs, of which: 8GiB 60s gpu:0",
    defaultValue: "8GiB 60s",
  });
  if (!wish) return;
  const [size, time, device] = wish.trim().split(/\s+/);
  const body = { size: size ?? "", for: time ?? "", ...(device ? { device } : {}) };
  await change(summary, "lend", body, (answer) => {
    const missing = answer.missing_bytes ? ` ${toMiB(answer.missing_bytes)} follow when the node that runs ends.` : "";
    return `${toMiB(answer.freed_bytes)} freed, ${toMiB(answer.free_bytes)} free on ${answer.device}.${missing}`;
  });
}

/** Give lent memory back before its time is up. */
async function giveBack() {
  await change("Give lent memory back", "lend/give-back", {}, (answer) => `${toMiB(answer.lent_bytes)} of ${answer.device} are given back.`);
}

/**
 * Keep as much memory free as the setting says. What the page passes on as it opens is told only where it is refused.
 * @param {string} marks
 * @param {boolean} isChanged
 */
async function keepFree(marks, isChanged) {
  await change("Memory to keep free", "watermark", { marks }, (answer) => (isChanged ? marksText(answer.watermarks) : null));
}

/**
 * Limit how many models stay loaded, or for how long idle ones do, as a setting says.
 * @param {"keep_loaded" | "idle"} name
 * @param {number} value
 * @param {boolean} isChanged
 */
async function limit(name, value, isChanged) {
  await change("Limits for idle models", "limits", limitBody(name, value), (answer) => (isChanged ? limitsText(answer) : null));
}

/** @param {number} bytes */
const toMiB = (bytes) => `${Math.round(bytes / 2 ** 20)} MiB`;

/**
 * Ask the server to change something, and tell what came of it.
 * @template {keyof Highwater.Requests & keyof Highwater.Answers} Path
 * @param {string} summary
 * @param {Path} path
 * @param {Highwater.Requests[Path]} body
 * @param {(answer: Highwater.Answers[Path]) => string | null} tell null: nothing to tell
 */
async function change(summary, path, body, tell) {
  try {
    const detail = tell(await post(path, body));
    notify(detail === null ? null : { severity: "success", summary, detail });
  } catch (error) {
    notify({ severity: "error", summary, detail: error instanceof Error ? error.message : String(error) });
  }
}

/**
 * Post JSON to one of our addresses; returns its answer.
 * @template {keyof Highwater.Requests & keyof Highwater.Answers} Path
 * @param {Path} path
 * @param {Highwater.Requests[Path]} body
 * @returns {Promise<Highwater.Answers[Path]>}
 */
async function post(path, body) {
  const headers = { "Content-Type": "application/json" };
  const response = await api.fetchApi(`/highwater/${path}`, { method: "POST", headers, body: JSON.stringify(body) });
  const answer = await response.json().catch(() => ({ error: `the server answered HTTP ${response.status}` }));
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

app.registerExtension({
  name: "highwater.readouts",

  settings: [
    {
      id: "Highwater.Watermark",
      category: ["Highwater", "Memory", "Watermark"],
      name: "Memory to keep free: low and high mark",
      tooltip:
        "1GiB:2GiB for each GPU, or by device: gpu:0=5%:10%,host=4GiB:6GiB (host is the RAM). When less than the low mark would " +
        "be free, idle models are evicted until the high mark is free. A Watermark node counts instead for its device. " +
        "Empty: the default.",
      type: "text",
      defaultValue: "",
      onChange: makeListener((/** @type {string} */ marks, isChanged) => void keepFree(marks, isChanged), TYPING_MS, ""),
    },
    {
      id: "Highwater.MaxLoaded",
      category: ["Highwater", "Memory", "MaxLoaded"],
      name: "Models that stay loaded, at most",
      tooltip: "When another model is loaded, idle ones leave the GPU until no more are loaded. Models of ComfyUI leave between runs. 0: any number.",
      type: "number",
      defaultValue: 0,
      attrs: { min: 0, max: 1000, step: 1 },
      onChange: makeListener((/** @type {number} */ value, isChanged) => void limit("keep_loaded", value, isChanged), TYPING_MS, 0),
    },
    {
      id: "Highwater.IdleMinutes",
      category: ["Highwater", "Memory", "IdleMinutes"],
      name: "Unload idle models after minutes",
      tooltip: "A model that nothing used for so long leaves the GPU; it stays in RAM. 0: never.",
      type: "number",
      defaultValue: 0,
      attrs: { min: 0, max: 10080, step: 1 },
      onChange: makeListener((/** @type {number} */ value, isChanged) => void limit("idle", value, isChanged), TYPING_MS, 0),
    },
  ],
  commands: [
    { id: "Highwater.MakeTinyPipelines", label: "Highwater: make tiny pipelines", function: makeTinyPipelines },
    { id: "Highwater.Lend", label: "Highwater: lend GPU memory", function: lend },
    { id: "Highwater.GiveBack", label: "Highwater: give lent memory back", function: giveBack },
  ],
  menuCommands: [
    { path: ["Extensions", "Highwater"], commands: ["Highwater.MakeTinyPipelines", "Highwater.Lend", "Highwater.GiveBack"] },
  ],

  nodeCreated(node) {
    texts();
    const badge = new LGraphBadge({
      text: "",
      fgColor: "#e6f4f7",
      bgColor: "#155e75",
      onClick: (event) => openDetail(node, event),
    });
    // Called at every draw, or inside a computed value: cheap, and reads nothing but the store.
    node.badges.push(() => {
      const key = keyOf(node);
      badge.text = (key && texts()[key]) || ""; // no text, no badge
      return badge;
    });
    if (node.comfyClass === "HighwaterMemoryReport") addTextBox(node);
    if (TELLING_NODE.test(node.comfyClass ?? "")) addNotes(node);
  },

  afterConfigureGraph() {
    useLanguage(); // the page opens the workflow again when its language is changed
    closeDetail();
    showNodes();
    showReports();
  },

  async setup() {
    api.addEventListener("highwater.memory", ({ detail }) => {
      if (detail.type === "node") {
        keep(detail);
        showNodes();
      }
      askNow();
      notify(noticeOfEvent(detail));
    });
    // Long nodes tell how far they are; a run that computes nothing anew tells only that the queue changed.
    api.addEventListener("progress", askInNode);
    api.addEventListener("status", askNow);
    api.addEventListener("execution_error", ({ detail }) => notify(noticeOfFailure(detail, now.components.length > 0)));
    // Events are not repeated after a reload.
    await ask(`nodes,${NOW}&limit=500`); // a large workflow has more nodes than a report tells by default
  },
});

/** @param {{ severity: "success" | "info" | "warn" | "error", summary: string, detail: string } | null} notice */
function notify(notice) {
  if (notice) app.extensionManager.toast.add({ ...notice, life: NOTICE_MS });
}
