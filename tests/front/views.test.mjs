// What the views work out before they draw.

import assert from "node:assert/strict";
import { test } from "node:test";

import { band, number } from "./static/chart.js";
import { Cluster } from "./static/cluster.js";
import { coloursOf, rangeOf } from "./static/colours.js";
import { factsOf, words } from "./static/details.js";
import { storyOf, tailsOf } from "./static/failures.js";
import { layout } from "./static/grid.js";
import { hostsOf, together } from "./static/hosts.js";
import { ranksOf } from "./static/logs.js";
import { bytes, duration } from "./static/words.js";

const cellsOf = (plan) => plan.rows.flatMap((row) => row.cells);

test("a grid has every rank once, whichever dimensions run across", () => {
  const [labels, sizes] = [["hosts", "nodes", "gpus"], [3, 2, 40]];
  for (const across of [2, 0, [0], [0, 1], [1, 2], [0, 1, 2]]) {
    const plan = layout(labels, sizes, across);
    assert.deepEqual(cellsOf(plan).sort((a, b) => a - b), Array.from({ length: 240 }, (_, index) => index), String(across));
  }
});

test("rows and columns are named by their coordinates", () => {
  const plan = layout(["hosts", "nodes", "gpus"], [2, 2, 3], [1, 2]);
  assert.deepEqual(plan.rows.map((row) => row.label), ["hosts=0", "hosts=1"]);
  assert.deepEqual(plan.heads, ["0·0", "0·1", "0·2", "1·0", "1·1", "1·2"]);
  assert.equal(plan.corner, "nodes·gpus");
  assert.deepEqual(layout(["hosts", "gpus"], [2, 3], 0).rows.map((row) => row.cells), [[0, 3], [1, 4], [2, 5]]);
});

test("a mesh of one is one cell, and long lines are folded with the ranks they hold", () => {
  assert.deepEqual(cellsOf(layout([], [], 0)), [0]);
  assert.deepEqual(layout(["gpus"], [64], 0).rows.map((row) => row.label), ["gpus 0–15", "gpus 16–31", "gpus 32–47", "gpus 48–63"]);
});

const STATE = {
  hosts: { h1: { name: "node1" }, h2: { name: "node2" } },
  meshes: {
    p: { name: "workers", kind: "procs", labels: ["hosts", "gpus"], sizes: [2, 2], strides: [2, 1], offset: 0, hosts: ["h1", "h2"], per_host: 2, state: "idle" },
    a: { name: "trainers", kind: "actors", class: "Trainer", labels: ["gpus"], sizes: [2], strides: [1], offset: 2, on: "p", state: "idle" },
  },
  ranks: { p: { 3: { state: "busy", endpoint: "trainers.step", since: 90, pid: 12, cpu: 0.5, memory: 1 << 30 } }, a: { 1: { state: "busy", endpoint: "step", since: 90, queue: 2 } } },
  failures: {},
  sessions: { s: { mesh: "a", rank: 1, file: "train.py", line: 3, function: "step" } },
};
const CLUSTER = { state: STATE, now: () => 100 };

test("ranks are summed up by their hosts, the worst on top", () => {
  const hosts = hostsOf(STATE, STATE.meshes.p, ["hosts", "gpus"], [2, 2], (index) => index);
  assert.deepEqual([hosts.names, hosts.on(1), hosts.inner], [["node1", "node2"], [2, 3], { labels: ["gpus"], sizes: [2] }]);
  assert.equal(hosts.of(3), 1);
  assert.deepEqual(together(STATE, "p", hosts.on(1)), { state: "busy", parts: [["busy", 0.5], ["idle", 0.5]], counts: { idle: 1, busy: 1 } });
  assert.equal(hostsOf(STATE, { ...STATE.meshes.p, hosts: ["h1"], per_host: 4 }, ["gpus"], [4], (index) => index), null);
});

test("a rank is told with its actors, an actor with its process", () => {
  const proc = Object.fromEntries(factsOf(CLUSTER, "p", STATE.meshes.p, 3));
  assert.equal(proc.state, "busy with trainers.step, 10 s");
  assert.equal(proc.host, "node2");
  assert.equal(proc.process, "pid 12 · CPU 50 % · 1.0 GB");
  assert.equal(proc.trainers, "Trainer · busy with step · 2 waiting");
  const actor = Object.fromEntries(factsOf(CLUSTER, "a", STATE.meshes.a, 1));
  assert.equal(actor.process, proc.process);
  assert.equal(actor["stopped at"], "train.py:3 in step");
  assert.equal(words({ stopped: "by you" }, { state: "busy" }), "stopped");
});

