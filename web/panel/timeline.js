// @ts-check
// The timeline of the last runs: what each device held, drawn as SVG, with values under the pointer and a PNG of it. Knows
// nothing of the page: it imports only what node can test.
import { text } from "../texts.js";
import { shortBytes } from "../units.js";
import { runName } from "./events.js";
import { areaPath, makeScale, mostOf, peakPath, pointAt, pointsOf, spansOf, stepsOf, stopsOf, topOf } from "./time_scale.js";

/**
 * @typedef {Pick<Highwater.Report, "devices" | "runs" | "nodes" | "open_nodes" | "samples" | "now_s">} Report
 * @typedef {NonNullable<Highwater.Report["devices"]>[number]} Device
 * @typedef {import("./time_scale.js").Point} Point
 * @typedef {{ device: Device, points: Point[] }} Row
 * @typedef {{ rows: Row[], spans: import("./time_scale.js").Span[], steps: import("./time_scale.js").Step[], names: string[] }} Drawn
 *   what is drawn: a row for each device, and the components in their order from below
 */

export const FILE_NAME = "highwater-timeline.png";
const SVG = "http://www.w3.org/2000/svg";
const MOST_RUNS = 8;
const [LEFT, RIGHT, GAP] = [4, 4, 6];
const [ROW, HEAD, BELOW, KEY] = [72, 16, 16, 15];
const LEAST_WIDTH = 240;
/** A node that takes less has no line of its own: it would be one with its neighbour's. */
const LEAST_STEP = 3;
/** Pixels of a PNG for each of the picture: text stays sharp. */
const PNG_SCALE = 2;
/** The page's colours that the picture uses: alone, as a PNG, it has to bring them along. */
const COLOURS = ["--comfy-menu-bg", "--comfy-input-bg", "--input-text", "--descrip-text", "--border-color"];
/** What a letter of the picture takes, roughly. */
const LETTER = 6;

/**
 * Return what the timeline of a report shows; null where nothing ran.
 * @param {Report} report
 * @returns {Drawn | null}
 */
export function drawnOf({ devices = [], runs = [], nodes = [], open_nodes: open = [], samples = [], now_s: now }) {
  const spans = spansOf(runs, now, MOST_RUNS).map((span) => ({ ...span, name: runName({ run_id: span.id, name: span.name }) }));
  if (spans.length === 0 || samples.length === 0) return null;
  // What was left out of the samples is not known: a run of which none is there would look empty.
  const known = spans.filter(({ end }) => end >= samples[0].t_s);
  if (known.length === 0) return null;
  const rows = devices
    .map((device) => ({ device, points: pointsOf(samples, device.name, known[0].begin) }))
    .filter(({ points }) => points.some(({ allocated, peak, weights }) => allocated + peak > 0 || Object.keys(weights).length > 0));
  if (rows.length === 0) return null;
  const names = [...new Set(rows.flatMap(({ points }) => points.flatMap(({ weights }) => Object.keys(weights))))];
  return { rows, spans: known, steps: stepsOf([...nodes, ...open], known), names };
}

/**
 * What the timeline says at a second: the run, the node, and what each device held.
 * @param {Drawn} drawn
 * @param {number} seconds
 * @returns {string[]}
 */
export function linesAt({ rows, spans, steps, names }, seconds) {
  const run = spans.findLast(({ begin }) => begin <= seconds) ?? spans[0];
  const node = steps.findLast(({ begin, end, run: id }) => id === run.id && begin <= seconds && seconds <= end);
  const time = (seconds - run.begin).toFixed(2);
  const where = seconds > run.end ? text("timeline.after", { run: run.name }) : text("timeline.at", { time, run: run.name });
  const lines = rows.map(({ device, points }) => {
    const point = pointAt(points, seconds);
    if (!point) return text("timeline.unknown", { device: device.name });
    const weights = names.flatMap((name) => (point.weights[name] ? [`${name} ${shortBytes(point.weights[name])}`] : []));
    const used = Math.max(point.allocated, sum(point.weights));
    return text("timeline.device", { device: device.name, used: shortBytes(used), parts: weights.join(", ") || text("timeline.no_weights") });
  });
  return [node ? `${where}, ${node.id} ${node.title}` : where, ...lines];
}

/** @param {Record<string, number>} amounts */
const sum = (amounts) => Object.values(amounts).reduce((all, amount) => all + amount, 0);

/**
 * The timeline in words, for those who do not see it.
 * @param {Drawn} drawn
 */
export function summaryOf({ rows, spans }) {
  const most = rows.map(({ device, points }) => {
    const peak = Math.max(...points.map(mostOf));
    return text("timeline.most", { device: device.name, peak: shortBytes(peak), total: shortBytes(device.total_bytes) });
  });
  return [text("timeline.summary", { names: spans.map(({ name }) => name).join(", ") }), ...most].join("; ");
}

