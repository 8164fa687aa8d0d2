// When settings of the page are passed on to the server; test_scripts.py runs this under node.
import assert from "node:assert/strict";
import { mock, test } from "node:test";
import { makeListener } from "../../web/settings.js";

test("what the page opens with is passed on at once, unless it is empty", () => {
  const applied = [];
  const listen = makeListener((...words) => applied.push(words), 1000, "");
  listen("");
  listen(undefined);
  assert.deepEqual(applied, []);
  listen("1GiB:2GiB");
  assert.deepEqual(applied, [["1GiB:2GiB", false]]);
});

test("a change is passed on after the last keystroke, an empty one, too", () => {
  mock.timers.enable({ apis: ["setTimeout"] });
  const applied = [];
  const listen = makeListener((...words) => applied.push(words), 1000, "");
  for (const [text, before] of [["5", ""], ["5%", "5"], ["5%:", "5%"], ["5%:10%", "5%:"]]) {
    listen(text, before);
    mock.timers.tick(999);
  }
  assert.deepEqual(applied, []);
  mock.timers.tick(1);
  assert.deepEqual(applied, [["5%:10%", true]]);
  listen("", "5%:10%");
  mock.timers.tick(1000);
  assert.deepEqual(applied.at(-1), ["", true]);
  assert.equal(applied.length, 2);
  mock.timers.reset();
});

test("a number that is taken away is passed on as none", () => {
  mock.timers.enable({ apis: ["setTimeout"] });
  const applied = [];
  const listen = makeListener((...words) => applied.push(words), 1000, 0);
  listen(0);
  listen(3);
  listen(undefined, 3);
  mock.timers.tick(1000);
  assert.deepEqual(applied, [[3, false], [0, true]]);
  mock.timers.reset();
});
