// @ts-check
// Turns what the memory manager tells into notices, and makes page elements. Knows nothing of the page: it imports only
// what node can test.
import { text } from "./texts.js";

/**
 * What to tell when a run failed in a way that its message explains: the page itself says only that a node failed.
 * ComfyUI loads a model when a node needs it: what is wrong with a loader's values may come up in any node.
 * Null for every other failure.
 * @param {{ node_type?: string, exception_type?: string, exception_message?: string }} failure
 * @param {boolean} [isManaging] whether any model is under the manager's care
 * @returns {{ severity: "error", summary: string, detail: string } | null}
 */
export function noticeOfFailure(failure, isManaging = false) {
  const type = failure.exception_type ?? "";
  const kind = type.split(".").pop();
  const message = (failure.exception_message ?? "").trim();
  const isOurs = failure.node_type?.startsWith("Highwater") || /\bmemory\.errors\.\w+$/.test(type);
  if (kind === "DoesNotFit") {
    const [sum, ...remedies] = message.split("; ");
    const remedy = remedies.length ? [text("notice.remedy", { remedy: remedies.join("; ") })] : [];
    return { severity: "error", summary: text("notice.does_not_fit"), detail: [`${sum}${remedy.length ? "." : ""}`, ...remedy].join(" ") };
  }
  if (kind === "InvalidInput" && isOurs) {
    return { severity: "error", summary: text("notice.invalid"), detail: message };
  }
  if (kind === "OutOfMemoryError" && (isOurs || isManaging)) {
    const [first, ...others] = message.split("\n");
    const learned = others.find((line) => line.startsWith("Highwater: "));
    return { severity: "error", summary: text("notice.out_of_memory"), detail: `${first}. ${learned?.slice(11) ?? text("notice.keep_more_free")}` };
  }
  return null;
}

/**
 * What to tell about an event of the manager; null for those that only the log keeps.
 * @param {{ type?: string, kind?: string, component?: string, device?: string, reason?: string }} event
 * @returns {{ severity: "warn", summary: string, detail: string } | null}
 */
export function noticeOfEvent(event) {
  if (event.type !== "event") return null;
  const detail = event.reason ?? "";
  if (event.kind === "growth") return { severity: "warn", summary: text("notice.growth"), detail };
  if (event.kind !== "error" && event.kind !== "thrashing") return null;
  return { severity: "warn", summary: text("notice.of_component", { component: event.component ?? "", device: event.device ?? "" }), detail };
}

/**
 * A box for the text of a node, in the page's colours; scrolls where the node is too small, and never makes it grow.
 * @param {Document} document
 */
export function makeTextBox(document) {
  const box = document.createElement("pre");
  box.className = "highwater-text";
  Object.assign(box.style, {
    margin: "0",
    padding: "6px 8px",
    boxSizing: "border-box",
    overflow: "auto",
    height: "100%",
    minHeight: "140px",
    contain: "size",
    font: "10px/1.45 ui-monospace, monospace",
    color: "var(--input-text)",
    background: "var(--comfy-input-bg)",
    borderRadius: "6px",
    userSelect: "text",
  });
  return box;
}
