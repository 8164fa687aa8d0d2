// Opens the help page of every node of ours in the panel that ComfyUI shows it in; test_help.py starts it.
// usage: help.mjs ADDRESS CHROMIUM SCREENSHOTS NODE...
import assert from "node:assert/strict";
import { answered, openPage, without } from "../web/open_page.mjs";

const [base, executablePath, screenshots, ...types] = process.argv.slice(2);
const { browser, page, errors, shoot, eventually, ready } = await openPage(base, executablePath, screenshots);
for (const [id, value] of [["Comfy.TutorialCompleted", true], ["Comfy.VueNodes.Enabled", false]]) {
  await fetch(`${base}/api/settings/${id}`, { method: "POST", body: JSON.stringify(value) });
}

/** Leave one node of a class in the graph, selected. */
const selectOnly = (type) => {
  app.rootGraph.clear();
  const node = LiteGraph.createNode(type);
  node.pos = [300, 300];
  app.rootGraph.add(node);
  app.canvas.selectNode(node);
};
/** What the panel shows: title, pictures, and what is wider than its place. */
const shown = () => {
  const help = document.querySelector(".node-help-content");
  const title = help?.querySelector("h1")?.innerText;
  if (!title) return { title: "" };
  const images = [...help.querySelectorAll("img")];
  const right = help.getBoundingClientRect().right + 1;
  const scrolls = (element) => element.scrollWidth > element.clientWidth + 1 && getComputedStyle(element).display !== "inline";
  const juts = (element) => [...element.getClientRects()].some((rect) => rect.right > right);
  let panel = help;
  while (!/auto|scroll/.test(getComputedStyle(panel).overflowY)) panel = panel.parentElement;
  const parts = [help, ...help.querySelectorAll("*")];
  const wide = [panel, ...parts].filter(scrolls).concat(parts.filter(juts));
  return {
    title,
    width: panel.clientWidth,
    loading: images.filter((image) => !image.complete).length,
    pictures: images.map((image) => image.naturalWidth),
    wide: wide.map((element) => `${element.tagName}.${element.className}, ${element.scrollWidth} of ${element.clientWidth}: ${element.textContent.slice(0, 60)}`),
  };
};

// A small screen: there the panel is at its narrowest.
await page.setViewportSize({ width: 1280, height: 720 });
await page.goto(base);
await ready();
const tooWide = {};
for (const type of types) {
  await page.evaluate(selectOnly, type);
  // The panel stays open, and follows the selection.
  if (type === types[0]) await page.getByTestId("info-button").click();
  const name = await page.evaluate((type) => LiteGraph.registered_node_types[type].title, type);
  await eventually(type, shown, (help) => help.title === name && help.loading === 0 && help.pictures.length > 0);
  await shoot(`help_${type}`);
  const { pictures, wide } = await page.evaluate(shown);
  assert.ok(pictures.length > 0 && pictures.every((width) => width > 0), `${type}: the widths of its pictures are ${pictures}`);
  if (wide.length > 0) tooWide[type] = wide;
}
assert.deepEqual(tooWide, {}, "wider than the panel");
// The page looks for a help page in its language first.
assert.deepEqual(without(errors, answered(404, "docs/\\w+/en\\.md")), [], "errors in the page");
await browser.close();
