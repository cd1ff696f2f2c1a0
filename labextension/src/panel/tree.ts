// The tree of the panel: mesh → host → process → actor, as rows. The text of a row is created when the row becomes visible.

import { fitting, found } from "../cluster/finding";
import { actorsOn, baseOf, countsOf, hostNumber, indexOfBase, pointOf, present, rankOf, sizeOf } from "../cluster/ranks";
import type { ClusterState, Counts, Mesh, Rank, State } from "../cluster/state";
import { SIGNS, bytes, duration, memoryOf, overText, placeOf, plural, shapeOf, stateWord } from "../page/words";
import { say } from "../page/language";

export type Kind = "mesh" | "actors" | "host" | "proc" | "actor";

export interface Row {
  key: string;
  kind: Kind;
  level: number;
  uid: string;
  /** Of a process or an actor: its index in its mesh. */
  index: number;
  /** Of a host: the indices of its processes, from `from` up to, but not including, `to`. */
  from: number;
  to: number;
  parent: string;
  expandable: boolean;
  expanded: boolean;
  position: number; // among its siblings, from 1
  siblings: number;
}

export interface RowText {
  name: string;
  note: string;
  state: State | "";
  counts: [State, number][];
  /** All of it, to be read aloud. */
  spoken: string;
}

/** The rows whose expansion differs from the default. */
export type Turned = ReadonlySet<string>;

const FEW = 40; // children that are shown by default
const OPENED = 200; // ranks that a query finds and whose hosts are opened for them
export const LETTERS: Readonly<Record<State, string>> = { busy: "●", idle: "○", ...SIGNS } as Record<State, string>;

/** The rows that can be seen, from top to bottom; with a query the matching ones, and their ancestors. */
export function rowsOf(state: ClusterState, turned: Turned, query = ""): Row[] {
  const rows: Row[] = [];
  const roots = Object.entries(state.meshes).filter(([, mesh]) => mesh.kind === "procs" || !mesh.on || !state.meshes[mesh.on]);
  if (query.trim()) roots.forEach(([uid, mesh]) => foundRows(rows, state, turned, uid, mesh, query));
  else roots.forEach(([uid, mesh], index) => meshRows(rows, state, turned, uid, mesh, index + 1, roots.length));
  return rows;
}

function add(rows: Row[], turned: Turned, more: Partial<Row> & Pick<Row, "key" | "kind" | "level" | "uid">, usual: boolean): Row {
  const row: Row = { index: -1, from: 0, to: 0, parent: "", expandable: false, expanded: false, position: 1, siblings: 1, ...more };
  row.expanded = row.expandable && usual !== turned.has(row.key);
  rows.push(row);
  return row;
}

function meshRows(rows: Row[], state: ClusterState, turned: Turned, uid: string, mesh: Mesh, position: number, siblings: number): void {
  const actors = Object.entries(state.meshes).filter(([, mesh]) => mesh.kind === "actors" && mesh.on === uid && !mesh.inner);
  const hosts = mesh.hosts?.length ?? 0;
  const perHost = mesh.per_host ?? sizeOf(mesh);
  const children = actors.length + (hosts > 1 ? hosts : sizeOf(mesh));
  const root = add(rows, turned, { key: `m:${uid}`, kind: "mesh", level: 1, uid, expandable: !mesh.stopped && children > 0, position, siblings }, children <= FEW);
  if (!root.expanded) return;
  let actorPosition = 0;
  for (const [actorsUid] of actors) add(rows, turned, { key: `a:${actorsUid}`, kind: "actors", level: 2, uid: actorsUid, parent: root.key, position: ++actorPosition, siblings: children }, false);
  if (mesh.kind === "actors") {
    for (let index = 0; index < sizeOf(mesh); index++) add(rows, turned, { key: `r:${uid}:${index}`, kind: "actor", level: 2, uid, index, parent: root.key, position: ++actorPosition, siblings: children }, false);
  } else if (hosts > 1) {
    for (let host = 0; host < hosts; host++) {
      const from = host * perHost;
      const row = add(rows, turned, { key: `h:${uid}:${host}`, kind: "host", level: 2, uid, index: host, from, to: from + perHost, parent: root.key, expandable: true, position: ++actorPosition, siblings: children }, false);
      if (row.expanded) procRows(rows, state, turned, row, uid, from, from + perHost, 0, perHost);
    }
  } else procRows(rows, state, turned, root, uid, 0, sizeOf(mesh), actorPosition, children);
}

