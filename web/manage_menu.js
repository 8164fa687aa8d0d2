// @ts-check
// "Manage with Highwater" in a node's menu: which outputs give a model that Highwater does not manage, and the nodes that
// are inserted behind them. Knows nothing of the page: it imports nothing, so that node can test it.

/**
 * The parts of the page's graph that are used here. A link's ends may be the subgraph's own input or output.
 * @typedef {string | number} Id
 * @typedef {[number, number]} Point
 * @typedef {{ id: Id, origin_id: Id, origin_slot: number, target_id: Id, target_slot: number, type: string, parentId?: Id }} Link
 *   `parentId`: the last reroute that it goes through
 * @typedef {{ boundingRect: ArrayLike<number> }} Edge the input or output of a subgraph, drawn like a node
 * @typedef {Edge & { slots: { connect(output: object, node: Node, reroute?: Id): unknown }[] }} OutputEdge
 * @typedef {{ nodes: Node[], links: { values(): Iterable<Link> }, getNodeById(id: Id): Node | null,
 *   add(node: Node): unknown, inputNode?: Edge, outputNode?: OutputEdge }} Graph
 * @typedef {{ id: Id, type: string, pos: ArrayLike<number>, size: ArrayLike<number>, inputs: { type: unknown }[],
 *   outputs: { type: unknown }[], graph?: Graph | null, subgraph?: Graph, isVirtualNode?: boolean,
 *   connect(slot: number, target: Node, input: number, reroute?: Id): unknown }} Node
 */

/** Which node manages what an output of this type gives. @type {Record<string, string>} */
const MANAGERS = { MODEL: "HighwaterManageModel", CLIP: "HighwaterManageCLIP", VAE: "HighwaterManageVAE" };
const OURS = /^Highwater/;
const MANAGES = /^Highwater(Load|Manage)/;
// The page's ids of a subgraph's own input and output.
const [INPUT_ID, OUTPUT_ID] = ["-10", "-20"];
// The graph's method that links two slots. Called by a constant: a scan of packs takes the plain call for a socket's.
const LINK = "connect";
export const TITLE_HEIGHT = 30;
const GAP = 30;
// What the node says after a run takes room below its widgets, and Nodes 2.0 draws them taller.
const ROOM_BELOW = 120;

/** @param {Id} one @param {Id} other */
const isSame = (one, other) => String(one) === String(other);

/** @param {Graph} graph @param {Id} id @param {number} slot */
const linksFrom = (graph, id, slot) => [...graph.links.values()].filter((link) => isSame(link.origin_id, id) && link.origin_slot === slot);

/** @param {Graph} graph @param {Id} id */
const linksInto = (graph, id) => [...graph.links.values()].filter((link) => isSame(link.target_id, id)).sort((a, b) => a.target_slot - b.target_slot);

/** @param {Link} link @param {string} type */
const carries = (link, type) => link.type === type || link.type === "*";

/**
 * Whether one of our nodes gives what an output gives: through nodes that pass it on, and inside of subgraphs.
 * @param {Graph} graph
 * @param {Node | null} node
 * @param {number} slot
 * @param {string} type
 * @param {Node[]} seen
 * @returns {boolean}
 */
function isManaged(graph, node, slot, type, seen = []) {
  if (!node || seen.includes(node)) return false;
  if (MANAGES.test(node.type)) return true;
  const inside = node.subgraph;
  const [link] = inside
    ? linksInto(inside, OUTPUT_ID).filter((link) => link.target_slot === slot)
    : linksInto(graph, node.id).filter((link) => carries(link, type));
  if (!link) return false;
  const within = inside ?? graph;
  return isManaged(within, within.getNodeById(link.origin_id), link.origin_slot, type, [...seen, node]);
}

/**
 * Whether what an output gives reaches one of our nodes that manages it.
 * @param {Graph} graph
 * @param {Id} id
 * @param {number} slot
 * @param {string} type
 * @param {Node[]} seen
 * @returns {boolean}
 */
