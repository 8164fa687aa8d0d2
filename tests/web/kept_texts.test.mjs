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
  assert.equal(before.isAnother("one"), false);
  before.keep("a", "told");
  const after = makeKeptTexts(() => storage);
  assert.equal(after.find("a"), "");
  after.isAnother("one");
  assert.deepEqual([after.find("a"), after.find("b")], ["told", ""]);
});

test("what another server told is not there, and what is no longer told is forgotten", () => {
  const storage = makeStorage();
  const texts = makeKeptTexts(() => storage);
  texts.isAnother("one");
  texts.keep("a", "told");
  texts.keep("b", "told, too");
  texts.keep("b", "");
  assert.deepEqual([...storage.items.keys()], ["a"]);
  assert.equal(texts.isAnother("one"), false);
  assert.equal(texts.isAnother("two"), true);
  assert.equal(texts.find("a"), "");
});

test("what a node says before the server has called itself anything is of the one that does so next", () => {
  const texts = makeKeptTexts(makeStorage);
  const storage = makeStorage();
  const early = makeKeptTexts(() => storage);
  early.keep("a", "told");
  assert.equal(early.isAnother("one"), false);
  assert.equal(early.find("a"), "told");
  assert.equal(texts.find("a"), "");
});
