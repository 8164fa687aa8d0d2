// Unit tests of web/panel/timeline.js and time_scale.js; run by node --test, which test_scripts.py starts.
import assert from "node:assert/strict";
import { test } from "node:test";
import { areaPath, makeScale, peakPath, pointAt, pointsOf, spansOf, stepsOf, stopsOf, topOf } from "../../web/panel/time_scale.js";
import { drawnOf, linesAt, makeTimeline, shortened, summaryOf } from "../../web/panel/timeline.js";
import "./english.mjs";

const MIB = 2 ** 20;
const run = (run_id, begin_s, end_s) => ({ run_id, name: `run ${run_id}`, begin_s, end_s, bytes_moved: 0, num_evictions: 0, reloaded_bytes: {} });
const sample = (t_s, weights, allocated, peak = allocated, device = "gpu:0") => ({
  t_s, device, component_bytes: weights, allocated_bytes: allocated * MIB, peak_bytes: peak * MIB,
});
const node = (node_id, run_id, begin_s, seconds) => ({ node_id, title: `Node ${node_id}`, run_id, begin_s, seconds });
const REPORT = {
  version: 2,
  now_s: 120,
  devices: [
    { name: "cpu", total_bytes: 999 * MIB, watermark: { low_bytes: 0, high_bytes: 0 } },
    { name: "gpu:0", total_bytes: 64 * MIB, watermark: { low_bytes: 8 * MIB, high_bytes: 12 * MIB } },
    { name: "gpu:1", total_bytes: 48 * MIB, watermark: { low_bytes: 0, high_bytes: 0 } },
  ],
  runs: [run("a", 10, 14), run("b", 100, 101), run("c", 110, null)],
  nodes: [node("1", "a", 10, 1), node("2", "a", 11, 3), node("7", "b", 100.25, 0.5)],
  samples: [
    sample(1, {}, 0), sample(11, { "<b>": 20 * MIB }, 20), sample(12, { "<b>": 20 * MIB, vae: 4 * MIB }, 26, 40), sample(13.5, { vae: 4 * MIB }, 4),
    sample(100.5, { unet: 50 * MIB }, 51, 60), sample(5, {}, 0, 0, "gpu:1"),
  ],
};

test("the last runs; one that goes on ends now", () => {
  assert.deepEqual(spansOf(REPORT.runs, 120, 2), [
    { id: "b", name: "run b", begin: 100, end: 101 },
    { id: "c", name: "run c", begin: 110, end: 120 },
  ]);
  assert.deepEqual(spansOf(REPORT.runs, 120, 9).map(({ id }) => id), ["a", "b", "c"]);
  assert.deepEqual(spansOf([run("d", 5, null)], 4, 1), [{ id: "d", name: "run d", begin: 5, end: 5 }]); // a clock that rounds
});

test("a run that has only its workflow's id as a name is called by the beginning of its own", () => {
  const id = "497e496d-8b69-45d0-8eea-913070975673";
  const runs = [{ ...run(id, 10, 14), name: "0d3c496d-8b69-45d0-8eea-913070975673" }];
  assert.deepEqual(drawnOf({ ...REPORT, runs }).spans.map(({ id, name }) => [id, name]), [[id, "497e496d"]]);
});

test("a row reaches to all that a device has, or to a little more than was used", () => {
  const points = pointsOf(REPORT.samples, "gpu:0", 10);
  assert.equal(topOf(points, 64 * MIB), 64 * MIB);
  assert.equal(topOf(points, 1024 * MIB), 80 * MIB);
  assert.equal(topOf([], 0), 1);
});

