// What the views work out before they draw.

import { describe, expect, it } from "vitest";

import { Cluster } from "../src/cluster/client";
import type { ClusterState, Failure, Mesh } from "../src/cluster/state";
import { bytes, duration, number } from "../src/page/words";
import { coloursOf, rangeOf } from "../src/views/colours";
import { Curves, band, nearest, runsOf } from "../src/views/curves";
import { factsOf, words } from "../src/views/details";
import { hostsOf, noticeOf, together } from "../src/views/hosts";
import { type Layout, layout } from "../src/views/layout";
import { factsOfFailure, tailsOf } from "../src/views/failure";

describe("a grid", () => {
  const cellsOf = (plan: Layout): number[] => plan.rows.flatMap((row) => row.cells);

  it("has every rank once, whichever dimensions run across", () => {
    for (const across of [2, 0, [0], [0, 1], [1, 2], [0, 1, 2]]) {
      const plan = layout(["hosts", "nodes", "gpus"], [3, 2, 40], across);
      expect(cellsOf(plan).sort((a, b) => a - b), String(across)).toEqual(Array.from({ length: 240 }, (_, index) => index));
    }
  });

  it("names rows and columns by their coordinates", () => {
    const plan = layout(["hosts", "nodes", "gpus"], [2, 2, 3], [1, 2]);
    expect(plan.rows.map((row) => row.label)).toEqual(["hosts=0", "hosts=1"]);
    expect(plan.heads).toEqual(["0·0", "0·1", "0·2", "1·0", "1·1", "1·2"]);
    expect(plan.corner).toBe("nodes·gpus");
    expect(layout(["hosts", "gpus"], [2, 3], 0).rows.map((row) => row.cells)).toEqual([[0, 3], [1, 4], [2, 5]]);
  });

  it("is one cell for a mesh of one, and folds long lines with the ranks they hold", () => {
    expect(cellsOf(layout([], [], 0))).toEqual([0]);
    expect(layout(["gpus"], [64], 0).rows.map((row) => row.label)).toEqual(["gpus 0–15", "gpus 16–31", "gpus 32–47", "gpus 48–63"]);
  });
});

const PROCS: Mesh = { name: "workers", kind: "procs", labels: ["hosts", "gpus"], sizes: [2, 2], strides: [2, 1], offset: 0, hosts: ["h1", "h2"], per_host: 2, state: "idle" };
const ACTORS: Mesh = { name: "trainers", kind: "actors", class: "Trainer", labels: ["gpus"], sizes: [2], strides: [1], offset: 2, on: "p", state: "idle" };
const STATE: ClusterState = {
  hosts: { h1: { name: "node1", state: "up" }, h2: { name: "node2", state: "up" } },
  meshes: { p: PROCS, a: ACTORS },
  ranks: { p: { 3: { state: "busy", endpoint: "trainers.step", since: 90, pid: 12, cpu: 0.5, memory: 1 << 30 } }, a: { 1: { state: "busy", endpoint: "step", since: 90, queue: 2 } } },
  failures: {},
  sessions: { s: { mesh: "a", rank: 1, file: "train.py", line: 3, function: "step" } },
  detached: {},
  tensors: {},
  transfers: {},
};
const CLUSTER = { state: STATE, now: () => 100 };

describe("ranks", () => {
  it("are summed up by their hosts, the worst on top", () => {
    const hosts = hostsOf(STATE, PROCS, ["hosts", "gpus"], [2, 2], (index) => index);
    expect([hosts?.names, hosts?.on(1), hosts?.inner, hosts?.of(3)]).toEqual([["node1", "node2"], [2, 3], { labels: ["gpus"], sizes: [2] }, 1]);
    expect(together(STATE, "p", [2, 3])).toEqual({ state: "busy", parts: [["busy", 0.5], ["idle", 0.5]], counts: { idle: 1, busy: 1 } });
    expect(hostsOf(STATE, { ...PROCS, hosts: ["h1"], per_host: 4 }, ["gpus"], [4], (index) => index)).toBe(null);
  });

  it("are told whose hosts are about to be taken away", () => {
    const going = { name: "node1", state: "up" as const, notice: "Slurm job 7 is preempted" };
    const hosts = { ...STATE.hosts, h1: going };
    expect(noticeOf(STATE, ["h1", "h2"])).toBe("");
    expect(noticeOf({ hosts }, ["h2", "h1", "h1"])).toBe("host node1 is about to be taken away (Slurm job 7 is preempted)");
    const both = { h1: { ...going, until: 90 }, h2: { ...going, until: 60 } };
    expect(noticeOf({ hosts: both }, ["h1", "h2"])).toMatch(/^2 hosts are about .*, at \d\d:01:00$/);
  });

  it("are told with their actors, and actors with their process", () => {
    const proc = Object.fromEntries(factsOf(CLUSTER, "p", PROCS, 3));
    expect(proc).toMatchObject({ state: "busy with trainers.step, 10 s", host: "node2", process: "pid 12 · CPU 50 % · 1.0 GB Pss", trainers: "Trainer · busy with step · 2 waiting" });
    const actor = Object.fromEntries(factsOf(CLUSTER, "a", ACTORS, 1));
    expect(actor).toMatchObject({ process: proc.process, "stopped at": "train.py:3 in step" });
    expect(words({ stopped: "by you" }, { state: "busy" })).toBe("stopped");
  });

  it("can be told from what was saved of their mesh", () => {
    const { hosts, meshes, ranks, failures } = STATE;
    const cluster = new Cluster({ send: () => undefined, onMessage: () => () => undefined }, { now: 100, state: { hosts, meshes, ranks, failures } });
    expect(Object.fromEntries(factsOf(cluster, "p", PROCS, 3)).state).toBe("busy with trainers.step, 10 s");
  });

  it("can be coloured by what is known, and all of it lies within the range", () => {
    const colours = coloursOf({ 0: { cpu: 0.5 }, 1: { memory: 5 } }, { values: new Map([["loss", new Map([[0, -1], [1, 3]])]]) });
    expect(Object.keys(colours)).toEqual(["cpu", "memory", "metric:loss"]);
    const range = (key: string, values: (number | undefined)[]): unknown => colours[key] && rangeOf(colours[key], values);
    expect(range("cpu", [0.5, 2])).toEqual([0, 2]);
    expect(range("metric:loss", [-1, undefined, 3, NaN])).toEqual([-1, 3]);
    expect(range("metric:loss", [])).toEqual([0, 1]);
  });
});

