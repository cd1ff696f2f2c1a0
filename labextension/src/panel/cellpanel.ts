// The panel as a display in a cell, for pages without a side panel: the same tree, actions and sections.

import type { Cluster } from "../cluster/client";
import { h, setText } from "../page/dom";
import { eachFrame } from "../page/frames";
import { say } from "../page/language";
import { clock } from "../page/words";
import type { View } from "../views/view";
import { InCell } from "./incell";
import { keepOpen, openSections } from "./open";
import { Parts } from "./parts";
import type { Section } from "./sections";
import { summaryOf } from "./summary";
import { targetOf } from "./tree";

import "./panel.css";
import "./cellpanel.css";

/** `code`: whether cells can do what the panel does; marimo has no magics. */
export interface PanelOptions {
  code?: boolean;
}

export const panelView: View<PanelOptions> = (cluster, root, options) => {
  const panel = new CellPanel(cluster, root, options);
  return () => panel.end();
};

class CellPanel {
  constructor(
    private _cluster: Cluster,
    root: HTMLElement,
    { code = true }: PanelOptions,
  ) {
    root.classList.add("mnb-cellpanel");
    this._acting = new InCell(_cluster, root, { code, show: (what, on) => this._parts.show(what, on) });
    const selected = (): ReturnType<typeof targetOf> | null => {
      const { row } = this._parts.meshes.view;
      return row && targetOf(row);
    };
    this._parts = new Parts(
      this._acting.actions,
      {
        menu: (x, y) => {
          const on = selected();
          if (on) this._acting.menu(on.uid, on.ranks, x, y);
        },
        key: (event) => {
          const on = selected();
          return on !== null && this._acting.key(event, on.uid, on.ranks);
        },
        area: () => root.closest<HTMLElement>(".jp-Notebook"),
        open: (section) => {
          this._folds.get(section)?.setAttribute("open", "");
          section.shown = true;
        },
      },
      code,
    );
    this._spawn.hidden = !code;
    this._spawn.addEventListener("click", () => void this._acting.actions.spawn());
    root.append(h("div", { class: "mnb-top mnb-wrap" }, h("span", {}, h("b", { text: "Monarch" }), " ", this._summary), this._status, this._spawn), this._note, this._field, this._acting.element);
    const open = openSections();
    for (const section of this._parts.all) this._add(section, open.has(section.id));
    root.addEventListener("keydown", (event) => this._escape(event));
    this._unwatch = _cluster.watch(() => this._frames.soon());
    this._draw();
  }

  end(): void {
    this._unwatch();
    this._frames.cancel();
    for (const section of this._folds.keys()) section.shown = false;
  }

  private _add(section: Section, open: boolean): void {
    const label = h("span", { text: section.label });
    const fold = h("details", { class: "mnb-fold", open }, h("summary", {}, label), section.node);
    section.renamed = (text) => setText(label, text);
    section.cluster = this._cluster;
    this._folds.set(section, fold);
    this._field.append(fold);
    section.shown = open;
    fold.addEventListener("toggle", () => {
      section.shown = fold.open;
      keepOpen([...this._folds].flatMap(([{ id }, { open }]) => (open ? [id] : [])));
    });
  }

  /** Gives the keys to the tree. */
  private _escape(event: KeyboardEvent): void {
    const { meshes } = this._parts;
    if (event.key !== "Escape" || event.defaultPrevented || meshes.node.contains(document.activeElement)) return;
    event.stopPropagation();
    meshes.focus();
  }

  private _draw(): void {
    const { state, live } = this._cluster;
    setText(this._summary, summaryOf(state).text);
    setText(this._status, live ? "" : say`state at ${clock(this._cluster.now())}`);
    this._spawn.disabled = !live;
    this._note.hidden = Object.keys(state.meshes).length > 0;
    this._parts.count(state);
  }

  private _acting: InCell;
  private _field = h("div", { class: "mnb-folds" });
  private _folds = new Map<Section, HTMLDetailsElement>();
  private _frames = eachFrame(() => this._draw());
  private _note = h("div", { class: "mnb-dim", text: say`No processes yet: ${"%mesh workers gpus=4"} starts four on this machine.` });
  private _parts: Parts;
  private _spawn = h("button", { class: "mnb-b", type: "button", text: say`Spawn…`, title: say`make a mesh of processes` });
  private _status = h("span", { class: "mnb-status mnb-dim", role: "status" });
  private _summary = h("span", { class: "mnb-dim" });
  private _unwatch: () => void;
}
