// The metrics view: values logged with monarch.telemetry.log, and the resource use of processes, as live curves.

import type { Cluster } from "../cluster/client";
import type { Points } from "../cluster/messages";
import { pointOf } from "../cluster/ranks";
import type { Mesh, Rank } from "../cluster/state";
import { h, setText } from "../page/dom";
import { eachFrame } from "../page/frames";
import { clock, overText, placeOf, plural } from "../page/words";
import { say } from "../page/language";
import { Chart } from "./chart";
import { Curves } from "./curves";
import type { View } from "./view";

import "./metrics.css";

const SINGLE = 8; // ranks with a line each; more are shown as their mean with a band
const SAMPLED = 64; // ranks whose resource use is drawn
const SAMPLE_MS = 2000;
const SAMPLES = 300; // ten minutes
const STEP = "step";
const SECOND = "second";

/** Resource use is in the state; its history is stored here, since the view was opened. */
const USES: Readonly<Record<string, (rank: Partial<Rank>) => number | undefined>> = {
  "CPU, cores": (rank) => rank.cpu,
  "memory, MB": (rank) => rank.memory && rank.memory / (1 << 20),
  "calls/s": (rank) => rank.rate,
};

/** The metrics of a mesh. `points` are earlier values; `usage` false leaves out the resource use of processes. */
export interface MetricOptions {
  mesh: string;
  points?: Points;
  usage?: boolean;
}

export const metricView: View<MetricOptions> = (cluster, root, options) => {
  const view = new MetricView(cluster, root, options);
  return () => view.end();
};

class MetricView {
  constructor(
    private _cluster: Cluster,
    private _root: HTMLElement,
    private _options: MetricOptions,
  ) {
    _root.append(h("div", { class: "mnb-top" }, h("span", {}, this._title, " ", this._facts), h("span", { class: "mnb-tools" }, this._mean)), this._field);
    this._mean.addEventListener("click", () => {
      this._wantsMean = this._mean.getAttribute("aria-pressed") !== "true";
      this._frames.soon();
    });
    if (_options.points) this._add(_options.points);
    this._draw();
    this._unwatch = _cluster.watch((patch) => patch === null && this._connected());
    if (_options.usage !== false) this._sampling = setInterval(() => this._sample(), SAMPLE_MS);
    this._themed.observe(document.body, { attributeFilter: ["class", "data-jp-theme-light"] });
  }

  end(): void {
    this._unwatch();
    this._unsubscribe?.();
    clearInterval(this._sampling);
    this._themed.disconnect();
    this._frames.cancel();
    for (const chart of this._charts.values()) chart.end();
  }

  private _connected(): void {
    if (this._cluster.live)
      this._unsubscribe ??= this._cluster.subscribe({ topic: "metrics", mesh: this._options.mesh }, ({ reset, points }) => {
        if (reset) for (const name of [...this._curves.keys()]) if (!(name in USES)) this._curves.delete(name);
        this._add(points);
      });
    this._frames.soon();
  }

  private _curvesOf(name: string): Curves {
    const curves = this._curves.get(name) ?? new Curves();
    this._curves.set(name, curves);
    return curves;
  }

  private _add(points: Points): void {
    for (const [name, rows] of Object.entries(points)) {
      const curves = this._curvesOf(name);
      for (const [index, step, , value] of rows) curves.add(index, step, value);
    }
    this._frames.soon();
  }

  private _sample(): void {
    const ranks = this._cluster.state.ranks[this._options.mesh];
    if (!ranks || !this._cluster.live || this._mesh?.stopped) return;
    const second = Math.round(Date.now() / 1000 - this._began);
    for (const [name, useOf] of Object.entries(USES))
      for (const [index, rank] of Object.entries(ranks)) {
        const value = useOf(rank);
        if (value === undefined || Number(index) >= SAMPLED) continue;
        const curves = this._curvesOf(name);
        curves.add(Number(index), second, value);
        curves.keep(SAMPLES);
      }
    if (this._root.isConnected) this._frames.soon();
  }

  private _draw(): void {
    const count = new Set([...this._curves.values()].flatMap((curves) => [...curves.ranks])).size;
    const before = this._mesh;
    this._mesh = this._cluster.state.meshes[this._options.mesh] ?? (before && { ...before, stopped: before.stopped ?? say`it no longer exists`, ended: before.ended ?? this._cluster.now() });
    const over = this._mesh?.stopped ? ` · ${overText(this._mesh, this._cluster.now())}` : "";
    const when = this._cluster.live ? over : say` · state at ${clock(this._cluster.now())}`;
    this._root.classList.toggle("mnb-over", Boolean(over));
    setText(this._title, this._mesh?.name ?? "");
    setText(this._facts, `· ${this._curves.size ? plural(count, "rank") : say`no metrics yet: call monarch.telemetry.log(loss=…, step=…) in an actor`}${when}`);
    const mean = this._wantsMean ?? count > SINGLE;
    this._mean.hidden = count < 2;
    this._mean.setAttribute("aria-pressed", String(mean));
    for (const [name, curves] of this._curves) this._chartOf(name).show(curves.lines((index) => this._place(index)), mean);
  }

  private _chartOf(name: string): Chart {
    const existing = this._charts.get(name);
    if (existing) return existing;
    const chart = new Chart(name, name in USES ? SECOND : STEP);
    this._charts.set(name, chart);
    this._field.append(chart.element);
    return chart;
  }

  private _place(index: number): string {
    const mesh = this._mesh;
    return mesh?.labels.length ? placeOf(mesh.labels, pointOf(mesh.sizes, index)) : "";
  }

  private _began = Date.now() / 1000;
  private _charts = new Map<string, Chart>();
  private _curves = new Map<string, Curves>();
  private _facts = h("span", { class: "mnb-dim" });
  private _field = h("div", { class: "mnb-charts" });
  private _frames = eachFrame(() => this._draw());
  private _mean = h("button", { class: "mnb-b", type: "button", "aria-pressed": "false", text: say`Mean` });
  private _mesh: Mesh | undefined;
  private _sampling: ReturnType<typeof setInterval> | undefined;
  private _themed = new MutationObserver(() => {
    for (const chart of this._charts.values()) chart.recolour();
  });
  private _title = h("b");
  private _unsubscribe: (() => void) | null = null;
  private _unwatch: () => void;
  private _wantsMean: boolean | null = null; // null until a click chooses
}
