// @ts-check
// The newest report of every node, whichever way and in whichever order they come: the server's messages and its answers
// overtake each other. Knows nothing of the page: it imports nothing, so that node can test it.

/** @typedef {import("./badges.js").NodeReport & { begin_s: number }} NodeReport */

/** Return what keeps the newest report of each node. What a prompt without a workflow's id did belongs to no workflow. */
export function makeNodeReports() {
  /** Workflow id -> node id -> report. @type {Map<string, Map<string, NodeReport>>} */
  const workflows = new Map();
  return {
    /** Take a report, unless a later execution of its node is known, or more of the same one. @param {NodeReport} node */
    take(node) {
      if (node.workflow_id === null) return;
      const nodes = workflows.get(node.workflow_id) ?? new Map();
      const known = nodes.get(node.node_id);
      if (known && (known.begin_s - node.begin_s || known.seconds - node.seconds) > 0) return;
      workflows.set(node.workflow_id, nodes.set(node.node_id, node));
    },
    /** The reports of a workflow's nodes, the oldest first. @param {string} workflow */
    of: (workflow) => [...(workflows.get(workflow)?.values() ?? [])].sort((one, other) => one.begin_s - other.begin_s),
    /** Forget all: the server that told it is gone. */
    clear: () => workflows.clear(),
  };
}
