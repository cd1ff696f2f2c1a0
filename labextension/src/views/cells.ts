// The cells of a grid on the page: elements, or pixels of a canvas where there are many. Both draw the same looks.

import type { State } from "../cluster/state";
import { h } from "../page/dom";
import { SIGNS } from "../page/words";
import { type CellSize, type Layout, type Row, blocksOf } from "./layout";

export type Part = [state: State, share: number];

/** The look of a cell. `parts`: shares of the states of its ranks; `fill`: the value of a metric, 0 to 1. */
export interface Look {
  state: State;
  fill: number | null;
  text: string;
  label: string;
  parts?: Part[] | undefined;
  /** It does not match the query. */
  out?: boolean;
}

export interface Cells {
  readonly element: HTMLElement;
  /** The index of the cell of an event; -1 without one. */
  indexAt(event: MouseEvent | FocusEvent): number;
  boxOf(index: number): DOMRect;
  draw(indices: Iterable<number>, look: (index: number) => Look): void;
  select(changed: Iterable<number>, selected: ReadonlySet<number>, look: (index: number) => Look): void;
  focus(from: number, to: number, move: boolean): void;
}

/** The worst states are on top. */
function barOf(parts: readonly Part[]): string {
  let from = 0;
  const stops = parts.map(([state, share]) => {
    const begin = from;
    from += share;
    return `var(--mnb-${state}) ${Math.round(begin * 100)}% ${Math.round(from * 100)}%`;
  });
  return `linear-gradient(180deg, ${stops.join(", ")})`;
}

export class TableCells implements Cells {
  readonly element = h("div", { class: "mnb-blocks", role: "grid", "aria-multiselectable": "true" });

  constructor(
    private _plan: Layout,
    private _size: CellSize,
  ) {
    const labelled = _plan.rows.some((row) => row.label);
    for (const rows of blocksOf(_plan, _size)) this.element.append(this._block(rows, labelled));
  }

  indexAt(event: Event): number {
    const cell = (event.target as Element).closest<HTMLElement>(".mnb-cell");
    return cell ? Number(cell.dataset.index) : -1;
  }

  boxOf(index: number): DOMRect {
    return this.cell(index).getBoundingClientRect();
  }

  cell(index: number): HTMLElement {
    return this._cells[index] as HTMLElement;
  }

  draw(indices: Iterable<number>, look: (index: number) => Look): void {
    for (const index of indices) if (this._cells[index]) this._draw(this.cell(index), look(index));
  }

  select(changed: Iterable<number>, selected: ReadonlySet<number>): void {
    for (const index of changed) this.cell(index).setAttribute("aria-selected", String(selected.has(index)));
  }

  focus(from: number, to: number, move: boolean): void {
    this.cell(from).tabIndex = -1;
    this.cell(to).tabIndex = 0;
    if (move) this.cell(to).focus();
  }

  private _draw(cell: HTMLElement, { state, fill, text, label, parts, out }: Look): void {
    if (cell.classList.contains("mnb-out") !== Boolean(out)) cell.classList.toggle("mnb-out", out);
    const sign = SIGNS[state] ?? "";
    const content = this._size === "l" ? `${text}${sign ? ` ${sign}` : ""}` : sign;
    if (cell.dataset.state !== state) cell.dataset.state = state;
    if (cell.textContent !== content) cell.textContent = content;
    if (cell.getAttribute("aria-label") !== label) cell.setAttribute("aria-label", label);
    const percent = fill === null ? "" : String(Math.round(fill * 100));
    if ((cell.dataset.fill ?? "") !== percent) {
      cell.dataset.fill = percent;
      cell.style.setProperty("--fill", `${percent}%`);
      cell.classList.toggle("mnb-metric", fill !== null);
    }
    const bar = parts && parts.length > 1 ? barOf(parts) : "";
    if ((this._bars.get(cell) ?? "") !== bar) {
      this._bars.set(cell, bar);
      cell.style.background = bar;
    }
  }

