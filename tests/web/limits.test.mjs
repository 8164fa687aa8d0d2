// What is asked for by the settings of idle models, and what is said of them; test_scripts.py runs this under node.
import assert from "node:assert/strict";
import { test } from "node:test";
import "./english.mjs";
import { limitBody, limitsText } from "../../web/limits.js";

test("a limit is asked for in the words of the server, none as null", () => {
  assert.deepEqual(limitBody("keep_loaded", 2), { keep_loaded: 2 });
  assert.deepEqual(limitBody("keep_loaded", 0), { keep_loaded: null });
  assert.deepEqual(limitBody("idle", 10), { idle: "10min" });
  assert.deepEqual(limitBody("idle", 0), { idle: null });
});

test("the notice names both limits", () => {
  assert.equal(limitsText({ keep_loaded: null, idle_s: null }), "Any number of models stays loaded; no idle model is unloaded by time.");
  assert.equal(limitsText({ keep_loaded: 1, idle_s: 600 }), "At most 1 model stays loaded; idle ones are unloaded after 10 min.");
  assert.equal(limitsText({ keep_loaded: 2, idle_s: 90 }), "At most 2 models stay loaded; idle ones are unloaded after 1.5 min.");
});