function foundRows(rows: Row[], state: ClusterState, turned: Turned, uid: string, mesh: Mesh, query: string): void {
  const indices = foundIn(state, uid, mesh, query);
  const isNamed = mesh.name.toLowerCase().includes(query.trim().toLowerCase());
  if (!indices.length && !isNamed) return;
  const root = add(rows, turned, { key: `m:${uid}`, kind: "mesh", level: 1, uid, expandable: indices.length > 0 }, true);
  if (!root.expanded) return;
  const hosts = mesh.hosts?.length ?? 0;
  if (hosts < 2) return foundRanks(rows, state, turned, root, mesh, indices);
  const perHost = mesh.per_host ?? sizeOf(mesh);
  const byHost = new Map<number, number[]>();
  for (const index of indices) {
    const host = Math.floor(index / perHost);
    byHost.set(host, [...(byHost.get(host) ?? []), index]);
  }
  let position = 0;
  for (const [host, hostIndices] of byHost) {
    const from = host * perHost;
    const row = add(rows, turned, { key: `h:${uid}:${host}`, kind: "host", level: 2, uid, index: host, from, to: from + perHost, parent: root.key, expandable: true, position: ++position, siblings: byHost.size }, indices.length <= OPENED);
    if (row.expanded) foundRanks(rows, state, turned, row, mesh, hostIndices);
  }
}

function foundRanks(rows: Row[], state: ClusterState, turned: Turned, parent: Row, mesh: Mesh, indices: readonly number[]): void {
  for (const index of indices)
    if (mesh.kind === "procs") procRows(rows, state, turned, parent, parent.uid, index, index + 1, 0, 1);
    else add(rows, turned, { key: `r:${parent.uid}:${index}`, kind: "actor", level: parent.level + 1, uid: parent.uid, index, parent: parent.key }, false);
}

/** The ranks of a mesh that a query finds, or that have such actors on them. */
function foundIn(state: ClusterState, uid: string, mesh: Mesh, query: string): number[] {
  const hits = new Set<number>();
  for (const [actorsUid, on] of Object.entries(state.meshes)) {
    if (actorsUid !== uid && (on.on !== uid || on.stopped)) continue;
    const fits = fitting(query, on.labels);
    if (!fits) continue;
    const base = (index: number): number => baseOf(on, index);
    const host = (index: number): string => {
      const id = mesh.hosts?.[hostNumber(mesh, base(index))] ?? "";
      return state.hosts[id]?.name ?? id;
    };
    for (const index of found(fits, on.sizes, sizeOf(on), (rank) => rankOf(state, actorsUid, rank), host)) hits.add(actorsUid === uid ? index : indexOfBase(mesh, base(index)));
  }
  hits.delete(-1);
  return [...hits].sort((a, b) => a - b);
}

function procRows(rows: Row[], state: ClusterState, turned: Turned, parent: Row, uid: string, from: number, to: number, before: number, siblings: number): void {
  for (let index = from; index < to; index++) {
    const living = actorsOn(state, uid, index);
    const proc = add(rows, turned, { key: `p:${uid}:${index}`, kind: "proc", level: parent.level + 1, uid, index, parent: parent.key, expandable: living.length > 0, position: before + index - from + 1, siblings }, false);
    if (proc.expanded)
      living.forEach(([actorsUid, , index], nth) => add(rows, turned, { key: `r:${actorsUid}:${index}`, kind: "actor", level: proc.level + 1, uid: actorsUid, index, parent: proc.key, position: nth + 1, siblings: living.length }, false));
  }
}

/** The text of a row. */
export function lookOf(state: ClusterState, row: Row, now: number): RowText {
  const mesh = state.meshes[row.uid];
  if (!mesh) return { name: "", note: "", state: "", counts: [], spoken: "" };
  if (row.kind === "proc" || row.kind === "actor") return rankLook(state, row, mesh, now);
  const counts = countsAt(state, row.uid, targetOf(row).ranks);
  const host = row.kind === "host" ? state.hosts[mesh.hosts?.[row.index] ?? ""] : undefined;
  const name = row.kind === "host" ? host?.name ?? mesh.hosts?.[row.index] ?? "" : mesh.name;
  const shape = mesh.labels.length ? shapeOf(mesh) : "";
  const foreign = mesh.mine === false && mesh.owner ? `by ${mesh.owner}` : "";
  const note = row.kind === "host" ? (host?.state === "lost" ? say`lost` : "") : mesh.stopped ? overText(mesh, now) : [row.kind === "actors" || mesh.kind === "actors" ? mesh.class ?? "" : "", row.kind === "mesh" ? shape : "", row.kind === "mesh" && mesh.unheld ? say`nothing refers to it` : "", foreign].filter(Boolean).join(" · ");
  const states = mesh.stopped ? [] : present(counts);
  const spoken = [row.kind === "host" ? say`host` : row.kind === "actors" ? say`actors` : say`mesh`, name, note, states.map(([how, count]) => `${count} ${stateWord(how)}`).join(", ")].filter(Boolean).join(", ");
  return { name, note, state: "", counts: states, spoken };
}

