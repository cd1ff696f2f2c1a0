// Reading the state: the states of ranks, their hosts, their actors.

import { type ClusterState, type Counts, type Mesh, type Rank, type State, STATES } from "./state";

type Placed = Pick<Mesh, "sizes" | "strides" | "offset" | "picked">;

/** The number of ranks of these sizes. */
export function countOf(sizes: readonly number[]): number {
  return sizes.reduce((product, size) => product * size, 1);
}

/** The number of ranks of a mesh. */
export function sizeOf(mesh: Mesh): number {
  return countOf(mesh.sizes);
}

/** The record of a rank, always with a state. */
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
  return pointOf(mesh.sizes, index).reduce((sum, coordinate, d) => sum + coordinate * (mesh.strides[d] ?? 0), mesh.offset ?? 0);
}

/** The rank of a mesh on a base rank; -1 without one. */
export function indexOfBase(mesh: Placed, base: number): number {
  if (mesh.picked) return mesh.picked.indexOf(base);
  let rest = base - (mesh.offset ?? 0);
  const point = new Array<number>(mesh.sizes.length).fill(0);
  const byStride = mesh.strides.map((stride, d): [number, number] => [stride, d]).sort((a, b) => b[0] - a[0]);
  for (const [stride, d] of byStride) {
    if (!stride) continue;
    const coordinate = Math.floor(rest / stride);
    if (coordinate < 0 || coordinate >= (mesh.sizes[d] ?? 0)) return -1;
    point[d] = coordinate;
    rest -= coordinate * stride;
  }
  if (rest !== 0) return -1;
  return point.reduce((index, place, d) => index * (mesh.sizes[d] as number) + place, 0);
}

/** The number of a proc's host among the hosts of its mesh; NaN for an unknown proc. */
export function hostNumber(procs: Mesh, base: number): number {
  const index = indexOfBase(procs, base);
  return index < 0 ? Number.NaN : Math.floor(index / (procs.per_host ?? 1));
}

/** The name of the host that a proc, or an actor on it, is on; empty if unknown. */
export function hostOf(state: Pick<ClusterState, "hosts" | "meshes">, mesh: Mesh, base: number): string {
  const procs = procsOf(state, mesh);
  const host = procs?.hosts?.[hostNumber(procs, base)] ?? "";
  return state.hosts[host]?.name ?? host;
}

/** The actors on a proc: [uid, mesh, index] each. */
export function actorsOn(state: ClusterState, uid: string, base: number): [uid: string, mesh: Mesh, index: number][] {
  const actors: [string, Mesh, number][] = [];
  for (const [actorsUid, mesh] of Object.entries(state.meshes)) {
    if (mesh.on !== uid || mesh.stopped) continue;
    const index = indexOfBase(mesh, base);
    if (index >= 0) actors.push([actorsUid, mesh, index]);
  }
  return actors;
}

/** The proc mesh of a mesh: itself, or the one of its actors. */
export function procsOf(state: Pick<ClusterState, "meshes">, mesh: Mesh): Mesh | undefined {
  return mesh.kind === "procs" ? mesh : state.meshes[mesh.on ?? ""];
}

/** The meshes without a reference in the notebook. */
export function unheldOf(state: Pick<ClusterState, "meshes">): string[] {
  return Object.keys(state.meshes).filter((uid) => state.meshes[uid]?.unheld && !state.meshes[uid]?.stopped);
}

/** The number of ranks in each state. */
export function countsOf(state: Pick<ClusterState, "meshes" | "ranks">, uid: string, indices: Iterable<number>): Counts {
  const counts: Counts = {};
  for (const index of indices) {
    const { state: how } = rankOf(state, uid, index);
    counts[how] = (counts[how] ?? 0) + 1;
  }
  return counts;
}

/** The states with a count, the worst first. */
export function present(counts: Counts): [state: State, count: number][] {
  return STATES.filter((state) => counts[state]).map((state) => [state, counts[state] ?? 0]);
}
