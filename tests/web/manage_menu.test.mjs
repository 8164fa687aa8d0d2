// "Manage with Highwater": where it is offered, where the node is put, and what is linked afterwards.
import assert from "node:assert/strict";
import { test } from "node:test";
import { freePlace, insertManagers, outputsToManage } from "../../web/manage_menu.js";

/** A graph with the page's rules for links: an input takes one. Links: [from, output, to, input, type, reroute?]. */
function graphOf(nodes, links = [], edges = {}) {
  const graph = { nodes: [], links: new Map(), getNodeById: (id) => graph.nodes.find((node) => String(node.id) === String(id)) ?? null, ...edges };
  let numLinks = 0;
  const connect = (origin_id, origin_slot, target_id, target_slot, type, parentId) => {
    for (const link of graph.links.values())
      if (link.target_id === target_id && link.target_slot === target_slot) graph.links.delete(link.id);
    graph.links.set(++numLinks, { id: numLinks, origin_id, origin_slot, target_id, target_slot, type, parentId });
  };
  graph.add = (node) => {
    node.id ??= graph.nodes.length + 100;
    node.graph = graph;
    node.connect = (slot, target, input, reroute) => connect(node.id, slot, target.id, input, node.outputs[slot].type, reroute);
    graph.nodes.push(node);
  };
  if (graph.outputNode)
    graph.outputNode.slots = [0, 1].map((at) => ({
      connect: (output, node, reroute) => connect(node.id, node.outputs.indexOf(output), -20, at, output.type, reroute),
    }));
  nodes.forEach(graph.add);
  links.forEach((link) => connect(...link));
  return graph;
}
const node = (id, type, inputs = [], outputs = [], more = {}) => ({
  id, type, pos: [0, 0], size: [200, 100], inputs: inputs.map((type) => ({ type })), outputs: outputs.map((type) => ({ type })), ...more,
});
const make = (type) => {
  const kind = { HighwaterManageModel: "MODEL", HighwaterManageCLIP: "CLIP", HighwaterManageVAE: "VAE" }[type];
  return node(undefined, type, [kind, "STRING"], [kind]);
};
const linksOf = (graph) => [...graph.links.values()].map((link) => [link.origin_id, link.origin_slot, link.target_id, link.target_slot, link.parentId]);
const always = () => true;
const asked = (graph, id, isOffered = always) => outputsToManage(graph.getNodeById(id), isOffered);

const UNET = () => node(1, "UNETLoader", [], ["MODEL"]);
const LORA = () => node(2, "LoraLoader", ["MODEL", "CLIP"], ["MODEL", "CLIP"]);
const SAMPLER = (id = 3) => node(id, "KSampler", ["MODEL", "CONDITIONING"], ["LATENT"]);

test("offered for models of other loaders, of LoRAs, and of no node of ours", () => {
  const graph = graphOf([UNET(), LORA(), SAMPLER(), node(4, "HighwaterLoadVAE", [], ["VAE"])], [[1, 0, 2, 0, "MODEL"], [2, 0, 3, 0, "MODEL"]]);
  assert.deepEqual(asked(graph, 1), [0]);
  assert.deepEqual(asked(graph, 2), [0], "its CLIP leads nowhere");
  assert.deepEqual(asked(graph, 3), []);
  assert.deepEqual(asked(graph, 4), []);
});

test("the outputs of a checkpoint that lead somewhere, and all where none does", () => {
  const checkpoint = () => node(1, "CheckpointLoaderSimple", [], ["MODEL", "CLIP", "VAE"]);
  assert.deepEqual(asked(graphOf([checkpoint()]), 1), [0, 1, 2]);
  const decode = node(2, "VAEDecode", ["LATENT", "VAE"], ["IMAGE"]);
  assert.deepEqual(asked(graphOf([checkpoint(), decode], [[1, 2, 2, 1, "VAE"]]), 1), [2]);
});

test("not offered where the page lacks the node, in no graph, and for nodes that are only drawn", () => {
  const graph = graphOf([node(1, "CheckpointLoaderSimple", [], ["MODEL", "CLIP"]), node(2, "Reroute", [], ["MODEL"], { isVirtualNode: true })]);
  assert.deepEqual(asked(graph, 1, (type) => type === "HighwaterManageCLIP"), [1]);
  assert.deepEqual(asked(graph, 2), []);
  assert.deepEqual(outputsToManage(UNET(), always), []);
});

