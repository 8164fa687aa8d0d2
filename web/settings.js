// @ts-check
// When the page's settings are passed on to the server. Knows nothing of the page: it imports nothing, so that node can
// test it.

/**
 * Return a setting's listener that passes its value on. When the page opens: at once, and only one that is not empty or
 * 0, so that what a command line has set stays where the setting is empty. When it is changed: some time after the last
 * keystroke.
 * @template Value
 * @param {(value: Value, isChanged: boolean) => void} apply
 * @param {number} milliseconds
 * @param {Value} none what stands for no value
 * @returns {(value: Value | undefined, before?: Value) => void} the page calls it without the second when it opens
 */
export function makeListener(apply, milliseconds, none) {
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let waiting;
  return (value, before) => {
    clearTimeout(waiting);
    if (before !== undefined) waiting = setTimeout(() => apply(value ?? none, true), milliseconds);
    else if (value) apply(value, false);
  };
}
