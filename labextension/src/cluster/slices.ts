// Selections of ranks in code and in words.

import { countOf, pointOf } from "./ranks";

/** A slice expression for the ranks that are selected, or "" if they are no box with equal steps. */
export function sliceExpression(name: string, labels: readonly string[], sizes: readonly number[], indices: readonly number[]): string {
  if (!indices.length) return "";
  const points = indices.map((index) => pointOf(sizes, index));
  const picks: string[] = [];
  let expected = 1;
  for (const [d, label] of labels.entries()) {
    const values = [...new Set(points.map((point) => point[d] as number))].sort((a, b) => a - b);
    const [first, second] = values as [number, number?];
    expected *= values.length;
    if (values.length === sizes[d] && values.length > 1) continue;
    if (second === undefined) {
      picks.push(`${label}=${first}`);
      continue;
    }
    const step = second - first;
    if (values.some((value, position) => value !== first + position * step)) return "";
    const end = (values.at(-1) as number) + 1;
    picks.push(`${label}=slice(${first}, ${end}${step > 1 ? `, ${step}` : ""})`);
  }
  if (expected !== indices.length) return "";
  return picks.length ? `${name}.slice(${picks.join(", ")})` : name;
}

/** Ranks in words, "0, 4-7" or "hosts=1 gpus=0:4", as indices; null for all of them, undefined for invalid text. */
export function ranksFrom(text: string, labels: readonly string[], sizes: readonly number[]): number[] | null | undefined {
  if (!text.trim()) return null;
  return text.includes("=") ? ranksByDimension(text, labels, sizes) : ranksByNumber(text, countOf(sizes));
}

function ranksByDimension(text: string, labels: readonly string[], sizes: readonly number[]): number[] | undefined {
  const ranges = labels.map((): [number, number] => [0, Infinity]);
  for (const part of text.trim().split(/[\s,]+/)) {
    const [, label = "", from = "", colon = "", to = ""] = /^(\w+)=(\d*)(?:(:)(\d*))?$/.exec(part) ?? [];
    const d = labels.indexOf(label);
    if (d < 0 || (!from && !colon)) return undefined;
    const begin = Number(from || 0);
    ranges[d] = [begin, colon ? Number(to || Infinity) : begin + 1];
  }
  const every = Array.from({ length: countOf(sizes) }, (_, index) => index);
  return every.filter((index) => pointOf(sizes, index).every((coordinate, d) => coordinate >= (ranges[d]?.[0] ?? 0) && coordinate < (ranges[d]?.[1] ?? 0)));
}

function ranksByNumber(text: string, count: number): number[] | undefined {
  const ranks = new Set<number>();
  for (const part of text.split(",")) {
    const match = /^\s*(\d+)\s*(?:[-–:]\s*(\d+))?\s*$/.exec(part);
    if (!match) return undefined;
    const last = Math.min(count - 1, Number(match[2] ?? match[1]));
    for (let index = Number(match[1]); index <= last; index++) ranks.add(index);
  }
  return [...ranks];
}

/** Ranks as magics take them: `gpus=0,2-3`, or `hosts=0 gpus=1; hosts=1 gpus=0`; "" for all of them. */
export function placeText(labels: readonly string[], sizes: readonly number[], indices: readonly number[] | null): string {
  if (indices === null || !labels.length || indices.length === countOf(sizes)) return "";
  const points = indices.map((index) => pointOf(sizes, index));
  const box = boxText(labels, sizes, points);
  if (box !== null) return box;
  const rows = [...new Set(points.map(([first]) => first))].map((first) => points.filter((point) => point[0] === first));
  return rows.flatMap((row) => boxText(labels, sizes, row) ?? row.map((point) => boxText(labels, sizes, [point]))).join("; ");
}

/** A box of ranks, by the dimensions that it restricts; null if the ranks are no box. */
function boxText(labels: readonly string[], sizes: readonly number[], points: readonly number[][]): string | null {
  const values = labels.map((_, d) => [...new Set(points.map((point) => point[d] as number))].sort((a, b) => a - b));
  if (countOf(values.map((range) => range.length)) !== points.length) return null;
  return labels.flatMap((label, d) => ((values[d] as number[]).length === sizes[d] && points.length > 1 ? [] : [`${label}=${spans(values[d] as number[])}`])).join(" ");
}

function spans(values: readonly number[]): string {
  const parts: [number, number][] = [];
  for (const value of values) {
    const last = parts.at(-1);
    if (last && last[1] === value - 1) last[1] = value;
    else parts.push([value, value]);
  }
  return parts.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join(",");
}
