// The mesh view: a live grid, by hosts first for many ranks, with the details of the selection beside.

import type { Cluster } from "../cluster/client";
import { baseOf, countOf, countsOf, hostOf, pointOf, present, procsOf, rankOf, sizeOf } from "../cluster/ranks";
import { sliceExpression } from "../cluster/slices";
import type { Mesh, Patch, Rank, State } from "../cluster/state";
import { h, setText } from "../page/dom";
import { eachFrame } from "../page/frames";
import { FIND_FROM } from "../page/query";
import { clock, duration, overText, placeOf, plural, shapeOf } from "../page/words";
import { say } from "../page/language";
import { InCell } from "../panel/incell";
import type { Look } from "./cells";
import { type Colour, METRIC, LatestMetrics, coloursOf, rangeOf } from "./colours";
import { type Details, details, usage, words } from "./details";
import { Finder } from "./finder";
import { CANVAS_FROM, Grid, type GridEvents } from "./grid";
import { HOSTS_FROM, type Hosts, hostsOf, sayNotice, together } from "./hosts";
import { Tip } from "./tip";
import type { View } from "./view";

import "./mesh.css";

const TICK_MS = 500; // of displayed durations
const TIMED = new Set(["busy", "unresponsive", "paused", "failed"]);

/** A mesh, or with `ranks` (indices of the whole mesh), `labels` and `sizes` a slice of one. */
export interface MeshOptions {
  mesh: string;
  ranks?: number[];
  labels?: string[];
  sizes?: number[];
  /** A note beside the heading. */
  facts?: string[];
}

export const meshView: View<MeshOptions> = (cluster, root, options) => {
  const view = new MeshView(cluster, root, options);
  return () => view.end();
};

class MeshView {
  labels: string[] = [];
  sizes: number[] = [];
  count = 0;

  constructor(
    private _cluster: Cluster,
    private _root: HTMLElement,
    private _options: MeshOptions,
  ) {
    this._uid = _options.mesh;
    this._metrics = new LatestMetrics(_cluster, this._uid, () => this._metric.startsWith(METRIC) && this._drawAll());
    this._tip = new Tip(_root);
    this._acting = new InCell(_cluster, _root);
    this._healAll = h("button", { class: "mnb-b mnb-main", type: "button", text: say`Heal`, onclick: () => void this._acting.actions.act("heal", this._uid, null) });
    this._actions = this._acting.menuButton(say`Actions`, () => ({ uid: this._uid, ranks: this._ranksOf(_options.ranks ?? null) }));
    this._tools.append(this._healAll, this._turns, this._level, this._pick, this._actions);
    _root.append(
      h("div", { class: "mnb-top mnb-wrap" }, h("span", {}, this._title, " ", this._facts), this._status, this._tools),
      this._notice,
      this._finder.element,
      h("div", { class: "mnb-body" }, h("div", { class: "mnb-left-side" }, this._field, this._legend), this._side),
      this._acting.element,
      this._tip.element,
    );
    for (const begin of ["pointerdown", "focus"]) this._pick.addEventListener(begin, () => this._metrics.begin());
    this._pick.addEventListener("change", () => {
      this._metric = this._pick.value;
      this._all = true;
      this._draw();
    });
    this._level.addEventListener("click", () => {
      this._byHosts = !this._byHosts;
      this._opened = -1;
      this._build();
    });
    this._positions = _options.ranks ? new Map(_options.ranks.map((index, position) => [index, position])) : null;
    this._draw();
    this._unwatch = _cluster.watch((patch) => this._changed(patch));
    this._ticking = setInterval(() => _root.isConnected && this._details?.draw(), TICK_MS);
  }

  end(): void {
    this._unwatch();
    this._metrics.end();
    this._details?.end();
    clearInterval(this._ticking);
    this._frames.cancel();
  }

  // -- displayed ranks ------------------------------------------------------------------------------------------------

  /** The index in the whole mesh of an index of the view. */
  private _whole(index: number): number {
    return this._options.ranks ? (this._options.ranks[index] ?? -1) : index;
  }

