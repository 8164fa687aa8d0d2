// @ts-check
// The sidebar's panel "Memory", and a badge in the top bar when a device is nearly full. Registers only; what is shown is
// made in view.js.
import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";
import "../page_texts.js"; // what is registered is in the user's language
import { change, get, giveBack, lend, live, markSetting } from "../server.js";
import { localeOf, text } from "../texts.js";
import { marksText } from "../watermark.js";
import { nodeAt } from "./components.js";
import { makeDeviceNews } from "./device_news.js";
import { makeEventLog } from "./event_log.js";
import { LISTS, isRunning, isWhole, nextAfter, withAnswer } from "./history.js";
import { closeToMark, marksOf } from "./marks.js";
import { makePanel } from "./view.js";

const TAB = "highwater-memory";
// An own key on the page's store is reactive: the top bar follows it.
const STORE = "highwaterPanel";
const LATE_MS = 60_000;

/** The newest report; runs, nodes, samples and advice change only while runs go on, and are asked for then. @type {Highwater.Report} */
let report = { version: 0, now_s: 0, server_id: "" };
/** From when on the next answer has to tell of runs, nodes and samples; undefined: all. @type {number | undefined} */
let toldUntil;
const events = makeEventLog((words) => get(`events?${words}`), draw, (error) => {
  console.warn("highwater: the events could not be read:", error); // the report's own question tells the user
});
/** When the server started, by this page's clock. @type {number} */
let startMs = 0;
/** The open panel, and a text that tells in which language it was made. @type {{ view: ReturnType<typeof makePanel>, language: string, close: () => void } | null} */
let open = null;
/** The last question before the queue changed, by its number: a run began, or ended. Then what is shown of runs is old. */
let changedAt = 0;
/** The question that the advice which is shown was the answer to, with all of the runs until then; 0: none. */
let shownAt = 0;

/** @param {number} seconds after the server's start */
const clock = (seconds) => new Date(startMs + seconds * 1000).toLocaleTimeString(localeOf(navigator.languages));

function draw() {
  if (!open) return;
  if (open.language !== text("panel.tooltip")) {
    const view = makePanel(document, actions);
    open.view.element.replaceWith(view.element);
    open = { ...open, view, language: text("panel.tooltip") };
  }
  open.view.show({ report, events: events.known(), root: app.rootGraph, clock });
}

/**
 * @param {Highwater.Report} now or parts of it
 * @param {number} turn the number of the question
 */
function take(now, turn) {
  const begin = Date.now() - now.now_s * 1000;
  const isOther = now.server_id !== report.server_id; // the server was started again
  // The least late answer tells best when the server started; none for long: the machine slept, or has another time.
  if (isOther || begin < startMs || begin > startMs + LATE_MS) startMs = begin;
  const isBegun = !isOther || isWhole(now);
  if (now.advice) shownAt = turn;
  if (now.samples) toldUntil = nextAfter(now);
  if (!isBegun) [shownAt, toldUntil] = [0, undefined];
  report = withAnswer(report, now);
  void events.update(now.server_id, now.after_s === undefined || now.left_out?.events ? undefined : now.events);
  draw();
  if (!isBegun) void live.ask();
}

/** Show a node of the open workflow. @param {string} executionId */
function goTo(executionId) {
  const node = /** @type {ComfyNode | undefined} */ (nodeAt(app.rootGraph, executionId));
  if (!node?.graph || !app.canvas) return;
  if (app.canvas.graph !== node.graph) app.canvas.setGraph(node.graph);
  app.canvas.deselectAll();
  app.canvas.select(node);
  app.canvas.centerOnNode(node);
}

/**
 * Ask for a placement, and move a component there.
 * @param {string} component
 * @param {string} placement where it is
 */
async function move(component, placement) {
  const title = text("panel.move_title", { component });
  const wish = await app.extensionManager.dialog.prompt({ title, message: text("panel.move_where"), defaultValue: placement });
  if (!wish?.trim()) return;
  await change(title, "move", { component, placement: wish.trim() }, (answer) => answer.text);
}

/**
 * Set how much of a device stays free, and keep that in the page's settings, which pass it on once more and tell it.
 * @param {string} device
 * @param {import("./marks.js").Marks} wanted
 */
const setMark = (device, wanted) => markSetting.move(
  () => marksOf(report.devices ?? [], device, wanted),
  (marks, isSaved) => change(text("panel.mark_of", { device }), "watermark", { marks }, (answer) => (isSaved ? marksText(answer.watermarks, answer.notes) : null)),
);

const actions = {
  goTo,
  move,
  setMark,
  lend,
  giveBack,
  /** @param {string} component */
  release: (component) => change(text("panel.release_title", { component }), "release", { component }, ({ released }) => {
    const stays = released.find(({ left_bytes }) => left_bytes === 0);
    if (stays) throw new Error(text("panel.stays", { component, device: stays.device })); // asked for, and not done
    return null;
  }),
  /**
   * @param {string} component
   * @param {boolean} keep
   */
  keep: (component, keep) => change(text("panel.keep_title", { component }), "keep", { component, keep }, () => null),
};

/** Have the server measure from now on, if no workflow has had a node of ours yet, and show what is. */
async function follow() {
  if (await change(text("panel.title"), "follow", {}, () => null)) await live.ask();
}

/** @returns {string[]} */
function parts() {
  const always = ["devices", "components", "loaders", "open_nodes"];
  // What came since is short: events come with it. From the begin on they would leave less room to the others.
  const lists = toldUntil === undefined ? LISTS : [...LISTS, "events"];
  if (shownAt > changedAt) return isRunning(report) ? [...always, ...lists] : always;
  return [...always, ...lists, "advice"];
}

/** What the top bar follows: read back from the page's store, see `texts` in extension.js. @returns {{ nearlyFull: string }} */
function store() {
  app.extensionManager[STORE] ??= { nearlyFull: "" };
  return app.extensionManager[STORE];
}

const news = makeDeviceNews();

/** @param {import("./device_news.js").Told & { devices?: import("./bars.js").Device[] }} told */
function showNearlyFull({ devices, ...told }) {
  if (!devices || !news.take(told)) return;
  store().nearlyFull = closeToMark(devices).map(({ name }) => (name === "cpu" ? text("panel.ram") : name)).join(", ");
}

live.read(() => (news.isDoubtful() ? ["devices"] : []), showNearlyFull);

app.registerExtension({
  name: "highwater.panel",

  get topbarBadges() {
    const devices = store().nearlyFull;
    return devices ? [{ text: text("panel.nearly_full", { devices }), variant: /** @type {const} */ ("warning"), tooltip: text("panel.nearly_full_why", { devices }) }] : [];
  },

  afterConfigureGraph: draw,

  setup() {
    api.addEventListener("status", () => void (changedAt = live.asked()));
    // At the end of a node the server tells of devices unasked: a question for them costs it as much as all badges.
    api.addEventListener("highwater.memory", ({ detail }) => {
      news.happened(detail);
      showNearlyFull(detail);
    });
    app.extensionManager.registerSidebarTab({
      id: TAB,
      icon: "pi pi-microchip",
      title: text("panel.title"),
      tooltip: text("panel.tooltip"),
      type: "custom",
      /** @param {HTMLElement} element may be the one of the last call */
      render(element) {
        const view = open?.view ?? makePanel(document, actions);
        element.replaceChildren(view.element);
        if (open) return;
        [shownAt, toldUntil] = [0, undefined];
        open = { view, language: text("panel.tooltip"), close: live.read(parts, take, () => toldUntil) };
        draw();
        void follow();
      },
      destroy() {
        open?.close();
        open = null;
      },
    });
  },
});
