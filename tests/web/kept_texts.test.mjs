// Unit tests of web/kept_texts.js; run by node --test, which test_scripts.py starts.
import assert from "node:assert/strict";
import { test } from "node:test";
import { makeKeptTexts } from "../../web/kept_texts.js";

function makeStorage() {
  const items = new Map();
  return { items, getItem: (name) => items.get(name) ?? null, setItem: (name, value) => void items.set(name, value), removeItem: (name) => void items.delete(name) };
}

test("a text is there again after a reload, as soon as the same server answers", () => {
  const storage = makeStorage();
  const before = makeKeptTexts(() => storage);
  assert.equal(before.take("one"), "first");
  before.keep("a", "told");
  const after = makeKeptTexts(() => storage);
  assert.equal(after.find("a"), "");
  after.take("one");
  assert.deepEqual([after.find("a"), after.find("b")], ["told", ""]);
});

test("what another server told is not there, and what is no longer told is forgotten", () => {
  const storage = makeStorage();
  const texts = makeKeptTexts(() => storage);
  texts.take("one");
  texts.keep("a", "told");
  texts.keep("b", "told, too");
  texts.keep("b", "");
  assert.deepEqual([...storage.items.keys()], ["a"]);
  assert.equal(texts.take("one"), "same");
  assert.equal(texts.take("two"), "another");
  assert.equal(texts.find("a"), "");
});

test("what a node says before the server has called itself anything is of the one that does so next", () => {
  const storage = makeStorage();
  const early = makeKeptTexts(() => storage);
  early.keep("a", "told");
  assert.equal(early.take("one"), "first");
  assert.equal(early.find("a"), "told");
  assert.equal(early.take("two"), "another");
  assert.equal(early.find("a"), "");
});

test("what was told before any server was known is of no other one: not after a reload, nor after the connection was lost", () => {
  const storage = makeStorage();
  const early = makeKeptTexts(() => storage);
  early.keep("a", "told");
  const later = makeKeptTexts(() => storage);
  later.take("another");
  assert.equal(later.find("a"), "");
  early.loseConnection();
  early.keep("b", "told since");
  early.take("another");
  assert.deepEqual([early.find("a"), early.find("b")], ["", "told since"]);
});

test("a text of an earlier server does not come back before this one is known", () => {
  const storage = makeStorage();
  const before = makeKeptTexts(() => storage);
  before.take("one");
  before.keep("a", "old");
  const after = makeKeptTexts(() => storage);
  after.keep("a", "");
  after.take("one");
  assert.equal(after.find("a"), "");
});