  rank(index: number): Rank {
    return rankOf(this._cluster.state, this._uid, this._whole(index));
  }

  /** Ranks of the whole mesh for requests: null for all. */
  private _ranksOf(ranks: number[] | null): number[] | null {
    return ranks && this._mesh && ranks.length < sizeOf(this._mesh) ? ranks : null;
  }

  /** The menu and the keys of cells, each of which represents some ranks of the view. */
  private _acts(of: (cell: number) => readonly number[]): Pick<GridEvents, "menu" | "key"> {
    const ranksOfCells = (cells: number[]): number[] | null => this._ranksOf(cells.flatMap(of).map((index) => this._whole(index)));
    return {
      menu: (cells, x, y) => {
        this._tip.hide();
        this._acting.menu(this._uid, ranksOfCells(cells), x, y);
      },
      key: (event, cells) => this._acting.key(event, this._uid, ranksOfCells(cells)),
    };
  }

  /** The host that a rank is on. */
  host(index: number): string {
    return this._mesh ? hostOf(this._cluster.state, this._mesh, baseOf(this._mesh, this._whole(index))) : "";
  }

  private get _colour(): Colour | undefined {
    return this._colours[this._metric];
  }

  private _begin(mesh: Mesh): void {
    this.labels = this._options.labels ?? mesh.labels;
    this.sizes = this._options.sizes ?? mesh.sizes;
    this.count = countOf(this.sizes);
    if (this.count >= HOSTS_FROM)
      this._hosts = hostsOf(this._cluster.state, mesh, this.labels, this.sizes, (index) => baseOf(mesh, this._whole(index)));
    this._byHosts = Boolean(this._hosts) && this.count > CANVAS_FROM;
    this._across = [Math.max(0, this.labels.length - 1)];
    this._level.hidden = !this._hosts;
    this._build();
  }

  private _build(): void {
    const hosts = this._byHosts ? this._hosts : null;
    this._select([]);
    this._inner = null;
    this._tip.hide();
    this._level.setAttribute("aria-pressed", String(this._byHosts));
    this._turns.hidden = this._byHosts || this.labels.length < 2;
    this._turns.replaceChildren(...this.labels.map((label, d) => this._turn(label, d)));
    this._grid = hosts
      ? new Grid(hosts.labels, hosts.sizes, hosts.sizes.length - 1, (host) => this._lookOfHost(hosts, host), {
          hover: (host, box) => this._hoverHost(hosts, host, box),
          select: (cells) => this._openHosts(hosts, cells),
          ...this._acts((host) => hosts.on(host)),
        })
      : new Grid(this.labels, this.sizes, this._across, (index) => this._look(index), {
          hover: (index, box) => this._hover(index, box),
          select: (indices) => this._select(indices),
          ...this._acts((index) => [index]),
        });
    this._field.replaceChildren(this._grid.element);
    this._root.classList.toggle("mnb-many", this._grid.size === "s" || this._byHosts);
    this._all = true;
    this._draw();
  }

  /** A button that moves a dimension from across to down, or back. */
  private _turn(label: string, d: number): HTMLButtonElement {
    const isAcross = this._across.includes(d);
    const button = h("button", {
      class: "mnb-b mnb-turn",
      type: "button",
      text: `${label} ${isAcross ? "→" : "↓"}`,
      "aria-pressed": String(isAcross),
      title: say`${label} runs ${isAcross ? say`across` : say`down`}; click to turn it`,
    });
    button.addEventListener("click", () => {
      const remaining = this._across.filter((dim) => dim !== d);
      const next = isAcross ? remaining : this.labels.length > 2 ? [...this._across, d] : [d];
      this._across = next.length ? next : [this.labels.findIndex((_, dim) => dim !== d)];
      this._build();
      (this._turns.children[d] as HTMLElement).focus();
    });
    return button;
  }

