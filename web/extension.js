// @ts-check
// Shows the memory manager's numbers in the page: a badge on every node that ran, and a notice when something
// does not fit. Registers only; what is shown is made in readout.js.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { badgeText, keyOf, keysOf, makeTextBox, noticeOfEvent, noticeOfFailure, precisionOf } from "./readout.js";

/** @typedef {import("./readout.js").NodeReport} NodeReport */

// An own key on the page's store becomes reactive in the page's own Vue. That is what makes badges live in
// Nodes 2.0, where nothing else tells a badge to be drawn again; the page offers no documented way.
const STORE = "highwaterReadouts";
const NOTICE_MS = 20_000;

/**
 * Badge texts by key. Made before any badge reads it, and read back from the store: what is assigned is the plain
 * object, and a badge that reads that one is never drawn again.
 * @returns {Record<string, string>}
 */
function texts() {
  app.extensionManager[STORE] ??= {};
  return app.extensionManager[STORE];
}

/** Reports of workflows that are not open now: workflow id -> node id -> report. @type {Map<string, Map<string, NodeReport>>} */
const aside = new Map();

/**
 * Show a node's report, or keep it until its workflow is opened.
 * @param {NodeReport} node
 * @param {string} precision
 */
function showNode(node, precision) {
  const root = app.rootGraph;
  if (node.workflow_id && node.workflow_id !== root.id) {
    const nodes = aside.get(node.workflow_id) ?? new Map();
    aside.set(node.workflow_id, nodes.set(node.node_id, node));
    return;
  }
  for (const key of keysOf(root, node.node_id)) texts()[key] = badgeText(node, precision);
  app.canvas?.setDirty(true, true); // the canvas renderer draws on demand
}

/**
 * Show the newest report of every node. The components say in which precision a node's models are.
 * @param {Iterable<NodeReport>} nodes
 */
async function showNodes(nodes) {
  const newest = [...nodes];
  const loaders = newest.some((node) => Object.keys(node.tiers).length > 0);
  const components = loaders ? (await fetchReport("components")).components : [];
  for (const node of newest) showNode(node, precisionOf(components, node));
}

/** @param {string} parts comma-separated names of the report's parts */
async function fetchReport(parts) {
  const response = await api.fetchApi(`/highwater/report?only=${parts}`);
  if (!response.ok) throw new Error(`highwater: the report could not be read (${response.status})`);
  return response.json();
}

app.registerExtension({
  name: "highwater.readouts",

  nodeCreated(node) {
    texts();
    const badge = new LGraphBadge({ text: "", fgColor: "#e6f4f7", bgColor: "#155e75" });
    // Called at every draw, or inside a computed value: cheap, and reads nothing but the store.
    node.badges.push(() => {
      const key = keyOf(node);
      badge.text = (key && texts()[key]) || ""; // no text, no badge
      return badge;
    });
    if (node.comfyClass === "HighwaterMemoryReport") addTextBox(node);
  },

  async afterConfigureGraph() {
    const nodes = aside.get(app.rootGraph.id);
    aside.delete(app.rootGraph.id);
    if (nodes) await showNodes(nodes.values());
  },

  async setup() {
    api.addEventListener("highwater.memory", async ({ detail }) => {
      if (detail.type === "node") await showNodes([detail]);
      notify(noticeOfEvent(detail));
    });
    api.addEventListener("execution_error", ({ detail }) => notify(noticeOfFailure(detail)));
    // Events are not repeated after a reload.
    await showNodes((await fetchReport("nodes")).nodes);
  },
});

/** @param {ReturnType<typeof noticeOfEvent> | ReturnType<typeof noticeOfFailure>} notice */
function notify(notice) {
  if (notice) app.extensionManager.toast.add({ ...notice, life: NOTICE_MS });
}

/**
 * Give a node of ours a box for its text; the page shows the text of its own nodes only.
 * @param {ComfyNode} node
 */
function addTextBox(node) {
  const box = makeTextBox(document);
  const widget = node.addDOMWidget("report_text", "highwater-text", box, { serialize: false, getMinHeight: () => 140 });
  widget.serialize = false; // both are needed to keep it out of saved workflows
  const onExecuted = node.onExecuted;
  node.onExecuted = function (output) {
    onExecuted?.call(this, output);
    box.textContent = (output.text ?? []).join("\n");
  };
}