function rankLook(state: ClusterState, row: Row, mesh: Mesh, now: number): RowText {
  const rank = rankOf(state, row.uid, row.index);
  const position = placeOf(mesh.labels, pointOf(mesh.sizes, row.index));
  const name = row.kind === "actor" && row.level > 2 ? mesh.name : position || mesh.name;
  const note = noteOf(rank, now);
  return { name, note, state: rank.state, counts: [], spoken: [name, stateWord(rank.state), note === stateWord(rank.state) ? "" : note].filter(Boolean).join(", ") };
}

/** The activity or the problem of a rank, in a few words. */
export function noteOf(rank: Rank, now: number): string {
  const lasts = rank.since === undefined ? "" : ` ${duration(now - rank.since)}`;
  switch (rank.state) {
    case "busy":
      return `${rank.endpoint ?? stateWord("busy")}${lasts}`;
    case "failed":
      return rank.detail ? rank.detail : stateWord("failed");
    case "unresponsive":
      return say`no answer${lasts}`;
    case "idle":
      return rank.memory !== undefined ? memoryOf(rank) : "";
    default:
      return rank.detail ?? stateWord(rank.state);
  }
}

/** The target of a click on a row: the mesh, and some of its ranks; null for all of them. */
export function targetOf(row: Row): { uid: string; ranks: number[] | null } {
  if (row.kind === "proc" || row.kind === "actor") return { uid: row.uid, ranks: [row.index] };
  if (row.kind === "host") return { uid: row.uid, ranks: Array.from({ length: row.to - row.from }, (_, offset) => row.from + offset) };
  return { uid: row.uid, ranks: null };
}

/** The numbers of ranks in each state; null for all ranks of the mesh. */
export function countsAt(state: ClusterState, uid: string, ranks: readonly number[] | null): Counts {
  return ranks === null ? (state.meshes[uid]?.counts ?? {}) : countsOf(state, uid, ranks);
}

/** Facts about the item of a row: name and value. */
export function factsOf(state: ClusterState, row: Row, now: number): [string, string][] {
  const mesh = state.meshes[row.uid];
  if (!mesh) return [];
  const facts: [string, string][] = [];
  const addFact = (name: string, value: string | undefined) => value && facts.push([name, value]);
  if (row.kind === "proc" || row.kind === "actor") {
    const rank = rankOf(state, row.uid, row.index);
    const procs = row.kind === "proc" || !mesh.on ? mesh : state.meshes[mesh.on];
    const base = baseOf(mesh, row.index);
    const procIndex = procs ? indexOfBase(procs, base) : -1;
    const proc = row.kind === "proc" ? rank : mesh.on && procIndex >= 0 ? rankOf(state, mesh.on, procIndex) : undefined;
    addFact(say`state`, [stateWord(rank.state), noteOf(rank, now) === stateWord(rank.state) || rank.state === "idle" ? "" : noteOf(rank, now)].filter(Boolean).join(" · "));
    const host = procs?.hosts?.[hostNumber(procs, base)];
    addFact(say`host`, host && [state.hosts[host]?.name ?? host, proc?.pid && `pid ${proc.pid}`].filter(Boolean).join(" · "));
    addFact(say`uses`, usage(proc));
    if (mesh.kind === "actors") addFact(say`calls`, [rank.calls !== undefined && `${rank.calls}`, rank.rate && `${rank.rate.toFixed(1)}/s`, rank.queue && `${rank.queue} waiting`, rank.errors && `${rank.errors} raised`].filter(Boolean).join(" · "));
    addFact(say`healed`, rank.incarnation ? plural(rank.incarnation, "time") : "");
    const failure = rank.failure ? state.failures[rank.failure] : undefined;
    addFact(say`next`, failure?.state === "open" ? failure.next : "");
  } else {
    const look = lookOf(state, row, now);
    addFact(say`ranks`, look.counts.map(([how, count]) => `${count} ${stateWord(how)}`).join(", "));
    addFact(say`what`, row.kind === "host" ? "host" : mesh.kind === "actors" ? `${mesh.class ?? "actors"} on ${state.meshes[mesh.on ?? ""]?.name ?? "?"}` : `processes, ${shapeOf(mesh)}`);
    if (row.kind === "mesh") addFact(say`actors`, Object.values(state.meshes).filter((candidate) => candidate.on === row.uid && !candidate.stopped && !candidate.inner).map((candidate) => candidate.name).join(", "));
    addFact(say`owner`, mesh.owner && mesh.owner !== "<root>" ? mesh.owner : "");
    addFact(say`stopped`, mesh.stopped);
  }
  return facts;
}

function usage(rank: Rank | undefined): string {
  if (!rank) return "";
  const parts = [];
  if (rank.cpu !== undefined) parts.push(`${Math.round(rank.cpu * 100)} % cpu`);
  if (rank.memory !== undefined) parts.push(memoryOf(rank));
  if (rank.gpu_memory !== undefined) parts.push(`gpu ${bytes(rank.gpu_memory)}${rank.gpu !== undefined ? ` ${Math.round(rank.gpu * 100)} %` : ""}`);
  return parts.join(" · ");
}
