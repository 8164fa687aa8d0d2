// @ts-check
// The page's texts in the user's language, out of `locales/`. Knows nothing of the page: it imports nothing, so that node
// can test it.

/** @typedef {{ [key: string]: string | Messages }} Messages a text, or more of them, by the last part of its key */

/** What was found for the user's language first, English last. @type {Messages[]} */
let languages = [];

/**
 * Take the texts of the host's `/i18n`, all languages in one object; a text that a language lacks is English.
 * @param {Record<string, { highwater?: Messages }>} all
 * @param {string} locale such as "de" or "zh"
 */
export function useTexts(all, locale) {
  const found = [locale, locale.split("-")[0], "en"].map((name) => all[name]?.highwater);
  languages = found.filter((messages) => messages !== undefined);
}

/**
 * A text by its key, such as "panel.release", with values in the place of `{name}`. The key itself where there is none.
 * @param {string} key
 * @param {Record<string, string | number>} [values]
 */
export function text(key, values = {}) {
  for (const messages of languages) {
    /** @type {string | Messages | undefined} */
    let found = messages;
    for (const part of key.split(".")) found = typeof found === "object" ? found[part] : undefined;
    if (typeof found === "string") return found.replace(/\{(\w+)\}/g, (all, name) => String(values[name] ?? all));
  }
  return key;
}
