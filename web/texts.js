// @ts-check
// The page's texts in the user's language, out of `locales/`. Knows nothing of the page: it imports nothing, so that node
// can test it.

/** @typedef {{ [key: string]: string | Messages }} Messages a text, or more of them, by the last part of its key */

/** @typedef {{ highwater?: Messages, commands?: Messages, settings?: Messages }} HostTexts what `/i18n` has of a language */

/** What was found for the user's language first, English last. @type {HostTexts[]} */
let languages = [];
/** What the user chose, whether there are texts of it or not. */
let chosen = "en";

/**
 * Take the texts of the host's `/i18n`, all languages in one object; a text that a language lacks is English.
 * @param {Record<string, HostTexts>} all
 * @param {string} locale such as "de" or "zh"
 */
export function useTexts(all, locale) {
  const found = [locale, locale.split("-")[0], "en"].map((name) => all[name]);
  languages = found.filter((texts) => texts !== undefined);
  chosen = locale;
}

/**
 * The locale of times: the user's language, as the browser's user writes it where that is one of theirs ("en-GB").
 * @param {readonly string[]} preferred the browser's languages
 */
export const localeOf = (preferred) => preferred.find((name) => name.split("-")[0] === chosen) ?? chosen;

/**
 * A text by its key, such as "panel.title", with values in the place of `{name}`. The key itself where there is none.
 * @param {string} key
 * @param {Record<string, string | number>} [values]
 */
export const text = (key, values = {}) => translated(key, values) ?? key;

/**
 * What the server said, in the user's language; in English where the page has no such text.
 * @param {{ text: string, key: string, values: Record<string, string> }} said
 */
export const said = ({ text, key, values }) => translated(key, values) ?? text;

/**
 * @param {string} key
 * @param {Record<string, string | number>} values
 */
function translated(key, values) {
  const found = find(["highwater", ...key.split(".")]);
  return found?.replace(/\{(\w+)\}/g, (all, name) => String(values[name] ?? all));
}

/**
 * The label of a command, by its id; the id itself where there is none.
 * @param {string} id
 */
export const commandLabel = (id) => find(["commands", asKey(id), "label"]) ?? id;

/**
 * The name or the tooltip of a setting, by its id; the id itself where there is none.
 * @param {string} id
 * @param {"name" | "tooltip"} what
 */
export const settingText = (id, what) => find(["settings", asKey(id), what]) ?? id;

/** An id as the host writes it in translations. @param {string} id */
const asKey = (id) => id.replaceAll(".", "_");

/** @param {string[]} path */
function find(path) {
  for (const texts of languages) {
    /** @type {string | Messages | undefined} */
    let found = /** @type {Messages} */ (texts);
    for (const part of path) found = typeof found === "object" ? found[part] : undefined;
    if (typeof found === "string") return found;
  }
  return undefined;
}
