// As much of a document as the panel's modules use, for tests under node. Nothing in it reads HTML.

class FakeElement {
  constructor(document, tag) {
    Object.assign(this, { ownerDocument: document, tag, children: [], parent: null, attributes: {}, listeners: {}, style: {}, hidden: false, value: "", own: "" });
  }
  get textContent() {
    return this.children.length > 0 ? this.children.map((child) => child.textContent).join("") : this.own;
  }
  set textContent(text) {
    this.replaceChildren();
    this.own = String(text);
  }
  setAttribute(name, value) {
    this.attributes[name] = String(value);
  }
  getAttribute(name) {
    return this.attributes[name] ?? null;
  }
  removeAttribute(name) {
    delete this.attributes[name];
  }
  addEventListener(type, listener) {
    (this.listeners[type] ??= []).push(listener);
  }
  /** Call the listeners of an event; returns when those that wait have ended. */
  async fire(type, event = {}) {
    await Promise.all((this.listeners[type] ?? []).map((listener) => listener({ preventDefault() {}, stopPropagation() {}, ...event })));
  }
  append(...children) {
    children.forEach((child) => this.insertBefore(child, null));
  }
  insertBefore(child, before) {
    child.remove();
    child.parent = this;
    this.children.splice(before ? this.children.indexOf(before) : this.children.length, 0, child);
  }
  remove() {
    if (this.parent) this.parent.children.splice(this.parent.children.indexOf(this), 1);
    this.parent = null;
  }
  replaceChildren(...children) {
    [...this.children].forEach((child) => child.remove());
    this.append(...children);
  }
  focus() {}
  setPointerCapture() {}
  hasPointerCapture() {
    return true;
  }
  getBoundingClientRect() {
    return { left: 100, width: 200 };
  }
  /** All elements below that a test wants. */
  all(wanted) {
    return this.children.flatMap((child) => [...(wanted(child) ? [child] : []), ...child.all(wanted)]);
  }
  /** The first element below with a class, a role or a text. */
  find({ name, role, text }) {
    return this.all((element) =>
      name ? (element.attributes.class ?? "").split(" ").includes(name) : role ? element.attributes.role === role : element.textContent === text,
    )[0];
  }
}

export const makeDocument = () => {
  const document = { createElement: (tag) => new FakeElement(document, tag) };
  return document;
};
