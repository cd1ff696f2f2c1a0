// A mesh as a grid: one dimension across, the others down; long lines are folded. Cells are buttons, or pixels if many.

import { pointOf } from "./cluster.js";
import { h, SIGNS } from "./words.js";

export const CANVAS_FROM = 2000; // cells
const GAP = 3;

const productOf = (sizes) => sizes.reduce((product, size) => product * size, 1);

/**
 * Where each index goes: {columns, rows: [{label, cells: [index]}], heads: [label], corner}. `across` is the dimension
 * that runs across, or several; the others run down. Lines that are too long are folded.
 */
export function layout(labels, sizes, across) {
  const count = productOf(sizes);
  if (!sizes.length) return { columns: 1, heads: [], rows: [{ label: "", cells: [0] }], corner: "" };
  const columns = [across].flat().sort((a, b) => a - b);
  const lines = labels.map((_, d) => d).filter((d) => !columns.includes(d));
  const strides = new Array(sizes.length);
  for (let d = sizes.length - 1, step = 1; d >= 0; d--) {
    strides[d] = step;
    step *= sizes[d];
  }
  const places = (dims) => {
    const own = dims.map((d) => sizes[d]);
    return Array.from({ length: productOf(own) }, (_, at) => {
      const point = pointOf(own, at);
      return { point, offset: dims.reduce((sum, d, i) => sum + point[i] * strides[d], 0) };
    });
  };
  const inner = places(columns);
  const wide = inner.length > 32 ? fold(inner.length, count) : inner.length;
  const folded = inner.length > wide;
  const rows = [];
  for (const line of places(lines)) {
    const label = lines.map((d, at) => `${labels[d]}=${line.point[at]}`).join(" ");
    for (let from = 0; from < inner.length; from += wide) {
      const part = inner.slice(from, from + wide);
      const range = folded ? `${lines.length || columns.length > 1 ? "" : `${labels[columns[0]]} `}${from}–${from + part.length - 1}` : "";
      rows.push({ label: [from ? "" : label, range].filter(Boolean).join(" "), cells: part.map((one) => line.offset + one.offset) });
    }
  }
  const heads = folded ? [] : inner.map((one) => one.point.join("·"));
  return { columns: wide, rows, heads, corner: folded ? "" : columns.map((d) => labels[d]).join("·") };
}

function fold(inner, count) {
  const wide = count > 2000 ? 100 : count > 400 ? 50 : count > 128 ? 32 : 16;
  for (const divisor of [wide, 64, 50, 40, 32, 25, 20, 16]) if (divisor <= wide && inner % divisor === 0) return divisor;
  return wide;
}

/** Rows in blocks side by side, so that many short lines do not make one long column. */
function blocksOf(plan, size) {
  const pitch = { l: 37, m: 24, s: 14 }[size];
  const room = Math.max(1, Math.floor(860 / (plan.columns * pitch + 90)));
  if (room < 2 || plan.rows.length <= 24) return [plan.rows];
  const each = Math.max(16, Math.ceil(plan.rows.length / room));
  const blocks = [];
  for (let from = 0; from < plan.rows.length; from += each) blocks.push(plan.rows.slice(from, from + each));
  return blocks;
}

/** A cell that stands for many: what is wrong lies on top. */
function barOf(parts) {
  let from = 0;
  const stops = parts.map(([state, share]) => {
    const begin = from;
    from += share;
    return `var(--mnb-${state}) ${Math.round(begin * 100)}% ${Math.round(from * 100)}%`;
  });
  return `linear-gradient(180deg, ${stops.join(", ")})`;
}

export class Grid {
  /**
   * `look(index)` gives {state, fill, text, label, parts?}: parts are [state, share] of what a cell stands for. `on` has
   * hover(index, box) and select(indices).
   */
  constructor(labels, sizes, across, look, on) {
    this.sizes = sizes;
    this.look = look;
    this.on = on;
    this.plan = layout(labels, sizes, across);
    this.count = productOf(sizes);
    this.order = this.plan.rows.flatMap((row) => row.cells);
    this.focused = 0;
    this.selected = new Set();
    this.places = new Map();
    this.plan.rows.forEach((row, y) => row.cells.forEach((index, x) => this.places.set(index, [x, y])));
    this.size = this.count <= 128 ? "l" : this.count <= 512 ? "m" : "s";
    this.element = this.count > CANVAS_FROM ? this._canvas() : this._table();
    this.element.addEventListener("keydown", (event) => this._key(event));
    this.element.addEventListener("pointerleave", () => on.hover(-1));
  }

