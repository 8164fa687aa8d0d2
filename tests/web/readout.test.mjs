// Unit tests of web/readout.js; run by node --test, which test_scripts.py starts.
import assert from "node:assert/strict";
import { test } from "node:test";
import "./english.mjs";
import { noticeOfEvent, noticeOfFailure } from "../../web/readout.js";

test("a failure that its message explains is told, any other is left to the page", () => {
  const failure = { node_type: "HighwaterSamplePipeline", exception_message: "needs 9 MiB: 3 MiB free" };
  const told = (exception_type, parts = {}) => noticeOfFailure({ ...failure, exception_type, ...parts });
  const doesNotFit = { severity: "error", summary: "Does not fit in memory", detail: "needs 9 MiB: 3 MiB free" };
  assert.deepEqual(told("highwater.memory.errors.DoesNotFit"), doesNotFit);
  assert.deepEqual(told("DoesNotFit", { node_type: "KSampler" }), doesNotFit);
  assert.equal(told("highwater.memory.errors.InvalidInput").summary, "Invalid input");
  assert.match(told("torch.OutOfMemoryError").detail, /^needs 9 MiB: 3 MiB free\. Keep more memory free/);
  assert.equal(told("torch.OutOfMemoryError", { node_type: "KSampler" }), null);
  const sampling = { ...failure, node_type: "KSampler" };
  const isManaging = true;
  assert.match(noticeOfFailure({ ...sampling, exception_type: "torch.OutOfMemoryError" }, isManaging).detail, /^needs 9 MiB/);
  // Below custom_nodes the module's name begins with a path; the host adds an empty line to every message.
  const late = { ...sampling, exception_type: "/srv/custom_nodes/hw_2.1.memory.errors.InvalidInput", exception_message: "no\n" };
  assert.deepEqual(noticeOfFailure(late), { severity: "error", summary: "Invalid input", detail: "no" });
  assert.equal(told("another.pack.InvalidInput", { node_type: "KSampler" }), null);
  assert.equal(told("builtins.KeyError"), null);
  assert.equal(noticeOfFailure({}), null);
});

test("of the manager's events only errors, thrashing and growth are told", () => {
  const event = { type: "event", kind: "error", component: "vae", device: "gpu:0", reason: "out of memory" };
  assert.deepEqual(noticeOfEvent(event), { severity: "warn", summary: "vae on gpu:0", detail: "out of memory" });
  assert.deepEqual(noticeOfEvent({ ...event, kind: "thrashing" }), noticeOfEvent(event));
  assert.equal(noticeOfEvent({ ...event, kind: "growth" }).summary, "More memory than before");
  assert.equal(noticeOfEvent({ ...event, kind: "evict" }), null);
  assert.equal(noticeOfEvent({ ...event, type: "node" }), null);
});

test("what does not fit is told with what helps, on a line of its own words", () => {
  const told = (message) => noticeOfFailure({ exception_type: "DoesNotFit", exception_message: message }).detail;
  const sum = "flux needs at least 4.0MiB on gpu:0: 1.0MiB available of 8.0MiB, 2.0MiB reserved";
  assert.equal(told(`${sum}; lower the watermark, or place it on another device`), `${sum}. What helps: lower the watermark, or place it on another device`);
  assert.equal(told(`${sum}; choose 'fp8 scaled'; process 7 holds 3.0MiB`), `${sum}. What helps: choose 'fp8 scaled'; process 7 holds 3.0MiB`);
  assert.equal(told(sum), sum);
});
