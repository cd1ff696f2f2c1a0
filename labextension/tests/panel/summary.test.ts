import { describe, expect, it } from "vitest";

import { Mesh } from "../../src/cluster/state";
import { summaryOf } from "../../src/panel/summary";
import { actors, empty, four, many, procs, turn } from "../made";

describe("the line of the status bar", () => {
  it("says so where there is nothing", () => {
    expect(summaryOf(empty()).text).toBe("no meshes");
  });

  it("counts processes, not the actors on them", () => {
    expect(summaryOf(four()).text).toBe("2 meshes · 4/4 ranks");
  });

  it("says how many run something", () => {
    const state = many(8);
    for (const index of [0, 5, 9]) turn(state, "w", index, "busy");
    turn(state, "w", 3, "failed");
    expect(summaryOf(state).text).toBe("2 meshes · 63/64 ranks · 3 busy · 1 failed");
  });

  it("names what is not well, the worst first", () => {
    const state = many(8);
    turn(state, "w", 3, "failed");
    turn(state, "w", 9, "paused");
    turn(state, "w", 10, "unresponsive");
    expect(summaryOf(state).text).toBe("2 meshes · 62/64 ranks · 1 failed · 1 unresponsive · 1 paused");
  });

  it("counts a process whose actor failed once, however many of its actors did", () => {
    const state = four();
    state.meshes.u = actors("evaluators", "w", state.meshes.t as Mesh, { counts: { idle: 4 } });
    turn(state, "t", 1, "failed");
    turn(state, "u", 1, "failed");
    expect(summaryOf(state)).toMatchObject({ ranks: 4, well: 3, failed: 1, text: "3 meshes · 3/4 ranks · 1 failed" });
    turn(state, "w", 1, "failed");
    expect(summaryOf(state)).toMatchObject({ well: 3, failed: 1 });
  });

  it("leaves out what was stopped", () => {
    const state = four();
    state.meshes.old = procs("old", ["gpus"], [8], { stopped: "stopped by a click" });
    expect(summaryOf(state).text).toBe("2 meshes · 4/4 ranks");
    expect(summaryOf({ ...empty(), meshes: { one: procs("one", [], []) } }).text).toBe("1 mesh · 1/1 ranks");
  });
});
