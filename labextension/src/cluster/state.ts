// ClusterState, as defined in docs/protocol.md.

export type State = "starting" | "idle" | "busy" | "paused" | "unresponsive" | "failed" | "healing" | "stopped";
export type Counts = Partial<Record<State, number>>;

export interface Host {
  name: string;
  state: "up" | "lost";
  why?: string;
  procs?: number;
  notice?: string; // who is about to withdraw the host
  until?: number; // and when, if known
}

export interface Mesh {
  name: string;
  kind: "procs" | "actors";
  class?: string;
  labels: string[];
  sizes: number[];
  offset?: number;
  strides: number[];
  picked?: number[];
  on?: string;
  /** An internal mesh of the library, which is not shown. */
  inner?: boolean;
  hosts?: string[];
  per_host?: number;
  state: State;
  born?: number;
  stopped?: string;
  ended?: number; // time of its end
  unheld?: number; // since when the notebook has no reference to it
  owner?: string;
  mine?: boolean;
  counts?: Counts;
}

export interface Rank {
  state: State;
  since?: number;
  endpoint?: string;
  detail?: string;
  failure?: string;
  incarnation?: number;
  pid?: number;
  queue?: number;
  calls?: number;
  rate?: number;
  errors?: number;
  cpu?: number;
  memory?: number;
  /** The measure of memory, if not Pss. */
  memory_kind?: string;
  gpu?: number;
  gpu_memory?: number;
  gpu_total?: number;
}

/** The records of a mesh's ranks by index; idle ones without a record are left out. */
export type RankRecords = Record<string, Partial<Rank>>;

export type Reported = [who: string, how: "asked" | "handled" | "not handled" | "shown"];

export interface Failure {
  mesh: string;
  name: string;
  kind?: "procs" | "actors";
  ranks: number[];
  where?: string;
  title: string;
  cause?: string;
  host?: string;
  pid?: number;
  processes?: [host: string, pids: number[]][];
  oom?: boolean;
  memory?: string;
  at: number;
  detected?: number;
  traceback?: string;
  last_lines?: string[];
  lines?: [where: string, lines: string[]][];
  texts?: [where: string, text: string][];
  told?: Reported[];
  also?: string[];
  next?: string;
  report?: string;
  /** `raised`: an endpoint raised an ordinary exception, which is no failure of the cluster. */
  state: "open" | "healing" | "healed" | "stopped" | "raised";
  ended?: number;
  /** The call that raised the exception, whose frames can still be opened. */
  call?: string;
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

/** A line of the user's program, by its display name. */
export interface Line {
  at: string;
  source: string;
}

export interface TensorRow {
  number: number;
  name: string;
  title: string;
  placement: string[];
  nbytes: number;
  each: number;
  line: Line;
  picture: [x: number, y: number, w: number, h: number, fill: string][];
  lost: boolean;
}

export interface Movement {
  line: Line;
  operation: string;
  collective: string;
  dimension: string;
  count: number;
  nbytes: number;
}

export interface Wait {
  line: Line;
  what: string;
  count: number;
}

/** Bytes moved from one process to another by one mover; with the mover "", memory that `from` offers. */
export interface Transfer {
  from: string;
  to?: string;
  mover: string;
  bytes: number;
  transfers?: number;
  rate?: number;
  regions?: number;
}

/** The sharded tensors of one mesh of tensors. */
/** Seconds in which ranks moved shards along dimensions of the mesh, or waited for others to. */
export interface Busy {
  dimensions: string;
  most: number;
  least: number;
}

/** Bytes of processes or of their devices, by rank. */
export interface Memory {
  allocated: number[];
  peak: number[];
  of: string;
}

export interface Tensors {
  name: string;
  mesh: string;
  ranks: number[];
  labels: string[];
  sizes: number[];
  count: number;
  nbytes: number;
  lost: string; // the reason, if all are lost
  gone: number; // number of lost tensors
  live: number[];
  largest: number;
  rows: TensorRow[];
  moved: Movement[];
  waits: Wait[];
  busy: Busy[];
  memory: Memory | null;
}

export interface ClusterState {
  hosts: Record<string, Host>;
  meshes: Record<string, Mesh>;
  ranks: Record<string, RankRecords>;
  failures: Record<string, Failure>;
  sessions: Record<string, Session>;
  detached: Record<string, unknown>;
  tensors: Record<string, Tensors>;
  transfers: Record<string, Transfer>;
}

export const EMPTY: Readonly<ClusterState> = { hosts: {}, meshes: {}, ranks: {}, failures: {}, sessions: {}, detached: {}, tensors: {}, transfers: {} };

/** A JSON merge patch of the state: null removes, objects are merged, anything else replaces. */
export type Patch = {
  [Section in keyof ClusterState]?: Record<string, Record<string, unknown> | null>;
};

/** All states, the worst first. */
export const STATES: readonly State[] = ["failed", "unresponsive", "paused", "healing", "starting", "busy", "idle", "stopped"];
