// A chart of curves: one line a rank, or the mean of all with a band from the lowest to the highest.
/*! The curves are drawn by uPlot, copyright Leon Sorokin, under the MIT license: see uPlot.LICENSE beside this file. */

import uPlot from "uplot";

import { h } from "../page/dom";
import { eachFrame } from "../page/frames";
import { number } from "../page/words";
import { say } from "../page/language";
import { type BandPoint, type CurvePoint, type Line, band, nearest, runsOf } from "./curves";

import "uplot/dist/uPlot.min.css";

const PALETTE = ["#0072b2", "#d55e00", "#009e73", "#a463c4", "#c99700", "#3aa6d8", "#b3446c", "#7f7f7f"] as const;
const BAND = "rgba(0, 114, 178, 0.2)"; // the first of the palette
const SAID = 8; // lines with their values in words
const [WIDTH, HEIGHT] = [420, 170];
const [LEFT, BOTTOM] = [56, 24]; // px for the numbers: constant, so that the curves do not move

/** A series of uPlot: its points and colour. */
interface Series {
  points: readonly (readonly [x: number, y: number])[];
  options: uPlot.Series;
}

export class Chart {
  readonly element: HTMLElement;

  /** `unit` is the unit of x. */
  constructor(
    private _name: string,
    private _unit: string,
  ) {
    this.element = h("figure", { class: "mnb-figure" }, h("figcaption", {}, h("b", { text: _name }), h("span", { class: "mnb-dim", text: say` by ${_unit}` })), this._box, this._note);
    this._resized.observe(this._box);
  }

  /** Draws lines, or their common band, in one of the next frames. */
  show(lines: Line[], mean: boolean): void {
    this._lines = lines;
    this._mean = mean;
    this._frames.soon();
  }

  private _draw(): void {
    const { _lines: lines } = this;
    this._middle = this._mean && lines.length > 1 ? band(lines) : null;
    const series = this._middle ? bandSeries(this._middle) : lines.flatMap((line, index) => lineSeries(line, index));
    if (!series.length) return;
    const data = uPlot.join(series.map(({ points }) => [points.map(([x]) => x), points.map(([, y]) => (Number.isFinite(y) ? y : null))]));
    const shape = `${this._middle ? "mean" : ""}${series.map(({ options }) => options.stroke).join()}`;
    if (this._plot && shape === this._shape) this._update(this._plot, data);
    else this._rebuild(series, data, shape);
    this._say();
  }

  /** Draws the chart in the colours of the page, which may have changed. */
  recolour(): void {
    this._colour = "";
    this._plot?.redraw(false);
  }

  end(): void {
    this._frames.cancel();
    this._resized.disconnect();
    this._plot?.destroy();
    this._plot = null;
  }

  private _fit(): void {
    const width = this._box.clientWidth;
    if (this._plot && width && width !== this._plot.width) this._plot.setSize({ width, height: HEIGHT });
  }

  private _update(plot: uPlot, data: uPlot.AlignedData): void {
    const { min, max } = plot.scales.x ?? {};
    const [xs] = plot.data;
    const zoomed = min !== undefined && max !== undefined && (min > (xs[0] ?? min) || max < (xs.at(-1) ?? max));
    plot.setData(data, !zoomed);
    if (zoomed) plot.setScale("x", { min, max }); // keeps the zoom
  }

  private _rebuild(series: readonly Series[], data: uPlot.AlignedData, shape: string): void {
    this._plot?.destroy();
    this._shape = shape;
    const font = `11px ${getComputedStyle(this._box).fontFamily || "system-ui"}`;
    const axis: uPlot.Axis = { font, stroke: () => this._ink(0.75), ticks: { show: false }, values: (_, splits) => splits.map(number) };
    const options: uPlot.Options = {
      width: this._box.clientWidth || WIDTH,
      height: HEIGHT,
      padding: [8, 12, 0, 0],
      scales: { x: { time: false } },
      axes: [
        { ...axis, size: BOTTOM, grid: { show: false } },
        { ...axis, size: LEFT, grid: { stroke: () => this._ink(0.14), width: 1 } },
      ],
      series: [{}, ...series.map((line) => line.options)],
      cursor: { y: false, points: { size: 6 } },
      legend: { show: false },
      hooks: { setCursor: [() => this._say()] },
    };
    if (this._middle) options.bands = [{ series: [3, 2], fill: BAND }];
    this._plot = new uPlot(options, data, this._box);
  }

