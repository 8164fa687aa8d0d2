// @ts-check
// The memory panel as a whole. Knows nothing of the page: it imports only what node can test.
import { said, text } from "../texts.js";
import { barsOf, makeBars } from "./bars.js";
import { makeComponentTable } from "./component_table.js";
import { rowsOf } from "./components.js";
import { make } from "./elements.js";
import { linesOf, makeEvents } from "./events.js";
import { STYLE } from "./style.js";
import { makeTimeline } from "./timeline.js";

/** Told apart on a dark page and on a light one. */
const COLOURS = ["#0e8aa8", "#c2620a", "#7c5cd6", "#2f8f46", "#c2417f", "#3b74d9", "#97790b", "#5f7d8c"];

/**
 * Return what gives every component a colour of its own for as long as it is asked, as far as there are enough.
 * @returns {(id: string) => string}
 */
export function makeColours() {
  /** @type {Map<string, string>} */
  const given = new Map();
  return (id) => {
    if (!given.has(id)) given.set(id, COLOURS[given.size % COLOURS.length]);
    return given.get(id) ?? "";
  };
}

/**
 * @typedef {Parameters<typeof makeBars>[1] & import("./component_table.js").Actions} Actions
 * @typedef {{ report: Highwater.Report, events: import("./events.js").Event[],
 *   root: import("../badges.js").GraphLike, clock: (seconds: number) => string }} Known
 *   the last report, the events so far, the open workflow, and the time of day of a second of the server
 */

/**
 * Make the panel.
 * @param {Document} document
 * @param {Actions} actions
 */
export function makePanel(document, actions) {
  const colourOf = makeColours();
  const advice = make(document, "ul", { class: "hw-advice" });
  const bars = make(document, "ul", { class: "hw-list" });
  const components = makeComponentTable(document, actions);
  const none = make(document, "p", { class: "hw-quiet", text: text("panel.no_components") });
  const events = makeEvents(document);
  const timeline = makeTimeline(document, colourOf);
  const section = (/** @type {string} */ title, /** @type {HTMLElement[]} */ ...children) =>
    make(document, "section", { "aria-label": title }, make(document, "h3", { text: title }), ...children);
  const timelineSection = section(text("panel.timeline"), timeline.element);
  const element = make(document, "div", { class: "hw-panel" },
    make(document, "style", { text: STYLE }),
    make(document, "h2", { text: text("panel.title") }),
    advice,
    section(text("panel.devices"), bars),
    section(text("panel.components"), none, components.element),
    timelineSection,
    section(text("panel.events"), events.element),
  );
  const showBars = makeBars(bars, actions);
  return {
    element,
    /** @param {Known} known */
    show({ report, events: told, root, clock }) {
      const lines = (report.advice ?? []).map(said);
      if (lines.join("\n") !== [...advice.children].map((line) => line.textContent).join("\n")) {
        advice.replaceChildren(...lines.map((line) => make(document, "li", { text: line })));
      }
      advice.hidden = lines.length === 0;
      const rows = rowsOf(report, { root, colourOf, clock });
      showBars(barsOf(report, colourOf));
      components.show(rows);
      none.hidden = rows.length > 0;
      timelineSection.hidden = !timeline.show(report);
      events.show(linesOf(told, report, clock));
    },
  };
}