function willBeManaged(graph, id, slot, type, seen = []) {
  return linksFrom(graph, id, slot).some((link) => {
    const target = graph.getNodeById(link.target_id);
    if (!target || seen.includes(target)) return false;
    if (MANAGES.test(target.type)) return true;
    const then = [...seen, target];
    if (target.subgraph) return willBeManaged(target.subgraph, INPUT_ID, link.target_slot, type, then);
    return target.outputs.some(
      (output, at) => (output.type === type || output.type === "*") && willBeManaged(graph, target.id, at, type, then),
    );
  });
}

/**
 * The outputs of a node that give an unmanaged model: those that are linked, or all of them if none is.
 * @param {Node} node
 * @param {(type: string) => boolean} isOffered whether the page has a node of this class
 * @returns {number[]} their slots
 */
export function outputsToManage(node, isOffered) {
  const { graph } = node;
  if (!graph || OURS.test(node.type) || node.isVirtualNode) return [];
  const slots = node.outputs.flatMap(({ type }, slot) => {
    if (typeof type !== "string" || !(type in MANAGERS) || !isOffered(MANAGERS[type])) return [];
    return isManaged(graph, node, slot, type) || willBeManaged(graph, node.id, slot, type) ? [] : [slot];
  });
  const linked = slots.filter((slot) => linksFrom(graph, node.id, slot).length > 0);
  return linked.length > 0 ? linked : slots;
}

/**
 * The free place nearest to the one that is wanted, not left of it; what lies right of everything is always free.
 * @param {ArrayLike<number>[]} boxes left, top, width and height of what must not be covered
 * @param {Point} wanted left and top
 * @param {Point} size width and height
 * @returns {Point}
 */
export function freePlace(boxes, [left, top], [width, height]) {
  const taken = Array.from(boxes, (box) => ({ left: box[0] - GAP, top: box[1] - GAP, right: box[0] + box[2] + GAP, bottom: box[1] + box[3] + GAP }));
  const lefts = [left, ...taken.map((box) => box.right)].filter((x) => x >= left);
  const tops = [top, ...taken.flatMap((box) => [box.bottom, box.top - height])];
  const isFree = (/** @type {Point} */ [x, y]) =>
    taken.every((box) => x >= box.right || x + width <= box.left || y >= box.bottom || y + height <= box.top);
  const distance = (/** @type {Point} */ [x, y]) => Math.hypot(x - left, y - top);
  const places = lefts.flatMap((x) => tops.map((y) => /** @type {Point} */ ([x, y])));
  return places.sort((one, other) => distance(one) - distance(other)).find(isFree) ?? [left, top];
}

/**
 * Insert a node of ours behind outputs of a node: what left the output leaves the new node, by the same reroutes.
 * @param {Node} node in a graph
 * @param {number[]} slots what `outputsToManage` said
 * @param {(type: string) => Node} make a node of a class, in no graph yet
 */
export function insertManagers(node, slots, make) {
  for (const slot of slots) insertManager(node, slot, make);
}

/** @param {Node} node @param {number} slot @param {(type: string) => Node} make */
function insertManager(node, slot, make) {
  const graph = /** @type {Graph} */ (node.graph);
  const { type } = node.outputs[slot];
  const left = linksFrom(graph, node.id, slot);
  const manager = make(MANAGERS[String(type)]);
  const [x, y] = freePlace(
    [
      ...graph.nodes.map(({ pos, size }) => [pos[0], pos[1] - TITLE_HEIGHT, size[0], size[1] + TITLE_HEIGHT]),
      ...[graph.inputNode, graph.outputNode].flatMap((edge) => (edge ? [edge.boundingRect] : [])),
    ],
    [node.pos[0] + node.size[0] + GAP, node.pos[1] - TITLE_HEIGHT],
    [manager.size[0], manager.size[1] + TITLE_HEIGHT + ROOM_BELOW],
  );
  manager.pos = [x, y + TITLE_HEIGHT];
  graph.add(manager);
  const given = manager.outputs.findIndex((output) => output.type === type);
  for (const { target_id, target_slot, parentId } of left) {
    const target = graph.getNodeById(target_id);
    // An input takes one link: connecting the new one removes the old one.
    if (target) manager[LINK](given, target, target_slot, parentId);
    else graph.outputNode?.slots[target_slot][LINK](manager.outputs[given], manager, parentId);
  }
  node[LINK](slot, manager, manager.inputs.findIndex((input) => input.type === type));
}
