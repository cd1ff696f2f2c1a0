// The tree on the page: only the rows in sight are in it, so that ten thousand ranks cost no more than forty.

import type { ClusterState, Patch, State } from "../cluster/state";
import { h, setText } from "../page/dom";
import { say } from "../page/language";
import { LETTERS, RowText, Row, lookOf, rowsOf } from "./tree";

export const ROW = 24; // px, as in the style sheet
const AROUND = 6; // rows kept ready above and below

interface Line {
  element: HTMLElement;
  name: HTMLElement;
  note: HTMLElement;
  marks: HTMLElement;
  shown: string; // the text that is on the page
}

export interface TreeActions {
  select(row: Row | null): void;
  /** Opens the menu of the selection. */
  menu(x: number, y: number): void;
  /** Handles a key that the tree does not use; returns whether it did something. */
  key(event: KeyboardEvent): boolean;
}

export class TreeView {
  readonly node: HTMLElement;
  selected = "";
  private _query = "";

  constructor(private _actions: TreeActions) {
    this._space = h("div", { class: "mnb-outline-space", role: "presentation" });
    this.node = h("div", { class: "mnb-outline", role: "tree", tabindex: "0", "aria-label": say`meshes` }, this._space);
    this.node.addEventListener("keydown", (event) => this._key(event));
    this.node.addEventListener("scroll", () => this._measure(), { passive: true });
    new ResizeObserver(() => this._measure()).observe(this.node);
    this._space.addEventListener("click", (event) => this._click(event));
    this.node.addEventListener("contextmenu", (event) => {
      const row = this._rowAt(event); // none for the menu key
      if (row) this.select(row.key);
      const line = this._lines.get(this.selected)?.element.getBoundingClientRect();
      if (!line) return;
      event.preventDefault();
      event.stopPropagation(); // the page around has a menu of its own
      if (row) this._actions.menu(event.clientX, event.clientY);
      else this._actions.menu(line.left + ROW, line.bottom);
    });
  }

  get row(): Row | null {
    return this._rows.find((row) => row.key === this.selected) ?? null;
  }

  get rows(): readonly Row[] {
    return this._rows;
  }

  /** The query; "" shows everything. */
  get query(): string {
    return this._query;
  }

  set query(query: string) {
    this._query = query;
    this.node.scrollTop = this._top = 0;
    this._build();
    this.draw();
  }

  /** Shows a state; `structure`: meshes were added or removed. `now` is the kernel's clock. */
  show(state: ClusterState, now: number, structure: boolean): void {
    this._state = state;
    this._now = now;
    if (structure || this._query) this._build();
    this.draw();
  }

  select(key: string, scroll = false): void {
    const before = this.selected;
    this.selected = key;
    if (scroll) this._reveal();
    this.draw();
    if (before !== key) this._actions.select(this.row);
  }

  toggle(key: string): void {
    if (!this._turned.delete(key)) this._turned.add(key);
    this._build();
    this.draw();
  }

  /** Writes the visible rows that have changed. */
  draw(): void {
    const state = this._state;
    if (!state) return;
    const top = Math.min(this._top, Math.max(0, this._rows.length * ROW - this._height));
    const from = Math.max(0, Math.floor(top / ROW) - AROUND);
    const to = Math.min(this._rows.length, Math.ceil((top + this._height) / ROW) + AROUND);
    const keys = new Set<string>();
    let after: Element | null = null;
    for (let index = from; index < to; index++) {
      const row = this._rows[index] as Row;
      keys.add(row.key);
      const line = this._lines.get(row.key) ?? this._line(row);
      this._write(line, row, lookOf(state, row, this._now), index);
      const next: Element | null = after ? after.nextElementSibling : this._space.firstElementChild;
      if (next !== line.element) this._space.insertBefore(line.element, next);
      after = line.element;
    }
    for (const [key, line] of this._lines)
      if (!keys.has(key)) {
        line.element.remove();
        this._lines.delete(key);
      }
    const active = this._lines.get(this.selected)?.element.id;
    if (active) this.node.setAttribute("aria-activedescendant", active);
    else this.node.removeAttribute("aria-activedescendant");
  }

  /** Measures the visible part: only here, before any write that would force a layout. */
  private _measure(): void {
    this._top = this.node.scrollTop;
    this._height = this.node.clientHeight;
    this.draw();
  }

  private _build(): void {
    if (!this._state) return;
    this._rows = rowsOf(this._state, this._turned, this._query);
    const height = `${this._rows.length * ROW}px`;
    if (this._space.style.height !== height) this._space.style.height = height;
    if (this._rows.some((row) => row.key === this.selected)) return;
    this.selected = this._rows[0]?.key ?? "";
    this._actions.select(this.row);
  }