  private _look(index: number): Look {
    const rank = this.rank(index);
    const colour = this._colour;
    const value = colour?.of(rank, this._whole(index));
    const point = pointOf(this.sizes, index);
    const measured = colour && value !== undefined ? `, ${colour.name} ${colour.show(value)}` : "";
    return {
      state: this._mesh?.stopped ? "stopped" : rank.state,
      fill: colour ? this._share(value) : null,
      text: String(point.at(-1) ?? 0),
      out: !this._finder.fits(index),
      label: `${placeOf(this.labels, point) || "one"}, ${words(this._mesh ?? {}, rank)}${measured}`,
    };
  }

  /** The place of a value within the coloured range. */
  private _share(value: number | undefined): number {
    const [low, high] = this._range;
    return value !== undefined && Number.isFinite(value) ? Math.min(1, (value - low) / (high - low || 1)) : 0;
  }

  private _lookOfHost(hosts: Hosts, host: number): Look {
    const indices = hosts.on(host);
    const colour = this._colour;
    const { state, parts, counts } = together(this._cluster.state, this._uid, indices.map((index) => this._whole(index)));
    let fill: number | null = null;
    if (colour) {
      const values = indices.map((index) => colour.of(this.rank(index), this._whole(index))).filter((value) => value !== undefined && Number.isFinite(value)) as number[];
      fill = values.length ? this._share(values.reduce((sum, value) => sum + value, 0) / values.length) : 0;
    }
    const stopped = Boolean(this._mesh?.stopped);
    const label = `${hosts.names[host]}: ${present(counts).map(([how, count]) => `${count} ${how}`).join(", ")}`;
    return { state: stopped ? "stopped" : state, fill, parts: stopped ? undefined : parts, text: "", label, out: !indices.some((index) => this._finder.fits(index)) };
  }

  private _openHosts(hosts: Hosts, hostIndices: readonly number[]): void {
    this._opened = hostIndices.length === 1 ? (hostIndices[0] as number) : -1;
    this._inner = null;
    this._field.querySelector(".mnb-inner")?.remove();
    if (this._opened >= 0) {
      const indices = hosts.on(this._opened);
      const index = (cell: number): number => indices[cell] as number;
      const { labels, sizes } = hosts.inner ?? { labels: ["rank"], sizes: [indices.length] };
      this._inner = new Grid(labels, sizes, sizes.length - 1, (innerCell) => this._look(index(innerCell)), {
        hover: (innerCell, box) => this._hover(innerCell < 0 ? -1 : index(innerCell), box),
        select: (places) => this._select(places.length ? places.map(index) : indices),
        ...this._acts((innerCell) => [index(innerCell)]),
      });
      this._inner.update();
      this._field.append(h("div", { class: "mnb-inner" }, h("div", { class: "mnb-dim", text: hosts.names[this._opened] }), this._inner.element));
    }
    this._select(hostIndices.flatMap((host) => hosts.on(host)));
  }

  // -- under the pointer, and selected -------------------------------------------------------------------------------

  private _hover(index: number, box: DOMRect | null): void {
    if (index < 0 || !box) return this._tip.hide();
    const rank = this.rank(index);
    const lasts = rank.since && TIMED.has(rank.state) ? ` · ${duration(this._cluster.now() - rank.since)}` : "";
    const lines: HTMLElement[] = [
      h("b", { text: placeOf(this.labels, pointOf(this.sizes, index)) || "one" }),
      h("div", { text: words(this._mesh ?? {}, rank) + lasts }),
    ];
    const colour = this._colour;
    const value = colour?.of(rank, this._whole(index));
    if (colour && this._metric.startsWith(METRIC) && value !== undefined) lines.push(h("div", { text: `${colour.name} ${colour.show(value)}` }));
    const used = usage(rank);
    if (used) lines.push(h("div", { class: "mnb-dim", text: used }));
    this._tip.show(lines, box);
  }

  private _hoverHost(hosts: Hosts, host: number, box: DOMRect | null): void {
    if (host < 0 || !box) return this._tip.hide();
    const [name, states] = this._lookOfHost(hosts, host).label.split(": ");
    this._tip.show([h("b", { text: name }), h("div", { text: states })], box);
  }

