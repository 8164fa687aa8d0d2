// Unit tests of web/report.js; run by node --test, which test_scripts.py starts.
import assert from "node:assert/strict";
import { test } from "node:test";
import { makeAsker, makeLiveReport, makeSoon } from "../../web/report.js";

/** An asker whose answers come when the test says so; what it did is in `done`. */
function asker() {
  const done = [];
  const answers = [];
  const fetchReport = (parts) => new Promise((resolve, reject) => answers.push({ parts, resolve, reject }));
  const ask = makeAsker(fetchReport, { show: (report) => done.push(report), fail: (error) => done.push(error.message) });
  return { ask, answers, done };
}

test("an answer that was overtaken is dropped", async () => {
  const { ask, answers, done } = asker();
  const asked = [ask("nodes,components"), ask("components"), ask("components")];
  assert.deepEqual(answers.map((answer) => answer.parts), ["nodes,components", "components", "components"]);
  answers[1].resolve("second");
  await asked[1];
  answers[0].resolve("first");
  answers[2].resolve("third");
  await Promise.all(asked);
  assert.deepEqual(done, ["second", "third"]);
});

test("a failure rejects nothing and is told once, until an answer came", async () => {
  const { ask, answers, done } = asker();
  for (const [index, answer] of ["no server", "still none", null, "gone again"].entries()) {
    const asked = ask("components");
    if (answer) answers[index].reject(new Error(answer));
    else answers[index].resolve("answer");
    await asked;
  }
  assert.deepEqual(done, ["no server", "answer", "gone again"]);
});

test("calls meanwhile are one call, and the next is another", async () => {
  let calls = 0;
  const soon = makeSoon(() => (calls += 1), 5);
  soon();
  soon();
  assert.equal(calls, 0);
  await new Promise((resolve) => setTimeout(resolve, 20));
  assert.equal(calls, 1);
  soon();
  await new Promise((resolve) => setTimeout(resolve, 20));
  assert.equal(calls, 2);
});

test("one question serves all readers, each as long as it reads", async () => {
  const asked = [];
  const shown = [];
  const live = makeLiveReport(async (words) => (asked.push(words), { words }), () => assert.fail("no failure"));
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
  const live = makeLiveReport(async (words) => (asked.push(words), {}), () => assert.fail("no failure"));
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
