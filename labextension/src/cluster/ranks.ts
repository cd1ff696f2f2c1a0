// Reading the state: how ranks are, where they lie, what lives on them.

import { type ClusterState, type Counts, type Mesh, type Rank, type State, STATES } from "./state";

type Placed = Pick<Mesh, "sizes" | "strides" | "offset" | "picked">;

/** How many ranks there are of these sizes. */
export function countOf(sizes: readonly number[]): number {
  return sizes.reduce((product, size) => product * size, 1);
}

/** How many ranks a mesh has. */
export function sizeOf(mesh: Mesh): number {
  return countOf(mesh.sizes);
}

/** How a rank is, always with a state. */
export function rankOf(state: Pick<ClusterState, "meshes" | "ranks">, uid: string, index: number): Rank {
  const record = state.ranks[uid]?.[index];
  if (record?.state) return record as Rank;
  return { ...record, state: state.meshes[uid]?.state ?? "stopped" };
}

/** The coordinates of a row-major index. */
export function pointOf(sizes: readonly number[], index: number): number[] {
  const point = new Array<number>(sizes.length);
  for (let d = sizes.length - 1; d >= 0; d--) {
    const size = sizes[d] as number;
    point[d] = index % size;
    index = Math.floor(index / size);
  }
  return point;
}

/** The base rank (that of the procs) of a rank of a mesh. */
export function baseOf(mesh: Placed, index: number): number {
  if (mesh.picked) return mesh.picked[index] ?? -1;
  return pointOf(mesh.sizes, index).reduce((sum, at, d) => sum + at * (mesh.strides[d] ?? 0), mesh.offset ?? 0);
}

/** The rank of a mesh that lies on a base rank; -1 where none does. */
export function indexOfBase(mesh: Placed, base: number): number {
  if (mesh.picked) return mesh.picked.indexOf(base);
  let rest = base - (mesh.offset ?? 0);
  const point = new Array<number>(mesh.sizes.length).fill(0);
  const byStride = mesh.strides.map((stride, d): [number, number] => [stride, d]).sort((a, b) => b[0] - a[0]);
  for (const [stride, d] of byStride) {
    if (!stride) continue;
    const at = Math.floor(rest / stride);
    if (at < 0 || at >= (mesh.sizes[d] ?? 0)) return -1;
    point[d] = at;
    rest -= at * stride;
  }
  if (rest !== 0) return -1;
  return point.reduce((index, at, d) => index * (mesh.sizes[d] as number) + at, 0);
}

/** The number, among its hosts, of the one that a proc lies on; NaN where there is no such proc. */
export function hostNumber(procs: Mesh, base: number): number {
  const index = indexOfBase(procs, base);
  return index < 0 ? Number.NaN : Math.floor(index / (procs.per_host ?? 1));
}

/** The name of the host that a proc, or an actor on it, is on; empty where that is not known. */
export function hostOf(state: Pick<ClusterState, "hosts" | "meshes">, mesh: Mesh, base: number): string {
  const procs = procsOf(state, mesh);
  const host = procs?.hosts?.[hostNumber(procs, base)] ?? "";
  return state.hosts[host]?.name ?? host;
}

/** The actors that live on a proc: [uid, mesh, index] each. */
export function actorsOn(state: ClusterState, uid: string, base: number): [uid: string, mesh: Mesh, index: number][] {
  const actors: [string, Mesh, number][] = [];
  for (const [other, mesh] of Object.entries(state.meshes)) {
    if (mesh.on !== uid || mesh.stopped) continue;
    const index = indexOfBase(mesh, base);
    if (index >= 0) actors.push([other, mesh, index]);
  }
  return actors;
}

/** The procs that a mesh is, or that its actors are on. */
export function procsOf(state: Pick<ClusterState, "meshes">, mesh: Mesh): Mesh | undefined {
  return mesh.kind === "procs" ? mesh : state.meshes[mesh.on ?? ""];
}

/** The meshes that nothing in the notebook refers to any more. */
export function unheldOf(state: Pick<ClusterState, "meshes">): string[] {
  return Object.keys(state.meshes).filter((uid) => state.meshes[uid]?.unheld && !state.meshes[uid]?.stopped);
}

/** How many ranks are in which state. */
export function countsOf(state: Pick<ClusterState, "meshes" | "ranks">, uid: string, indices: Iterable<number>): Counts {
  const counts: Counts = {};
  for (const index of indices) {
    const { state: how } = rankOf(state, uid, index);
    counts[how] = (counts[how] ?? 0) + 1;
  }
  return counts;
}

/** The states that are among these counts, the worst first, with how often each is. */
export function present(counts: Counts): [state: State, count: number][] {
  return STATES.filter((state) => counts[state]).map((state) => [state, counts[state] ?? 0]);
}