  /** The colour of text in this page, more or less faint. */
  private _ink(opacity: number): string {
    const color = (this._colour ||= getComputedStyle(this._box).color);
    const [red, green, blue] = color.match(/^rgba?\(/) ? (color.match(/[\d.]+/g) ?? []) : [];
    return blue === undefined ? color : `rgba(${red}, ${green}, ${blue}, ${opacity})`;
  }

  /** Writes the newest values in words, or those under the pointer. */
  private _say(): void {
    const xs = this._plot?.data[0] ?? [];
    const x = xs[this._plot?.cursor.idx ?? xs.length - 1];
    if (x === undefined) return;
    const where = `${this._unit} ${number(x)}`;
    const values = this._values(x);
    const text = `${where}: ${values.map(({ text }) => text).join(" · ")}`;
    if (text === this._text) return;
    this._text = text;
    this._note.replaceChildren(
      h("span", { text: where }),
      ...values.map(({ text, colour }) => h("span", {}, colour ? h("i", { class: "mnb-dot", style: `background:${colour}` }) : null, text)),
    );
    this._box.setAttribute("aria-label", `${this._name}: ${text}`);
  }

  private _values(x: number): { text: string; colour: string }[] {
    if (this._middle) {
      const [, mean, low, high] = nearest(this._middle, x) ?? [x, NaN, NaN, NaN];
      return [{ text: say`mean ${number(mean)} (${number(low)} to ${number(high)})`, colour: PALETTE[0] }];
    }
    const values = this._lines.slice(0, SAID).flatMap(({ label, points }, index) => {
      const point = nearest(points, x);
      return point ? [{ text: `${label ? `${label} ` : ""}${number(point[1])}`, colour: colourAt(index) }] : [];
    });
    if (this._lines.length > SAID) values.push({ text: say`… ${this._lines.length} ranks`, colour: "" });
    return values;
  }

  private _box = h("div", { class: "mnb-chart", role: "img", title: say`drag to zoom in, double-click to reset` });
  private _colour = ""; // of text
  private _frames = eachFrame(() => this._draw());
  private _lines: Line[] = [];
  private _mean = false;
  private _middle: BandPoint[] | null = null;
  private _note = h("div", { class: "mnb-note mnb-dim" });
  private _plot: uPlot | null = null;
  private _resized = new ResizeObserver(() => this._fit());
  private _shape = ""; // of the plot: other series need another
  private _text = "";
}

const colourAt = (index: number): string => PALETTE[index % PALETTE.length] as string;

function lineSeries(line: Line, index: number): Series[] {
  return runsOf(line.points).map((points) => ({ points, options: curve(colourAt(index)) }));
}

function bandSeries(middle: readonly BandPoint[]): Series[] {
  const edge: uPlot.Series = { stroke: "transparent", width: 0, points: { show: false } };
  const column = (field: 1 | 2 | 3): CurvePoint[] => middle.map((point) => [point[0], point[field]]);
  return [
    { points: column(1), options: curve(PALETTE[0]) },
    { points: column(2), options: edge },
    { points: column(3), options: edge },
  ];
}

/** A line; a single value, of which there is no line, is a dot. */
function curve(stroke: string): uPlot.Series {
  const single = (plot: uPlot, series: number): boolean => (plot.data[series] as unknown[]).filter((y) => y !== null && y !== undefined).length < 2;
  return { stroke, width: 1.5, points: { show: single, size: 5, fill: stroke } };
}
