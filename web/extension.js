// @ts-check
// Shows the memory manager's numbers in the page: a badge on every node that holds or used memory, and a notice when
// something does not fit. Registers only; what is shown is made in badges.js and readout.js.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { badgeText, keyOf, shownIn } from "./badges.js";
import { commands, keybindings, menuCommands } from "./commands.js";
import { detailOf, fillDetail, makeDetail } from "./detail.js";
import { addNotes, addTextBox, loseConnection, showTexts, takeServer } from "./node_boxes.js";
import { makeNodeReports } from "./node_reports.js";
import { settings } from "./page_settings.js";
import { useLanguage } from "./page_texts.js";
import { noticeOfEvent, noticeOfFailure } from "./readout.js";
import { followServer, live, notify } from "./server.js";

/** @typedef {import("./badges.js").ComponentReport} ComponentReport */
/** @typedef {import("./badges.js").Loader} Loader */

// An own key on the page's store becomes reactive in the page's own Vue. That is what makes badges live in
// Nodes 2.0, where nothing else tells a badge to be drawn again; the page offers no documented way.
const STORE = "highwaterReadouts";
// These show a text of many lines.
const TEXT_NODES = new Set(["HighwaterMemoryReport", "HighwaterPlan"]);
const TELLING_NODE = /^Highwater((Load|Manage)[A-Z]|(Watermark|Keep|Release|Limits|Verify|QuantizeFile|VerifyPipeline)$)/;

/**
 * Badge texts by key. Made before any badge reads it, and read back from the store: what is assigned is the plain
 * object, and a badge that reads that one is never drawn again.
 * @returns {Record<string, string>}
 */
function texts() {
  app.extensionManager[STORE] ??= {};
  return app.extensionManager[STORE];
}

const reports = makeNodeReports();
/** What is loaded now, and which nodes show it, as far as the page has asked. @type {{ components: ComponentReport[], loaders: Loader[] }} */
let now = { components: [], loaders: [] };

/** What changes while the page is open; executions of nodes are told one by one. */
const CHANGING = ["components", "loaders", "open_nodes"];
/** Whether it is known what happened before the page listened to this server, or while the connection was lost. */
let hasPast = false;

/** What the nodes of the open workflow show, by their keys. @type {Map<string, import("./badges.js").Shown>} */
let shown = new Map();

/** Show all anew, in other words or units: badges from what is known, the panel from the next report. */
function redraw() {
  showNodes();
  void live.ask();
}

/** Whether nodes have badges at all. */
let hasBadges = true;

/** Show what is known of the nodes of the open workflow; those of others wait until it is opened. */
function showNodes() {
  const root = app.rootGraph;
  shown = shownIn(root, { ...now, nodes: reports.of(root.id) });
  const store = texts();
  let isChanged = false;
  for (const key of new Set([...shown.keys(), ...Object.keys(store)])) {
    if (!key.startsWith(`${root.id}/`)) continue;
    const badge = hasBadges ? badgeText(shown.get(key) ?? { parts: [] }) : "";
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

/** Take a report, or parts of one. What a server told that is gone is forgotten. @param {Highwater.Report} report */
function take(report) {
  now = { components: report.components ?? now.components, loaders: report.loaders ?? now.loaders };
  if (takeServer(report.server_id)) {
    reports.clear();
    hasPast = false;
  }
  if (report.nodes && report.after_s === undefined) hasPast = true;
  [...(report.nodes ?? []), ...(report.open_nodes ?? [])].forEach(reports.take);
  showNodes();
}

app.registerExtension({
  name: "highwater.readouts",

  settings: settings({ showBadges: (isOn) => (hasBadges = isOn), redraw }),
  commands,
  keybindings,
  menuCommands,

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
    if (TEXT_NODES.has(node.comfyClass ?? "")) addTextBox(node);
    if (TELLING_NODE.test(node.comfyClass ?? "")) addNotes(node);
  },

  afterConfigureGraph() {
    useLanguage(); // the page opens the workflow again when its language is changed
    closeDetail();
    showNodes();
    showTexts();
  },

  async setup() {
    api.addEventListener("highwater.memory", ({ detail }) => {
      if (detail.type === "node") {
        reports.take(detail);
        showNodes();
      }
      notify(noticeOfEvent(detail));
    });
    api.addEventListener("execution_error", ({ detail }) => notify(noticeOfFailure(detail, now.components.length > 0)));
    // A question for the past may fail: the next one asks for it again.
    live.read(() => (hasPast ? CHANGING : [...CHANGING, "nodes"]), take);
    followServer();
    // Events are not repeated after a reload, nor after a while without the server.
    const askForAll = () => {
      hasPast = false;
      return live.ask({ more: ["devices"], limit: 500 }); // a large workflow has more nodes than a report tells by default
    };
    api.addEventListener("reconnecting", loseConnection);
    api.addEventListener("reconnected", askForAll);
    await askForAll();
  },
});
