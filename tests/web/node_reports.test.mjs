// Unit tests of web/node_reports.js; run by node --test, which test_scripts.py starts.
import assert from "node:assert/strict";
import { test } from "node:test";
import { makeNodeReports } from "../../web/node_reports.js";

const report = (node_id, begin_s, seconds, workflow_id = "graph") => ({ node_id, workflow_id, begin_s, seconds });
const kept = (reports) => reports.of("graph").map(({ node_id, begin_s, seconds }) => [node_id, begin_s, seconds]);

test("the latest execution of a node counts, in whichever order its reports come", () => {
  const open = report("3", 1, 0.5);
  const ended = report("3", 1, 2);
  const next = report("3", 9, 0.1);
  for (const order of [[open, ended, next], [next, ended, open], [ended, next, open], [open, next, ended]]) {
    const reports = makeNodeReports();
    order.forEach(reports.take);
    assert.deepEqual(kept(reports), [["3", 9, 0.1]]);
  }
});

test("of an execution its end counts, not what was told while it went on", () => {
  const reports = makeNodeReports();
  for (const seconds of [0.5, 2, 1]) reports.take(report("3", 1, seconds));
  assert.deepEqual(kept(reports), [["3", 1, 2]]);
});

test("a workflow's nodes are there in the order in which they began, and no others", () => {
  const reports = makeNodeReports();
  for (const each of [report("5", 3, 1), report("4", 1, 1), report("6", 2, 1), report("4", 4, 1), report("7", 5, 1, "another"), report("8", 6, 1, null)]) reports.take(each);
  assert.deepEqual(kept(reports), [["6", 2, 1], ["5", 3, 1], ["4", 4, 1]]);
  assert.deepEqual(reports.of("none"), []);
  reports.clear();
  assert.deepEqual(reports.of("graph"), []);
});
