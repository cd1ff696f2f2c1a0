// Ten thousand ranks: what is looked for, what differs, and how much of it a page holds.

import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";

import { Cluster } from "../src/cluster/client";
import { differences } from "../src/cluster/differing";
import { fitting, found, toggled } from "../src/cluster/finding";
import { rankOf } from "../src/cluster/ranks";
import type { ClusterState } from "../src/cluster/state";
import { rowsOf } from "../src/panel/tree";
import { meshView } from "../src/views/mesh";
import { many, turn } from "./made";

const MOST_ELEMENTS = 3000;

function finds(state: ClusterState, uid: string, query: string): number[] {
  const mesh = state.meshes[uid];
  const fits = mesh && fitting(query, mesh.labels);
  return mesh && fits ? found(fits, mesh.sizes, mesh.sizes.reduce((a, b) => a * b), (index) => rankOf(state, uid, index), (index) => `node${index >> 3}`) : [];
}

describe("looking for ranks", () => {
  it("takes states, hosts, places, numbers, endpoints and measurements, all of which must fit", () => {
    const state = many(4);
    turn(state, "t", 9, "busy", { endpoint: "step", memory: 3 * 2 ** 30, cpu: 0.7 });
    turn(state, "t", 10, "failed", { detail: "killed by signal 9" });
    expect(finds(state, "t", "busy")).toEqual([9]);
    expect(finds(state, "t", "STEP hosts=1")).toEqual([9]);
    expect(finds(state, "t", "signal")).toEqual([10]);
    expect(finds(state, "t", "node3 gpus=0:2")).toEqual([24, 25]);
    expect(finds(state, "t", "4-6 gpus=5:")).toEqual([5, 6]);
    expect(finds(state, "t", "memory>2GB")).toEqual([9]);
    expect(finds(state, "t", "cpu<50%")).toEqual([]);
    expect(finds(state, "t", "busy failed")).toEqual([]);
    expect(fitting("  ", ["gpus"])).toBeNull();
  });

  it("turns a state on and off, and takes one state at a time", () => {
    expect(toggled("node1", "failed")).toBe("node1 failed");
    expect(toggled("node1 failed", "busy")).toBe("node1 busy");
    expect(toggled("node1 busy", "busy")).toBe("node1");
  });

  it("leaves in the tree what is found, under its mesh and its hosts", () => {
    const state = many(1250);
    turn(state, "t", 4001, "failed", { detail: "killed" });
    turn(state, "w", 9998, "unresponsive");
    const rows = rowsOf(state, new Set(), "failed");
    expect(rows.map((row) => row.key)).toEqual(["m:w", "h:w:500", "p:w:4001"]);
    expect(rowsOf(state, new Set(), "unresponsive").map((row) => row.key)).toEqual(["m:w", "h:w:1249", "p:w:9998"]);
    expect(rowsOf(state, new Set(), "gpus=0")).toHaveLength(1251);
    expect(rowsOf(state, new Set(), "nobody")).toEqual([]);
  });
});

describe("what differs", () => {
  it("is a line for each kind, the worst first", () => {
    const state = many(2);
    turn(state, "t", 3, "busy", { endpoint: "step" });
    turn(state, "t", 4, "busy", { endpoint: "load" });
    turn(state, "t", 5, "busy", { endpoint: "load" });
    turn(state, "t", 6, "failed", { detail: "out of memory" });
    const kinds = differences(16, (index) => rankOf(state, "t", index), 8);
    expect(kinds.map(({ what, indices }) => [what, indices.length])).toEqual([["failed: out of memory", 1], ["busy: load", 2], ["busy: step", 1], ["idle", 12]]);
  });

  it("names those that use far more or less than most, and nobody where all use about the same", () => {
    const state = many(10);
    const memory = (index: number): number => ((1000 + (index % 7)) << 20) * (index === 42 ? 3 : 1);
    state.ranks.w = Object.fromEntries(Array.from({ length: 80 }, (_, index) => [index, { memory: memory(index), cpu: 0.5 + (index % 5) / 100 }]));
    const kinds = differences(80, (index) => rankOf(state, "w", index), 8);
    expect(kinds.map(({ what, indices }) => [what, indices.length > 1 ? 80 : indices])).toEqual([["idle", 80], ["memory up to 2.9 GB, most have 1003 MB", [42]]]);
  });

  it("sums up what is too much to list, and loses no rank", () => {
    const state = many(100);
    for (let index = 0; index < 800; index++) turn(state, "w", index, "failed", { detail: `reason ${index % 300}` });
    const kinds = differences(800, (index) => rankOf(state, "w", index), 12);
    expect(kinds).toHaveLength(13);
    expect(kinds.at(-1)?.what).toBe("288 more kinds");
    expect(new Set(kinds.flatMap(({ indices }) => indices)).size).toBe(800);
  });
});

describe("a page with many ranks", () => {
  const drawn = new Proxy({}, { get: () => () => undefined, set: () => true });
  const roots: (() => void)[] = [];

  beforeEach(() => {
    vi.spyOn(HTMLCanvasElement.prototype, "getContext").mockReturnValue(drawn as never);
    document.body.replaceChildren();
  });
  afterEach(() => {
    for (const end of roots.splice(0)) end();
    vi.restoreAllMocks();
  });

  function show(hosts: number): { root: HTMLElement; cluster: Cluster } {
    const state = many(hosts);
    turn(state, "w", 5, "failed", { detail: "killed" });
    const root = document.body.appendChild(document.createElement("div"));
    const cluster = new Cluster({ send: () => undefined, onMessage: () => () => undefined }, { state, now: 100 });
    roots.push(meshView(cluster, root, { mesh: "w" }) as () => void);
    return { root, cluster };
  }

  it.each([125, 1250, 10_000])("holds no more elements with %i hosts than it can", (hosts) => {
    const { root } = show(hosts);
    (root.querySelector("button[aria-expanded]") as HTMLElement).click();
    expect(root.querySelectorAll(".mnb-kind")).toHaveLength(2);
    expect(root.querySelectorAll("*").length).toBeLessThan(MOST_ELEMENTS);
  });

  it("dims what is not looked for, and a click on a kind selects its ranks", () => {
    const { root } = show(20);
    const input = root.querySelector(".mnb-query") as HTMLInputElement;
    input.value = "failed";
    input.dispatchEvent(new Event("input"));
    expect(root.querySelectorAll(".mnb-cell:not(.mnb-out)")).toHaveLength(1);
    expect(root.querySelector(".mnb-findline [role=status]")?.textContent).toBe("1 of 160");
    (root.querySelector("button[aria-expanded]") as HTMLElement).click();
    (root.querySelector(".mnb-kind") as HTMLElement).click();
    expect(root.querySelector('.mnb-cell[aria-selected="true"]')?.getAttribute("data-index")).toBe("5");
    input.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
    expect(root.querySelectorAll(".mnb-out")).toHaveLength(0);
  });
});
