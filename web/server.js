// @ts-check
// What the page asks of the server, for all that it shows: the report as it changes, and changes by the user.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { limitBody, limitsText } from "./limits.js";
import { makeMarkSetting } from "./mark_setting.js";
import { makeLiveReport, makeSoon } from "./report.js";
import { text } from "./texts.js";
import { makeTurns } from "./turns.js";
import { inMegabytes } from "./units.js";
import { marksText } from "./watermark.js";

const NOTICE_MS = 20_000;
// Where this browser keeps what was said last of a watermark that this machine cannot keep.
const TOLD = "Highwater.Watermark.told";
const ASK_MS = 200;
const ASK_IN_NODE_MS = 1_000;

/** @param {{ severity: "success" | "info" | "warn" | "error", summary: string, detail: string } | null} notice */
export function notify(notice) {
  if (notice) app.extensionManager.toast.add({ ...notice, life: NOTICE_MS });
}

/** @param {unknown} error */
const reasonOf = (error) => (error instanceof Error ? error.message : String(error));

// -- the report

/** The report of now, for all parts of the page that show something of it; asked for as the server tells that it changed. */
export const live = makeLiveReport(fetchReport, (error) => {
  console.warn("highwater: the report could not be read:", error);
  notify({ severity: "warn", summary: text("notice.no_report"), detail: text("notice.no_report_why", { reason: reasonOf(error) }) });
});
// A loader's own report does not know what is loaded: ComfyUI loads a model when another node needs it.
const askWithin = makeSoon((more) => void live.ask({ more }));

/** Ask for the report whenever the server tells of something; never while it is silent. */
export function followServer() {
  api.addEventListener("highwater.memory", () => askWithin(ASK_MS));
  // Long nodes tell how far they are; runs that compute nothing anew tell only that the queue is empty again.
  api.addEventListener("progress", () => askWithin(ASK_IN_NODE_MS));
  api.addEventListener("status", ({ detail }) => {
    if (!(detail?.exec_info?.queue_remaining > 0)) askWithin(ASK_MS);
  });
}

/**
 * @param {string} words of the address
 * @returns {Promise<Highwater.Report>}
 */
async function fetchReport(words) {
  return get(`report?${words}`);
}

/**
 * Read one of our addresses.
 * @param {string} path
 */
export async function get(path) {
  const response = await api.fetchApi(`/highwater/${path}`);
  if (!response.ok) throw new Error(`HTTP ${response.status}`);
  return response.json();
}

// -- changes

const inTurn = makeTurns();

/**
 * Post JSON to one of our addresses, after all before to the same one; returns its answer.
 * @template {keyof Highwater.Requests & keyof Highwater.Answers} Path
 * @param {Path} path
 * @param {Highwater.Requests[Path]} body
 * @returns {Promise<Highwater.Answers[Path]>}
 */
async function post(path, body) {
  const headers = { "Content-Type": "application/json" };
  return inTurn(path, async () => {
    const response = await api.fetchApi(`/highwater/${path}`, { method: "POST", headers, body: JSON.stringify(body) });
    const answer = await response.json().catch(() => ({ error: text("notice.http", { status: response.status }) }));
    if (!response.ok) throw new Error(answer.error);
    return answer;
  });
}

/**
 * Ask the server to change something, tell what came of it, and show the report after it. Never rejects.
 * @template {keyof Highwater.Requests & keyof Highwater.Answers} Path
 * @param {string} summary
 * @param {Path} path
 * @param {Highwater.Requests[Path]} body
 * @param {(answer: Highwater.Answers[Path]) => string | null} tell null: nothing to tell
 * @returns {Promise<boolean>} whether it was changed
 */
export async function change(summary, path, body, tell) {
  try {
    const answer = await post(path, body);
    const detail = tell(answer);
    const isWhole = !("notes" in answer && answer.notes.length);
    notify(detail === null ? null : { severity: isWhole ? "success" : "warn", summary, detail });
    return true;
  } catch (error) {
    notify({ severity: "error", summary, detail: reasonOf(error) });
    return false;
  } finally {
    askWithin(ASK_MS, ["devices"]);
  }
}