  private _select(indices: readonly number[]): void {
    const [first] = indices;
    this._selected = indices.length > 0;
    this._details?.end();
    this._details = null;
    this._side.hidden = !this._selected;
    this._side.replaceChildren();
    if (first === undefined) return;
    const name = this._mesh?.name ?? "";
    const wholes = indices.map((index) => this._whole(index));
    this._details = details(this._cluster, this._uid, wholes, this._acting, {
      ranks: this._ranksOf(wholes),
      title: indices.length === 1 ? placeOf(this.labels, pointOf(this.sizes, first)) || name : plural(indices.length, "rank"),
      expression: this.labels.length ? sliceExpression(name, this.labels, this.sizes, indices) : "",
      close: () => this._grid?.select([]),
    });
    this._side.append(this._details.element);
    this._details.draw();
  }

  // -- drawing -------------------------------------------------------------------------------------------------------

  private _drawAll(): void {
    this._all = true;
    this._frames.soon();
  }

  private _draw(): void {
    const before = this._mesh;
    const mesh = this._cluster.state.meshes[this._uid] ?? (before && { ...before, stopped: before.stopped ?? say`it no longer exists`, ended: before.ended ?? this._cluster.now() });
    this._mesh = mesh;
    this._tools.hidden = !mesh;
    if (!mesh) return setText(this._facts, this._cluster.live ? say`this mesh no longer exists` : say`not connected to the kernel`);
    const grid = this._grid;
    if (!grid) return this._begin(mesh);
    this._drawHead(mesh);
    this._measure();
    this._finder.draw(this);
    const hosts = this._byHosts ? this._hosts : null;
    if (this._all) {
      grid.update();
      this._inner?.update();
    } else if (hosts) {
      grid.update(new Set([...this._dirty].map((index) => hosts.of(index))));
      if (this._opened >= 0) this._inner?.update(hosts.on(this._opened).flatMap((index, cell) => (this._dirty.has(index) ? [cell] : [])));
    } else grid.update(this._dirty);
    this._all = false;
    this._dirty.clear();
    this._drawLegend(mesh, grid);
    this._details?.draw();
  }

  /** Computes the range of the displayed metric; redraws all cells if it has changed. */
  private _measure(): void {
    const colour = this._colour;
    if (!colour) return;
    const before = this._range;
    this._range = rangeOf(colour, Array.from({ length: this.count }, (_, index) => colour.of(this.rank(index), this._whole(index))));
    if (String(before) !== String(this._range)) this._all = true;
  }

  private _drawHead(mesh: Mesh): void {
    const hosts = procsOf(this._cluster.state, mesh)?.hosts ?? [];
    const parts = [
      plural(this.count, mesh.kind === "procs" ? "proc" : (mesh.class ?? "actor")),
      this.labels.length ? shapeOf({ labels: this.labels, sizes: this.sizes }) : "",
      hosts.length > 1 ? plural(hosts.length, "host") : "",
      ...(this._options.facts ?? []),
      mesh.stopped ? overText(mesh, this._cluster.now()) : "",
    ];
    this._root.classList.toggle("mnb-over", Boolean(mesh.stopped));
    setText(this._title, mesh.name);
    setText(this._facts, `· ${parts.filter(Boolean).join(" · ")}`);
    sayNotice(this._notice, this._cluster.state, hosts);
    setText(this._status, this._cluster.live ? "" : say`state at ${clock(this._cluster.now())}`);
    this._colours = coloursOf(this._cluster.state.ranks[this._uid] ?? {}, this._metrics);
    if (!this._colours[this._metric]) this._metric = "state";
    const offered = ["state", ...Object.keys(this._colours)].join();
    if (this._pick.dataset.offered !== offered) {
      this._pick.dataset.offered = offered;
      const options = Object.entries(this._colours).map(([key, colour]) => h("option", { value: key, text: colour.name }));
      this._pick.replaceChildren(h("option", { value: "state", text: say`state` }), ...options);
      this._pick.value = this._metric;
    }
    this._pick.hidden = Boolean(mesh.stopped) || !this._cluster.live;
  }