  private _block(lines: readonly Row[], labelled: boolean): HTMLElement {
    const { columns, corner, heads, rows } = this._plan;
    const block = h("div", { class: `mnb-grid mnb-${this._size}`, role: "rowgroup" });
    block.style.gridTemplateColumns = `${labelled ? "max-content " : ""}repeat(${columns}, max-content)`;
    if (heads.length && this._size !== "s" && rows.length > 1) {
      const row = h("div", { class: "mnb-row", role: "row" });
      if (labelled) row.append(h("div", { class: "mnb-head mnb-corner", text: corner, "aria-hidden": "true" }));
      for (const head of heads) row.append(h("div", { class: "mnb-head", role: "columnheader", text: head }));
      block.append(row);
    }
    for (const line of lines) {
      const row = h("div", { class: "mnb-row", role: "row" });
      if (labelled) row.append(h("div", { class: "mnb-head mnb-left", role: "rowheader", text: line.label }));
      for (const index of line.cells) {
        const cell = h("div", { class: "mnb-cell", role: "gridcell", tabindex: index === 0 ? "0" : "-1", "data-index": index });
        this._cells[index] = cell;
        row.append(cell);
      }
      for (let fill = line.cells.length; fill < columns; fill++) row.append(h("div"));
      block.append(row);
    }
    return block;
  }

  private _bars = new WeakMap<HTMLElement, string>();
  private _cells: HTMLElement[] = [];
}

export class CanvasCells implements Cells {
  readonly element = h("canvas", { tabindex: "0", role: "img", class: "mnb-canvas" });

  constructor(
    private _plan: Layout,
    private _places: ReadonlyMap<number, [x: number, y: number]>,
  ) {
    this._pitch = _places.size > 20000 ? 5 : 8;
    const [width, height] = [_plan.columns * this._pitch, _plan.rows.length * this._pitch];
    this.element.width = width * this._ratio;
    this.element.height = height * this._ratio;
    this.element.style.width = `${width}px`;
    this.element.style.height = `${height}px`;
  }

  indexAt(event: MouseEvent | FocusEvent): number {
    if (!(event instanceof MouseEvent)) return -1;
    const box = this.element.getBoundingClientRect();
    const row = this._plan.rows[Math.floor((event.clientY - box.top) / this._pitch)];
    return row?.cells[Math.floor((event.clientX - box.left) / this._pitch)] ?? -1;
  }

  boxOf(index: number): DOMRect {
    const [x, y] = this._places.get(index) as [number, number];
    const box = this.element.getBoundingClientRect();
    return new DOMRect(box.left + x * this._pitch, box.top + y * this._pitch, this._pitch, this._pitch);
  }

  draw(indices: Iterable<number>, look: (index: number) => Look): void {
    const context = this.element.getContext("2d") as CanvasRenderingContext2D;
    const style = getComputedStyle(this.element);
    const step = this._pitch * this._ratio;
    const gap = this._pitch > 6 ? this._ratio : 0;
    const colours: Record<string, string> = {};
    const colourOf = (name: string): string => (colours[name] ??= style.getPropertyValue(`--mnb-${name}`));
    for (const index of indices) {
      const position = this._places.get(index);
      if (!position) continue;
      const { state, fill, parts, out } = look(index);
      const [x, y] = [position[0] * step, position[1] * step];
      const shares: [string, number][] = fill === null ? (parts ?? [[state, 1]]) : [["metric", 1]];
      context.clearRect(x, y, step, step);
      context.globalAlpha = (fill === null ? 1 : 0.12 + 0.88 * fill) * (out ? 0.18 : 1);
      let from = 0;
      for (const [name, share] of shares) {
        context.fillStyle = colourOf(name);
        context.fillRect(x, y + from * (step - gap), step - gap, share * (step - gap));
        from += share;
      }
      context.globalAlpha = 1;
      if (this._selected.has(index)) {
        context.strokeStyle = colourOf("ink");
        context.lineWidth = this._ratio;
        context.strokeRect(x + this._ratio / 2, y + this._ratio / 2, step - gap - this._ratio, step - gap - this._ratio);
      }
    }
  }

  select(changed: Iterable<number>, selected: ReadonlySet<number>, look: (index: number) => Look): void {
    this._selected = selected;
    this.draw(changed, look);
  }

  focus(): void {
    // a canvas has one focus for all its cells
  }

  private _pitch: number;
  private _ratio = window.devicePixelRatio || 1;
  private _selected: ReadonlySet<number> = new Set();
}
