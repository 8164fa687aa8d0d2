// @ts-check
// The events of the memory panel: what was loaded, evicted and asked for, in which run and node, and why. Knows nothing of
// the page: it imports only what node can test.
import { text } from "../texts.js";
import { shortBytes } from "../units.js";
import { make, makeRows } from "./elements.js";

/**
 * @typedef {Highwater.Answers["events"]["events"][number]} Event
 * @typedef {{ id: string, kind: string, title: string, time: string, what: string, reason: string, when: string }} Line
 *   the title is the kind in the user's language
 */

/** So many are shown at once. */
const MOST_LINES = 100;

/**
 * Return the lines of events, the newest first.
 * @param {Event[]} events the oldest first
 * @param {{ runs?: Highwater.Report["runs"], nodes?: Highwater.Report["nodes"] }} report tells what runs and nodes are called
 * @param {(seconds: number) => string} clock
 * @returns {Line[]}
 */
export function linesOf(events, { runs = [], nodes = [] }, clock) {
  const runNames = new Map(runs.map((run) => [run.run_id, runName(run)]));
  const titles = new Map(nodes.map((node) => [`${node.run_id}/${node.node_id}`, node.title]));
  return events.map((event, at) => {
    const title = event.node_id === null ? "" : titles.get(`${event.run_id}/${event.node_id}`) || text("panel.node", { id: event.node_id });
    const run = event.run_id ? text("panel.run", { name: runNames.get(event.run_id) ?? shortened(event.run_id) }) : "";
    const amount = event.bytes > 0 ? shortBytes(event.bytes) : "";
    return {
      id: `${event.t_s} ${at} ${event.kind} ${event.component}`,
      kind: event.kind,
      title: kindTitle(event.kind),
      time: clock(event.t_s),
      what: [event.component, event.device, amount].filter(Boolean).join(" "),
      reason: event.reason,
      when: [run, title].filter(Boolean).join(", "),
    };
  }).reverse();
}

/** @param {string} kind */
const kindTitle = (kind) => text(`panel.event_kind.${kind}`);

/** @param {string} name */
const isId = (name) => /^[0-9a-f]{8}-[0-9a-f-]{27}$/.test(name);

/** What a run is called: runs of a workflow that was not saved are all named by its id. @param {{ run_id: string, name: string }} run */
export const runName = ({ run_id: id, name }) => (isId(name) ? shortened(id) : name);

/** The begin of a prompt's id tells it from others. @param {string} id */
const shortened = (id) => (isId(id) ? id.slice(0, 8) : id);

/**
 * Return the lines that have all words of a text, in any case, and are of a kind.
 * @param {Line[]} lines
 * @param {{ words: string, kind: string }} filter "" for all
 */
export function filtered(lines, { words, kind }) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  return lines.filter((line) => {
    if (kind && line.kind !== kind) return false;
    const told = `${line.title} ${line.what} ${line.reason} ${line.when}`.toLowerCase();
    return wanted.every((word) => told.includes(word));
  });
}

/**
 * The list of events with what filters it.
 * @param {Document} document
 */
export function makeEvents(document) {
  const words = make(document, "input", { type: "search", placeholder: text("panel.filter"), "aria-label": text("panel.filter") });
  const kinds = make(document, "select", { "aria-label": text("panel.kind") });
  const list = make(document, "ol", { class: "hw-events" });
  const told = make(document, "p", { class: "hw-quiet", role: "status" });
  const showRows = makeRows(list, (/** @type {Line} */ line) => makeLine(document, line));
  /** @type {Line[]} */
  let lines = [];

  function draw() {
    const found = filtered(lines, { words: words.value, kind: kinds.value });
    showRows(found.slice(0, MOST_LINES));
    told.textContent = found.length === 0 ? text("panel.no_events") : text("panel.shown_events", { shown: Math.min(found.length, MOST_LINES), all: lines.length });
  }
  words.addEventListener("input", draw);
  kinds.addEventListener("change", draw);
  return {
    element: make(document, "div", {}, make(document, "div", { class: "hw-filter" }, words, kinds), told, list),
    /** @param {Line[]} now */
    show(now) {
      lines = now;
      const chosen = kinds.value;
      const found = ["", ...new Set(lines.map((line) => line.kind))].sort();
      if (found.join() !== [...kinds.children].map((option) => option.getAttribute("value")).join()) {
        kinds.replaceChildren(...found.map((kind) => make(document, "option", { value: kind, text: kind ? kindTitle(kind) : text("panel.all_kinds") })));
        kinds.value = found.includes(chosen) ? chosen : "";
      }
      draw();
    },
  };
}

/**
 * @param {Document} document
 * @param {Line} line
 */
function makeLine(document, line) {
  const kind = make(document, "span", { class: "hw-kind", text: line.title });
  const what = make(document, "span", { class: "hw-name", text: line.what });
  const when = make(document, "div", { class: "hw-quiet" });
  const fill = (/** @type {Line} */ now) => {
    when.textContent = [now.time, now.when].filter(Boolean).join(", ");
  };
  const head = make(document, "div", { class: "hw-event" }, kind, what);
  return { element: make(document, "li", {}, head, make(document, "div", { text: line.reason }), when), fill };
}
