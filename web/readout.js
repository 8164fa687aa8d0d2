// @ts-check
// Turns what the memory manager tells into notices, and makes page elements. Knows nothing of the page: it imports
// nothing, so that node can test it.

const REMEDY = "Keep more memory free with a Watermark node, or set a smaller budget in the loader's profile.";

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
  if (kind === "DoesNotFit") return { severity: "error", summary: "Does not fit in memory", detail: message };
  if (kind === "InvalidInput" && isOurs) {
    return { severity: "error", summary: "Invalid input", detail: message };
  }
  if (kind === "OutOfMemoryError" && (isOurs || isManaging)) {
    const [first, ...others] = message.split("\n");
    const learned = others.find((line) => line.startsWith("Highwater: "));
    return { severity: "error", summary: "Out of memory", detail: `${first}. ${learned?.slice(11) ?? REMEDY}` };
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
  if (event.kind === "growth") return { severity: "warn", summary: "More memory than before", detail };
  if (event.kind !== "error" && event.kind !== "thrashing") return null;
  return { severity: "warn", summary: `${event.component} on ${event.device}`, detail };
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
