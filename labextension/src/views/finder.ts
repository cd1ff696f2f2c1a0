// Above a grid of many ranks: a query line, and a list of their differences.

import { type Difference, differences } from "../cluster/differing";
import { type Fits, fitting, found, toggled } from "../cluster/finding";
import { pointOf } from "../cluster/ranks";
import type { Rank, State } from "../cluster/state";
import { h, setText } from "../page/dom";
import { FIND_FROM, queryLine } from "../page/query";
import { say } from "../page/language";

import "./finder.css";

const LISTED = 12; // kinds of ranks, besides those that are far from the others
const HOSTS_NAMED = 3;

/** The displayed ranks. */
export interface Field {
  labels: readonly string[];
  sizes: readonly number[];
  count: number;
  rank(index: number): Rank;
  host(index: number): string;
}

export interface FinderEvents {
  /** Called when the query changes. */
  changed(): void;
  pick(indices: number[]): void;
}

export class Finder {
  readonly element: HTMLElement;

  constructor(private _events: FinderEvents) {
    this.element = h("div", { class: "mnb-finder", hidden: true }, h("div", { class: "mnb-findline" }, this._input, this._count, this._choose, this._toggle), this._list);
    this._choose.addEventListener("click", () => this._pick(this._found()));
    this._toggle.addEventListener("click", () => {
      this._open = !this._open;
      this._toggle.setAttribute("aria-expanded", String(this._open));
      this._events.changed();
    });
  }

  get query(): string {
    return this._input.value;
  }

  set query(query: string) {
    this._input.value = query;
    this._ask();
  }

  /** Adds a state to the query, or removes it. */
  turn(state: State): void {
    this.query = toggled(this.query, state);
  }

  /** Whether a rank matches the query. */
  fits(index: number): boolean {
    const { _field: field, _fits: fits } = this;
    return !fits || !field || fits({ rank: field.rank(index), point: pointOf(field.sizes, index), index, host: field.host(index) });
  }

  /** Brings the line and the list up to date. */
  draw(field: Field): void {
    const first = this._field?.labels.join() !== field.labels.join();
    this._field = field;
    this.element.hidden = field.count < FIND_FROM;
    if (this.element.hidden) return;
    if (first) this._fits = fitting(this.query, field.labels);
    const among = this._fits ? this._found().length : field.count;
    setText(this._count, this._fits ? say`${among.toLocaleString("en")} of ${field.count.toLocaleString("en")}` : "");
    this._choose.hidden = !this._fits || !among;
    this._list.hidden = !this._open;
    if (this._open) this._drawList(differences(field.count, (index) => field.rank(index), LISTED));
  }

  private _ask(): void {
    this._fits = fitting(this.query, this._field?.labels ?? []);
    this._events.changed();
  }

  private _found(): number[] {
    const { _field: field, _fits: fits } = this;
    return field && fits ? found(fits, field.sizes, field.count, (index) => field.rank(index), (index) => field.host(index)) : [];
  }

  private _pick(indices: number[]): void {
    if (indices.length) this._events.pick(indices);
  }

  private _drawList(kinds: Difference[]): void {
    this._kinds = kinds;
    kinds.forEach(({ state, what, indices }, index) => {
      const row = this._list.children[index] ?? this._list.appendChild(this._row(index));
      const [swatch, count, name, where] = row.children as unknown as [HTMLElement, HTMLElement, HTMLElement, HTMLElement];
      if (swatch.dataset.state !== state) swatch.dataset.state = state;
      setText(count, indices.length.toLocaleString("en"));
      setText(name, what);
      setText(where, this._where(indices));
    });
    while (this._list.childElementCount > kinds.length) this._list.lastElementChild?.remove();
  }

  private _row(position: number): HTMLElement {
    const row = h("button", { class: "mnb-kind", type: "button", title: say`select these ranks` }, h("i", { class: "mnb-swatch" }), h("b"), h("span"), h("span", { class: "mnb-dim" }));
    row.addEventListener("click", () => this._pick(this._kinds[position]?.indices ?? []));
    return row;
  }

  /** The hosts of some ranks, or their number. */
  private _where(indices: readonly number[]): string {
    const hosts = new Set<string>();
    for (const index of indices) {
      hosts.add(this._field?.host(index) ?? "");
      if (hosts.size > HOSTS_NAMED) return say`on ${new Set(indices.map((rank) => this._field?.host(rank))).size.toLocaleString("en")} hosts`;
    }
    return `on ${[...hosts].join(", ")}`;
  }

  private _choose = h("button", { class: "mnb-b", type: "button", text: say`Select`, title: say`select the matching ranks (Enter)`, hidden: true });
  private _count = h("span", { class: "mnb-dim", role: "status" });
  private _field: Field | null = null;
  private _fits: Fits | null = null;
  private _input = queryLine(
    () => this._ask(),
    () => this._pick(this._found()),
  );
  private _kinds: Difference[] = [];
  private _list = h("div", { class: "mnb-kinds", role: "group", "aria-label": say`what differs`, hidden: true });
  private _open = false;
  private _toggle = h("button", { class: "mnb-b", type: "button", text: say`What differs`, "aria-expanded": "false", title: say`one line for each group of similar ranks` });
}
