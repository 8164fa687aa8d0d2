// The English texts of the page, for tests of what it says.
import { readFileSync } from "node:fs";
import { useTexts } from "../../web/texts.js";

const read = (name) => JSON.parse(readFileSync(new URL(`../../locales/en/${name}.json`, import.meta.url), "utf8"));
export const useEnglish = () => useTexts({ en: { ...read("main"), commands: read("commands"), settings: read("settings") } }, "en");
useEnglish();
