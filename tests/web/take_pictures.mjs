// Takes the pictures of the page that README shows; scripts/take_pictures.py starts it.
// usage: take_pictures.mjs ADDRESS CHROMIUM FOLDER
import { inPage, openPage } from "./open_page.mjs";

const [base, executablePath, folder] = process.argv.slice(2);
const LOADER = "HighwaterLoadPipeline";
const { browser, page, shoot, eventually, setting, widgets } = await openPage(base, executablePath, folder);
await page.setViewportSize({ width: 1440, height: 700 });
await page.goto(base);
await eventually("the example is open", () => window.app?.rootGraph?.nodes?.map((node) => node.type) ?? [], (types) => types.includes(LOADER));
await setting("Comfy.VueNodes.Enabled", true);
await setting("Comfy.Minimap.Visible", false);
await setting("Comfy.Graph.CanvasInfo", false);
await widgets(LOADER, { profile: "12MiB", precision: "fp8 scaled" });
await page.getByRole("button", { name: "Run", exact: true }).first().click();
await eventually("the loader streams", inPage, (badges) => /^streams /.test(badges[LOADER]));
await eventually("the image is there", () => document.querySelectorAll("[data-node-id] img").length, (number) => number > 0);
await eventually("the report is there", () => document.querySelector(".highwater-text")?.textContent ?? "", (text) => text.includes("Last events"));
await page.waitForTimeout(6000); // until the notice of the run is gone;
await shoot("serve");
// The panel beside the same run.
await page.getByRole("button", { name: "Memory (Highwater)" }).click();
await eventually("the panel has the components", () => document.querySelectorAll(".hw-panel .hw-component-row").length, (number) => number >= 4);
await eventually("the panel has the events", () => document.querySelectorAll(".hw-panel .hw-events li").length, (number) => number > 0);
await page.setViewportSize({ width: 1440, height: 1080 });
await page.mouse.move(900, 700); // away from the tab, which has a tooltip
await page.evaluate(() => app.canvas.ds.reset());
await page.keyboard.press("."); // all nodes in sight
await page.waitForTimeout(1500);
await shoot("panel");
await browser.close();
