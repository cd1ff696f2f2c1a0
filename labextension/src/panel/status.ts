// The line in the status bar.

import { ISignal, Signal } from "@lumino/signaling";
import { Widget } from "@lumino/widgets";

import type { Cluster } from "../cluster/client";
import { h, setText } from "../page/dom";
import { eachFrame } from "../page/frames";
import { say } from "../page/language";
import type { Front } from "./front";
import { phaseOf } from "./link";
import { summaryOf } from "./summary";
import { LETTERS } from "./tree";

export class StatusItem extends Widget {
  constructor(
    private _front: Front,
    open: () => void,
  ) {
    super();
    this.addClass("mnb-status-item");
    this._button.addEventListener("click", () => {
      this.announce("", false);
      open();
    });
    this.node.append(this._button);
    _front.changed.connect(this._changed, this);
    this._changed();
  }

  /** Whether there is something to show: the status bar shows and hides its items itself, also when it is drawn anew. */
  get isActive(): boolean {
    return this._active;
  }

  get activeChanged(): ISignal<this, void> {
    return this._activeChanged;
  }

  /** Whether it watches the cluster. */
  set wanted(isWanted: boolean) {
    this._wanted = isWanted;
    this._changed();
  }

  /** Shows another text for a while; "" returns to the cluster. */
  announce(text: string, wrong: boolean): void {
    this._announced = text && { text, wrong };
    this._draw();
  }

  private _changed(): void {
    const { connection } = this._front;
    const cluster = this._wanted ? connection?.cluster ?? null : null;
    if (cluster !== this._cluster) {
      this._unwatch?.();
      this._cluster = cluster;
      this._unwatch = cluster?.watch(() => this._frames.soon()) ?? null;
    }
    this._draw();
  }

  private _draw(): void {
    const live = this._cluster && this._front.connection && phaseOf(this._front.connection.facts) === "live";
    const active = Boolean(live || this._announced);
    if (active !== this._active) {
      this._active = active;
      this._activeChanged.emit();
    }
    if (this._announced) this._write(this._announced.text, this._announced.wrong);
    if (this._announced || !live || !this._cluster) return;
    const { text, failed } = summaryOf(this._cluster.state);
    this._write(text, failed > 0);
  }

  private _write(text: string, wrong: boolean): void {
    setText(this._button, wrong ? `${LETTERS.failed} ${text}` : text);
    this._button.classList.toggle("mnb-wrong", wrong);
    this._button.setAttribute("aria-label", `Monarch: ${text}`);
  }

  private _active = false;
  private _activeChanged = new Signal<this, void>(this);
  private _announced: "" | { text: string; wrong: boolean } = "";
  private _button = h("button", { type: "button", title: say`Monarch: open the panel` });
  private _cluster: Cluster | null = null;
  private _frames = eachFrame(() => this._draw());
  private _unwatch: (() => void) | null = null;
  private _wanted = true;
}
