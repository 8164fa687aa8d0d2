// Unit tests of web/panel/event_log.js; run by node --test, which test_scripts.py starts.
import assert from "node:assert/strict";
import { test } from "node:test";
import { makeEventLog, withMore } from "../../web/panel/event_log.js";

const at = (t_s) => ({ t_s, kind: "load", component: "a", bytes: 1, device: "gpu:0", reason: "", run_id: "r", node_id: null });
const told = (...seconds) => ({ events: seconds.map(at) });

test("what is known is not told again, and no more is kept than a thousand", () => {
  assert.deepEqual(withMore([at(1), at(2)], [at(2), at(3)]).map((event) => event.t_s), [1, 2, 3]);
  assert.equal(withMore([], Array.from({ length: 1200 }, (_, index) => at(index))).at(0).t_s, 200);
});

/** A log whose answers come when the test says so. */
function makeLog() {
  const [asked, answers, failures] = [[], [], []];
  let numShown = 0;
  const read = (words) => new Promise((resolve, reject) => (asked.push(words), answers.push({ resolve, reject })));
  const log = makeEventLog(read, () => (numShown += 1), (error) => failures.push(error.message));
  return { log, asked, answers, failures, numShown: () => numShown, known: () => log.known().map((event) => event.t_s) };
}

test("each answer counts, also where the next question is asked before it comes, and where one overtakes another", async () => {
  const { log, asked, answers, known, numShown } = makeLog();
  const updates = [log.update("one"), log.update("one"), log.update("one")];
  answers[0].resolve(told(1));
  await updates[0];
  assert.deepEqual(known(), [1]);
  answers[2].resolve(told(1, 2, 3));
  await updates[2];
  answers[1].resolve(told(1, 2));
  await updates[1];
  assert.deepEqual(known(), [1, 2, 3]);
  assert.equal(numShown(), 3);
  void log.update("one");
  assert.deepEqual(asked, ["limit=500", "limit=500", "limit=500", "after=3&limit=500"]);
});

test("another server has events of its own, and what the last one told comes too late", async () => {
  const { log, asked, answers, failures, known } = makeLog();
  const first = log.update("one");
  answers[0].resolve(told(50));
  await first;
  const late = log.update("one");
  const next = log.update("two");
  assert.deepEqual(known(), []);
  answers[1].resolve(told(60));
  await late;
  answers[2].resolve(told(1));
  await next;
  assert.deepEqual(known(), [1]);
  assert.deepEqual(asked, ["limit=500", "after=50&limit=500", "limit=500"]);
  const failed = log.update("two");
  answers[3].reject(new Error("gone"));
  await failed;
  assert.deepEqual([failures, known()], [["gone"], [1]]);
});

test("what comes with an answer continues the events only where those before it are there", async () => {
  const { log, asked, answers, known } = makeLog();
  const first = log.update("one", [at(9)]);
  assert.deepEqual([asked.length, known()], [1, []], "what was before is not known");
  void log.update("one", [at(9)]);
  answers[0].resolve(told(1, 2));
  await first;
  void log.update("one", [at(9)]);
  assert.deepEqual([asked.length, known()], [3, [1, 2]], "a question is open");
  answers[2].resolve(told(3));
  await new Promise((resolve) => setImmediate(resolve));
  await log.update("one", [at(3), at(4)]);
  assert.deepEqual([asked.length, known()], [3, [1, 2, 3, 4]]);
  void log.update("two", [at(5)]);
  assert.deepEqual([asked.length, known()], [4, []]);
});
