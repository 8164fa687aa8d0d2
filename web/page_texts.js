// @ts-check
// Reads the host's texts once, before any script runs that imports this one: what such a script registers or shows at
// its start is in the user's language already.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { useTexts } from "./texts.js";

const texts = await readTexts();
useLanguage();

/** The host's translations, ours among them; without them the page shows the keys of texts, and goes on. */
async function readTexts() {
  try {
    const response = await api.fetchApi("/i18n");
    if (!response.ok) throw new Error(`HTTP ${response.status}`);
    return await response.json();
  } catch (error) {
    console.warn("highwater: the texts could not be read:", error);
    return {};
  }
}

/**
 * Take the texts of a language, or of the one that the page is in now.
 * @param {string} chosen "page", or a language that the page itself need not have
 */
export function useLanguage(chosen = app.extensionManager.setting.get("Highwater.Language") ?? "page") {
  useTexts(texts, chosen === "page" ? (app.extensionManager.setting.get("Comfy.Locale") ?? "en") : chosen);
}
