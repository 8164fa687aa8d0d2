// Amounts of memory in binary and in decimal units.
import assert from "node:assert/strict";
import { test } from "node:test";
import { inMegabytes, shortBytes, useUnits } from "../../web/units.js";

const GIB = 2 ** 30;

test("amounts are in the units that were chosen last", () => {
  assert.equal(shortBytes(8 * GIB), "8.0G");
  assert.equal(inMegabytes(8 * GIB), "8192 MiB");
  useUnits("decimal");
  assert.equal(shortBytes(8 * GIB), "8.6G");
  assert.equal(shortBytes(999_500), "1.0M");
  assert.equal(inMegabytes(8 * GIB), "8590 MB");
  useUnits("binary");
  assert.equal(shortBytes(8 * GIB), "8.0G");
});

test("an amount has at most five characters", () => {
  for (const units of ["binary", "decimal"]) {
    useUnits(/** @type {"binary" | "decimal"} */ (units));
    for (let bytes = 1; bytes < 2 ** 52; bytes = Math.ceil(bytes * 1.07)) assert.ok(shortBytes(bytes).length <= 6 - (bytes < 2 ** 49 ? 1 : 0), `${bytes}`);
  }
  useUnits("binary");
});
