// States of a cluster to test with.

import type { ClusterState, Mesh, Rank, State } from "../src/cluster/state";

export function empty(): ClusterState {
  return { hosts: {}, meshes: {}, ranks: {}, failures: {}, sessions: {}, detached: {}, tensors: {}, transfers: {} };
}

export function procs(name: string, labels: string[], sizes: number[], more: Partial<Mesh> = {}): Mesh {
  const strides = sizes.map((_, d) => sizes.slice(d + 1).reduce((product, size) => product * size, 1));
  const count = sizes.reduce((product, size) => product * size, 1);
  const hosts = labels[0] === "hosts" ? Array.from({ length: sizes[0] ?? 1 }, (_, at) => `h${at}`) : ["h0"];
  return { name, kind: "procs", labels, sizes, offset: 0, strides, hosts, per_host: count / hosts.length, state: "idle", owner: "<root>", mine: true, counts: { idle: count }, ...more };
}

export function actors(name: string, on: string, like: Mesh, more: Partial<Mesh> = {}): Mesh {
  const { hosts: _hosts, per_host: _perHost, ...rest } = like;
  return { ...rest, name, kind: "actors", class: "Trainer", on, ...more };
}

/** Puts ranks into states, and the mesh's counts with them. */
export function turn(state: ClusterState, uid: string, index: number, how: State, more: Partial<Rank> = {}): void {
  const mesh = state.meshes[uid] as Mesh;
  const ranks = (state.ranks[uid] ??= {});
  const was = ranks[index]?.state ?? mesh.state;
  ranks[index] = { ...ranks[index], ...more, state: how };
  const counts = (mesh.counts ??= {});
  counts[was] = (counts[was] ?? 0) - 1;
  if (!counts[was]) delete counts[was];
  counts[how] = (counts[how] ?? 0) + 1;
}

/** Four processes with an actor each. */
export function four(): ClusterState {
  const state = empty();
  state.hosts.h0 = { name: "node0", state: "up" };
  state.meshes.w = procs("workers", ["gpus"], [4]);
  state.meshes.t = actors("trainers", "w", state.meshes.w, { counts: { idle: 4 } });
  return state;
}

/** `hosts` times eight processes with an actor each. */
export function many(hosts: number): ClusterState {
  const state = empty();
  for (let at = 0; at < hosts; at++) state.hosts[`h${at}`] = { name: `node${at}`, state: "up" };
  state.meshes.w = procs("workers", ["hosts", "gpus"], [hosts, 8]);
  state.meshes.t = actors("trainers", "w", state.meshes.w, { counts: { idle: hosts * 8 } });
  return state;
}

/** Waits until what was asked for a frame is drawn. */
export function frame(): Promise<unknown> {
  return new Promise(requestAnimationFrame);
}

/** Waits until all draws are done: a frame executes at least one of them. */
export async function drawn(): Promise<void> {
  for (let frames = 0; frames < 6; frames++) await frame();
}
