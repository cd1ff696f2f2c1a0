// The tensors view: one tensor and its placement, or all live ones, each with its placement behind a click.

import type { Cluster } from "../cluster/client";
import type { PlacementData } from "../cluster/messages";
import { rankOf } from "../cluster/ranks";
import type { Mesh, TensorRow, Tensors } from "../cluster/state";
import { h, setText, svg, tableHead } from "../page/dom";
import { eachFrame } from "../page/frames";
import { SIGNS, overText, plural, size } from "../page/words";
import { say } from "../page/language";
import { busyText, byDimension, factsOf, movedText } from "./moves";
import { PlacementPicture } from "./placement";
import { ValuesOf } from "./values";
import type { View } from "./view";

import "./tensors.css";

/** One tensor, with the mesh of procs that it is on and its ranks there; else all: `tensors` is the initial state. */
export interface TensorOptions {
  placement?: PlacementData;
  mesh?: string;
  ranks?: number[];
  /** The key of its mesh of tensors, and its number there. */
  of?: [tensors: string, number: number];
  tensors?: Record<string, Tensors>;
  waits?: boolean;
  /** Shows present tensors only, as in the panel; in a cell, ended ones stay in their last state. */
  current?: boolean;
  /** Which tensor is open, stored outside of the view. */
  open?: { id: string };
}

export const tensorView: View<TensorOptions> = (cluster, root, options) => {
  const view = options.placement ? new OneTensor(cluster, root, options.placement, options.mesh ?? "", options.ranks ?? [], options.of) : new TensorList(cluster, root, options);
  return () => view.end();
};

const ILL: ReadonlySet<string> = new Set(["failed", "healing", "unresponsive", "paused"]);

/** The picture of one tensor; unhealthy ranks are marked. */
class OneTensor {
  constructor(
    private _cluster: Cluster,
    private _root: HTMLElement,
    placement: PlacementData,
    private _mesh: string,
    private _ranks: number[],
    of?: [tensors: string, number: number],
  ) {
    this._picture = new PlacementPicture(placement);
    _root.append(this._picture.element, this._over);
    if (of) this._values = new ValuesOf(_cluster, this._picture.element, placement.name, of);
    this._draw();
    this._unwatch = _cluster.watch(() => this._frames.soon());
  }

  end(): void {
    this._unwatch();
    this._frames.cancel();
    this._picture.element.remove();
    this._over.remove();
  }

  private _draw(): void {
    const { state } = this._cluster;
    const mesh = state.meshes[this._mesh];
    if (mesh) this._seen = mesh;
    const over = this._cluster.live && this._seen && (!mesh || mesh.stopped);
    if (over && !this._over.textContent) setText(this._over, say`its mesh was ${overText(mesh ?? this._seen, this._cluster.now())}`);
    this._over.hidden = !over;
    this._root.classList.toggle("mnb-over", Boolean(over));
    this._picture.mark((rank) => {
      if (!state.meshes[this._mesh]) return "";
      const how = rankOf(state, this._mesh, this._ranks[rank] ?? rank).state;
      return ILL.has(how) ? (SIGNS[how] ?? "") : "";
    });
    this._values?.draw();
  }

  private _frames = eachFrame(() => this._draw());
  private _over = h("div", { class: "mnb-over-since", role: "status", hidden: true });
  private _picture: PlacementPicture;
  private _seen: Mesh | undefined;
  private _unwatch: () => void;
  private _values: ValuesOf | undefined;
}

const columns = (): string[] => ["", say`name`, say`tensor`, say`placement`, say`on a rank`, say`made at`];

class TensorList {
  constructor(
    private _cluster: Cluster,
    private _root: HTMLElement,
    private _options: TensorOptions,
  ) {
    this._open = _options.open ?? { id: "" };
    _root.classList.add("mnb-tensors");
    this._draw();
    this._unwatch = _cluster.watch((patch) => (patch === null || patch.tensors) && this._changed(), ["tensors"]);
    this._changed();
  }

  end(): void {
    this._unwatch();
    this._unsubscribe?.();
    this._frames.cancel();
    this._opened?.end();
    this._root.replaceChildren();
  }

