import { describe, expect, it } from "vitest";

import { placeText } from "../../src/cluster/slices";
import type { ClusterState } from "../../src/cluster/state";
import { ACTIONS, type Target, targetAt, words } from "../../src/panel/table";
import { actors, four, many, turn } from "../made";

function at(state: ClusterState, uid: string, ranks: number[] | null, variables: Record<string, string> = {}): Target {
  return targetAt(state, uid, ranks, variables) as Target;
}

function codes(on: Target, typed = ""): Record<string, string> {
  return Object.fromEntries(ACTIONS.filter((action) => action.applies(on)).map((action) => [action.name, action.code(on, typed)]));
}

describe("the table of actions", () => {
  it("has one name, one key and one line of code for each", () => {
    const on = at(four(), "w", [1]);
    for (const field of ["name", "key", "label"] as const) expect(new Set(ACTIONS.map((action) => action[field])).size).toBe(ACTIONS.length);
    for (const action of ACTIONS) expect(action.code(on, "x")).toMatch(/^%%?\w+ .*workers/);
  });

  it("offers what can be done now", () => {
    const state = four();
    expect(Object.keys(codes(at(state, "w", null)))).toEqual(["stack", "why", "logs", "timeline", "run", "restart", "stop", "kill"]);
    turn(state, "w", 2, "failed");
    turn(state, "t", 1, "busy");
    expect(codes(at(state, "w", [2]))).toMatchObject({ heal: "%heal workers gpus=2" });
    expect(codes(at(state, "t", [1]))).toMatchObject({ interrupt: "%interrupt trainers gpus=1", frames: "%mpm trainers gpus=1" });
    turn(state, "t", 3, "paused");
    expect(codes(at(state, "t", [3])).debug).toBe("%%mdb trainers gpus=3\nwhere");
    (state.meshes.w as { stopped?: string }).stopped = "by %stop";
    expect(Object.keys(codes(at(state, "w", null)))).toEqual(["logs"]);
  });

  it("uses the notebook's own name of a mesh, and magics' places", () => {
    const state = four();
    expect(codes(at(state, "w", [0, 2, 3], { mine: "w", _: "w" })).kill).toBe("%kill mine gpus=0,2-3");
    expect(codes(at(state, "w", null, { mine: "w", workers: "w" })).stop).toBe("%stop workers");
    expect(codes(at(state, "w", [1]), "x = rank").run).toBe("%%on workers gpus=1\nx = rank");
    expect(codes(at(state, "t", [1]), "Trainer.step if loss > 4").break).toBe("%break Trainer.step if loss > 4 on trainers gpus=1");
  });

  it("adds and removes hosts of meshes that have them, and replaces lost ones", () => {
    const state = many(3);
    expect(codes(at(state, "w", null))).toMatchObject({ grow: "%mesh workers hosts=+1", shrink: "%mesh workers hosts=-1" });
    expect(codes(at(state, "w", [0])).grow).toBeUndefined();
    expect(codes(at(state, "w", null)).spare).toBeUndefined();
    (state.hosts.h1 as { state: string }).state = "lost";
    expect(codes(at(state, "t", null)).spare).toBe("%heal trainers --replace");
  });

  it("asks before something is lost", () => {
    const state = four();
    const asks = (on: Target): string[] => ACTIONS.filter((action) => action.loses?.(on)).map((action) => action.name);
    expect(asks(at(state, "t", [0]))).toEqual(["shrink", "restart", "stop", "kill"]);
    turn(state, "t", 0, "busy");
    turn(state, "t", 1, "busy");
    expect(asks(at(state, "t", null))).toContain("interrupt");
    expect(words(at(state, "t", [0, 1]))).toBe("2 ranks of trainers");
  });

  it("takes a breakpoint's condition apart", () => {
    const { does } = ACTIONS.find(({ name }) => name === "break") as { does: { more?: (typed: string) => object } } & (typeof ACTIONS)[number];
    expect(does.more?.("train.py:42 if loss > 4 if x else 0")).toEqual({ do: "break", where: "train.py:42", condition: "loss > 4 if x else 0" });
    expect(does.more?.("Trainer.step")).toEqual({ do: "break", where: "Trainer.step", condition: "" });
  });
});

describe("ranks as magics take them", () => {
  const labels = ["hosts", "gpus"];
  const sizes = [3, 4];

  it.each([
    [null, ""],
    [[4], "hosts=1 gpus=0"],
    [[4, 5, 6, 7], "hosts=1"],
    [[1, 2, 3, 5, 6, 7, 9, 10, 11], "gpus=1-3"],
    [[0, 5, 6], "hosts=0 gpus=0; hosts=1 gpus=1-2"],
    [Array.from({ length: 12 }, (_, index) => index), ""],
  ])("%j is %s", (ranks, text) => expect(placeText(labels, sizes, ranks)).toBe(text));

  it("has none for a mesh of one", () => expect(placeText([], [], [0])).toBe(""));
});

it("actors on a part of a mesh have their own places", () => {
  const state = four();
  state.meshes.p = actors("part", "w", state.meshes.w as never, { sizes: [2], offset: 2, counts: { idle: 2 } });
  expect(codes(at(state, "p", [1])).kill).toBe("%kill part gpus=1");
});
