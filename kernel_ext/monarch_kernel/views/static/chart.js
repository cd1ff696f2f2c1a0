// A line chart on a canvas: a few thousand points a line, one line a rank or their mean with a band. No library.

import { h } from "./words.js";

const PALETTE = ["#0072b2", "#d55e00", "#009e73", "#a463c4", "#c99700", "#3aa6d8", "#b3446c", "#7f7f7f"];
const SAID = 8; // lines with their values in words
const [LEFT, RIGHT, TOP, BOTTOM] = [56, 12, 8, 22];

function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step / 1e6; at += step) found.push(Math.abs(at) < step / 1e6 ? 0 : at);
  return found;
}

export function number(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(4)));
}

/** Mean, lowest and highest at each x: [[x, mean, low, high]]. */
export function band(lines) {
  const by = new Map();
  for (const line of lines)
    for (const [x, y] of line.points) {
      const known = by.get(x);
      if (known) {
        known[0] += y;
        known[1]++;
        known[2] = Math.min(known[2], y);
        known[3] = Math.max(known[3], y);
      } else by.set(x, [y, 1, y, y]);
    }
  return [...by.entries()].sort((a, b) => a[0] - b[0]).map(([x, [sum, count, low, high]]) => [x, sum / count, low, high]);
}

export class Chart {
  constructor(name, xName) {
    this.name = name;
    this.xName = xName;
    this.lines = []; // {label, points: [[x, y]]}
    this.mean = false;
    this.canvas = h("canvas", { class: "mnb-chart", role: "img" });
    this.note = h("div", { class: "mnb-note mnb-dim" });
    this.element = h("figure", { class: "mnb-figure" }, h("figcaption", { text: name }), this.canvas, this.note);
    this.canvas.addEventListener("pointermove", (event) => {
      this.at = event.offsetX;
      this.draw();
    });
    this.canvas.addEventListener("pointerleave", () => {
      this.at = undefined;
      this.draw();
    });
  }

  draw() {
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [this.canvas.clientWidth || 420, this.canvas.clientHeight || 170];
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const style = getComputedStyle(this.canvas);
    const ink = style.color;
    const font = style.fontFamily;
    const middle = this.mean && this.lines.length > 1 ? band(this.lines) : null;
    let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const line of this.lines)
      for (const [x, y] of line.points) {
        if (!Number.isFinite(y)) continue;
        x0 = Math.min(x0, x);
        x1 = Math.max(x1, x);
        y0 = Math.min(y0, y);
        y1 = Math.max(y1, y);
      }
    if (x0 > x1) return;
    if (x0 === x1) x1 = x0 + 1;
    const pad = (y1 - y0 || Math.abs(y1) || 1) * 0.06;
    [y0, y1] = [y0 - pad, y1 + pad];
    const px = (x) => LEFT + ((x - x0) / (x1 - x0)) * (width - LEFT - RIGHT);
    const py = (y) => TOP + (1 - (y - y0) / (y1 - y0)) * (height - TOP - BOTTOM);
    context.font = `11px ${font}`;
    context.fillStyle = context.strokeStyle = ink;
    context.lineWidth = 1;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const y of ticks(y0, y1, 4)) {
      context.globalAlpha = 0.14;
      context.beginPath();
      context.moveTo(LEFT, Math.round(py(y)) + 0.5);
      context.lineTo(width - RIGHT, Math.round(py(y)) + 0.5);
      context.stroke();
      context.globalAlpha = 0.75;
      context.fillText(number(y), LEFT - 6, py(y));
    }
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const x of ticks(x0, x1, 6)) context.fillText(number(x), px(x), height - BOTTOM + 5);
    context.textAlign = "right";
    context.fillText(this.xName, width - RIGHT, height - 11);
    context.globalAlpha = 1;
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    if (middle) {
      context.fillStyle = PALETTE[0];
      context.globalAlpha = 0.2;
      context.beginPath();
      middle.forEach(([x, , , high], at) => (at ? context.lineTo(px(x), py(high)) : context.moveTo(px(x), py(high))));
      for (const [x, , low] of [...middle].reverse()) context.lineTo(px(x), py(low));
      context.fill();
      context.globalAlpha = 1;
      this._line(context, middle, px, py, PALETTE[0]);
    } else this.lines.forEach((line, at) => this._line(context, line.points, px, py, PALETTE[at % PALETTE.length]));
    this._say(context, middle, px, py, [x0, x1], height);
  }

  _line(context, points, px, py, colour) {
    context.strokeStyle = colour;
    context.beginPath();
    let drawn = false;
    let before = -Infinity;
    for (const [x, y] of points) {
      if (x < before) drawn = false; // a new run
      before = x;
      if (!Number.isFinite(y)) {
        drawn = false;
        continue;
      }
      if (drawn) context.lineTo(px(x), py(y));
      else context.moveTo(px(x), py(y));
      drawn = true;
    }
    context.stroke();
    if (points.length === 1) {
      context.fillStyle = colour;
      context.fillRect(px(points[0][0]) - 2, py(points[0][1]) - 2, 4, 4);
    }
  }

  /** In words: the newest values, or those under the pointer. */
  _say(context, middle, px, py, [x0, x1], height) {
    const width = this.canvas.clientWidth || 420;
    const wanted = this.at === undefined ? x1 : x0 + ((this.at - LEFT) / (width - LEFT - RIGHT)) * (x1 - x0);
    const nearest = (points) => points.reduce((best, point) => (Math.abs(point[0] - wanted) < Math.abs(best[0] - wanted) ? point : best), points[0]);
    const parts = []; // [text, colour]
    let x = x1;
    if (middle) {
      const point = nearest(middle);
      x = point[0];
      parts.push([`mean ${number(point[1])} (${number(point[2])} to ${number(point[3])})`, PALETTE[0]]);
    } else
      this.lines.slice(0, SAID).forEach((line, at) => {
        if (!line.points.length) return;
        const point = nearest(line.points);
        x = point[0];
        parts.push([`${line.label ? `${line.label} ` : ""}${number(point[1])}`, PALETTE[at % PALETTE.length]]);
      });
    if (this.lines.length > SAID && !middle) parts.push([`… ${this.lines.length} ranks`, ""]);
    const where = `${this.xName} ${number(x)}`;
    const text = `${where}: ${parts.map(([said]) => said).join(" · ")}`;
    if (this.said !== text) {
      this.said = text;
      this.note.replaceChildren(h("span", { text: where }), ...parts.map(([said, colour]) => h("span", {}, colour ? h("i", { class: "mnb-dot", style: `background:${colour}` }) : null, said)));
    }
    this.canvas.setAttribute("aria-label", `${this.name}: ${text}`);
    if (this.at !== undefined) {
      context.globalAlpha = 0.4;
      context.beginPath();
      context.strokeStyle = getComputedStyle(this.canvas).color;
      context.moveTo(px(x), TOP);
      context.lineTo(px(x), height - BOTTOM);
      context.stroke();
      context.globalAlpha = 1;
    }
  }
}
