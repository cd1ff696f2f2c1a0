import fc from "fast-check";
import { describe, expect, it } from "vitest";

import { Row, countsAt, factsOf, lookOf, targetOf, rowsOf } from "../../src/panel/tree";
import { actors, four, many, turn } from "../made";

const NOW = 1000;
const CLOSED = new Set<string>();

describe("the rows of a mesh on one host", () => {
  it("are the mesh, its actors, its processes", () => {
    const state = four();
    expect(rowsOf(state, CLOSED).map((row) => [row.level, row.kind, lookOf(state, row, NOW).name])).toEqual([
      [1, "mesh", "workers"],
      [2, "actors", "trainers"],
      [2, "proc", "gpus=0"],
      [2, "proc", "gpus=1"],
      [2, "proc", "gpus=2"],
      [2, "proc", "gpus=3"],
    ]);
  });

  it("show the actors of a process that was opened", () => {
    const state = four();
    state.meshes.e = actors("evaluators", "w", state.meshes.t as never, { sizes: [1], offset: 2, counts: { idle: 1 } });
    const rows = rowsOf(state, new Set(["p:w:2"]));
    const opened = rows.filter((row) => row.parent === "p:w:2");
    expect(opened.map((row) => [row.level, lookOf(state, row, NOW).name, row.index])).toEqual([
      [3, "trainers", 2],
      [3, "evaluators", 0],
    ]);
  });

  it("say what a rank does and how it failed", () => {
    const state = four();
    turn(state, "w", 1, "busy", { endpoint: "trainers.step", since: NOW - 72 });
    turn(state, "w", 2, "failed", { detail: "killed by signal 9 (SIGKILL)" });
    const looks = rowsOf(state, CLOSED).map((row) => lookOf(state, row, NOW));
    expect(looks[0]?.counts).toEqual([["failed", 1], ["busy", 1], ["idle", 2]]);
    expect(looks[0]?.spoken).toBe("mesh, workers, gpus=4, 1 failed, 1 busy, 2 idle");
    expect(looks[3]).toMatchObject({ name: "gpus=1", note: "trainers.step 1 min 12 s", state: "busy" });
    expect(looks[4]).toMatchObject({ note: "killed by signal 9 (SIGKILL)", state: "failed", spoken: "gpus=2, failed, killed by signal 9 (SIGKILL)" });
  });

  it("end at a mesh that was stopped", () => {
    const state = four();
    Object.assign(state.meshes.w as object, { stopped: "stopped by a click" });
    delete state.meshes.t;
    const rows = rowsOf(state, CLOSED);
    expect(rows).toHaveLength(1);
    expect(rows[0]?.expandable).toBe(false);
    expect(lookOf(state, rows[0] as Row, NOW).note).toMatch(/^stopped by a click at \d\d:16:40$/);
  });
});

describe("the rows of many hosts", () => {
  it("are the hosts with their counts; processes only where a host is open", () => {
    const state = many(8);
    turn(state, "w", 19, "failed");
    const rows = rowsOf(state, new Set(["h:w:2"]));
    expect(rows.filter((row) => row.kind === "host")).toHaveLength(8);
    expect(rows.filter((row) => row.kind === "proc").map((row) => row.index)).toEqual([16, 17, 18, 19, 20, 21, 22, 23]);
    const host = rows.find((row) => row.key === "h:w:2") as Row;
    expect(lookOf(state, host, NOW)).toMatchObject({ name: "node2", counts: [["failed", 1], ["idle", 7]] });
    expect(targetOf(host)).toEqual({ uid: "w", ranks: [16, 17, 18, 19, 20, 21, 22, 23] });
    expect(countsAt(state, "w", targetOf(host).ranks)).toEqual({ failed: 1, idle: 7 });
  });

  it("are one row for a thousand ranks until it is opened", () => {
    const state = many(125);
    expect(rowsOf(state, CLOSED)).toHaveLength(1);
    expect(rowsOf(state, new Set(["m:w"]))).toHaveLength(1 + 1 + 125);
  });

  it("form a tree whatever is open: parents before children, places complete, keys unique", () => {
    const state = many(5);
    const every = ["m:w", "a:t", ...[0, 1, 2, 3, 4].map((at) => `h:w:${at}`), ...Array.from({ length: 40 }, (_, at) => `p:w:${at}`)];
    fc.assert(
      fc.property(fc.subarray(every), (turned) => {
        const rows = rowsOf(state, new Set(turned));
        const seen = new Map<string, Row>();
        const children = new Map<string, number[]>();
        for (const row of rows) {
          expect(seen.has(row.key)).toBe(false);
          const parent = seen.get(row.parent);
          expect(row.level).toBe((parent?.level ?? 0) + 1);
          if (parent) expect(parent.expanded).toBe(true);
          children.set(row.parent, [...(children.get(row.parent) ?? []), row.position]);
          expect(row.position).toBeLessThanOrEqual(row.siblings);
          seen.set(row.key, row);
        }
        for (const [parent, places] of children) {
          expect(places).toEqual(places.map((_, at) => at + 1));
          expect(places).toHaveLength(rows.find((row) => row.parent === parent)?.siblings ?? 0);
        }
      }),
    );
  });
});

it("facts of a rank name its host, process and what to do", () => {
  const state = four();
  state.failures["7"] = { mesh: "t", name: "trainers", ranks: [2], title: "trainers died", state: "open", at: NOW, next: "heal_mesh(trainers)" };
  turn(state, "w", 2, "failed", { pid: 411, failure: "7", detail: "killed" });
  const row = rowsOf(state, CLOSED).find((one) => one.key === "p:w:2") as Row;
  expect(Object.fromEntries(factsOf(state, row, NOW))).toMatchObject({ state: "failed · killed", host: "node0 · pid 411", next: "heal_mesh(trainers)" });
});
