// Creation of elements, and minimal updates of them.

type Child = Node | string | null | undefined;

/** Creates an element: h("div", {class: "x", onclick: f}, child, "text"). Attributes that are null or false are left out. */
export function h<K extends keyof HTMLElementTagNameMap>(tag: K, attributes: Record<string, unknown> = {}, ...children: Child[]): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value as EventListener);
    else if (name === "text") element.textContent = String(value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child): child is Node | string => child !== null && child !== undefined));
  return element;
}

/** Creates an element of a drawing. Attributes that are null or false are left out; `text` becomes its content. */
export function svg(tag: string, attributes: Record<string, unknown> = {}, ...children: (Node | null)[]): SVGElement {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") element.textContent = String(value);
    else element.setAttribute(name, String(value));
  }
  element.append(...children.filter((child): child is Node => child !== null));
  return element;
}

/** Writes text only where it changes: no needless layout. */
export function setText(element: Element, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}

/** The first row of a table; a column without a name has a cell in place of a heading, for screen readers. */
export function tableHead(names: readonly string[]): HTMLElement {
  return h("thead", {}, h("tr", {}, ...names.map((text) => (text ? h("th", { text, scope: "col" }) : h("td")))));
}

/** Writes rows of [name, value] into a table of facts; existing rows are reused. */
export function setFacts(table: Element, facts: readonly (readonly [string, string])[]): void {
  for (const [index, [name, value]] of facts.entries()) {
    const row = table.children[index] ?? table.appendChild(h("div", {}, h("span", { class: "mnb-dim" }), h("span")));
    setText(row.children[0] as Element, name);
    setText(row.children[1] as Element, value);
  }
  while (table.childElementCount > facts.length) table.lastElementChild?.remove();
}