  private _line(row: Row): Line {
    const name = h("span", { class: "mnb-outline-name" });
    const note = h("span", { class: "mnb-outline-note mnb-dim" });
    const marks = h("span", { class: "mnb-outline-marks" });
    const element = h(
      "div",
      { class: "mnb-outline-row", role: "treeitem", id: `mnb-row-${++numbers}`, "data-key": row.key, "data-kind": row.kind, "aria-level": row.level, style: `--level:${row.level - 1}` },
      h("span", { class: "mnb-outline-twist", "aria-hidden": "true" }),
      name,
      note,
      marks,
    );
    const line = { element, name, note, marks, shown: "" };
    this._lines.set(row.key, line);
    return line;
  }

  private _write(line: Line, row: Row, text: RowText, position: number): void {
    const { element } = line;
    const top = `${position * ROW}px`;
    if (element.style.top !== top) element.style.top = top;
    attribute(element, "aria-selected", String(row.key === this.selected));
    attribute(element, "aria-expanded", row.expandable ? String(row.expanded) : null);
    attribute(element, "aria-posinset", String(row.position));
    attribute(element, "aria-setsize", String(row.siblings));
    const content = JSON.stringify(text);
    if (content === line.shown) return;
    line.shown = content;
    setText(line.name, text.name);
    setText(line.note, text.note);
    attribute(element, "title", [text.name, text.note].filter(Boolean).join(" · "));
    attribute(element, "aria-label", text.spoken);
    attribute(element, "data-state", text.state || null);
    const marks: [State, number][] = text.state ? [[text.state, 0]] : text.counts;
    while (line.marks.childElementCount > marks.length) line.marks.lastElementChild?.remove();
    marks.forEach(([state, count], nth) => {
      const mark = (line.marks.children[nth] as HTMLElement | undefined) ?? line.marks.appendChild(h("span", { class: "mnb-mark", "aria-hidden": "true" }));
      attribute(mark, "data-state", state);
      setText(mark, `${LETTERS[state]}${count ? ` ${count}` : ""}`);
    });
  }

  private _rowAt(event: Event): Row | null {
    const key = (event.target as Element).closest<HTMLElement>("[data-key]")?.dataset.key;
    return this._rows.find((row) => row.key === key) ?? null;
  }

  private _click(event: MouseEvent): void {
    const row = this._rowAt(event);
    if (!row) return;
    const twist = (event.target as Element).closest(".mnb-outline-twist");
    if (row.expandable && (twist || event.detail === 2)) this.toggle(row.key);
    this.select(row.key);
  }

  private _key(event: KeyboardEvent): void {
    if (event.altKey || event.ctrlKey || event.metaKey || !this._rows.length) return;
    const index = Math.max(0, this._rows.findIndex((row) => row.key === this.selected));
    const row = this._rows[index] as Row;
    const page = Math.max(1, Math.floor(this._height / ROW) - 1);
    const go = (to: number): void => this.select((this._rows[Math.max(0, Math.min(this._rows.length - 1, to))] as Row).key, true);
    const keys: Record<string, () => void> = {
      ArrowDown: () => go(index + 1),
      ArrowUp: () => go(index - 1),
      Home: () => go(0),
      End: () => go(this._rows.length - 1),
      PageDown: () => go(index + page),
      PageUp: () => go(index - page),
      ArrowRight: () => {
        if (row.expandable && !row.expanded) this.toggle(row.key);
        else if (row.expanded) go(index + 1);
      },
      ArrowLeft: () => {
        if (row.expanded) this.toggle(row.key);
        else if (row.parent) this.select(row.parent, true);
      },
      Enter: () => row.expandable && this.toggle(row.key),
      " ": () => row.expandable && this.toggle(row.key),
    };
    const act = keys[event.key];
    if (!act && !this._actions.key(event)) return;
    event.preventDefault();
    event.stopPropagation();
    act?.();
  }

  private _reveal(): void {
    const index = this._rows.findIndex((row) => row.key === this.selected);
    if (index < 0) return;
    const top = index * ROW;
    if (top < this._top) this._top = top;
    else if (top + ROW > this._top + this._height) this._top = top + ROW - this._height;
    this.node.scrollTop = this._top;
  }

  private _height = 600; // px in sight, until they are measured
  private _lines = new Map<string, Line>();
  private _now = 0;
  private _rows: Row[] = [];
  private _space: HTMLElement;
  private _state: ClusterState | null = null;
  private _top = 0; // px scrolled
  private _turned = new Set<string>();
}

let numbers = 0;

function attribute(element: Element, name: string, value: string | null): void {
  if (element.getAttribute(name) === value) return;
  if (value === null) element.removeAttribute(name);
  else element.setAttribute(name, value);
}

/** Whether a patch adds, removes or changes meshes. */
export function isStructural(patch: Patch | null): boolean {
  if (patch === null) return true;
  return Object.values(patch.meshes ?? {}).some((mesh) => mesh === null || ["sizes", "stopped", "name", "hosts"].some((field) => field in mesh));
}
