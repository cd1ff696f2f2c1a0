// Many ranks by their hosts: the summary of each host's ranks.

import { countOf, countsOf, hostNumber, present, procsOf } from "../cluster/ranks";
import type { ClusterState, Counts, Host, Mesh, State } from "../cluster/state";
import { setText } from "../page/dom";
import { clock } from "../page/words";
import { say } from "../page/language";
import type { Part } from "./cells";

/** The least number of ranks for a view by hosts. */
export const HOSTS_FROM = 256;

/** The hosts of a view; its ranks are indices of the view. */
export interface Hosts {
  names: string[];
  /** The host of a rank. */
  of(index: number): number;
  /** The ranks of a host. */
  on(host: number): number[];
  labels: string[];
  sizes: number[];
  /** The shape of the ranks within one host; null where the hosts cut through a dimension. */
  inner: { labels: string[]; sizes: number[] } | null;
}

/** The hosts of the ranks of a view; null if a view by hosts adds nothing. `baseAt` gives the base rank of an index of the view. */
export function hostsOf(state: Pick<ClusterState, "hosts" | "meshes">, mesh: Mesh, labels: string[], sizes: number[], baseAt: (index: number) => number): Hosts | null {
  const procs = procsOf(state, mesh);
  const names = procs?.hosts ?? [];
  if (!procs || names.length < 2) return null;
  const count = countOf(sizes);
  const hostAt = Array.from({ length: count }, (_, index) => hostNumber(procs, baseAt(index)));
  const members = new Map<number, number[]>();
  hostAt.forEach((host, index) => {
    const ranks = members.get(host);
    if (ranks) ranks.push(index);
    else members.set(host, [index]);
  });
  const order = [...members.keys()].sort((a, b) => a - b);
  if (order.length < 2 || order.length === count) return null;
  const position = new Map(order.map((host, place) => [host, place]));
  // Leading dimensions that run over whole hosts name them; the rest are the ranks within one.
  let split = 0;
  while (split < sizes.length && countOf(sizes.slice(0, split)) < order.length) split++;
  const plain = countOf(sizes.slice(0, split)) === order.length && count % order.length === 0;
  return {
    names: order.map((host) => state.hosts[names[host] ?? ""]?.name ?? names[host] ?? "?"),
    of: (index) => position.get(hostAt[index] ?? -1) ?? -1,
    on: (host) => members.get(order[host] ?? -1) ?? [],
    labels: plain ? labels.slice(0, split) : ["hosts"],
    sizes: plain ? sizes.slice(0, split) : [order.length],
    inner: plain ? { labels: labels.slice(split), sizes: sizes.slice(split) } : null,
  };
}

/** A line about those of some hosts that are about to be withdrawn; empty for none. */
export function noticeOf(state: Pick<ClusterState, "hosts">, hosts: readonly string[]): string {
  const going = [...new Set(hosts)].map((id) => state.hosts[id]).filter((host): host is Host => Boolean(host?.notice));
  const [first] = going;
  if (!first) return "";
  const subject = going.length > 1 ? say`${going.length} hosts are` : say`host ${first.name} is`;
  const until = Math.min(...going.map((host) => host.until ?? Number.POSITIVE_INFINITY));
  return say`${subject} about to be taken away (${first.notice})${Number.isFinite(until) ? `, at ${clock(until)}` : ""}`;
}

/** Writes that line, which is hidden while it is empty. */
export function sayNotice(line: HTMLElement, state: Pick<ClusterState, "hosts">, hosts: readonly string[]): void {
  const notice = noticeOf(state, hosts);
  line.hidden = !notice;
  setText(line, notice);
}

export interface Together {
  state: State;
  parts: Part[];
  counts: Counts;
}

/** The look of a group of ranks: its worst state represents it, and failures get half of the parts to be visible. */
export function together(state: Pick<ClusterState, "meshes" | "ranks">, uid: string, indices: readonly number[]): Together {
  const counts = countsOf(state, uid, indices);
  const shares = present(counts).map(([how, count]): Part => [how, Math.max(count, how === "failed" ? indices.length / 2 : 0)]);
  const sum = shares.reduce((total, [, share]) => total + share, 0);
  return { state: shares[0]?.[0] ?? "stopped", parts: shares.map(([how, share]) => [how, share / sum]), counts };
}
