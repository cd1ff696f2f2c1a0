// Reading the state: where ranks lie, and what selects them.

import fc from "fast-check";
import { expect, it } from "vitest";

import { baseOf, countOf, indexOfBase, pointOf, rankOf } from "../src/cluster/ranks";
import { ranksFrom, sliceExpression } from "../src/cluster/slices";
import { four } from "./made";

it("takes a rank without a record to be as its mesh is, and one of a mesh that is gone to be stopped", () => {
  const state = { ...four(), ranks: { w: { 1: { state: "busy" as const }, 2: { pid: 7 } } } };
  expect([0, 1, 2].map((index) => rankOf(state, "w", index).state)).toEqual(["idle", "busy", "idle"]);
  expect(rankOf(state, "gone", 0).state).toBe("stopped");
});

it("finds ranks by their base ranks, for slices with offset and steps too", () => {
  const meshes = [
    { sizes: [4], strides: [1] },
    { sizes: [2, 3], strides: [8, 2], offset: 1 },
    { sizes: [], strides: [], offset: 5 },
    { sizes: [3, 2], strides: [1, 4] },
  ];
  for (const mesh of meshes)
    for (let index = 0; index < countOf(mesh.sizes); index++) expect(indexOfBase(mesh, baseOf(mesh, index))).toBe(index);
  expect(indexOfBase({ sizes: [2], strides: [2], offset: 1 }, 2)).toBe(-1);
  const shrunk = { sizes: [3], strides: [], offset: 0, picked: [0, 2, 3] };
  expect([0, 1, 2].map((index) => baseOf(shrunk, index))).toEqual([0, 2, 3]);
  expect([0, 1, 2, 3].map((base) => indexOfBase(shrunk, base))).toEqual([0, -1, 1, 2]);
});

it("writes what is selected as the slice that gives it", () => {
  const of = (...indices: number[]): string => sliceExpression("trainers", ["hosts", "gpus"], [2, 4], indices);
  expect(of(0, 1)).toBe("trainers.slice(hosts=0, gpus=slice(0, 2))");
  expect(of(0, 1, 2, 3)).toBe("trainers.slice(hosts=0)");
  expect(of(1, 5)).toBe("trainers.slice(gpus=1)");
  expect(of(0, 2)).toBe("trainers.slice(hosts=0, gpus=slice(0, 3, 2))");
  expect(of(0, 1, 2, 3, 4, 5, 6, 7)).toBe("trainers");
  expect(of(0, 5)).toBe(""); // no box
  expect(of()).toBe("");
});

it("selects by every slice expression exactly the ranks that it was made of", () => {
  const sizes = [3, 2, 4];
  const some = fc.uniqueArray(fc.nat(23), { minLength: 1, maxLength: 6 }).map((indices) => indices.sort((a, b) => a - b));
  fc.assert(
    fc.property(some, (indices) => {
      const expression = sliceExpression("m", ["a", "b", "c"], sizes, indices);
      if (expression) expect(selected(expression, sizes)).toEqual(indices);
    }),
    { numRuns: 300 },
  );
});

/** The indices that a slice expression over the dimensions a, b and c selects. */
function selected(expression: string, sizes: number[]): number[] {
  const picks: Record<string, [from: number, to: number, step: number]> = {};
  for (const [, label = "", from, to, step = "1", at] of expression.matchAll(/(\w)=(?:slice\((\d+), (\d+)(?:, (\d+))?\)|(\d+))/g))
    picks[label] = at === undefined ? [Number(from), Number(to), Number(step)] : [Number(at), Number(at) + 1, 1];
  return Array.from({ length: countOf(sizes) }, (_, index) => index).filter((index) =>
    pointOf(sizes, index).every((at, d) => {
      const [from, to, step] = picks["abc"[d] as string] ?? [0, Infinity, 1];
      return at >= from && at < to && (at - from) % step === 0;
    }),
  );
}

it("reads ranks by number, by range and by dimension, and says what means nothing", () => {
  const of = (text: string): number[] | null | undefined => ranksFrom(text, ["hosts", "gpus"], [2, 4]);
  expect(of("  ")).toBe(null);
  expect(of("0, 4-6")).toEqual([0, 4, 5, 6]);
  expect(of("hosts=1")).toEqual([4, 5, 6, 7]);
  expect(of("hosts=0 gpus=1:3")).toEqual([1, 2]);
  expect(of("gpus=:1")).toEqual([0, 4]);
  expect(of("6-99")).toEqual([6, 7]);
  for (const wrong of ["all", "1-", "cpus=1", "gpus="]) expect(of(wrong), wrong).toBe(undefined);
});
