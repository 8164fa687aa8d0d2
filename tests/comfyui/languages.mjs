// Looks at our texts in ComfyUI's own page in another language, and at the settings of the display; test_languages.py
// starts it.
// usage: languages.mjs ADDRESS CHROMIUM SCREENSHOTS WORKFLOW.json   (API format; has a loader and a sampler)
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { answered, expectDetail, isIdle, onCanvas, openPage, without } from "../web/open_page.mjs";

const [base, executablePath, screenshots, workflow] = process.argv.slice(2);
const LOADER = "HighwaterLoadDiffusionModel";
const SAMPLER = "KSampler";
const ON_DEVICE = /^[1-9][\d.]*[KMG] gpu:0$/;

const { browser, page, errors, shoot, eventually, ready, setting } = await openPage(base, executablePath, screenshots);
const settings = { "Comfy.TutorialCompleted": true, "Comfy.VueNodes.Enabled": false, "Comfy.Minimap.Visible": false, "Comfy.Locale": "ja" };
for (const [id, value] of Object.entries(settings)) {
  await fetch(`${base}/api/settings/${id}`, { method: "POST", body: JSON.stringify(value) });
}
await page.goto(base);
await ready();
await page.evaluate((graph) => app.loadApiJson(graph, "test"), JSON.parse(await readFile(workflow, "utf8")));
await page.evaluate(() => app.loadGraphData({ ...app.rootGraph.serialize(), id: crypto.randomUUID() }));
await page.evaluate(() => app.queuePrompt(0));
await eventually("badges", onCanvas, (badges) => ON_DEVICE.test(badges[LOADER]) && badges[SAMPLER] !== "");
await eventually("nothing runs", isIdle, Boolean);

// The host reads names of nodes, of commands and of settings; ours are the texts of our own elements.
const title = (type) => LiteGraph.registered_node_types[type].title;
assert.equal(await page.evaluate(title, LOADER), "拡散モデルを読み込む (Highwater)");
await page.evaluate(() => app.extensionManager.command.execute("Workspace.SearchBox.Toggle"));
await page.keyboard.type("拡散モデルを読み込む");
await page.getByText("拡散モデルを読み込む (Highwater)").first().waitFor();
await shoot("search_ja");
await page.keyboard.press("Escape");
await page.getByText("拡散モデルを読み込む (Highwater)").first().waitFor({ state: "detached" });
await expectDetail(page, LOADER, /\ngpu:0: 重み[\d.]+M\n[^]*\n有効/, "このノードのメモリ");
await expectDetail(page, SAMPLER, /^このノード、[\d.]+ s\ngpu:0: 使用した重み[\d.]+M, アクティベーション/, "このノードのメモリ");
await page.evaluate(() => app.extensionManager.command.execute("Comfy.ShowSettingsDialog"));
await page.getByText("Highwater", { exact: true }).first().click();
await page.getByText("ノードのメモリバッジ").first().waitFor();
await page.waitForTimeout(300);
await shoot("settings_ja");
await page.keyboard.press("Escape");

// The page changes its language without a reload; our own texts follow.
await setting("Comfy.Locale", "zh");
const known = async () => (await import("/extensions/highwater/texts.js")).text("detail.title");
await eventually("our texts in Chinese", known, (text) => text === "此节点的内存");
await eventually("badges in the workflow that is opened again", onCanvas, (badges) => ON_DEVICE.test(badges[LOADER]));
await expectDetail(page, LOADER, /\ngpu:0: 权重 [\d.]+M\n[^]*\n已生效/, "此节点的内存");

// German is no language of the page's own: the setting brings our texts, and they stay after a reload.
await setting("Highwater.Language", "de");
await eventually("our texts in German", known, (text) => text === "Speicher dieses Nodes");
await expectDetail(page, LOADER, /\ngpu:0: [\d.]+M Gewichte\n[^]*\nwirksam/, "Speicher dieses Nodes");

