// Transfers of bytes: a matrix of the processes, from rows to columns, and a table of the routes.

import type { Transfer } from "../cluster/state";
import { h, tableHead } from "../page/dom";
import { eachFrame } from "../page/frames";
import { clock, plural } from "../page/words";
import { say } from "../page/language";
import type { View } from "./view";

import "./transfers.css";

const MOST = 16; // processes in the matrix
const columns = (): string[] => [say`source`, say`target`, say`mover`, say`moved`, say`transfers`, say`rate`];
const nothing = (): string => say`no transfers between processes yet: see monarch.rdma`;

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

/** Bytes in three digits, as networks and `monarch.rdma.transfers()` count them: in powers of ten. */
function size(count: number): string {
  let [value, unit] = [count, 0];
  while (value >= 1000 && unit < UNITS.length - 1) [value, unit] = [value / 1000, unit + 1];
  return `${unit ? Number(value.toPrecision(3)) : value} ${UNITS[unit]}`;
}

/** `transfers` holds the transfers at the time of the display. */
export interface TransferOptions {
  transfers?: Record<string, Transfer>;
  /** Shows current transfers only, as in the panel; in a cell, the last state of what has ended stays. */
  current?: boolean;
}

export const transferView: View<TransferOptions> = (cluster, root, options) => {
  root.classList.add("mnb-transfers");
  let written = "";
  const draw = (): void => {
    const transfers = cluster.live ? cluster.state.transfers : (options.transfers ?? cluster.state.transfers);
    const now = JSON.stringify(transfers);
    if (now === written) return;
    const over = cluster.live && !options.current && written.length > 2 && now === "{}";
    written = now;
    root.classList.toggle("mnb-over", over);
    if (over) root.prepend(h("div", { class: "mnb-over-since", role: "status", text: say`all processes ended at ${clock(cluster.now())}; this is their last state` }));
    else root.replaceChildren(...drawn(Object.values(transfers)));
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
  const routes = all.filter((transfer) => transfer.mover).sort((a, b) => b.bytes - a.bytes);
  const offered = all.filter((transfer) => !transfer.mover).sort((a, b) => b.bytes - a.bytes);
  if (!all.length) return [h("div", { class: "mnb-dim", text: nothing() })];
  const total = routes.reduce((sum, route) => sum + route.bytes, 0);
  const rate = routes.reduce((sum, route) => sum + (route.rate ?? 0), 0);
  const facts = [plural(routes.length, "route"), size(total), rate ? `${size(rate)}/s now` : "idle"].join(" · ");
  const parts: HTMLElement[] = [h("div", { class: "mnb-top" }, h("span", {}, h("b", { text: say`Transfers` }), h("span", { class: "mnb-dim", text: ` · ${facts}` })))];
  const names = [...new Set(routes.flatMap((route) => [route.from, route.to ?? ""]))].sort();
  if (names.length > 1 && names.length <= MOST) parts.push(legend(routes), matrix(names, routes));
  if (routes.length) parts.push(tableOf(columns(), routes.map(rowOf)));
  if (offered.length) parts.push(tableOf([say`registered memory of`, say`buffers`, say`bytes`], offered.map(({ from, regions, bytes }) => [from, String(regions ?? 0), size(bytes)])));
  return parts;
}

function rowOf(route: Transfer): (string | HTMLElement)[] {
  const mover = h("span", {}, h("i", { class: "mnb-mover", "data-mover": route.mover }), route.mover);
  return [route.from, route.to ?? "", mover, size(route.bytes), String(route.transfers ?? 0), route.rate ? `${size(route.rate)}/s` : ""];
}

function legend(routes: readonly Transfer[]): HTMLElement {
  const movers = [...new Set(routes.map((route) => route.mover))].sort();
  return h("div", { class: "mnb-dim mnb-legend" }, say`from rows to columns, by `, ...movers.map((mover) => h("span", {}, h("i", { class: "mnb-mover", "data-mover": mover }), mover)));
}

function matrix(names: readonly string[], routes: readonly Transfer[]): HTMLElement {
  const most = Math.max(1, ...routes.map((route) => route.bytes));
  const byPair = new Map(routes.map((route) => [JSON.stringify([route.from, route.to]), route] as const).reverse());
  const number = (index: number): HTMLElement => h("span", { class: "mnb-number", "aria-hidden": "true", text: String(index + 1) }); // in place of a name without room
  const head = h("tr", {}, h("td"), ...names.map((name, column) => h("th", { scope: "col", title: name }, number(column), h("span", { class: "mnb-name", text: name }))));
  const rows = names.map((from, row) => {
    const cells = names.map((to) => {
      const route = byPair.get(JSON.stringify([from, to]));
      if (!route) return h("td");
      const share = 0.12 + 0.5 * Math.sqrt(route.bytes / most);
      const title = `${from} → ${to}: ${size(route.bytes)} by ${route.mover}${route.rate ? `, ${size(route.rate)}/s` : ""}`;
      return h("td", { title, "data-mover": route.mover, "data-moving": Boolean(route.rate), style: `--mnb-share: ${Math.round(100 * share)}%` }, h("span", { text: size(route.bytes) }));
    });
    return h("tr", {}, h("th", { scope: "row", title: from }, number(row), from), ...cells);
  });
  return h("div", { class: "mnb-scroll" }, h("table", { class: "mnb-matrix" }, h("thead", {}, head), h("tbody", {}, ...rows)));
}

function tableOf(columns: readonly string[], rows: readonly (string | HTMLElement)[][]): HTMLElement {
  const body = rows.map((row) => h("tr", {}, ...row.map((cell) => h("td", typeof cell === "string" ? { title: cell } : {}, cell))));
  return h("div", { class: "mnb-scroll" }, h("table", { class: "mnb-list" }, tableHead(columns), h("tbody", {}, ...body)));
}
