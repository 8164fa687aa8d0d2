// Unit tests of web/report.js; run by node --test, which test_scripts.py starts.
import assert from "node:assert/strict";
import { test } from "node:test";
import { makeAsker, makeSoon } from "../../web/report.js";

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