/** Take every model that nothing uses off its device. */
export async function releaseIdle() {
  await change(text("free.title"), "free", {}, ({ freed_bytes }) => {
    const freed = Object.entries(freed_bytes).filter(([, bytes]) => bytes > 0);
    if (freed.length === 0) return text("free.nothing");
    return text("free.freed", { amounts: freed.map(([device, bytes]) => `${device} ${inMegabytes(bytes)}`).join(", ") });
  });
}

/** Make the pipelines that the example of a pipeline uses: random weights, small enough for any machine. */
export async function makeTinyPipelines() {
  const summary = text("tiny.title");
  notify({ severity: "info", summary, detail: text("tiny.begun") });
  await change(summary, "tiny-pipelines", {}, ({ pipelines }) => text("tiny.made", { names: Object.keys(pipelines).join(", ") }));
}

/**
 * Lend memory of a device to another program: asks how much, and for how long.
 * @param {string} [ofDevice] the device, where the user has chosen it
 */
export async function lend(ofDevice) {
  const title = text("lend.title");
  const wish = await app.extensionManager.dialog.prompt({
    title,
    message: ofDevice ? text("lend.question_of", { device: ofDevice }) : text("lend.question"),
    defaultValue: "8GiB 60s",
  });
  if (!wish) return;
  const [size, time, device = ofDevice] = wish.trim().split(/\s+/);
  const body = { size: size ?? "", for: time ?? "", ...(device ? { device } : {}) };
  await change(title, "lend", body, (answer) => {
    const lent = text("lend.lent", { freed: inMegabytes(answer.freed_bytes), free: inMegabytes(answer.free_bytes), device: answer.device });
    return answer.missing_bytes ? `${lent} ${text("lend.missing", { amount: inMegabytes(answer.missing_bytes) })}` : lent;
  });
}

/**
 * Give lent memory back before its time is up.
 * @param {string} [device] the only one by default
 */
export async function giveBack(device) {
  const body = device ? { device } : {};
  await change(text("lend.give_back"), "lend/give-back", body, (answer) =>
    text("lend.given_back", { amount: inMegabytes(answer.lent_bytes), device: answer.device }),
  );
}

/** The setting of watermarks. */
export const MARKS = "Highwater.Watermark";

export const markSetting = makeMarkSetting({
  read: () => app.extensionManager.setting.get(MARKS) ?? "",
  write: (marks) => app.extensionManager.setting.set(MARKS, marks),
  ask: () => live.ask(),
});

/**
 * Keep as much memory free as the setting says. What the page passes on as it opens is told only where it is refused, or
 * where this machine cannot keep a part of it: once, not at each opening.
 * @param {string} marks
 * @param {boolean} isChanged
 */
export const keepFree = (marks, isChanged) => markSetting.passOn(marks, async () => {
  await change(text("marks.title"), "watermark", { marks }, ({ watermarks, notes }) => {
    const isNew = notes.length > 0 && localStorage.getItem(TOLD) !== notes.join();
    localStorage.setItem(TOLD, notes.join());
    return isChanged || isNew ? marksText(watermarks, notes) : null;
  });
});

/**
 * Give the profile that loaders have whose own is left at auto.
 * @param {string} profile
 * @param {boolean} isChanged
 */
export async function setDefaultProfile(profile, isChanged) {
  await change(text("profile.title"), "default-profile", { profile }, (answer) => {
    if (!isChanged) return null;
    return answer.profile === "auto" ? text("profile.none") : text("profile.set", { profile: answer.profile });
  });
}

/**
 * Read files of models that are used next while others compute, or only when they are loaded.
 * @param {boolean} isOn
 * @param {boolean} isChanged
 */
export async function lookAhead(isOn, isChanged) {
  await change(text("ahead.title"), "look-ahead", { on: isOn }, (answer) => {
    if (!isChanged) return null;
    return text(answer.on ? "ahead.on" : "ahead.off");
  });
}

/**
 * Limit how many models stay loaded, or for how long idle ones do, as a setting says.
 * @param {"keep_loaded" | "idle"} name
 * @param {number} value
 * @param {boolean} isChanged
 */
export async function limit(name, value, isChanged) {
  await change(text("limits.title"), "limits", limitBody(name, value), (answer) => (isChanged ? limitsText(answer) : null));
}
