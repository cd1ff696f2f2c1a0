// The failure view: a time line, and a list with the facts of each failure and its buttons.

import type { Cluster } from "../cluster/client";
import type { Failure, Patch } from "../cluster/state";
import { h, setText } from "../page/dom";
import { eachFrame } from "../page/frames";
import { clock, duration, endOf, plural } from "../page/words";
import { say } from "../page/language";
import { Entry } from "./failure";
import type { View } from "./view";

import "./failures.css";

const TICK_MS = 5000; // of the time line

/**
 * All failures, those of `mesh`, or one, `failure`; with `bar` folded, above an error. `raised` is an error of an endpoint
 * in the form of a failure, which is not in the state of the cluster.
 */
export interface FailureOptions {
  mesh?: string;
  failure?: string;
  raised?: Failure;
  bar?: boolean;
}

type Named = [id: string, failure: Failure];

export const failureView: View<FailureOptions> = (cluster, root, options) => {
  const view = new FailureView(cluster, root, options);
  return () => view.end();
};

class FailureView {
  constructor(
    private _cluster: Cluster,
    root: HTMLElement,
    private _options: FailureOptions,
  ) {
    this._single = Boolean(_options.failure || _options.raised);
    const top = h("div", { class: "mnb-top", hidden: this._single }, h("span", {}, h("b", { text: say`Failures` }), " ", this._facts), this._status);
    root.append(top, this._line, this._list);
    this._draw();
    this._unwatch = _cluster.watch((patch) => this._changed(patch), ["failures", "hosts", ...(_options.mesh ? (["meshes"] as const) : [])]);
    this._ticking = setInterval(() => !this._line.hidden && this._drawLine(this._failures()), TICK_MS);
  }

  end(): void {
    this._unwatch();
    clearInterval(this._ticking);
    this._frames.cancel();
  }

  /** The displayed failures, the newest first. */
  private _failures(): Named[] {
    const { raised, failure: id, mesh: uid } = this._options;
    if (raised) return [["raised", raised]];
    const { failures, meshes } = this._cluster.state;
    const near = (failure: Failure): boolean => !uid || failure.mesh === uid || meshes[failure.mesh]?.on === uid;
    return Object.entries(failures)
      .filter(([otherId, failure]) => (id ? otherId === id : near(failure)))
      .sort(([, a], [, b]) => b.at - a.at);
  }

  private _draw(): void {
    const failures = this._failures();
    const open = failures.filter(([, failure]) => failure.state === "open").length;
    setText(this._facts, failures.length ? `· ${plural(failures.length, "failure")}, ${open ? say`${open} not healed` : say`all healed or stopped`}` : say`· none so far`);
    setText(this._status, this._cluster.live ? "" : say`state at ${clock(this._cluster.now())}`);
    this._drawLine(failures);
    const ids = new Set(failures.map(([id]) => id));
    for (const [id, entry] of this._entries)
      if (!ids.has(id)) {
        entry.element.remove();
        this._entries.delete(id);
      }
    for (const [index, [id, failure]] of failures.entries()) {
      const entry = this._entries.get(id) ?? this._add(id, failure, index);
      entry.update(failure);
      if (this._list.children[index] !== entry.element) this._list.insertBefore(entry.element, this._list.children[index] ?? null);
    }
  }

  private _add(id: string, failure: Failure, position: number): Entry {
    const opened = this._single ? !this._options.bar : position === 0 && !this._entries.size;
    const entry = new Entry(this._cluster, failure, { opened, bar: Boolean(this._options.bar) });
    this._entries.set(id, entry);
    return entry;
  }

  private _drawLine(failures: readonly Named[]): void {
    const line = this._line;
    line.hidden = this._single || failures.length < 2;
    if (line.hidden) return;
    const now = this._cluster.now();
    const span = Math.max(60, now - Math.min(...failures.map(([, failure]) => failure.at))) * 1.03;
    const percent = (time: number): number => (100 * (time - (now - span))) / span;
    line.setAttribute("aria-label", say`time line, the last ${duration(span)}`);
    line.replaceChildren(
      h("span", { class: "mnb-dim", style: "left:0", text: clock(now - span) }),
      h("span", { class: "mnb-dim", style: "right:0", text: this._cluster.live ? say`now` : clock(now) }),
      ...failures.map(([id, failure]) => {
        const [from, to] = [percent(failure.at), percent(failure.ended ?? now)];
        const label = `${clock(failure.at)} ${failure.title}, ${endOf(failure.state)}`;
        return h("button", {
          type: "button",
          class: "mnb-span",
          "data-end": failure.state,
          title: label,
          "aria-label": label,
          style: `left:${from}%;width:max(7px,${to - from}%)`,
          onclick: () => this._entries.get(id)?.open(),
        });
      }),
    );
  }

  private _changed(patch: Patch | null): void {
    if (!patch || patch.failures || patch.hosts) this._frames.soon();
  }

  private _entries = new Map<string, Entry>();
  private _facts = h("span", { class: "mnb-dim" });
  private _frames = eachFrame(() => this._draw());
  private _line = h("div", { class: "mnb-timeline", role: "group", hidden: true });
  private _list = h("div", { class: "mnb-failures", role: "list" });
  private _single: boolean;
  private _status = h("span", { class: "mnb-status mnb-dim", role: "status" });
  private _ticking: ReturnType<typeof setInterval>;
  private _unwatch: () => void;
}
