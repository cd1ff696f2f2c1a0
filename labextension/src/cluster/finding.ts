// What people look for among many ranks: words, each of which a rank must fit.

import { pointOf } from "./ranks";
import { type Rank, STATES } from "./state";

/** What can be asked of one rank. `index` is row-major in `sizes`. */
export interface Found {
  rank: Rank;
  point: readonly number[];
  index: number;
  host: string;
}

export type Fits = (found: Found) => boolean;

const SCALES: Readonly<Record<string, number>> = { "": 1, "%": 0.01, kb: 1 << 10, mb: 1 << 20, gb: 1 << 30 };
const MEASURED = ["cpu", "memory", "gpu", "gpu_memory", "queue", "rate", "errors", "calls"] as const;

/**
 * What a query asks for: states ("failed"), places ("hosts=3", "gpus=0:4"), ranks ("12", "4-7"), measurements
 * ("cpu>50%", "memory>2GB"), or a part of a host's name, an endpoint or a reason. null where nothing is asked.
 */
export function fitting(query: string, labels: readonly string[]): Fits | null {
  const fits = query.trim().toLowerCase().split(/\s+/).filter(Boolean).map((word) => fitOf(word, labels));
  return fits.length ? (found) => fits.every((fit) => fit(found)) : null;
}

function fitOf(word: string, labels: readonly string[]): Fits {
  const state = STATES.find((each) => each === word);
  if (state) return ({ rank }) => rank.state === state;
  const [, label = "", from = "", colon, to = ""] = /^(\w+)=(\d*)(?:(:)(\d*))?$/.exec(word) ?? [];
  const d = labels.findIndex((each) => each.toLowerCase() === label);
  if (d >= 0 && (from || colon)) {
    const begin = Number(from || 0);
    const end = colon ? Number(to || Infinity) : begin + 1;
    return ({ point }) => (point[d] ?? -1) >= begin && (point[d] ?? -1) < end;
  }
  const range = /^(\d+)(?:[-–](\d+))?$/.exec(word);
  if (range) return ({ index }) => index >= Number(range[1]) && index <= Number(range[2] ?? range[1]);
  const [, what = "", sign, value, unit = ""] = /^(\w+)([<>])(\d+(?:\.\d+)?)(%|kb|mb|gb)?$/.exec(word) ?? [];
  const measured = MEASURED.find((each) => each === what);
  if (measured && value) {
    const limit = Number(value) * (SCALES[unit] ?? 1);
    return ({ rank }) => {
      const known = rank[measured];
      return known !== undefined && (sign === ">" ? known > limit : known < limit);
    };
  }
  const holds = (text: string | undefined): boolean => Boolean(text?.toLowerCase().includes(word));
  return ({ rank, host }) => holds(host) || holds(rank.endpoint) || holds(rank.detail);
}

/** A word of a query added where it is missing, taken out where it is there. */
export function toggled(query: string, word: string): string {
  const words = query.trim().split(/\s+/).filter(Boolean);
  const without = words.filter((each) => each !== word);
  return (without.length < words.length ? without : [...words.filter((each) => !STATES.some((state) => state === each)), word]).join(" ");
}

/** The indices that a query finds. */
export function found(fits: Fits, sizes: readonly number[], count: number, rankAt: (index: number) => Rank, hostAt: (index: number) => string): number[] {
  const indices: number[] = [];
  for (let index = 0; index < count; index++)
    if (fits({ rank: rankAt(index), point: pointOf(sizes, index), index, host: hostAt(index) })) indices.push(index);
  return indices;
}
