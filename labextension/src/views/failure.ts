// One failure: a line with its buttons, and its facts below.

import type { Cluster } from "../cluster/client";
import type { ClusterState, Failure, Reported } from "../cluster/state";
import { askButton, copyButton, messageLine } from "../page/buttons";
import { h, setText, setFacts } from "../page/dom";
import { cellOf, runAgain } from "../page/notebook";
import { clock, duration, endOf, reportOf as reporterText } from "../page/words";
import { say } from "../page/language";
import type { Fact } from "./details";
import { postMortem } from "./postmortem";

const PIDS = 16; // named individually
const OPENED = new Set(["exception", "init", "unhandled", "raised"]); // causes that leave frames to inspect

export class Entry {
  readonly element: HTMLElement;

  constructor(
    private _cluster: Cluster,
    private _failure: Failure,
    private _options: { opened: boolean; bar: boolean },
  ) {
    const { message, report } = messageLine();
    const heal = async (): Promise<object> => _cluster.request("heal", { mesh: this._failure.mesh });
    this._heal = askButton(say`Heal`, heal, report, { class: "mnb-b mnb-main", title: say`start the failed ranks again` });
    this._retry = askButton(
      say`Retry`,
      async () => {
        if (this._failure.state === "open") await heal();
        runAgain(this._retry);
      },
      report,
      { title: say`heal, and run this cell again` },
    );
    const copyReport = copyButton(say`Copy report`, () => reportOf(this._failure));
    this._toggle.append(this._title, this._mark);
    this._details.append(this._facts, this._written);
    this._show(_options.opened);
    this._toggle.addEventListener("click", () => this._show(this._details.hidden));
    this._look.addEventListener("click", () => this._lookInto());
    const buttons = h("span", { class: "mnb-buttons" }, this._heal, this._retry, this._look, copyReport);
    this.element = h("div", { class: "mnb-failure", role: "listitem" }, h("div", { class: "mnb-fail-top" }, this._toggle, this._when, buttons), message, this._details);
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
    setText(this._title, failure.title);
    this._write();
    setText(this._mark, endOf(failure.state));
    setText(this._when, `${clock(failure.at)}${failure.ended ? say`, ${endOf(failure.state)} after ${duration(failure.ended - failure.at)}` : ""}`);
    this._heal.hidden = failure.state !== "open" || !live;
    this._retry.hidden = !this._options.bar || !live || failure.state === "healing" || !cellOf(this.element);
    this._look.hidden = !OPENED.has(failure.cause ?? "") || failure.kind !== "actors" || !failure.ranks.length || !live;
    setFacts(this._facts, factsOfFailure(this._cluster, failure));
  }

  private _show(open: boolean): void {
    this._details.hidden = !open;
    this._toggle.setAttribute("aria-expanded", String(open));
  }

  /** Opens the frames where it was raised, or returns to open ones. */
  private _lookInto(): void {
    this._show(true);
    if (!this._frames) {
      const { mesh, ranks, call } = this._failure;
      this._frames = postMortem(this._cluster, { mesh, ranks: ranks.slice(0, 1), call }, () => (this._frames = null));
      this._details.append(this._frames);
    }
    this._frames.querySelector("input")?.focus();
  }

  /** Writes the traceback and the last lines, if they have changed, keeping what is opened or scrolled. */
  private _write(): void {
    const { traceback } = this._failure;
    const tails = tailsOf(this._failure);
    const contents = JSON.stringify([traceback, tails]);
    if (contents === this._contents) return;
    this._contents = contents;
    this._written.replaceChildren(
      ...(traceback ? [h("pre", { class: "mnb-trace", tabindex: "0", text: traceback })] : []),
      ...tails.map(([whose, lines], index) =>
        h("details", { open: index === 0 }, h("summary", { class: "mnb-dim", text: whose }), h("pre", { class: "mnb-lines mnb-short", tabindex: "0", text: lines.join("\n") })),
      ),
    );
  }

  private _contents = "";
  private _facts = h("div", { class: "mnb-facts" });
  private _frames: HTMLElement | null = null;
  private _heal: HTMLButtonElement;
  private _look = h("button", { class: "mnb-b", type: "button", text: say`Post-mortem`, title: say`open the frames of the error` });
  private _mark = h("span", { class: "mnb-end" });
  private _retry: HTMLButtonElement;
  private _details = h("div", { class: "mnb-failure-details" });
  private _title = h("b");
  private _toggle = h("button", { class: "mnb-toggle", type: "button" });
  private _when = h("span", { class: "mnb-dim mnb-when" });
  private _written = h("div");
}

function reportOf({ title, report = "" }: Failure): string {
  return report.startsWith(title) ? report : `${title}\n\n${report}`;
}

/** The facts of a failure: cause, place, time, reports and remedy. */
export function factsOfFailure(cluster: { state: Pick<ClusterState, "hosts"> }, failure: Failure): Fact[] {
  const late = (failure.detected ?? failure.at) - failure.at;
  const facts: Fact[] = [
    ["what", failure.memory ?? ""],
    ["where", placeOf(cluster.state.hosts, failure)],
    ["since", `${clock(failure.at)}${late >= 1 ? say`, noticed ${duration(late)} later` : ""}`],
    ...(failure.texts ?? []),
    ["reported", reportsOf(failure.told ?? []).join("; then ")],
    ["affects", (failure.also ?? []).join(", ")],
    ["next", (failure.state === "open" && failure.next) || ""],
  ];
  return facts.filter(([, value]) => value);
}

/** The last lines of the failed ranks, equal ones once, with their ranks. */
export function tailsOf(failure: Pick<Failure, "lines" | "last_lines" | "ranks">): [whose: string, lines: string[]][] {
  if (failure.lines) return failure.lines.map(([where, lines]) => [say`last lines of ${where}`, lines]);
  return failure.last_lines ? [[failure.ranks.length > 1 ? say`last lines of each` : say`last lines`, failure.last_lines]] : [];
}

function placeOf(hosts: ClusterState["hosts"], failure: Failure): string {
  const { host = "", pid, processes = host || pid ? [[host, pid ? [pid] : []] as [string, number[]]] : [] } = failure;
  return processes
    .map(([host, pids]) => [host && `host ${hosts[host]?.name ?? host}`, pids.length > 0 && pidsOf(pids)].filter(Boolean).join(", "))
    .join("; ");
}

function pidsOf(pids: readonly number[]): string {
  const more = pids.length > PIDS ? say` and ${pids.length - PIDS} more` : "";
  return `${pids.length === 1 ? "pid" : "pids"} ${pids.slice(0, PIDS).join(", ")}${more}`;
}

/** The reports of a failure; without the notebook's own report if a call has raised it. */
function reportsOf(reports: readonly Reported[]): string[] {
  const hasCall = reports.some(([reporter]) => reporter === "a call");
  return reports.filter(([reporter]) => !(hasCall && reporter === "<root>")).map(reporterText);
}
