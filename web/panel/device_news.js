// @ts-check
// Which of the devices that the server tells of are the newest: its messages and its answers overtake each other. Imports
// nothing, so that node can test it.

/** @typedef {{ server_id: string, now_s: number }} Told who tells, and when by its own clock */

/** Return what knows whether devices that are told are news, and whether those of before may have changed since. */
export function makeDeviceNews() {
  let serverId = "";
  let changedAt = 0;
  let toldAt = -1;

  /** @param {Told} told */
  function follow(told) {
    if (told.server_id === serverId) return;
    serverId = told.server_id; // it was started again, and so was its clock
    changedAt = told.now_s;
    toldAt = -1;
  }

  return {
    /** Note that something happened, and so devices may have changed. @param {Told} message */
    happened(message) {
      follow(message);
      changedAt = Math.max(changedAt, message.now_s);
    },
    /** Take devices as they were at a time; returns whether they are no older than all before. @param {Told} told */
    take(told) {
      follow(told);
      if (told.now_s < toldAt) return false;
      toldAt = told.now_s;
      return true;
    },
    /** Whether nothing was told of devices yet, or something happened since. */
    isDoubtful: () => toldAt < changedAt,
  };
}