test("the scale rises, ends at its sides, and has an inverse, however long the runs and the time between them", () => {
  for (const spans of [spansOf(REPORT.runs, 120, 3), [{ id: "", name: "", begin: 3, end: 3 }], spansOf([run("a", 0, 1e5), run("b", 2e5, 2e5 + 0.01)], 0, 2)]) {
    const scale = makeScale(spans, 4, 316, 6);
    assert.equal(Math.round(scale.x(scale.begin)), 4);
    assert.ok(Math.abs(scale.x(scale.end) - 316) < 1e-6 || scale.begin === scale.end);
    let before = -1;
    for (let x = 4; x <= 316; x += 1.5) {
      const seconds = scale.seconds(x);
      assert.ok(seconds >= before);
      before = seconds;
      if (scale.begin < scale.end) assert.ok(Math.abs(scale.x(seconds) - x) < 1e-6);
    }
    spans.slice(1).forEach(({ begin }, at) => assert.ok(Math.abs(scale.x(begin) - scale.x(spans[at].end) - 6) < 1e-6));
    assert.equal(scale.x(-1e9), scale.x(scale.begin));
    if (scale.begin < scale.end) assert.equal(scale.x(1e9), scale.x(scale.end));
    for (const { begin, end } of spans) if (spans.length === 2 && end > begin) assert.ok(scale.x(end) - scale.x(begin) >= 0.14 * 306);
  }
});

test("nodes have the seconds at which they ran; those of other runs are left out", () => {
  assert.deepEqual(stepsOf(REPORT.nodes, spansOf(REPORT.runs, 120, 2)), [{ id: "7", title: "Node 7", run: "b", begin: 100.25, end: 100.75 }]);
});

test("the points of a device begin with what it held before", () => {
  const points = pointsOf(REPORT.samples, "gpu:0", 10);
  assert.deepEqual(points.map(({ at }) => at), [10, 11, 12, 13.5, 100.5]);
  assert.deepEqual(points[0], { at: 10, weights: {}, allocated: 0, peak: 0 });
  assert.deepEqual(pointsOf(REPORT.samples, "gpu:0", 0.5).map(({ at }) => at), [1, 11, 12, 13.5, 100.5]);
  assert.deepEqual(pointsOf([], "gpu:0", 1), []);
});

test("the point that holds is the last one until then", () => {
  const points = pointsOf(REPORT.samples, "gpu:0", 10);
  const at = (seconds) => pointAt(points, seconds)?.at ?? null;
  assert.deepEqual([9.9, 10, 11.99, 12, 13.4999, 99, 1e9].map(at), [null, 10, 11, 12, 12, 13.5, 100.5]);
  assert.equal(pointAt([], 3), null);
});

test("areas keep their height until the next point, and the peak is that of the time before one", () => {
  const scale = { x: (seconds) => 10 * seconds, seconds: (x) => x / 10, begin: 0, end: 5 };
  assert.equal(areaPath([{ at: 0, low: 70, high: 50 }, { at: 2, low: 70, high: 30 }], scale), "M0,50 20,50 20,30 50,30 50,70 20,70 20,70 0,70Z");
  assert.equal(areaPath([], scale), "");
  const points = [{ at: 0, weights: {}, allocated: 1, peak: 1 }, { at: 2, weights: {}, allocated: 3, peak: 9 }];
  assert.equal(peakPath(points, scale, (bytes) => 100 - bytes), "M0,91 20,91 L20,97 50,97");
  assert.equal(peakPath(points.slice(0, 1), scale, (bytes) => 100 - bytes), "M0,99 50,99");
  assert.equal(peakPath([], scale, Number), "");
  assert.deepEqual(stopsOf([points, points], scale), [0, 20]);
});

test("what is drawn: devices that were used, and runs of which something is known", () => {
  const drawn = drawnOf(REPORT);
  assert.deepEqual(drawn.rows.map(({ device }) => device.name), ["gpu:0"]);
  assert.deepEqual(drawn.spans.map(({ id }) => id), ["a", "b", "c"]);
  assert.deepEqual(drawn.names, ["<b>", "vae", "unet"]);
  assert.deepEqual(drawnOf({ ...REPORT, samples: REPORT.samples.slice(4, 5) }).spans.map(({ id }) => id), ["b", "c"]);
  for (const missing of [{ runs: [] }, { samples: [] }, { devices: [] }, { runs: undefined, samples: undefined }]) assert.equal(drawnOf({ ...REPORT, ...missing }), null);
});