  private _changed(): void {
    if (this._cluster.live) this._unsubscribe ??= this._cluster.subscribe({ topic: "tensors" }, () => undefined);
    this._frames.soon();
  }

  private _draw(): void {
    const current = this._cluster.live ? this._cluster.state.tensors : (this._options.tensors ?? this._cluster.state.tensors);
    if (this._cluster.live && !this._options.current) this._keep(current);
    const written = JSON.stringify([current, [...this._ended]]);
    if (written === this._written) return;
    this._written = written;
    const parts = Object.entries(current).map(([key, tensors]) => this._meshOf(key, tensors));
    for (const [key, [tensors, when]] of this._ended)
      parts.push(h("div", { class: "mnb-over" }, h("div", { class: "mnb-over-since", text: say`${tensors.name} was ${overText({ ended: when }, when)}; this is what it held` }), this._meshOf(key, tensors)));
    if (!parts.length) parts.push(h("div", { class: "mnb-dim", text: say`no sharded tensors: monarch.distribute(tensor, mesh, sharding_spec=[…]) makes one` }));
    this._root.replaceChildren(...parts);
    if (this._opened) this._reopen();
    else if (this._open.id) void this._show(this._open.id); // it was open when the view was last visible
  }

  /** Stores the present tensors; meshes that have ended stay visible, with the time. */
  private _keep(current: Record<string, Tensors>): void {
    for (const [key, tensors] of Object.entries(this._last)) if (!current[key] && tensors.count) this._ended.set(key, [tensors, this._cluster.now()]);
    for (const key of Object.keys(current)) this._ended.delete(key);
    this._last = structuredClone(current);
  }

  private _meshOf(key: string, tensors: Tensors): HTMLElement {
    const rows = tensors.rows.map((row) => this._rowOf(key, row));
    const hidden = tensors.count - rows.length;
    return h(
      "section",
      {},
      h("div", { class: "mnb-top" }, h("span", {}, h("b", { text: tensors.name }), h("span", { class: "mnb-dim", text: ` · ${factsOf(tensors)}` }))),
      tensors.lost ? h("div", { text: tensors.lost }) : null,
      this._options.waits ? null : h("div", { class: "mnb-scroll" }, h("table", { class: "mnb-list" }, tableHead(columns()), h("tbody", {}, ...rows))),
      hidden > 0 && !this._options.waits ? h("div", { class: "mnb-dim", text: say`… and ${hidden} smaller ones` }) : null,
      ...(tensors.lost ? [] : [memory(tensors), processes(tensors), movement(tensors)]),
      tensors.lost && !this._options.waits ? null : waits(tensors),
    );
  }

  private _rowOf(key: string, row: TensorRow): HTMLElement {
    const id = `${key}/${row.number}`;
    const button = h("button", { class: "mnb-toggle", type: "button", text: row.name || "·", "aria-expanded": String(this._open.id === id), "aria-label": say`where ${row.name || row.title} lies` });
    const line = h(
      "tr",
      { "data-tensor": id, class: row.lost ? "mnb-dim" : "" },
      h("td", {}, pictureOf(row)),
      h("td", {}, button),
      h("td", { text: row.title }),
      h("td", {}, h("code", { text: row.placement.join(" ") })),
      h("td", { class: "mnb-count", text: row.lost ? say`lost` : size(row.each) }),
      h("td", { class: "mnb-dim", text: row.line.at, title: row.line.source }),
    );
    line.addEventListener("click", () => this._toggle(id));
    return line;
  }

  private _toggle(id: string): void {
    const was = this._open.id;
    this._close();
    if (was !== id) void this._show(id);
  }

  private async _show(id: string): Promise<void> {
    this._open.id = id;
    const cell = h("td", { colspan: columns().length, class: "mnb-open" });
    const row = h("tr", {}, cell);
    this._opened = { row, end: () => undefined };
    this._reopen();
    const [key = "", number = ""] = id.split("/");
    try {
      const { placement, mesh, ranks } = await this._cluster.request("placement", { tensors: key, number: Number(number) });
      if (this._opened?.row !== row) return;
      const picture = new OneTensor(this._cluster, cell, placement, mesh, ranks, [key, Number(number)]);
      this._opened.end = () => picture.end();
    } catch (error) {
      setText(cell, (error as Error).message);
    }
  }

