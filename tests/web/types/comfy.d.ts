// The part of the ComfyUI page that web/ uses, by hand. Checked in the browser test against the installed page.
interface ComfyBadge {
  text: string;
  fgColor?: string;
  bgColor?: string;
  onClick?: (event: MouseEvent) => void;
}
declare const LGraphBadge: { new (options: ComfyBadge): ComfyBadge };
declare const LiteGraph: { registered_node_types: Record<string, unknown>; createNode(type: string): ComfyNode };

interface ComfyLink {
  id: number;
  origin_id: string | number;
  origin_slot: number;
  target_id: string | number;
  target_slot: number;
  type: string;
  parentId?: number;
}
/** The input or output of a subgraph, drawn like a node. */
interface ComfySubgraphEdge {
  boundingRect: ArrayLike<number>;
  slots: { connect(output: object, node: ComfyNode, reroute?: string | number): unknown }[];
}
interface ComfyGraph {
  id: string;
  rootGraph?: ComfyGraph;
  nodes: ComfyNode[];
  links: Map<number, ComfyLink>;
  inputNode?: ComfySubgraphEdge;
  outputNode?: ComfySubgraphEdge;
  getNodeById(id: string | number): ComfyNode | null;
  add(node: ComfyNode): unknown;
}
interface ComfyNode {
  id: string | number;
  type: string;
  pos: ArrayLike<number>;
  inputs: { type: unknown }[];
  outputs: { type: unknown }[];
  isVirtualNode?: boolean;
  connect(slot: number, target: ComfyNode, input: number, reroute?: string | number): unknown;
  comfyClass?: string;
  title?: string;
  graph?: ComfyGraph | null;
  subgraph?: ComfyGraph;
  badges: (ComfyBadge | (() => ComfyBadge))[];
  onExecuted?: (this: ComfyNode, output: { text?: string[] }) => void;
  onRemoved?: (this: ComfyNode) => void;
  onSerialize?: (this: ComfyNode, saved: { size: [number, number] }) => void;
  addDOMWidget(
    name: string,
    type: string,
    element: HTMLElement,
    options?: { serialize?: boolean; getMinHeight?(): number },
  ): { serialize?: boolean };
  removeWidget(widget: { serialize?: boolean }): void;
  size: [number, number];
  setSize(size: [number, number]): void;
}
interface ComfyToast {
  severity: "success" | "info" | "warn" | "error";
  summary?: string;
  detail?: string;
  life?: number;
}
interface Setting<Type, Value> {
  id: string;
  category?: string[];
  name: string;
  tooltip?: string;
  type: Type;
  defaultValue: Value;
  options?: { text: string; value: string }[];
  attrs?: { min?: number; max?: number; step?: number };
  onChange?: (value: Value | undefined, before?: Value) => void;
}

type ComfySetting = Setting<"text", string> | Setting<"number", number> | Setting<"boolean", boolean> | Setting<"combo", string>;
interface ComfyExtension {
  name: string;
  settings?: ComfySetting[];
  commands?: { id: string; label: string; function: () => void | Promise<void> }[];
  keybindings?: { combo: { key: string; ctrl?: boolean; alt?: boolean; shift?: boolean }; commandId: string }[];
  menuCommands?: { path: string[]; commands: string[] }[];
  getNodeMenuItems?(node: ComfyNode): { content: string; callback(): void }[];
  readonly topbarBadges?: { text: string; label?: string; variant?: "info" | "warning" | "error"; tooltip?: string }[];
  nodeCreated?(node: ComfyNode): void;
  afterConfigureGraph?(): void | Promise<void>;
  setup?(): void | Promise<void>;
}
declare module "*/scripts/app.js" {
  export const app: {
    rootGraph: ComfyGraph;
    canvas?: {
      setDirty(foreground: boolean, background?: boolean): void;
      emitBeforeChange(): void;
      emitAfterChange(): void;
      graph: ComfyGraph | null;
      setGraph(graph: ComfyGraph): void;
      deselectAll(): void;
      select(node: ComfyNode): void;
      centerOnNode(node: ComfyNode): void;
    };
    registerExtension(extension: ComfyExtension): void;
    extensionManager: { [ownKey: string]: any; toast: { add(toast: ComfyToast): void };
      setting: { get(id: string): any; set(id: string, value: unknown): Promise<void> };
      dialog: { prompt(options: { title: string; message: string; defaultValue?: string }): Promise<string | null> } };
  };
}
declare module "*/scripts/api.js" {
  export const api: {
    fetchApi(path: string, options?: RequestInit): Promise<Response>;
    addEventListener(type: "highwater.memory", listener: (event: CustomEvent<Highwater.Message>) => void): void;
    addEventListener(type: string, listener: (event: CustomEvent<any>) => void): void;
  };
}