/**
 * Make the timeline. `show` draws a report, and returns whether there is something to draw.
 * @param {Document} document
 * @param {(id: string) => string} colourOf a component
 */
export function makeTimeline(document, colourOf) {
  const element = document.createElement("div");
  const picture = document.createElement("div");
  const told = document.createElement("div");
  const save = document.createElement("button");
  element.className = "hw-timeline";
  picture.tabIndex = 0;
  picture.setAttribute("role", "img");
  Object.assign(picture.style, { touchAction: "pan-y", overflow: "hidden" });
  told.className = "hw-quiet";
  told.setAttribute("aria-live", "polite");
  save.type = "button";
  save.textContent = text("timeline.save");
  element.append(picture, told, save);

  /** @type {Drawn | null} */
  let drawn = null;
  /** @type {Report | null} */
  let shown = null;
  let width = 0;
  let scale = makeScale([{ id: "", name: "", begin: 0, end: 1 }], 0, 1, 0);
  /** Where the values are read, in seconds; null while the pointer is elsewhere. @type {number | null} */
  let cursor = null;

  const widthNow = () => Math.max(LEAST_WIDTH, picture.clientWidth || LEAST_WIDTH);

  function draw() {
    if (drawn === null) return;
    width = widthNow();
    scale = makeScale(drawn.spans, LEFT, width - RIGHT, GAP);
    picture.replaceChildren(makePicture(document, drawn, scale, width, colourOf));
    picture.setAttribute("aria-label", summaryOf(drawn));
    point(cursor);
  }

  /** @param {number | null} seconds */
  function point(seconds) {
    cursor = seconds;
    /** Write lines where they differ: they are read aloud. @param {string[]} lines */
    const tell = (lines) => {
      if (lines.join("\n") === [...told.children].map((line) => line.textContent).join("\n")) return;
      told.replaceChildren(...lines.map((line) => Object.assign(document.createElement("div"), { textContent: line })));
    };
    const line = picture.querySelector(".hw-cursor");
    if (seconds === null || drawn === null || !line) {
      line?.setAttribute("visibility", "hidden");
      tell([text("timeline.hint")]);
      return;
    }
    const x = String(scale.x(seconds));
    for (const end of ["x1", "x2"]) line.setAttribute(end, x);
    line.setAttribute("visibility", "visible");
    tell(linesAt(drawn, seconds));
  }

  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    point(scale.seconds(event.clientX - box.left));
  });
  picture.addEventListener("pointerleave", () => point(null));
  picture.addEventListener("keydown", (event) => {
    const back = event.key === "ArrowLeft";
    if (!drawn || !(back || event.key === "ArrowRight")) return;
    event.preventDefault();
    const stops = stopsOf(drawn.rows.map(({ points }) => points), scale);
    const here = cursor === null ? -1 : scale.x(cursor);
    const next = back ? stops.findLast((stop) => stop < here - 0.05) : stops.find((stop) => stop > here + 0.05);
    if (next !== undefined) point(scale.seconds(next));
  });
  save.addEventListener("click", () => {
    const svg = picture.querySelector("svg");
    if (svg) void savePng(document, svg);
  });
  const Observer = document.defaultView?.ResizeObserver;
  if (Observer) new Observer(() => void (drawn && widthNow() !== width && draw())).observe(picture);

  /** @param {Report} now */
  function show(now) {
    // A report has the samples of the one before where nothing ran meanwhile.
    const isSame = shown !== null && shown.samples === now.samples && shown.runs === now.runs && shown.nodes === now.nodes;
    if (!isSame) {
      shown = now;
      drawn = drawnOf(now);
      draw();
    }
    return drawn !== null;
  }
  return { element, show };
}

/**
 * @param {Document} document
 * @param {Drawn} drawn
 * @param {import("./time_scale.js").Scale} scale
 * @param {number} width
 * @param {(id: string) => string} colourOf
 */
