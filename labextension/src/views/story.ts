// What is known of a failure, in words.

import type { ClusterState, Failure, Reported } from "../cluster/state";
import { clock, duration, reportOf } from "../page/words";
import type { Fact } from "./details";

const PIDS = 16; // that are named one by one

/** What happened, where and when, who was told, what to do. */
export function storyOf(cluster: { state: Pick<ClusterState, "hosts"> }, failure: Failure): Fact[] {
  const late = (failure.detected ?? failure.at) - failure.at;
  const facts: Fact[] = [
    ["what", failure.oom ? "the host killed it because it ran out of memory" : ""],
    ["where", placeOf(cluster.state.hosts, failure)],
    ["since", `${clock(failure.at)}${late >= 1 ? `, noticed ${duration(late)} later` : ""}`],
    ...(failure.texts ?? []),
    ["reported", reportsOf(failure.told ?? []).join("; then ")],
    ["affects", (failure.also ?? []).join(", ")],
    ["next", (failure.state === "open" && failure.next) || ""],
  ];
  return facts.filter(([, value]) => value);
}

/** What the ranks wrote last, equal lines once: [whose, lines] each. */
export function tailsOf(failure: Pick<Failure, "lines" | "last_lines" | "ranks">): [whose: string, lines: string[]][] {
  if (failure.lines) return failure.lines.map(([where, lines]) => [`last lines of ${where}`, lines]);
  return failure.last_lines ? [[failure.ranks.length > 1 ? "last lines of each" : "last lines", failure.last_lines]] : [];
}

function placeOf(hosts: ClusterState["hosts"], failure: Failure): string {
  const { host = "", pid, processes = host || pid ? [[host, pid ? [pid] : []] as [string, number[]]] : [] } = failure;
  return processes
    .map(([host, pids]) => [host && `host ${hosts[host]?.name ?? host}`, pids.length > 0 && pidsOf(pids)].filter(Boolean).join(", "))
    .join("; ");
}

function pidsOf(pids: readonly number[]): string {
  const more = pids.length > PIDS ? ` and ${pids.length - PIDS} more` : "";
  return `${pids.length === 1 ? "pid" : "pids"} ${pids.slice(0, PIDS).join(", ")}${more}`;
}

/** A call may have raised the failure of some ranks before the others were shown: then only the call is named. */
function reportsOf(reports: readonly Reported[]): string[] {
  const called = reports.some(([who]) => who === "a call");
  return reports.filter(([who]) => !(called && who === "<root>")).map(reportOf);
}