test("what was saved of one mesh is enough to tell of its ranks", () => {
  const { hosts, meshes, ranks, failures } = STATE;
  const cluster = new Cluster({ send: () => {}, onMessage: () => {} }, { now: 100, state: { hosts, meshes, ranks, failures } });
  assert.equal(Object.fromEntries(factsOf(cluster, "p", meshes.p, 3)).state, "busy with trainers.step, 10 s");
});

test("ranks are picked by number, by range and by dimension; what means nothing is said to", () => {
  const of = (text) => ranksOf(text, ["hosts", "gpus"], [2, 4]);
  assert.equal(of("  "), null);
  assert.deepEqual(of("0, 4-6"), [0, 4, 5, 6]);
  assert.deepEqual(of("hosts=1"), [4, 5, 6, 7]);
  assert.deepEqual(of("hosts=0 gpus=1:3"), [1, 2]);
  assert.deepEqual(of("gpus=:1"), [0, 4]);
  assert.deepEqual(of("6-99"), [6, 7]);
  for (const wrong of ["all", "1-", "cpus=1", "gpus="]) assert.equal(of(wrong), undefined, wrong);
});

test("what there is to colour by follows what is known, and all of it lies within the range", () => {
  const told = { values: new Map([["loss", new Map([[0, -1], [1, 3]])]]) };
  const colours = coloursOf({ 0: { cpu: 0.5 }, 1: { memory: 5 } }, told);
  assert.deepEqual(Object.keys(colours), ["cpu", "memory", "told:loss"]);
  assert.deepEqual(rangeOf(colours.cpu, [0.5, 2]), [0, 2]);
  assert.deepEqual(rangeOf(colours["told:loss"], [-1, undefined, 3, NaN]), [-1, 3]);
  assert.deepEqual(rangeOf(colours["told:loss"], []), [0, 1]);
});

test("lines of several ranks give a mean with a band", () => {
  const lines = [{ points: [[0, 1], [1, 3]] }, { points: [[0, 3], [2, 5]] }];
  assert.deepEqual(band(lines), [[0, 2, 1, 3], [1, 3, 3, 3], [2, 5, 5, 5]]);
});

test("a failure is told with where, when, who was told, and what to do while it is open", () => {
  const one = { host: "h1", pid: 7, at: 50, detected: 52, told: [["trainers", "asked"], ["trainers", "not handled"], ["<root>", "shown"]], also: ["workers"], next: "heal_mesh(trainers)", state: "open", oom: true };
  const story = Object.fromEntries(storyOf(CLUSTER, one));
  assert.equal(story.what, "the host killed it because it ran out of memory");
  assert.equal(story.where, "host node1, pid 7");
  assert.match(story.since, /, noticed 2\.0 s later$/);
  assert.equal(story.reported, "trainers was asked; then trainers did not handle it; then shown here, since no call waited");
  assert.equal(story.next, "heal_mesh(trainers)");
  assert.equal(Object.fromEntries(storyOf(CLUSTER, { ...one, state: "healed" })).next, undefined);
});

test("a failure of several ranks is told with all processes, and equal lines once", () => {
  const told = [["a call", "asked"], ["<root>", "shown"]];
  const one = { ranks: [0, 1], processes: [["h1", [7, 8]], ["h9", []]], at: 50, told, texts: [["gpus=0", "bad"]], last_lines: ["x"], state: "open" };
  const story = Object.fromEntries(storyOf(CLUSTER, one));
  assert.equal(story.where, "host node1, pids 7, 8; host h9");
  assert.equal(story.reported, "raised by the call that waited");
  assert.equal(story["gpus=0"], "bad");
  assert.deepEqual(tailsOf(one), [["last lines of each", ["x"]]]);
  assert.deepEqual(tailsOf({ ...one, lines: [["gpus=0", ["x"]], ["gpus=1", ["y"]]] }), [["last lines of gpus=0", ["x"]], ["last lines of gpus=1", ["y"]]]);
});

test("numbers, sizes and times are short", () => {
  assert.deepEqual([0, 0.00001, 3.14159, 12345678].map(number), ["0", "1.0e-5", "3.142", "1.2e+7"]);
  assert.deepEqual([5 << 20, 3 * 2 ** 30].map(bytes), ["5 MB", "3.0 GB"]);
  assert.deepEqual([1.25, 42, 61, 3700, -1].map(duration), ["1.3 s", "42 s", "1 min 01 s", "1 h 01 min", "0.0 s"]);
});
