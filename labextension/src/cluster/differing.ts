// Differences among many ranks: ranks that are alike share a line, those far from the others have lines of their own.

import { bytes } from "../page/words";
import { say } from "../page/language";
import { type Rank, type State, STATES } from "./state";

/** Ranks that are alike in one respect, and the text that describes them. */
export interface Difference {
  state: State;
  what: string;
  indices: number[];
}

const FAR = 6; // times the usual distance from the middle
const NOTABLE = 0.25; // of the middle: smaller differences are ignored
const FEWEST = 8; // values from which a median makes sense
const MEASURED: readonly [keyof Rank & ("cpu" | "memory" | "rate" | "queue"), string, (value: number) => string, number][] = [
  ["cpu", "CPU", (value) => `${Math.round(value * 100)} %`, 0.1],
  ["memory", "memory", bytes, 64 << 20],
  ["rate", "calls/s", (value) => value.toFixed(1), 1],
  ["queue", "waiting", String, 2],
];

/** Groups of ranks, the worst state first and then the largest; `most` of them, and one for all others. */
export function differences(count: number, rankAt: (index: number) => Rank, most: number): Difference[] {
  const groups = new Map<string, Difference>();
  const ranks = Array.from({ length: count }, (_, index) => rankAt(index));
  ranks.forEach((rank, index) => {
    const about = rank.state === "busy" ? rank.endpoint : rank.state === "unresponsive" ? "" : rank.detail;
    const key = `${rank.state} ${about ?? ""}`;
    const group = groups.get(key);
    if (group) group.indices.push(index);
    else groups.set(key, { state: rank.state, what: [rank.state, about].filter(Boolean).join(": "), indices: [index] });
  });
  const order = (state: State): number => STATES.indexOf(state);
  const sorted = [...groups.values()].sort((a, b) => order(a.state) - order(b.state) || b.indices.length - a.indices.length);
  const listed = [...sorted.slice(0, most), ...MEASURED.flatMap(([key, name, show, least]) => farOff(ranks, key, name, show, least))];
  const rest = sorted.slice(most);
  if (rest.length) listed.push({ state: (rest[0] as Difference).state, what: say`${rest.length} more kinds`, indices: rest.flatMap((difference) => difference.indices).sort((a, b) => a - b) });
  return listed;
}

/** Ranks whose measurement is far from the median, by the median of distances, which a few outliers cannot move. */
function farOff(ranks: readonly Rank[], field: "cpu" | "memory" | "rate" | "queue", name: string, show: (value: number) => string, least: number): Difference[] {
  const values = ranks.map((rank) => rank[field]).filter((value): value is number => value !== undefined);
  if (values.length < FEWEST) return [];
  const middle = median(values);
  const usual = median(values.map((value) => Math.abs(value - middle)));
  const far = Math.max(FAR * usual, NOTABLE * Math.abs(middle), least);
  const sides: [string, (value: number) => boolean, (values: number[]) => number][] = [
    [say`up to`, (value) => value > middle + far, (numbers) => numbers.reduce((a, b) => Math.max(a, b))],
    [say`down to`, (value) => value < middle - far, (numbers) => numbers.reduce((a, b) => Math.min(a, b))],
  ];
  return sides.flatMap(([word, isFar, end]) => {
    const indices = ranks.flatMap((rank, index) => (rank[field] !== undefined && isFar(rank[field]) ? [index] : []));
    if (!indices.length) return [];
    const last = end(indices.map((index) => (ranks[index] as Rank)[field] as number));
    return [{ state: (ranks[indices[0] as number] as Rank).state, what: say`${name} ${word} ${show(last)}, most have ${show(middle)}`, indices }];
  });
}

function median(values: number[]): number {
  const sorted = Float64Array.from(values).sort();
  return sorted[sorted.length >> 1] ?? 0;
}