test("not offered before a node of ours that manages it, nor behind one, also through other nodes", () => {
  const manage = { ...make("HighwaterManageModel"), id: 4 };
  const before = graphOf([UNET(), LORA(), SAMPLER(), manage], [[1, 0, 2, 0, "MODEL"], [2, 0, 4, 0, "MODEL"], [4, 0, 3, 0, "MODEL"]]);
  assert.deepEqual([asked(before, 1), asked(before, 2)], [[], [1]], "the LoRA's CLIP is nobody's");
  const ours = node(5, "HighwaterLoadDiffusionModel", [], ["MODEL"]);
  const keep = node(6, "HighwaterKeep", ["*"], ["*"]);
  const behind = graphOf([ours, keep, LORA(), SAMPLER()], [[5, 0, 6, 0, "MODEL"], [6, 0, 2, 0, "MODEL"], [2, 0, 3, 0, "MODEL"]]);
  assert.deepEqual(asked(behind, 2), [1]);
});

test("a subgraph is looked into, both ways", () => {
  const inside = graphOf(
    [node(7, "HighwaterLoadDiffusionModel", [], ["MODEL"]), node(8, "VAELoader", [], ["VAE"]), { ...make("HighwaterManageCLIP"), id: 9 }],
    [[7, 0, -20, 0, "MODEL"], [8, 0, -20, 1, "VAE"], [-10, 0, 9, 0, "CLIP"]],
  );
  const container = node(1, "0c1b2d3e", ["CLIP"], ["MODEL", "VAE"], { subgraph: inside });
  const clip = node(2, "CLIPLoader", [], ["CLIP"]);
  const graph = graphOf([container, clip], [[2, 0, 1, 0, "CLIP"]]);
  assert.deepEqual(asked(graph, 1), [1]);
  assert.deepEqual(asked(graph, 2), []);
});

test("nodes in a ring end the search", () => {
  const graph = graphOf([LORA(), { ...LORA(), id: 3 }], [[2, 0, 3, 0, "MODEL"], [3, 0, 2, 0, "MODEL"]]);
  assert.deepEqual(asked(graph, 2), [0]);
});

test("all links of the output leave the new node, by the reroutes that they went through", () => {
  const graph = graphOf([UNET(), SAMPLER(), SAMPLER(4)], [[1, 0, 3, 0, "MODEL"], [1, 0, 4, 0, "MODEL", 12]]);
  insertManagers(graph.getNodeById(1), [0], make);
  const [manager] = graph.nodes.slice(-1);
  assert.equal(manager.type, "HighwaterManageModel");
  assert.deepEqual(linksOf(graph), [[manager.id, 0, 3, 0, undefined], [manager.id, 0, 4, 0, 12], [1, 0, manager.id, 0, undefined]]);
  assert.deepEqual(asked(graph, 1), []);
});

test("in a subgraph, also what leaves it", () => {
  const graph = graphOf([UNET()], [[1, 0, -20, 0, "MODEL"]], { outputNode: { boundingRect: [300, 0, 100, 60] } });
  insertManagers(graph.getNodeById(1), [0], make);
  const [manager] = graph.nodes.slice(-1);
  assert.deepEqual(linksOf(graph).map(([from, , to]) => [from, to]), [[manager.id, -20], [1, manager.id]]);
  assert.ok(manager.pos[0] >= 400 || manager.pos[1] >= 60, `${manager.pos} covers the subgraph's output`);
});

test("three nodes for a checkpoint, none over another", () => {
  const checkpoint = node(1, "CheckpointLoaderSimple", [], ["MODEL", "CLIP", "VAE"]);
  const graph = graphOf([checkpoint, { ...SAMPLER(), pos: [240, 0] }]);
  insertManagers(checkpoint, [0, 1, 2], make);
  assert.equal(graph.nodes.length, 5);
  for (const one of graph.nodes)
    for (const other of graph.nodes)
      if (one !== other) assert.ok([0, 1].some((at) => Math.abs(one.pos[at] - other.pos[at]) >= one.size[at] + [0, 30][at]), `${one.pos} ${other.pos}`);
});

test("the free place that is nearest, never left of what was wanted", () => {
  assert.deepEqual(freePlace([], [10, 20], [100, 50]), [10, 20]);
  assert.deepEqual(freePlace([[0, 0, 300, 100]], [10, 20], [100, 50]), [10, -80]);
  const wall = [[0, -1000, 300, 2000]];
  assert.deepEqual(freePlace(wall, [10, 20], [100, 50]), [330, 20]);
});
