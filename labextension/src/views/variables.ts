// The variables that cells see on the ranks of a mesh. Ranks are asked repeatedly while the view is visible, also busy ones.

import type { Cluster } from "../cluster/client";
import type { VariableRow } from "../cluster/messages";
import { h, setText } from "../page/dom";
import { plural } from "../page/words";
import { say } from "../page/language";
import type { View } from "./view";

import "./debugger.css";

const AGAIN_MS = 2000;
const COST = 0.05; // the largest share of time for requests to ranks

export interface VariableOptions {
  mesh: string;
  ranks?: number[] | undefined;
}

export const variableView: View<VariableOptions> = (cluster, root, options) => {
  const view = new VariableView(cluster, root, options);
  return () => view.end();
};

class VariableView {
  constructor(
    private _cluster: Cluster,
    root: HTMLElement,
    private _options: VariableOptions,
  ) {
    root.append(this._table, this._note);
    this._unwatch = _cluster.watch((patch) => patch === null && this._begin(), []);
    this._begin();
  }

  end(): void {
    this._ended = true;
    this._unwatch();
    clearTimeout(this._waiting);
  }

  private _begin(): void {
    if (!this._cluster.live) return setText(this._note, say`not connected to the kernel`);
    if (!this._asking) void this._ask();
  }

  private async _ask(): Promise<void> {
    clearTimeout(this._waiting);
    this._asking = true;
    const began = performance.now();
    try {
      const { rows, answered, text } = await this._cluster.request("namespace", { mesh: this._options.mesh, ...(this._options.ranks && { ranks: this._options.ranks }) });
      if (!this._ended) this._draw(rows, answered, text ?? "");
    } catch (error) {
      if (!this._ended) setText(this._note, (error as Error).message);
    }
    this._asking = false;
    const pause = Math.max(AGAIN_MS, (performance.now() - began) / COST);
    if (!this._ended && this._cluster.live) this._waiting = setTimeout(() => void this._ask(), pause);
  }

  private _draw(rows: readonly VariableRow[], answered: number, text: string): void {
    const none = rows.length ? "" : say`no variables yet: a cell that begins with %%on makes some`;
    setText(this._note, [answered > 1 && rows.length ? say`of ${plural(answered, "rank")}` : "", answered ? none : "", text].filter(Boolean).join(" · "));
    this._table.hidden = !rows.length;
    const before = this._rows;
    this._rows = new Map(rows.map((row) => [row.name, before.get(row.name) ?? rowOf(row)]));
    for (const row of rows) {
      const text = JSON.stringify(row);
      const entry = this._rows.get(row.name);
      if (!entry || entry.text === text) continue;
      entry.text = text;
      entry.cell.replaceChildren(...valuesOf(row));
    }
    const elements = [...this._rows.values()].map(({ element }) => element);
    if (elements.some((element, index) => element !== this._body.children[index]) || elements.length !== this._body.childElementCount) this._body.replaceChildren(...elements);
  }

  private _asking = false;
  private _body = h("tbody");
  private _ended = false;
  private _note = h("div", { class: "mnb-dim", role: "status" });
  private _rows = new Map<string, ShownRow>();
  private _table = h("table", { class: "mnb-vars", "aria-label": say`variables`, hidden: true }, this._body);
  private _unwatch: () => void;
  private _waiting: ReturnType<typeof setTimeout> | undefined;
}

/** A row on the page, and its content. */
interface ShownRow {
  element: HTMLElement;
  cell: HTMLElement;
  text: string;
}

function rowOf({ name }: VariableRow): ShownRow {
  const cell = h("td");
  return { element: h("tr", {}, h("th", { scope: "row", text: name }), cell), cell, text: "" };
}

/** The values of a variable; a value that not all ranks have is shown with its ranks. */
function valuesOf({ values, more }: VariableRow): HTMLElement[] {
  const parts = values.map(({ type, text, where }) =>
    h("div", {}, h("code", { text: text || type }), h("span", { class: "mnb-dim", text: [text ? type : "", where].filter(Boolean).join(" · ") })),
  );
  return more ? [...parts, h("div", { class: "mnb-dim", text: say`… ${more} more values` })] : parts;
}
