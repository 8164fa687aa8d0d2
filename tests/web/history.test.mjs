// What the panel knows of runs while they go on; test_scripts.py runs this under node.
import assert from "node:assert/strict";
import { test } from "node:test";
import { isRunning, isWhole, nextAfter, withAnswer } from "../../web/panel/history.js";

const run = (run_id, end_s) => ({ run_id, end_s });
const node = (node_id, begin_s, seconds) => ({ node_id, begin_s, seconds });
const sample = (t_s, allocated_bytes = 0) => ({ t_s, allocated_bytes });
const KNOWN = { version: 2, now_s: 10, runs: [run("a", 5), run("b", null)], nodes: [node("1", 6, 1), node("2", 7, 2.9)], samples: [sample(6), sample(9.9), sample(9.9995, 1)], advice: ["old"] };

test("what came since is added, and what was not over is replaced", () => {
  const now = { version: 2, now_s: 12, after_s: 9.999, runs: [run("b", 11)], nodes: [node("3", 9, 2)], samples: [sample(9.9995, 1), sample(11)], devices: ["new"] };
  const found = withAnswer(KNOWN, now);
  assert.deepEqual(found.runs, [run("a", 5), run("b", 11)]);
  assert.deepEqual(found.nodes.map(({ node_id }) => node_id), ["1", "2", "3"]);
  assert.deepEqual(found.samples, [sample(6), sample(9.9), sample(9.9995, 1), sample(11)], "none twice");
  assert.deepEqual([found.now_s, found.devices, found.advice], [12, ["new"], ["old"]]);
  assert.deepEqual(KNOWN.samples.length, 3, "what was known stays as it was");
});

test("answers that overlap, as two questions at once have them, add nothing twice", () => {
  const more = (now_s, ...times) => ({ version: 2, now_s, after_s: 9.999, samples: times.map((time) => sample(time)) });
  const found = withAnswer(withAnswer(KNOWN, more(12, 11)), more(13, 11, 12.5));
  assert.deepEqual(found.samples.map(({ t_s }) => t_s), [6, 9.9, 11, 12.5]);
});

test("a whole answer takes the place of all, and one without lists leaves them", () => {
  assert.deepEqual(withAnswer(KNOWN, { version: 2, now_s: 12, samples: [sample(1)] }).samples, [sample(1)]);
  const found = withAnswer(KNOWN, { version: 2, now_s: 12, after_s: 11, devices: [] });
  assert.deepEqual([found.samples, found.runs], [KNOWN.samples, KNOWN.runs]);
});

test("where the server has left out older entries nothing is joined over the gap", () => {
  const now = { version: 2, now_s: 12, after_s: 9.999, samples: [sample(11.5)], runs: [run("b", null)], left_out: { samples: 3 } };
  const found = withAnswer(KNOWN, now);
  assert.deepEqual([found.samples, found.runs.length], [[sample(11.5)], 2]);
});

test("of a server that was started again only whole lists are taken", () => {
  const known = { ...KNOWN, server_id: "one" };
  const whole = { version: 2, now_s: 1, server_id: "two", runs: [run("c", null)], nodes: [], samples: [sample(0.5)] };
  assert.deepEqual(withAnswer(known, whole), whole);
  assert.deepEqual([isWhole(whole), isWhole({ ...whole, after_s: 9 }), isWhole({ version: 2, now_s: 1, server_id: "two" })], [true, false, false]);
  const { runs, nodes, samples, advice, devices } = withAnswer(known, { ...whole, after_s: 9, devices: ["new"] });
  assert.deepEqual([runs, nodes, samples, advice, devices], [[], [], [], undefined, ["new"]], "its times are those of the server before");
});

test("a list does not grow without end", () => {
  const many = { version: 2, now_s: 2000, after_s: 10, samples: Array.from({ length: 1500 }, (_, at) => sample(11 + at)) };
  assert.deepEqual([withAnswer(KNOWN, many).samples.length, withAnswer(KNOWN, many).samples.at(-1).t_s], [1000, 1510]);
});

test("the next question is from a little before the last answer on", () => {
  assert.equal(nextAfter({ now_s: 0 }), 0);
  assert.ok(Math.abs(nextAfter(KNOWN) - 9.999) < 1e-9);
});

test("a run goes on until it has an end, and one that is not known yet while a node of it is open", () => {
  assert.ok(isRunning({ runs: [run("a", 5)], open_nodes: [node("1", 6, 1)] }));
  assert.deepEqual([isRunning(KNOWN), isRunning({ runs: [run("a", 5)] }), isRunning({})], [true, false, false]);
});
