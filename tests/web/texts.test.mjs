// The page's texts: in the user's language, else in English, else the key.
import assert from "node:assert/strict";
import { test } from "node:test";
import { commandLabel, localeOf, said, settingText, text, useTexts } from "../../web/texts.js";

const ALL = {
  en: { commands: { A_Lend: { label: "Lend" } }, settings: { A_Units: { name: "Units" } }, highwater: { panel: { title: "Memory", free: "{amount} free on {device}" } } },
  de: { commands: { A_Lend: { label: "Verleihen" } }, highwater: { panel: { title: "Speicher" } } },
  fr: {},
};

test("a text of the language, of English where it lacks one, and the key where there is none", () => {
  useTexts(ALL, "de");
  assert.equal(text("panel.title"), "Speicher");
  assert.equal(text("panel.free", { amount: "1G", device: "gpu:0" }), "1G free on gpu:0");
  assert.equal(text("panel.absent"), "panel.absent");
  assert.equal(text("panel"), "panel");
});

test("a language with a region, one without texts, and one that is unknown", () => {
  useTexts(ALL, "de-AT");
  assert.equal(text("panel.title"), "Speicher");
  for (const locale of ["fr", "ja"]) {
    useTexts(ALL, locale);
    assert.equal(text("panel.title"), "Memory");
  }
});

test("times are written in the user's language, as the browser's user writes it", () => {
  useTexts(ALL, "de");
  assert.equal(localeOf(["en-GB", "de-AT"]), "de-AT");
  assert.equal(localeOf(["en-GB", "fr"]), "de");
  useTexts(ALL, "zh-TW");
  assert.equal(localeOf(["zh-CN"]), "zh-TW");
});

test("what a text does not name is left out, and what it names and nobody gave stays", () => {
  useTexts(ALL, "en");
  assert.equal(text("panel.free", { amount: "{device}", other: 3 }), "{device} free on {device}");
});

test("a command and a setting are called by their ids, in the same languages", () => {
  useTexts(ALL, "de");
  assert.equal(commandLabel("A.Lend"), "Verleihen");
  assert.equal(commandLabel("A.Absent"), "A.Absent");
  assert.equal(settingText("A.Units", "name"), "Units");
  assert.equal(settingText("A.Units", "tooltip"), "A.Units");
});

test("what the server says is in the user's language, and in the server's words where the page has none", () => {
  useTexts(ALL, "de");
  const told = { text: "1G free on gpu:0", key: "panel.free", values: { amount: "2G", device: "gpu:0" } };
  assert.equal(said(told), "2G free on gpu:0");
  assert.equal(said({ ...told, key: "panel.title" }), "Speicher");
  assert.equal(said({ ...told, key: "panel.newer" }), "1G free on gpu:0");
});
