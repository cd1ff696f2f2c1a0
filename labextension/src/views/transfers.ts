// Which way bytes go: a matrix of the processes, from rows to columns, and every way in words.

import type { Transfer } from "../cluster/state";
import { eachFrame, h } from "../page/dom";
import { clock, plural } from "../page/words";
import type { View } from "./view";

import "./transfers.css";

const MOST = 16; // processes in the matrix
const COLUMNS = ["source", "target", "mover", "moved", "transfers", "at the moment"];
const NOTHING = "no transfers between processes yet: see monarch.rdma";

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

/** Bytes in three digits, as networks and `monarch.rdma.transfers()` count them: in powers of ten. */
function size(count: number): string {
  let [value, unit] = [count, 0];
  while (value >= 1000 && unit < UNITS.length - 1) [value, unit] = [value / 1000, unit + 1];
  return `${unit ? Number(value.toPrecision(3)) : value} ${UNITS[unit]}`;
}

/** `transfers` is what there was at first. */
export interface TransferOptions {
  transfers?: Record<string, Transfer>;
  /** Only what there is now, as in the panel; in a cell what has ended stays as it was last. */
  current?: boolean;
}

export const transferView: View<TransferOptions> = (cluster, root, options) => {
  root.classList.add("mnb-transfers");
  let written = "";
  const draw = (): void => {
    const known = cluster.live ? cluster.state.transfers : (options.transfers ?? cluster.state.transfers);
    const now = JSON.stringify(known);
    if (now === written) return;
    const over = cluster.live && !options.current && written.length > 2 && now === "{}";
    written = now;
    root.classList.toggle("mnb-over", over);
    if (over) root.prepend(h("div", { class: "mnb-over-since", role: "status", text: `all of it ended at ${clock(cluster.now())}; this is the last state` }));
    else root.replaceChildren(...drawn(Object.values(known)));
  };
  const frames = eachFrame(draw);
  let unsubscribe: (() => void) | undefined;
  const unwatch = cluster.watch((patch) => {
    if (cluster.live) unsubscribe ??= cluster.subscribe({ topic: "transfers" }, () => undefined);
    if (patch === null || patch.transfers) frames.soon();
  });
  draw();
  return () => {
    unwatch();
    unsubscribe?.();
    frames.cancel();
    root.replaceChildren();
  };
};

function drawn(all: readonly Transfer[]): HTMLElement[] {
  const ways = all.filter((one) => one.mover).sort((a, b) => b.bytes - a.bytes);
  const offered = all.filter((one) => !one.mover).sort((a, b) => b.bytes - a.bytes);
  if (!all.length) return [h("div", { class: "mnb-dim", text: NOTHING })];
  const total = ways.reduce((sum, way) => sum + way.bytes, 0);
  const rate = ways.reduce((sum, way) => sum + (way.rate ?? 0), 0);
  const facts = [plural(ways.length, "way"), size(total), rate ? `${size(rate)}/s now` : "nothing moves now"].join(" · ");
  const parts: HTMLElement[] = [h("div", { class: "mnb-top" }, h("span", {}, h("b", { text: "Transfers" }), h("span", { class: "mnb-dim", text: ` · ${facts}` })))];
  const names = [...new Set(ways.flatMap((way) => [way.from, way.to ?? ""]))].sort();
  if (names.length > 1 && names.length <= MOST) parts.push(legend(ways), matrix(names, ways));
  if (ways.length) parts.push(tableOf(COLUMNS, ways.map(rowOf)));
  if (offered.length) parts.push(tableOf(["memory on offer of", "buffers", "bytes"], offered.map((one) => [one.from, String(one.regions ?? 0), size(one.bytes)])));
  return parts;
}

function rowOf(way: Transfer): (string | HTMLElement)[] {
  const mover = h("span", {}, h("i", { class: "mnb-mover", "data-mover": way.mover }), way.mover);
  return [way.from, way.to ?? "", mover, size(way.bytes), String(way.transfers ?? 0), way.rate ? `${size(way.rate)}/s` : ""];
}

function legend(ways: readonly Transfer[]): HTMLElement {
  const movers = [...new Set(ways.map((way) => way.mover))].sort();
  return h("div", { class: "mnb-dim mnb-legend" }, "from rows to columns, by ", ...movers.map((mover) => h("span", {}, h("i", { class: "mnb-mover", "data-mover": mover }), mover)));
}

function matrix(names: readonly string[], ways: readonly Transfer[]): HTMLElement {
  const most = Math.max(1, ...ways.map((way) => way.bytes));
  const known = new Map(ways.map((way) => [JSON.stringify([way.from, way.to]), way] as const).reverse());
  const number = (at: number): HTMLElement => h("span", { class: "mnb-number", "aria-hidden": "true", text: String(at + 1) }); // in place of a name where there is no room
  const head = h("tr", {}, h("th"), ...names.map((name, at) => h("th", { scope: "col", title: name }, number(at), h("span", { class: "mnb-name", text: name }))));
  const rows = names.map((from, at) => {
    const cells = names.map((to) => {
      const way = known.get(JSON.stringify([from, to]));
      if (!way) return h("td");
      const share = 0.12 + 0.5 * Math.sqrt(way.bytes / most);
      const title = `${from} → ${to}: ${size(way.bytes)} by ${way.mover}${way.rate ? `, ${size(way.rate)}/s` : ""}`;
      return h("td", { title, "data-mover": way.mover, "data-moving": Boolean(way.rate), style: `--mnb-share: ${Math.round(100 * share)}%` }, h("span", { text: size(way.bytes) }));
    });
    return h("tr", {}, h("th", { scope: "row", title: from }, number(at), from), ...cells);
  });
  return h("div", { class: "mnb-scroll" }, h("table", { class: "mnb-matrix" }, h("thead", {}, head), h("tbody", {}, ...rows)));
}

function tableOf(columns: readonly string[], rows: readonly (string | HTMLElement)[][]): HTMLElement {
  const head = h("tr", {}, ...columns.map((text) => h("th", { text, scope: "col" })));
  const body = rows.map((row) => h("tr", {}, ...row.map((cell) => h("td", typeof cell === "string" ? { title: cell } : {}, cell))));
  return h("div", { class: "mnb-scroll" }, h("table", { class: "mnb-list" }, h("thead", {}, head), h("tbody", {}, ...body)));
}
