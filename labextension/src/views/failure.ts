// One failure: a line with what can be done, and its story below.

import type { Cluster } from "../cluster/client";
import type { Failure } from "../cluster/state";
import { askButton, copyButton, messageLine } from "../page/buttons";
import { h, say, sayFacts } from "../page/dom";
import { cellOf, runAgain } from "../page/notebook";
import { clock, duration, endOf } from "../page/words";
import { postMortem } from "./postmortem";
import { storyOf, tailsOf } from "./story";

const OPENED = new Set(["exception", "init", "unhandled", "raised"]); // causes that leave frames to look into

export class Entry {
  readonly element: HTMLElement;

  constructor(
    private _cluster: Cluster,
    private _failure: Failure,
    private _options: { opened: boolean; bar: boolean },
  ) {
    const { message, tell } = messageLine();
    const heal = async (): Promise<object> => _cluster.request("heal", { mesh: this._failure.mesh });
    this._heal = askButton("Heal", heal, tell, { class: "mnb-b mnb-main", title: "start the failed ranks again" });
    this._retry = askButton(
      "Retry",
      async () => {
        if (this._failure.state === "open") await heal();
        runAgain(this._retry);
      },
      tell,
      { title: "heal, and run this cell again" },
    );
    const report = copyButton("Copy report", () => reportOf(this._failure));
    this._toggle.append(this._title, this._mark);
    this._story.append(this._facts, this._written);
    this._show(_options.opened);
    this._toggle.addEventListener("click", () => this._show(this._story.hidden));
    this._look.addEventListener("click", () => this._lookInto());
    const buttons = h("span", { class: "mnb-buttons" }, this._heal, this._retry, this._look, report);
    this.element = h("div", { class: "mnb-failure", role: "listitem" }, h("div", { class: "mnb-fail-top" }, this._toggle, this._when, buttons), message, this._story);
  }

  open(): void {
    this._show(true);
    this.element.scrollIntoView({ block: "nearest" });
    this._toggle.focus();
  }

  update(failure: Failure): void {
    this._failure = failure;
    const { live } = this._cluster;
    if (this.element.dataset.end !== failure.state) this.element.dataset.end = failure.state;
    say(this._title, failure.title);
    this._write();
    say(this._mark, endOf(failure.state));
    say(this._when, `${clock(failure.at)}${failure.ended ? `, ${endOf(failure.state)} after ${duration(failure.ended - failure.at)}` : ""}`);
    this._heal.hidden = failure.state !== "open" || !live;
    this._retry.hidden = !this._options.bar || !live || failure.state === "healing" || !cellOf(this.element);
    this._look.hidden = !OPENED.has(failure.cause ?? "") || failure.kind !== "actors" || !failure.ranks.length || !live;
    sayFacts(this._facts, storyOf(this._cluster, failure));
  }

  private _show(open: boolean): void {
    this._story.hidden = !open;
    this._toggle.setAttribute("aria-expanded", String(open));
  }

  /** Opens the frames where it was raised, or goes on in those that are open. */
  private _lookInto(): void {
    this._show(true);
    if (!this._frames) {
      const { mesh, ranks, call } = this._failure;
      this._frames = postMortem(this._cluster, { mesh, ranks: ranks.slice(0, 1), call }, () => (this._frames = null));
      this._story.append(this._frames);
    }
    this._frames.querySelector("input")?.focus();
  }

  /** Writes the traceback and the last lines, where they have changed: what somebody has opened or scrolled stays so. */
  private _write(): void {
    const { traceback } = this._failure;
    const tails = tailsOf(this._failure);
    const contents = JSON.stringify([traceback, tails]);
    if (contents === this._contents) return;
    this._contents = contents;
    this._written.replaceChildren(
      ...(traceback ? [h("pre", { class: "mnb-trace", tabindex: "0", text: traceback })] : []),
      ...tails.map(([whose, lines], at) =>
        h("details", { open: at === 0 }, h("summary", { class: "mnb-dim", text: whose }), h("pre", { class: "mnb-lines mnb-short", tabindex: "0", text: lines.join("\n") })),
      ),
    );
  }

  private _contents = "";
  private _facts = h("div", { class: "mnb-facts" });
  private _frames: HTMLElement | null = null;
  private _heal: HTMLButtonElement;
  private _look = h("button", { class: "mnb-b", type: "button", text: "Post-mortem", title: "open the frames of the error" });
  private _mark = h("span", { class: "mnb-end" });
  private _retry: HTMLButtonElement;
  private _story = h("div", { class: "mnb-story" });
  private _title = h("b");
  private _toggle = h("button", { class: "mnb-toggle", type: "button" });
  private _when = h("span", { class: "mnb-dim mnb-when" });
  private _written = h("div");
}

function reportOf({ title, report = "" }: Failure): string {
  return report.startsWith(title) ? report : `${title}\n\n${report}`;
}
