// Where a cell runs: a choice in its toolbar, which stands for `%%on` in its first line. The line is what counts, in every
// front end; the cell's metadata keep the last place, so that one can go back to it.

import { type IToolbarWidgetRegistry, InputDialog } from "@jupyterlab/apputils";
import type { Notebook, NotebookPanel } from "@jupyterlab/notebook";
import { Widget } from "@lumino/widgets";

import type { ClusterState } from "../cluster/state";
import { h } from "../page/dom";
import { say } from "../page/language";
import type { Front } from "./front";
import { phaseOf } from "./link";
import { isStructural } from "./treeview";

export type Cell = NonNullable<Notebook["activeCell"]>;

const KERNEL = "kernel";
const OTHER = "…"; // asks for ranks
const LINE = /^\s*%%on\b[ \t]*(.*)(?:\n|$)/;

/** Where a cell runs: `workers gpus=0`, "" in the kernel; null if another cell magic decides. */
export function placeIn(source: string): string | null {
  const [, place] = LINE.exec(source) ?? [];
  if (place !== undefined) return place.trim();
  return /^\s*%%/.test(source) ? null : "";
}

/** The edit of a source that makes it run elsewhere: from `start` to `end` by `text`. */
export function editFor(source: string, place: string): { start: number; end: number; text: string } {
  const [line = ""] = LINE.exec(source) ?? [];
  return { start: 0, end: line.length, text: place ? `%%on ${place}\n` : "" };
}

/** The places that a cell can run on: all ranks of each mesh, and `also`. */
export function placesOf(state: ClusterState, also: readonly string[] = []): string[] {
  const names = Object.values(state.meshes).filter((mesh) => !mesh.stopped && !mesh.inner).map((mesh) => mesh.name);
  return [...new Set([...names, ...also.filter(Boolean)])];
}

function rememberedIn(cell: Cell): string {
  const metadata = cell.model.getMetadata("monarch") as { on?: unknown } | undefined;
  return typeof metadata?.on === "string" ? metadata.on : "";
}

/** Makes a cell run on a place: "" is the kernel. */
export function runOn(cell: Cell, place: string): void {
  const shared = cell.model.sharedModel;
  const { start, end, text } = editFor(shared.getSource(), place);
  shared.updateSource(start, end, text);
  if (place) cell.model.setMetadata("monarch", { on: place });
}

/** Asks for the place of a cell, and sets it; works by keys alone. */
export async function askWhere(cell: Cell, state: ClusterState): Promise<void> {
  const current = placeIn(cell.model.sharedModel.getSource());
  if (current === null) return;
  const places = placesOf(state, [current, rememberedIn(cell)]);
  const answer = await InputDialog.getItem({
    title: say`Where does this cell run?`,
    label: say`A mesh, or some of its ranks: workers gpus=0-1`,
    items: [KERNEL, ...places],
    current: current || places[0] || KERNEL,
    editable: true,
  });
  if (!answer.button.accept) return;
  const place = (answer.value ?? "").trim();
  runOn(cell, place === KERNEL ? "" : place);
}

/** The choice in the toolbar of a cell. */
export class OnChoice extends Widget {
  constructor(
    private _cell: Cell,
    private _front: Front,
  ) {
    super();
    this.addClass("mnb-on-cell");
    this.node.append(this._select);
    this._select.addEventListener("change", () => this._choose(this._select.value));
    _cell.model.contentChanged.connect(this._draw, this);
    _front.changed.connect(this._follow, this);
    this._follow();
  }

  override dispose(): void {
    if (this.isDisposed) return;
    this._unwatch?.();
    this._cell.model?.contentChanged.disconnect(this._draw, this);
    this._front.changed.disconnect(this._follow, this);
    super.dispose();
  }

  protected override onAfterAttach(): void {
    this._follow();
  }

  private get _connection(): ReturnType<Front["of"]> {
    let above: Widget | null = this._cell;
    while (above && !this._front.of(above)) above = above.parent;
    return above && this._front.of(above);
  }

  private _follow(): void {
    this._unwatch?.();
    this._unwatch = this._connection?.cluster.watch((patch) => isStructural(patch) && this._draw()) ?? null;
    this._draw();
  }

  private _draw(): void {
    const connection = this._connection;
    const model = this._cell.model;
    const state = connection && phaseOf(connection.facts) === "live" ? connection.cluster.state : null;
    const place = model?.type === "code" ? placeIn(model.sharedModel.getSource()) : null;
    const places = state ? placesOf(state, [place ?? "", rememberedIn(this._cell)]) : [];
    this.setHidden(!state || model?.type !== "code" || (!places.length && !place));
    if (this.isHidden) return;
    this._select.disabled = place === null;
    this._select.title = place === null ? say`the first line of this cell says how it runs` : place ? say`runs on ${place}` : say`runs in the kernel`;
    const offered = JSON.stringify(places);
    if (offered !== this._offered) this._select.replaceChildren(...[KERNEL, ...places, OTHER].map((value) => h("option", { value, text: value === KERNEL ? say`kernel` : value === OTHER ? say`ranks…` : value })));
    this._offered = offered;
    this._select.value = place || KERNEL;
    this._select.classList.toggle("mnb-on-ranks", Boolean(place));
  }

  private _choose(target: string): void {
    const state = this._connection?.cluster.state;
    if (target === OTHER && state) void askWhere(this._cell, state).then(() => this._draw());
    else runOn(this._cell, target === KERNEL ? "" : target);
  }

  private _offered = "";
  private _select = h("select", { "aria-label": say`where this cell runs` });
  private _unwatch: (() => void) | null = null;
}

/** Adds the choice to the toolbars of cells. */
export function offerInCells(registry: IToolbarWidgetRegistry, front: Front): void {
  registry.addFactory<Cell & Widget>("Cell", "monarch-on", (cell) => new OnChoice(cell, front));
}

/** The active cell of a notebook, if it is code. */
export function activeCodeOf(notebook: NotebookPanel | null): Cell | null {
  const cell = notebook?.content.activeCell ?? null;
  return cell?.model.type === "code" ? cell : null;
}