test("it tells run, node and what each device held", () => {
  const drawn = drawnOf(REPORT);
  assert.deepEqual(linesAt(drawn, 12.25), ["2.25 s after the start of run a, 2 Node 2", "gpu:0: 26.0M in use (<b> 20.0M, vae 4.0M)"]);
  assert.deepEqual(linesAt(drawn, 50), ["after run a", "gpu:0: 4.0M in use (vae 4.0M)"]);
  assert.deepEqual(linesAt(drawn, 10), ["0.00 s after the start of run a, 1 Node 1", "gpu:0: 0B in use (no weights)"]);
  assert.equal(summaryOf(drawn), "Last runs: run a, run b, run c; gpu:0: at most 60.0M of 64.0M");
});

test("a text is cut to its room", () => {
  assert.equal(shortened("abcdef", 36), "abcdef");
  assert.equal(shortened("abcdef", 35), "abcd…");
  assert.equal(shortened("abcdef", 5), "");
});

/** As much of a document as the timeline uses, and all elements that it made. */
function makeDocument(clientWidth) {
  const made = [];
  const createElement = (name) => {
    const element = {
      name, style: {}, children: [], attributes: {}, listeners: {}, clientWidth,
      setAttribute(key, value) { this.attributes[key] = value; },
      append(...children) { this.children.push(...children); },
      replaceChildren(...children) { this.children = children; },
      addEventListener(kind, call) { this.listeners[kind] = call; },
      getBoundingClientRect: () => ({ left: 100 }),
      querySelector(selector) {
        for (const child of this.children) {
          if (`.${child.attributes?.class}` === selector) return child;
          const found = child.querySelector?.(selector);
          if (found) return found;
        }
        return null;
      },
    };
    made.push(element);
    return element;
  };
  return { made, defaultView: null, createElement, createElementNS: (_, name) => createElement(name) };
}

test("it is drawn as wide as there is room, tells what is under the pointer, and what the arrow keys reach", () => {
  const document = makeDocument(320);
  const { element, show } = makeTimeline(document, (name) => `colour of ${name}`);
  assert.equal(show({ version: 2, now_s: 0 }), false);
  assert.equal(show(REPORT), true);
  const [picture, told, save] = element.children;
  const svg = picture.children[0];
  assert.equal(svg.attributes.width, "320");
  assert.equal(picture.attributes.role, "img");
  assert.match(picture.attributes["aria-label"], /^Last runs: /);
  const all = (name) => document.made.filter((made) => made.attributes.class === name);
  assert.equal(all("hw-run").length, 3);
  assert.deepEqual(all("hw-area").map((area) => area.attributes.fill), ["colour of <b>", "colour of vae", "colour of unet"]);
  assert.equal(all("hw-node").length, 3);
  assert.equal(all("hw-low").length, 1);
  for (const { attributes } of document.made) for (const value of Object.values(attributes)) assert.ok(!/NaN|undefined/.test(value), JSON.stringify(attributes));
  const lines = () => told.children.map((line) => line.textContent);
  assert.match(lines()[0], /arrow keys/);
  picture.listeners.pointermove({ clientX: 100 + 4 });
  assert.equal(lines()[0], "0.00 s after the start of run a, 1 Node 1");
  picture.listeners.pointerleave();
  assert.match(lines()[0], /arrow keys/);
  const press = (key) => picture.listeners.keydown({ key, preventDefault() {} });
  const walk = (key, count) => Array.from({ length: count }, () => (press(key), lines()[0]));
  assert.deepEqual(walk("ArrowRight", 5).map((line) => line.slice(0, 4)), ["0.00", "1.00", "2.00", "3.50", "0.50"]);
  assert.deepEqual(walk("ArrowRight", 1).map((line) => line.slice(0, 4)), ["0.50"]); // there is no further one
  assert.deepEqual(walk("ArrowLeft", 2).map((line) => line.slice(0, 4)), ["3.50", "2.00"]);
  assert.equal(save.textContent, "Save as PNG");
  const number = document.made.length;
  assert.equal(show({ ...REPORT, now_s: 121 }), true);
  assert.equal(document.made.length, number, "the same samples are not drawn again");
  assert.equal(show({ ...REPORT, runs: [] }), false);
  assert.ok(document.made.every((made) => !("innerHTML" in made)));
});
