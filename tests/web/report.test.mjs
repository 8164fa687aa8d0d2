// Unit tests of web/report.js; run by node --test, which test_scripts.py starts.
import assert from "node:assert/strict";
import { test } from "node:test";
import { makeAsker, makeLiveReport, makeSoon } from "../../web/report.js";

/** An asker whose answers come when the test says so; what it did is in `done`. */
function asker() {
  const done = [];
  const answers = [];
  let turn = 0;
  const fetchReport = (words) => new Promise((resolve, reject) => answers.push({ words, resolve, reject }));
  const ask = makeAsker(fetchReport, { show: (report, turn) => done.push([turn, report]), fail: (error) => done.push(error.message) });
  return { ask: (...parts) => ask(parts, parts.join(), ++turn), answers, done };
}
const answer = (parts, server_id = "one") => ({ server_id, ...parts });

test("of an answer that was overtaken only that is shown which no newer one had", async () => {
  const { ask, answers, done } = asker();
  const asked = [ask("nodes", "components"), ask("components"), ask("components"), ask("nodes")];
  assert.deepEqual(answers.map(({ words }) => words), ["nodes,components", "components", "components", "nodes"]);
  answers[1].resolve(answer({ components: 2 }));
  await asked[1];
  answers[0].resolve(answer({ nodes: 1, components: 1 }));
  await asked[0];
  answers[3].resolve(answer({ nodes: 4 }));
  await asked[3];
  answers[2].resolve(answer({ components: 3 }));
  await asked[2];
  assert.deepEqual(done, [
    [2, answer({ components: 2 })],
    [1, answer({ nodes: 1 })],
    [4, answer({ nodes: 4 })],
    [3, answer({ components: 3 })],
  ]);
});

test("an answer that was overtaken by all it has is dropped, and one of a server that is gone", async () => {
  const { ask, answers, done } = asker();
  const asked = [ask("nodes"), ask("components"), ask("components")];
  answers[2].resolve(answer({ components: 3 }, "two"));
  await asked[2];
  answers[1].resolve(answer({ components: 2 }, "two"));
  answers[0].resolve(answer({ nodes: 1 }));
  await Promise.all(asked);
  assert.deepEqual(done, [[3, answer({ components: 3 }, "two")]]);
});

test("a failure rejects nothing and is told once, until an answer came", async () => {
  const { ask, answers, done } = asker();
  for (const [index, error] of ["no server", "still none", null, "gone again"].entries()) {
    const asked = ask("components");
    if (error) answers[index].reject(new Error(error));
    else answers[index].resolve(answer({ components: 3 }));
    await asked;
  }
  assert.deepEqual(done, ["no server", [3, answer({ components: 3 })], "gone again"]);
});

test("what is wanted meanwhile is one question, when the first may wait no longer", (context) => {
  context.mock.timers.enable({ apis: ["setTimeout"] });
  let now = 0;
  context.mock.method(performance, "now", () => now);
  const pass = (milliseconds) => ((now += milliseconds), context.mock.timers.tick(milliseconds));
  const asked = [];
  const soon = makeSoon((parts) => asked.push([now, parts]));
  soon(1000);
  pass(300);
  soon(200, ["devices"]);
  soon(200);
  pass(100);
  soon(200); // the one before is due already
  assert.deepEqual(asked, []);
  pass(100);
  assert.deepEqual(asked, [[500, ["devices"]]]);
  pass(2000);
  assert.equal(asked.length, 1, "the question before has told the first one, too");
  soon(200);
  pass(200);
  assert.deepEqual(asked[1], [2700, []]);
});

test("one question serves all readers, each as long as it reads", async () => {
  const asked = [];
  const shown = [];
  const live = makeLiveReport(async (words) => (asked.push(words), answer({ words })), () => assert.fail("no failure"));
  await live.ask();
  assert.deepEqual(asked, [], "nobody reads");
  const stops = [["components", "loaders"], ["devices", "components"]].map((parts, at) => live.read(() => parts, ({ words }) => shown.push([at, words])));
  await live.ask({ more: ["nodes"], limit: 5 });
  const words = "only=components,loaders,devices,nodes&limit=5";
  assert.deepEqual([asked, shown], [[words], [[0, words], [1, words]]]);
  stops[1]();
  await live.ask();
  assert.deepEqual(asked[1], "only=components,loaders");
  assert.deepEqual(shown[2], [0, "only=components,loaders"]);
  stops[0]();
  await live.ask();
  assert.equal(asked.length, 2);
});

test("a reader that knows the past asks for what came since, but not where a limit asks for it", async () => {
  const asked = [];
  const live = makeLiveReport(async (words) => (asked.push(words), answer({})), () => assert.fail("no failure"));
  let after;
  live.read(() => ["components"], () => {});
  live.read(() => ["samples"], () => {}, () => after);
  await live.ask();
  after = 0;
  await live.ask();
  await live.ask({ more: ["devices"] });
  await live.ask({ more: ["nodes"], limit: 5 });
  assert.deepEqual(asked, [
    "only=components,samples",
    "only=components,samples&after=0",
    "only=components,samples,devices&after=0",
    "only=components,samples,nodes&limit=5",
  ]);
});

test("a failed question reaches no reader, and is told", async () => {
  const told = [];
  const live = makeLiveReport(() => Promise.reject(new Error("gone")), (error) => told.push(error.message));
  live.read(() => ["devices"], () => assert.fail("no report came"));
  await live.ask();
  assert.deepEqual(told, ["gone"]);
});

test("a reader knows which question an answer is for", async () => {
  const answers = [];
  const shown = [];
  const live = makeLiveReport(() => new Promise((resolve) => answers.push(resolve)), () => assert.fail("no failure"));
  // As the panel does it: runs are asked for until an answer to a question after the last change of the queue has them.
  let changedAt = 0;
  let shownAt = 0;
  const parts = () => (shownAt > changedAt ? ["devices"] : ["devices", "runs"]);
  live.read(parts, ({ runs }, turn) => runs && (shown.push(runs), (shownAt = turn)));
  const asked = [live.ask()];
  changedAt = live.asked();
  asked.push(live.ask());
  answers[0](answer({ devices: 1, runs: "first" }));
  await asked[0];
  assert.deepEqual(parts(), ["devices", "runs"], "what was asked for before the change is old");
  asked.push(live.ask());
  answers[2](answer({ devices: 3, runs: "third" }));
  await asked[2];
  assert.deepEqual(parts(), ["devices"]);
  answers[1](answer({ devices: 2, runs: "second" }));
  await asked[1];
  assert.deepEqual(shown, ["first", "third"]);
});
