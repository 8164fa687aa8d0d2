// @ts-check
// The setting of watermarks, which the settings' dialog and the memory panel change, and what is sent of it. One change after
// the other: what the user did last must count. Knows nothing of the page: it imports only what node can test.
import { makeTurns } from "./turns.js";

/**
 * Return what changes marks, each once the change before has ended.
 * @param {{ read: () => string, write: (marks: string) => Promise<unknown>, ask: () => Promise<unknown> }} page the setting,
 *   and what shows the marks that count now
 */
export function makeMarkSetting({ read, write, ask }) {
  const inTurn = makeTurns();
  return {
    /**
     * Pass on what the setting was changed to; nothing where it says something else by now, which is passed on as well.
     * @param {string} marks
     * @param {() => Promise<unknown>} send
     */
    passOn: (marks, send) => inTurn("", async () => void (read() === marks && (await send()))),
    /**
     * Send marks and keep them in the setting, unless the user changed that meanwhile: what it says is passed on next.
     * @param {() => string} marksNow with those of all other devices as they are then
     * @param {(marks: string, isSaved: boolean) => Promise<boolean>} send whether they count; `isSaved`: the setting says so
     * @returns {Promise<boolean>} whether they count
     */
    move: (marksNow, send) => inTurn("", async () => {
      const [marks, before] = [marksNow(), read()];
      const isSet = await send(marks, before === marks);
      if (isSet && before !== marks && read() === before) await write(marks);
      await ask(); // from now on no older answer is shown, which would put the mark back for a moment
      return isSet;
    }),
  };
}