  _table() {
    const { plan } = this;
    const labelled = plan.rows.some((row) => row.label);
    const blocks = blocksOf(plan, this.size);
    this.cells = new Array(this.count);
    const table = h("div", { class: "mnb-blocks", role: "grid", "aria-multiselectable": "true" });
    for (const rows of blocks) table.append(this._block(rows, labelled));
    const indexOf = (event) => {
      const cell = event.target.closest?.(".mnb-cell");
      return cell ? Number(cell.dataset.index) : -1;
    };
    table.addEventListener("pointerover", (event) => {
      const index = indexOf(event);
      this.on.hover(index, index < 0 ? null : this.cells[index].getBoundingClientRect());
    });
    table.addEventListener("focusin", (event) => {
      const index = indexOf(event);
      if (index >= 0 && this.cells[index].matches(":focus-visible"))
        this.on.hover(index, this.cells[index].getBoundingClientRect());
    });
    table.addEventListener("focusout", () => this.on.hover(-1));
    table.addEventListener("click", (event) => {
      const index = indexOf(event);
      if (index >= 0) this._pick(index, event);
    });
    return table;
  }

  _block(lines, labelled) {
    const { plan } = this;
    const block = h("div", { class: `mnb-grid mnb-${this.size}`, role: "rowgroup" });
    block.style.gridTemplateColumns = `${labelled ? "max-content " : ""}repeat(${plan.columns}, max-content)`;
    if (plan.heads.length && this.size !== "s" && plan.rows.length > 1) {
      const row = h("div", { class: "mnb-row", role: "row" });
      if (labelled) row.append(h("div", { class: "mnb-head mnb-corner", text: plan.corner, "aria-hidden": "true" }));
      for (const head of plan.heads) row.append(h("div", { class: "mnb-head", role: "columnheader", text: head }));
      block.append(row);
    }
    for (const line of lines) {
      const row = h("div", { class: "mnb-row", role: "row" });
      if (labelled) row.append(h("div", { class: "mnb-head mnb-left", role: "rowheader", text: line.label }));
      for (const index of line.cells) {
        const cell = h("div", { class: "mnb-cell", role: "gridcell", tabindex: index === 0 ? "0" : "-1", "data-index": index });
        this.cells[index] = cell;
        row.append(cell);
      }
      for (let fill = line.cells.length; fill < plan.columns; fill++) row.append(h("div"));
      block.append(row);
    }
    return block;
  }

  _canvas() {
    const { plan } = this;
    this.pitch = this.count > 20000 ? 5 : 8;
    this.canvas = h("canvas", { tabindex: "0", role: "img", class: "mnb-canvas" });
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [plan.columns * this.pitch, plan.rows.length * this.pitch];
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const indexOf = (event) => {
      const box = this.canvas.getBoundingClientRect();
      const row = plan.rows[Math.floor((event.clientY - box.top) / this.pitch)];
      return row?.cells[Math.floor((event.clientX - box.left) / this.pitch)] ?? -1;
    };
    this.canvas.addEventListener("pointermove", (event) => {
      const index = indexOf(event);
      this.on.hover(index, index < 0 ? null : this._box(index));
    });
    this.canvas.addEventListener("click", (event) => {
      const index = indexOf(event);
      if (index >= 0) this._pick(index, event);
    });
    return this.canvas;
  }

  _box(index) {
    if (this.cells) return this.cells[index].getBoundingClientRect();
    const [x, y] = this.places.get(index);
    const box = this.canvas.getBoundingClientRect();
    return new DOMRect(box.left + x * this.pitch, box.top + y * this.pitch, this.pitch, this.pitch);
  }