function makePicture(document, drawn, scale, width, colourOf) {
  const { rows, spans, steps, names } = drawn;
  const bottom = HEAD + rows.length * (ROW + HEAD);
  const height = bottom + BELOW + names.length * KEY;
  /**
   * @param {string} name
   * @param {Record<string, string | number>} attributes
   * @param {string} [content]
   */
  const shape = (name, attributes, content) => {
    const found = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, String(value));
    if (content !== undefined) found.textContent = content;
    return found;
  };
  const words = (/** @type {number} */ x, /** @type {number} */ y, /** @type {string} */ content, /** @type {number} */ room, more = {}) =>
    shape("text", { x, y, "font-size": 11, fill: "var(--input-text)", ...more }, shortened(content, room));
  const svg = shape("svg", { xmlns: SVG, width, height, viewBox: `0 0 ${width} ${height}`, "font-family": "sans-serif", "aria-hidden": "true" });
  svg.append(shape("rect", { width, height, fill: "var(--comfy-menu-bg)" }));
  spans.forEach(({ name, begin, end }, at) => {
    const [from, to] = [scale.x(begin), scale.x(end)];
    svg.append(shape("rect", { class: "hw-run", x: from, y: HEAD, width: Math.max(1, to - from), height: bottom - HEAD, fill: "var(--comfy-input-bg)" }));
    svg.append(words(from, HEAD - 4, name, to - from + GAP, { class: "hw-run-name" }));
    const seconds = `${(end - begin).toFixed(1)} s`;
    if (seconds.length * LETTER <= to - from) svg.append(words(from, bottom + 12, seconds, to - from, { fill: "var(--descrip-text)" }));
    else if (at === spans.length - 1) svg.append(words(width - RIGHT, bottom + 12, seconds, width, { fill: "var(--descrip-text)", "text-anchor": "end" }));
  });
  for (const { begin, end, id, title } of steps) {
    const [from, to] = [scale.x(begin), scale.x(end)];
    if (to - from < LEAST_STEP) continue;
    const line = shape("line", { class: "hw-node", x1: from, x2: from, y1: HEAD, y2: bottom, stroke: "var(--border-color)" });
    line.append(shape("title", {}, `${id} ${title}`));
    svg.append(line);
  }
  rows.forEach(({ device, points }, at) => {
    const top = HEAD + at * (ROW + HEAD) + HEAD;
    const topBytes = topOf(points, device.total_bytes);
    const y = (/** @type {number} */ bytes) => top + ROW - (ROW * Math.min(bytes, topBytes)) / topBytes;
    const below = points.map(() => 0);
    for (const name of names) {
      const levels = points.map(({ at: seconds, weights }, index) => {
        const low = below[index];
        below[index] += weights[name] ?? 0;
        return { at: seconds, low: y(low), high: y(below[index]) };
      });
      if (levels.every(({ low, high }) => low === high)) continue;
      const area = shape("path", { class: "hw-area", d: areaPath(levels, scale), fill: colourOf(name) });
      area.append(shape("title", {}, name));
      svg.append(area);
    }
    svg.append(shape("path", { class: "hw-peak", d: peakPath(points, scale, y), fill: "none", stroke: "var(--input-text)", "stroke-dasharray": "2 2" }));
    const low = device.watermark?.low_bytes ?? 0;
    const isWhole = topBytes === device.total_bytes;
    if (low > 0 && isWhole) svg.append(shape("line", { class: "hw-low", x1: LEFT, x2: width - RIGHT, y1: y(device.total_bytes - low), y2: y(device.total_bytes - low), stroke: "var(--descrip-text)", "stroke-dasharray": "6 3" }));
    svg.append(shape("line", { x1: LEFT, x2: width - RIGHT, y1: top + ROW, y2: top + ROW, stroke: "var(--border-color)" }));
    svg.append(words(LEFT, top - 3, device.name, width / 2, { "font-weight": 600 }));
    const scaled = isWhole ? shortBytes(device.total_bytes) : `${shortBytes(topBytes)} / ${shortBytes(device.total_bytes)}`;
    svg.append(words(width - RIGHT, top - 3, scaled, width / 2, { "text-anchor": "end", fill: "var(--descrip-text)" }));
  });
  names.forEach((name, at) => {
    const y = bottom + BELOW + at * KEY;
    svg.append(shape("rect", { x: LEFT, y: y + 2, width: 9, height: 9, rx: 2, fill: colourOf(name) }), words(LEFT + 14, y + 10, name, width - LEFT - 14 - RIGHT));
  });
  svg.append(shape("line", { class: "hw-cursor", y1: HEAD, y2: bottom, stroke: "var(--input-text)", visibility: "hidden" }));
  return svg;
}

/**
 * A text for so many pixels, cut at its end where it is longer.
 * @param {string} content
 * @param {number} room
 */
export function shortened(content, room) {
  const most = Math.floor(room / LETTER);
  return content.length <= most ? content : most < 2 ? "" : `${content.slice(0, most - 1)}…`;
}

/**
 * Save a picture as a PNG file, in the colours that the page has now.
 * @param {Document} document
 * @param {SVGSVGElement} svg
 */
async function savePng(document, svg) {
  const copy = /** @type {SVGSVGElement} */ (svg.cloneNode(true));
  const colours = getComputedStyle(svg);
  for (const name of COLOURS) copy.style.setProperty(name, colours.getPropertyValue(name));
  copy.querySelector(".hw-cursor")?.remove();
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [PNG_SCALE * svg.width.baseVal.value, PNG_SCALE * svg.height.baseVal.value];
  canvas.getContext("2d")?.drawImage(image, 0, 0, canvas.width, canvas.height);
  const blob = await new Promise((/** @type {(found: Blob | null) => void} */ take) => canvas.toBlob(take, "image/png"));
  if (!blob) return;
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: FILE_NAME });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000); // the download has begun by then
}
