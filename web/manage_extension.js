// @ts-check
// Adds "Manage with Highwater" to the menu of nodes whose models no node of ours manages. Registers only; see manage_menu.js.
import { app } from "../../scripts/app.js";
import { insertManagers, outputsToManage } from "./manage_menu.js";
import "./page_texts.js";
import { text } from "./texts.js";

/** @param {string} type */
const isOffered = (type) => type in LiteGraph.registered_node_types;

/**
 * Insert our nodes behind outputs of a node, in one step of undo.
 * @param {ComfyNode} node
 * @param {number[]} slots
 */
function manage(node, slots) {
  app.canvas?.emitBeforeChange();
  try {
    insertManagers(node, slots, (type) => LiteGraph.createNode(type));
  } finally {
    app.canvas?.emitAfterChange();
  }
  app.canvas?.setDirty(true, true);
}

app.registerExtension({
  name: "highwater.manage",

  getNodeMenuItems(node) {
    const slots = outputsToManage(node, isOffered);
    return slots.length > 0 ? [{ content: text("manage.menu"), callback: () => manage(node, slots) }] : [];
  },
});
