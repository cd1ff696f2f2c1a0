// Transfers of the last cell between ranks, and its waits, in words and sums.

import type { Busy, Movement, Tensors } from "../cluster/state";
import { plural, size } from "../page/words";
import { say } from "../page/language";

export type DimensionRow = [dimension: string, collective: string, count: number, nbytes: number];

function sums<Key extends string>(moved: readonly Movement[], keyOf: (movement: Movement) => Key): [Key, count: number, nbytes: number][] {
  const totals = new Map<Key, [count: number, nbytes: number]>();
  for (const part of moved) {
    const [count, nbytes] = totals.get(keyOf(part)) ?? [0, 0];
    totals.set(keyOf(part), [count + part.count, nbytes + part.nbytes]);
  }
  return [...totals].map(([key, [count, nbytes]]): [Key, number, number] => [key, count, nbytes]);
}

/** By dimension of the mesh and collective, the most bytes first. */
export function byDimension(moved: readonly Movement[]): DimensionRow[] {
  const rows = sums(moved, (movement) => JSON.stringify([movement.dimension, movement.collective]));
  return rows
    .map(([key, count, nbytes]): DimensionRow => [...(JSON.parse(key) as [string, string]), count, nbytes])
    .sort((a, b) => b[3] - a[3]);
}

/** One sentence: "the last cell moved 1.20 GB in 14 all-gathers; 9 of them from Cell In[4]:7". */
export function movedText(moved: readonly Movement[]): string {
  if (!moved.length) return say`the last cell moved nothing between ranks`;
  const kinds = sums(moved, (movement) => movement.collective).sort((a, b) => b[1] - a[1]);
  const lines = sums(moved, (movement) => movement.line.at).sort((a, b) => b[1] - a[1]);
  const [most, count] = lines[0] as [string, number, number];
  const where = !most ? "" : lines.length > 1 ? say`; ${count} of them from ${most}` : `, from ${most}`;
  const total = moved.reduce((sum, movement) => sum + movement.nbytes, 0);
  return say`the last cell moved ${size(total)} in ${kinds.map(([kind, times]) => plural(times, kind)).join(" and ")}${where}`;
}

/** The duration of transfers: "ranks were busy with it, or waited for each other, for 12.3 ms along data (the quickest 11.0 ms)". */
export function busyText(busy: readonly Busy[]): string {
  const times = busy.map(({ dimensions, most, least }) => `${seconds(most)} along ${dimensions}${least < 0.9 * most ? say` (the quickest ${seconds(least)})` : ""}`);
  return say`ranks were busy with it, or waited for each other, for ${times.join(", ")}`;
}

function seconds(value: number): string {
  return value >= 1 ? `${value.toFixed(2)} s` : `${(value * 1000).toFixed(1)} ms`;
}

/** A summary of tensors: "12 tensors · 64.0 MB · 16.0 MB on the fullest rank". */
export function factsOf(tensors: Pick<Tensors, "count" | "nbytes" | "largest" | "labels" | "sizes" | "lost" | "gone">): string {
  const mesh = tensors.labels.map((label, d) => `${label}=${tensors.sizes[d]}`).join(" ");
  const count = plural(tensors.count, "tensor");
  if (tensors.lost) return [mesh, `${count}, lost`, size(tensors.nbytes)].join(" · ");
  return [mesh, count, ...(tensors.gone ? [say`${tensors.gone} of them lost`] : []), size(tensors.nbytes), say`${size(tensors.largest)} on the fullest rank`].join(" · ");
}
