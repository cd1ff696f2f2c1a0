// Queries over many ranks: words, each of which a rank must match.

import { pointOf } from "./ranks";
import { type Rank, STATES } from "./state";

/** The data of one rank for a query. `index` is row-major in `sizes`. */
export interface Found {
  rank: Rank;
  point: readonly number[];
  index: number;
  host: string;
}

export type Fits = (candidate: Found) => boolean;

const SCALES: Readonly<Record<string, number>> = { "": 1, "%": 0.01, kb: 1 << 10, mb: 1 << 20, gb: 1 << 30 };
const MEASURED = ["cpu", "memory", "gpu", "gpu_memory", "queue", "rate", "errors", "calls"] as const;

/**
 * The predicate of a query: states ("failed"), places ("hosts=3", "gpus=0:4"), ranks ("12", "4-7"), measurements
 * ("cpu>50%", "memory>2GB"), or a part of a host's name, an endpoint or a reason. null for an empty query.
 */
export function fitting(query: string, labels: readonly string[]): Fits | null {
  const fits = query.trim().toLowerCase().split(/\s+/).filter(Boolean).map((word) => fitOf(word, labels));
  return fits.length ? (candidate) => fits.every((fit) => fit(candidate)) : null;
}

function fitOf(word: string, labels: readonly string[]): Fits {
  const state = STATES.find((candidate) => candidate === word);
  if (state) return ({ rank }) => rank.state === state;
  const [, label = "", from = "", colon, to = ""] = /^(\w+)=(\d*)(?:(:)(\d*))?$/.exec(word) ?? [];
  const d = labels.findIndex((dimension) => dimension.toLowerCase() === label);
  if (d >= 0 && (from || colon)) {
    const begin = Number(from || 0);
    const end = colon ? Number(to || Infinity) : begin + 1;
    return ({ point }) => (point[d] ?? -1) >= begin && (point[d] ?? -1) < end;
  }
  const range = /^(\d+)(?:[-–](\d+))?$/.exec(word);
  if (range) return ({ index }) => index >= Number(range[1]) && index <= Number(range[2] ?? range[1]);
  const [, key = "", sign, value, unit = ""] = /^(\w+)([<>])(\d+(?:\.\d+)?)(%|kb|mb|gb)?$/.exec(word) ?? [];
  const measured = MEASURED.find((candidate) => candidate === key);
  if (measured && value) {
    const limit = Number(value) * (SCALES[unit] ?? 1);
    return ({ rank }) => {
      const measurement = rank[measured];
      return measurement !== undefined && (sign === ">" ? measurement > limit : measurement < limit);
    };
  }
  const holds = (text: string | undefined): boolean => Boolean(text?.toLowerCase().includes(word));
  return ({ rank, host }) => holds(host) || holds(rank.endpoint) || holds(rank.detail);
}

/** The query with a word added, or removed if it is there. */
export function toggled(query: string, word: string): string {
  const words = query.trim().split(/\s+/).filter(Boolean);
  const without = words.filter((part) => part !== word);
  return (without.length < words.length ? without : [...words.filter((other) => !STATES.some((state) => state === other)), word]).join(" ");
}

/** The indices that a query finds. */
export function found(fits: Fits, sizes: readonly number[], count: number, rankAt: (index: number) => Rank, hostAt: (index: number) => string): number[] {
  const indices: number[] = [];
  for (let index = 0; index < count; index++)
    if (fits({ rank: rankAt(index), point: pointOf(sizes, index), index, host: hostAt(index) })) indices.push(index);
  return indices;
}
