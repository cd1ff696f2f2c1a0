// Resource use of processes over the last hour: a chart for each measure, and its peak, one click from the timeline.

import type { Cluster } from "../cluster/client";
import type { HistoryCurves } from "../cluster/messages";
import { h, setText } from "../page/dom";
import { clock, plural } from "../page/words";
import { say } from "../page/language";
import { Chart } from "./chart";
import { timelineView } from "./timeline";
import type { View } from "./view";

import "./metrics.css";
import "./history.css";

const UNIT = "minute";

/** The history of a mesh; `shown` is its saved form, for a page without a kernel. */
export interface HistoryOptions {
  mesh: string;
  shown?: HistoryCurves;
}

export const historyView: View<HistoryOptions> = (cluster, root, options) => {
  const view = new HistoryView(cluster, root, options);
  return () => view.end();
};

type Measure = HistoryCurves["measures"][number];

class HistoryView {
  constructor(
    private _cluster: Cluster,
    private _root: HTMLElement,
    private _options: HistoryOptions,
  ) {
    _root.classList.add("mnb-history");
    _root.append(h("div", { class: "mnb-top" }, h("span", {}, this._title, " ", this._facts)), this._field, this._note, this._below);
    if (_options.shown) this._draw(_options.shown);
    this._unwatch = _cluster.watch((patch) => patch === null && this._connected(), []);
    this._themed.observe(document.body, { attributeFilter: ["class", "data-jp-theme-light"] });
    this._connected();
  }

  end(): void {
    this._unwatch();
    this._unsubscribe?.();
    this._end?.();
    this._themed.disconnect();
    for (const { chart } of this._charts.values()) chart.end();
    this._root.replaceChildren();
  }

  private _connected(): void {
    if (this._cluster.live) this._unsubscribe ??= this._cluster.subscribe({ topic: "history", mesh: this._options.mesh }, (message) => this._draw(message));
  }

  private _draw({ name, ranks, measures }: HistoryCurves): void {
    this._name = name;
    setText(this._title, say`History of ${name}`);
    const when = this._cluster.live ? "" : say` · state at ${clock(this._cluster.now())}`;
    setText(this._facts, `· ${measures.length ? plural(ranks, "rank") : say`no samples yet: they come every few seconds`}${when}`);
    for (const measure of measures) {
      const { chart, peak } = this._chartOf(measure);
      chart.show(measure.lines, false);
      setText(peak, say`peak ${measure.peak}`);
      peak.onclick = () => this._open(measure);
    }
  }

  private _chartOf({ name }: Measure): { chart: Chart; peak: HTMLButtonElement } {
    const existing = this._charts.get(name);
    if (existing) return existing;
    const entry = { chart: new Chart(name, UNIT), peak: h("button", { class: "mnb-b mnb-peak", type: "button", title: say`shows the timeline at that moment` }) };
    this._charts.set(name, entry);
    this._field.append(h("div", {}, entry.chart.element, entry.peak));
    return entry;
  }

  /** Shows the timeline at the moment of a peak. */
  private _open({ at, timeline }: Measure): void {
    this._end?.();
    this._end = null;
    this._below.className = "";
    setText(this._note, timeline ? "" : say`no timeline was recorded at ${clock(at)}: %timeline ${this._name} records one from now on`);
    if (timeline) this._end = timelineView(this._cluster, this._below, { key: timeline, at });
  }

  private _below = h("div");
  private _charts = new Map<string, { chart: Chart; peak: HTMLButtonElement }>();
  private _end: (() => void) | null = null;
  private _facts = h("span", { class: "mnb-dim" });
  private _field = h("div", { class: "mnb-charts" });
  private _name = "";
  private _note = h("div", { class: "mnb-message", role: "status" });
  private _themed = new MutationObserver(() => {
    for (const { chart } of this._charts.values()) chart.recolour();
  });
  private _title = h("b");
  private _unsubscribe: (() => void) | null = null;
  private _unwatch: () => void;
}
