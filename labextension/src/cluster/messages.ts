// The messages of docs/protocol.md that views read.

import type { ClusterState, Patch } from "./state";

export type LogLine = [index: number, at: number, level: string, text: string];

export interface LogMessage {
  type: "logs";
  id: string;
  reset?: boolean;
  lines: LogLine[];
  skipped?: number;
}

export type Point = [index: number, step: number, at: number, value: number];
export type Points = Record<string, Point[]>;

export interface MetricMessage {
  type: "metrics";
  id: string;
  reset?: boolean;
  points: Points;
}

interface Frame {
  file: string;
  line: number;
  function: string;
}

export interface Source extends Frame {
  first: number;
  lines: string[];
}

export interface Group extends Frame {
  name: string;
  ranks: number[];
  where: string;
  of?: number;
  sessions: string[];
  source: Source;
  reason: string;
  note?: string;
  post_mortem?: boolean;
}

export interface StackNode extends Frame {
  count: number;
  where: string;
  below: StackNode[];
}

export interface DebugMessage {
  type: "debug";
  id: string;
  stopped: number;
  groups: Group[];
  tree: StackNode[];
  missing: { name: string; where: string; what?: string }[];
}

/** A value in the frames of some ranks; equal values are one. */
export interface Value {
  text: string;
  where: string;
  sessions: string[];
  odd?: string;
  error?: boolean;
  unusual?: boolean;
}

/** The values of a name or an expression by rank. */
export interface Values {
  spark: string;
  values: Value[];
}

/** The placement of a tensor for drawing: boxes and labels in pixels. */
export interface PlacementData {
  name: string;
  title: string;
  mesh_text: string;
  bytes: string;
  rows: [dimension: string, placement: string, does: string][];
  blocks: string[];
  tensor: DrawingData;
  mesh: DrawingData;
}

/** Values of a tensor: its first elements, and statistics by rank. */
export interface TensorValues {
  corner: string[][];
  index: string;
  columns: string[];
  rows: string[][];
  notes: string[];
}

export interface DrawingData {
  width: number;
  height: number;
  sheets: [x: number, y: number, w: number, h: number][];
  sides: { points: [x: number, y: number][]; fill: string; blocks: number[] }[];
  pieces: Piece[];
  labels: { x: number; y: number; text: string; anchor?: string; small?: boolean }[];
}

/** One box of the tensor or, with `ranks`, of the mesh. */
export interface Piece {
  x: number;
  y: number;
  w: number;
  h: number;
  fill?: string;
  ink?: string;
  text?: string;
  blocks?: number[];
  ranks?: number[];
  description?: string;
  hatched?: boolean;
}

/** No messages have this topic: subscribing makes the store follow tensors. */
export interface TensorMessage {
  type: "tensors";
  id: string;
}

/** No messages have this topic either: subscribing makes the store follow transfers. */
export interface TransferMessage {
  type: "transfers";
  id: string;
}

/** The profiles that were taken, the newest first. */
export interface ProfileMessage {
  type: "profiles";
  id: string;
  profiles: { key: string; title: string; html: string }[];
}

/** A picture of some seconds of a timeline; `svg` is "" while there is none. Times in seconds since it began. */
export interface TimelineMessage {
  type: "timeline";
  id: string;
  key: string;
  name: string;
  facts: string[];
  notes: string[];
  recording: boolean;
  /** In the kernel's time. */
  began: number;
  seconds: number;
  begin: number;
  end: number;
  svg: string;
}

/** Resource use of the processes of a mesh. Points are minutes before now, below 0, and values. */
export interface HistoryCurves {
  name: string;
  ranks: number;
  /** `timeline`: the key of the timeline recorded at the peak, "" for none. */
  measures: { name: string; lines: { label: string; points: [number, number][] }[]; peak: string; at: number; timeline: string }[];
}

export interface HistoryMessage extends HistoryCurves {
  type: "history";
  id: string;
}

export interface Topics {
  history: HistoryMessage;
  timeline: TimelineMessage;
  profiles: ProfileMessage;
  tensors: TensorMessage;
  transfers: TransferMessage;
  logs: LogMessage;
  metrics: MetricMessage;
  debug: DebugMessage;
}

export type Topic = keyof Topics;

/** The watched part of a topic; missing fields do not narrow it. */
export interface Watch<T extends Topic> {
  topic: T;
  mesh?: string | undefined;
  ranks?: number[] | undefined;
  text?: string | undefined;
  level?: string | undefined;
  lines?: number | undefined;
  key?: string | undefined;
  width?: number | undefined;
  begin?: number | null;
  end?: number | null;
}

/** A view that the page does not bring itself: the kernel has its module. */
export interface TitledView {
  name: string;
  title: string;
}

