// Unit tests of web/turns.js; run by node --test, which test_scripts.py starts.
import assert from "node:assert/strict";
import { test } from "node:test";
import { makeTurns } from "../../web/turns.js";

/** An act that ends when the test says so. */
function makeAct(done, name) {
  let end;
  const act = () => (done.push(`${name} begins`), new Promise((resolve, reject) => (end = { resolve, reject })));
  return { act, end: () => end };
}
const settled = () => new Promise((resolve) => setImmediate(resolve));

test("what has one name is done one after the other, also after a failure; other names do not wait", async () => {
  const done = [];
  const inTurn = makeTurns();
  const acts = Object.fromEntries(["first", "second", "third", "other"].map((name) => [name, makeAct(done, name)]));
  const ends = ["first", "second", "third"].map((name) => inTurn("marks", acts[name].act).catch((error) => error.message));
  ends.push(inTurn("limits", acts.other.act));
  await settled();
  assert.deepEqual(done, ["first begins", "other begins"]);
  acts.other.end().resolve("at once");
  acts.first.end().reject(new Error("refused"));
  await settled();
  assert.deepEqual(done, ["first begins", "other begins", "second begins"]);
  acts.second.end().resolve(2);
  await settled();
  acts.third.end().resolve(3);
  assert.deepEqual(await Promise.all(ends), ["refused", 2, 3, "at once"]);
});