  /** Draws these cells anew; all of them without an argument. */
  update(indices) {
    if (this.canvas) {
      this._paint(indices);
      return;
    }
    for (const index of indices ?? this.order) {
      const cell = this.cells[index];
      if (!cell) continue;
      const { state, fill, text, label, parts } = this.look(index);
      const sign = SIGNS[state] ?? "";
      const shown = this.size === "l" ? `${text}${sign ? ` ${sign}` : ""}` : sign;
      if (cell.dataset.state !== state) cell.dataset.state = state;
      if (cell.textContent !== shown) cell.textContent = shown;
      if (cell.getAttribute("aria-label") !== label) cell.setAttribute("aria-label", label);
      const now = fill === null ? "" : String(Math.round(fill * 100));
      if ((cell.dataset.fill ?? "") !== now) {
        cell.dataset.fill = now;
        cell.style.setProperty("--fill", `${now}%`);
        cell.classList.toggle("mnb-metric", fill !== null);
      }
      const bar = parts?.length > 1 ? barOf(parts) : "";
      if ((cell.bar ?? "") !== bar) {
        cell.bar = bar;
        cell.style.background = bar;
      }
    }
  }

  _paint(indices) {
    const style = getComputedStyle(this.canvas);
    const ratio = window.devicePixelRatio || 1;
    const context = this.canvas.getContext("2d");
    const step = this.pitch * ratio;
    const gap = this.pitch > 6 ? ratio : 0;
    const colours = {};
    for (const index of indices ?? this.order) {
      const place = this.places.get(index);
      if (!place) continue;
      const { state, fill, parts } = this.look(index);
      const [x, y] = [place[0] * step, place[1] * step];
      context.clearRect(x, y, step, step);
      context.globalAlpha = fill === null ? 1 : 0.12 + 0.88 * fill;
      let from = 0;
      for (const [name, share] of fill === null ? parts ?? [[state, 1]] : [["metric", 1]]) {
        context.fillStyle = colours[name] ??= style.getPropertyValue(`--mnb-${name}`);
        context.fillRect(x, y + from * (step - gap), step - gap, share * (step - gap));
        from += share;
      }
      context.globalAlpha = 1;
      if (this.selected.has(index)) {
        context.strokeStyle = colours.ink ??= style.getPropertyValue("--mnb-ink");
        context.lineWidth = ratio;
        context.strokeRect(x + ratio / 2, y + ratio / 2, step - gap - ratio, step - gap - ratio);
      }
    }
  }

  _pick(index, event) {
    this._focus(index, false);
    if (event.shiftKey && this.anchor !== undefined) this.select(this._between(this.anchor, index), event.ctrlKey || event.metaKey);
    else if (event.ctrlKey || event.metaKey) {
      const next = new Set(this.selected);
      if (!next.delete(index)) next.add(index);
      this.anchor = index;
      this.select(next);
    } else {
      this.anchor = index;
      const only = this.selected.size === 1 && this.selected.has(index);
      this.select(only ? [] : [index]);
    }
  }

  /** All ranks in the box that two of them span. */
  _between(one, other) {
    const [a, b] = [pointOf(this.sizes, one), pointOf(this.sizes, other)];
    return this.order.filter((index) =>
      pointOf(this.sizes, index).every((at, d) => at >= Math.min(a[d], b[d]) && at <= Math.max(a[d], b[d])),
    );
  }

  select(indices, more = false) {
    const before = this.selected;
    this.selected = new Set(more ? [...before, ...indices] : indices);
    const changed = [...before, ...this.selected];
    if (this.cells)
      for (const index of changed) this.cells[index].setAttribute("aria-selected", String(this.selected.has(index)));
    else this._paint(changed);
    this.on.select([...this.selected].sort((a, b) => a - b));
  }

  _focus(index, move = true) {
    if (this.cells) {
      this.cells[this.focused].tabIndex = -1;
      this.cells[index].tabIndex = 0;
      if (move) this.cells[index].focus();
    }
    this.focused = index;
  }

  _key(event) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key in moves) {
      const [x, y] = this.places.get(this.focused);
      const row = this.plan.rows[Math.min(this.plan.rows.length - 1, Math.max(0, y + moves[event.key][1]))];
      const next = row.cells[Math.min(row.cells.length - 1, Math.max(0, x + moves[event.key][0]))];
      this._focus(next);
      if (event.shiftKey) this.select(this._between((this.anchor ??= this.focused), next));
      this.on.hover(next, this._box(next));
    } else if (event.key === "Home" || event.key === "End") this._focus(this.order.at(event.key === "Home" ? 0 : -1));
    else if (event.key === "Enter" || event.key === " ") this._pick(this.focused, event);
    else if (event.key === "Escape") this.select([]);
    else if (event.key === "a" && (event.ctrlKey || event.metaKey)) this.select(this.order);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}