  private _drawLegend(mesh: Mesh, grid: Grid): void {
    const { ranks } = this._options;
    const counts = ranks ? countsOf(this._cluster.state, this._uid, ranks) : (mesh.counts ?? {});
    this._healAll.hidden = !counts.failed || Boolean(mesh.stopped) || !this._cluster.live;
    this._actions.hidden = !this._cluster.live;
    const colour = this._colour;
    const items: [string, string][] = colour
      ? [["metric", `${colour.name}, ${colour.show(this._range[0])} to ${colour.show(this._range[1])}`]]
      : present(counts).map(([state, count]) => [state, `${count} ${state}`]);
    for (const [position, [state, text]] of items.entries()) {
      const item = this._legend.children[position] ?? this._legend.appendChild(this._key());
      const [swatch, label] = item.children as unknown as [HTMLElement, HTMLElement];
      if (swatch.dataset.state !== state) swatch.dataset.state = state;
      setText(label, text);
      (item as HTMLButtonElement).disabled = Boolean(colour) || this.count < FIND_FROM;
    }
    while (this._legend.childElementCount > items.length) this._legend.lastElementChild?.remove();
    if (grid.element.matches("canvas")) grid.element.setAttribute("aria-label", `${this.count} ranks: ${items.map(([, text]) => text).join(", ")}`);
  }

  /** A state in the legend, which queries the ranks in it. */
  private _key(): HTMLElement {
    const swatch = h("i", { class: "mnb-swatch" });
    return h("button", { class: "mnb-key", type: "button", onclick: () => this._finder.turn(swatch.dataset.state as State) }, swatch, h("span"));
  }

  private _changed(patch: Patch | null): void {
    if (patch === null) return this._drawAll();
    const ranks = patch.ranks?.[this._uid];
    for (const key of Object.keys(ranks ?? {})) {
      const index = this._positions ? this._positions.get(Number(key)) : Number(key);
      if (index !== undefined) this._dirty.add(index);
    }
    const mesh = patch.meshes?.[this._uid];
    if (mesh === null || mesh?.state || mesh?.stopped) this._all = true;
    const near = this._selected && (patch.ranks || patch.meshes || patch.failures || patch.sessions);
    if (ranks || mesh !== undefined || near || patch.hosts) this._frames.soon();
  }

  private _acting: InCell;
  private _across: number[] = [];
  private _actions: HTMLButtonElement;
  private _all = true;
  private _byHosts = false;
  private _colours: Record<string, Colour> = {};
  private _details: Details | null = null;
  private _dirty = new Set<number>(); // ranks to draw anew
  private _facts = h("span", { class: "mnb-dim" });
  private _field = h("div", { class: "mnb-field" });
  private _finder = new Finder({
    changed: () => {
      this._all = true;
      this._draw();
    },
    pick: (indices) => (this._byHosts ? this._select(indices) : this._grid?.select(indices)),
  });
  private _frames = eachFrame(() => this._draw());
  private _grid: Grid | null = null;
  private _healAll: HTMLButtonElement;
  private _hosts: Hosts | null = null;
  private _inner: Grid | null = null; // the ranks of the host that is opened
  private _legend = h("div", { class: "mnb-legend" });
  private _level = h("button", { class: "mnb-b", type: "button", "aria-pressed": "false", text: say`Hosts`, title: say`show one cell for each host` });
  private _mesh: Mesh | undefined;
  private _metric = "state";
  private _notice = h("div", { class: "mnb-status", role: "status", hidden: true });
  private _metrics: LatestMetrics;
  private _opened = -1;
  private _pick = h("select", { class: "mnb-pick", "aria-label": say`colour by` });
  private _positions: Map<number, number> | null;
  private _range: [low: number, high: number] = [0, 1];
  private _selected = false;
  private _side = h("div", { class: "mnb-side", hidden: true });
  private _status = h("span", { class: "mnb-status mnb-dim", role: "status" });
  private _ticking: ReturnType<typeof setInterval>;
  private _tip: Tip;
  private _title = h("b");
  private _tools = h("span", { class: "mnb-tools" });
  private _turns = h("span", { class: "mnb-turns", role: "group", "aria-label": say`dimensions: across or down` });
  private _uid: string;
  private _unwatch: () => void;
}
