// Unit tests of web/panel/device_news.js; run by node --test, which test_scripts.py starts.
import assert from "node:assert/strict";
import { test } from "node:test";
import { makeDeviceNews } from "../../web/panel/device_news.js";

const at = (now_s, server_id = "first") => ({ server_id, now_s });

test("devices are asked for until they were told, and after something happened", () => {
  const news = makeDeviceNews();
  assert.ok(news.isDoubtful());
  assert.ok(news.take(at(1)));
  assert.ok(!news.isDoubtful());
  news.happened(at(2));
  assert.ok(news.isDoubtful());
  assert.ok(news.take(at(3)));
  assert.ok(!news.isDoubtful());
});

test("an answer that a message with devices has overtaken is no news", () => {
  const news = makeDeviceNews();
  news.happened(at(5));
  assert.ok(news.take(at(5)), "the message's own devices");
  assert.ok(!news.take(at(4)), "the answer from before");
  assert.ok(!news.isDoubtful());
  assert.ok(news.take(at(5.5)));
});

test("an answer from before something happened leaves the doubt", () => {
  const news = makeDeviceNews();
  news.happened(at(2));
  assert.ok(news.take(at(1)), "nothing newer is known");
  assert.ok(news.isDoubtful());
  news.happened(at(1.5)); // a message that was late
  assert.ok(news.take(at(2)));
  assert.ok(!news.isDoubtful());
});

test("a server that was started again has a clock of its own", () => {
  const news = makeDeviceNews();
  news.happened(at(100));
  news.take(at(100));
  assert.ok(news.take(at(1, "second")));
  assert.ok(!news.isDoubtful());
  news.happened(at(0.5, "third"));
  assert.ok(news.isDoubtful());
});
