// @ts-check
// The settings of the page, and what each of them changes: in the page, or on the server.
import { useLanguage } from "./page_texts.js";
import { keepFree, limit, lookAhead, MARKS, setDefaultProfile } from "./server.js";
import { makeListener } from "./settings.js";
import { settingText } from "./texts.js";
import { useUnits } from "./units.js";

const TYPING_MS = 1_000;

/**
 * Return our settings, in the order in which the page shows them. The host reads their texts by their ids, too.
 * @param {{ showBadges: (isOn: boolean) => void, redraw: () => void }} page
 * @returns {ComfySetting[]}
 */
export function settings({ showBadges, redraw }) {
  /**
   * What changes the page at once; when the page opens there is nothing to draw anew.
   * @template Value
   * @param {(value: Value) => void} apply
   * @returns {(value: Value | undefined, before?: Value) => void}
   */
  const live = (apply) => (value, before) => {
    if (value === undefined) return;
    apply(value);
    if (before !== undefined) redraw();
  };
  const memory = ["Highwater", "Memory"];
  const display = ["Highwater", "Display"];
  return [
    {
      ...named(MARKS, memory),
      type: "text",
      defaultValue: "",
      onChange: makeListener((/** @type {string} */ marks, isChanged) => void keepFree(marks, isChanged), TYPING_MS, ""),
    },
    {
      ...named("Highwater.MaxLoaded", memory),
      type: "number",
      defaultValue: 0,
      attrs: { min: 0, max: 1000, step: 1 },
      onChange: makeListener((/** @type {number} */ value, isChanged) => void limit("keep_loaded", value, isChanged), TYPING_MS, 0),
    },
    {
      ...named("Highwater.IdleMinutes", memory),
      type: "number",
      defaultValue: 0,
      attrs: { min: 0, max: 10080, step: 1 },
      onChange: makeListener((/** @type {number} */ value, isChanged) => void limit("idle", value, isChanged), TYPING_MS, 0),
    },
    {
      ...named("Highwater.DefaultProfile", memory),
      type: "text",
      defaultValue: "",
      onChange: makeListener((/** @type {string} */ profile, isChanged) => void setDefaultProfile(profile, isChanged), TYPING_MS, ""),
    },
    {
      ...named("Highwater.LookAhead", memory),
      type: "boolean",
      defaultValue: true,
      onChange: (/** @type {boolean | undefined} */ isOn, /** @type {boolean | undefined} */ before) => {
        const isChanged = before !== undefined;
        if (isOn !== undefined && (isChanged || !isOn)) void lookAhead(isOn, isChanged);
      },
    },
    { ...named("Highwater.Badges", display), type: "boolean", defaultValue: true, onChange: live(showBadges) },
    {
      ...named("Highwater.Units", display),
      type: "combo",
      defaultValue: "binary",
      options: [
        { text: "KiB, MiB, GiB (1024)", value: "binary" },
        { text: "KB, MB, GB (1000)", value: "decimal" },
      ],
      onChange: live((/** @type {string} */ units) => useUnits(units === "decimal" ? "decimal" : "binary")),
    },
    {
      ...named("Highwater.Language", display),
      type: "combo",
      defaultValue: "page",
      options: [
        { text: "page", value: "page" },
        { text: "English", value: "en" },
        { text: "Deutsch", value: "de" },
        { text: "日本語", value: "ja" },
        { text: "中文", value: "zh" },
      ],
      onChange: live((/** @type {string} */ language) => useLanguage(language)),
    },
  ];
}

/**
 * What every setting has; its texts are in `locales/`.
 * @param {string} id
 * @param {string[]} category
 */
const named = (id, category) => ({
  id,
  category: [...category, id],
  name: settingText(id, "name"),
  tooltip: settingText(id, "tooltip"),
});
