// All actions on the selection, one row each: buttons, menus, palette, keys and code come from here.

import { placeText } from "../cluster/slices";
import { sizeOf } from "../cluster/ranks";
import type { ClusterState, Counts, Mesh, State } from "../cluster/state";
import { plural } from "../page/words";
import { say } from "../page/language";
import { type Variables, nameOf } from "./code";
import { countsAt } from "./tree";

/** The target of an action: a mesh, or some of its ranks (`ranks`; null for all). */
export interface Target {
  uid: string;
  mesh: Mesh;
  ranks: number[] | null;
  counts: Counts;
  /** One of its hosts is lost. */
  lost: boolean;
  /** The mesh and the ranks as magics take them: `workers gpus=0-2`. */
  place: string;
  name: string;
}

/** The requests that actions send. */
export type Verb = "heal" | "stop" | "interrupt" | "kill" | "resize" | "post_mortem" | "debug";

/** The parts of the panel that actions open. */
export type Part = "logs" | "timeline" | "stacks" | "findings" | "debugger";

/** The execution of an action: by a request to the kernel, which may open a part of the panel, by opening a part of the panel, or by running a cell. */
export type Deed =
  | { verb: Verb; waiting: string; more?: (typed: string) => object; then?: Part }
  | { shows: Part }
  | { runs: "code" };

export interface Action {
  /** The command is `monarch-nb:NAME`. */
  name: string;
  label: string;
  /** Its effect, in one sentence. */
  hint: string;
  /** In the tree; with Shift its code is put into a cell. */
  key: string;
  /** It has a button of its own; others are in the menu. */
  button?: boolean;
  /** Irreversible: offered last. */
  ends?: boolean;
  applies(on: Target): boolean;
  /** The cell that does the same. `typed`: the typed input, or the active cell's source. */
  code(on: Target, typed: string): string;
  does: Deed;
  /** The loss to confirm before; "" for none. */
  loses?(on: Target): string;
  /** The input to ask for before. */
  asks?: { title: string; proposes(on: Target): string; example: string };
}

const hasAny = (...states: State[]) => (on: Target): boolean => !on.mesh.stopped && states.some((state) => on.counts[state]);
const living = hasAny("busy", "idle", "paused", "unresponsive");
const present = (on: Target): boolean => !on.mesh.stopped;
const hosts = (on: Target): boolean => present(on) && on.mesh.kind === "procs" && on.ranks === null && on.mesh.labels.includes("hosts");
const magic = (name: string, option = "") => (on: Target): string => `${name} ${on.place}${option}`;

function lost(on: Target, always = on.mesh.kind === "procs"): string {
  const busy = on.counts.busy ?? 0;
  return [
    always ? say`The processes end; the actors on them and what they hold are lost.` : say`The actors and what they hold are lost.`,
    busy ? `${plural(busy, "rank")} ${busy === 1 ? "is" : "are"} busy.` : "",
  ].join(" ").trim();
}