describe("curves", () => {
  it("of several ranks give a mean with a band, of what is a number", () => {
    expect(band([{ points: [[0, 1], [1, 3]] }, { points: [[0, 3], [1, NaN], [2, 5]] }])).toEqual([[0, 2, 1, 3], [1, 3, 3, 3], [2, 5, 5, 5]]);
  });

  it("begin again where a run does", () => {
    expect(runsOf([[0, 5], [1, 4], [1, 3], [0, 6], [2, 1]])).toEqual([[[0, 5], [1, 4], [1, 3]], [[0, 6], [2, 1]]]);
    expect(runsOf([])).toEqual([]);
  });

  it("are read at the newest of the points that are nearest", () => {
    expect(nearest([[0, 1], [4, 2], [4, 3], [0, 9]], 3)).toEqual([4, 3]);
    expect(nearest([], 3)).toBe(undefined);
  });

  it("keep the newest points whole, and thin out the older half", () => {
    const curves = new Curves();
    for (let step = 0; step < 9000; step++) curves.add(7, step, step);
    const [line] = curves.lines((index) => `gpus=${index}`);
    expect(line?.label).toBe("gpus=7");
    expect(line?.points.length).toBeLessThanOrEqual(4000);
    expect(line?.points.slice(-1000).map(([x]) => x)).toEqual(Array.from({ length: 1000 }, (_, at) => 8000 + at));
    curves.keep(2);
    expect(curves.lines(String)[0]?.points).toEqual([[8998, 8998], [8999, 8999]]);
  });
});

describe("a failure", () => {
  const FAILURE: Failure = { mesh: "a", name: "trainers", ranks: [0], title: "failed", host: "h1", pid: 7, at: 50, detected: 52, also: ["workers"], next: "heal_mesh(trainers)", state: "open", oom: true, memory: "the host killed it because it ran out of memory; it used 9.81 GB 1 s before" };

  it("is told with where, when, who was told, and what to do while it is open", () => {
    const failure: Failure = { ...FAILURE, told: [["trainers", "asked"], ["trainers", "not handled"], ["<root>", "shown"]] };
    const story = Object.fromEntries(factsOfFailure(CLUSTER, failure));
    expect(story).toMatchObject({ what: "the host killed it because it ran out of memory; it used 9.81 GB 1 s before", where: "host node1, pid 7", affects: "workers", next: "heal_mesh(trainers)" });
    expect(story.since).toMatch(/, noticed 2\.0 s later$/);
    expect(story.reported).toBe("trainers was asked; then trainers did not handle it; then shown here because no call was waiting");
    expect(Object.fromEntries(factsOfFailure(CLUSTER, { ...failure, state: "healed" })).next).toBe(undefined);
  });

  it("of several ranks is told with all processes, and equal lines once", () => {
    const { host: _host, pid: _pid, ...bare } = FAILURE;
    const failure: Failure = { ...bare, ranks: [0, 1], processes: [["h1", [7, 8]], ["h9", []]], told: [["a call", "asked"], ["<root>", "shown"]], texts: [["gpus=0", "bad"]], last_lines: ["x"] };
    expect(Object.fromEntries(factsOfFailure(CLUSTER, failure))).toMatchObject({ where: "host node1, pids 7, 8; host h9", reported: "raised by the waiting call", "gpus=0": "bad" });
    expect(tailsOf(failure)).toEqual([["last lines of each", ["x"]]]);
    expect(tailsOf({ ...failure, lines: [["gpus=0", ["x"]], ["gpus=1", ["y"]]] })).toEqual([["last lines of gpus=0", ["x"]], ["last lines of gpus=1", ["y"]]]);
  });
});

it("says numbers, sizes and times briefly", () => {
  expect([0, 0.00001, 3.14159, 12345678].map(number)).toEqual(["0", "1.0e-5", "3.142", "1.2e+7"]);
  expect([null, NaN, Infinity].map(number)).toEqual(["not finite", "not finite", "not finite"]);
  expect([5 << 20, 3 * 2 ** 30].map(bytes)).toEqual(["5 MB", "3.0 GB"]);
  expect([1.25, 42, 61, 3700, -1].map(duration)).toEqual(["1.3 s", "42 s", "1 min 01 s", "1 h 01 min", "0.0 s"]);
});
