// A mesh as a grid of cells: pointer, selection and keys.

import { pointOf } from "../cluster/ranks";
import { asksForMenu } from "../page/menu";
import { CanvasCells, type Cells, type Look, TableCells } from "./cells";
import { type CellSize, layout } from "./layout";

export const CANVAS_FROM = 2000; // cells

export interface GridEvents {
  /** The pointer or the focus is at a cell, with its box; -1 after it has left. */
  hover(index: number, box: DOMRect | null): void;
  select(indices: number[]): void;
  /** The menu of these cells is requested, at a point of the window. */
  menu(indices: number[], x: number, y: number): void;
  /** Handles a key that the grid does not use; returns whether it did something. */
  key(event: KeyboardEvent, indices: number[]): boolean;
}

const MOVES: Readonly<Record<string, [x: number, y: number]>> = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

const clamp = (value: number, count: number): number => Math.min(count - 1, Math.max(0, value));

export class Grid {
  readonly element: HTMLElement;
  readonly size: CellSize;

  constructor(
    labels: readonly string[],
    private _sizes: readonly number[],
    across: number | readonly number[],
    private _look: (index: number) => Look,
    private _events: GridEvents,
  ) {
    const plan = layout(labels, _sizes, across);
    this._rows = plan.rows.map((row) => row.cells);
    this._order = this._rows.flat();
    this._rows.forEach((cells, y) => cells.forEach((index, x) => this._places.set(index, [x, y])));
    const count = this._order.length;
    this.size = count <= 128 ? "l" : count <= 512 ? "m" : "s";
    this._cells = count > CANVAS_FROM ? new CanvasCells(plan, this._places) : new TableCells(plan, this.size);
    this.element = this._cells.element;
    this._listen();
  }

  /** Draws these cells anew; all of them without an argument. */
  update(indices: Iterable<number> = this._order): void {
    this._cells.draw(indices, this._look);
  }

  /** Selects cells; `more` keeps the present selection. */
  select(indices: Iterable<number>, more = false): void {
    const before = this._selected;
    this._selected = new Set(more ? [...before, ...indices] : indices);
    this._cells.select([...before, ...this._selected], this._selected, this._look);
    this._events.select(this._chosen);
  }

  private _listen(): void {
    const { element } = this;
    element.addEventListener("pointermove", (event) => this._hover(this._cells.indexAt(event)));
    element.addEventListener("pointerleave", () => this._hover(-1));
    element.addEventListener("focusin", (event) => {
      const index = this._cells.indexAt(event);
      if (index >= 0) this._focus(index, false); // also by other keys than the grid's
      if ((event.target as Element).matches(":focus-visible")) this._hover(this._cells.indexAt(event));
    });
    element.addEventListener("focusout", () => this._hover(-1));
    element.addEventListener("click", (event) => {
      const index = this._cells.indexAt(event);
      if (index >= 0) this._pick(index, event);
    });
    element.addEventListener("contextmenu", (event) => {
      const index = this._cells.indexAt(event);
      if (index < 0 || event.shiftKey) return; // with Shift it is the page's own
      event.preventDefault();
      event.stopPropagation();
      this._focus(index);
      this._events.menu(this._meant(index), event.clientX, event.clientY);
    });
    element.addEventListener("keydown", (event) => this._key(event));
  }

  /** The selected cells, if this is one of them; else this cell alone. */
  private _meant(index: number): number[] {
    return this._selected.has(index) ? this._chosen : [index];
  }

  private get _chosen(): number[] {
    return [...this._selected].sort((a, b) => a - b);
  }

  private _hover(index: number): void {
    if (index === this._hovered) return;
    this._hovered = index;
    this._events.hover(index, index < 0 ? null : this._cells.boxOf(index));
  }

  private _pick(index: number, event: MouseEvent | KeyboardEvent): void {
    this._focus(index, false);
    const more = event.ctrlKey || event.metaKey;
    if (event.shiftKey && this._anchor !== null) this.select(this._between(this._anchor, index), more);
    else if (more) {
      const next = new Set(this._selected);
      if (!next.delete(index)) next.add(index);
      this._anchor = index;
      this.select(next);
    } else {
      this._anchor = index;
      const only = this._selected.size === 1 && this._selected.has(index);
      this.select(only ? [] : [index]);
    }
  }

  /** All ranks in the box that two of them span. */
  private _between(from: number, to: number): number[] {
    const [a, b] = [pointOf(this._sizes, from), pointOf(this._sizes, to)] as [number[], number[]];
    const within = (coordinate: number, d: number): boolean => coordinate >= Math.min(a[d] as number, b[d] as number) && coordinate <= Math.max(a[d] as number, b[d] as number);
    return this._order.filter((index) => pointOf(this._sizes, index).every(within));
  }

  private _focus(index: number, move = true): void {
    this._cells.focus(this._focused, index, move);
    this._focused = index;
  }

  private _key(event: KeyboardEvent): void {
    const move = MOVES[event.key];
    if (move) this._move(move, event.shiftKey);
    else if (event.key === "Home" || event.key === "End") this._focus(this._order.at(event.key === "Home" ? 0 : -1) ?? 0);
    else if (event.key === "Enter" || event.key === " ") this._pick(this._focused, event);
    else if (event.key === "Escape") this.select([]);
    else if (event.key === "a" && (event.ctrlKey || event.metaKey)) this.select(this._order);
    else if (asksForMenu(event)) {
      const { left, bottom } = this._cells.boxOf(this._focused);
      this._events.menu(this._meant(this._focused), left, bottom);
    } else if (!this._events.key(event, this._meant(this._focused))) return;
    event.preventDefault();
    event.stopPropagation();
  }

  private _move([right, down]: [x: number, y: number], extend: boolean): void {
    const [x, y] = this._places.get(this._focused) as [number, number];
    const row = this._rows[clamp(y + down, this._rows.length)] as number[];
    const next = row[clamp(x + right, row.length)] as number;
    const from = this._focused;
    this._focus(next);
    if (extend) this.select(this._between((this._anchor ??= from), next));
    this._hover(next);
  }

  private _anchor: number | null = null;
  private _cells: Cells;
  private _focused = 0;
  private _hovered = -1;
  private _order: number[];
  private _places = new Map<number, [x: number, y: number]>();
  private _rows: number[][];
  private _selected: ReadonlySet<number> = new Set();
}
