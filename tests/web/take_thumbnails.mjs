// Takes a picture of an example in the canvas renderer, after a run where it needs no model files;
// scripts/take_thumbnails.py starts it.
// usage: take_thumbnails.mjs ADDRESS CHROMIUM FOLDER EXAMPLE
import { onCanvas, openPage } from "./open_page.mjs";

const [base, executablePath, folder, example] = process.argv.slice(2);
const [LEFT, TOP, WIDTH, HEIGHT, MARGIN] = [120, 120, 1760, 1080, 16]; // of the window, and free around the nodes
const [TITLE, BADGE] = [30, 22];
const { browser, page, eventually } = await openPage(base, executablePath, folder);
await page.setViewportSize({ width: LEFT + WIDTH + 400, height: TOP + HEIGHT + 120 });
const off = ["Comfy.VueNodes.Enabled", "Comfy.Minimap.Visible", "Comfy.Graph.CanvasInfo", "Comfy.Graph.CanvasMenu"];
for (const [id, value] of [["Comfy.TutorialCompleted", true], ...off.map((id) => [id, false])]) {
  await fetch(`${base}/api/settings/${id}`, { method: "POST", body: JSON.stringify(value) });
}

const hasLinks = () => app.rootGraph.nodes.some((node) => node.properties.models);
const outcomes = async () => Object.values(await (await fetch("/api/history")).json()).map((run) => run.status.status_str);
const image = () => app.rootGraph.nodes.flatMap((node) => node.imgs ?? []).some((image) => image.naturalWidth > 0);
/** Draw all nodes at this place of the window; returns the part of the window that they take. */
const fit = ([left, top, width, height, above]) => {
  const nodes = app.rootGraph.nodes;
  const edge = (of, axis, extra) => of(...nodes.map((node) => node.pos[axis] + extra(node)));
  const [x, y] = [edge(Math.min, 0, () => 0), edge(Math.min, 1, () => -above)];
  const [right, bottom] = [0, 1].map((axis) => edge(Math.max, axis, (node) => node.size[axis]));
  const scale = Math.min(1, width / (right - x), height / (bottom - y));
  const canvas = app.canvas.canvas.getBoundingClientRect();
  app.canvas.ds.scale = scale;
  app.canvas.ds.offset[0] = (left - canvas.left) / scale - x;
  app.canvas.ds.offset[1] = (top - canvas.top) / scale - y;
  app.canvas.setDirty(true, true);
  return { x: left, y: top, width: (right - x) * scale, height: (bottom - y) * scale };
};

await page.goto(`${base}/?template=${example}&source=highwater`);
await eventually(example, () => window.app?.rootGraph?.nodes.some((node) => node.type === "HighwaterMemoryReport") ?? false, Boolean);
await page.addStyleTag({ content: ".p-toast { display: none !important }" });
await page.waitForTimeout(1500);
if (!(await page.evaluate(hasLinks))) {
  await page.getByRole("button", { name: /^Run/ }).first().click();
  await eventually("the run", outcomes, (all) => all.length === 1 && all.every((outcome) => outcome === "success"));
  await eventually("badges", onCanvas, (badges) => Object.values(badges).some(Boolean));
  await eventually("the image", image, Boolean);
  await page.waitForTimeout(1500);
}
const { x, y, width, height } = await page.evaluate(fit, [LEFT, TOP, WIDTH, HEIGHT, TITLE + BADGE]);
await page.waitForTimeout(1500);
const clip = { x: x - MARGIN, y: y - MARGIN, width: width + 2 * MARGIN, height: height + 2 * MARGIN };
await page.screenshot({ path: `${folder}/${example}.png`, clip });
await browser.close();