  /** Puts the opened placement below its row again; it closes with the tensor. */
  private _reopen(): void {
    const row = [...this._root.querySelectorAll<HTMLElement>("[data-tensor]")].find((element) => element.dataset.tensor === this._open.id);
    if (!row || !this._opened) return this._close();
    row.after(this._opened.row);
    row.querySelector("button")?.setAttribute("aria-expanded", "true");
  }

  private _close(): void {
    this._opened?.end();
    this._opened?.row.remove();
    this._opened = null;
    this._open.id = "";
    for (const button of this._root.querySelectorAll('[aria-expanded="true"]')) button.setAttribute("aria-expanded", "false");
  }

  private _ended = new Map<string, [tensors: Tensors, when: number]>();
  private _frames = eachFrame(() => this._draw());
  private _last: Record<string, Tensors> = {};
  private _open: { id: string };
  private _opened: { row: HTMLElement; end: () => void } | null = null;
  private _unsubscribe: (() => void) | undefined;
  private _unwatch: () => void;
  private _written = "";
}

function pictureOf({ picture }: TensorRow): Element {
  return svg("svg", { width: 36, height: 18, class: "mnb-small-picture", "aria-hidden": "true" }, ...picture.map(([x, y, w, h, fill]) => svg("rect", { x, y, width: Math.max(w, 1), height: Math.max(h, 1), fill })));
}

/** Bytes of tensors by rank, as bars. */
function memory({ live, largest }: Tensors): HTMLElement | null {
  if (!live.length) return null;
  const areEqual = new Set(live.map(size)).size === 1;
  const bars = live.map((bytes, rank) => h("span", { class: "mnb-bar", title: say`rank ${rank}: ${size(bytes)}`, style: `height:${Math.max(2, Math.round((22 * bytes) / (largest || 1)))}px` }));
  const text = areEqual ? say`${size(live[0] ?? 0)} on each rank` : say`${size(Math.min(...live))} to ${size(largest)} on a rank`;
  return h("div", { class: "mnb-memory", role: "img", "aria-label": say`live: ${text}` }, h("span", { class: "mnb-dim", text: say`live ` }), h("span", { class: "mnb-bars" }, ...bars), h("span", { text: ` ${text}` }));
}

function processes({ memory }: Tensors): HTMLElement | null {
  if (!memory) return null;
  const between = (bytes: readonly number[]) => {
    const [least, most] = [size(Math.min(...bytes)), size(Math.max(...bytes))];
    return least === most ? most : `${least} to ${most}`;
  };
  const of = memory.of === "process" ? say`memory of a process` : say`memory allocated on a device`;
  return h("div", { class: "mnb-dim", text: say`${of}: ${between(memory.allocated)}, at most ${between(memory.peak)} so far` });
}

function movement({ moved, busy }: Tensors): HTMLElement {
  const rows = byDimension(moved).map(([dimension, kind, count, nbytes]) =>
    h("tr", {}, h("td", {}, h("code", { text: dimension })), h("td", { text: kind }), h("td", { class: "mnb-count", text: String(count) }), h("td", { class: "mnb-count", text: size(nbytes) })),
  );
  return h("div", {}, h("div", { text: movedText(moved) }), rows.length ? h("table", { class: "mnb-list" }, h("tbody", {}, ...rows)) : null, busy.length ? h("div", { class: "mnb-dim", text: busyText(busy) }) : null);
}

function waits({ waits }: Tensors): HTMLElement | null {
  if (!waits.length) return null;
  const times = waits.reduce((sum, wait) => sum + wait.count, 0);
  const rows = [...waits]
    .sort((a, b) => b.count - a.count)
    .map(({ line, what, count }) => h("tr", {}, h("td", { class: "mnb-count", text: `${count} ×` }), h("td", { text: what }), h("td", { class: "mnb-dim", text: line.at }), h("td", {}, h("code", { text: line.source }))));
  return h("details", {}, h("summary", { text: say`the last cell waited ${plural(times, "time")} for a result` }), h("table", { class: "mnb-list" }, h("tbody", {}, ...rows)));
}
