// @ts-check
// What the menu and the keyboard offer.
import "./page_texts.js"; // labels are read as this script runs
import { giveBack, lend, makeTinyPipelines, releaseIdle } from "./server.js";
import { commandLabel } from "./texts.js";

export const commands = [
  { id: "Highwater.ReleaseIdle", function: releaseIdle },
  { id: "Highwater.Lend", function: () => lend() },
  { id: "Highwater.GiveBack", function: () => giveBack() },
  { id: "Highwater.MakeTinyPipelines", function: makeTinyPipelines },
].map((command) => ({ ...command, label: commandLabel(command.id) }));

export const menuCommands = [{ path: ["Extensions", "Highwater"], commands: commands.map(({ id }) => id) }];

// Combinations that neither the page nor a browser has; Settings, Keybinding changes them.
export const keybindings = [
  { combo: { key: "u", alt: true, shift: true }, commandId: "Highwater.ReleaseIdle" },
  { combo: { key: "l", alt: true, shift: true }, commandId: "Highwater.Lend" },
  { combo: { key: "h", alt: true, shift: true }, commandId: "Workspace.ToggleSidebarTab.highwater-memory" },
];