export const ACTIONS: readonly Action[] = [
  { name: "heal", label: "Heal", key: "H", button: true, hint: "brings failed ranks back, with their actors",
    applies: hasAny("failed"), code: magic("%heal"), does: { verb: "heal", waiting: "healing" } },
  { name: "interrupt", label: "Interrupt", key: "I", button: true, hint: "raises KeyboardInterrupt in what runs there",
    applies: hasAny("busy"), code: magic("%interrupt"), does: { verb: "interrupt", waiting: "interrupting" },
    loses: (on) => ((on.counts.busy ?? 0) < 2 ? "" : say`Running code on ${plural(on.counts.busy ?? 0, "rank")} ends with KeyboardInterrupt.`) },
  { name: "stack", label: "Stack", key: "T", button: true, hint: "shows where its threads are now",
    applies: living, code: magic("%stacks"), does: { shows: "stacks" } },
  { name: "why", label: "Why?", key: "W", button: true, hint: "which ranks of this mesh hold others up",
    applies: present, code: (on) => `%why ${on.name}`, does: { shows: "findings" } },
  { name: "logs", label: "Logs", key: "L", button: true, hint: "shows the lines that it wrote",
    applies: () => true, code: magic("%logs"), does: { shows: "logs" } },
  { name: "timeline", label: "Timeline", key: "O", hint: "records what these ranks do and when, and shows it",
    applies: living, code: magic("%timeline"), does: { shows: "timeline" } },
  { name: "run", label: "Run Cell Here", key: "E", hint: "runs the active cell on these ranks, in a cell below",
    applies: living, code: (on, cell) => `%%on ${on.place}\n${cell || "rank"}`, does: { runs: "code" } },
  { name: "break", label: "Break…", key: "B", hint: "sets a breakpoint on these ranks",
    applies: (on) => living(on) && on.mesh.kind === "actors", code: (on, typed) => `%break ${typed} on ${on.place}`,
    asks: { title: "Break at", proposes: (on) => `${on.mesh.class ?? "Actor"}.`, example: "Trainer.step, train.py:42, or Trainer.step if loss > 4" },
    does: { verb: "debug", waiting: "setting a breakpoint on", more: breakpointFrom } },
  { name: "debug", label: "Debugger", key: "D", hint: "shows where ranks are stopped, and takes commands",
    applies: hasAny("paused"), code: (on) => `%%mdb ${on.place}\nwhere`, does: { shows: "debugger" } },
  { name: "frames", label: "Open Frames of the Failure", key: "M", hint: "opens the frames of the last failure there",
    applies: (on) => present(on) && on.mesh.kind === "actors", code: magic("%mpm"), does: { verb: "post_mortem", waiting: "opening the frames of", then: "debugger" } },
  { name: "grow", label: "Add a Host", key: "G", hint: "asks the job for one more host",
    applies: hosts, code: (on) => `%mesh ${on.name} hosts=+1`, does: { verb: "resize", waiting: "growing", more: () => ({ label: "hosts", by: 1 }) } },
  { name: "spare", label: "Replace Lost Host", key: "P", hint: "takes a spare host, or a new one of the job, in place of a lost one",
    applies: (on) => present(on) && on.lost, code: magic("%heal", " --replace"), does: { verb: "heal", waiting: "replacing hosts of", more: () => ({ replace: true }) } },
  { name: "shrink", label: "Remove the Last Host", key: "U", ends: true, hint: "ends what runs on the last host, which goes back to the job",
    applies: (on) => hosts(on) && (on.mesh.hosts?.length ?? 0) > 1, code: (on) => `%mesh ${on.name} hosts=-1`,
    does: { verb: "resize", waiting: "shrinking", more: () => ({ label: "hosts", by: -1 }) }, loses: () => say`The processes on the last host end; the actors on them and what they hold are lost.` },
  { name: "restart", label: "Kill and Heal", key: "R", ends: true, hint: "kills the processes and starts them again, with their actors",
    applies: living, code: magic("%heal", " --kill"), does: { verb: "heal", waiting: "restarting", more: () => ({ kill: true }) }, loses: (on) => lost(on, true) },
  { name: "stop", label: "Stop", key: "S", button: true, ends: true, hint: "ends it, after the clean-up of its actors",
    applies: present, code: magic("%stop"), does: { verb: "stop", waiting: "stopping" }, loses: lost },
  { name: "kill", label: "Kill", key: "K", ends: true, hint: "kills the processes without clean-up; heal starts them again",
    applies: living, code: magic("%kill"), does: { verb: "kill", waiting: "killing" }, loses: (on) => lost(on, true) },
];

/** `train.py:42 if loss > 4` as a request takes it. */
function breakpointFrom(typed: string): object {
  const [where = "", condition = ""] = typed.split(/\s+if\s+(.*)/s);
  return { do: "break", where: where.trim(), condition: condition.trim() };
}

/** The target of an action; null for an unknown mesh. */
export function targetAt(state: ClusterState, uid: string, ranks: number[] | null, variables: Variables): Target | null {
  const mesh = state.meshes[uid];
  if (!mesh) return null;
  const { name } = nameOf(mesh, uid, variables);
  const where = placeText(mesh.labels, mesh.sizes, ranks);
  const procs = mesh.kind === "procs" ? mesh : state.meshes[mesh.on ?? ""];
  const isLost = Boolean(procs?.hosts?.some((host) => state.hosts[host]?.state === "lost"));
  return { uid, mesh, ranks, counts: countsAt(state, uid, ranks), lost: isLost, name, place: where ? `${name} ${where}` : name };
}

/** `workers`, or `2 ranks of workers`. */
export function words({ mesh, ranks }: Pick<Target, "mesh" | "ranks">): string {
  return ranks === null || ranks.length === sizeOf(mesh) ? mesh.name : `${plural(ranks.length, "rank")} of ${mesh.name}`;
}
