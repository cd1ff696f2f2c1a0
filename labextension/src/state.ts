// ClusterState, as docs/protocol.md has it.

export type State = "starting" | "idle" | "busy" | "paused" | "unresponsive" | "failed" | "healing" | "stopped";

export interface Host {
  name: string;
  state: "up" | "lost";
  why?: string;
  procs?: number;
}

export interface Mesh {
  name: string;
  kind: "procs" | "actors";
  class?: string;
  labels: string[];
  sizes: number[];
  offset?: number;
  strides: number[];
  on?: string;
  hosts?: string[];
  per_host?: number;
  state: State;
  born?: number;
  stopped?: string;
  owner?: string;
  mine?: boolean;
  counts?: Partial<Record<State, number>>;
}

export interface Rank {
  state: State;
  since?: number;
  endpoint?: string;
  detail?: string;
  failure?: string;
  life?: number;
  pid?: number;
  queue?: number;
  calls?: number;
  rate?: number;
  errors?: number;
  cpu?: number;
  memory?: number;
  gpu?: number;
  gpu_memory?: number;
  gpu_total?: number;
}

export interface Failure {
  mesh: string;
  name: string;
  ranks: number[];
  where?: string;
  title: string;
  state: "open" | "healing" | "healed" | "stopped";
  at: number;
  next?: string;
}

export interface Session {
  mesh?: string;
  rank?: number;
  actor?: string;
  file?: string;
  line?: number;
  function?: string;
  since?: number;
}

export interface ClusterState {
  hosts: Record<string, Host>;
  meshes: Record<string, Mesh>;
  ranks: Record<string, Record<string, Partial<Rank>>>;
  failures: Record<string, Failure>;
  sessions: Record<string, Session>;
  detached: Record<string, unknown>;
}

/** How many ranks a mesh has. */
export function sizeOf(mesh: Mesh): number {
  return mesh.sizes.reduce((product, size) => product * size, 1);
}
