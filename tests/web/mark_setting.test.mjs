// Unit tests of web/mark_setting.js; run by node --test, which test_scripts.py starts.
import assert from "node:assert/strict";
import { test } from "node:test";
import { makeMarkSetting } from "../../web/mark_setting.js";

const settled = () => new Promise((resolve) => setImmediate(resolve));

/** A page with the setting, and a server whose answers come when the test says so; `sent` is what reached it. */
function makePage() {
  const page = { setting: "", sent: [], answers: [], asked: 0 };
  const write = async (marks) => void (page.setting = marks);
  const ask = async () => void (page.asked += 1);
  const send = (marks) => new Promise((resolve) => (page.sent.push(marks), page.answers.push(resolve)));
  return { page, send, setting: makeMarkSetting({ read: () => page.setting, write, ask }) };
}

test("what the panel moves is kept in the setting once it counts, and not where it is refused", async () => {
  const { page, send, setting } = makePage();
  const moved = setting.move(() => "gpu:0=1:2", send);
  await settled();
  assert.equal(page.setting, "");
  page.answers[0](true);
  assert.equal(await moved, true);
  assert.deepEqual([page.setting, page.asked], ["gpu:0=1:2", 1]);
  const refused = setting.move(() => "gpu:0=9:9", send);
  await settled();
  page.answers[1](false);
  assert.equal(await refused, false);
  assert.equal(page.setting, "gpu:0=1:2");
});

test("marks of two devices that are moved at once are both kept", async () => {
  const { page, send, setting } = makePage();
  const joined = (mark) => () => [page.setting, mark].filter(Boolean).join();
  const moves = [setting.move(joined("gpu:0=1:2"), send), setting.move(joined("gpu:1=3:4"), send)];
  await settled();
  assert.equal(page.sent.length, 1);
  page.answers[0](true);
  await moves[0];
  await settled();
  page.answers[1](true);
  await moves[1];
  assert.deepEqual([page.sent, page.setting], [["gpu:0=1:2", "gpu:0=1:2,gpu:1=3:4"], "gpu:0=1:2,gpu:1=3:4"]);
});

test("what the user writes into the setting while a mark is on its way is what counts in the end", async () => {
  const { page, send, setting } = makePage();
  const moved = setting.move(() => "gpu:0=1:2", send);
  await settled();
  page.setting = "*=10%:20%";
  const passed = setting.passOn("*=10%:20%", () => send("*=10%:20%"));
  page.answers[0](true);
  await moved;
  assert.equal(page.setting, "*=10%:20%");
  await settled();
  page.answers[1](true);
  await passed;
  assert.deepEqual(page.sent, ["gpu:0=1:2", "*=10%:20%"]);
});

test("a setting that was changed again while it waited is not passed on", async () => {
  const { page, send, setting } = makePage();
  page.setting = "old";
  const moved = setting.move(() => "new", send);
  const passed = setting.passOn("old", () => send("old"));
  await settled();
  page.answers[0](true);
  await Promise.all([moved, passed]);
  assert.deepEqual([page.sent, page.setting], [["new"], "new"]);
});
