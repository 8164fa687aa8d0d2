// What of the watermark's setting is passed on, and what is said of it; test_scripts.py runs this under node.
import assert from "node:assert/strict";
import { mock, test } from "node:test";
import { makeMarksListener, marksText } from "../../web/watermark.js";

const MIB = 2 ** 20;

test("what the page opens with is passed on at once, unless it is empty", () => {
  const applied = [];
  const listen = makeMarksListener((...words) => applied.push(words), 1000);
  listen("");
  listen(undefined);
  assert.deepEqual(applied, []);
  listen("1GiB:2GiB");
  assert.deepEqual(applied, [["1GiB:2GiB", false]]);
});

test("a change is passed on after the last keystroke, an empty one, too", () => {
  mock.timers.enable({ apis: ["setTimeout"] });
  const applied = [];
  const listen = makeMarksListener((...words) => applied.push(words), 1000);
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

test("the notice names the marks of the setting, and the devices of nodes", () => {
  const mark = (low, high, source) => ({ low_bytes: low * MIB, high_bytes: high * MIB, source });
  assert.equal(marksText({ "gpu:0": mark(1, 2, "default"), host: mark(3, 4, "default") }), "The default amounts are kept free.");
  assert.equal(
    marksText({ "gpu:0": mark(512, 1024, "setting"), "gpu:1": mark(1, 2, "set"), host: mark(3, 4, "setting") }),
    "Kept free: gpu:0: 512 MiB to 1024 MiB; host: 3 MiB to 4 MiB. A Watermark node was run for gpu:1, and counts there.",
  );
});