/** The verbs that views send, with their parameters and results. */
export interface Requests {
  heal: { takes: Ranks & { kill?: boolean; replace?: boolean }; gives: Said };
  kill: { takes: Ranks; gives: Said };
  resize: { takes: { mesh: string; label: string; by: number }; gives: Said };
  stop: { takes: Ranks; gives: Said };
  interrupt: { takes: Ranks; gives: Said };
  why: { takes: Partial<Ranks>; gives: Diagnosis };
  slow: { takes: Partial<Ranks>; gives: Diagnosis & { phases: RankPhases[] } };
  abort: { takes: Partial<Ranks>; gives: Diagnosis };
  logs: { takes: Ranks & { lines: number }; gives: { lines: Record<string, string[]> } };
  stack: { takes: Ranks; gives: { stacks: Record<string, string> } };
  places: { takes: object; gives: { places: Place[] } };
  left: { takes: object; gives: { meshes: LeftMesh[] } };
  jobs: { takes: object; gives: { jobs: RunningJob[] } & Said };
  end_job: { takes: { job: string }; gives: Said };
  attach: { takes: { uid: string; steal: boolean }; gives: Said };
  end: { takes: { uid: string; steal: boolean }; gives: Said };
  spawn: { takes: { name: string; dims: Record<string, number> }; gives: Said };
  post_mortem: { takes: Ranks & { call?: string | undefined }; gives: { sessions: string[] } };
  view: { takes: { name: string }; gives: { script: string; style: string } };
  variables: { takes: object; gives: { variables: Record<string, string> } };
  namespace: { takes: Ranks; gives: Said & { rows: VariableRow[]; answered: number } };
  timeline: { takes: Partial<Ranks> & { do: "begin" | "stop" | "save"; key?: string }; gives: Said & { key: string } };
  placement: { takes: { tensors: string; number: number }; gives: { placement: PlacementData; mesh: string; ranks: number[] } };
  values: { takes: { tensors: string; number: number }; gives: TensorValues };
  debug: { takes: DebugCommand; gives: Said & Partial<Values> & { locals?: (Values & { name: string })[] } };
}

/** A variable that cells on ranks see. `where`: which ranks have the value, "" for all; `more`: further values. */
export interface VariableRow {
  name: string;
  values: { type: string; text: string; where: string }[];
  more: number;
}

/**
 * A place for a new mesh: a kind of jobs, or a job with hosts. `why`: it cannot be used here; "" if it can.
 * `hosts`: how many each mesh of the job has; empty if the request determines the number.
 */
export interface Place {
  name: string;
  text: string;
  why: string;
  hosts: Record<string, number>;
}

/** A running job of this user, from any kernel or shell. `here`: this kernel uses its hosts. */
export interface RunningJob {
  id: string;
  label: string;
  text: string;
  hosts: Record<string, number>;
  here: boolean;
}

/** A mesh that is not of this kernel: left, or `held` by another one. */
export interface LeftMesh {
  uid: string;
  name: string;
  held: boolean;
  text: string;
}

export type RequestVerb = keyof Requests;

interface Ranks {
  mesh: string;
  ranks?: number[];
}

export interface Said {
  text?: string;
}

/** Why ranks hold others up. `perhaps`: the text may be wrong. */
export interface Finding {
  kind: string;
  mesh: string;
  text: string;
  perhaps: boolean;
  sure: boolean;
}

export interface Diagnosis extends Said {
  findings: Finding[];
  inspected: string;
}

/** The share of its time that a rank has spent in each phase of a step. */
export interface RankPhases {
  mesh: string;
  where: string;
  shares: Record<string, number>;
}

export interface DebugCommand {
  do: string;
  sessions?: string[] | null;
  text?: string;
}

/** A long cell, or a call, has ended. `asked`: by %notify; `error`: one line, "" where it ended well. */
export interface Ended {
  type: "ended";
  what: string;
  seconds: number;
  asked: boolean;
  error: string;
}

/** Notifications were requested. */
export interface Notify {
  type: "notify";
}

export type FromKernel =
  | ((Ended | Notify) & { now?: number })
  | { type: "hello"; engine: string; now?: number }
  | { type: "alive"; sent: number; now?: number }
  | { type: "views"; views: TitledView[]; now?: number }
  | { type: "snapshot"; seq: number; state: Partial<ClusterState>; now?: number }
  | { type: "delta"; prev: number; seq: number; patch: Patch; now?: number }
  | (Topics[Topic] & { now?: number })
  | { type: "reply"; id: string; ok: true; result?: object; now?: number }
  | { type: "reply"; id: string; ok: false; error: string; now?: number };
