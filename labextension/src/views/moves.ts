// What the last cell has moved between ranks, and what it waited for, in words and sums.

import type { Busy, Movement, Tensors } from "../cluster/state";
import { plural, size } from "../page/words";
import { say } from "../page/language";

export type DimensionRow = [dimension: string, collective: string, count: number, nbytes: number];

function sums<Key extends string>(moved: readonly Movement[], keyOf: (one: Movement) => Key): [Key, count: number, nbytes: number][] {
  const found = new Map<Key, [count: number, nbytes: number]>();
  for (const one of moved) {
    const [count, nbytes] = found.get(keyOf(one)) ?? [0, 0];
    found.set(keyOf(one), [count + one.count, nbytes + one.nbytes]);
  }
  return [...found].map(([key, [count, nbytes]]): [Key, number, number] => [key, count, nbytes]);
}

/** By dimension of the mesh and collective, the most bytes first. */
export function byDimension(moved: readonly Movement[]): DimensionRow[] {
  const rows = sums(moved, (one) => JSON.stringify([one.dimension, one.collective]));
  return rows
    .map(([key, count, nbytes]): DimensionRow => [...(JSON.parse(key) as [string, string]), count, nbytes])
    .sort((a, b) => b[3] - a[3]);
}

/** One sentence: "the last cell moved 1.20 GB in 14 all-gathers; 9 of them from Cell In[4]:7". */
export function movedText(moved: readonly Movement[]): string {
  if (!moved.length) return say`the last cell moved nothing between ranks`;
  const kinds = sums(moved, (one) => one.collective).sort((a, b) => b[1] - a[1]);
  const lines = sums(moved, (one) => one.line.at).sort((a, b) => b[1] - a[1]);
  const [most, count] = lines[0] as [string, number, number];
  const where = !most ? "" : lines.length > 1 ? say`; ${count} of them from ${most}` : `, from ${most}`;
  const total = moved.reduce((sum, one) => sum + one.nbytes, 0);
  return say`the last cell moved ${size(total)} in ${kinds.map(([kind, times]) => plural(times, kind)).join(" and ")}${where}`;
}

/** How long that took: "ranks were busy with it, or waited for each other, for 12.3 ms along data (the quickest 11.0 ms)". */
export function busyText(busy: readonly Busy[]): string {
  const times = busy.map(({ dimensions, most, least }) => `${seconds(most)} along ${dimensions}${least < 0.9 * most ? say` (the quickest ${seconds(least)})` : ""}`);
  return say`ranks were busy with it, or waited for each other, for ${times.join(", ")}`;
}

function seconds(value: number): string {
  return value >= 1 ? `${value.toFixed(2)} s` : `${(value * 1000).toFixed(1)} ms`;
}

/** What there is: "12 tensors · 64.0 MB · 16.0 MB on the fullest rank". */
export function factsOf(tensors: Pick<Tensors, "count" | "nbytes" | "largest" | "labels" | "sizes" | "lost" | "gone">): string {
  const mesh = tensors.labels.map((label, d) => `${label}=${tensors.sizes[d]}`).join(" ");
  const count = plural(tensors.count, "tensor");
  if (tensors.lost) return [mesh, `${count}, lost`, size(tensors.nbytes)].join(" · ");
  return [mesh, count, ...(tensors.gone ? [say`${tensors.gone} of them lost`] : []), size(tensors.nbytes), say`${size(tensors.largest)} on the fullest rank`].join(" · ");
}
