// Words and numbers for display.

import type { Failure, Mesh, Rank, Reported, State } from "../cluster/state";
import { say } from "./language";


export { plural } from "./language";

export const SIGNS: Readonly<Partial<Record<State, string>>> = { failed: "✕", healing: "↻", paused: "❚❚", unresponsive: "…", starting: "◦", stopped: "–" };

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

const STATES: Readonly<Record<State, () => string>> = {
  busy: () => say`busy`,
  failed: () => say`failed`,
  healing: () => say`healing`,
  idle: () => say`idle`,
  paused: () => say`paused`,
  starting: () => say`starting`,
  stopped: () => say`stopped`,
  unresponsive: () => say`unresponsive`,
};

/** The state of a rank, in a word. */
export function stateWord(state: State): string {
  return STATES[state]();
}

export function duration(seconds: number): string {
  const s = Math.max(0, seconds);
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 60) return `${Math.floor(s)} s`;
  if (s < 3600) return say`${Math.floor(s / 60)} min ${String(Math.floor(s % 60)).padStart(2, "0")} s`;
  return `${Math.floor(s / 3600)} h ${String(Math.floor((s % 3600) / 60)).padStart(2, "0")} min`;
}

/** The end of a mesh, with its time by the kernel's clock. */
export function overText(mesh: Pick<Mesh, "stopped" | "ended"> | undefined, now: number): string {
  const why = mesh?.stopped?.replace(/^stopped ?/, "") ?? "";
  const by = /^by [^,;:]{1,20}$/.test(why); // `stopped by %stop at 12:00:00`, but `stopped at 12:00:00: its host was lost`
  return by ? say`stopped ${why} at ${clock(mesh?.ended ?? now)}` : say`stopped at ${clock(mesh?.ended ?? now)}${why && `: ${why}`}`;
}

export function bytes(size: number): string {
  if (size >= 1 << 30) return `${(size / (1 << 30)).toFixed(1)} GB`;
  return `${Math.round(size / (1 << 20))} MB`;
}

/** The memory of a process, and its measure: with Pss, pages that n processes share count as a part of n. */
export function memoryOf({ memory, memory_kind }: Pick<Rank, "memory" | "memory_kind">): string {
  return `${bytes(memory ?? 0)} ${memory_kind ?? "Pss"}`;
}

/** Bytes in three digits. */
export function size(count: number): string {
  let [value, unit] = [count, 0];
  while (value >= 1000 && unit < UNITS.length - 1) [value, unit] = [value / 1024, unit + 1];
  return `${unit ? value.toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2) : value} ${UNITS[unit]}`;
}

/** A measurement in at most four digits. Messages have null in place of NaN and infinities. */
export function number(value: number | null): string {
  if (value === null || !Number.isFinite(value)) return say`not finite`;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(4)));
}

/** The time of day. */
export function clock(seconds: number): string {
  return new Date(seconds * 1000).toLocaleTimeString([], { hourCycle: "h23" });
}

export function placeOf(labels: readonly string[], point: readonly number[]): string {
  return labels.map((label, d) => `${label}=${point[d]}`).join(" ");
}

export function shapeOf(mesh: Pick<Mesh, "labels" | "sizes">): string {
  return mesh.labels.map((label, d) => `${label}=${mesh.sizes[d]}`).join(" ") || "one";
}

/** The state of a failure, in words. */
export function endOf(state: Failure["state"]): string {
  return state === "open" ? say`not healed` : state;
}

/** The receiver of a report of a failure, and the outcome. */
export function reportOf([who, how]: Reported): string {
  if (who === "<root>") return say`shown here because no call was waiting`;
  if (who === "a call") return say`raised by the waiting call`;
  return `${who} ${how === "asked" ? say`was asked` : how === "handled" ? say`handled it` : say`did not handle it`}`;
}
