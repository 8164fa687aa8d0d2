// What is said of the watermark's setting; test_scripts.py runs this under node.
import assert from "node:assert/strict";
import { test } from "node:test";
import "./english.mjs";
import { marksText } from "../../web/watermark.js";

const MIB = 2 ** 20;

test("the notice names the marks of the setting, and the devices of nodes", () => {
  const mark = (low, high, source, texts = ["", ""]) => ({ low_bytes: low * MIB, high_bytes: high * MIB, low_text: texts[0], high_text: texts[1], source });
  assert.equal(marksText({ "gpu:0": mark(1, 2, "default"), host: mark(3, 4, "default") }), "The default amounts are kept free.");
  assert.equal(
    marksText({ "gpu:0": mark(512, 1024, "setting"), "gpu:1": mark(1, 2, "set"), host: mark(3, 4, "setting") }),
    "Kept free: gpu:0: 512 MiB to 1024 MiB; host: 3 MiB to 4 MiB. A Watermark node was run for gpu:1, and counts there.",
  );
  assert.equal(marksText({ "gpu:0": mark(512, 1024, "setting", ["5%", "1GiB"]) }), "Kept free: gpu:0: 5% (512 MiB) to 1 GiB.");
});

test("the notice says first what this machine cannot keep", () => {
  const watermarks = { "gpu:0": { low_bytes: MIB, high_bytes: 2 * MIB, low_text: "", high_text: "", source: "setting" } };
  assert.equal(marksText(watermarks, ["no gpu:1", "too small"]), "no gpu:1. too small. Kept free: gpu:0: 1 MiB to 2 MiB.");
});