// Units and badges change at once.
let binary;
await eventually("binary units", onCanvas, (badges) => ([binary] = badges[LOADER].split("M")) && ON_DEVICE.test(badges[LOADER]));
await setting("Highwater.Units", "decimal");
const isDecimal = (badges) => Math.abs(Number.parseFloat(badges[LOADER]) - Number(binary) * 1.048576) < 0.2;
await eventually("decimal units", onCanvas, (badges) => ON_DEVICE.test(badges[LOADER]) && isDecimal(badges));
await setting("Highwater.Badges", false);
await eventually("no badges", onCanvas, (badges) => Object.values(badges).every((text) => text === ""));
await setting("Highwater.Badges", true);
await eventually("badges again", onCanvas, isDecimal);

// What auto means in loaders: the next run loads again, and the plan says why. What is no profile is refused.
await setting("Highwater.DefaultProfile", "12");
await page.getByText(/'12' is not a profile and has no unit/).first().waitFor();
await setting("Highwater.DefaultProfile", "6MiB");
await page.getByText("Ab dem nächsten Lauf bedeutet auto in Loadern 6MiB.").first().waitFor();
await page.evaluate(() => app.queuePrompt(0));
const reasons = async () => (await (await fetch("/api/highwater/report?only=components")).json()).components.flatMap((part) => part.plan.reasons);
await eventually("the plan's origin", reasons, (told) => told.includes("profile 6MiB: from the setting Default profile"));
await eventually("nothing runs", isIdle, Boolean);
await setting("Highwater.DefaultProfile", "");
await page.getByText("Loader mit auto nutzen allen freien Speicher.").first().waitFor();
await page.evaluate(() => app.queuePrompt(0));
await eventually("the plan without it", reasons, (told) => !told.some((reason) => reason.includes("Default profile")));
await eventually("all of it again", onCanvas, (badges) => ON_DEVICE.test(badges[LOADER]));
await eventually("nothing runs", isIdle, Boolean);

// The keys release what nothing uses; again there is nothing.
await page.keyboard.press("Alt+Shift+U");
await page.getByText(/Freigegeben: gpu:0 [1-9]\d* MB/).first().waitFor();
await eventually("badges in RAM", onCanvas, (badges) => /^RAM /.test(badges[LOADER]));
await page.keyboard.press("Alt+Shift+U");
await page.getByText("Kein ungenutztes Modell war auf einem Gerät.").first().waitFor();
await page.waitForTimeout(300);
await shoot("released_de");
await page.keyboard.press("Alt+Shift+L");
await page.getByText("Wie viel, wie lange und bei mehreren GPUs von welcher: 8GiB 60s gpu:0").first().waitFor();
await page.keyboard.press("Escape");
await page.getByRole("dialog").waitFor({ state: "detached" });
// The panel opens by keys, and changes its units at once.
await page.keyboard.press("Alt+Shift+H");
await page.getByText("Geräte und RAM").first().waitFor();
await page.locator(".hw-advice").getByText(/^Nichts begrenzt ihn: /).waitFor();
const free = () => [...document.querySelectorAll("*")].map((element) => element.children.length ? "" : element.textContent).find((text) => /^[\d.]+G von [\d.]+G frei$/.test(text)) ?? "";
const total = (text) => Number(/von ([\d.]+)G/.exec(text)?.[1]);
await eventually("free in the panel", free, (text) => total(text) > 0);
const before = total(await page.evaluate(free));
await setting("Highwater.Units", "binary");
await eventually("free in binary units", free, (text) => total(text) < before);
await setting("Highwater.Units", "decimal");
await eventually("free in decimal units again", free, (text) => total(text) === before);
await shoot("panel_de");
await page.keyboard.press("Alt+Shift+H");

await page.reload();
await ready("page is ready again");
await eventually("the workflow is open again", onCanvas, (badges) => LOADER in badges && /^RAM /.test(badges[LOADER]));
await expectDetail(page, LOADER, /nicht wirksam: wird beim Rechnen geladen/, "Speicher dieses Nodes");
assert.deepEqual(without(errors, answered(400, "highwater/default-profile")), [], "errors in the page");
await browser.close();
